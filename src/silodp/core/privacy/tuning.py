"""What choosing the best of several private runs costs: pure arithmetic on what one run costs.

Two prices, for two audiences. Whoever sees every run (an untrusted server does) sees a composition:
mu^2 adds up over all of them, and a random number of runs hides nothing. Whoever sees nothing but
the best run of a secret random number of them sees a selection, which is much cheaper (Papernot &
Steinke 2022, "Hyperparameter Tuning with Renyi Differential Privacy"). A selection needs somebody
trusted who runs them all and keeps the others, and their number, to himself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import RENYI_ORDERS, Budget, gdp_delta, gdp_mu, renyi_conversion
from silodp.core.privacy.root import root

MOST = 10_000
"""Runs on average, at most."""
_ORDERS: tuple[float, ...] = tuple(RENYI_ORDERS.tolist())


class Run(Protocol):
    """What one run, its score included, costs: Renyi divergence by order, and delta by epsilon,
    both for either order of neighbours.
    """

    def rdp(self, order: float) -> float: ...
    def delta(self, epsilon: float) -> float: ...


@dataclass(frozen=True)
class GaussianRun:
    """A run that is mu-GDP by Gaussian releases on full or disjoint batches."""

    mu: float

    def rdp(self, order: float) -> float:
        return order * self.mu**2 / 2

    def delta(self, epsilon: float) -> float:
        return gdp_delta(self.mu, epsilon)


# --- how many runs -------------------------------------------------------------------------------


class Repetitions(Protocol):
    """A law of the secret number K of runs, and what it makes of one run's cost."""

    @property
    def mean(self) -> float: ...
    def probability(self, k: int) -> float: ...
    def size(self, k: int) -> float:
        """No less than any number that `probability` of k has in its exponent: what its rounding
        errors are relative to.
        """
        ...

    def rdp(self, run: Run, order: float) -> float: ...


@dataclass(frozen=True)
class TruncatedNegativeBinomial:
    """P[K = k] is proportional to (1 - gamma)^k prod_{l < k} (l + eta) / (l + 1), k >= 1; eta = 1
    is geometric, eta = 0 logarithmic.
    """

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        if not self.eta > -1 or math.isinf(self.eta):
            raise BadInput(
                f"eta is {self.eta:g}; it must be a number greater than -1 (1 is the "
                "geometric law, 0 the logarithmic)"
            )
        if not 0 < self.gamma < 1:
            raise BadInput(
                f"gamma is {self.gamma:g}; it must lie strictly between 0 and 1, and small "
                "means many runs"
            )

    @property
    def mean(self) -> float:
        if self.eta == 0:
            return (1 / self.gamma - 1) / math.log(1 / self.gamma)
        return (
            self.eta
            * (1 - self.gamma)
            / (self.gamma * -math.expm1(self.eta * math.log(self.gamma)))
        )

    def probability(self, k: int) -> float:
        if k < 1:
            return 0.0
        tail = k * math.log1p(-self.gamma)
        if self.eta == 0:
            return math.exp(tail) / (k * math.log(1 / self.gamma))
        product = math.lgamma(k + self.eta) - math.lgamma(1 + self.eta) - math.lgamma(k + 1)
        power = self.eta * math.log(
            1 / self.gamma
        )  # eta / (e^power - 1) in logarithms, for e^power may be no float
        return math.exp(
            tail
            + product
            + math.log(abs(self.eta))
            - max(0.0, power)
            - math.log(-math.expm1(-abs(power)))
        )

    def size(self, k: int) -> float:
        return (
            1
            + k * -math.log1p(-self.gamma)
            + math.lgamma(k + abs(self.eta) + 3)
            + (1 + abs(self.eta)) * (1 - math.log(self.gamma))
        )

    def rdp(self, run: Run, order: float) -> float:
        """Theorem 2: eps' = eps + (1 + eta) ((1 - 1/b) eps_b + log(1/gamma) / b) + log E[K] /
        (order - 1), at the best other order b.
        """
        return (
            run.rdp(order)
            + (1 + self.eta) * _at_another_order(run, self.gamma)
            + math.log(self.mean) / (order - 1)
        )


@functools.lru_cache(maxsize=1024)
def _at_another_order(run: Run, gamma: float) -> float:
    return min((1 - 1 / b) * run.rdp(b) + math.log(1 / gamma) / b for b in _ORDERS)


@dataclass(frozen=True)
class PoissonRepetitions:
    """K ~ Poisson(mean); with K = 0 nothing is run, and the answer is a constant that was fixed
    before.
    """

    mean: float

    def __post_init__(self) -> None:
        if not 1 <= self.mean < math.inf:
            raise BadInput(f"the mean number of runs is {self.mean:g}; it must be 1 or more")

    def probability(self, k: int) -> float:
        if k >= 0:
            return math.exp(k * math.log(self.mean) - self.mean - math.lgamma(k + 1))
        return 0.0

    def size(self, k: int) -> float:
        return 1 + k * math.log(self.mean) + self.mean + math.lgamma(k + 3)

    def rdp(self, run: Run, order: float) -> float:
        """Theorem 6: eps' = eps + mean delta + log(mean) / (order - 1), delta that of one run at
        epsilon = log(1 + 1 / (order - 1)).

        The probability e^-mean of K = 0 is added inside the logarithm, where the printed theorem
        leaves it out; it only adds.
        """
        delta = run.delta(math.log1p(1 / (order - 1)))
        some = math.log(self.mean) + (order - 1) * (run.rdp(order) + self.mean * delta)
        return float(np.logaddexp(-self.mean, some)) / (order - 1)


def repetitions_by_name(text: str) -> Repetitions:
    """ "poisson:MEAN", "geometric:MEAN" or "tnb:ETA:GAMMA", of which nobody could carry out more
    than `MOST` runs on average.
    """
    law = _law(text)
    if law.mean > MOST:
        raise BadInput(
            f"repetitions {text!r} are {law.mean:.3g} runs on average; give a law with at "
            f"most {MOST:,}"
        )
    if isinstance(law, TruncatedNegativeBinomial) and law.gamma * MOST < 1 - 1e-9:
        raise BadInput(
            f"gamma is {law.gamma:g}, with which there may be millions of runs; give at "
            f"least {1 / MOST:g}"
        )
    return law


def _law(text: str) -> Repetitions:
    name, *numbers = text.split(":")
    try:
        values = [float(n) for n in numbers]
    except ValueError:
        values = []
    match name, values:
        case "poisson", [mean]:
            return PoissonRepetitions(mean)
        case "geometric", [mean] if mean > 1:
            return TruncatedNegativeBinomial(1.0, 1 / mean)
        case "tnb", [eta, gamma]:
            return TruncatedNegativeBinomial(eta, gamma)
    raise BadInput(
        f"repetitions {text!r} are unknown; use poisson:MEAN, geometric:MEAN (mean greater "
        "than 1) or tnb:ETA:GAMMA"
    )


def draw(repetitions: Repetitions, uniform: float) -> int:
    """The K that belongs to a uniform number in [0, 1): inversion of the distribution function, as
    far as its sum grows in a float.

    `drawn_apart` says how far from the law that is, and `selected_epsilon` charges it to delta.
    """
    k = 0
    before = -1.0
    below = repetitions.probability(0)
    while below <= uniform and (below > before or k <= repetitions.mean):
        k += 1
        before = below
        below = below + repetitions.probability(k)
    return k


@functools.lru_cache(maxsize=64)
def drawn_apart(repetitions: Repetitions) -> float:
    """How far the law of `draw` is from the law that is priced, at most, in total variation.

    Three things part them. Probabilities are computed in floats: each of the few terms in an
    exponent is off by a few units in the last place of its `size` (32 of them are counted), and
    every addition by one of the sum. A uniform number is a multiple of 2^-53, so each K gains or
    loses one. And the sum stops where it no longer grows: what is left of 1 goes to the last K,
    2^-53 or, where the tail is long, some thousands of it.
    """
    k = 0
    before = -1.0
    below = repetitions.probability(0)
    errors = below * repetitions.size(0) * 2.0**-47
    while below > before or k <= repetitions.mean:
        k += 1
        weight = repetitions.probability(k)
        before = below
        below = below + weight
        errors += weight * repetitions.size(k) * 2.0**-47
    return abs(1 - below) + 2 * errors + (k + 2) * 2.0**-51


# --- the two prices ------------------------------------------------------------------------------


def selected_epsilon(
    repetitions: Repetitions, run: Run, delta: float, *, beside: float = 0.0
) -> float:
    """Epsilon of the best of K runs, all else kept secret, together with Gaussian releases of mu^2
    = `beside` made once.

    The theorems are about K's exact law; what is drawn is t = `drawn_apart` from it, whatever the
    data. So for every event S, P'[S | X] <= P[S | X] + t <= e^epsilon P[S | X'] + d + t <=
    e^epsilon P'[S | X'] + d + (1 + e^epsilon) t, and epsilon is taken at the d that this leaves of
    delta; infinite if it leaves none.
    """
    apart = drawn_apart(repetitions)
    cut = 0.0
    found = 0.0
    while cut < delta:
        found = _selected_exactly(repetitions, run, delta - cut, beside)
        needed = (1 + math.exp(min(found, 700.0))) * apart
        if needed <= cut:
            return found
        cut = 1.001 * needed
    return math.inf


def _selected_exactly(repetitions: Repetitions, run: Run, delta: float, beside: float) -> float:
    return max(
        0.0,
        min(
            order * beside / 2 + repetitions.rdp(run, order) + renyi_conversion(order, delta)
            for order in _ORDERS
        ),
    )


def selected_mu(repetitions: Repetitions, budget: Budget, *, beside: float = 0.0) -> float:
    """The largest mu of one run whose selection fits the budget; refuses a budget that even the
    choice alone would pass.
    """

    def fits(mu: float) -> bool:
        return (
            selected_epsilon(repetitions, GaussianRun(mu), budget.delta, beside=beside)
            <= budget.epsilon
        )

    return _largest(
        fits,
        gdp_mu(budget),
        f"epsilon = {budget.epsilon:g} does not pay for choosing among {repetitions.mean:.3g} runs",
    )


def _largest(fits: Callable[[float], bool], high: float, refusal: str) -> float:
    low = high * 1e-4
    if not fits(low):
        raise BadInput(f"{refusal}; use fewer runs, or a larger epsilon or delta")
    if fits(high):
        return high
    found = math.exp(
        root(lambda m: -1.0 if fits(math.exp(m)) else 1.0, math.log(low), math.log(high), 1e-6)
    )
    while not fits(found):
        found *= 1 - 1e-6
    return found
