"""Do the officer's work on a whole ledger: witness, backup, restore, move, check.

A **witness** is a file elsewhere (a share of another machine, another silo's folder). It is brought
up to the head of what leaves before anything leaves. A rollback of this machine, ledger and anchor
together, does not roll back the witness. The ledger is then refused.

Formal guarantees: a restored ledger continues only if the witness has seen exactly its head, so
that no answer after the backup was ever sent; or with nothing left to spend. Without a witness it
cannot be proved what was answered after the backup, so the same budget might be spent twice. Then
only a write-off is possible.

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
    """The ledger's file without the check against anchor and witness, on which its officer decides
    here.
    """

    def _check_seen(self, connection: sqlite3.Connection, state: LedgerState) -> int:
        return -1


def appoint(path: Path, witness: Path, *, anchor: Path | None = None) -> None:
    """Appoint a witness. Raise BadInput if it is the anchor or cannot be used.

    From now on the witness must have seen every head before anything leaves. Nothing leaves while
    it cannot be written. The previous witness records that it was replaced, since it would
    otherwise confirm every backup from its own time.
    """
    file = LedgerFile(path, anchor)
    witness = Path(witness).absolute()
    with file.change(explain=True) as connection:
        state = file.state
        if file.anchor(state.settings).resolve() == witness.resolve():
            raise Altered(
                f"{witness} is its anchor; choose a witness elsewhere, best on another machine"
            )
        if witness.exists():
            check_seen(connection, state, witness, "witness")
        write_witness(witness, state)
        before = state.closing.witness
        entry = file.append(connection, "witness", event={"file": str(witness)})
        if before and Path(before).absolute() != witness:
            write_witness(Path(before), state, entry)


def backup(path: Path, to: Path, *, anchor: Path | None = None) -> tuple[int, str]:
    """Copy the whole ledger to a new file, for its owner alone. Return the copy's count and head.

    Raise BadInput if the file exists or the ledger is refused.
    """
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
            count_and_head = (file.state.sequence, file.state.head)
        with open(to, "rb") as copied:
            os.fsync(copied.fileno())
    return count_and_head


def restore(copy: Path, path: Path, *, anchor: Path | None = None) -> str:
    """Put the backup in the ledger's place. Return "" if its witness confirms it, else why not.

    A refused ledger file at the path is renamed. Raise BadInput if the file there is intact.
    """
    if not copy.is_file():
        raise BadInput(f"there is no backup at {copy}; give the file of `silodp ledger backup`")
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
    """Open a restored ledger if its witness has seen exactly the backup's head. Return why not, or
    "".
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
                last_seen = check_seen(connection, file.state, Path(closing.witness), "witness")
            except Altered as error:
                return str(error)
            if last_seen != closing.restored_at[0]:
                return (
                    f"its witness {closing.witness} has last seen entry {last_seen}, and not entry "
                    f"{closing.restored_at[0]}, the backup's last"
                )
            event = {"witness": closing.witness, "count": last_seen}
            file.append(connection, "confirm", event=event)
        file.pin()
    return ""


def write_off(path: Path, *, anchor: Path | None = None) -> None:
    """Write off the rest of the budget for good.

    Stored answers may be repeated. Nothing new is answered.
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
    """End the ledger with a tombstone. Only the private half of the arrival key can continue it.

    Raise BadInput if the arrival key is malformed.
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
    """Continue a moved ledger at its new place, where its arrival key was made.

    Raise BadInput if it was not buried, or for another key.
    """
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
                # The ledger has an anchor here only if it has been on this machine before.
                if what == "witness" or place.exists():
                    check_seen(connection, file.state, place, what)
            file.append(
                connection, "arrive", event={"signature": signed(key, "arrive", file.state.head)}
            )
        file.pin()


def look(path: Path, *, anchor: Path | None = None) -> Iterator[str]:
    """Yield a sentence for everything that is wrong with the ledger.

    These include the errors at which `verify` stops, and others that it does not check.
    """
    for ending in ("-journal", "-wal", "-shm"):
        if os.path.lexists(f"{path}{ending}"):
            yield (
                f"{path}{ending} exists: a gate is at work, or was killed; the next gate to open "
                "the ledger settles it."
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
            for what, place in file.places(state):
                try:
                    check_seen(connection, state, place, what)
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
            "warning: the rest of its budget was written off; it repeats its answers, and "
            "answers nothing new."
        )


def _put_aside(path: Path, anchor: Path | None) -> None:
    """Rename a refused ledger file. Raise BadInput if the file is intact."""
    file = LedgerFile(path, anchor)
    try:
        file.snapshot()
    except BadInput:
        os.replace(path, f"{path}.{datetime.now(UTC):%Y%m%dT%H%M%S}.lost")
        return
    raise BadInput(
        f"the ledger {path} is intact and agrees with its anchor: there is nothing to restore"
    )
