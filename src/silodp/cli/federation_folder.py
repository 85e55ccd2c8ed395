"""A federation's folder through mishaps: a start that fails leaves nothing in the way of the next
one, and no run is begun beside an unfinished one.

While `up` makes a federation the folder has making.json; once it is made it has stopped.json, and
federation.json while it runs. No gate is started before, so what a broken start leaves has never
said anything, and is taken away: after a look into its ledgers.
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
"""What `up` makes, besides the files that say how far it came."""


# --- up ------------------------------------------------------------------------------------------


def stopped(folder: Path, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """The federation in the folder if it was made by `asked` and has run before; None if a new one
    may be made there; else BadInput.

    One that has never run, since its start failed, is made anew: what failed may have been mended
    in a file that its policies know by hash.
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
                f"{folder} has a federation that was stopped and was made with another "
                f"{differs}; `silodp federation up --folder {folder}` alone goes on "
                "with it. Another study for the same records is proposed by `silodp "
                "federation propose` and approved by `silodp silo approve`, and "
                "the ledgers go on"
            )
        raise BadInput(
            f"{folder} has a federation that was stopped and was made with another "
            f"{differs}; `silodp federation up --folder {folder}` alone "
            "goes on with it, and another --folder starts a new one"
        )
    if state or (folder / MAKING).exists():
        unmake(folder)
    elif taken := [name for name in OWN if os.path.lexists(folder / name)]:
        raise BadInput(
            f"{folder} has {', '.join(taken)} already, and nothing is ever written over; "
            "choose another --folder"
        )
    return None


@contextlib.contextmanager
def making(folder: Path) -> Iterator[None]:
    """Around all that `up` makes before its first process: whatever stops it, kill -9 too, the next
    `up` finds the way clear.
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
    """Takes away what a start has made that never came to run; BadInput, and nothing is taken, if a
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
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(
                missing_ok=True
            )
        for name in (
            STOPPED,
            MAKING,
        ):  # the last: killed on the way, the next start goes on from here
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
        # a kill -9 while the ledger was made: its anchor, which is written first, says that there
        # was never an entry
        try:
            spent = anchor.exists() and json.loads(anchor.read_text())["count"] != 0
        except (OSError, ValueError, KeyError, TypeError):
            spent = True
        if spent:
            raise BadInput(
                f"{folder} has a ledger that cannot be read, and may have been charged: "
                f"{error}; or choose another --folder"
            ) from None
    if spent:
        raise BadInput(
            f"the ledger {path} has charges; `silodp federation up --folder {folder}` "
            "alone goes on with it, or choose another --folder"
        )


# --- run -----------------------------------------------------------------------------------------


def place_of_run(given: Path | None, runs: Path, *, resume: bool, new: bool) -> Path:
    """The folder given; to resume, that of the latest run that has not come to its end; or the next
    numbered one in `runs`.

    BadInput if the last run there was paid for and has not come to its end, unless a `new` one is
    wanted.
    """
    if resume and new:
        raise BadInput("--resume goes on with a run and --new starts another; give one of them")
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
            f"there is no interrupted run in {runs} to go on with; give its folder with "
            "--out, or leave out --resume"
        )
    if there:
        state = RunFolder(there[-1]).state()
    else:
        state = State.NOTHING
    if not new and state in (State.RUNNING, State.INTERRUPTED):
        how = "has not come to its end; go on with it by --resume --out " + str(there[-1])
        if state is State.RUNNING:
            how = "goes on now; wait for its end"
        else:
            how = how
        raise BadInput(
            f"the run in {there[-1]} {how}, or start another, at its full price, with --new"
        )
    return runs / str(int(there[-1].name) + 1 if there else 1)


def kept_in(place: Path, *, resume: bool, given: bool) -> str:
    """What is left of a run that is interrupted, and the command that goes on with it."""
    again = same_command(
        *(["--resume"] * (not resume)), *(["--out", place] * (not given)), without=("--new",)
    )
    return (
        f"what the silos have answered is kept in {place}, and `{again}` goes on with it, "
        "without a second price"
    )


def refuse_taken(place: Path) -> None:
    """BadInput unless a new run could be kept there."""
    if RunFolder(place).kind() is not Kind.NONE:
        raise BadInput(
            f"{place} holds a run already; go on with it by --resume, or choose another --out"
        )
    check_writable(place)


def last_run(runs: Path) -> Path:
    there = _numbered(runs)
    if not there:
        raise BadInput(
            f"there is no run in {runs}; `silodp federation run` makes one, or give its folder"
        )
    return there[-1]


def _numbered(runs: Path) -> list[Path]:
    return sorted(
        (path for path in runs.glob("[0-9]*") if path.name.isdecimal()),
        key=lambda path: int(path.name),
    )
