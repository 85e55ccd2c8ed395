"""The folder of a run in one process: when it may be written, where it is, and what is recorded
about the machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy
import torch

from silodp.core.errors import BadInput
from silodp.engine import native
from silodp.host import atomic
from silodp.host.portable import folder_lock
from silodp.runs import Kind, RunFolder, State


def make_folder(folder: Path) -> None:
    """Create the folder. Raise BadInput if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInput(
            f"the output folder {folder} cannot be written ({error.strerror}); choose "
            "another with --out"
        ) from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait for the lock of the folder, and keep it in the body. Raise BadInput if the folder cannot
    be opened.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(folder))
        except OSError as error:
            raise BadInput(
                f"the run folder {folder} cannot be opened ({error.strerror}); give another"
            ) from None
        yield


def refuse_others(folder: Path) -> None:
    """Raise BadInput if the folder has a run that is not a training. Other runs resume in their own
    folder, and must not be mixed with a training.
    """
    if RunFolder(folder).kind() not in (Kind.NONE, Kind.TRAINING):
        raise BadInput(
            f"{folder} contains a comparison, a tuning or a run over silos; choose another --out"
        )


def refuse_runs(folder: Path) -> None:
    """Raise BadInput if the folder has a run that is not a comparison or a tuning."""
    if RunFolder(folder).kind() not in (Kind.NONE, Kind.COMPARISON, Kind.TUNING):
        raise BadInput(
            f"{folder} contains a run of `silodp train` or `federation run`; choose another --out"
        )


def begin(folder: Path) -> None:
    """Clear the folder for a new run. Raise BadInput if it has a run already.

    The caller has the lock on the progress. Seed and mark are written before the description, and
    so before the first question. Without a description they are left from a start that asked
    nothing.
    """
    files = RunFolder(folder)
    if files.state_at_rest() is not State.NOTHING:
        raise BadInput(
            f"{folder} contains a run already, and silodp does not overwrite runs; choose another "
            "--out"
        )
    files.record_mark.unlink(missing_ok=True)
    files.seed.unlink(missing_ok=True)


def go_on(folder: Path) -> None:
    """Raise BadInput unless the run in the folder is still interrupted.

    The caller has the lock on the progress. An ended run cannot be resumed, because the seed of its
    noise is deleted.
    """
    if RunFolder(folder).state_at_rest() is not State.INTERRUPTED:
        raise BadInput(
            f"the run in {folder} has ended by now, and silodp does not overwrite runs; look at "
            "its result, or start another with --new"
        )


def folder_for(given: Path | None, first: Path, *, new: bool) -> Path:
    """Return the folder of a new run: the given folder, or else `first` or the next of first-2,
    first-3, ...

    Raise BadInput if the given folder has a run. Raise it also if the last run was interrupted,
    unless `new` is true: that run has been paid for, so a second run beside it needs a decision.
    """
    last = _last(given, first)
    refuse_others(last)
    state = RunFolder(last).state()
    if state is State.INTERRUPTED and (given or not new):
        if given:
            option = "another --out"
        else:
            option = "--new"
        raise BadInput(
            f"{last} contains an interrupted run; `silodp train --resume --out {last}` resumes it, "
            f"and {option} starts another at its full price"
        )
    if given and state:
        raise BadInput(
            f"{given} contains a run already ({state}), and silodp does not overwrite runs; choose "
            "another --out"
        )
    if not state:
        return last
    return first.with_name(f"{first.name}-{_number(last, first) + 1}")


def folder_to_resume(given: Path | None, first: Path) -> Path:
    """Return the given folder, or the latest of the default folders, with an interrupted run.

    Raise BadInput if there is none.
    """
    if given:
        candidates = [given]
    else:
        candidates = _numbered(first)
    for folder in reversed(candidates):
        state = RunFolder(folder).state()
        if state is State.INTERRUPTED:
            refuse_others(folder)
            return folder
        if given:
            content = {
                State.NOTHING: "no run",
                State.RUNNING: "a run that is in progress",
                State.FINISHED: "a finished run",
                State.ENDED: "a run that ended by itself",
            }
            raise BadInput(
                f"{given} contains {content[state]}, and --resume takes one that was "
                "interrupted; give its folder with --out"
            )
    raise BadInput(
        f"there is no interrupted run in {first.parent}; give its folder with --out, or leave "
        "out --resume"
    )


def unused(given: Path | None, first: Path, result: str) -> Path:
    """Return a folder without this file of results: the given folder, or else `first` or the next
    of first-2, first-3, ...

    Raise BadInput if the given folder has the file.
    """
    last = _last(given, first)
    if not (last / result).exists():
        return last
    if given:
        raise BadInput(
            f"{given} contains {result} already, and silodp does not overwrite files; choose "
            "another --out"
        )
    return first.with_name(f"{first.name}-{_number(last, first) + 1}")


def _last(given: Path | None, first: Path) -> Path:
    """Return the given folder, or else the latest of the default folders, or `first`."""
    if given:
        return given
    numbered = _numbered(first)
    if numbered:
        return numbered[-1]
    return first


def _numbered(first: Path) -> list[Path]:
    """Return those of `first`, first-2, first-3, ... that exist, the latest last."""
    if first.parent.is_dir():
        beside = first.parent.iterdir()
    else:
        beside = ()
    return sorted(
        (path for path in beside if _number(path, first)), key=lambda path: _number(path, first)
    )


def _number(path: Path, first: Path) -> int:
    """Return the number of a default folder, 1 for `first`, or 0 for any other path."""
    number = path.name.removeprefix(f"{first.name}-")
    if path.name == first.name:
        return 1
    if number != path.name and number.isdecimal():
        return int(number)
    return 0


def open_folder(folder: Path, config: object) -> None:
    """Create the folder, or continue it if it has the same configuration. Raise BadInput if it has
    another one, so that no result is lost.
    """
    make_folder(folder)
    wanted = json.loads(json.dumps(dataclasses.asdict(config), allow_nan=True))  # type: ignore[call-overload]
    path = RunFolder(folder).configuration
    if path.exists():
        existing = json.loads(path.read_text())
        names = wanted.keys() | existing.keys()
        differs = sorted(name for name in names if wanted.get(name) != existing.get(name))
        if differs:
            raise BadInput(
                f"{folder} contains a run with another {', '.join(differs)}; choose another "
                "--out, or remove the folder to start again"
            )
    else:
        refuse_runs(folder)
        atomic.write_json(path, wanted, durable=True)


def seeded(seed: int | None) -> str:
    """Return the description of a simulation's noise."""
    if seed is None:
        return "seeded pseudo-random float noise, seed from the operating system"
    return f"seeded pseudo-random float noise, seed {seed}"


def write_environment(folder: Path, *, noise: str) -> None:
    """Write environment.json: versions, machine, and the kind of noise that was used."""
    facts = {
        "silodp": version("silodp"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "dp-accounting": version("dp-accounting"),
        "machine": platform.machine(),
        "system": platform.system(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_available(),
        "native": native.library() is not None,
        "noise": noise,
    }
    atomic.write_json(RunFolder(folder).environment, facts)
