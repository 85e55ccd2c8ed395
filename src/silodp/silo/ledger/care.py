"""What an officer does with a ledger as a whole: appoint a witness, back it up, restore it, move it
to another machine, look for what is wrong.

A **witness** is a file elsewhere (a share of another machine, another silo's folder) that is
brought up to the head of what leaves, before anything leaves. Whoever rolls back this machine,
ledger and anchor together, does not roll back the witness, and the ledger is refused. Formal
guarantees: a restored ledger goes on only if the witness has seen exactly its head, so that no
answer after the backup was ever sent; or with nothing left to spend. Without a witness nobody can
know what was answered after the backup, so that the same budget might be spent twice: only a
write-off is left.

A **move** ends the old ledger with a tombstone that the silo's key signs. Only the key that was
made on the new machine can write the entry after it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from silodp.core.errors import BadInput
from silodp.host import atomic
from silodp.host.keys import public
from silodp.silo.ledger.chain import Altered
from silodp.silo.ledger.closing import MOVED, RESTORED, signed
from silodp.silo.ledger.file import LedgerFile, check_seen, write_anchor, write_witness
from silodp.silo.ledger.state import LedgerState

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

UNWITNESSED = (
    "no witness was appointed, so it cannot be excluded that answers were given after the "
    "backup, and that the same budget would be spent twice"
)


class _Apart(LedgerFile):
    """The file for its officer, whatever anchor and witness say: what they say is what is to be
    decided here.
    """

    def _check_seen(self, connection: sqlite3.Connection, state: LedgerState) -> int:
        return -1


def appoint(path: Path, witness: Path, *, anchor: Path | None = None) -> None:
    """From now on the witness must have seen every head before anything leaves, and nothing leaves
    while it cannot be written.

    The witness before it sees that it was replaced, or else it would go on to confirm every backup
    from its own time.
    """
    file = LedgerFile(path, anchor)
    witness = Path(witness).absolute()
    with file.change(explain=True) as connection:
        state = file.state
        if file.anchor(state.settings).resolve() == witness.resolve():
            raise Altered(
                f"{witness} is its anchor; a witness lies elsewhere, best on another machine"
            )
        if witness.exists():
            check_seen(connection, state, witness, "witness")
        write_witness(witness, state)
        before = state.closing.witness
        entry = file.append(connection, "witness", event={"file": str(witness)})
        if before and Path(before).absolute() != witness:
            write_witness(Path(before), state, entry)


def backup(path: Path, to: Path, *, anchor: Path | None = None) -> tuple[int, str]:
    """A whole copy of the ledger in a new file, for its owner alone; (count, head) of it."""
    file = LedgerFile(path, anchor)
    with file.explained():
        try:
            os.close(os.open(to, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            raise BadInput(f"{to} exists already; choose another name for the backup") from None
        with (
            file.transaction(write=False) as connection,
            contextlib.closing(sqlite3.connect(to)) as copy,
        ):
            file.sketch(connection)
            connection.backup(copy)
            found = file.state.sequence, file.state.head
        with open(to, "rb") as made:
            os.fsync(made.fileno())
    return found


def restore(copy: Path, path: Path, *, anchor: Path | None = None) -> str:
    """Puts the backup in the ledger's place: "" if its witness confirms it, else a sentence why it
    answers nothing yet.

    A file that lies there is put aside if it is refused, and left alone if it is whole.
    """
    if not copy.is_file():
        raise BadInput(f"there is no backup at {copy}")
    if _Apart(copy, anchor).snapshot().closing.closed == MOVED:
        raise BadInput(
            f"{copy} is a backup from after its gate had moved; restore one where it has moved to"
        )
    if path.exists():
        _put_aside(path, anchor)
    content = copy.read_bytes()
    atomic.write(path, content)
    path.chmod(0o600)
    file = _Apart(path, anchor)
    with file.explained():
        with file.transaction() as connection:
            file.sketch(connection)
            file.append(
                connection, "restore", event={"backup": hashlib.sha256(content).hexdigest()}
            )
        with file.transaction():
            write_anchor(file.anchor(file.state.settings), file.state)
    return confirm(path, anchor=anchor)


def confirm(path: Path, *, anchor: Path | None = None) -> str:
    """Opens a restored ledger if its witness has seen exactly the head of the backup; else a
    sentence why not.
    """
    file = _Apart(path, anchor)
    with file.explained():
        with file.transaction() as connection:
            closing = file.state.closing
            if closing.closed != RESTORED:
                raise Altered(
                    "it was not restored, or is open already: there is nothing to confirm"
                )
            if not closing.witness:
                return UNWITNESSED
            try:
                seen = check_seen(connection, file.state, Path(closing.witness), "witness")
            except Altered as error:
                return str(error)
            if seen != closing.restored_at[0]:
                return (
                    f"its witness {closing.witness} has last seen entry {seen}, and not entry "
                    f"{closing.restored_at[0]}, the backup's last"
                )
            file.append(connection, "confirm", event={"witness": closing.witness, "count": seen})
        file.pin()
    return ""


def write_off(path: Path, *, anchor: Path | None = None) -> None:
    """The rest of the budget is gone for good: what was answered may be repeated, and nothing new
    is answered.
    """
    file = _Apart(path, anchor)
    with file.explained():
        with file.transaction() as connection:
            if file.state.closing.closed == MOVED:
                file.check_open()
            file.append(connection, "write-off", event={})
        file.pin()


def bury(
    path: Path, key: Ed25519PrivateKey, arrival: str, to: str, *, anchor: Path | None = None
) -> None:
    """Ends the ledger with a tombstone, which only the holder of the arrival key's private half can
    follow.
    """
    if len(arrival) != 64 or not set(arrival) <= set("0123456789abcdef"):
        raise BadInput(
            f"the arrival key is {arrival!r}; it must be 64 hexadecimal digits, as `silodp "
            "ledger expect` prints them"
        )
    file = LedgerFile(path, anchor)
    with file.change(explain=True) as connection:
        signature = signed(key, "tombstone", file.state.head, arrival)
        file.append(
            connection,
            "tombstone",
            event={"to": to, "arrival": arrival, "key": public(key), "signature": signature},
        )


def arrive(path: Path, key: Ed25519PrivateKey, *, anchor: Path | None = None) -> None:
    """Goes on with a moved ledger at its new place, where its arrival key was made."""
    file = _Apart(path, anchor)
    with file.explained():
        with file.transaction() as connection:
            closing = file.state.closing
            if closing.closed != MOVED:
                raise Altered(
                    "it does not end with a tombstone: bury it first where it was (`silodp "
                    "ledger bury`)"
                )
            if closing.arrival != public(key):
                raise Altered("its tombstone names another arrival key than this one")
            for what, place in file.places(file.state):
                if (
                    what == "witness" or place.exists()
                ):  # an anchor of this place, if it has been here before
                    check_seen(connection, file.state, place, what)
            file.append(
                connection, "arrive", event={"signature": signed(key, "arrive", file.state.head)}
            )
        file.pin()


def look(path: Path, *, anchor: Path | None = None) -> Iterator[str]:
    """Everything that is wrong with the ledger, one sentence each: what `verify` stops at, and what
    it does not look at.
    """
    for what in ("-journal", "-wal", "-shm"):
        if os.path.lexists(f"{path}{what}"):
            yield (
                f"{path}{what} lies beside it: a gate is at work, or was killed; the next one "
                "to open the ledger settles it."
            )
    file = _Apart(path, anchor)
    if not file.path.is_file():
        yield (
            f"there is no ledger at {path}; restore it from a backup with `silodp ledger restore`."
        )
        return
    try:
        with file.explained(), file.transaction(write=False, sums=True) as connection:
            state = file.state
            for place in file.places(state):
                try:
                    check_seen(connection, state, place[1], place[0])
                except Altered as error:
                    yield f"{error}."
    except BadInput as error:
        yield f"{error}."
        return
    try:
        file.verify()
    except BadInput as error:
        yield f"{error}."
    if not state.closing.witness:
        yield (
            f"warning: {UNWITNESSED.replace('after the backup', 'after a backup')}; `silodp "
            "ledger witness` appoints one."
        )
    if state.closing.written_off:
        yield (
            "warning: the rest of its budget was written off; it repeats what it gave, and "
            "answers nothing new."
        )


def _put_aside(path: Path, anchor: Path | None) -> None:
    file = LedgerFile(path, anchor)
    try:
        file.snapshot()
    except BadInput:
        os.replace(path, f"{path}.{datetime.now(UTC):%Y%m%dT%H%M%S}.lost")
        return
    raise BadInput(
        f"the ledger {path} is whole and agrees with its anchor: there is nothing to restore"
    )
