"""Confidence intervals by test inversion, for noise and sampling together.

An interval contains every value of the truth that a test at 5 % does not reject. The law of the
noise is known, and so is its part in the test. So an interval is valid for few records and for rare
outcomes too, where an estimate plus or minus two standard errors is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from scipy import special

from silodp.core.quality import Z

EXACT_UP_TO = 300
"""Records up to which the binomial law is summed exactly; above, its variance is enough."""
STEPS = 30
"""Steps of a bisection, each of which halves the interval."""
TAIL = 0.025
PSEUDO = 3.0
"""Records with the worst value that are added where a variance is estimated.

If none of n records has a property, up to 3 / n of the population may have it (rule of three).
"""


def proportion(value: float, noise: float, n: int) -> tuple[float, float]:
    """Return the interval of a share, from a share of n records plus noise of this deviation.

    Up to `EXACT_UP_TO` records the test adds up the binomial law of the count and the normal law of
    the noise. The noise breaks ties between counts, so the interval is not wider than it must be.
    """
    if n > EXACT_UP_TO:
        return by_variance(value, noise, n)
    counts = np.arange(n + 1)
    spread = max(n * noise, 1e-9)
    below = special.ndtr((n * value - counts) / spread)
    log_choices = _log_choices(n)

    def at_most(share: float) -> float:
        """Return the chance of so small an answer if this is the truth."""
        log_law = log_choices + special.xlogy(counts, share) + special.xlog1py(n - counts, -share)
        return float(np.exp(log_law) @ below)

    low = _last(lambda share: 1 - at_most(share) <= TAIL)
    high = 1 - _last(lambda rest: at_most(1 - rest) <= TAIL)
    return low, max(low, high)


@cache
def _log_choices(n: int) -> np.ndarray:
    """Return the logarithms of the binomial coefficients of n."""
    counts = np.arange(n + 1)
    below = special.gammaln(counts + 1) + special.gammaln(n - counts + 1)
    return special.gammaln(n + 1) - below


def _last(rejected: Callable[[float], bool]) -> float:
    """Return the largest share in [0, 1] up to which the truth is rejected."""
    if not rejected(0.0):
        return 0.0
    low = 0.0
    high = 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        if rejected(middle):
            low = middle
        else:
            high = middle
    return low


def by_variance(
    value: float, noise: float, n: float, dispersion: float = 1.0
) -> tuple[float, float]:
    """Return the interval of a mean m in [0, 1] with variance `dispersion` m (1 - m) / n.

    It has every m with |value - m| <= 1.96 standard errors at m (Wilson). With a dispersion of 1
    the variance is that of a share, and the largest that numbers in [0, 1] can have.
    """
    square = Z**2 * dispersion / n
    a = 1 + square
    b = 2 * value + square
    c = value**2 - (Z * noise) ** 2
    inner = math.sqrt(max(b * b - 4 * a * c, 0.0))
    low = min(max((b - inner) / (2 * a), 0.0), 1.0)
    high = min(max((b + inner) / (2 * a), 0.0), 1.0)
    return low, high


def conditional(
    above: float, below: float, noise_above: float, noise_below: float, n: int
) -> tuple[float, float]:
    """Return the interval of above / (above + below), for two noisy shares of n records.

    At the true t, (1 - t) above - t below has mean 0, noise that is known, and the sampling
    variance t (1 - t) (above + below) / n (Fieller).
    """
    t = np.linspace(0, 1, 2001)
    count = max(above + below, 1.0 / n)
    gap = np.abs((1 - t) * above - t * below)
    variance = ((1 - t) * noise_above) ** 2 + (t * noise_below) ** 2 + t * (1 - t) * count / n
    inside = t[gap <= Z * np.sqrt(variance)]
    value = min(max(above / count, 0.0), 1.0)
    if not len(inside):
        return value, value
    return max(float(inside[0]) - t[1], 0.0), min(float(inside[-1]) + t[1], 1.0)


def combined(value: float, *parts: tuple[float, float, float]) -> tuple[float, float]:
    """Return the interval of a sum, from (estimate, low, high) of each part.

    The distances to the ends add up in squares (MOVER, Zou and Donner 2008).
    """
    below = math.hypot(*(estimate - low for estimate, low, _ in parts))
    above = math.hypot(*(high - estimate for estimate, _, high in parts))
    return value - below, value + above
