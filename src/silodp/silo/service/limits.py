"""What one asker may make a gate compute and write down in an hour without paying: bounded before
anything is done, asker by asker, so that none uses up what another may.

Each limit is a function of the asker's own requests, the policy and the time. A frame that comes
again counts once, so that a courier uses up nothing by repeating frames.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from silodp.core.errors import Refused
from silodp.core.events import Event, TotalEvent
from silodp.silo.ledger.chain import Entry, event_of
from silodp.silo.service.policy import HOUR, Policy

MOST_WORK = 2**26
"""Numbers that the prices of one request may take to compute: some seconds."""
HOUR_WORK = 2**28
"""Numbers that the prices of one asker's requests in an hour may take to compute."""
HOUR_BYTES = 2**21
"""Bytes that one asker's requests for holds in an hour may add to the ledger."""
ENTRY_BYTES = 1500
"""Bytes of an entry but for its events, and of the entry that ends the hold."""
PRICES = 1024
"""Prices of one asker that are remembered as computed."""


def count_prices(events: Iterable[Event | TotalEvent]) -> int:
    """Return how many prices these events have: of a partition's batches with one noise, one."""
    single = 0
    batches = set()
    for event in events:
        if event.sampling.bucket:
            batches.add((event.sampling.at(0), _noise(event)))
        else:
            single += 1
    return single + len(batches)


def _noise(event: Event | TotalEvent) -> tuple:
    return type(event).__name__, tuple(getattr(event, name) for name in event.wire)


@dataclass
class _Asked:
    """What one asker has asked for in the last hour."""

    holds: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    """By digest of a request for a hold: when it came first, its prices and its bytes."""
    work: dict[int, int] = field(default_factory=dict)
    """By minute: numbers computed for prices."""
    priced: OrderedDict[tuple, None] = field(default_factory=OrderedDict)


class Limits:
    """Counts the unpaid requests of each asker, and refuses those past a limit."""

    def __init__(
        self, policy: Policy, work: Callable[[Event | TotalEvent], int], holds: Iterable[Entry]
    ) -> None:
        """Take the holds of the last hour from the ledger, so that a restart forgets none that was
        given. `work` is what the price of an event takes to compute.
        """
        self._policy = policy
        self._work = work
        self._asked: dict[str, _Asked] = {}
        for entry in holds:
            events = [event_of(event) for event in json.loads(entry.event)["events"]]
            size = len(entry.event) + ENTRY_BYTES
            asked = self._of(entry.asker)
            asked.holds[entry.digest] = entry.moment, count_prices(events), size

    def _of(self, asker: str) -> _Asked:
        return self._asked.setdefault(asker, _Asked())

    def count_hold(
        self,
        asker: str,
        digest: str,
        events: Sequence[Event | TotalEvent],
        size: int,
        now: float,
        *,
        taken: Callable[[], bool],
    ) -> None:
        """Count a request for a hold that has not come before, by its events and its bytes. Raise
        Refused("rate") past a limit. `taken` says whether the ledger has a hold of this id.
        """
        asked = self._of(asker)
        for old in [one for one, (moment, *_) in asked.holds.items() if moment <= now - HOUR]:
            del asked.holds[old]
        if digest in asked.holds or taken():
            return
        prices = count_prices(events)
        size = size + ENTRY_BYTES
        recent = list(asked.holds.values())
        so_far = sum(known for _, known, _ in recent)
        # One request is always let through: a run may have more kinds of events than the policy
        # lets it ask questions in an hour.
        self._policy.check_quotes(so_far, prices if recent else 1)
        if sum(known for *_, known in recent) + size > HOUR_BYTES:
            raise Refused("rate")
        asked.holds[digest] = now, prices, size

    def count_work(self, asker: str, events: Iterable[Event | TotalEvent], now: float) -> None:
        """Count what the prices of these events take to compute, each distinct one once. Raise
        Refused("rule") where one request takes too much, and Refused("rate") where the hour does.
        """
        asked = self._of(asker)
        new = {}
        for event in events:
            key = event.sampling.at(0), _noise(event)
            if key not in asked.priced:
                new[key] = self._work(event)
        wanted = sum(new.values())
        if wanted > MOST_WORK:
            raise Refused("rule")
        minute = int(now // 60)
        for old in [one for one in asked.work if not minute - 60 <= one]:
            del asked.work[old]
        if wanted and sum(asked.work.values()) + wanted > HOUR_WORK:
            raise Refused("rate")
        if wanted:
            asked.work[minute] = asked.work.get(minute, 0) + wanted
        for key, cost in new.items():
            if cost:
                asked.priced[key] = None
        while len(asked.priced) > PRICES:
            asked.priced.popitem(last=False)
