"""Whether predicted risks come true, from the noisy counts of records by label and bin of the
score.

Everything here is arithmetic on released numbers: it costs nothing more. `noise` is the standard
deviation of the noise in each share, which is known; errors of a finite number of records are
estimated from the released shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from silodp.core.figures import too_noisy
from silodp.core.quality import Z

MOST = 10
"""Stretches of risks that a table has."""
MEAN_WIDTH = 0.2
SLOPE_WIDTH = 1.0
"""An interval wider than this says nothing of use about a mean risk, or about a slope."""


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
    """95 per cent interval for the held-out records' own figure, by the noise alone."""
    too_noisy: bool
    """Whether the noise leaves too little to be said (`figures.too_noisy`): a value is then not
    shown to people.
    """


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


def edges(bins: int, weights: Sequence[float] = ()) -> np.ndarray:
    """Return the risks at which the bins of the score end: weights of the classes are in the score,
    and are taken back out of the risk.
    """
    score = np.linspace(0, 1, bins + 1)
    first, second = weights or (1.0, 1.0)
    return score * first / (score * first + (1 - score) * second)


def mean_risk(value: float, noise: float, n: int, brier: float) -> Figure:
    """Mean predicted risk less the observed share, from the mean of (risk - label + 1) / 2; above 0
    risks are too high.

    Its error by sampling is at most sqrt(mean (risk - label)^2 / n), for which `brier`, an upper
    bound of that mean, is taken.
    """
    off = 2 * value - 1
    wide = 2 * noise
    low, high = (max(-1.0, min(1.0, off + s * Z * wide)) for s in (-1, 1))
    return Figure(
        max(-1.0, min(1.0, off)),
        wide,
        math.sqrt(brier / n),
        low,
        high,
        not high - low <= MEAN_WIDTH,
    )


def slope(
    negative: np.ndarray, positive: np.ndarray, ends: np.ndarray, noise: float, n: int
) -> Figure:
    """Return by how much the observed share rises when the predicted risk rises by 1: the
    least-squares line of label on risk, each bin at its middle.

    1 is right; below it, risks are too extreme. With c the counts of all labels and p those of
    label 1, at the middles m, it is (sum p m - P M) / (sum c m^2 - M^2) for sum c = 1, M = sum c m,
    P = sum p, and its error follows from its derivatives by each share (delta method): too noisy
    where the spread of the risks is not clear of its own noise.
    """
    middle = (ends[1:] + ends[:-1]) / 2
    total = float((negative + positive).sum())
    nothing = Figure(math.nan, math.inf, math.inf, 0.0, math.inf, True)
    if total <= 0:
        return nothing
    both = np.stack([negative, positive]) / total
    noise = noise / total
    label = np.array([[0.0], [1.0]])
    mean = float((both * middle).sum())
    share = float(both[1].sum())
    spread = float((both * (middle - mean) ** 2).sum())
    if not spread > 4 * noise * math.sqrt(2 * float(((middle - mean) ** 4).sum())):
        return nothing
    value = float((both * (middle - mean) * (label - share)).sum()) / spread
    influence = (middle - mean) * (label - share - value * (middle - mean)) / spread
    error = noise * math.sqrt(float((influence**2).sum()))
    sampling = math.sqrt(max(float((both * influence**2).sum()), 0.0) / n)
    low = value - Z * error
    high = value + Z * error
    return Figure(value, error, sampling, low, high, not high - low <= SLOPE_WIDTH)


def reliability(
    negative: np.ndarray, positive: np.ndarray, ends: np.ndarray, noise: float, n: int
) -> list[Bin]:
    """Return the observed share in each stretch of predicted risks: neighbouring bins are put
    together until their records are clear of the noise.

    The interval holds every share t with |P - t C| <= 1.96 standard errors (Fieller), P of the C
    records in the stretch having label 1, by noise and by sampling together. What is left over at
    the top goes to the last stretch.
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
    t = np.linspace(0, 1, 1001)
    p = float(positive.sum())
    q = float(negative.sum())
    wide = noise * math.sqrt(len(negative))
    c = max(p + q, 1e-12)
    share = (n * c * min(max(p / c, 0.0), 1.0) + 0.5) / (
        n * c + 1
    )  # none or all of a few are no proof of 0 or 1
    error = np.sqrt(wide**2 * ((1 - t) ** 2 + t**2) + c * share * (1 - share) / n)
    inside = t[np.abs(p * (1 - t) - q * t) <= Z * error]
    if len(inside):
        low = float(inside.min())
        high = float(inside.max())
    else:
        low = 0.0
        high = 1.0
    return Bin(float(risks[0]), float(risks[1]), n * c, min(max(p / c, 0.0), 1.0), low, high)
