"""Price releases: one convention and three rules.

Each rule is a filter that is valid for adaptively chosen queries.

Convention: neighbours replace one record, n is public, noise multiplier = std / sensitivity. A
release is then exactly mu-GDP with mu = 1 / noise multiplier, and mu^2 adds up. The libraries have
other units, which are translated in `sampled.py` and nowhere else.

A rule turns an event into (bucket, amount) before any record is read. It also defines the sum of
the buckets, and how much fits into a budget. Amounts are NumPy arrays, so that the same lines price
one silo's query and a sweep of J runs over N silos.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy import special

from silodp.core.errors import BadInput
from silodp.core.events import Event, TotalEvent
from silodp.core.privacy.root import root
from silodp.core.privacy.totals import total_price
from silodp.core.sampling import Sampling

Buckets = Mapping[str, Any]
"""Bucket -> amount in the rule's unit: a number, or an array with one for each run and silo."""
ROUND_UP = 1 + 1e-9
"""The factor by which calibrated noise is raised, so that rounding never exceeds a budget."""


@dataclass(frozen=True)
class Budget:
    """(epsilon, delta) for each record of one silo, over everything that the silo ever releases."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise BadInput(f"epsilon is {self.epsilon:g}; it must be greater than 0")
        if not 0 < self.delta < 1:
            raise BadInput(
                f"delta is {self.delta:g}; it must lie strictly between 0 and 1 (1/n^2 is "
                "customary)"
            )
        if self.delta < 1e-300:
            raise BadInput(
                f"delta is {self.delta:g}, which the accountants cannot distinguish from 0; give "
                "at least 1e-300 (1/n^2 is customary)"
            )


# --- Gaussian differential privacy ---------------------------------------------------------------


def gdp_delta(mu: float, epsilon: float) -> float:
    """Return delta(epsilon) of a mu-GDP mechanism.

    It is Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2).
    """
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return 1.0
    a = -epsilon / mu + mu / 2
    b = -epsilon / mu - mu / 2
    # exp(eps + log Phi(b)) never overflows, since log Phi(b) <= -eps for b below a
    return float(max(0.0, special.ndtr(a) - math.exp(min(0.0, epsilon + special.log_ndtr(b)))))


@functools.lru_cache(maxsize=65536)
def gdp_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon for which mu-GDP gives (epsilon, delta)-DP, rounded up
    slightly.
    """
    if mu == 0 or gdp_delta(mu, 0.0) <= delta:
        return 0.0
    if math.isinf(mu) or mu > 1e4:
        return math.inf
    high = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1
    return root(lambda e: gdp_delta(mu, e) - delta, 0.0, high, 1e-12) * (1 + 1e-12)


@functools.lru_cache(maxsize=4096)
def gdp_mu(budget: Budget) -> float:
    """Return the largest mu for which mu-GDP implies the budget, rounded down by a part of 10^-12
    and by what rounding in `gdp_delta` may move it.
    """
    if math.isinf(budget.epsilon):
        return math.inf
    high = 1.0
    while gdp_delta(high, budget.epsilon) < budget.delta:
        high *= 2
    while gdp_delta(high / 2, budget.epsilon) > budget.delta:
        high /= 2
    mu = root(lambda m: gdp_delta(m, budget.epsilon) - budget.delta, high / 2, high, 0.0)
    return mu * max(0.0, 1 - 1e-12 - _rounded_off(mu, budget.epsilon))


def _rounded_off(mu: float, epsilon: float) -> float:
    """Return the part of mu by which rounding in `gdp_delta` may move a root.

    With u = 2^-52, a = mu/2 - epsilon/mu and b = a - mu, delta is Phi(a) less a term that is at
    most Phi(a) and phi(a) / |b|. The first has an error of 4 u (1 + a^2) parts at most, without a^2
    for a > 0. The second has one of 4 u (1 + epsilon + a^2) parts, since exponents of that size are
    rounded. The errors of a and b move delta by at most 4 u |b| phi(a). And delta rises with mu by
    phi(a). At small epsilon the two terms are nearly equal, so that all this is more than 10^-12.
    """
    a = mu / 2 - epsilon / mu
    b = a - mu
    mills = math.exp(float(special.log_ndtr(a)) + a * a / 2) * math.sqrt(2 * math.pi)
    first = (1 + min(a, 0.0) ** 2) * mills
    second = (1 + epsilon + a * a) * min(mills, 1 / abs(b))
    return 2.0**-52 * 4 * (first + second + abs(b)) / mu


def gaussian_sum(epsilons: Iterable[float], delta: float) -> float:
    """Return the epsilon of Gaussian parts together, from the epsilon of each at one delta.

    One point fixes a Gaussian part's whole curve. The result is never too small. An epsilon of 0
    still counts: its noise may be so large that delta covers it. It counts for as much as delta may
    hide.
    """
    mus = [gdp_mu(Budget(max(epsilon, 1e-9), delta)) for epsilon in epsilons]
    return gdp_epsilon(math.hypot(*mus) * (1 + 1e-9), delta)


def added(parts: Sequence[tuple[float, float]], *, gaussian: bool) -> tuple[float, float]:
    """Return the (epsilon, delta) of parts, each given by one point.

    The result is exact if all parts are `gaussian` at one delta. Otherwise epsilons and deltas add
    up.
    """
    if len(parts) > 1 and gaussian and len({delta for _, delta in parts}) == 1:
        return gaussian_sum((epsilon for epsilon, _ in parts), parts[0][1]), parts[0][1]
    return sum(epsilon for epsilon, _ in parts), sum(delta for _, delta in parts)


def gdp_to_zcdp(mu: float) -> float:
    """Return mu^2 / 2, the zCDP of Gaussian releases that are mu-GDP."""
    return mu * mu / 2


def user_level(budget: Budget, n: int) -> Budget:
    """Return the user-level DP of a whole silo from its ISRL-DP, as the paper converts it.

    That is (n eps, n e^((n-1) eps) delta).
    """
    exponent = (n - 1) * budget.epsilon + math.log(n) + math.log(budget.delta)
    return Budget(n * budget.epsilon, min(math.exp(min(exponent, 0.0)), 1 - 1e-16))


def record_budget_for_user(target: Budget, n: int, *, gaussian: bool) -> Budget:
    """Return the record-level budget of a silo that is (epsilon, delta)-DP as a whole.

    It is the paper's hybrid, or group privacy of mu where that allows more.

    The hybrid, eps / n with delta / (n e^((n-1) eps / n)), is valid for every mechanism (the paper
    has delta / (4 n), for eps <= 1). If all releases are Gaussian on full or disjoint batches, n
    replaced records move a mean n times as far. So mu_user = n mu, and a record's mu may be that of
    the target over n. The answer then has the target's delta. A sub-sampled mechanism has no such
    conversion from one point (eps, delta).
    """
    # The exponent is capped where a float would overflow. Budget refuses such a small delta.
    growth = math.exp(min((n - 1) * target.epsilon / n, 700.0))
    hybrid = Budget(target.epsilon / n, target.delta / (n * growth))
    group = gdp_mu(target) / n
    if not gaussian or gdp_mu(hybrid) > group:
        return hybrid
    return Budget(gdp_epsilon_exactly(group, target.delta), target.delta)


def gdp_epsilon_exactly(mu: float, delta: float) -> float:
    """Return `gdp_epsilon`. Raise BadInput if mu is so small that delta alone covers it.

    No epsilon > 0 stands for such a budget.
    """
    epsilon = gdp_epsilon(mu, delta)
    if epsilon <= 0:
        raise BadInput(
            f"a record-level mu of {mu:.3g} is already covered by delta = {delta:g}; "
            "choose a smaller delta for this user-level target"
        )
    return epsilon


# --- rules ---------------------------------------------------------------------------------------


class Rule(Protocol):
    """A filter: while `total(buckets) <= capacity(budgets)`, the whole transcript is within the
    budget.

    Arrays have one entry per run and silo, (J, N), or none for a single ledger. `n` broadcasts
    against them.
    """

    @property
    def name(self) -> str: ...
    def price(self, event: Event | TotalEvent, n: np.ndarray) -> tuple[str, np.ndarray]: ...
    def total(self, buckets: Buckets) -> np.ndarray: ...
    def capacity(self, budgets: np.ndarray) -> np.ndarray: ...
    def epsilon(self, buckets: Buckets, delta: np.ndarray) -> np.ndarray: ...


def budget_array(budgets: Budget | Sequence) -> np.ndarray:
    """Return budgets as an object array: one, one per silo (N,), or one per run and silo (J, N)."""
    if isinstance(budgets, Budget):
        array = np.empty((), dtype=object)
        array[()] = budgets
        return array
    rows = [budget_array(b) for b in budgets]
    return np.stack(rows)


def add_amounts(*amounts: Buckets) -> dict[str, Any]:
    """Return the sum of these amounts, bucket by bucket."""
    total: dict[str, Any] = {}
    for each in amounts:
        for bucket, amount in each.items():
            if bucket in total:
                total[bucket] = total[bucket] + amount
            else:
                total[bucket] = amount
    return total


def total_of(rule: Rule, *amounts: Buckets) -> np.ndarray:
    """Return the rule's total of all these amounts."""
    buckets = add_amounts(*amounts)
    return np.asarray(rule.total({bucket: np.asarray(a) for bucket, a in buckets.items()}))


def fits(rule: Rule, capacity: np.ndarray | float, *amounts: Buckets, slack: float = 0.0) -> bool:
    """Return whether the total of all these amounts stays within the capacity of every run and
    silo.

    A share `slack` of the capacity must stay free. Every ledger decides by this function whether a
    charge fits.
    """
    return bool((total_of(rule, *amounts) <= capacity * (1 - slack)).all())


def elementwise(function, *arrays) -> np.ndarray:
    """Return the function's values over the arrays, in float64."""
    return np.asarray(np.vectorize(function, otypes=[np.float64])(*arrays))


def no_totals(event: Event | TotalEvent, rule: str) -> Event:
    """Return the event. Raise Refused if it is of a total."""
    if event.total:
        raise BadInput(
            f"the {rule} ledger cannot price such totals; use the gdp rule, and today's totals"
        )
    return event


def sum_with_partitions(buckets: Buckets) -> np.ndarray:
    """Return the whole-silo bucket plus, for each stored partition, the maximum over its batches.

    No record is in two batches of one partition.
    """
    worst: dict[str, np.ndarray] = {}
    for key, amount in buckets.items():
        part = key.rsplit("/", 1)[0]
        if part in worst:
            worst[part] = np.maximum(worst[part], amount)
        else:
            worst[part] = np.asarray(amount)
    return sum(worst.values(), np.zeros(()))


@dataclass(frozen=True)
class GDP:
    """Gaussian releases and totals on full or disjoint batches. Exact; a valid filter when clip,
    noise and stopping adapt (Smith & Thakurta 2022). Of totals `core.privacy.totals` has the proof.
    """

    name: str = "gdp"

    def price(self, event: Event | TotalEvent, n: np.ndarray) -> tuple[str, np.ndarray]:
        if event.sampling.sampled:
            raise BadInput(
                f"the gdp ledger cannot price {type(event.sampling).__name__} batches; use "
                "the renyi or the committed rule for them"
            )
        if isinstance(event, TotalEvent):
            price = elementwise(total_price, _float64(event.noise_multiplier), event.counted)
            return event.sampling.bucket, event.count * price
        event = no_totals(event, self.name)
        with np.errstate(divide="ignore"):
            return event.sampling.bucket, event.count / np.square(_float64(event.noise_multiplier))

    def total(self, buckets: Buckets) -> np.ndarray:
        """Return the sum of mu^2."""
        return sum_with_partitions(buckets)

    def capacity(self, budgets: np.ndarray) -> np.ndarray:
        """Return the largest mu^2 of each budget."""
        return elementwise(lambda b: gdp_mu(b) ** 2, budgets)

    def epsilon(self, buckets: Buckets, delta: np.ndarray) -> np.ndarray:
        """Return the epsilon that is spent at this delta."""
        return elementwise(gdp_epsilon, np.sqrt(self.total(buckets)), delta)


@dataclass(frozen=True, eq=False)
class Renyi:
    """Any mix of batches at one Renyi order, which is fixed when the ledger is created.

    It is a valid filter (Feldman & Zrnic 2021).
    """

    order: float | np.ndarray
    name: str = "renyi"

    def __post_init__(self) -> None:
        if not np.all(np.asarray(self.order) > 1):
            raise BadInput(f"the Renyi order is {self.order}; it must be greater than 1")

    def price(self, event: Event | TotalEvent, n: np.ndarray) -> tuple[str, np.ndarray]:
        """Return the bucket and the Renyi divergence of the event."""
        # A ledger with the gdp rule does not load this module.
        from silodp.core.privacy.sampled import renyi

        event = no_totals(event, self.name)
        return event.sampling.bucket, event.count * elementwise(
            functools.partial(renyi, event.sampling),
            _float64(event.noise_multiplier),
            self.order,
            n,
        )

    def total(self, buckets: Buckets) -> np.ndarray:
        """Return the sum of the divergences."""
        return sum_with_partitions(buckets)

    def capacity(self, budgets: np.ndarray) -> np.ndarray:
        """Return the divergence that each budget allows."""
        return elementwise(
            lambda b, a: max(0.0, b.epsilon - renyi_conversion(a, b.delta)), budgets, self.order
        )

    def epsilon(self, buckets: Buckets, delta: np.ndarray) -> np.ndarray:
        """Return the epsilon that is spent at this delta."""
        total = self.total(buckets)
        converted = total + elementwise(renyi_conversion, self.order, delta)
        return np.where(total == 0, 0.0, np.maximum(0.0, converted))

    @classmethod
    def for_gaussian(cls, budget: Budget) -> Renyi:
        """Return the rule at the order that needs the least noise for plain Gaussian releases."""

        def allowed(order: float) -> float:
            """Return the mu^2 / 2 that fits the budget at this order."""
            return (budget.epsilon - renyi_conversion(order, budget.delta)) / order

        return cls(float(max(RENYI_ORDERS, key=allowed)))


RENYI_ORDERS = np.geomspace(1.05, 4096, 600)


def renyi_conversion(order: float, delta: float) -> float:
    """Return what delta adds (Canonne, Kamath & Steinke 2020, prop. 12).

    epsilon = D_a + log(1 - 1/a) - (log delta + log a) / (a - 1).
    """
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


@dataclass(frozen=True, eq=False)
class Committed:
    """A schedule of releases that is fixed when the ledger is created. Only the point w adapts.

    It is accounted by privacy-loss distributions. The capacity is the schedule itself, as the count
    of each kind. Order and early stopping may adapt: the answers to all of a fixed multiset of
    releases determine the answers to any adaptively ordered part of it.
    """

    schedule: tuple[Event, ...]
    name: str = "committed"

    def price(self, event: Event | TotalEvent, n: np.ndarray) -> tuple[str, np.ndarray]:
        """Return the event's place on the schedule and the share of it. Raise BadInput if it is not
        on it.
        """
        event = no_totals(event, self.name)
        for index, kind in enumerate(self.schedule):
            if kind.sampling == event.sampling and np.array_equal(
                _float64(kind.noise_multiplier), _float64(event.noise_multiplier)
            ):
                with np.errstate(divide="ignore"):
                    return f"{index}", np.broadcast_to(
                        event.count / _float64(kind.count), np.shape(kind.noise_multiplier)
                    )
        raise BadInput(
            f"the ledger's schedule has no release on {event.sampling} with the noise multiplier "
            f"{event.noise_multiplier}; ask for a release that is on the schedule"
        )

    def total(self, buckets: Buckets) -> np.ndarray:
        """Return the largest used share of any kind on the schedule."""
        worst = np.zeros(())
        for amount in buckets.values():
            worst = np.maximum(worst, amount)
        return worst

    def capacity(self, budgets: np.ndarray) -> np.ndarray:
        """Return 1 if the whole schedule fits the budget, otherwise 0, so that nothing may be
        asked.

        The 1 is raised slightly, to allow for rounding of the shares.
        """
        complete = {f"{i}": np.ones(()) for i in range(len(self.schedule))}
        deltas = elementwise(lambda b: b.delta, budgets)
        epsilons = elementwise(lambda b: b.epsilon, budgets)
        fits = self.epsilon(complete, deltas) <= epsilons
        return np.where(fits, ROUND_UP, 0.0)

    def epsilon(self, buckets: Buckets, delta: np.ndarray) -> np.ndarray:
        """Return the epsilon that is spent at this delta."""
        multipliers = [_float64(kind.noise_multiplier) for kind in self.schedule]
        counts = [
            np.rint(buckets.get(f"{i}", np.zeros(())) * kind.count)
            for i, kind in enumerate(self.schedule)
        ]

        def one(d: float, *values: float) -> float:
            """Return the epsilon of one silo and run, from its multipliers and then its counts."""
            used = zip(
                self.schedule,
                values[: len(self.schedule)],
                values[len(self.schedule) :],
                strict=True,
            )
            return composed_epsilon(
                tuple((kind.sampling, m, int(c)) for kind, m, c in used if c), d
            )

        return elementwise(one, delta, *multipliers, *counts)


def _float64(value) -> np.ndarray:
    """Return a value as a float64 array."""
    return np.asarray(value, dtype=np.float64)


@functools.lru_cache(maxsize=4096)
def composed_epsilon(releases: tuple[tuple[Sampling, float, int], ...], delta: float) -> float:
    """Return the epsilon of a fixed list of (sampling, noise multiplier, count).

    It is computed by privacy-loss distributions with pessimistic rounding.
    """
    if any(multiplier == 0 for _, multiplier, _ in releases):
        return math.inf
    if all(sampling.whole for sampling, _, _ in releases):
        return gdp_epsilon(
            math.sqrt(sum(count / multiplier**2 for _, multiplier, count in releases)), delta
        )
    from dp_accounting.pld import pld_privacy_accountant as library

    from silodp.core.privacy.sampled import pld_event

    accountant = library.PLDAccountant(
        library.NeighborRel.REPLACE_ONE, value_discretization_interval=5e-4
    )
    for sampling, multiplier, count in releases:
        accountant.compose(pld_event(sampling, multiplier), count)
    return accountant.get_epsilon(delta)
