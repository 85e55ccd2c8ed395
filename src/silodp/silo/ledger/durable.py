"""The ledger of a data set: an SQLite file that outlives runs, servers and processes, and says no
before a budget is passed.

An answer takes three steps, each durable before the next: charge, store the bytes, send. Every
change of state is an entry of a hash chain, and (count, head hash) is kept in a second place, the
anchor, so that an older copy of the file, an altered one or none at all is refused.

Refusals: budget, taken (held for other runs), local, id-reused, purged; ledger (the file cannot be
written or trusted); rule (cannot be priced); shape, noise, batch, id (malformed).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from silodp.core.errors import BadInput, Refused
from silodp.core.privacy.accounting import Budget, Rule
from silodp.host.portable import sync_folder
from silodp.silo.answer.lattice import Keystream
from silodp.silo.ledger.chain import Entry, LedgerSettings
from silodp.silo.ledger.closing import SAID
from silodp.silo.ledger.file import ENTRIES, LedgerFile, now, reason, write_anchor
from silodp.silo.ledger.identity import MOSTLY, SAME, Identity, Registered, Registry, tag
from silodp.silo.ledger.query import QueryLedger
from silodp.silo.ledger.state import Known, LedgerState

__all__ = ["DurableLedger", "Entry", "Identity", "QueryLedger"]


class DurableLedger:
    """One data set's ledger, made by `create` or `open`. Threads may share it, and any number of
    processes may open it.
    """

    def __init__(self, file: LedgerFile) -> None:
        self._file = file

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        rule: Rule,
        budget: Budget,
        records: int,
        identity: Identity,
        anchor: Path | None = None,
        registry: Path | None = None,
    ) -> DurableLedger:
        """A new ledger with nothing spent. Refuses to overwrite anything, and a data set that has a
        ledger already on this machine.
        """
        file = LedgerFile(path, anchor)
        if not math.isfinite(budget.epsilon):
            raise BadInput(f"epsilon is {budget.epsilon:g}; a durable ledger needs a finite one")
        if records != identity.count:
            raise BadInput(
                f"records is {records}, but the identity is of {identity.count} records; "
                "both must be of the same data set"
            )
        key = secrets.token_bytes(32)
        sketch = identity.sketch(key)
        layout = identity.layout_under(key)
        elsewhere = str(Path(anchor).resolve()) if anchor else ""
        settings = LedgerSettings(
            secrets.token_hex(16),
            now(),
            rule,
            budget,
            records,
            layout,
            sketch.digest(),
            elsewhere,
            identity.person,
        )
        empty = LedgerState(settings)
        place = file.anchor(settings)
        known = Registry(registry)
        if not empty.capacity > 0:
            raise BadInput(
                f"nothing could ever be asked: the {rule.name} rule leaves no room in "
                f"epsilon {budget.epsilon:g}, delta {budget.delta:g}"
            )
        with known.locked(), contextlib.ExitStack() as undo:
            known.refuse_known(identity, file.path)
            for taken in (
                file.path,
                place,
                *(Path(f"{file.path}{end}") for end in ("-journal", "-wal", "-shm")),
            ):
                if os.path.lexists(taken):
                    raise BadInput(
                        f"{taken} exists already; a ledger is never made over another file"
                    )
            # The registry first: a ledger that it does not know would let a copy of the data have a
            # second one.
            undo.callback(known.forget, settings.ledger)
            known.write(Registered(settings.ledger, file.path, sketch))
            try:
                undo.callback(place.unlink, missing_ok=True)
                write_anchor(place, empty)
                os.close(os.open(file.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                undo.callback(file.path.unlink)
                file.write_anew(settings, sketch)
                sync_folder(file.path.parent)
            except (OSError, sqlite3.Error) as error:
                raise BadInput(
                    f"the ledger {file.path} cannot be written: {reason(error)}"
                ) from None
            undo.pop_all()
        return cls.open(path, anchor=anchor)

    @classmethod
    def open(cls, path: Path, *, anchor: Path | None = None, pin: bool = True) -> DurableLedger:
        """The ledger at `path`, its chain and its anchor checked. Never makes one: what is missing
        or wrong is refused in a sentence.

        An anchor that is behind, as a killed process leaves it, is brought up, but not for one who
        only looks (`pin`).
        """
        file = LedgerFile(path, anchor)
        if not file.path.is_file():
            raise BadInput(
                f"there is no ledger at {path}; restore it (a new one is made by `silodp "
                "ledger create` only)"
            )
        with file.explained():
            with file.transaction(write=False) as connection:
                file.sketch(connection)
            if pin:
                file.pin()
        return cls(file)

    # --- answering -------------------------------------------------------------------------------

    def for_query(
        self,
        *,
        query_id: str,
        digest: bytes,
        kind: str,
        asker: str,
        run: str,
        generation: int,
        round: str = "",
        most_local: float = math.inf,
        now: float | None = None,
    ) -> QueryLedger:
        """The ledger of one query: it has the stored answer if there is one. `digest` must cover
        all that the query says and who signed it.

        `round` names the total of a shuffle that the answer goes into: each is answered under one
        query id only. `generation`, from `recognise`, names the records that will answer: once the
        ledger knows of later ones, the charge is refused. So is one that would take what the
        shuffler can learn past `most_local`, by a filter (`LedgerState.local_share`). Holds of
        other runs
        that have not run out by `now`, in seconds since 1970, are not taken away from them.
        """
        about = _names(query_id=query_id, kind=kind, asker=asker, run=run)
        return QueryLedger(
            self._file,
            generation,
            most_local,
            now,
            round=round,
            begun=None,
            **about,
            digest=digest.hex(),
        )

    @contextlib.contextmanager
    def question(
        self,
        *,
        query_id: str,
        digest: bytes,
        kind: str,
        asker: str,
        run: str,
        generation: int,
        round: str,
        most_local: float,
        now: float,
    ) -> Iterator[QueryLedger]:
        """Look for a query's answer, and charge it, in one transaction (`for_query` has the
        arguments).

        The charge ends the transaction: what follows it, and what is returned from within, is
        durable and anchored. No other process can change the ledger between the look and the
        charge. Without a charge nothing is written.
        """
        about = _names(query_id=query_id, kind=kind, asker=asker, run=run)
        with contextlib.ExitStack() as ending:
            connection = ending.enter_context(self._file.change())
            try:
                yield QueryLedger(
                    self._file,
                    generation,
                    most_local,
                    now,
                    round=round,
                    begun=(ending, connection),
                    **about,
                    digest=digest.hex(),
                )
            finally:
                # An error of the caller is the caller's: it is no fault of the file.
                ending.close()

    def partition(self, name: str, batches: int, *, generation: int) -> np.ndarray:
        """The stored permutation of range(n) for this partition: drawn once, durable before its
        first use, and never drawn again.

        It holds for the records as they were checked; once they change, another is drawn, whose
        batches are charged on top of the old ones.
        """
        file = self._file
        with file.change() as connection:
            file.check_generation(generation)
            state = file.state
            key = file.sketch(connection).key
            entry = state.partitions.get((name, batches, state.generation))
            if entry is None:
                drawn = Keystream().permutation(state.records).astype("<u4").tobytes()
                event = {
                    "partition": name,
                    "batches": batches,
                    "hmac": tag(key, b"partition", drawn).hex(),
                }
                entry = file.append(connection, "partition", event=event)
                connection.execute("INSERT INTO partitions VALUES (?, ?)", (entry.sequence, drawn))
            stored = file.permutation(connection, entry, key)
        return np.frombuffer(stored, "<u4").astype(np.int64)

    def marks(self, persons: Sequence[str], contents: Sequence[bytes]) -> list[bytes]:
        """Return a secret mark for each person, made of its id by the ledger's key.

        The mark of a person without an id is made of its content. A mark stays the same for as long
        as the ledger exists, whatever happens to other persons and, with an id, to its own rows.
        """
        file = self._file
        with file.explained(), file.transaction(write=False) as connection:
            key = file.sketch(connection).key
        return [
            tag(key, b"part of a person", one.encode())
            if one
            else tag(key, b"part of a row", content)
            for one, content in zip(persons, contents, strict=True)
        ]

    def purge(self, query_id: str) -> None:
        """Drops the stored answer. Its charge stays, and its id is refused from now on, never
        computed again.
        """
        file = self._file
        with file.change(explain=True) as connection:
            known = file.state.queries.get(query_id)
            if known is None:
                raise BadInput(f"the ledger {self.path} has no query {query_id!r}")
            if not known.purged:
                self._drop(connection, known)

    def purge_before(self, day: str) -> int:
        """Drops every stored answer whose query was charged before this day (2026-11-17, UTC); how
        many there were.

        It is the charge's day that decides: when an answer was ready, which may depend on records,
        decides nothing.
        """
        file = self._file
        last = None
        with file.change(explain=True) as connection:
            old = [
                known
                for known in file.state.queries.values()
                if known.answer and not known.purged and known.charge.time < day
            ]
            for known in old:
                last = self._drop(connection, known, last)
        return len(old)

    def _drop(
        self, connection: sqlite3.Connection, known: Known, after: Entry | None = None
    ) -> Entry:
        about = {
            name: getattr(known.charge, name)
            for name in ("query_id", "digest", "kind", "asker", "run")
        }
        if known.answer:
            connection.execute("DELETE FROM answers WHERE sequence = ?", (known.answer.sequence,))
        return self._file.append(connection, "purge", event={}, after=after, **about)

    def recognise(
        self,
        x: object,
        y: object,
        exact: bytes = b"",
        persons: Sequence[str] | None = None,
        person: str = "",
        *,
        registry: Path | None = None,
    ) -> tuple[float, int]:
        """The share of these records that the ledger knows, and their generation; BadInput if they
        are another data set's.

        To be called before anything is asked, by each that answers: a charge and a partition are
        for one generation, so whoever has records of an earlier one can neither price by the new n
        nor take batches of rows that have moved. Edits, growth and another order are written down
        (an entry of price 0), and the ledger goes on with what it has spent. The new n is public;
        that edits happened is not, and no release tells of them (`released`).
        """
        file = self._file
        identity = Identity.of(x, y, exact, persons, person)
        known = Registry(registry)
        with file.explained(), known.locked():
            with file.transaction() as connection:
                file.check_open()
                name = file.state.settings.ledger
                sketch = file.sketch(connection)
                known.refuse_copy(name, self.path)
                likeness = sketch.compare(identity)
                layout = identity.layout_under(sketch.key)
                if not likeness.same:
                    raise BadInput(
                        f"these records are not the data set of the ledger {self.path}: it "
                        f"knows {likeness.known:.0%} of them"
                    )
                if sketch.by_person != identity.by_person and (
                    sketch.by_person or file.state.total > 0
                ):
                    if sketch.by_person:
                        made = "persons"
                        now = "rows"
                    else:
                        made = "rows"
                        now = "persons"
                    raise BadInput(
                        f"the ledger {self.path} keeps a budget of {made}, but the schema "
                        f"now protects {now}: what was spent was promised to others; "
                        f"keep the schema's person as it was when the ledger was made"
                    )
                made = file.state.settings.person
                now = identity.person
                if (
                    made and now and made != now
                ):  # ids of two columns may overlap: many count from 1
                    raise BadInput(
                        f"the ledger {self.path} keeps a budget of persons by the column "
                        f"{made!r}, and the schema now names {now!r}; "
                        "keep the schema's person column as it was when the ledger was made"
                    )
                renamed = (
                    sketch.by_person
                    and identity.by_person
                    and likeness.records >= MOSTLY
                    and likeness.persons < SAME
                )
                if renamed and file.state.total > 0:
                    raise BadInput(
                        f"the ledger {self.path} knows these rows, but not whose they are: "
                        "their persons have other ids than when it was spent from; "
                        "keep the schema's person column, and its ids, as they were"
                    )
                known.refuse_known(identity, self.path, but=name)
                generation = file.state.generation
                if layout != file.state.layout:
                    sketch = sketch.merged(identity.sketch(sketch.key))
                    event = {"records": identity.count, "layout": layout, "sketch": sketch.digest()}
                    generation = file.append(connection, "records", event=event).sequence
                    connection.execute(
                        "UPDATE identity SET marks = ?, parts = ?", (sketch.rows, sketch.profiles)
                    )
            known.keep(Registered(name, self.path, sketch))
            file.pin()
        return likeness.known, generation

    # --- looking ---------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def settings(self) -> LedgerSettings:
        """What was fixed when the ledger was made: rule, budget and the first number of records."""
        return self._file.state.settings

    @property
    def anchor(self) -> Path:
        return self._file.anchor(self.settings)

    @property
    def witness(self) -> str:
        """The file elsewhere that the officer has appointed; empty for none."""
        return self._file.state.closing.witness

    @property
    def records(self) -> int:
        """n, as last checked."""
        return self._file.state.records

    @property
    def capacity(self) -> float:
        """What the rule lets the running total come to."""
        return self._file.state.capacity

    @property
    def closed(self) -> str:
        """Why it answers nothing, in words; empty where it does."""
        return SAID.get(self._file.snapshot().closing.closed, "")

    def head(self) -> tuple[int, str]:
        """(count of entries, hash of the last) of the whole chain, for the anchor. It tells of
        edits, so that it stays in the silo.
        """
        state = self._file.snapshot()
        return state.sequence, state.head

    def released(self) -> tuple[int, str]:
        """(count, head) of what leaves, for releases and all that others see (`released`)."""
        return self._file.snapshot().released

    def released_heads(self) -> list[tuple[int, str]]:
        """By that count: the entry at which it was reached, and the head."""
        return list(self._file.snapshot().heads)

    def spent(self) -> float:
        """Epsilon at the budget's delta of the answers so far, as if they had been fixed in advance
        (`figures.HOLDS`). Of totals: against the server.
        """
        state = self._file.snapshot()
        delta = state.settings.budget.delta
        if state.closing.unknown:
            return float(state.settings.budget.epsilon)
        return float(state.rule.epsilon(state.buckets, np.asarray(delta)))

    def local(self) -> float | None:
        """As `spent`, before a party that sees the silo's own numbers too, such as the shuffler.
        None where no total was answered.
        """
        state = self._file.snapshot()
        if not state.rounds:
            return None
        if state.closing.unknown:
            return math.inf
        return state.local_epsilon()

    def left(self) -> float:
        """Epsilon of the budget that is not spent. (Epsilons of several queries do not add up; what
        `used` says does.)
        """
        return max(0.0, self.settings.budget.epsilon - self.spent())

    def used(self) -> float:
        """Share of the rule's capacity that is used up, from 0 to 1; all of it where what was
        answered is not known.
        """
        state = self._file.snapshot()
        if state.closing.unknown:
            return 1.0
        return state.total / state.capacity

    def stored(self, query_id: str) -> bytes | None:
        """The answer that was given to this query, as it was sent; None where there is none, or
        none any more.
        """
        file = self._file
        with file.explained(), file.transaction(write=False) as connection:
            return file.answer(connection, file.state.queries.get(query_id))

    def entries(self) -> Iterator[Entry]:
        """All entries in order, as of now."""
        with self._file.explained(), self._file.transaction(write=False) as connection:
            known = (self._file.state.sequence,)
            rows = connection.execute(f"{ENTRIES} WHERE sequence <= ? ORDER BY sequence", known)
            found = [Entry.of(row) for row in rows]
        yield from found

    def charges(self, after: int = 0) -> list[Entry]:
        """Return the charges in order, but for the first `after` of them."""
        queries = self._file.snapshot().queries.values()
        return [known.charge for known in itertools.islice(queries, after, None)]

    def verify(self) -> int:
        """The count of entries that anchor and witness have seen. Replays the whole file as if for
        the first time; BadInput with a sentence that names the entry if anything is not as it was
        written.
        """
        return self._file.verify()


def _names(**about: str) -> dict[str, str]:
    """Return the names of a query. Raise Refused where one is too long or not printable."""
    printable = (
        isinstance(text, str) and len(text) <= 200 and text.isprintable() for text in about.values()
    )
    if not about["query_id"] or not all(printable):
        raise Refused("id")
    return about
