"""Read and write a ledger's two files: the SQLite file and the anchor.

The SQLite file is opened so that a commit survives a power cut. The anchor is in the same folder or
on another disk.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from silodp.core.errors import BadInput, Refused
from silodp.host import atomic
from silodp.host.sqlite import connect
from silodp.silo.ledger.chain import COLUMNS, Altered, Entry, LedgerSettings, canonical
from silodp.silo.ledger.closing import RESTORED, WHY_CLOSED
from silodp.silo.ledger.identity import Sketch, tag
from silodp.silo.ledger.released import OF, after
from silodp.silo.ledger.state import PASSED, SLACK, Known, LedgerState

APPLICATION = 0x51100DB1
TABLES = (  # by name
    "CREATE TABLE answers (sequence INTEGER PRIMARY KEY, bytes BLOB NOT NULL)",
    (
        f"CREATE TABLE entries ({COLUMNS[0]} INTEGER PRIMARY KEY, "
        f"{', '.join(f'{column} TEXT NOT NULL' for column in COLUMNS[1:])})"
    ),
    "CREATE TABLE identity (key BLOB NOT NULL, marks BLOB NOT NULL, parts BLOB NOT NULL)",
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE UNIQUE INDEX once ON entries (query_id, act) WHERE query_id <> ''",
    "CREATE TABLE partitions (sequence INTEGER PRIMARY KEY, permutation BLOB NOT NULL)",
)
ENTRIES = f"SELECT {', '.join(COLUMNS)} FROM entries"


class LedgerFile:
    """Both files, and the state that was read from them. Memory follows the file, never the
    reverse.

    Every transaction opens the file again and checks all new entries. So it sees the writes of
    other processes and of a fork, and a file that was swapped or rolled back. Methods that take a
    connection are called within a transaction.
    """

    from_checkpoint = True
    """Whether a first reading starts at the last checkpoint."""

    def __init__(self, path: Path, anchor: Path | None) -> None:
        self.path = Path(path).resolve()
        self._given_anchor = anchor and Path(anchor).resolve()
        self._lock = threading.RLock()
        self._state: LedgerState | None = None
        self._anchored = -1

    @property
    def state(self) -> LedgerState:
        """Return the state as of the last transaction. Raise Altered if there was none."""
        if self._state is None:
            raise Altered("it has not been read")
        return self._state

    def locked(self) -> threading.RLock:
        """Return the lock under which a thread reads what others may be adding to the state."""
        return self._lock

    def snapshot(self) -> LedgerState:
        """Return a copy of the file's present state, which does not change any more.

        Raise BadInput if the file is refused.
        """
        with self.explained(), self.transaction(write=False):
            state = copy.copy(self.state)
            state.buckets = dict(state.buckets)
            state.closing = copy.copy(state.closing)
            return state

    def anchor(self, settings: LedgerSettings) -> Path:
        """Return the path of the anchor."""
        return Path(self._given_anchor or settings.anchor or f"{self.path}.anchor")

    def write_new(self, settings: LedgerSettings, sketch: Sketch) -> None:
        """Write the tables of a ledger without entries into an empty file, in one transaction."""
        with contextlib.closing(connect(self.path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            for table in TABLES:
                connection.execute(table)
            connection.executemany("INSERT INTO meta VALUES (?, ?)", settings.rows().items())
            connection.execute(
                "INSERT INTO identity VALUES (?, ?, ?)", (sketch.key, sketch.rows, sketch.profiles)
            )
            connection.execute("COMMIT")

    # --- transactions ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(
        self, *, write: bool = True, sums: bool = False, pin: bool = False
    ) -> Iterator[sqlite3.Connection]:
        """Open the file, check all that is new in it, and commit at the end.

        With `pin`, anchor and witness are brought up to the commit before the next statement runs.

        Formal guarantee: an anchor never goes back.

         1. A transaction that writes begins with SQLite's exclusive lock, which no other process
            gets while any lock is on the file.
         2. The commit leaves a shared lock on the file, since a statement is still reading.
         3. The anchor is written before that statement is closed. So between a commit and its
            anchor no other process can begin to write, and the anchors are written in the order
            of the commits.
        """
        begin = "BEGIN EXCLUSIVE" if write else "BEGIN"
        with self._lock, contextlib.closing(connect(self.path)) as connection:
            connection.execute(begin)
            try:
                self._catch_up(connection, sums=sums)
                yield connection
                reading = connection.execute("SELECT name FROM meta")
                reading.fetchone()  # of several rows, so that the statement goes on
                if not pin:
                    reading.close()
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            if pin and self._anchored != self.state.sequence:
                self._replay(connection, self.state, sums=sums)
                self._write_places()
            reading.close()

    @contextlib.contextmanager
    def change(self, *, explain: bool = False) -> Iterator[sqlite3.Connection]:
        """Open a transaction that is in anchor and witness before the next statement runs.

        Raise an error if the ledger is closed. Errors become one fixed code or, with `explain`, a
        sentence for people.
        """
        if explain:
            failing = self.explained()
        else:
            failing = self.failing_closed()
        with failing, self.transaction(pin=True) as connection:
            self.check_open()
            yield connection

    def check_open(self) -> None:
        """Raise Altered if the ledger was restored and not confirmed, or has moved away."""
        if closed := self.state.closing.closed:
            raise Altered(WHY_CLOSED[closed])

    def _catch_up(self, connection: sqlite3.Connection, *, sums: bool) -> None:
        if connection.execute("PRAGMA application_id").fetchone() != (APPLICATION,):
            raise Altered("the file is empty or is not a ledger")
        rows = connection.execute("SELECT sql FROM sqlite_master ORDER BY name")
        if tuple(sql for (sql,) in rows) != TABLES:
            raise Altered("its tables are not those of a ledger")
        pages, size = (
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "page_size")
        )
        if self.path.stat().st_size != pages * size:
            raise Altered("the file is cut short")
        settings = LedgerSettings.of(dict(connection.execute("SELECT name, value FROM meta")))
        if self._state and settings.genesis != self._state.settings.genesis:
            raise Altered(
                "it is another ledger than the one that was opened, or its settings were altered"
            )
        if self._state is None and not sums and self.from_checkpoint:
            state = _at_checkpoint(connection, settings)
            if state is not None:
                self._replay(connection, state, sums=sums)
                if state.mark <= self._anchored:
                    return
                # A checkpoint that anchor or witness have not seen may be forged.
                self._state = None
        self._replay(connection, self._state or LedgerState(settings), sums=sums)

    def _replay(self, connection: sqlite3.Connection, state: LedgerState, *, sums: bool) -> None:
        if _hash_at(connection, state.sequence, state) != state.head:
            raise Altered(f"entry {state.sequence} is gone or is not the one that was there before")
        for row in connection.execute(
            f"{ENTRIES} WHERE sequence > ? ORDER BY sequence", (state.sequence,)
        ):
            entry = Entry.of(row)
            if not self._shown(state, entry):
                break
            state.apply(entry, sums=sums)
        # No replay reads entries before the first, but every list of entries would show them.
        if connection.execute("SELECT min(sequence) FROM entries").fetchone()[0] not in (None, 1):
            raise Altered("it has entries before its first")
        state.check_total()
        self._anchored = self._check_seen(connection, state)
        self._state = state

    def _shown(self, state: LedgerState, entry: Entry) -> bool:
        """Return whether the entry, and all that follow it, may be read yet."""
        return True

    def _check_seen(self, connection: sqlite3.Connection, state: LedgerState) -> int:
        """Return the entry count that anchor and witness have both seen. The chain may be ahead of
        it.

        Raise Altered if the chain differs from what one of them recorded at its count.
        """
        return min(check_seen(connection, state, place, what) for what, place in self.places(state))

    def places(self, state: LedgerState) -> list[tuple[str, Path]]:
        """Return the files that record counts and heads too, as (kind, path).

        The anchor records those of the whole chain. The witness that the officer has appointed
        records those of what leaves (`released`).
        """
        places = [("anchor", self.anchor(state.settings))]
        if state.closing.witness:
            places.append(("witness", Path(state.closing.witness)))
        return places

    def pin(self) -> None:
        """Bring anchor and witness up to the last commit, under the file's lock so that they never
        go back.
        """
        with self._lock:
            if self._anchored == self.state.sequence:
                return
            with self.transaction():
                self._write_places()

    def _write_places(self) -> None:
        """Bring anchor and witness up to the state. Called under a lock on the file."""
        if self._anchored >= self.state.sequence:
            return
        for what, place in self.places(self.state):
            if what == "anchor":
                write_anchor(place, self.state)
            elif self.state.closing.closed != RESTORED:
                # A restored ledger leaves its witness alone, since that is to confirm it.
                write_witness(place, self.state)
        self._anchored = self.state.sequence

    def append(self, connection: sqlite3.Connection, act: str, **names) -> Entry:
        """Append an entry to the chain and return it."""
        entry = self.state.draft(act, now(), **names)
        connection.execute(
            f"INSERT INTO entries VALUES ({', '.join('?' * len(COLUMNS))})", entry.row()
        )
        self._anchored = -1  # until anchor and witness have the entry
        return entry

    def check_generation(self, generation: int) -> None:
        """Raise Refused if the caller's records are not those that the ledger last recognised."""
        if generation != self.state.generation:
            raise Refused("ledger")

    # --- the data that entries name --------------------------------------------------------------

    def answer(self, connection: sqlite3.Connection, known: Known | None) -> bytes | None:
        """Return the stored answer, or None if there is none or it was purged.

        Raise Altered if its bytes do not have the hash in the chain.
        """
        if known is None or known.answer is None or known.purged:
            return None
        row = connection.execute(
            "SELECT bytes FROM answers WHERE sequence = ?", (known.answer.sequence,)
        ).fetchone()
        if (
            row is None
            or not isinstance(row[0], bytes)
            or hashlib.sha256(row[0]).hexdigest() != known.answer.sha256
        ):
            raise Altered(
                f"the stored answer of entry {known.answer.sequence} is gone or was altered"
            )
        return row[0]

    def permutation(self, connection: sqlite3.Connection, entry: Entry, key: bytes) -> bytes:
        """Return the stored permutation of a partition. Raise Altered if it does not match its
        entry.
        """
        row = connection.execute(
            "SELECT permutation FROM partitions WHERE sequence = ?", (entry.sequence,)
        ).fetchone()
        if (
            row is None
            or not isinstance(row[0], bytes)
            or tag(key, b"partition", row[0]).hex() != json.loads(entry.event)["hmac"]
        ):
            raise Altered(f"the stored partition of entry {entry.sequence} is gone or was altered")
        return row[0]

    def sketch(self, connection: sqlite3.Connection) -> Sketch:
        """Return the stored sketch of the records. Raise Altered if it does not match the chain."""
        rows = connection.execute("SELECT key, marks, parts FROM identity").fetchall()
        if (
            len(rows) != 1
            or not all(isinstance(value, bytes) for value in rows[0])
            or Sketch(*rows[0]).digest() != self.state.sketch
        ):
            raise Altered("the sketch of its records is gone or was altered")
        return Sketch(*rows[0])

    def verify(self) -> int:
        """Replay the whole file from the first entry, and return the count that anchor and witness
        have seen.

        It checks chain, prices, totals, stored answers and partitions, sketch and anchor. A process
        that was killed leaves anchor and witness behind the chain. Raise BadInput with what is
        wrong.
        """
        fresh = LedgerFile(self.path, self._given_anchor)
        with self.explained(), fresh.transaction(write=False, sums=True) as connection:
            state = fresh.state
            key = fresh.sketch(connection).key
            if state.total > state.capacity * (1 + SLACK):
                raise Altered(
                    f"its total of {state.total:g} is above the {state.capacity:g} that "
                    "its budget allows"
                )
            state.holds.settle(state.holds.open)
            kept = [known for known in state.queries.values() if known.answer and not known.purged]
            for known in kept:
                fresh.answer(connection, known)
            for entry in state.partitions.values():
                fresh.permutation(connection, entry, key)
            for table, entries in (
                ("answers", [known.answer for known in kept]),
                ("partitions", state.partitions.values()),
            ):
                rows = connection.execute(f"SELECT sequence FROM {table}")
                stored = {sequence for (sequence,) in rows}
                if stored != {entry.sequence for entry in entries if entry}:
                    raise Altered(f"its {table} are not those that its entries name")
            if [result for (result,) in connection.execute("PRAGMA integrity_check(1)")] != ["ok"]:
                raise Altered("its pages are damaged")
        return fresh._anchored

    # --- what went wrong -------------------------------------------------------------------------

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn every error of the file into a BadInput that names what is wrong, for people."""
        try:
            yield
        except Altered as error:
            raise BadInput(f"the ledger {self.path} is refused: {error}") from None
        except (sqlite3.Error, OSError) as error:
            raise BadInput(f"the ledger {self.path} is refused: {reason(error)}") from None

    @contextlib.contextmanager
    def failing_closed(self) -> Iterator[None]:
        """Turn every error of the file or the disk into Refused("ledger"), for askers."""
        try:
            yield
        except (Altered, BadInput, sqlite3.Error, OSError):
            raise Refused("ledger") from None


def _at_checkpoint(connection: sqlite3.Connection, settings: LedgerSettings) -> LedgerState | None:
    """Return the state at the last checkpoint, without reading the entries that it passes over.
    Return None where there is no checkpoint.
    """
    row = connection.execute(
        f"{ENTRIES} WHERE act = 'checkpoint' ORDER BY sequence DESC LIMIT 1"
    ).fetchone()
    if row is None:
        return None
    mark = Entry.of(row)
    count = connection.execute(
        "SELECT count(*) FROM entries WHERE sequence <= ?", (mark.sequence,)
    ).fetchone()[0]
    if count != mark.sequence:
        raise Altered(f"an entry before {mark.sequence} is missing")
    state = LedgerState(settings)
    acts = ", ".join("?" * len(PASSED))
    for kept in connection.execute(
        f"{ENTRIES} WHERE sequence < ? AND act NOT IN ({acts}) ORDER BY sequence",
        (mark.sequence, *PASSED),
    ):
        state.apply_kept(Entry.of(kept))
    try:
        numbers = [(int(sequence),) for sequence, _ in json.loads(mark.event)["open"]]
    except (KeyError, TypeError, ValueError):
        raise Altered(f"entry {mark.sequence} cannot be understood") from None
    rows = (
        connection.execute(f"{ENTRIES} WHERE sequence = ?", number).fetchone() for number in numbers
    )
    state.resume(mark, [Entry.of(row) for row in rows if row])
    return state


def check_seen(connection: sqlite3.Connection, state: LedgerState, place: Path, what: str) -> int:
    """Return the last entry that the anchor or witness file has seen.

    Raise Altered if the chain differs, at the file's count, from the head in the file. A witness of
    an earlier version has count and head of the whole chain, as the anchor has.
    """
    try:
        data = json.loads(place.read_bytes())
        ledger = str(data["ledger"])
        count = int(data["count"])
        head = str(data["head"])
        of_released = data.get("of") == OF
    except FileNotFoundError:
        raise Altered(f"its {what} {place} is missing; restore it") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise Altered(f"its {what} {place} cannot be read; restore it") from None
    if ledger != state.settings.ledger:
        raise Altered(f"its {what} {place} belongs to another ledger")
    if of_released:
        length = state.released[0]
    else:
        length = state.sequence
    if count > length:
        raise Altered(
            f"it has {length} entries but its {what} {place} has seen {count}, so "
            "this is an older copy"
        )
    if of_released:
        if count < 0 or state.heads[count][1] != head:
            raise Altered(f"entry {count} of what has left is not what its {what} {place} has seen")
        if count == length:
            return state.sequence
        return state.heads[count + 1][0] - 1
    if count < 0 or _hash_at(connection, count, state) != head:
        if count:
            which = f"entry {count} is"
        else:
            which = "its settings are"
        raise Altered(f"{which} not what its {what} {place} has seen")
    return count


def write_anchor(place: Path, state: LedgerState) -> None:
    """Write count and head of the whole chain to the anchor."""
    content = {"ledger": state.settings.ledger, "count": state.sequence, "head": state.head}
    atomic.write(place, canonical(content))


def write_witness(place: Path, state: LedgerState, last: Entry | None = None) -> None:
    """Write count and head of what leaves to the witness, including `last` before it is committed.

    A file with the same content is left alone: a new date would reveal that there were other
    entries.
    """
    if last:
        count, head = after(state.released, last)
    else:
        count, head = state.released
    content = {"ledger": state.settings.ledger, "count": count, "head": head, "of": OF}
    text = canonical(content)
    if not place.is_file() or place.read_bytes() != text.encode():
        atomic.write(place, text)


def _hash_at(connection: sqlite3.Connection, sequence: int, state: LedgerState) -> str | None:
    """Return the hash of the entry with this number, or None if there is no such entry."""
    if sequence == 0:
        return state.settings.genesis
    row = connection.execute("SELECT hash FROM entries WHERE sequence = ?", (sequence,)).fetchone()
    return row and row[0]


def now() -> str:
    """Return the present time as text for people.

    No decision depends on it, so a clock that goes backwards changes nothing.
    """
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def reason(error: Exception) -> str:
    """Return in words why a file could not be used."""
    if isinstance(error, OSError):
        return error.strerror or "it cannot be read or written"
    words = str(error)
    if "not a database" in words or "malformed" in words:
        return "the file is damaged or is not a ledger"
    return words
