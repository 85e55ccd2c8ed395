"""The ledger's two files on disk: the SQLite file, opened so that what is committed stays, and the
anchor, beside it or on another disk.
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
from silodp.silo.ledger.closing import RESTORED, SAID
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
    """Both files and the state of what was read from them. Memory follows the file, never the other
    way round.

    Every transaction opens the file anew and checks all that is new in it, so that other processes,
    a fork, and a file that was swapped or rolled back underneath are seen. Each of the methods that
    takes a connection is called within a transaction.
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
        if self._state is None:
            raise Altered("it has not been read")
        return self._state

    def locked(self) -> threading.RLock:
        """Return the lock under which a thread reads what others may be adding to the state."""
        return self._lock

    def snapshot(self) -> LedgerState:
        """What the file says now, of which nothing changes any more."""
        with self.explained(), self.transaction(write=False):
            state = copy.copy(self.state)
            state.buckets, state.closing = dict(state.buckets), copy.copy(state.closing)
            return state

    def anchor(self, settings: LedgerSettings) -> Path:
        return Path(self._given_anchor or settings.anchor or f"{self.path}.anchor")

    def write_anew(self, settings: LedgerSettings, sketch: Sketch) -> None:
        """The tables of a ledger without entries, in one transaction, into an empty file."""
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

        With `pin`, anchor and witness have what was committed before anything else happens.

        Formal guarantee: an anchor never goes back.
         1. A transaction that writes begins with SQLite's exclusive lock, which no other process
            gets while any lock is on the file.
         2. The commit leaves a shared lock on the file, since a statement is still reading.
         3. The anchor is written before that statement is closed. So between a commit and its
            anchor no other process can begin to write, and the anchors are written in the order
            of the commits.
        """
        with self._lock, contextlib.closing(connect(self.path)) as connection:
            connection.execute("BEGIN EXCLUSIVE" if write else "BEGIN")
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
        """A transaction that is in the anchor too, and with the witness, before anything else
        happens; none in a ledger that is closed.

        What goes wrong is one fixed code, or a sentence for people.
        """
        if explain:
            failing = self.explained()
        else:
            failing = self.failing_closed()
        with failing, self.transaction(pin=True) as connection:
            self.check_open()
            yield connection

    def check_open(self) -> None:
        """Within a transaction: Altered where the ledger was restored and not confirmed, or has
        moved away.
        """
        if closed := self.state.closing.closed:
            raise Altered(SAID[closed])

    def _catch_up(self, connection: sqlite3.Connection, *, sums: bool) -> None:
        if connection.execute("PRAGMA application_id").fetchone() != (APPLICATION,):
            raise Altered("the file is empty or is not a ledger")
        if (
            tuple(
                sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master ORDER BY name")
            )
            != TABLES
        ):
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
                # A checkpoint that anchor or witness have not seen may be anybody's.
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
        if connection.execute("SELECT min(sequence) FROM entries").fetchone()[0] not in (None, 1):
            raise Altered(
                "it has entries before its first"
            )  # which no replay reads, and every list of entries would
        state.check_total()
        self._anchored = self._check_seen(connection, state)
        self._state = state

    def _shown(self, state: LedgerState, entry: Entry) -> bool:
        """Whether the entry, and what follows it, is read yet."""
        return True

    def _check_seen(self, connection: sqlite3.Connection, state: LedgerState) -> int:
        """The count that anchor and witness have both seen; Altered unless the chain was, at that
        count, what each says. It may be ahead.
        """
        return min(check_seen(connection, state, place, what) for what, place in self.places(state))

    def places(self, state: LedgerState) -> list[tuple[str, Path]]:
        """Where counts and heads are kept too: the anchor has the whole chain's, and the witness
        that the officer has appointed has those of what leaves (`released`).
        """
        witness = state.closing.witness
        return [
            ("anchor", self.anchor(state.settings)),
            *([("witness", Path(witness))] if witness else []),
        ]

    def pin(self) -> None:
        """Brings anchor and witness up to what is committed; under the file's lock, so that they
        never go back.
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
                # what a witness has seen is what will confirm
                write_witness(place, self.state)
        self._anchored = self.state.sequence

    def append(self, connection: sqlite3.Connection, act: str, **about) -> Entry:
        entry = self.state.draft(act, now(), **about)
        connection.execute(
            f"INSERT INTO entries VALUES ({', '.join('?' * len(COLUMNS))})", entry.row()
        )
        self._anchored = -1  # until `pin` has looked
        return entry

    def check_generation(self, generation: int) -> None:
        """Within a transaction: refuses whoever has other records than those that the ledger was
        last shown.
        """
        if generation != self.state.generation:
            raise Refused("ledger")

    # --- what the entries speak of ---------------------------------------------------------------

    def answer(self, connection: sqlite3.Connection, known: Known | None) -> bytes | None:
        """The stored answer; Altered if its bytes are not those whose hash is in the chain."""
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
        rows = connection.execute("SELECT key, marks, parts FROM identity").fetchall()
        if (
            len(rows) != 1
            or not all(isinstance(value, bytes) for value in rows[0])
            or Sketch(*rows[0]).digest() != self.state.sketch
        ):
            raise Altered("the sketch of its records is gone or was altered")
        return Sketch(*rows[0])

    def verify(self) -> int:
        """Replays the whole file as if for the first time: chain, prices, totals, stored answers
        and partitions, sketch, anchor.

        Answers with the count of entries that anchor and witness have both seen; a process that was
        killed leaves them behind.
        """
        anew = LedgerFile(self.path, self._given_anchor)
        with self.explained(), anew.transaction(write=False, sums=True) as connection:
            state = anew.state
            key = anew.sketch(connection).key
            if state.total > state.capacity * (1 + SLACK):
                raise Altered(
                    f"its total of {state.total:g} is above the {state.capacity:g} that "
                    "its budget allows"
                )
            state.holds.settle(state.holds.open)
            kept = [known for known in state.queries.values() if known.answer and not known.purged]
            for known in kept:
                anew.answer(connection, known)
            for entry in state.partitions.values():
                anew.permutation(connection, entry, key)
            for table, entries in (
                ("answers", [k.answer for k in kept]),
                ("partitions", state.partitions.values()),
            ):
                if {
                    sequence for (sequence,) in connection.execute(f"SELECT sequence FROM {table}")
                } != {e.sequence for e in entries if e}:
                    raise Altered(f"its {table} are not those that its entries speak of")
            if [result for (result,) in connection.execute("PRAGMA integrity_check(1)")] != ["ok"]:
                raise Altered("its pages are damaged")
        return anew._anchored

    # --- what went wrong -------------------------------------------------------------------------

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """For people: what is wrong with the file, in a sentence."""
        try:
            yield
        except Altered as error:
            raise BadInput(f"the ledger {self.path} is refused: {error}") from None
        except (sqlite3.Error, OSError) as error:
            raise BadInput(f"the ledger {self.path} is refused: {reason(error)}") from None

    @contextlib.contextmanager
    def failing_closed(self) -> Iterator[None]:
        """For whoever asks: one fixed code, whatever is wrong with the file or the disk."""
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
    found = (
        connection.execute(f"{ENTRIES} WHERE sequence = ?", number).fetchone() for number in numbers
    )
    state.resume(mark, [Entry.of(hold) for hold in found if hold])
    return state


def check_seen(connection: sqlite3.Connection, state: LedgerState, place: Path, what: str) -> int:
    """The last entry that a file apart has seen; Altered unless the chain was, at its count, what
    it says.

    A witness of an earlier version has count and head of the whole chain, as the anchor has.
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
        whole = state.released[0]
    else:
        whole = state.sequence
    if count > whole:
        raise Altered(
            f"it has {whole} entries but its {what} {place} has seen {count}, so "
            "this is an older copy"
        )
    if of_released:
        if count < 0 or state.heads[count][1] != head:
            raise Altered(f"entry {count} of what has left is not what its {what} {place} has seen")
        if count == whole:
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
    """What has been seen of the whole chain."""
    about = {"ledger": state.settings.ledger, "count": state.sequence, "head": state.head}
    atomic.write(place, canonical(about))


def write_witness(place: Path, state: LedgerState, last: Entry | None = None) -> None:
    """What has been seen of what leaves: all of it and, before it is committed, the entry that
    comes last.

    A file that has it is left alone: its date would tell of other entries.
    """
    if last:
        count, head = after(state.released, last)
    else:
        count, head = state.released
    about = {"ledger": state.settings.ledger, "count": count, "head": head, "of": OF}
    text = canonical(about)
    if not place.is_file() or place.read_bytes() != text.encode():
        atomic.write(place, text)


def _hash_at(connection: sqlite3.Connection, sequence: int, state: LedgerState) -> str | None:
    if sequence == 0:
        return state.settings.genesis
    row = connection.execute("SELECT hash FROM entries WHERE sequence = ?", (sequence,)).fetchone()
    return row and row[0]


def now() -> str:
    """For people: no decision looks at it, so that a clock that goes backwards changes nothing."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or "it cannot be read or written"
    words = str(error)
    if "not a database" in words or "malformed" in words:
        return "the file is damaged or is not a ledger"
    return words
