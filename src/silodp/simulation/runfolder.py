"""A run's folder: what was asked, on what it ran, what came out."""

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
    """Makes the folder, or says in one sentence why it cannot be written."""
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
    """One process at a time."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(folder))
        except OSError as error:
            raise BadInput(
                f"the run folder {folder} cannot be opened ({error.strerror}); give another"
            ) from None
        yield


def refuse_others(folder: Path) -> None:
    """BadInput if the folder holds a run of another kind than training's, which goes on where it
    stopped and so must not be mixed with one.
    """
    if RunFolder(folder).kind() not in (Kind.NONE, Kind.TRAINING):
        raise BadInput(
            f"{folder} holds a comparison, a tuning or a run over silos; choose another --out"
        )


def refuse_runs(folder: Path) -> None:
    """The other way round."""
    if RunFolder(folder).kind() not in (Kind.NONE, Kind.COMPARISON, Kind.TUNING):
        raise BadInput(
            f"{folder} contains a run of `silodp train` or `federation run`; choose another --out"
        )


def begin(folder: Path) -> None:
    """Clear the folder for a new run. Raise BadInput if a run is there already.

    The caller has the lock on the progress. Seed and mark are written before the description, and
    so before the first question: without it they are left from a start that asked nothing.
    """
    files = RunFolder(folder)
    if files.state_at_rest() is not State.NOTHING:
        raise BadInput(
            f"{folder} already contains a run, and silodp does not overwrite files; "
            "choose another --out"
        )
    files.record_mark.unlink(missing_ok=True)
    files.seed.unlink(missing_ok=True)


def go_on(folder: Path) -> None:
    """For whoever holds it, too: BadInput unless the run there is still without its end, since its
    noise is gone with it.
    """
    if RunFolder(folder).state_at_rest() is not State.INTERRUPTED:
        raise BadInput(
            f"the run in {folder} has finished by now, and silodp does not overwrite "
            "files; use its result, or start another run with --new"
        )


def folder_for(given: Path | None, first: Path, *, new: bool) -> Path:
    """Where a new run goes: the folder given, if no run is in it, or else `first` or the next of
    first-2, first-3, ...

    An interrupted run has been paid for: a second one beside it is begun only if `new` says so.
    """
    there = [given] if given else _numbered(first)
    last = there[-1] if there else first
    refuse_others(last)
    state = RunFolder(last).state()
    if state is State.INTERRUPTED and (given or not new):
        anew = "another --out" if given else "--new"
        raise BadInput(
            f"{last} contains an interrupted run. `silodp train --resume --out {last}` "
            f"resumes it, and {anew} starts another run at its full price"
        )
    if given and state:
        raise BadInput(
            f"{given} already contains a run ({state}), and silodp does not overwrite "
            "files; choose another --out"
        )
    if not state:
        return last
    return first.with_name(f"{first.name}-{_number(last, first) + 1}")


def folder_to_resume(given: Path | None, first: Path) -> Path:
    """The folder given, or the latest of the default ones, with a run that was interrupted."""
    for folder in [given] if given else reversed(_numbered(first)):
        state = RunFolder(folder).state()
        if state is State.INTERRUPTED:
            refuse_others(folder)
            return folder
        if given:
            said = {
                State.NOTHING: "no run",
                State.RUNNING: "a run that is still running",
                State.FINISHED: "a finished run",
                State.ENDED: "a run that ended by itself",
            }
            raise BadInput(
                f"{given} contains {said[state]}, but --resume needs an interrupted "
                "run; give its folder with --out"
            )
    raise BadInput(
        f"there is no interrupted run in {first.parent}; give its folder with --out, or "
        "leave out --resume"
    )


def unused(given: Path | None, first: Path, result: str) -> Path:
    """A folder without this file of results: the one given, or BadInput; else `first` or the next
    of first-2, first-3, ...
    """
    there = [given] if given else _numbered(first)
    if not there or not (there[-1] / result).exists():
        return there[-1] if there else first
    if given:
        raise BadInput(
            f"{given} already contains {result}, and silodp does not overwrite files; "
            "choose another --out"
        )
    return first.with_name(f"{first.name}-{_number(there[-1], first) + 1}")


def _numbered(first: Path) -> list[Path]:
    """`first` and first-2, first-3, ... as far as they are there, the latest last."""
    if first.parent.is_dir():
        beside = first.parent.iterdir()
    else:
        beside = ()
    return sorted(
        (path for path in beside if _number(path, first)), key=lambda path: _number(path, first)
    )


def _number(path: Path, first: Path) -> int:
    number = path.name.removeprefix(f"{first.name}-")
    if path.name == first.name:
        return 1
    if number != path.name and number.isdecimal():
        return int(number)
    return 0


def open_folder(folder: Path, config: object) -> None:
    """Makes the folder, or continues it if it holds the same configuration; another configuration
    is refused, so nothing is lost.
    """
    make_folder(folder)
    wanted = json.loads(json.dumps(dataclasses.asdict(config), allow_nan=True))  # type: ignore[call-overload]
    path = RunFolder(folder).configuration
    if path.exists():
        found = json.loads(path.read_text())
        differs = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        if differs:
            raise BadInput(
                f"{folder} holds a run with another {', '.join(differs)}; choose another "
                "--out, or remove the folder to start again"
            )
    else:
        refuse_runs(folder)
        atomic.write_json(path, wanted, durable=True)


def seeded(seed: int | None) -> str:
    """What is said of a simulation's noise."""
    return "seeded pseudo-random float noise, " + (
        "seed from the operating system" if seed is None else f"seed {seed}"
    )


def write_environment(folder: Path, *, noise: str) -> None:
    """environment.json: versions, machine and the kind of noise that was used."""
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
