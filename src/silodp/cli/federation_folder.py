"""A federation's folder through mishaps. A failed start does not block the next one, and no run
starts beside an unfinished one.

While `up` makes a federation, the folder has making.json. Afterwards it has stopped.json, and
federation.json while the federation runs. No gate starts before the folder is complete. So the
files of a failed start have never answered a query, and are removed after a check of their ledgers.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from silodp.cli.federation_files import STOPPED, state_in
from silodp.cli.interrupted import same_command
from silodp.cli.options import check_writable
from silodp.core.errors import BadInput
from silodp.host import atomic
from silodp.runs import Kind, RunFolder, State

MAKING = "making.json"
OWN = ("asker.key", "data", "silos", "shuffler", "state", "engine", "logs")
"""The files that `up` makes, without those that record its progress."""


# --- up ------------------------------------------------------------------------------------------


def stopped(folder: Path, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the federation in the folder if `asked` made it and it has run before. Return None if
    a new one may be made there. Raise BadInput otherwise.

    A federation that has never run, because its start failed, is made again: a file that its
    policies know by hash may have been fixed.
    """
    state = state_in(folder, STOPPED)
    if state and state.get("ran", True):
        if (made := state.get("asked", {})) == asked:
            return state
        differs = ", ".join(
            other := sorted(name for name in asked if made.get(name) != asked[name])
        )
        if set(other) <= {"model", "prox", "feature_map", "schema"}:
            raise BadInput(
                f"{folder} has a stopped federation that was made with another "
                f"{differs}. Continue it by `silodp federation up --folder {folder}` "
                "without other options. For another study on the same records and "
                "ledgers, use `silodp federation propose` and `silodp silo approve`"
            )
        raise BadInput(
            f"{folder} has a stopped federation that was made with another {differs}. "
            f"Continue it by `silodp federation up --folder {folder}` without other "
            "options, or choose another --folder for a new one"
        )
    if state or (folder / MAKING).exists():
        unmake(folder)
    elif taken := [name for name in OWN if os.path.lexists(folder / name)]:
        raise BadInput(
            f"{folder} already has {', '.join(taken)}, and silodp does not overwrite "
            "files; choose another --folder"
        )
    return None


@contextlib.contextmanager
def making(folder: Path) -> Iterator[None]:
    """Run the making of a federation's files. After any interruption, even kill -9, the next `up`
    can start again.
    """
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write(folder / MAKING, "{}\n")
    except OSError as error:
        raise BadInput(
            f"{folder} cannot be made: {error.strerror}; choose another --folder"
        ) from None
    try:
        yield
    except BaseException:
        with contextlib.suppress(BadInput):
            unmake(folder)
            if new:
                folder.rmdir()
        raise
    (folder / MAKING).unlink()


def unmake(folder: Path) -> None:
    """Remove the files of a start that never came to run. Raise BadInput, and remove nothing, if a
    ledger was ever charged.
    """
    from silodp.silo.ledger.identity import Registry

    for path in sorted((folder / "silos").glob("*")):
        _refuse_charged(folder, path / "ledger.db")
    known = Registry()
    if known.folder.is_dir():
        with known.locked():
            for entry in list(known):
                if entry.path.is_relative_to(folder / "silos"):
                    known.forget(entry.ledger)
    try:
        for name in OWN:
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        # These are removed last, so that the next start continues after a kill.
        for name in (STOPPED, MAKING):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(
            f"{error.filename or folder} of a start that failed cannot be removed "
            f"({error.strerror}); remove {folder}"
        ) from None


def _refuse_charged(folder: Path, path: Path) -> None:
    from silodp.silo.ledger.durable import DurableLedger

    try:
        spent = any(entry.act == "charge" for entry in DurableLedger.open(path).entries())
    except BadInput as error:
        anchor = Path(f"{path}.anchor")
        # After a kill -9 while the ledger was made, its anchor shows that there was never an entry:
        # the anchor is written first.
        try:
            spent = anchor.exists() and json.loads(anchor.read_text())["count"] != 0
        except (OSError, ValueError, KeyError, TypeError):
            spent = True
        if spent:
            raise BadInput(
                f"{folder} has an unreadable ledger that may have been charged: "
                f"{error}; or choose another --folder"
            ) from None
    if spent:
        raise BadInput(
            f"the ledger {path} has charges. Continue it by `silodp federation up "
            f"--folder {folder}` without other options, or choose another --folder"
        )


# --- run -----------------------------------------------------------------------------------------


def place_of_run(given: Path | None, runs: Path, *, resume: bool, new: bool) -> Path:
    """Return the folder for a run: the given one, else with `resume` the latest unfinished run's,
    else the next number in `runs`.

    Raise BadInput if the last run there was paid for and is unfinished, unless `new` is given.
    """
    if resume and new:
        raise BadInput("--resume and --new exclude each other; give one of them")
    there = _numbered(runs)
    if given:
        return given
    if resume:
        if place := next(
            (place for place in reversed(there) if RunFolder(place).state() is State.INTERRUPTED),
            None,
        ):
            return place
        raise BadInput(
            f"there is no interrupted run in {runs}; give its folder with --out, or "
            "leave out --resume"
        )
    if not there:
        return runs / "1"
    last = there[-1]
    state = RunFolder(last).state()
    if not new and state is State.RUNNING:
        raise BadInput(
            f"the run in {last} is still running; wait for its end, or start another, at its full "
            "price, with --new"
        )
    if not new and state is State.INTERRUPTED:
        raise BadInput(
            f"the run in {last} is unfinished; resume it with --resume --out {last}, or start "
            "another, at its full price, with --new"
        )
    return runs / str(int(last.name) + 1)


def kept_in(place: Path, *, resume: bool, given: bool) -> str:
    """Return the sentence on an interrupted run: where its answers are, and the command that
    resumes it.
    """
    options: list[str | Path] = []
    if not resume:
        options.append("--resume")
    if not given:
        options += ["--out", place]
    again = same_command(*options, without=("--new",))
    return (
        f"the silos' answers are in {place}, and `{again}` resumes the run without a second price"
    )


def refuse_taken(place: Path) -> None:
    """Raise BadInput unless a new run can be written there."""
    if RunFolder(place).kind() is not Kind.NONE:
        raise BadInput(
            f"{place} already contains a run; resume it with --resume, or choose another --out"
        )
    check_writable(place)


def last_run(runs: Path) -> Path:
    there = _numbered(runs)
    if not there:
        raise BadInput(
            f"there is no run in {runs}; start one by `silodp federation run`, or give its folder"
        )
    return there[-1]


def _numbered(runs: Path) -> list[Path]:
    return sorted(
        (path for path in runs.glob("[0-9]*") if path.name.isdecimal()),
        key=lambda path: int(path.name),
    )
