"""How good a model is, from one private release of each silo: loss, accuracy and AUC (or errors of a number), each with its noise.

The noise of a release is known exactly, so its error bars are too. That the held-out records are themselves a sample is a second error,
which is told apart; it is estimated from released figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.figures import too_noisy
from silodp.core.mechanisms import Gaussian
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.privacy.accounting import Budget, gdp_mu
from silodp.core.problem.schema import Label
from silodp.core.query import Query
from silodp.core.statistics import Score, Statistic
from silodp.core.weights import Weights
from silodp.server.federation import Absent, Port

Z = 1.959964
"""95 per cent of a normal law lie within so many standard deviations."""


@dataclass(frozen=True)
class Figure:
    """A private number: `noise` is the standard error that the mechanism's noise causes, `sampling` that of a finite held-out part."""

    value: float
    noise: float
    sampling: float
    low: float
    high: float
    """95 per cent interval for the held-out records' own figure, by the noise alone."""
    too_noisy: bool
    """Whether the noise leaves too little to be said (`figures.too_noisy`): a value is then not shown to people."""


@dataclass(frozen=True)
class Scores:
    """One silo's figures, or those of all held-out records together."""

    name: str
    held_out: int
    figures: dict[str, Figure]


def gaussian_for(kind: str, budgets: Sequence[Budget], releases: int = 1) -> Gaussian:
    """The mechanism of which `releases` full-batch releases take each silo's whole budget; its clip is the statistic's to say."""
    mu = torch.tensor([[gdp_mu(budget) for budget in budgets]], dtype=torch.float64)
    return Gaussian(kind, 1.0, math.sqrt(releases) / mu * (1 + 1e-9))  # so that their sum does not round above the budget


def ask_each(fed: Port, statistic: Statistic, mechanism: Gaussian) -> dict[int, np.ndarray]:
    """The release of every silo that answers, by its number, at the statistic's own clip."""
    found = {}
    for i, port in fed.each().items():
        try:
            found[i] = port.mean(Query(statistic, mechanism.clipped(statistic.norm)))[0].double().cpu().numpy()  # type: ignore[union-attr]
        except Absent:
            continue
    if not found:
        raise BadInput("no silo has answered; the gates' logs and `silodp silo status` say why")
    return found


def noise_of(statistic: Statistic, mechanism: Gaussian, records: int, silo: int) -> float:
    """Standard deviation of the noise in each coordinate of a silo's mean over so many records."""
    own = float(mechanism.multipliers([silo])[0, 0])
    return own * 2 * statistic.norm * (1 + CLIP_TOLERANCE) / records  # type: ignore[union-attr]


def pooled(released: dict[int, np.ndarray], statistic: Statistic, mechanism: Gaussian, counts: Sequence[int]) -> tuple[np.ndarray, float]:
    """The mean over the records of these silos, whichever holds them, and the standard deviation of the noise in each of its coordinates."""
    silos, weights = tuple(released), Weights("records", tuple(counts))
    value = torch.from_numpy(np.stack([released[i] for i in silos]))[None]
    shares = weights.shares(silos)[0].tolist()
    noise = math.sqrt(sum((a * noise_of(statistic, mechanism, counts[i], i)) ** 2 for a, i in zip(shares, silos, strict=True)))
    return mechanism.combine(value, silos, weights)[0].numpy(), noise


def score(
    fed: Port,
    w: Tensor,
    mechanism: Gaussian,
    *,
    names: Sequence[str],
    held_out: Sequence[int],
    classes: int,
    bins: int,
    cap: float,
    label: Label | None = None,
) -> list[Scores]:
    """Figures over all held-out records of the silos that answer, and of each; `held_out` is the public number of each silo's.

    With two classes there is an AUC, from `bins` bins of the predicted probability. A schema's `label` says whether it is a survival time,
    of which there is a loss alone, and gives a number its own unit: the silos scale its public range to [-1, 1].
    """
    if not cap > 0 or not 1 <= bins <= 512:
        raise BadInput(f"cap is {cap:g} and bins {bins}; the cap must be above 0, and there are 1 to 512 bins")
    survival, unit = label is not None and label.task == "survival", 1.0
    if label is not None and label.task == "regression":
        unit = (label.range[1] - label.range[0]) / 2
    statistic = Score(w, bins if classes == 2 else 0, cap / unit)
    released = ask_each(fed, statistic, mechanism)
    noise = {i: noise_of(statistic, mechanism, held_out[i], i) for i in released}
    total = sum(held_out[i] for i in released)
    rows = [Scores("all", total, _figures(*pooled(released, statistic, mechanism, held_out), total, classes, cap, survival))]
    return rows + [Scores(names[i], held_out[i], _figures(v, noise[i], held_out[i], classes, cap, survival)) for i, v in released.items()]


def _figures(value: np.ndarray, noise: float, n: int, classes: int, cap: float, survival: bool) -> dict[str, Figure]:
    if survival:
        return {"loss": _bounded(value[0], noise, n, cap)}
    if not classes:
        return {"squared error": _bounded(value[0], noise, n, cap**2), "absolute error": _bounded(value[1], noise, n, cap)}
    found = {"loss": _bounded(value[0], noise, n, cap), "accuracy": _bounded(value[1], noise, n, 1.0)}
    if classes == 2:
        found["auc"] = auc(*value[2:].reshape(2, -1), noise=noise, n=n)
    return found


def _bounded(value: float, noise: float, n: int, top: float) -> Figure:
    """A mean of numbers in [0, top]: with mean m their variance is at most m (top - m), and is that for right or wrong (binomial)."""
    share = min(max(float(value), 0.0), 1.0)
    inner = (n * share + 0.5) / (n + 1)  # none or all of n records are no proof of 0 or 1
    spread = math.sqrt(inner * (1 - inner) / n)
    low, high = (min(max(value + s * Z * noise, 0.0), 1.0) for s in (-1, 1))
    return Figure(top * share, top * noise, top * spread, top * low, top * high, too_noisy(low, high, noise, 1.0))


# --- AUC from a noisy histogram -----------------------------------------------------------------------------------------------------------


def auc(negative: np.ndarray, positive: np.ndarray, *, noise: float, n: int) -> Figure:
    """P(score of a positive > score of a negative), ties within a bin counting half, from noisy shares (bins,) of n records.

    The interval inverts a test (Fieller): with p, q the true shares, A the order of bins and B = A - theta 1 1^T, T = p^T B q is zero at
    the true theta. Of the noisy shares T has mean 0 there and variance s^2 (|B q|^2 + |B^T p|^2) + s^4 |B|_F^2; the estimate of it by
    noisy shares is too large by s^4 |B|_F^2 on average, never too small on purpose. Every theta with |T| <= 1.96 standard errors is in:
    where noise drowns a class, that is all of [0, 1]. `sampling` is Hanley and McNeil's (1982).
    """
    theta = np.linspace(0, 1, 2001)  # the interval is wider by a step at each end, so that the grid leaves nothing out
    bins = len(negative)
    order = np.tri(bins, k=-1) + np.eye(bins) / 2  # rows: the positive's bin; columns: the negative's
    wins, total_p, total_n = positive @ order @ negative, positive.sum(), negative.sum()
    gap = wins - theta * total_p * total_n
    left = (order @ negative)[:, None] - theta * total_n
    right = (order.T @ positive)[:, None] - theta * total_p
    inside = theta[np.abs(gap) <= Z * noise * np.sqrt((left**2).sum(0) + (right**2).sum(0))]
    product = total_p * total_n
    if total_p <= 0 or total_n <= 0:
        return Figure(math.nan, math.inf, math.inf, 0.0, 1.0, True)
    value = min(max(wins / product, 0.0), 1.0)
    at = (order @ negative - value * total_n, order.T @ positive - value * total_p)
    error = noise * math.sqrt(sum(float(side @ side) for side in at)) / product
    low, high = min(inside.min(initial=1), value) - theta[1], max(inside.max(initial=0), value) + theta[1]
    low, high = max(float(low), 0.0), min(float(high), 1.0)
    return Figure(value, error, _hanley(value, n * total_p, n * total_n), low, high, too_noisy(low, high, error, 1.0))


def _hanley(a: float, positives: float, negatives: float) -> float:
    positives, negatives = max(positives, 1.0), max(negatives, 1.0)
    half = 0.5 / (1 + min(positives, negatives))
    a = min(max(a, half), 1 - half)  # a perfect order of so few is no proof of one
    q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
    variance = a * (1 - a) + (positives - 1) * (q1 - a * a) + (negatives - 1) * (q2 - a * a)
    return math.sqrt(max(variance, 0.0) / (positives * negatives))


def as_rows(scores: Sequence[Scores]) -> list[dict]:
    """For files and --json: the numbers, and whether they are too noisy to say anything; what noise leaves unknown is None."""
    return [
        {
            "name": s.name,
            "held_out": s.held_out,
            "figures": {k: {m: v if math.isfinite(v) else None for m, v in vars(f).items()} for k, f in s.figures.items()},
        }
        for s in scores
    ]
