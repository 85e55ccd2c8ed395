"""Holds as data: what other runs may not take away from a run before it has asked for it. A hold is
never spend, and pays for nothing.

No file and no clock are touched here; `chain.Tally` replays the entries into this, and `reserve`
writes them. A hold has buckets in the ledger's own unit. What it still reserves, in each bucket, is
what was held less what its run was charged there, before or after, and never below 0.

Formal guarantees. Let T be the rule's total of (spent + all that live holds still reserve). A hold
is taken only if T stays at most capacity (1 - SLACK). So is a charge made that no hold covers, in
whichever bucket; if what its own run still reserves is in the way, that hold ends with the charge.
A charge that its run's hold covers moves an amount from reserved to spent in one bucket, and T
stays. So a run that asks what it holds for is never refused for budget while its hold lives, for
SLACK is far above what some 10,000 roundings make of T. Every charge passes the filter alone too,
whatever is held; only with nothing held at all may a charge come nearer to the capacity than SLACK.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from silodp.silo.ledger.buckets import Amounts, added

SLACK = 1e-10
COVERED = 1e-12
"""What rounding may take a run's charges past its hold, as a share of the hold."""


def remains(rest: Amounts, buckets: Amounts) -> bool:
    """Whether what is left of these amounts is more than rounding leaves of them: a hold of which
    nothing remains keeps nothing from anybody.
    """
    return any(amount > SLACK * buckets[bucket] for bucket, amount in rest.items())


@dataclass(frozen=True)
class Hold:
    """An open hold: whose, for which run, until when (seconds since 1970), and how much of each
    bucket.
    """

    id: str
    asker: str
    run: str
    digest: str
    time: str
    until: int
    buckets: Amounts

    @property
    def about(self) -> dict[str, str]:
        """What every entry about this hold says."""
        return {
            "query_id": self.id,
            "digest": self.digest,
            "asker": self.asker,
            "run": self.run,
            "kind": "hold",
        }


@dataclass
class Holds:
    """What the chain says of holds so far, and what each run was charged."""

    open: dict[str, Hold] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    """Ids of holds that have ended: none of them is ever taken again, whoever repeats its request.
    """
    charged: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    """By (asker, run)."""
    last: dict[tuple[str, str], int] = field(default_factory=dict)
    """The highest number of a request that each (asker, run) has had written down."""

    # --- the replay ------------------------------------------------------------------------------

    def charge(self, asker: str, run: str, bucket: str, amount: float) -> None:
        mine = self.charged.setdefault((asker, run), {})
        mine[bucket] = mine.get(bucket, 0.0) + amount

    def note(
        self,
        entry: Any,
        data: Mapping[str, Any],
        price: Callable[[Mapping[str, Any]], tuple[str, float]],
    ) -> bool:
        """Takes in an entry that takes or releases a hold; False if it cannot come now."""
        who = entry.asker, entry.run
        if entry.act == "release":
            if data["why"] == "run":
                if not self.later(*who, data["number"]):
                    return False
                self.last[who] = data["number"]
            return data["why"] in ("run", "officer", "charge") and self._end([entry.query_id])
        if entry.query_id in self.open or entry.query_id in self.over or not entry.query_id:
            return False
        buckets = added(*({bucket: amount} for bucket, amount in map(price, data["events"])))
        if not (
            type(data["until"]) is int
            and buckets
            and self.later(*who, data["number"])
            and self._end(data["ends"])
        ):
            return False
        self.last[who] = data["number"]
        self.open[entry.query_id] = Hold(
            entry.query_id, entry.asker, entry.run, entry.digest, entry.time, data["until"], buckets
        )
        return True

    def later(self, asker: str, run: str, number: int) -> bool:
        """Whether a request of this number comes after all that the run has had written down."""
        return type(number) is int and number > self.last.get((asker, run), -1)

    def _end(self, ids: Iterable[str]) -> bool:
        ids = list(ids)
        if any(id not in self.open for id in ids):
            return False
        for id in ids:
            del self.open[id]
        self.over |= set(ids)
        return True

    def end_all(self) -> None:
        """The records have changed: what was held was priced for others."""
        self._end(list(self.open))

    # --- what is held ----------------------------------------------------------------------------

    def reserves(self, hold: Hold, more: Amounts | None = None) -> dict[str, float]:
        """What the hold still reserves, once its run has been charged `more`."""
        return self.rest(hold.asker, hold.run, hold.buckets, more)

    def rest(
        self, asker: str, run: str, buckets: Amounts, more: Amounts | None = None
    ) -> dict[str, float]:
        """What of these amounts the run has not been charged yet."""
        charged = added(self.charged.get((asker, run), {}), more or {})
        return {
            bucket: max(0.0, amount - charged.get(bucket, 0.0))
            for bucket, amount in buckets.items()
        }

    def live(self, now: float) -> list[Hold]:
        return [hold for hold in self.open.values() if hold.until > now]

    def others(self, asker: str, run: str, now: float) -> dict[str, float]:
        """What is held for other runs than this one, by whomever."""
        return added(
            *(
                self.reserves(hold)
                for hold in self.live(now)
                if (hold.asker, hold.run) != (asker, run)
            )
        )

    def own(self, asker: str, run: str, now: float) -> Hold | None:
        """The run's hold, if it has one: each ends the one before."""
        return next(
            (hold for hold in self.live(now) if (hold.asker, hold.run) == (asker, run)), None
        )

    def covers(self, asker: str, run: str, bucket: str, amount: float, now: float) -> bool:
        """Whether a charge is within what the run holds."""
        own = self.own(asker, run, now)
        held = own.buckets.get(bucket, 0.0) if own else 0.0
        return self.charged.get((asker, run), {}).get(bucket, 0.0) + amount <= held * (1 + COVERED)
