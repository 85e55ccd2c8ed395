"""Quantiles and means of numbers from noisy counts in public bins, with 95 per cent intervals.

An interval includes the privacy noise and the sampling error: the records count as a sample of the
population that the reader asks about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

from silodp.core.quality import Z

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""The quantiles that are shown: those of a box plot with whiskers at 5 and 95 per cent."""


@dataclass(frozen=True)
class Quantile:
    """One quantile in the column's unit.

    `low` and `high` are the 95 per cent interval. Its ends are interpolated as if values were
    spread evenly within a bin. An interval inside a single bin is widened to the whole bin. `least`
    and `most` are the ends of the bins around it: an interval that does not interpolate.
    """

    level: float
    value: float
    low: float
    high: float
    least: float
    most: float


@dataclass(frozen=True)
class Mean:
    """A mean in the column's unit, its errors by noise and by sampling, and the deviation."""

    value: float
    noise: float
    sampling: float
    deviation: float

    @property
    def low(self) -> float:
        """Return the lower end of the 95 per cent interval."""
        return self.value - Z * math.hypot(self.noise, self.sampling)

    @property
    def high(self) -> float:
        """Return the upper end of the 95 per cent interval."""
        return self.value + Z * math.hypot(self.noise, self.sampling)


def distribution(counts: np.ndarray, noise: float) -> np.ndarray:
    """Return the share of values up to each end of the bins, rising from 0 to 1.

    `counts` are noisy counts of the bins. The cumulative shares are made to rise by isotonic
    regression, which pools neighbours that are out of order. Their weights are the inverse
    variances of the noise.
    """
    bins = len(counts)
    total = max(float(counts.sum()), 1.0)
    if bins == 1:
        return np.array([0.0, 1.0])
    inner = np.cumsum(counts)[:-1] / total
    place = np.arange(1, bins)
    weights = 1 / (place * (bins - place))
    if not noise:
        weights = np.ones(bins - 1)
    rising = np.clip(isotonic_regression(inner, weights=weights).x, 0.0, 1.0)
    return np.array([0.0, *rising, 1.0])


def quantile(counts: np.ndarray, noise: float, ends: Sequence[float], level: float) -> Quantile:
    """Return the value below which a share `level` of the records is.

    `counts` (B,) are counts of the bins, each with noise of this standard deviation. `ends` has
    the B + 1 ends of the bins.

    The interval inverts a test. With C(x) the noisy count up to x and N the noisy count of all, T =
    C(x) - level N has mean 0 where x is the quantile. Its variance is N level (1 - level) by
    sampling and noise^2 ((1 - level)^2 j + level^2 (B - j)) at the end of bin j. The interval ends
    where |T| leaves 1.96 standard errors, first seen from outside. Between ends T is interpolated.
    """
    bins = len(counts)
    points = np.array(ends, dtype=float)
    rising = distribution(counts, noise)
    total = float(counts.sum())
    at = int(np.clip(np.searchsorted(rising, level, side="left"), 1, bins))
    value = _crossing(points, rising - level, at - 1, at)
    place = np.arange(bins + 1)
    excess = np.concatenate([[0.0], np.cumsum(counts)]) - level * total
    spread = (1 - level) ** 2 * place + level**2 * (bins - place)
    error = np.sqrt(max(total, 1.0) * level * (1 - level) + noise**2 * spread)
    not_above = excess + Z * error
    not_below = excess - Z * error
    first = _first(not_above >= 0)
    last = bins - _first(not_below[::-1] <= 0)
    least = float(points[max(first - 1, 0)])
    most = float(points[min(last + 1, bins)])
    low = least
    high = most
    if first and last + 1 > first:
        low = _crossing(points, not_above, first - 1, first)
    if last < bins and last + 1 > first:
        high = _crossing(points, not_below, last, last + 1)
    return Quantile(level, value, min(low, value), max(high, value), least, most)


def _first(found: np.ndarray) -> int:
    """Return the first place that is found, or the last place of all if none is."""
    if not found.any():
        return len(found) - 1
    return int(found.argmax())


def _crossing(points: np.ndarray, values: np.ndarray, a: int, b: int) -> float:
    """Return where the line from one end to the next crosses zero."""
    share = 0.5
    if values[a] != values[b]:
        share = float(np.clip(values[a] / (values[a] - values[b]), 0, 1))
    return float(points[a] + share * (points[b] - points[a]))


def mean(counts: np.ndarray, noise: float, ends: Sequence[float]) -> Mean:
    """Return the mean of the middles of the bins, and the deviation.

    The noise of the mean is that of sum of (middle - mean) x count, over the count of all. Of the
    variance a twelfth of the squared width is taken off, because middles are spread wider than
    values (Sheppard's correction).
    """
    points = np.array(ends, dtype=float)
    middle = (points[1:] + points[:-1]) / 2
    width = np.diff(points)
    total = max(float(counts.sum()), 1.0)
    value = float(np.clip(counts @ middle / total, points[0], points[-1]))
    away = middle - value
    square = float(counts @ (away**2 - width**2 / 12)) / total
    deviation = math.sqrt(max(square, float(width.min()) ** 2 / 12))
    by_noise = noise * math.sqrt(float(away @ away)) / total
    return Mean(value, by_noise, deviation / math.sqrt(total), deviation)
