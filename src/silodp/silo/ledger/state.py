"""Replay a chain of entries under the ledger's own rule.

This module touches no file and no clock. A state trusts no entry. It computes hash, link, price and
running total of every entry again. What the ledger has spent is the result of the replay.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event
from silodp.core.privacy.accounting import GDP, Budget, budget_array, gdp_epsilon, gdp_mu
from silodp.core.privacy.former import BinomialEvent
from silodp.silo.ledger import released
from silodp.silo.ledger.buckets import Amounts, fits, total
from silodp.silo.ledger.chain import Altered, Entry, LedgerSettings, canonical, event_of
from silodp.silo.ledger.closing import Closing
from silodp.silo.ledger.holds import Holds

SLACK = 1e-9
"""What another version of a numerical library may change in a price; an entry that understates its
price by more is refused.
"""
PASSED = ("hold", "release", "checkpoint")
"""Entries that a replay from a checkpoint passes over. None of them changes what is spent."""
ENTRY_LEAST = 500
"""Bytes of any entry but for its event."""


class Stored(NamedTuple):
    """What memory has of an answer's entry: its number, and the SHA-256 of the bytes."""

    sequence: int
    sha256: str


@dataclass(slots=True)
class Known:
    """The state of a query id. There is one of every query that was ever charged, as long as a gate
    runs.
    """

    charge: Entry
    answer: Stored | None = None
    purged: bool = False


@dataclass
class LedgerState:
    """The result of replaying a chain of entries. `apply` accepts only the entry that may come
    next.
    """

    settings: LedgerSettings
    sequence: int = 0
    head: str = ""
    buckets: dict[str, np.ndarray] = field(default_factory=dict)
    total: float = 0.0
    queries: dict[str, Known] = field(default_factory=dict)
    rounds: dict[str, str] = field(default_factory=dict)
    """Rounds of shuffled totals that were answered, each under one query id: no record is in one
    total twice.
    """
    partitions: dict[tuple[str, int, int], Entry] = field(default_factory=dict)
    holds: Holds = field(init=False)
    closing: Closing = field(default_factory=Closing)
    kept: str = ""
    """A running hash of all entries that a checkpoint does not pass over."""
    mark: int = 0
    """The checkpoint that the replay began at; 0 for the first entry."""
    passed: int = 0
    passed_bytes: int = 0
    """Entries since the last checkpoint that the next one passes over, and their bytes."""
    generation: int = 0
    """The entry at which the records last changed; partitions of an earlier generation are never
    used again.
    """
    released: released.Head = (0, "")
    """Count and head of what leaves the silo."""
    heads: list[tuple[int, str]] = field(default_factory=list)
    """By that count: the entry at which it was reached, and the head."""

    def __post_init__(self) -> None:
        self.head = self.kept = self.settings.genesis
        self.released = released.genesis(self.settings)
        self.holds = Holds(self._price_held)
        self.heads = [(0, self.released[1])]
        self.records = self.settings.records
        self.layout = self.settings.layout
        self.sketch = self.settings.sketch
        self.rule = self.settings.rule
        self.capacity = float(self.rule.capacity(budget_array(self.settings.budget)))

    def price(self, event: Event) -> tuple[str, float]:
        """Return bucket and amount of an event.

        A partition's buckets carry its generation. A record that moved may be in two batches of one
        name, so such batches add up.
        """
        with np.errstate(all="ignore"):
            bucket, amount = self.rule.price(self._named(event), np.asarray(self.records))
        return bucket, float(amount)

    def _named(self, event: Event) -> Event:
        """Return the event with the generation in its partition's name."""
        if not event.sampling.bucket:
            return event
        name = f"{event.sampling.partition}@{self.generation}"
        return replace(event, sampling=replace(event.sampling, partition=name))

    def alone(self, more: Mapping[str, Any] | None = None) -> float:
        """Return mu^2 of all answers so far, and `more`, before a party that sees the silo's own
        numbers. Infinite where some are totals with binomial noise, which nothing prices any more.

        No noise but the silo's own share protects it there.
        """
        rule = GDP()
        amounts = dict[str, np.ndarray]()
        charges = list(self._charged())
        if more:
            charges.append((self.price(event_of(more))[0], dict(more)))
        for bucket, data in charges:
            event = event_of(data)
            if isinstance(event, BinomialEvent):
                return math.inf
            price = rule.price(event.alone(), np.asarray(self.records))[1]
            amounts[bucket] = amounts.get(bucket, np.zeros(())) + price
        return float(total(rule, amounts))

    def local_epsilon(self) -> float:
        """Return the epsilon, at the ledger's delta, before a party that sees the silo's own
        numbers.
        """
        return gdp_epsilon(math.sqrt(self.alone()), self.settings.budget.delta)

    def local_fits(self, limit: float, more: Mapping[str, Any] | None = None) -> bool:
        """Return whether all answers so far, and `more`, are (limit, delta)-DP before a party that
        sees the silo's own numbers, however questions and stopping adapt: a filter by the rule gdp.
        """
        return self.alone(more) <= gdp_mu(Budget(limit, self.settings.budget.delta)) ** 2

    def _charged(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield bucket and recorded event of every charge."""
        return (
            (known.charge.bucket, json.loads(known.charge.event)) for known in self.queries.values()
        )

    def total_with(self, bucket: str, amount: float) -> float:
        """Return the total once this amount is added."""
        return float(total(self.rule, self.buckets, {bucket: amount}))

    def fits(self, *more: Amounts, slack: float = 0.0) -> bool:
        """Return whether what is spent, and all these amounts, stay within the capacity.

        A share `slack` of the capacity must stay free. Nothing fits once the rest was written off.
        """
        return not self.closing.written_off and fits(
            self.rule, self.capacity, self.buckets, *more, slack=slack
        )

    def share(self, *amounts: Amounts) -> float:
        """Return the share of the capacity that these amounts alone take."""
        return float(total(self.rule, *amounts)) / self.capacity

    def draft(
        self,
        act: str,
        time: str,
        *,
        event: Any,
        bucket: str = "",
        amount: float = 0.0,
        after: Entry | None = None,
        **about: str,
    ) -> Entry:
        """Return the next entry of the chain, with its hash. It counts once it is applied.

        With `after`, return the entry after that draft, which changes no total.
        """
        if act == "charge":
            spent = self.total_with(bucket, amount)
        else:
            spent = self.total
        text = {"query_id": "", "digest": "", "run": "", "asker": "", "kind": ""} | about
        text |= {
            "event": canonical(event),
            "bucket": bucket,
            "previous": after.hash if after else self.head,
        }
        entry = Entry(
            (after.sequence if after else self.sequence) + 1,
            time,
            act,
            amount=amount,
            total=spent,
            **text,
        )
        return entry.chained()

    def apply(self, entry: Entry, *, sums: bool = True) -> None:
        """Check everything about the next entry and apply it. Raise Altered and apply nothing if it
        is wrong.

        `sums=False` leaves the total to `check_total` at the end of the replay. With many buckets
        the total is the slow part.
        """
        name = f"entry {entry.sequence}"
        if entry.sequence != self.sequence + 1:
            raise Altered(f"entry {self.sequence + 1} is missing")
        if entry.previous != self.head:
            if self.sequence == 0:
                before = "the settings"
            else:
                before = f"entry {self.sequence}"
            raise Altered(f"{name} does not follow from {before}, which must have been altered")
        self._take_in(name, entry, sums=sums)

    def apply_kept(self, entry: Entry) -> None:
        """Apply an entry before a checkpoint, where the entries in between are passed over.

        `resume` checks that none is missing and none was altered.
        """
        follows = entry.sequence == self.sequence + 1
        if entry.act in PASSED or (follows and entry.previous != self.head):
            raise Altered(f"entry {entry.sequence} does not follow from those before it")
        self._take_in(f"entry {entry.sequence}", entry, sums=False)

    def resume(self, mark: Entry, still_open: list[Entry]) -> None:
        """Continue from a checkpoint, after the entries that it keeps and the holds that are open
        there.

        Raise Altered if they are not those that the checkpoint names.

        Formal guarantee: the checkpoint contains a hash of the entries that are replayed, in order,
        and of every open hold. So if the anchor has seen the checkpoint, what is spent is what a
        replay from the first entry finds. `verify` makes that replay.
        """
        name = f"entry {mark.sequence}"
        try:
            data = json.loads(mark.event)
            named = [[entry.sequence, entry.hash] for entry in still_open]
            if data["kept"] != self.kept or data["open"] != named or mark.total != self.total:
                raise Altered(f"{name} is a checkpoint of other entries than those before it")
            for entry in still_open:
                self.holds.reopen(entry, json.loads(entry.event))
            self.holds.resume(data)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Altered(f"{name} cannot be understood") from None
        self.mark = mark.sequence
        self.sequence = mark.sequence
        self.head = mark.hash

    def checkpoint(self, ends: list[str]) -> dict[str, Any]:
        """Return the event of a checkpoint that comes next and ends these holds."""
        return {"kept": self.kept, "ends": ends} | self.holds.state(ends)

    def _take_in(self, name: str, entry: Entry, *, sums: bool) -> None:
        try:
            data = json.loads(entry.event)
            self.closing.check(name, entry)
            if entry.act == "charge":
                self._charge(name, entry, data, sums=sums)
            elif entry.amount != 0 or entry.total != self.total:
                raise Altered(f"{name} is no charge but changes the total")
            else:
                self._note(name, entry, data)
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
            raise Altered(f"{name} cannot be understood") from None
        self.sequence = entry.sequence
        self.head = entry.hash
        self.released = released.after(self.released, entry)
        if self.released[0] == len(self.heads):
            self.heads.append((entry.sequence, self.released[1]))
        if entry.act not in PASSED:
            self.kept = hashlib.sha256(f"{self.kept}{entry.hash}".encode()).hexdigest()
        elif entry.act == "checkpoint":
            self.passed = self.passed_bytes = 0
        else:
            self.passed += 1
            self.passed_bytes += len(entry.event) + ENTRY_LEAST

    def _price_held(self, data: Mapping[str, Any]) -> tuple[str, float]:
        """Return the bucket and the amount of a hold's event. Raise Altered if it has no price."""
        try:
            event = event_of(data)
            if isinstance(event, BinomialEvent):  # nobody can ask for it any more
                return self._named(event).sampling.bucket, 0.0
            return self.price(event)
        except (
            BadInput,
            Refused,
            KeyError,
            TypeError,
            ValueError,
            ArithmeticError,
            AttributeError,
        ):
            raise Altered("an open hold has no price") from None

    def check_total(self) -> None:
        """Raise Altered if the recorded total differs from the rule's total of all charges."""
        self._check(self.total, float(total(self.rule, self.buckets)), f"entry {self.sequence}")

    @staticmethod
    def _check(said: float, found: float, name: str) -> None:
        if not math.isclose(said, found, rel_tol=SLACK):
            raise Altered(f"{name} says that the total is {said:g}, but it is {found:g}")

    def _charge(self, name: str, entry: Entry, data: Any, *, sums: bool) -> None:
        event = event_of(data)
        if isinstance(event, BinomialEvent):  # of an earlier version: what was written down counts
            bucket = self._named(event).sampling.bucket
            amount = entry.amount
        else:
            bucket, amount = self.price(event)
        if entry.query_id in self.queries:
            raise Altered(f"{name} charges the query {entry.query_id!r} a second time")
        if event.total and not (
            re.fullmatch("[0-9a-f]{64}", data["round"]) and data["round"] not in self.rounds
        ):
            raise Altered(f"{name} is of no round, or of one that was charged before")
        if entry.bucket != bucket or not amount * (1 - SLACK) <= entry.amount < math.inf:
            raise Altered(f"{name} costs {entry.amount:g}, but its event is priced {amount:g}")
        if sums:
            self._check(entry.total, self.total_with(bucket, entry.amount), name)
        self.buckets[bucket] = np.asarray(self.buckets.get(bucket, 0.0) + entry.amount)
        self.total = entry.total
        self.holds.charge(entry.asker, entry.run, bucket, entry.amount)
        self.queries[entry.query_id] = Known(entry)
        if event.total:
            self.rounds[data["round"]] = entry.query_id

    def _note(self, name: str, entry: Entry, data: Any) -> None:
        if entry.act in ("hold", "release"):
            known = None
        else:
            known = self.queries.get(entry.query_id)
        match entry.act, known:
            case _, None if self.closing.note(entry, data):
                self.holds.end_all()
            case "hold" | "release", None if self.holds.note(entry, data):
                pass
            case "checkpoint", None if data["kept"] == self.kept and self.holds.note_state(data):
                pass
            case "answer", Known(answer=None, purged=False):
                known.answer = Stored(entry.sequence, data["sha256"])
            case "purge", Known(purged=False):
                known.purged = True
            case "partition", None if (
                data["partition"],
                data["batches"],
                self.generation,
            ) not in self.partitions:
                self.partitions[data["partition"], data["batches"], self.generation] = entry
            case "records", None:
                # A hold outlives an edit, or its end would tell askers of one. Prices follow n,
                # which is public.
                if data["records"] != self.records:
                    self.holds.end_all()
                self.records, self.layout, self.sketch = (
                    data["records"],
                    data["layout"],
                    data["sketch"],
                )
                self.generation = entry.sequence
            case _:
                raise Altered(f"{name} ({entry.act!r}) cannot come after the entries before it")
