"""How good a model is, from one private release of each silo: loss, accuracy, balanced accuracy,
AUC and calibration (or errors of a number).

The noise of a release is known exactly, so its error bars are too. That the held-out records are
themselves a sample is a second error, which is told apart; it is estimated from released figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.figures import ACCURACY, AUC, BALANCED, IN_THE_LARGE, LARGER, SLOPE, too_noisy
from silodp.core.mechanisms import Gaussian
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.privacy.accounting import Budget, gdp_mu
from silodp.core.problem.losses import Loss, Weighted
from silodp.core.problem.schema import Label
from silodp.core.problem.task import Task
from silodp.core.quality import Z
from silodp.core.query import Query
from silodp.core.statistics import Score, Statistic
from silodp.core.weights import Weights
from silodp.server.asking import why
from silodp.server.estimates.calibration import Bin, Figure, edges, mean_risk, reliability, slope
from silodp.server.federation import Absent, Port, StopRun
from silodp.server.order import TOTALS
from silodp.server.shuffled import share_of


@dataclass(frozen=True)
class Scores:
    """One silo's figures, or those of all held-out records together."""

    name: str
    held_out: int
    figures: dict[str, Figure]
    reliability: list[Bin]
    """Of two classes: the observed share by predicted risk, as finely as the noise allows."""


@dataclass(frozen=True)
class Asked:
    """What a score is asked for, all of it public: of two classes `bins` bins of the score, and
    where a record's loss or error is clipped.
    """

    classes: int
    bins: int
    cap: float
    kind: str
    weights: tuple[float, ...] = ()
    """Weights of the classes that are in the scores."""

    @property
    def cells(self) -> int:
        """Return the bins of the statistic: of the score for two classes, of the label for more,
        none where there are no classes without an order.
        """
        return {"binary": self.bins, "multiclass": self.classes}.get(self.kind, 0)


def gaussian_for(
    kind: str,
    budgets: Sequence[Budget],
    releases: int = 1,
    *,
    trust: str = "isrl",
    counted: int = 1,
) -> Gaussian:
    """Return the mechanism of which `releases` full-batch releases take each silo's whole budget;
    its clip is the statistic's to say.

    Under masks or a shuffle: of totals that take the smallest budget, under the noise of `counted`
    silos.
    """
    mu = torch.tensor([[gdp_mu(budget) for budget in budgets]], dtype=torch.float64)
    mechanism = Gaussian(
        kind, 1.0, math.sqrt(releases) / mu * (1 + 1e-9)
    )  # so that their sum does not round above the budget
    if trust in TOTALS:
        return share_of(mechanism, counted, masked=trust == "masks")
    return mechanism


@dataclass(frozen=True)
class Pooled:
    """A mean over the records of all silos that answered, the standard deviation of the noise in
    each of its coordinates, and the number of records. `each` has the silos' own means by number;
    of a total there are none.
    """

    mean: np.ndarray
    noise: float
    records: int
    each: dict[int, np.ndarray]


def ask_pooled(
    fed: Port,
    statistic: Statistic,
    mechanism: Gaussian,
    counts: Sequence[int],
    without: dict[str, str] | None = None,
) -> Pooled:
    """Ask for a statistic at its own clip. BadInput, with who refused and why, where too few
    answer.

    `without` is told who did not answer, by the code that says why.
    """
    query = Query(statistic, mechanism.clipped(statistic.norm))  # type: ignore[union-attr]
    codes = {} if without is None else without
    if mechanism.total:
        try:
            found = fed.measure(query)
        except StopRun as stop:
            if not stop.codes:
                raise BadInput(f"{stop}") from None
            raise _refused(statistic, stop.codes) from None
        mean = found.mean[0].double().cpu().numpy()
        return Pooled(mean, float(found.noise.max()), round(float(found.records.max())), {})
    each = {}
    for i, port in fed.each().items():
        try:
            each[i] = port.mean(query)[0].double().cpu().numpy()
        except Absent as absent:
            codes |= absent.codes
        except StopRun as stop:
            if not stop.codes:
                raise BadInput(f"{stop}") from None
            each = {}
            codes |= stop.codes
            break
    if not each:
        raise _refused(statistic, codes)
    silos = tuple(each)
    weights = Weights("records", tuple(counts))
    shares = weights.shares(silos)[0].tolist()
    noises = [noise_of(statistic, mechanism, counts[i], i) for i in silos]
    noise = math.hypot(*(share * own for share, own in zip(shares, noises, strict=True)))
    value = torch.from_numpy(np.stack(list(each.values())))[None]
    mean = mechanism.combine(value, silos, weights)[0].numpy()
    return Pooled(mean, noise, sum(counts[i] for i in silos), each)


def _refused(statistic: Statistic, codes: Mapping[str, str]) -> BadInput:
    """Return the sentence about silos that have not answered."""
    said = ", ".join(f"{name} {code}" for name, code in sorted(codes.items()))
    name = type(statistic).__name__
    logs = "the gates' logs say why, and their policies must allow"
    return BadInput(
        f"no silo has answered what was asked, {name} ({said}){why(dict(codes))}; {logs} {name}"
    )


def noise_of(statistic: Statistic, mechanism: Gaussian, records: int, silo: int) -> float:
    """Standard deviation of the noise in each coordinate of a silo's mean over so many records."""
    own = float(mechanism.multipliers([silo])[0, 0])
    return own * 2 * statistic.norm * (1 + CLIP_TOLERANCE) / records  # type: ignore[union-attr]


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
    loss: Loss | None = None,
    without: dict[str, str] | None = None,
) -> list[Scores]:
    """Figures over all held-out records of the silos that answer, and of each, unless they answer
    in totals; `held_out` is the public number of each silo's.

    With two classes there are an AUC and a calibration, from `bins` bins of the predicted
    probability. A schema's `label` says whether it is a survival time, of which there is a loss
    alone, and gives a number its own unit: the silos scale its public range to [-1, 1]. The `loss`
    that the model was trained with says which weights of the classes are in its scores. `without`
    is told who did not answer, and why.
    """
    asked, unit = asked_of(classes, bins, cap, label, loss)
    statistic = Score(w, asked.cells, cap / unit)
    found = ask_pooled(fed, statistic, mechanism, held_out, without)
    rows = [scores_of("all", found.records, found.mean, found.noise, asked)]
    for i, value in found.each.items():
        noise = noise_of(statistic, mechanism, held_out[i], i)
        rows.append(scores_of(names[i], held_out[i], value, noise, asked))
    return rows


def asked_of(
    classes: int, bins: int, cap: float, label: Label | None, loss: Loss | None
) -> tuple[Asked, float]:
    """Return what is asked for, checked, and how many of the label's own units the silos have
    scaled to 1.
    """
    if not cap > 0 or not 1 <= bins <= 512:
        raise BadInput(
            f"cap is {cap:g} and bins {bins}; the cap must be above 0, and there are 1 to 512 bins"
        )
    if label is not None:
        kind = label.task
    else:
        kind = Task.plain(classes).kind
    if kind == "multiclass" and classes <= 2:
        kind = "binary"
    if label is not None and kind == "regression":
        unit = (label.range[1] - label.range[0]) / 2
    else:
        unit = 1.0
    return Asked(classes, bins, cap, kind, loss.weights if isinstance(loss, Weighted) else ()), unit


def scores_of(name: str, n: int, value: np.ndarray, noise: float, asked: Asked) -> Scores:
    """Return what one noisy mean over n records says."""
    cap = asked.cap
    if asked.kind == "survival":
        return Scores(name, n, {"loss": _bounded(value[0], noise, n, cap)}, [])
    if not asked.classes:
        found = {
            "squared error": _bounded(value[0], noise, n, cap**2),
            "absolute error": _bounded(value[1], noise, n, cap),
        }
        return Scores(name, n, found, [])
    found = {"loss": _bounded(value[0], noise, n, cap), ACCURACY: _bounded(value[1], noise, n, 1.0)}
    if not asked.cells:
        return Scores(name, n, found, [])
    if asked.kind == "multiclass":
        wrong, right = value[3:].reshape(2, -1)
        found |= {
            BALANCED: mean_recall(wrong, right, noise, n),
            LARGER: _larger(wrong + right, noise * math.sqrt(2), n),
        }
        return Scores(name, n, found, [])
    negative, positive = value[3:].reshape(2, -1)
    ends = edges(asked.bins, asked.weights)
    bins = asked.bins
    below = float(positive.sum() - negative.sum())
    if bins % 2 == 0:
        found[BALANCED] = _balanced(negative, positive, noise, n)
    found[AUC] = auc(negative, positive, noise=noise, n=n)
    found[LARGER] = _larger(np.array([1 - below, 1 + below]) / 2, noise * math.sqrt(bins / 2), n)
    middle = (ends[1:] + ends[:-1]) / 2
    brier = min(max(float(negative @ middle**2 + positive @ (1 - middle) ** 2), 1 / n), 1.0)
    found[IN_THE_LARGE] = mean_risk(value[2], noise, n, brier)
    found[SLOPE] = slope(negative, positive, ends, noise, n)
    return Scores(name, n, found, reliability(negative, positive, ends, noise, n))


def _bounded(value: float, noise: float, n: int, top: float) -> Figure:
    """Return a mean of numbers in [0, top]: with mean m their variance is at most m (top - m), and
    is that for right or wrong (binomial).
    """
    share = min(max(float(value), 0.0), 1.0)
    inner = (n * share + 0.5) / (n + 1)  # none or all of n records are no proof of 0 or 1
    spread = math.sqrt(inner * (1 - inner) / n)
    low, high = (min(max(value + s * Z * noise, 0.0), 1.0) for s in (-1, 1))
    return Figure(
        top * share, top * noise, top * spread, top * low, top * high, too_noisy(low, high, noise)
    )


def _larger(shares: np.ndarray, noise: float, n: int) -> Figure:
    """Return the share of the larger class. Of classes that noise cannot tell apart the larger
    released one is a little too large.
    """
    return _bounded(float(shares.max()), noise, n, 1.0)


def _balanced(negative: np.ndarray, positive: np.ndarray, noise: float, n: int) -> Figure:
    """Return, of two classes, the mean of the shares of each that are predicted rightly. It is the
    AUC of two bins, below 0.5 and above it.
    """
    half = len(negative) // 2
    two = [np.array([part[:half].sum(), part[half:].sum()]) for part in (negative, positive)]
    found = auc(*two, noise=noise * math.sqrt(half), n=n)
    errors = [
        _bounded(part[k] / part.sum(), 0.0, max(int(n * part.sum()), 1), 1.0).sampling
        for k, part in enumerate(two)
        if part.sum() > 0
    ]
    if len(errors) == 2:
        return replace(found, sampling=math.hypot(*errors) / 2)
    return found


def mean_recall(wrong: np.ndarray, right: np.ndarray, noise: float, n: int) -> Figure:
    """Return, of several classes, the mean over classes of the share that is predicted rightly,
    from noisy shares (classes,) of n records. Its errors follow from the derivatives of right /
    (right + wrong) (delta method): too noisy where a class is not clear of its noise.

    Its errors follow from the derivatives of right / (right + wrong) (delta method): too noisy
    where a class is not clear of its noise.
    """
    count = right + wrong
    if not (count > 4 * math.sqrt(2) * noise).all():
        return Figure(math.nan, math.inf, math.inf, 0.0, 1.0, True)
    recall = np.clip(right / count, 0, 1)
    value = float(recall.mean())
    error = (
        noise / len(count) * math.sqrt(float((((1 - recall) ** 2 + recall**2) / count**2).sum()))
    )
    inner = (n * count * recall + 0.5) / (n * count + 1)
    sampling = math.sqrt(float((inner * (1 - inner) / (n * count)).sum())) / len(count)
    low, high = (min(max(value + s * Z * error, 0.0), 1.0) for s in (-1, 1))
    return Figure(value, error, sampling, low, high, too_noisy(low, high, error))


# --- AUC from a noisy histogram ------------------------------------------------------------------


def auc(negative: np.ndarray, positive: np.ndarray, *, noise: float, n: int) -> Figure:
    """P(score of a positive > score of a negative), ties within a bin counting half, from noisy
    shares (bins,) of n records.

    The interval inverts a test (Fieller): with p, q the true shares, A the order of bins and B = A
    - theta 1 1^T, T = p^T B q is zero at the true theta. Of the noisy shares T has mean 0 there and
    variance s^2 (|B q|^2 + |B^T p|^2) + s^4 |B|_F^2; the estimate of it by noisy shares is too
    large by s^4 |B|_F^2 on average, never too small on purpose. Every theta with |T| <= 1.96
    standard errors is in: where noise drowns a class, that is all of [0, 1]. `sampling` is Hanley
    and McNeil's (1982).
    """
    theta = np.linspace(
        0, 1, 2001
    )  # the interval is wider by a step at each end, so that the grid leaves nothing out
    bins = len(negative)
    order = (
        np.tri(bins, k=-1) + np.eye(bins) / 2
    )  # rows: the positive's bin; columns: the negative's
    wins = positive @ order @ negative
    total_p = positive.sum()
    total_n = negative.sum()
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
    low = min(inside.min(initial=1), value) - theta[1]
    high = max(inside.max(initial=0), value) + theta[1]
    low = max(float(low), 0.0)
    high = min(float(high), 1.0)
    if min(total_p, total_n) < 2 * noise * math.sqrt(
        bins
    ):  # a class that may not be there at all has no order
        return Figure(value, error, math.inf, 0.0, 1.0, True)
    return Figure(
        value,
        error,
        _hanley(value, n * total_p, n * total_n),
        low,
        high,
        too_noisy(low, high, error),
    )


def _hanley(a: float, positives: float, negatives: float) -> float:
    positives = max(positives, 1.0)
    negatives = max(negatives, 1.0)
    half = 0.5 / (1 + min(positives, negatives))
    a = min(max(a, half), 1 - half)  # a perfect order of so few is no proof of one
    q1 = a / (2 - a)
    q2 = 2 * a * a / (1 + a)
    variance = a * (1 - a) + (positives - 1) * (q1 - a * a) + (negatives - 1) * (q2 - a * a)
    return math.sqrt(max(variance, 0.0) / (positives * negatives))


def told(figure: Figure) -> dict[str, float | bool | None]:
    """Return a figure for files and --json; what noise leaves unknown is None."""
    return {name: value if math.isfinite(value) else None for name, value in vars(figure).items()}


def as_rows(scores: Sequence[Scores], classes: int) -> list[dict]:
    """Return the scores for files and --json: the numbers, the number of classes, and whether they
    are too noisy.
    """
    return [
        {
            "name": s.name,
            "held_out": s.held_out,
            "classes": classes,
            "figures": {name: told(figure) for name, figure in s.figures.items()},
            "reliability": [vars(row) for row in s.reliability],
        }
        for s in scores
    ]
