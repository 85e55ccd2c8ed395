"""The ledger as data: settings and entries, each with the hash of the one before it, and the one
text of events and rules.

No file and no clock are touched here; `state` replays entries.
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
    """The ledger is not what was written: the message says what is wrong with which entry."""


def canonical(value: Any) -> str:
    """The one JSON text of a value; numbers that are not integers are passed as float.hex(), so
    that no digit is lost.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def hashed(what: str, value: Any) -> str:
    """The hash by which entries are chained."""
    return hashlib.sha256(f"silodp ledger 1 {what}\n{canonical(value)}".encode()).hexdigest()


# --- events and rules as text --------------------------------------------------------------------


def plain(event: Event | TotalEvent) -> dict[str, Any]:
    """The event of one data set's ledger as it is written down, and can be read again; Refused if
    it is not one, or senseless.
    """
    single = event.single()
    try:
        data = json.loads(canonical(event_data(single)))
        sampling = event_of(data).sampling
        if sampling.bucket:
            named = len(sampling.partition) <= 200 and sampling.partition.isprintable()
            if not (
                named and 0 <= operator.index(sampling.index) < operator.index(sampling.batches)
            ):
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
        name: float(value).hex() if kind == REAL else value
        for name, kind in event.wire.items()
        for value in (getattr(event, name),)
    }


_BESIDE = {"sampling", "count", "own", "round"}
"""What is written down beside an event's own fields: any other field is nobody's, so that no event
can be read as another, cheaper one.
"""


def event_of(data: Mapping[str, Any]) -> Event | TotalEvent:
    given = dict(data["sampling"])
    kind = SAMPLINGS[given.pop("type")]
    if "rate" in given:
        given["rate"] = float.fromhex(given["rate"])
    sampling = kind(**given)
    known = (*EVENTS, BinomialEvent)
    kinds = [kind for kind in known if kind.wire.keys() == data.keys() - _BESIDE]
    if len(kinds) != 1:
        raise KeyError("noise")
    (made,) = kinds
    noise: dict[str, Any] = {
        name: float.fromhex(data[name]) if kind == REAL else data[name]
        for name, kind in made.wire.items()
    }
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
    raise BadInput(
        f"the rule of a durable ledger is {rule!r}; it must be gdp, renyi with one order, "
        "or committed"
    )


def rule_of(data: Mapping[str, Any], budget: Budget) -> Rule:
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
    """What is fixed when a ledger is made. Its hash is entry 0, the genesis: a changed setting
    breaks the chain at its first link.
    """

    ledger: str  # a random name
    created: str  # for people; nothing depends on a clock
    rule: Rule
    budget: Budget
    records: int
    layout: str
    sketch: str
    anchor: str  # where (count, head) is kept; empty for beside the ledger
    person: str = ""  # the column by which records are persons; empty where they are rows

    def rows(self) -> dict[str, str]:
        return {
            "ledger": self.ledger,
            "created": self.created,
            "rule": canonical(rule_data(self.rule)),
            "records": str(self.records),
            "epsilon": float(self.budget.epsilon).hex(),
            "delta": float(self.budget.delta).hex(),
            "layout": self.layout,
            "sketch": self.sketch,
            "anchor": self.anchor,
            **({"person": self.person} if self.person else {}),
        }

    @classmethod
    def of(cls, rows: Mapping[str, str]) -> LedgerSettings:
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
        return hashed("genesis", self.rows())


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the ledger. `act` is charge, answer (its bytes were stored), purge, partition,
    records (the data set changed), hold or release; of the last two `query_id` is the hold's own
    id. `closing.ACTS` are the officer's."""

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
        """Its time in seconds since 1970."""
        return datetime.fromisoformat(self.time).timestamp()

    def row(self) -> tuple:
        """As it lies in the table: floats as hexadecimal text, exact."""
        return tuple(value.hex() if isinstance(value, float) else value for value in _values(self))

    def chained(self) -> Entry:
        """The same entry with its hash."""
        return replace(self, hash=hashed("entry", self.row()[:-1]))

    @classmethod
    def of(cls, row: Sequence[Any]) -> Entry:
        """The entry in this row, if it matches the hash that the row carries."""
        try:
            values: dict[str, Any] = dict(zip(COLUMNS, row, strict=True))
            if values["hash"] == hashed("entry", row[:-1]):
                values |= {name: float.fromhex(values[name]) for name in ("amount", "total")}
                values |= {name: sys.intern(values[name]) for name in _REPEATED}
                return cls(**values)
        except (TypeError, ValueError, OverflowError):
            pass
        raise Altered(f"entry {row[0]} does not match its hash")


_REPEATED = ("act", "run", "asker", "kind", "bucket")
"""What thousands of entries have in common: a gate that holds them for years holds these words
once.
"""
COLUMNS = tuple(f.name for f in fields(Entry))
_values = operator.attrgetter(*COLUMNS)
