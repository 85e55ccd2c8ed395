"""The ledger as data: entries, each sealed with the hash of the one before, and the tally that replays them by the ledger's own rule.

No file and no clock are touched here. A tally believes nothing that it is told: it recomputes hash, link, price and running total of every
entry, and what the ledger has spent is what the replay says.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from silodp.core.errors import BadInput, Refused
from silodp.core.events import EVENTS, Event, TotalEvent
from silodp.core.fields import REAL
from silodp.core.privacy.accounting import GDP, Budget, Committed, Renyi, Rule, budget_array
from silodp.core.privacy.totals import Schedule, Totals
from silodp.core.sampling import SAMPLINGS
from silodp.silo.ledger.holds import Holds

SLACK = 1e-9
"""What another version of a numerical library may change in a price; an entry that understates its price by more is refused."""


class Altered(Exception):
    """The ledger is not what was written: the message says what is wrong with which entry."""


def canonical(value: Any) -> str:
    """The one JSON text of a value; numbers that are not integers are passed as float.hex(), so that no digit is lost."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def sealed(what: str, value: Any) -> str:
    return hashlib.sha256(f"silodp ledger 1 {what}\n{canonical(value)}".encode()).hexdigest()


# --- events and rules as text ---------------------------------------------------------------------------------------------------


def plain(event: Event | TotalEvent) -> dict[str, Any]:
    """The event of one data set's ledger as it is written down, and can be read again; Refused if it is not one, or senseless."""
    single = event.single()
    try:
        data = json.loads(canonical(event_data(single)))
        sampling = event_of(data).sampling
        if sampling.bucket:
            named = len(sampling.partition) <= 200 and sampling.partition.isprintable()
            if not (named and 0 <= operator.index(sampling.index) < operator.index(sampling.batches)):
                raise Refused("batch")
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
        raise Refused("batch") from None
    return data


def event_data(event: Event | TotalEvent) -> dict[str, Any]:
    sampling = {f.name: getattr(event.sampling, f.name) for f in fields(event.sampling)}
    if "rate" in sampling:
        sampling["rate"] = float(sampling["rate"]).hex()
    data = {"sampling": {"type": type(event.sampling).__name__, **sampling}, "count": event.count}
    return data | {
        name: float(value).hex() if kind == REAL else value for name, kind in event.wire.items() for value in (getattr(event, name),)
    }


def event_of(data: Mapping[str, Any]) -> Event | TotalEvent:
    given = dict(data["sampling"])
    kind = SAMPLINGS[given.pop("type")]
    if "rate" in given:
        given["rate"] = float.fromhex(given["rate"])
    sampling = kind(**given)
    kinds = [kind for kind in EVENTS if kind.wire.keys() <= data.keys()]
    if len(kinds) != 1:
        raise KeyError("noise")
    (made,) = kinds
    noise = {name: float.fromhex(data[name]) if kind == REAL else data[name] for name, kind in made.wire.items()}
    return made(sampling=sampling, count=data["count"], **noise)


def rule_data(rule: Rule) -> dict[str, Any]:
    match rule:
        case GDP():
            return {"rule": "gdp"}
        case Renyi(order=order) if np.ndim(order) == 0:
            return {"rule": "renyi", "order": float(order).hex()}
        case Totals(order=order) if np.ndim(order) == 0:
            return {"rule": "totals", "order": float(order).hex()}
        case Committed(schedule=schedule):
            return {"rule": "committed", "schedule": [event_data(event) for event in schedule]}
    raise BadInput(f"the rule of a durable ledger is {rule!r}; it must be gdp, totals, renyi with one order, or committed")


def rule_of(data: Mapping[str, Any], budget: Budget) -> Rule:
    match data["rule"]:
        case "totals":
            return Totals(budget, float.fromhex(data["order"]))
        case "gdp":
            return GDP()
        case "renyi":
            return Renyi(float.fromhex(data["order"]))
        case "committed":
            return Committed(tuple(event_of(event) for event in data["schedule"]))
    raise KeyError(data["rule"])


# --- what is fixed at creation, and the entries ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What is fixed when a ledger is made. Its hash is entry 0, the genesis: a changed setting breaks the chain at its first link."""

    ledger: str  # a random name
    created: str  # for people; nothing depends on a clock
    rule: Rule
    budget: Budget
    records: int
    layout: str
    sketch: str
    anchor: str  # where (count, head) is kept; empty for beside the ledger

    def rows(self) -> dict[str, str]:
        return {
            "ledger": self.ledger, "created": self.created, "rule": canonical(rule_data(self.rule)), "records": str(self.records),
            "epsilon": float(self.budget.epsilon).hex(), "delta": float(self.budget.delta).hex(),
            "layout": self.layout, "sketch": self.sketch, "anchor": self.anchor,
        }  # fmt: skip

    @classmethod
    def of(cls, rows: Mapping[str, str]) -> Settings:
        try:
            budget = Budget(float.fromhex(rows["epsilon"]), float.fromhex(rows["delta"]))
            rule = rule_of(json.loads(rows["rule"]), budget)
            settings = cls(
                rows["ledger"], rows["created"], rule, budget, int(rows["records"]), rows["layout"], rows["sketch"], rows["anchor"]
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Altered("its settings cannot be read") from None
        if settings.rows() != rows:
            raise Altered("its settings are not in the form in which they were written")
        return settings

    @property
    def genesis(self) -> str:
        return sealed("genesis", self.rows())


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the ledger. `act` is charge, answer (its bytes were stored), purge, partition, records (the data set changed), hold or
    release; of the last two `query_id` is the hold's own id."""

    sequence: int
    time: str  # wall clock, for people
    act: str
    query_id: str
    digest: str  # of the query, hex
    run: str
    asker: str
    kind: str
    event: str  # canonical JSON
    bucket: str
    amount: float
    total: float  # of the rule, after this entry
    previous: str
    hash: str = ""

    def row(self) -> tuple:
        """As it lies in the table: floats as hexadecimal text, exact."""
        return tuple(value.hex() if isinstance(value, float) else value for value in _values(self))

    def seal(self) -> str:
        return sealed("entry", self.row()[:-1])

    @classmethod
    def of(cls, row: Sequence[Any]) -> Entry:
        """The entry in this row, if it matches the hash that the row carries."""
        try:
            values: dict[str, Any] = dict(zip(COLUMNS, row, strict=True))
            if values["hash"] == sealed("entry", row[:-1]):
                values |= {name: float.fromhex(values[name]) for name in ("amount", "total")}
                return cls(**values)
        except (TypeError, ValueError, OverflowError):
            pass
        raise Altered(f"entry {row[0]} does not match its hash")


COLUMNS = tuple(f.name for f in fields(Entry))
_values = operator.attrgetter(*COLUMNS)


@dataclass
class Known:
    """What has become of a query id."""

    charge: Entry
    answer: Entry | None = None
    purged: bool = False

    @property
    def answer_sha256(self) -> str:
        return json.loads(self.answer.event)["sha256"] if self.answer else ""


@dataclass
class Tally:
    """The replay: what a chain of entries adds up to, under the ledger's rule. `apply` takes only the one entry that may come next."""

    settings: Settings
    sequence: int = 0
    head: str = ""
    buckets: dict[str, np.ndarray] = field(default_factory=dict)
    total: float = 0.0
    queries: dict[str, Known] = field(default_factory=dict)
    rounds: dict[str, str] = field(default_factory=dict)
    """Rounds of shuffled totals that were answered, each under one query id: no record is in one total twice."""
    partitions: dict[tuple[str, int, int], Entry] = field(default_factory=dict)
    holds: Holds = field(default_factory=Holds)
    generation: int = 0
    """The entry at which the records last changed; partitions of an earlier generation are never used again."""

    def __post_init__(self) -> None:
        self.head = self.settings.genesis
        self.records, self.layout, self.sketch = self.settings.records, self.settings.layout, self.settings.sketch
        self.rule = self.settings.rule
        self.capacity = float(self.rule.capacity(budget_array(self.settings.budget)))

    def price(self, event: Event | TotalEvent) -> tuple[str, float]:
        """(bucket, amount). A partition's buckets carry its generation: a record that moved may be in two batches of one name, so they add up."""
        if event.sampling.bucket:
            event = replace(event, sampling=replace(event.sampling, partition=f"{event.sampling.partition}@{self.generation}"))
        with np.errstate(all="ignore"):
            bucket, amount = self.rule.price(event, np.asarray(self.records))
        return bucket, float(amount)

    def noted(self, data: dict[str, Any]) -> dict[str, Any]:
        """What is written down of a charge: for totals also how many of the contributions are the silo's own."""
        return data | {"own": int(event_of(data).sampling.batch(self.records))} if "levels" in data else data

    def schedule(self, *, local: bool = False) -> Schedule:
        """All answers so far, as the server sees them; with `local` as whoever sees the silo's own counts too, such as the shuffler."""
        made = Schedule()
        for known in self.queries.values():
            data = json.loads(known.charge.event)
            made.add(known.charge.bucket, event_of(data), data.get("own") if local else None)
        return made

    def local_share(self, limit: float, more: Mapping[str, Any] | None = None) -> float:
        """What all answers so far, and `more`, take of the limit on what whoever sees the silo's own counts may learn; 1 is all of it.

        No noise but the silo's own protects it there. The totals rule, at the order that limit and delta fix before anything is asked, is
        the filter: while shares stay within 1, all that was ever answered is (limit, delta)-DP against the shuffler and the server
        together, however questions and stopping adapt. Whoever edits the limit fixes another order: do not let answers decide that.
        """
        rule, shares = Totals.for_budget(Budget(limit, self.settings.budget.delta)), dict[str, np.ndarray]()
        charged = [(known.charge.bucket, json.loads(known.charge.event)) for known in self.queries.values()]
        for bucket, data in [*charged, *([(self.price(event_of(more))[0], more)] if more else [])]:
            event = event_of(data)
            event = event.alone(data["own"]) if event.total else event
            shares[bucket] = shares.get(bucket, np.zeros(())) + rule.price(event, np.asarray(self.records))[1]
        return float(rule.total(shares))

    def after(self, bucket: str, amount: float) -> tuple[dict[str, np.ndarray], float]:
        """The buckets and the total once this is added."""
        buckets = {**self.buckets, bucket: np.asarray(self.buckets.get(bucket, 0.0) + amount)}
        return buckets, float(self.rule.total(buckets))

    def draft(
        self, act: str, time: str, *, event: Any, bucket: str = "", amount: float = 0.0, after: Entry | None = None, **about: str
    ) -> Entry:
        """The next entry of the chain, or the one after a draft that changes no total, sealed; it counts once it is applied."""
        total = self.after(bucket, amount)[1] if act == "charge" else self.total
        text = {"query_id": "", "digest": "", "run": "", "asker": "", "kind": ""} | about
        text |= {"event": canonical(event), "bucket": bucket, "previous": after.hash if after else self.head}
        entry = Entry((after.sequence if after else self.sequence) + 1, time, act, amount=amount, total=total, **text)
        return replace(entry, hash=entry.seal())

    def apply(self, entry: Entry, *, sums: bool = True) -> None:
        """Checks everything about the next entry and takes it in, or raises Altered and takes in nothing.

        `sums=False` leaves the total to `check_total` at the end of the replay: with many buckets it is the slow part.
        """
        name = f"entry {entry.sequence}"
        if entry.sequence != self.sequence + 1:
            raise Altered(f"entry {self.sequence + 1} is missing")
        if entry.previous != self.head:
            before = "the settings" if self.sequence == 0 else f"entry {self.sequence}"
            raise Altered(f"{name} does not follow from {before}, which must have been altered")
        try:
            data = json.loads(entry.event)
            if entry.act == "charge":
                self._charge(name, entry, data, sums=sums)
            elif entry.amount != 0 or entry.total != self.total:
                raise Altered(f"{name} is no charge but changes the total")
            else:
                self._note(name, entry, data)
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
            raise Altered(f"{name} cannot be understood") from None
        self.sequence, self.head = entry.sequence, entry.hash

    def check_total(self) -> None:
        self._check(self.total, float(self.rule.total(self.buckets)), f"entry {self.sequence}")

    @staticmethod
    def _check(said: float, total: float, name: str) -> None:
        if not math.isclose(said, total, rel_tol=SLACK):
            raise Altered(f"{name} says that the total is {said:g}, but it is {total:g}")

    def _charge(self, name: str, entry: Entry, data: Any, *, sums: bool) -> None:
        bucket, amount = self.price(event_of(data))
        if self.noted(data) != data:
            raise Altered(f"{name} counts another number of the silo's own contributions than its batch holds")
        if entry.query_id in self.queries:
            raise Altered(f"{name} charges the query {entry.query_id!r} a second time")
        if "levels" in data and not (re.fullmatch("[0-9a-f]{64}", data["round"]) and data["round"] not in self.rounds):
            raise Altered(f"{name} is of no round, or of one that was charged before")
        if entry.bucket != bucket or not amount * (1 - SLACK) <= entry.amount < math.inf:
            raise Altered(f"{name} costs {entry.amount:g}, but its event is priced {amount:g}")
        if sums:
            self._check(entry.total, self.after(bucket, entry.amount)[1], name)
        self.buckets[bucket] = np.asarray(self.buckets.get(bucket, 0.0) + entry.amount)
        self.total = entry.total
        self.holds.charge(entry.asker, entry.run, bucket, entry.amount)
        self.queries[entry.query_id] = Known(entry)
        if "levels" in data:
            self.rounds[data["round"]] = entry.query_id

    def _note(self, name: str, entry: Entry, data: Any) -> None:
        known = None if entry.act in ("hold", "release") else self.queries.get(entry.query_id)
        match entry.act, known:
            case "hold" | "release", None if self.holds.note(entry, data, lambda event: self.price(event_of(event))):
                pass
            case "answer", Known(answer=None, purged=False):
                known.answer = entry
            case "purge", Known(purged=False):
                known.purged = True
            case "partition", None if (data["partition"], data["batches"], self.generation) not in self.partitions:
                self.partitions[data["partition"], data["batches"], self.generation] = entry
            case "records", None:
                self.records, self.layout, self.sketch = data["records"], data["layout"], data["sketch"]
                self.generation = entry.sequence
                self.holds.end_all()
            case _:
                raise Altered(f"{name} ({entry.act!r}) cannot come after the entries before it")
