"""A run's folder: what was asked, on what it ran, what came out."""

from __future__ import annotations

import dataclasses
import json
import platform
from importlib.metadata import version
from pathlib import Path

import numpy
import torch

from silodp.core.errors import BadInput


def make_folder(folder: Path) -> None:
    """Makes the folder, or says in one sentence why it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInput(f"the output folder {folder} cannot be written ({error.strerror}); choose another with --out") from None


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
        path.write_text(json.dumps(wanted, indent=1) + "\n")


def write_environment(folder: Path, *, noise: str) -> None:
    """environment.json: versions, machine and the kind of noise that was used."""
    facts = {
        "silodp": version("silodp"), "python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__,
        "dp-accounting": version("dp-accounting"), "machine": platform.machine(), "system": platform.system(),
        "threads": torch.get_num_threads(), "cuda": torch.cuda.is_available(), "noise": noise,
    }  # fmt: skip
    (folder / "environment.json").write_text(json.dumps(facts, indent=1) + "\n")
