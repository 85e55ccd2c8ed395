"""Keep the ledger of a data set: an SQLite file that outlives runs, servers and processes.

It refuses a charge before a budget is passed. An answer takes three steps, each durable before the
next: charge, store the bytes, send. Every change of state is an entry of a hash chain. The count of
entries and the hash of the last one are recorded in a second place, the anchor. So an older copy of
the file, an altered file or a missing file is refused.

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
from silodp.silo.ledger.closing import WHY_CLOSED
from silodp.silo.ledger.file import ENTRIES, LedgerFile, now, reason, write_anchor
from silodp.silo.ledger.identity import (
    MOSTLY,
    SAME,
    Identity,
    Likeness,
    Registered,
    Registry,
    Sketch,
    tag,
)
from silodp.silo.ledger.query import QueryLedger
from silodp.silo.ledger.state import Known, LedgerState

__all__ = ["DurableLedger", "Entry", "Identity", "QueryLedger"]


class DurableLedger:
    """One data set's ledger, made by `create` or `open`.

    Threads may share it, and any number of processes may open it.
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
        """Return a new ledger with nothing spent.

        Raise BadInput if a file is in the way, or if the data set has a ledger already on this
        machine.
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
        if anchor:
            anchor_setting = str(Path(anchor).resolve())
        else:
            anchor_setting = ""
        settings = LedgerSettings(
            ledger=secrets.token_hex(16),
            created=now(),
            rule=rule,
            budget=budget,
            records=records,
            layout=identity.layout_under(key),
            sketch=sketch.digest(),
            anchor=anchor_setting,
            person=identity.person,
        )
        empty = LedgerState(settings)
        place = file.anchor(settings)
        ledgers = Registry(registry)
        if not empty.capacity > 0:
            raise BadInput(
                f"nothing could ever be asked: the {rule.name} rule leaves no room in "
                f"epsilon {budget.epsilon:g}, delta {budget.delta:g}"
            )
        with ledgers.locked(), contextlib.ExitStack() as undo:
            ledgers.refuse_known(identity, file.path)
            journals = (Path(f"{file.path}{end}") for end in ("-journal", "-wal", "-shm"))
            for path_needed in (file.path, place, *journals):
                if os.path.lexists(path_needed):
                    raise BadInput(
                        f"{path_needed} exists already; a ledger never overwrites a file: choose "
                        "another path"
                    )
            # The registry is written first. Without this ledger in it, a copy of the data could
            # get a second ledger.
            undo.callback(ledgers.forget, settings.ledger)
            ledgers.write(Registered(settings.ledger, file.path, sketch))
            try:
                undo.callback(place.unlink, missing_ok=True)
                write_anchor(place, empty)
                os.close(os.open(file.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                undo.callback(file.path.unlink)
                file.write_new(settings, sketch)
                sync_folder(file.path.parent)
            except (OSError, sqlite3.Error) as error:
                raise BadInput(
                    f"the ledger {file.path} cannot be written: {reason(error)}"
                ) from None
            undo.pop_all()
        return cls.open(path, anchor=anchor)

    @classmethod
    def open(cls, path: Path, *, anchor: Path | None = None, pin: bool = True) -> DurableLedger:
        """Return the ledger at `path`, with its chain and its anchor checked. Never make one.

        Raise BadInput if a file is missing or wrong. An anchor that is behind, as a killed process
        leaves it, is brought up unless `pin` is False, for a caller that only looks.
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
        """Return the ledger of one query, with its stored answer if there is one.

        `digest` must cover all that the query contains and who signed it. `round` names the total
        of a shuffle that the answer is part of. Each round is answered under one query id only.
        `generation`, from `recognise`, names the records that will answer. A charge is refused once
        the ledger has recognised later ones. A charge is also refused if it would take what the
        shuffler can learn past `most_local`, by a filter (`LedgerState.local_share`). The holds of
        other runs that have not run out by `now`, in seconds since 1970, are respected.
        """
        names = _names(query_id=query_id, kind=kind, asker=asker, run=run)
        return QueryLedger(
            self._file,
            generation,
            most_local,
            now,
            round=round,
            begun=None,
            **names,
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
        names = _names(query_id=query_id, kind=kind, asker=asker, run=run)
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
                    **names,
                    digest=digest.hex(),
                )
            finally:
                # An error that the caller raised is not passed to `change`, which would turn it
                # into a fault of the file.
                ending.close()

    def partition(self, name: str, batches: int, *, generation: int) -> np.ndarray:
        """Return the stored permutation of range(n) for this partition.

        It is drawn once, is durable before its first use, and is never drawn again. It is for the
        records as they were checked. Once they change, another is drawn, whose batches are charged
        in addition to the old ones.
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
        marks = []
        for person, content in zip(persons, contents, strict=True):
            if person:
                marks.append(tag(key, b"part of a person", person.encode()))
            else:
                marks.append(tag(key, b"part of a row", content))
        return marks

    def purge(self, query_id: str) -> None:
        """Delete the stored answer. Raise BadInput if the ledger has no such query.

        The charge stays. The id is refused from now on and is never computed again.
        """
        file = self._file
        with file.change(explain=True) as connection:
            known = file.state.queries.get(query_id)
            if known is None:
                raise BadInput(f"the ledger {self.path} has no query {query_id!r}")
            if not known.purged:
                self._drop(connection, known)

    def purge_before(self, day: str) -> int:
        """Delete every stored answer whose query was charged before this day. Return how many there
        were.

        The day is text in UTC such as 2026-11-17. The charge's day decides, and not the time when
        an answer was ready, which may depend on records.
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
        """Delete the stored answer, and append and return the entry that records it."""
        names = {
            name: getattr(known.charge, name)
            for name in ("query_id", "digest", "kind", "asker", "run")
        }
        if known.answer:
            connection.execute("DELETE FROM answers WHERE sequence = ?", (known.answer.sequence,))
        return self._file.append(connection, "purge", event={}, after=after, **names)

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
        """Return the share of these records that the ledger has seen before, and their generation.

        Raise BadInput if they are another data set's. Each process that answers calls this before
        the first query. A charge and a partition are for one generation. So a process with records
        of an earlier generation can neither price by the new n nor use batches of rows that have
        moved. Edits, growth and another order are recorded (an entry of price 0), and the ledger
        continues with what it has spent. The new n is public. That edits happened is not, and no
        release reveals it (`released`).
        """
        file = self._file
        identity = Identity.of(x, y, exact, persons, person)
        ledgers = Registry(registry)
        with file.explained(), ledgers.locked():
            with file.transaction() as connection:
                file.check_open()
                name = file.state.settings.ledger
                sketch = file.sketch(connection)
                ledgers.refuse_copy(name, self.path)
                likeness = sketch.compare(identity)
                layout = identity.layout_under(sketch.key)
                if not likeness.same:
                    raise BadInput(
                        f"these records are not the data set of the ledger {self.path}, which "
                        f"has {likeness.known:.0%} of them; use that data set, or another ledger"
                    )
                self._check_persons(sketch, identity, likeness)
                ledgers.refuse_known(identity, self.path, but=name)
                generation = file.state.generation
                if layout != file.state.layout:
                    sketch = sketch.merged(identity.sketch(sketch.key))
                    event = {"records": identity.count, "layout": layout, "sketch": sketch.digest()}
                    generation = file.append(connection, "records", event=event).sequence
                    connection.execute(
                        "UPDATE identity SET marks = ?, parts = ?", (sketch.rows, sketch.profiles)
                    )
            ledgers.keep(Registered(name, self.path, sketch))
            file.pin()
        return likeness.known, generation

    def _check_persons(self, sketch: Sketch, identity: Identity, likeness: Likeness) -> None:
        """Raise BadInput if the budget was promised to persons, and these are others, or to rows.

        Called within a transaction.
        """
        spent = self._file.state.total > 0
        if sketch.by_person != identity.by_person and (sketch.by_person or spent):
            before = "rows"
            after = "persons"
            if sketch.by_person:
                before = "persons"
                after = "rows"
            raise BadInput(
                f"the ledger {self.path} keeps a budget of {before}, but the schema "
                f"now protects {after}: what was spent was promised to others; "
                f"keep the schema's person as it was when the ledger was made"
            )
        before = self._file.state.settings.person
        after = identity.person
        # Ids of two columns may overlap, since many count from 1.
        if before and after and before != after:
            raise BadInput(
                f"the ledger {self.path} keeps a budget of persons by the column "
                f"{before!r}, and the schema now names {after!r}; "
                "keep the schema's person column as it was when the ledger was made"
            )
        renamed = (
            sketch.by_person
            and identity.by_person
            and likeness.records >= MOSTLY
            and likeness.persons < SAME
        )
        if renamed and spent:
            raise BadInput(
                f"the ledger {self.path} has these rows, but their persons have other ids than "
                "when it was spent from; "
                "keep the schema's person column, and its ids, as they were"
            )

    # --- looking ---------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """Return the path of the ledger's file."""
        return self._file.path

    @property
    def settings(self) -> LedgerSettings:
        """Return what was fixed when the ledger was made: rule, budget and the first number of
        records.
        """
        return self._file.state.settings

    @property
    def anchor(self) -> Path:
        """Return the path of the anchor."""
        return self._file.anchor(self.settings)

    @property
    def witness(self) -> str:
        """Return the path of the witness that the officer has appointed, or ""."""
        return self._file.state.closing.witness

    @property
    def records(self) -> int:
        """Return n, as last checked."""
        return self._file.state.records

    @property
    def capacity(self) -> float:
        """Return the most that the rule allows the running total to be."""
        return self._file.state.capacity

    @property
    def closed(self) -> str:
        """Return in words why the ledger answers nothing, or "" if it answers."""
        return WHY_CLOSED.get(self._file.snapshot().closing.closed, "")

    def head(self) -> tuple[int, str]:
        """Return the count of entries and the hash of the last one, for the anchor.

        They cover the whole chain. They reveal edits, so they stay in the silo.
        """
        state = self._file.snapshot()
        return state.sequence, state.head

    def released(self) -> tuple[int, str]:
        """Return the count and head that leave with releases (see `released`)."""
        return self._file.snapshot().released

    def released_heads(self) -> list[tuple[int, str]]:
        """Return the heads that have left, by their count, each with the entry at which it was
        reached.
        """
        return list(self._file.snapshot().heads)

    def spent(self) -> float:
        """Return the epsilon of the answers so far at the budget's delta, as if they had been fixed
        before.

        `figures.HOLDS` explains this. For totals it is the epsilon against the server.
        """
        state = self._file.snapshot()
        delta = state.settings.budget.delta
        if state.closing.unknown:
            return float(state.settings.budget.epsilon)
        return float(state.rule.epsilon(state.buckets, np.asarray(delta)))

    def local(self) -> float | None:
        """Return epsilon as `spent` does, before a party that sees the silo's own numbers too, such
        as the shuffler. Return None where no total was answered.
        """
        state = self._file.snapshot()
        if not state.rounds:
            return None
        if state.closing.unknown:
            return math.inf
        return state.local_epsilon()

    def left(self) -> float:
        """Return the epsilon of the budget that is not spent.

        Epsilons of several queries do not add up. The shares that `used` returns do.
        """
        return max(0.0, self.settings.budget.epsilon - self.spent())

    def used(self) -> float:
        """Return the share of the rule's capacity that is used up, from 0 to 1.

        It is 1 if the ledger may lack answers that were given.
        """
        state = self._file.snapshot()
        if state.closing.unknown:
            return 1.0
        return state.total / state.capacity

    def stored(self, query_id: str) -> bytes | None:
        """Return the answer to this query as it was sent, or None if there is none or it was
        purged.
        """
        file = self._file
        with file.explained(), file.transaction(write=False) as connection:
            return file.answer(connection, file.state.queries.get(query_id))

    def entries(self) -> Iterator[Entry]:
        """Yield all entries in order, as of now."""
        with self._file.explained(), self._file.transaction(write=False) as connection:
            last = (self._file.state.sequence,)
            rows = connection.execute(f"{ENTRIES} WHERE sequence <= ? ORDER BY sequence", last)
            entries = [Entry.of(row) for row in rows]
        yield from entries

    def charges(self, after: int = 0) -> list[Entry]:
        """Return the charges in order, but for the first `after` of them."""
        queries = self._file.snapshot().queries.values()
        return [known.charge for known in itertools.islice(queries, after, None)]

    def verify(self) -> int:
        """Replay the whole file from the first entry. Return the count that anchor and witness have
        seen.

        Raise BadInput with the name of the entry if anything is not as it was written.
        """
        return self._file.verify()


def _names(**names: str) -> dict[str, str]:
    """Return the names of a query. Raise Refused where one is too long or not printable."""
    printable = (
        isinstance(text, str) and len(text) <= 200 and text.isprintable() for text in names.values()
    )
    if not names["query_id"] or not all(printable):
        raise Refused("id")
    return names
