"""Define holds as data: amounts that are reserved for a run before it asks.

A hold is never spend, and pays for nothing. This module touches no file and no clock. `LedgerState`
replays the entries into it, and `reserve` writes them. A hold has buckets in the ledger's own unit.
What it still reserves, in each bucket, is the amount held less the amount its run was charged
there, before or after, and never below 0.

Formal guarantees. Let T be the rule's total of (spent + all that live holds still reserve).

  1. A hold is taken only if T stays at most capacity (1 - HELD_SLACK).
  2. The same is required of a charge that no hold covers, in whichever bucket. If what its own
     run still reserves is in the way, that hold ends with the charge.
  3. A charge that its run's hold covers moves an amount from reserved to spent in one bucket,
     and T stays.
  4. So a run that asks what it holds for is never refused for budget while its hold lives:
     HELD_SLACK is far above what some 10,000 roundings make of T.
  5. Every charge passes the filter alone too, whatever is held. Only with nothing held at all
     may a charge come nearer to the capacity than HELD_SLACK.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from silodp.core.privacy.accounting import Buckets, add_amounts

HELD_SLACK = 1e-10
RUNS = 64
"""Runs of one asker whose last number is remembered; of older ones the highest number is."""
COVERED = 1e-12
"""What rounding may take a run's charges past its hold, as a share of the hold."""


def remains(rest: Buckets, buckets: Buckets) -> bool:
    """Return whether more is left of these amounts than rounding leaves of them.

    A hold of which nothing remains reserves nothing.
    """
    return any(amount > HELD_SLACK * buckets[bucket] for bucket, amount in rest.items())


@dataclass(frozen=True)
class Hold:
    """An open hold: asker, run, end in seconds since 1970, and the amount in each bucket."""

    id: str
    asker: str
    run: str
    digest: str
    time: str
    until: int
    buckets: Buckets
    sequence: int = 0
    hash: str = ""
    """Of its entry in the chain."""

    @property
    def about(self) -> dict[str, str]:
        """Return the fields that every entry about this hold has."""
        return {
            "query_id": self.id,
            "digest": self.digest,
            "asker": self.asker,
            "run": self.run,
            "kind": "hold",
        }


@dataclass
class Holds:
    """The holds of a chain so far, and what each run was charged."""

    price: Callable[[Mapping[str, Any]], tuple[str, float]] = field(repr=False, compare=False)
    """Return the bucket and the amount of an event as it was written down."""
    open: dict[str, Hold] = field(default_factory=dict)
    unpriced: dict[str, Any] = field(default_factory=dict)
    """By id: the events of open holds that have not been priced yet. Those that end before never
    are.
    """
    charged: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    """By (asker, run)."""
    last: dict[str, dict[str, int]] = field(default_factory=dict)
    """By asker: the highest number of a request that each of its latest runs has had written down.
    """
    floor: dict[str, int] = field(default_factory=dict)
    """By asker: the highest number of the runs that are not remembered. A run that is not
    remembered needs a higher one.
    """

    # --- the replay ------------------------------------------------------------------------------

    def charge(self, asker: str, run: str, bucket: str, amount: float) -> None:
        """Add a charge to the run's amounts."""
        mine = self.charged.setdefault((asker, run), {})
        mine[bucket] = mine.get(bucket, 0.0) + amount

    def note(self, entry: Any, data: Mapping[str, Any]) -> bool:
        """Take in an entry that takes or releases a hold. Return False if it cannot come now.

        That no id is taken twice is for the file's index of entries to ensure.
        """
        who = entry.asker, entry.run
        if entry.act == "release":
            if data["why"] == "run" and not self._remember(*who, data["number"]):
                return False
            return data["why"] in ("run", "officer", "charge") and self._end([entry.query_id])
        if entry.query_id in self.open or not entry.query_id:
            return False
        if not (
            type(data["until"]) is int
            and data["events"]
            and self._end(data["ends"])
            and self._remember(*who, data["number"])
        ):
            return False
        self.reopen(entry, data)
        return True

    def reopen(self, entry: Any, data: Mapping[str, Any]) -> None:
        """Take in an open hold. It is not priced before it counts (`live`)."""
        self.unpriced[entry.query_id] = data["events"]
        self.open[entry.query_id] = Hold(
            id=entry.query_id,
            asker=entry.asker,
            run=entry.run,
            digest=entry.digest,
            time=entry.time,
            until=data["until"],
            buckets={},
            sequence=entry.sequence,
            hash=entry.hash,
        )

    def settle(self, ids: Iterable[str]) -> None:
        """Price these holds if they are not priced yet.

        The number of records is that of their time, since a change of it ends every hold.
        """
        for id in list(ids):
            if id not in self.unpriced:
                continue
            amounts = (self.price(event) for event in self.unpriced[id])
            buckets = add_amounts(*({bucket: amount} for bucket, amount in amounts))
            self.open[id] = replace(self.open[id], buckets=buckets)
            del self.unpriced[id]

    def later(self, asker: str, run: str, number: int) -> bool:
        """Return whether a request of this number comes after all recorded requests of the run.

        For a run that is not remembered: after those of every such run.
        """
        last = self.last.get(asker, {}).get(run, self.floor.get(asker, -1))
        return type(number) is int and number > last

    def _remember(self, asker: str, run: str, number: int) -> bool:
        """Record the run's number. Return False if it is not higher than the last one."""
        runs = self.last.setdefault(asker, {})
        if type(number) is not int or number <= runs.get(run, -1):
            return False
        runs.pop(run, None)
        runs[run] = number
        if len(runs) > RUNS:
            oldest = next(iter(runs))
            self.floor[asker] = max(runs.pop(oldest), self.floor.get(asker, -1))
        return True

    # --- checkpoints -----------------------------------------------------------------------------

    def state(self, ends: Iterable[str] = ()) -> dict[str, Any]:
        """Return all that a replay needs of holds so far, once `ends` have ended."""
        rest = [hold for id, hold in self.open.items() if id not in set(ends)]
        return {
            "open": [[hold.sequence, hold.hash] for hold in rest],
            "last": [[asker, list(runs.items())] for asker, runs in self.last.items()],
            "floor": self.floor,
        }

    def note_state(self, data: Mapping[str, Any]) -> bool:
        """Take in a checkpoint. Return False if it is not of this state."""
        ends = data["ends"]
        recorded = {name: data[name] for name in ("open", "last", "floor")}
        computed = json.loads(json.dumps(self.state(ends)))
        return recorded == computed and self._end(ends)

    def resume(self, data: Mapping[str, Any]) -> None:
        """Take the numbers of runs from a checkpoint. Its open holds follow by `reopen`."""
        self.last = {asker: dict(runs) for asker, runs in data["last"]}
        self.floor = dict(data["floor"])

    def _end(self, ids: Iterable[str]) -> bool:
        """End these holds. Return False, and end none, if one of them is not open."""
        ids = list(ids)
        if any(id not in self.open for id in ids):
            return False
        for id in ids:
            del self.open[id]
            self.unpriced.pop(id, None)
        return True

    def end_all(self) -> None:
        """End every hold, since the number of records or the ledger's standing has changed."""
        self._end(list(self.open))

    # --- what is held ----------------------------------------------------------------------------

    def reserves(self, hold: Hold, more: Buckets | None = None) -> dict[str, float]:
        """Return what the hold still reserves, once its run has been charged `more`."""
        return self.rest(hold.asker, hold.run, hold.buckets, more)

    def rest(
        self, asker: str, run: str, buckets: Buckets, more: Buckets | None = None
    ) -> dict[str, float]:
        """Return the part of these amounts that the run has not been charged yet."""
        charged = add_amounts(self.charged.get((asker, run), {}), more or {})
        return {
            bucket: max(0.0, amount - charged.get(bucket, 0.0))
            for bucket, amount in buckets.items()
        }

    def live(self, now: float) -> list[Hold]:
        """Return the holds that count at this time, priced.

        Other holds are never priced. Otherwise an asker could let expensive holds run out at no
        cost, and each opening of the ledger would price them again.
        """
        ids = [id for id, hold in self.open.items() if hold.until > now]
        self.settle(ids)
        return [self.open[id] for id in ids]

    def others(self, asker: str, run: str, now: float) -> dict[str, float]:
        """Return what is held for all other runs, of any asker."""
        holds = [hold for hold in self.live(now) if (hold.asker, hold.run) != (asker, run)]
        return add_amounts(*map(self.reserves, holds))

    def own(self, asker: str, run: str, now: float) -> Hold | None:
        """Return the run's hold, or None. Each run has at most one, since a new one ends the one
        before.
        """
        for hold in self.live(now):
            if (hold.asker, hold.run) == (asker, run):
                return hold
        return None

    def covers(self, asker: str, run: str, bucket: str, amount: float, now: float) -> bool:
        """Return whether a charge is within what the run holds."""
        hold = self.own(asker, run, now)
        reserved = 0.0
        if hold:
            reserved = hold.buckets.get(bucket, 0.0)
        charged = self.charged.get((asker, run), {}).get(bucket, 0.0)
        return charged + amount <= reserved * (1 + COVERED)
