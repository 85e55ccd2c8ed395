"""Price the choice of the best of several private runs, by arithmetic on the price of one run.

There are two prices, for two audiences. An untrusted server sees every run, which is a composition:
mu^2 adds up over all runs, and a random number of runs hides nothing. An observer who sees only the
best of a secret random number of runs sees a selection, which is much cheaper (Papernot & Steinke
2022, "Hyperparameter Tuning with Renyi Differential Privacy"). A selection needs a trusted person
who carries out all runs, and keeps the other runs and their number secret.
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
"""The largest mean number of runs."""
_ORDERS: tuple[float, ...] = tuple(RENYI_ORDERS.tolist())


class Run(Protocol):
    """What one run costs, its score included.

    The cost is a Renyi divergence by order, and a delta by epsilon, both for either order of
    neighbours.
    """

    def rdp(self, order: float) -> float: ...
    def delta(self, epsilon: float) -> float: ...


@dataclass(frozen=True)
class GaussianRun:
    """A run that is mu-GDP by Gaussian releases on full or disjoint batches."""

    mu: float

    def rdp(self, order: float) -> float:
        """Return the Renyi divergence at this order."""
        return order * self.mu**2 / 2

    def delta(self, epsilon: float) -> float:
        """Return delta at this epsilon."""
        return gdp_delta(self.mu, epsilon)


# --- how many runs -------------------------------------------------------------------------------


class Repetitions(Protocol):
    """A law of the secret number K of runs, and the cost of a selection by it."""

    @property
    def mean(self) -> float: ...
    def probability(self, k: int) -> float: ...
    def size(self, k: int) -> float:
        """Return a bound on the size of every number in the exponent of `probability(k)`.

        Rounding errors are relative to it.
        """
        ...

    def rdp(self, run: Run, order: float) -> float: ...


@dataclass(frozen=True)
class TruncatedNegativeBinomial:
    """P[K = k] proportional to (1 - gamma)^k prod_{l < k} (l + eta) / (l + 1), for k >= 1.

    eta = 1 is the geometric law, and eta = 0 the logarithmic.
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
        """Return the mean of K."""
        if self.eta == 0:
            return (1 / self.gamma - 1) / math.log(1 / self.gamma)
        return (
            self.eta
            * (1 - self.gamma)
            / (self.gamma * -math.expm1(self.eta * math.log(self.gamma)))
        )

    def probability(self, k: int) -> float:
        """Return P[K = k]."""
        if k < 1:
            return 0.0
        tail = k * math.log1p(-self.gamma)
        if self.eta == 0:
            return math.exp(tail) / (k * math.log(1 / self.gamma))
        product = math.lgamma(k + self.eta) - math.lgamma(1 + self.eta) - math.lgamma(k + 1)
        # This is eta / (e^power - 1) in logarithms, because e^power may be too large for a float.
        power = self.eta * math.log(1 / self.gamma)
        return math.exp(
            tail
            + product
            + math.log(abs(self.eta))
            - max(0.0, power)
            - math.log(-math.expm1(-abs(power)))
        )

    def size(self, k: int) -> float:
        """Return a bound on the size of every number in the exponent of `probability(k)`."""
        return (
            1
            + k * -math.log1p(-self.gamma)
            + math.lgamma(k + abs(self.eta) + 3)
            + (1 + abs(self.eta)) * (1 - math.log(self.gamma))
        )

    def rdp(self, run: Run, order: float) -> float:
        """Return the Renyi divergence of a selection at this order (Theorem 2).

        eps' = eps + (1 + eta) ((1 - 1/b) eps_b + log(1/gamma) / b) + log E[K] / (order - 1), at the
        best other order b.
        """
        return (
            run.rdp(order)
            + (1 + self.eta) * _at_another_order(run, self.gamma)
            + math.log(self.mean) / (order - 1)
        )


@functools.lru_cache(maxsize=1024)
def _at_another_order(run: Run, gamma: float) -> float:
    """Return the part of Theorem 2 at the best other order b, without its factor 1 + eta."""
    return min((1 - 1 / b) * run.rdp(b) + math.log(1 / gamma) / b for b in _ORDERS)


@dataclass(frozen=True)
class PoissonRepetitions:
    """K ~ Poisson(mean). With K = 0 there is no run, and the answer is a constant that was fixed
    before.
    """

    mean: float

    def __post_init__(self) -> None:
        if not 1 <= self.mean < math.inf:
            raise BadInput(f"the mean number of runs is {self.mean:g}; it must be 1 or more")

    def probability(self, k: int) -> float:
        """Return P[K = k]."""
        if k >= 0:
            return math.exp(k * math.log(self.mean) - self.mean - math.lgamma(k + 1))
        return 0.0

    def size(self, k: int) -> float:
        """Return a bound on the size of every number in the exponent of `probability(k)`."""
        return 1 + k * math.log(self.mean) + self.mean + math.lgamma(k + 3)

    def rdp(self, run: Run, order: float) -> float:
        """Return the Renyi divergence of a selection at this order (Theorem 6).

        eps' = eps + mean delta + log(mean) / (order - 1), where delta is that of one run at epsilon
        = log(1 + 1 / (order - 1)). The probability e^-mean of K = 0 is added inside the logarithm,
        where the printed theorem leaves it out. It only adds.
        """
        delta = run.delta(math.log1p(1 / (order - 1)))
        some = math.log(self.mean) + (order - 1) * (run.rdp(order) + self.mean * delta)
        return float(np.logaddexp(-self.mean, some)) / (order - 1)


def repetitions_by_name(text: str) -> Repetitions:
    """Return the law that "poisson:MEAN", "geometric:MEAN" or "tnb:ETA:GAMMA" names.

    Raise BadInput for another text, and for more than `MOST` runs on average.
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
    """Return the law that the text names. Raise BadInput if it names none."""
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
    """Return the K that belongs to a uniform number in [0, 1).

    This inverts the distribution function, as far as its sum grows in a float. `drawn_apart` bounds
    how far the result is from the law, and `selected_epsilon` charges it to delta.
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
    """Return a bound on the total variation between the law of `draw` and the law that is priced.

    Three things contribute:

    1. Probabilities are computed in floats. Each of the few terms in an exponent is off by a few
       units in the last place of its `size` (32 of them are counted), and every addition by one of
       the sum.
    2. A uniform number is a multiple of 2^-53, so each K gains or loses one of them.
    3. The sum stops where it no longer grows. What is left of 1 goes to the last K. That is 2^-53,
       or some thousands of it if the tail is long.
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
    """Return the epsilon of the best of K runs, if everything else is kept secret.

    It is together with Gaussian releases of mu^2 = `beside`, made once. It is infinite if delta is
    too small.

    1. The theorems are about K's exact law. The law of the drawn K is t = `drawn_apart` from it,
       whatever the data.
    2. So for every event S, P'[S | X] <= P[S | X] + t <= e^epsilon P[S | X'] + d + t <= e^epsilon
       P'[S | X'] + d + (1 + e^epsilon) t.
    3. Epsilon is taken at the d that this leaves of delta.
    """
    apart = drawn_apart(repetitions)
    cut = 0.0  # the part of delta that pays for the inexact draw
    while cut < delta:
        epsilon = _selected_exactly(repetitions, run, delta - cut, beside)
        needed = (1 + math.exp(min(epsilon, 700.0))) * apart
        if needed <= cut:
            return epsilon
        cut = 1.001 * needed
    return math.inf


def _selected_exactly(repetitions: Repetitions, run: Run, delta: float, beside: float) -> float:
    """Return the epsilon of a selection by K's exact law."""
    epsilons = (
        order * beside / 2 + repetitions.rdp(run, order) + renyi_conversion(order, delta)
        for order in _ORDERS
    )
    return max(0.0, min(epsilons))


def selected_mu(repetitions: Repetitions, budget: Budget, *, beside: float = 0.0) -> float:
    """Return the largest mu of one run whose selection fits the budget.

    Raise BadInput for a budget that even the choice alone would exceed.
    """

    def fits(mu: float) -> bool:
        """Return whether a selection among runs of this mu fits the budget."""
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
    """Return the largest value up to `high` that fits. Raise BadInput if even a small value does
    not.
    """
    low = high * 1e-4
    if not fits(low):
        raise BadInput(f"{refusal}; use fewer runs, or a larger epsilon or delta")
    if fits(high):
        return high

    def sign(log_value: float) -> float:
        """Return -1 below the largest value that fits and 1 above."""
        return -1.0 if fits(math.exp(log_value)) else 1.0

    value = math.exp(root(sign, math.log(low), math.log(high), 1e-6))
    while not fits(value):  # the root may be on the wrong side, by its accuracy
        value *= 1 - 1e-6
    return value
