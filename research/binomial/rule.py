"""The ledger rule of shuffled totals: a filter at one Renyi order that pays for divergence and for
the noise's tails at once.

A release i is priced with a share x_i of the budget (epsilon, delta): its divergence is D_i <= x_i
room and its tails (`binomial`, windows) have mass d tail_i <= x_i STAKE delta, where room = epsilon
- conversion(order, (1 - STAKE) delta). Shares add up, and 1 is the budget.

**Claim.** Whoever chooses queries adaptively, if the shares on every path add up to at most 1, the
transcript of totals is (epsilon, delta)-DP in both directions. Proof: along a path the divergences
sum to at most room and the tails to at most STAKE delta. Replace each release's law P under one
data set by its restriction to the windows (`binomial`, *Windows*), given the history. The sum over
transcripts of P~^order Q^(1 - order) is, taken from the last round back, at most exp((order - 1)
room), as for any filter with one fixed order (Feldman and Zrnic 2021); P~ lacks at most STAKE delta
of mass, for the tails are summed along every path too. The conversion takes the other (1 - STAKE)
delta. For a stored partition no record is in two batches, so the largest share of its batches
counts.

Which tail a release gets is this file's choice: the power of two at or below the share that a
Gaussian of its variance would take. Any choice is valid, since the share is the larger of what
divergence and tails ask for.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from research.binomial.accountant import ORDERS, BinomialSum, epsilon, renyi
from research.binomial.mechanism import BinomialEvent
from silodp.core.errors import BadInput
from silodp.core.events import Event
from silodp.core.privacy.accounting import (
    Buckets,
    Budget,
    elementwise,
    renyi_conversion,
    sum_with_partitions,
)

STAKE = 0.01
"""Share of delta that pays for tails."""


@dataclass(frozen=True, eq=False)
class Totals:
    """Shuffled totals, and Gaussian releases beside them, on full or disjoint batches. Prices are
    shares of the budget.
    """

    budget: Budget | np.ndarray
    order: float | np.ndarray
    name: str = "totals"

    def __post_init__(self) -> None:
        if not np.all(np.asarray(self.order) >= 2):
            raise BadInput(f"the Renyi order is {self.order}; totals need 2 or more")

    def price(self, event: Event | BinomialEvent, n: np.ndarray) -> tuple[str, np.ndarray]:
        if event.sampling.sampled:
            raise BadInput(
                f"shuffled totals cannot be priced on {type(event.sampling).__name__} "
                "batches; use full or disjoint ones"
            )
        if not isinstance(event, BinomialEvent):
            share = elementwise(_gaussian_share, self.budget, self.order, event.noise_multiplier)
        else:
            known = functools.partial(total_share, event.p, event.contributions, event.dimension)
            share = elementwise(known, self.budget, self.order, event.levels, event.noise_bits)
        return event.sampling.bucket, event.count * share

    def total(self, buckets: Buckets) -> np.ndarray:
        return sum_with_partitions(buckets)

    def capacity(self, budgets: np.ndarray) -> np.ndarray:
        """1, of the one budget that the prices are shares of; nothing of any other."""
        return elementwise(lambda mine, own: 1.0 if mine == own else 0.0, self.budget, budgets)

    def epsilon(self, buckets: Buckets, delta: np.ndarray) -> np.ndarray:
        """At the budget's own delta, whatever `delta` says: the tails were bought with it."""
        return elementwise(_spent, self.budget, self.order, self.total(buckets))

    @classmethod
    def for_budget(cls, budget: Budget) -> Totals:
        """The order that asks least noise of Gaussian releases within what the tails leave of this
        budget.
        """
        return cls(budget, float(max(ORDERS, key=lambda a: _room(budget, a) / a)))


def _room(budget: Budget, order: float) -> float:
    return budget.epsilon - renyi_conversion(order, (1 - STAKE) * budget.delta) - 1e-12


def _spent(budget: Budget, order: float, share: float) -> float:
    if share == 0:
        return 0.0
    return max(
        0.0,
        share * _room(budget, order) + renyi_conversion(order, (1 - STAKE) * budget.delta) + 1e-12,
    )


def _gaussian_share(budget: Budget, order: float, noise_multiplier: float) -> float:
    room = _room(budget, order)
    if room > 0 and noise_multiplier > 0:
        return order / (2 * noise_multiplier**2) / room * (1 + 1e-12)
    return math.inf


@functools.lru_cache(maxsize=65536)
def total_share(
    p: float,
    contributions: int,
    dimension: int,
    budget: Budget,
    order: float,
    levels: int,
    noise_bits: int,
) -> float:
    """x of the module's claim for one total; infinite where the noise is too little to be
    accounted.
    """
    release = BinomialSum(contributions * int(noise_bits), p, int(levels), dimension)
    room = _room(budget, order)
    if room <= 0 or release.trials == 0:
        return math.inf
    part = _part(release, order, room)
    spent = renyi(release, order, _tail(release, budget, part)) / room * (1 + 1e-12)
    return max(spent, part)


def _part(release: BinomialSum, order: float, room: float) -> float:
    """Return the share of the budget at which the release's tails are bought."""
    guess = order * (release.shift**2 + release.dimension / 4) / (2 * release.variance) / room
    return 2.0 ** min(0, math.floor(math.log2(guess)))


def _tail(release: BinomialSum, budget: Budget, part: float) -> float:
    return STAKE * budget.delta * part / release.dimension * (1 - 1e-12)


class Schedule:
    """Releases that were made or will be, and what they cost together if they were fixed in
    advance.

    Formal guarantees: `epsilon` is a function of the releases, of whose noise counts and of delta
    alone. Every order gives a bound and the least is taken, which needs no order fixed beforehand
    where nothing adapts. So plan, run, ledger and pages say one number for one list of releases,
    whatever budget each of them has. A ledger's *rule* prices at an order fitted to the ledger's
    own budget: shares of that budget are what is enforced, whoever adapts, but as an epsilon a
    small share at that order is a loose bound (for a run planned for epsilon 3 under a ledger of 10
    it says 4.5), so it is never shown as one.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, Counter[BinomialSum | float | None]] = {}

    def add(self, bucket: str, event: Event | BinomialEvent, own: int | None = None) -> None:
        """One answer, in the bucket that a rule gave it. `own`: the silo's records in the batch,
        where no other noise counts.

        A server sees totals, with the noise of all `contributions`; whoever sees a silo's own
        messages, as the shuffler does, is up against its `own` records' noise. Gaussian answers
        cost the same before both.
        """
        kind: BinomialSum | float | None
        if not isinstance(event, BinomialEvent):
            kind = float(event.noise_multiplier)
        else:
            try:
                trials = (event.contributions if own is None else own) * int(event.noise_bits)
                kind = BinomialSum(trials, event.p, int(event.levels), event.dimension)
            except BadInput:  # beyond the accountant
                kind = None
        self._buckets.setdefault(bucket, Counter())[kind] += event.count

    def epsilon(self, delta: float) -> float:
        """Infinite where the accountant can give no bound. Of a partition each kind counts as often
        as in the batch that has it most often.
        """
        worst: dict[str, Counter[BinomialSum | float | None]] = {}
        for bucket, counts in self._buckets.items():
            part = bucket.rsplit("/", 1)[0]
            worst[part] = worst.get(part, Counter()) | counts
        return _scheduled(frozenset(sum(worst.values(), Counter()).items()), delta)


@functools.lru_cache(maxsize=4096)
def _scheduled(counts: frozenset[tuple[BinomialSum | float | None, int]], delta: float) -> float:
    totals = [(kind, n) for kind, n in counts if isinstance(kind, BinomialSum)]
    multipliers = [(kind, n) for kind, n in counts if isinstance(kind, float)]
    if len(totals) + len(multipliers) < len(counts) or any(kind == 0 for kind, _ in multipliers):
        return math.inf
    try:
        in_order = sorted(
            totals, key=lambda pair: (pair[0].trials, pair[0].levels, pair[1])
        )  # so that a sum of floats is one number
        return epsilon(in_order, delta, rho=math.fsum(n / (2 * kind**2) for kind, n in multipliers))
    except BadInput:
        return math.inf
