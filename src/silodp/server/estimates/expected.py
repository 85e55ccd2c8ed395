"""How precise an evaluation will be, from public facts alone, before anything is spent.

The estimators run on the answer that is expected, without noise. Their intervals have the width
that the real ones will have, because the width follows from the noise and the number of records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from silodp.core.figures import ACCURACY, AUC, DEVIANCE, EXPLAINED
from silodp.core.statistics.score import largest_deviance, largest_entropy
from silodp.server.estimates.placing import RiskSpread, bins_of, expected_cells
from silodp.server.estimates.ranking import auc
from silodp.server.estimates.scoring import Asked, scores_of

COUNTS = (6, 8, 10, 12, 16, 20, 26, 32, 48, 64, 96, 128, 256, 500)
"""Numbers of bins from which the best is chosen."""
PRICES = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Prices that are compared."""
GOOD = 0.1
"""Half a width of the main figure's interval that is worth paying for."""
ENOUGH = 1.25
"""A price is enough if a much larger one would not make the interval narrower by this factor."""
LARGE = 1000.0
MAIN = (AUC, EXPLAINED, DEVIANCE, ACCURACY)
"""The figures by which a price is chosen, the first that an evaluation has."""
USUAL_ACCURACY = 0.7
"""What is assumed of more than two classes."""
USUAL_DEVIATION = 0.32
"""The deviation of a number that is assumed, where its range is -1 to 1. Half is explained."""
USUAL_COUNT = 0.1
"""The mean count that is assumed, as a part of the largest."""


def best_bins(spread: RiskSpread, threshold: float, n: int, noise: float) -> int:
    """Return the number of bins with the narrowest expected interval of the AUC."""
    best = COUNTS[0]
    narrowest = math.inf
    for count in COUNTS:
        bins = bins_of(spread, count, threshold)
        negative, positive = expected_cells(spread, bins.edges)
        figure = auc(negative, positive, noise=noise, n=n)
        width = figure.high - figure.low
        if width < narrowest - 1e-3:
            best = count
            narrowest = width
    return best


def expected_answer(asked: Asked, spread: RiskSpread) -> np.ndarray:
    """Return the mean answer that is expected, without noise."""
    if asked.bins:
        negative, positive = expected_cells(spread, asked.bins.edges)
        cells = np.concatenate([negative, positive])
        return np.concatenate([[min(0.5 / asked.cap, 1.0), 0.5], cells])
    if asked.kind in ("multiclass", "ordinal"):
        each = np.full(asked.classes, 1 / asked.classes)
        numbers = [min(0.8 / asked.cap, 1.0)]
        return np.concatenate([numbers, (1 - USUAL_ACCURACY) * each, USUAL_ACCURACY * each])
    if asked.kind == "count":
        return _of_counts(asked)
    if asked.kind == "regression":
        error = USUAL_DEVIATION * asked.unit / asked.cap
        numbers = [error**2 / 2, 0.8 * error / math.sqrt(2), 0.5, USUAL_DEVIATION**2]
        return np.array(numbers[: asked.numbers])
    return np.array([0.5 / asked.cap, *[0.5] * (asked.numbers - 1)])


def _of_counts(asked: Asked) -> np.ndarray:
    """Return the answer for counts that vary as much as their mean, of which half is explained."""
    mean = max(USUAL_COUNT * asked.most, 1.0)
    null = mean
    entropy = null / 2 + mean * math.log(mean)
    numbers = [
        (mean / asked.cap) ** 2,
        0.7 * mean / asked.cap,
        mean / asked.most,
        null / 2 / largest_deviance(asked.most),
        entropy / largest_entropy(asked.most),
    ]
    return np.clip(numbers, 0, 1)


def precision(asked: Asked, spread: RiskSpread, n: int, noise: float) -> dict[str, float]:
    """Return how far the farther end of each figure's expected interval is from its value. It is
    infinite for a figure that the noise will hide.
    """
    figures = scores_of("all", n, expected_answer(asked, spread), noise, asked).figures
    widths = {}
    for name, figure in figures.items():
        if figure.too_noisy or not math.isfinite(figure.value):
            widths[name] = math.inf
        else:
            widths[name] = max(figure.high - figure.value, figure.value - figure.low)
    return widths


def main_figure(widths: Mapping[str, float]) -> str:
    """Return the name of the figure by which a price is chosen."""
    return next((name for name in MAIN if name in widths), next(iter(widths)))


def proposed(at: Callable[[float], Mapping[str, float]], prices: Sequence[float] = PRICES) -> float:
    """Return the price that is proposed: the smallest at which the main figure is within `GOOD`, or
    is limited by the number of records rather than by noise.

    `at` returns the precision at a price.
    """
    limit = at(LARGE)
    name = main_figure(limit)
    wanted = max(GOOD if name in MAIN else 0.0, ENOUGH * limit[name])
    for price in prices:
        if at(price)[name] <= wanted:
            return price
    return prices[-1]
