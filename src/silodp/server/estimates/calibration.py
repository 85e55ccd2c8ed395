"""Whether predicted risks come true, from the noisy counts of records by outcome and bin of the
score.

Everything here is arithmetic on released numbers: it costs nothing more. `noise` is the standard
deviation of the noise in each share, which is known; errors of a finite number of records are
estimated from the released shares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from silodp.core.figures import too_noisy
from silodp.core.quality import Z
from silodp.server.estimates.inversion import PSEUDO, conditional

MOST = 10
"""Stretches of risks that a table has."""
MEAN_WIDTH = 0.2
SLOPE_WIDTH = 1.0
"""An interval wider than this says nothing of use about a mean risk, or about a slope."""
FEWEST_OUTCOMES = 8.0
"""Records of the rarer outcome from which a calibration slope is estimated."""


@dataclass(frozen=True)
class Figure:
    """A private number: `noise` is the standard error that the mechanism's noise causes, `sampling`
    that of a finite held-out part.
    """

    value: float
    noise: float
    sampling: float
    low: float
    high: float
    """The ends of the 95 per cent interval, by noise, sampling and bins together."""
    too_noisy: bool
    """Whether the noise leaves too little to be said (`figures.too_noisy`): a value is then not
    shown to people.
    """
    whole: bool = True
    """Whether the interval has all parts. In files of earlier versions it has the noise alone."""


def hidden(low: float = 0.0, high: float = 1.0) -> Figure:
    """Return a figure of which the noise leaves nothing."""
    return Figure(math.nan, math.inf, math.inf, low, high, True)


@dataclass(frozen=True)
class Bin:
    """Records whose predicted risk lies from `risk_low` to `risk_high`: how many there are, and the
    share of them in the second class.
    """

    risk_low: float
    risk_high: float
    records: float
    observed: float
    low: float
    high: float
    """95 per cent interval by noise and by the number of records together."""


def mean_risk(value: float, noise: float, n: int, brier: float) -> Figure:
    """Mean predicted risk less the observed share, from the mean of (risk - label + 1) / 2; above 0
    risks are too high.

    `brier` estimates the mean of (risk - label)^2, which is at least the variance. A few records
    with the worst value are added to it.
    """
    off = max(-1.0, min(1.0, 2 * value - 1))
    by_noise = 2 * noise
    sampling = math.sqrt(min(brier + PSEUDO / n, 1.0) / n)
    half = Z * math.hypot(by_noise, sampling)
    low = max(-1.0, off - half)
    high = min(1.0, off + half)
    return Figure(off, by_noise, sampling, low, high, 2 * Z * by_noise > MEAN_WIDTH)


def slope(
    negative: np.ndarray, positive: np.ndarray, means: np.ndarray, noise: float, n: int
) -> Figure:
    """Return by how much the observed share rises when the predicted risk rises by 1: the
    least-squares line of label on risk, each bin at its mean risk.

    1 is right; below it, risks are too extreme. With c the counts of all labels and p those of
    label 1, at the means m, it is (sum p m - P M) / (sum c m^2 - M^2) for sum c = 1, M = sum c m,
    P = sum p. The interval inverts a test (Fieller): at the true slope b, the numerator less b
    times the denominator is 0, and its variance follows from the derivatives by each share.
    """
    total = float((negative + positive).sum())
    nothing = hidden(high=math.inf)
    if total <= 0:
        return nothing
    both = np.stack([negative, positive]) / total
    noise = noise / total
    share = float(both[1].sum())
    fewest = FEWEST_OUTCOMES / n + 2 * noise * math.sqrt(len(means))
    if min(share, 1 - share) < fewest:
        return nothing
    label = np.array([[0.0], [1.0]])
    mean = float((both * means).sum())
    away = means - mean
    spread = float((both * away**2).sum())
    if not spread > 4 * noise * math.sqrt(2 * float((away**4).sum())):
        return nothing
    value = float((both * away * (label - share)).sum()) / spread
    influence = away * (label - share - value * away) / spread
    by_noise = noise * math.sqrt(float((influence**2).sum()))
    worst = float((influence**2).max())
    square = max(float((both * influence**2).sum()), 0.0) + PSEUDO / n * worst
    sampling = math.sqrt(square / n)
    half = Z * math.hypot(by_noise, sampling)
    hides = not 2 * Z * by_noise <= SLOPE_WIDTH
    return Figure(value, by_noise, sampling, value - half, value + half, hides)


def reliability(
    negative: np.ndarray, positive: np.ndarray, ends: np.ndarray, noise: float, n: int
) -> list[Bin]:
    """Return the observed share in each stretch of predicted risks: neighbouring bins are put
    together until their records are clear of the noise.

    The interval is that of `inversion.conditional`. What is left over at the top goes to the last
    stretch.
    """
    found: list[Bin] = []
    start = 0
    for end in range(1, len(ends)):
        part = slice(start, end)
        wide = noise * math.sqrt(2 * (end - start))
        count = float((negative[part] + positive[part]).sum())
        if count * n < max(5.0, 6 * wide * n) or end - start < (len(ends) - 1) / MOST:
            continue
        found.append(_bin(negative[part], positive[part], (ends[start], ends[end]), noise, n))
        start = end
    if found and start < len(ends) - 1:
        first = int(np.searchsorted(ends, found[-1].risk_low))
        found[-1] = _bin(negative[first:], positive[first:], (ends[first], ends[-1]), noise, n)
    return [row for row in found if not too_noisy(row.low, row.high, 0.0)]


def _bin(
    negative: np.ndarray, positive: np.ndarray, risks: tuple[float, float], noise: float, n: int
) -> Bin:
    p = float(positive.sum())
    q = float(negative.sum())
    wide = noise * math.sqrt(len(negative))
    low, high = conditional(p, q, wide, wide, n)
    count = max(p + q, 1e-12)
    observed = min(max(p / count, 0.0), 1.0)
    return Bin(float(risks[0]), float(risks[1]), n * count, observed, low, high)
