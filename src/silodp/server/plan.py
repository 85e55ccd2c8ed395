"""Noise before data. The algorithm runs against a federation that only collects prices, and its
noise is set to use up each budget.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.events import Event, TotalEvent
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import (
    GDP,
    RENYI_ORDERS,
    ROUND_UP,
    Budget,
    Committed,
    Renyi,
    Rule,
    budget_array,
    composed_epsilon,
    renyi_conversion,
    root,
)
from silodp.core.problem.losses import squared_error
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, Sampling, WithoutReplacement
from silodp.server.federation import Everyone, Fixed, Measured, StopRun

Run = Callable[..., Iterator[Tensor]]


@dataclass(frozen=True)
class Asked:
    """One query of a dry run: its kind, its event at the mechanism's noise, and the silos that
    would answer it.
    """

    kind: str
    event: Event | TotalEvent
    silos: tuple[int, ...]


class DryRun:
    """A federation without silos. It logs every query, and answers zero."""

    def __init__(self, participation: Everyone, silos: int, log: list[Asked]) -> None:
        self._participation = participation
        self._silos = silos
        self._log = log

    def mean(self, query: Query) -> Tensor:
        """Log the query, and return zero in the shape of its answer."""
        self._log.append(Asked(query.mechanism.kind, query.event(), self._participation.draw()))
        return torch.zeros(query.statistic.shape)

    def measure(self, query: Query) -> Measured:
        """Log the query, and return zero with a placeholder for its error."""
        return Measured(self.mean(query), torch.ones(1, 1), torch.ones(1, 1))

    def everyone(self) -> DryRun:
        """Return a dry run of all silos, also those that take no part in training rounds."""
        return DryRun(Everyone(self._silos), self._silos, self._log)

    def cohort(self) -> DryRun:
        """Return a dry run of the silos of one round, which stay the same."""
        return DryRun(Fixed(self._participation.draw()), self._silos, self._log)

    def each(self) -> dict[int, DryRun]:
        """Return a dry run for each silo of one round, by the silo's number."""
        return {i: DryRun(Fixed((i,)), self._silos, self._log) for i in self._participation.draw()}


class Nowhere:
    """A problem of one dimension, for dry runs."""

    dim = 1
    intercept = ()
    model = torch.nn.Linear(1, 1, bias=False)
    loss = staticmethod(squared_error)

    def split(self, w: Tensor) -> dict[str, Tensor]:
        """Return the only parameter, in the shape of the model's weight."""
        return {"weight": w[..., None]}

    def prox(self, w: Tensor, step) -> Tensor:
        """Return the point unchanged."""
        return w


def dry_run(run: Run, mechanisms: Mapping[str, Gaussian], participation: Everyone) -> list[Asked]:
    """Return every query that `run` would make, in order.

    Prices depend on sampling and noise alone, never on answers. Raise BadInput if there is no
    query.
    """
    log: list[Asked] = []
    for _ in run(
        DryRun(participation.rehearsal(), participation.silos, log),
        Nowhere(),
        torch.zeros(1, 1),
        **mechanisms,
    ):
        pass
    if not log:
        raise BadInput(
            "the algorithm asks nothing; it must ask `fed`, or there is nothing to learn from"
        )
    return log


class PlanLimits:
    """A check that keeps a run within its plan. No silo is asked more often for a kind of release
    than was priced.
    """

    def __init__(self, plan: Plan) -> None:
        self._left: dict[str, np.ndarray] = {}
        """Releases that may still be asked, by kind and silo."""
        for asked in plan.asked:
            left = self._left.setdefault(asked.kind, np.zeros(len(plan.counts), dtype=int))
            left[list(asked.silos)] += asked.event.count

    def __call__(self, query: Query, silos: Sequence[int]) -> None:
        """Count the query as asked. Raise StopRun if the plan does not have it."""
        kind = query.mechanism.kind
        left = self._left.setdefault(kind, np.zeros(max(silos, default=0) + 1, dtype=int))
        left[list(silos)] -= query.event().count
        if (left[list(silos)] < 0).any():
            raise StopRun(
                f"the algorithm asks for more releases of kind {kind!r} than were planned; "
                "what it asks may not depend on answers"
            )


@dataclass(frozen=True)
class Plan:
    """An algorithm's mechanisms with their noise, the rule that prices them, and the queries of the
    run.
    """

    mechanisms: dict[str, Any]
    """A Gaussian or Shuffled mechanism for each kind of release."""
    rule: Rule
    asked: list[Asked]
    counts: tuple[int, ...]
    budgets: np.ndarray

    def count(self, kind: str, silo: int) -> int:
        """Return how many releases of this kind the silo makes. A local step is a release."""
        return sum(a.event.count for a in self.asked if a.kind == kind and silo in a.silos)

    def spent(self) -> np.ndarray:
        """Return the epsilon (J, N) that the run will have spent at the end, at each budget's
        delta.
        """
        return self.rule.epsilon(
            self._buckets(), np.vectorize(lambda b: b.delta, otypes=[float])(self.budgets)
        )

    def mu(self) -> np.ndarray | None:
        """Return the mu (J, N) with which the whole run is mu-GDP: the root of what the gdp rule
        counts.

        Return None for other rules, which give no mu.
        """
        if self.rule.name == "gdp":
            return np.sqrt(self.rule.total(self._buckets()))
        return None

    def share_of_budget(self) -> np.ndarray:
        """Return the part of each budget that a run will have used at the end: (J, N)."""
        return self.rule.total(self._buckets()) / self.rule.capacity(self.budgets)

    def _buckets(self) -> dict[str, np.ndarray]:
        """Return the price (J, N) of each bucket of the rule, over the whole run."""
        buckets: dict[str, np.ndarray] = {}
        for asked in self.asked:
            event = asked.event
            mechanism = self.mechanisms[asked.kind]
            key, price = self.rule.price(mechanism.noisy(event), np.asarray(self.counts))
            answers = np.isin(np.arange(len(self.counts)), asked.silos)
            buckets[key] = buckets.get(key, 0.0) + np.where(answers, price, 0.0)
        return buckets


def calibrate(
    run: Run,
    mechanisms: Mapping[str, Gaussian],
    budgets: Budget | Sequence,
    counts: Sequence[int],
    participation: Everyone | None = None,
    *,
    shares: Mapping[str, float] | None = None,
    rule: str | None = None,
) -> Plan:
    """Return a plan with the noise at which `run` as a whole spends each silo's budget, and no
    more.

    Arguments:

    - `run`: the algorithm with all of its arguments except the mechanisms.
    - `mechanisms`: a mechanism for each kind of release. Its noise multiplier is ignored.
    - `budgets`: one budget for all silos, one for each silo, or one for each run and silo.
    - `counts`: the number of records of each silo.
    - `participation`: the silos of each round, by default all.
    - `shares`: the part of the budget (mu^2) of each kind of release, by default equal.
    - `rule`: "gdp" (exact; full and disjoint batches), "committed" (privacy-loss distributions;
      full and Poisson batches) or "renyi" (any batches). The default is the tightest that applies.

    Raise BadInput for a batch without a record, a share that is not positive, or an unknown rule.
    """
    participation = participation or Everyone(len(counts))
    unit_noise = {kind: replace(m, noise_multiplier=1.0) for kind, m in mechanisms.items()}
    asked = dry_run(run, unit_noise, participation)
    kinds = [kind for kind in mechanisms if any(a.kind == kind for a in asked)]
    shares = _shares(shares, kinds)
    # This refuses a batch without a record before anything is spent.
    for kind, silos in dict.fromkeys((a.kind, a.silos) for a in asked):
        for silo in silos:
            mechanisms[kind].at(0).sensitivity(counts[silo])
    array = budget_array(budgets)
    array = np.broadcast_to(array, np.broadcast_shapes(array.shape, (1, len(counts))))
    name = rule or _default_rule([a.event for a in asked])
    if name == "gdp":
        # This refuses sub-sampled batches, with a message.
        for sampling in {a.event.sampling for a in asked}:
            GDP().price(Event(sampling, 1.0), np.asarray(counts))
    # Silos that take part in the same queries have the same profile, which is computed once.
    groups = dict.fromkeys(a.silos for a in asked)
    parts = [tuple(silo in group for group in groups) for silo in range(len(counts))]
    profile_of = {part: _profile(asked, kinds, shares, parts.index(part)) for part in set(parts)}
    profiles = [profile_of[part] for part in parts]
    multipliers = {kind: np.zeros(array.shape) for kind in kinds}
    orders = np.full(array.shape, 2.0)
    for j, i in np.ndindex(array.shape):
        budget: Budget = array[j, i]  # type: ignore[assignment]
        scale, orders[j, i] = _solve(name, profiles[i], budget, counts[i])
        for kind, weight in profiles[i].weights:
            multipliers[kind][j, i] = scale * weight
    noisy = {kind: replace(m, noise_multiplier=0.0) for kind, m in mechanisms.items()}
    for kind in kinds:
        noisy[kind] = replace(noisy[kind], noise_multiplier=torch.from_numpy(multipliers[kind]))
    return Plan(noisy, _rule(name, orders, asked, noisy, len(counts)), asked, tuple(counts), array)


def with_multipliers(
    run: Run,
    mechanisms: Mapping[str, Gaussian],
    counts: Sequence[int],
    budgets: Budget | Sequence,
    participation: Everyone | None = None,
) -> Plan:
    """Return a plan with given noise, not calibrated (the paper's constants, or none). Its `spent`
    is the real cost.
    """
    participation = participation or Everyone(len(counts))
    asked = dry_run(run, mechanisms, participation)
    array = budget_array(budgets)
    array = np.broadcast_to(array, np.broadcast_shapes(array.shape, (1, len(counts))))
    return Plan(dict(mechanisms), GDP(), asked, tuple(counts), array)


# --- the solver ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Profile:
    """The queries of one silo: the relative noise weight of each kind, and the distinct events with
    their counts at those weights.
    """

    weights: tuple[tuple[str, float], ...]
    events: tuple[tuple[object, float, int], ...]
    full: float
    """mu^2 at scale 1: the sum of 1 / weight^2, with the maximum over a partition's batches."""


def _shares(shares: Mapping[str, float] | None, kinds: Sequence[str]) -> dict[str, float]:
    """Return the share of each kind, with a sum of 1. Raise BadInput for a share that is not
    positive.
    """
    given = dict(shares) if shares else {}
    total = sum(given.get(kind, 1.0) for kind in kinds)
    for kind, share in given.items():
        if not 0 < share < math.inf:
            raise BadInput(f"the budget share of {kind} is {share:g}; it must be greater than 0")
    return {kind: given.get(kind, 1.0) / total for kind in kinds}


def _profile(
    asked: Sequence[Asked], kinds: Sequence[str], shares: Mapping[str, float], silo: int
) -> _Profile:
    """Return the profile of one silo: with its weights each kind has its share of mu^2."""
    queries = [a for a in asked if silo in a.silos]

    def total(events: Sequence[tuple[Event | TotalEvent, float]]) -> float:
        buckets: dict[str, np.ndarray] = {}
        for event, weight in events:
            sampling = event.sampling
            # The gdp rule has no price for a sampled batch. A full batch costs more.
            if sampling.sampled:
                sampling = FullBatch()
            key, price = _gdp_price(sampling, weight, event.count)
            buckets[key] = buckets.get(key, np.zeros(())) + price
        return float(GDP().total(buckets))

    weights = {}
    for kind in kinds:
        price = total([(a.event, 1.0) for a in queries if a.kind == kind])
        weights[kind] = math.sqrt(max(price, 1.0) / shares[kind])
    merged: dict[tuple[object, float], int] = {}
    for a in queries:
        key = (a.event.sampling, weights[a.kind])
        merged[key] = merged.get(key, 0) + a.event.count
    return _Profile(
        tuple(weights.items()),
        tuple((sampling, weight, count) for (sampling, weight), count in merged.items()),
        total([(a.event, weights[a.kind]) for a in queries]),
    )


@functools.lru_cache
def _gdp_price(sampling: Sampling, weight: float, count: int) -> tuple[str, np.ndarray]:
    """Return the bucket and the price of an event under the gdp rule."""
    return GDP().price(Event(sampling, weight, count), np.zeros(()))


@functools.lru_cache(maxsize=4096)
def _solve(rule: str, profile: _Profile, budget: Budget, n: int) -> tuple[float, float]:
    """Return (scale, Renyi order): the least scale of the noise weights at which this silo's events
    fit its budget.
    """
    if math.isinf(budget.epsilon) or profile.full == 0:
        # The budget is infinite, or the plan has no query. In the second case the noise is zero,
        # so a query would have an infinite price, and would be refused.
        return 0.0, 2.0
    exact = math.sqrt(profile.full) / math.sqrt(float(GDP().capacity(budget_array(budget))))
    if rule == "gdp":
        return exact * ROUND_UP, 2.0
    if rule == "committed":

        def excess(log_scale: float) -> float:
            scale = math.exp(log_scale)
            events = tuple(
                (sampling, weight * scale, count) for sampling, weight, count in profile.events
            )
            return composed_epsilon(events, budget.delta) - budget.epsilon  # type: ignore[arg-type]

        return _least(excess, exact), 2.0

    def scale_at(order: float) -> float:
        room = budget.epsilon - renyi_conversion(order, budget.delta)
        if room <= 0:
            return math.inf
        ledger = Renyi(order)

        def excess(log_scale: float) -> float:
            buckets: dict[str, np.ndarray] = {}
            for sampling, weight, count in profile.events:
                key, price = ledger.price(
                    Event(sampling, weight * math.exp(log_scale), count),  # type: ignore[arg-type]
                    np.asarray(n),
                )
                buckets[key] = buckets.get(key, np.zeros(())) + price
            return float(ledger.total(buckets)) / room - 1

        return _least(excess, exact)

    orders = RENYI_ORDERS
    if any(isinstance(sampling, WithoutReplacement) for sampling, _, _ in profile.events):
        orders = orders[orders <= 64]  # The library's bound is slow and loose at higher orders.
    best = min(orders[::20], key=scale_at)
    near = orders[np.abs(np.log(orders / best)) < 0.3]
    best = min(near[::4], key=scale_at)
    return scale_at(float(best)), float(best)


def _least(excess: Callable[[float], float], guess: float) -> float:
    """Return the least scale with excess <= 0, rounded up. The excess falls in log(scale)."""
    low = high = math.log(guess)
    while excess(high) > 0:
        high += 0.7
        if high > math.log(guess) + 30:
            return math.inf
    while excess(low) <= 0:
        low -= 0.7
        if low < math.log(guess) - 30:
            return math.exp(low)
    least = root(excess, low, high, 1e-7)
    while excess(least) > 0:
        least += 1e-7
    return math.exp(least)


def _default_rule(events: Sequence[Event | TotalEvent]) -> str:
    """Return the name of the tightest rule that has prices for all of these events."""
    kinds = {type(e.sampling) for e in events}
    if not kinds & {Poisson, WithoutReplacement}:
        return "gdp"
    if kinds & {WithoutReplacement, DisjointBatches}:
        return "renyi"
    return "committed"


def _rule(
    name: str,
    orders: np.ndarray,
    asked: Sequence[Asked],
    mechanisms: Mapping[str, Gaussian],
    silos: int,
) -> Rule:
    """Return the rule of this name. Raise BadInput if it is unknown."""
    match name:
        case "gdp":
            return GDP()
        case "renyi":
            return Renyi(orders)
        case "committed":
            most: dict[tuple[Sampling, bytes], Event] = {}
            for a in asked:
                multiplier = np.asarray(mechanisms[a.kind].noise_multiplier)
                # Kinds with the same noise are one entry, because their events look the same.
                key = (a.event.sampling, multiplier.tobytes())
                count = a.event.count * np.isin(np.arange(silos), a.silos)
                if key in most:
                    count = most[key].count + count
                most[key] = Event(a.event.sampling, torch.from_numpy(multiplier), count)
            return Committed(tuple(most.values()))
    raise BadInput(f"ledger rule {name!r} is unknown; choose gdp, renyi or committed")
