"""A run's folder: what was asked, on what it ran, what came out."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy
import torch

from silodp.core import native
from silodp.core.errors import BadInput

OF_TRAINING = (
    "report.html", "evaluations.jsonl", "request.json", "records.json", "model.safetensors", "transcript.safetensors", "transcript.jsonl",
    "environment.json", "progress.jsonl", "run.json", "spent.json.part", "spent.json",
)  # fmt: skip
"""What `train`, and `evaluate` and `report` after it, write. The price goes last: killed on the way, a folder still says what was spent."""


def make_folder(folder: Path) -> None:
    """Makes the folder, or says in one sentence why it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInput(f"the output folder {folder} cannot be written ({error.strerror}); choose another with --out") from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time. The folder itself is what is locked, so that no file is added to it."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BadInput(f"the run folder {folder} cannot be opened ({error.strerror}); give another") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def refuse_others(folder: Path) -> None:
    """BadInput if the folder holds a run of another kind than training's, which goes on where it stopped and so must not be mixed with one."""
    if any((folder / name).exists() for name in ("config.json", "journal")):
        raise BadInput(f"{folder} holds a comparison, a tuning or a run over silos; choose another --out")


def refuse_runs(folder: Path) -> None:
    """The other way round."""
    if any((folder / name).exists() for name in ("run.json", "spent.json")):
        raise BadInput(f"{folder} holds a run of `silodp train` or `federation run`; choose another --out")


def clear_folder(folder: Path) -> None:
    """Removes what an earlier training run left, and nothing else: its evaluations beside a new run's price would be read as paid by it.

    progress.jsonl is emptied, not removed, since whoever trains holds a lock on it.
    """
    with locked(folder):
        for name in OF_TRAINING:
            if name != "progress.jsonl":
                _remove(folder / name)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(f"{path} of an earlier run cannot be removed ({error.strerror}); choose another --out") from None


def open_folder(folder: Path, config: object) -> None:
    """Makes the folder, or continues it if it holds the same configuration; another configuration is refused, so nothing is lost."""
    make_folder(folder)
    wanted = json.loads(json.dumps(dataclasses.asdict(config), allow_nan=True))  # type: ignore[call-overload]
    path = folder / "config.json"
    if path.exists():
        found = json.loads(path.read_text())
        differs = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        if differs:
            raise BadInput(
                f"{folder} holds a run with another {', '.join(differs)}; choose another --out, or remove the folder to start again"
            )
    else:
        refuse_runs(folder)
        path.write_text(json.dumps(wanted, indent=1) + "\n")


def write_environment(folder: Path, *, noise: str) -> None:
    """environment.json: versions, machine and the kind of noise that was used."""
    facts = {
        "silodp": version("silodp"), "python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__,
        "dp-accounting": version("dp-accounting"), "machine": platform.machine(), "system": platform.system(),
        "threads": torch.get_num_threads(), "cuda": torch.cuda.is_available(), "native": native.library() is not None, "noise": noise,
    }  # fmt: skip
    (folder / "environment.json").write_text(json.dumps(facts, indent=1) + "\n")
