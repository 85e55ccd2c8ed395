"""The AUC of two classes, from noisy counts of records by class and bin of the score."""

from __future__ import annotations

import math

import numpy as np

from silodp.core.figures import WIDEST
from silodp.core.quality import Z
from silodp.server.estimates.calibration import Figure, hidden

GRID = np.linspace(0, 1, 2001)
FEWEST = 3.0
"""Standard errors by which the smaller class must be clear of zero."""


def auc(negative: np.ndarray, positive: np.ndarray, *, noise: float, n: int) -> Figure:
    """Return P(score of a positive > score of a negative), from noisy shares (bins,) of n records.

    1. Let p and q be the true shares, and A the order of bins. A pair within one bin counts 0, a
       half or 1 in A: its order is not known. The value takes a half. The interval takes 0 for its
       lower end and 1 for its upper end, so it contains the error of the bins whatever the order
       within a bin is.
    2. The interval inverts a test (Fieller). With B = A - theta 1 1^T, T = p^T B q is zero at the
       true theta. Of noisy shares T has mean 0 there and variance s^2 (|B q|^2 + |B^T p|^2) plus a
       square term, which the estimate by noisy shares contains on average. Sampling adds P^2 Q^2
       times the variance of Hanley and McNeil (1982) at theta.
    3. A theta is in the interval if T is within 1.96 standard errors for an order between both.
    """
    bins = len(negative)
    total_p = float(positive.sum())
    total_n = float(negative.sum())
    smaller = min(total_p, total_n)
    if smaller <= FEWEST * noise * math.sqrt(bins) or smaller * n < 1:
        return hidden()
    product = total_p * total_n
    strict = np.tri(bins, k=-1)  # rows: the positive's bin; columns: the negative's
    order = strict + np.eye(bins) / 2
    below_q = order @ negative
    above_p = order.T @ positive
    wins = float(positive @ below_q)
    ties = min(max(float(positive @ negative), 0.0), product)
    squares = _squares(below_q, total_n) + _squares(above_p, total_p)
    sampling = product**2 * _variance(GRID, n * total_p, n * total_n)
    error = np.sqrt(noise**2 * squares + sampling)
    gap = wins - GRID * product
    inside = GRID[(gap + ties / 2 >= -Z * error) & (gap - ties / 2 <= Z * error)]
    value = min(max(wins / product, 0.0), 1.0)
    at = round(value * (len(GRID) - 1))
    by_noise = noise * math.sqrt(float(squares[at])) / product
    low = max(float(inside.min(initial=1.0)) - GRID[1], 0.0)
    high = min(float(inside.max(initial=0.0)) + GRID[1], 1.0)
    return Figure(
        value,
        by_noise,
        math.sqrt(float(sampling[at])) / product,
        min(low, value),
        max(high, value),
        2 * Z * by_noise > WIDEST,
    )


def _squares(parts: np.ndarray, total: float) -> np.ndarray:
    """Return the sum over bins of (part - theta total)^2, for each theta of the grid."""
    linear = 2 * total * float(parts.sum())
    found = float(parts @ parts) - linear * GRID + len(parts) * (total * GRID) ** 2
    return np.maximum(found, 0.0)


def _variance(theta: np.ndarray, positives: float, negatives: float) -> np.ndarray:
    """Return the sampling variance of an AUC theta of so many records (Hanley and McNeil 1982)."""
    positives = max(positives, 1.0)
    negatives = max(negatives, 1.0)
    half = 0.5 / (1 + min(positives, negatives))
    a = np.clip(theta, half, 1 - half)  # a perfect order of so few is no proof of one
    q1 = a / (2 - a)
    q2 = 2 * a * a / (1 + a)
    total = a * (1 - a) + (positives - 1) * (q1 - a * a) + (negatives - 1) * (q2 - a * a)
    return np.maximum(total, 0.0) / (positives * negatives)
