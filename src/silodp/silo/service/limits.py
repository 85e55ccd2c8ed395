"""Limit what one asker may make a gate compute and record in an hour without paying.

The limits apply before anything is done, to each asker separately, so that none uses up what
another may use. Each limit is a function of the asker's own requests, the policy and the time. A
repeated frame counts once, so a courier uses up nothing by repeating frames.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from silodp.core.errors import Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.privacy.accounting import Renyi, Rule
from silodp.core.sampling import Poisson, WithoutReplacement
from silodp.silo.ledger.chain import Entry, event_of
from silodp.silo.service.policy import HOUR, Policy

MOST_WORK = 2**26
"""Most numbers that the prices of one request may take to compute: some seconds."""
HOUR_WORK = 2**28
"""Numbers that the prices of one asker's requests in an hour may take to compute."""
HOUR_BYTES = 2**21
"""Bytes that one asker's requests for holds in an hour may add to the ledger."""
ENTRY_BYTES = 1500
"""Bytes of an entry but for its events, and of the entry that ends the hold."""
PRICES = 1024
"""Prices of one asker that are remembered as computed."""

GRID_COST = 8
"""How many functions of each point the integral of a Poisson batch computes."""
LIBRARY_COST = 2**23
"""The approximate work of a library's price of a batch without replacement, at any order."""


def price_work(rule: Rule, event: Event | TotalEvent) -> int:
    """Return about how many numbers the rule computes to price the event for the first time.

    The answer is 0 for a closed formula, and where the rule refuses the event without a price.
    """
    if isinstance(rule, Renyi):
        if isinstance(event.sampling, WithoutReplacement):
            return LIBRARY_COST
        if isinstance(event.sampling, Poisson) and event.multiplier > 0:
            std = 2 * event.multiplier
            in_stds = 12 + 2 * float(np.asarray(rule.order)) / std
            return GRID_COST * 128 * math.ceil(min(in_stds, 1e4))
    return 0


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
class _Requests:
    """The requests of one asker in the last hour."""

    holds: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    """By digest of a request for a hold: its first time, its prices and its bytes."""
    work: dict[int, int] = field(default_factory=dict)
    """By minute: numbers computed for prices."""
    priced: OrderedDict[tuple, None] = field(default_factory=OrderedDict)
    """The latest prices that were computed."""


class Limits:
    """Count the unpaid requests of each asker, and refuse those past a limit."""

    def __init__(self, policy: Policy, rule: Rule, holds: Iterable[Entry]) -> None:
        """Read the holds of the last hour from the ledger, so that a restart forgets none.

        `rule` is the ledger's rule.
        """
        self._policy = policy
        self._rule = rule
        self._requests: dict[str, _Requests] = {}
        for entry in holds:
            events = [event_of(event) for event in json.loads(entry.event)["events"]]
            size = len(entry.event) + ENTRY_BYTES
            requests = self._of(entry.asker)
            requests.holds[entry.digest] = entry.moment, count_prices(events), size

    def _of(self, asker: str) -> _Requests:
        return self._requests.setdefault(asker, _Requests())

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
        """Count a new request for a hold, by its events and its bytes. Raise Refused("rate") past a
        limit.

        A request that was counted before is not counted again. `taken` returns whether the ledger
        has a hold of this id.
        """
        requests = self._of(asker)
        for old in [each for each, (moment, *_) in requests.holds.items() if moment <= now - HOUR]:
            del requests.holds[old]
        if digest in requests.holds or taken():
            return
        prices = count_prices(events)
        size = size + ENTRY_BYTES
        recent = list(requests.holds.values())
        prices_so_far = sum(each for _, each, _ in recent)
        bytes_so_far = sum(each for *_, each in recent)
        # One request always passes: a run may have more kinds of events than the queries that the
        # policy allows in an hour.
        self._policy.check_quotes(prices_so_far, prices if recent else 1)
        if bytes_so_far + size > HOUR_BYTES:
            raise Refused("rate")
        requests.holds[digest] = now, prices, size

    def count_work(self, asker: str, events: Iterable[Event | TotalEvent], now: float) -> None:
        """Count what the prices of these events take to compute, each distinct one once.

        Raise Refused("rule") if one request takes too much, and Refused("rate") if the hour does.
        """
        requests = self._of(asker)
        new = {}
        for event in events:
            key = event.sampling.at(0), _noise(event)
            if key not in requests.priced:
                new[key] = price_work(self._rule, event)
        wanted = sum(new.values())
        if wanted > MOST_WORK:
            raise Refused("rule")
        minute = int(now // 60)
        for old in [each for each in requests.work if not minute - 60 <= each]:
            del requests.work[old]
        if wanted and sum(requests.work.values()) + wanted > HOUR_WORK:
            raise Refused("rate")
        if wanted:
            requests.work[minute] = requests.work.get(minute, 0) + wanted
        for key, cost in new.items():
            if cost:
                requests.priced[key] = None
        while len(requests.priced) > PRICES:
            requests.priced.popitem(last=False)
