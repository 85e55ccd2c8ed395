"""Define the ledger as data: settings, entries, and the text of events and rules.

Each entry has the hash of the one before it. This module touches no file and no clock. `state`
replays entries.
"""

from __future__ import annotations

import hashlib
import json
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any

import numpy as np

from silodp.core.errors import BadInput, Refused
from silodp.core.events import EVENTS, Event, TotalEvent
from silodp.core.fields import REAL
from silodp.core.privacy.accounting import GDP, Budget, Committed, Renyi, Rule
from silodp.core.privacy.former import BinomialEvent, Totals
from silodp.core.sampling import SAMPLINGS


class Altered(Exception):
    """The ledger differs from what was written. The message names the entry and what is wrong."""


def canonical(value: Any) -> str:
    """Return the one JSON text of a value.

    Numbers that are not integers are passed as float.hex(), so that no digit is lost.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def hashed(what: str, value: Any) -> str:
    """Return the hash by which entries are chained."""
    return hashlib.sha256(f"silodp ledger 1 {what}\n{canonical(value)}".encode()).hexdigest()


# --- events and rules as text --------------------------------------------------------------------


def plain(event: Event | TotalEvent) -> dict[str, Any]:
    """Return the event of one data set's ledger as data that `event_of` can read again.

    Raise Refused if it is no event, or a senseless one.
    """
    single = event.single()
    try:
        data = json.loads(canonical(event_data(single)))
        sampling = event_of(data).sampling
        if sampling.bucket:
            named = len(sampling.partition) <= 200 and sampling.partition.isprintable()
            if not named:
                raise Refused("batch")
            if not 0 <= operator.index(sampling.index) < operator.index(sampling.batches):
                raise Refused("batch")
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
        raise Refused("batch") from None
    return data


def event_data(event: Event | TotalEvent) -> dict[str, Any]:
    """Return an event as data."""
    sampling = {f.name: getattr(event.sampling, f.name) for f in fields(event.sampling)}
    if "rate" in sampling:
        sampling["rate"] = float(sampling["rate"]).hex()
    data = {"sampling": {"type": type(event.sampling).__name__, **sampling}, "count": event.count}
    for name, kind in event.wire.items():
        value = getattr(event, name)
        if kind == REAL:
            value = float(value).hex()
        data[name] = value
    return data


_BESIDE = {"sampling", "count", "own", "round"}
"""The fields that a recorded event may have in addition to its own ones. No other field is allowed,
so that no event can be read as another, cheaper one.
"""


def event_of(data: Mapping[str, Any]) -> Event | TotalEvent:
    """Return the event that this data describes. Raise an error if there is none."""
    given = dict(data["sampling"])
    kind = SAMPLINGS[given.pop("type")]
    if "rate" in given:
        given["rate"] = float.fromhex(given["rate"])
    sampling = kind(**given)
    known = (*EVENTS, BinomialEvent)
    kinds = [kind for kind in known if kind.wire.keys() == data.keys() - _BESIDE]
    if len(kinds) != 1:
        raise KeyError("noise")
    (event_kind,) = kinds
    noise: dict[str, Any] = {}
    for name, field_kind in event_kind.wire.items():
        if field_kind == REAL:
            noise[name] = float.fromhex(data[name])
        else:
            noise[name] = data[name]
    return event_kind(sampling=sampling, count=data["count"], **noise)


def rule_data(rule: Rule) -> dict[str, Any]:
    """Return a rule as data. Raise BadInput if a durable ledger cannot have it."""
    match rule:
        case GDP():
            return {"rule": "gdp"}
        case Renyi(order=order) if np.ndim(order) == 0:
            return {"rule": "renyi", "order": float(order).hex()}
        case Totals(order=order) if np.ndim(order) == 0:
            return {"rule": "totals", "order": float(order).hex()}
        case Committed(schedule=schedule):
            return {"rule": "committed", "schedule": [event_data(event) for event in schedule]}
    raise BadInput(
        f"the rule of a durable ledger is {rule!r}; it must be gdp, renyi with one order, "
        "or committed"
    )


def rule_of(data: Mapping[str, Any], budget: Budget) -> Rule:
    """Return the rule that this data describes. Raise KeyError if there is none."""
    match data["rule"]:
        case "totals":
            return Totals(budget, float.fromhex(data["order"]))
        case "gdp":
            return GDP()
        case "renyi":
            return Renyi(float.fromhex(data["order"]))
        case "committed":
            return Committed(tuple(event_of(event) for event in data["schedule"]))  # type: ignore[arg-type]
    raise KeyError(data["rule"])


# --- what is fixed at creation, and the entries --------------------------------------------------


@dataclass(frozen=True)
class LedgerSettings:
    """What is fixed when a ledger is made.

    Its hash is entry 0, the genesis. So a changed setting breaks the chain at its first link.
    """

    ledger: str  # a random name
    created: str  # for people; nothing depends on a clock
    rule: Rule
    budget: Budget
    records: int
    layout: str
    sketch: str
    anchor: str  # the file with count and head; empty for the one in the ledger's folder
    person: str = ""  # the column by which records are persons; empty where they are rows

    def rows(self) -> dict[str, str]:
        """Return the settings as rows of the table `meta`."""
        rows = {
            "ledger": self.ledger,
            "created": self.created,
            "rule": canonical(rule_data(self.rule)),
            "records": str(self.records),
            "epsilon": float(self.budget.epsilon).hex(),
            "delta": float(self.budget.delta).hex(),
            "layout": self.layout,
            "sketch": self.sketch,
            "anchor": self.anchor,
        }
        if self.person:
            rows["person"] = self.person
        return rows

    @classmethod
    def of(cls, rows: Mapping[str, str]) -> LedgerSettings:
        """Return the settings in these rows. Raise Altered if they are not as written by `rows`."""
        try:
            budget = Budget(float.fromhex(rows["epsilon"]), float.fromhex(rows["delta"]))
            rule = rule_of(json.loads(rows["rule"]), budget)
            settings = cls(
                rows["ledger"],
                rows["created"],
                rule,
                budget,
                int(rows["records"]),
                rows["layout"],
                rows["sketch"],
                rows["anchor"],
                rows.get("person", ""),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Altered("its settings cannot be read") from None
        if settings.rows() != rows:
            raise Altered("its settings are not in the form in which they were written")
        return settings

    @property
    def genesis(self) -> str:
        """Return the hash of entry 0."""
        return hashed("genesis", self.rows())


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the ledger.

    `act` is charge, answer (its bytes were stored), purge, partition, records (the data set
    changed), hold, release (of a hold), checkpoint, or one of the officer's acts in `closing.ACTS`.
    For hold and release, `query_id` is the hold's own id.
    """

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

    @property
    def moment(self) -> float:
        """Return the entry's time in seconds since 1970."""
        return datetime.fromisoformat(self.time).timestamp()

    def row(self) -> tuple:
        """Return the entry as it is in the table: floats as hexadecimal text, exact."""
        return tuple(_cell(value) for value in _values(self))

    def chained(self) -> Entry:
        """Return the same entry with its hash."""
        return replace(self, hash=hashed("entry", self.row()[:-1]))

    @classmethod
    def of(cls, row: Sequence[Any]) -> Entry:
        """Return the entry in this row. Raise Altered if the row does not match its own hash."""
        try:
            values: dict[str, Any] = dict(zip(COLUMNS, row, strict=True))
            if values["hash"] == hashed("entry", row[:-1]):
                values |= {name: float.fromhex(values[name]) for name in ("amount", "total")}
                values |= {name: sys.intern(values[name]) for name in _REPEATED}
                return cls(**values)
        except (TypeError, ValueError, OverflowError):
            pass
        raise Altered(f"entry {row[0]} does not match its hash")


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return value.hex()
    return value


_REPEATED = ("act", "run", "asker", "kind", "bucket")
"""Fields whose values thousands of entries have in common. A gate that runs for years has each such
text in memory once.
"""
COLUMNS = tuple(f.name for f in fields(Entry))
_values = operator.attrgetter(*COLUMNS)
