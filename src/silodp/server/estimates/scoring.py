"""How good a model is, from one private release of each silo.

Of two classes there are discrimination, calibration and what a threshold does. Of other labels
there are errors.

The noise of a release is known exactly. That the held-out records are themselves a sample is
estimated from released figures. Intervals contain both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.figures import (
    ACCURACY,
    AUC,
    BALANCED,
    DEVIANCE,
    EXPLAINED,
    FLAGGED,
    IN_THE_LARGE,
    LARGER,
    NPV,
    PPV,
    PREVALENCE,
    SENSITIVITY,
    SLOPE,
    SPECIFICITY,
    WIDEST,
)
from silodp.core.mechanisms import Gaussian
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.privacy.accounting import Budget, gdp_mu
from silodp.core.problem.losses import Loss, Poisson, Weighted
from silodp.core.problem.schema import Label
from silodp.core.problem.task import Task
from silodp.core.quality import Z
from silodp.core.query import Query
from silodp.core.statistics import MAX_BINS, Score, Statistic
from silodp.core.statistics.score import largest_deviance, largest_entropy, middle_of
from silodp.core.weights import Weights
from silodp.server.asking import why
from silodp.server.estimates.calibration import Bin, Figure, hidden, mean_risk, reliability, slope
from silodp.server.estimates.inversion import (
    PSEUDO,
    by_variance,
    combined,
    conditional,
    proportion,
)
from silodp.server.estimates.placing import RiskBins
from silodp.server.estimates.ranking import auc
from silodp.server.federation import Absent, Port, StopRun
from silodp.server.order import TOTALS
from silodp.server.shuffled import share_of

LOSS_CAP = 4.0
"""Where a record's loss is clipped, if the caller does not say: the loss of a risk of 2 %."""

TAIL_COUNTS = 3.0
"""Multiples of a typical large count up to which counts weigh in the error of a deviance."""
MOST_THRESHOLDS = 40
"""About so many thresholds have a row in the results."""


@dataclass(frozen=True)
class Scores:
    """One silo's figures, or those of all held-out records together."""

    name: str
    held_out: int
    figures: dict[str, Figure]
    reliability: list[Bin]
    """Of two classes: the observed share by predicted risk, as finely as the noise allows."""
    thresholds: list[dict[str, Any]] = field(default_factory=list)
    """Of two classes, all records together: what follows from thresholds on the risk, as (value,
    low, high) by name.
    """


@dataclass(frozen=True)
class Asked:
    """What a score is asked for, all of it public.

    A record's loss or error is clipped at `cap`, in the label's own unit. The silos have scaled
    `unit` of it to 1. Two classes and survival times have bins of the risk.
    """

    kind: str
    classes: int
    cap: float
    unit: float = 1.0
    bins: RiskBins | None = None
    weights: tuple[float, ...] = ()
    """Weights of the classes that are in the scores."""
    most: float = 0.0
    """The largest count."""
    in_range: bool = False
    """Whether a number has a public range, which the silos scale to [-1, 1]."""
    outcome: str = ""
    """The outcome whose risk is predicted, in words: of two classes and of survival times."""

    @property
    def cells(self) -> int:
        """Return the bins of the statistic: of the risk, or one for each class."""
        if self.bins:
            return self.bins.count
        if self.kind in ("multiclass", "ordinal"):
            return self.classes
        return 0

    @property
    def numbers(self) -> int:
        """Return how many numbers of the statistic's list are used (`Score`)."""
        if self.kind == "regression":
            return 4 if self.in_range else 2
        return {"binary": 2, "survival": 2, "count": 5}.get(self.kind, 1)

    def statistic(self, w: Tensor) -> Score:
        """Return the question about the model w."""
        edges: Sequence[float] = ()
        if self.bins:
            edges = self.bins.edges
        return Score(
            w,
            self.cells,
            self.cap / self.unit,
            self.numbers,
            torch.tensor(edges, dtype=torch.float64),
        )

    @property
    def cut(self) -> str:
        """Return the sentence that states where errors are clipped."""
        if self.kind in ("regression", "count"):
            return f"Errors above {self.cap:g} count as {self.cap:g}."
        return f"Losses above {self.cap:g} count as {self.cap:g}."


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
    asked: Asked,
    without: dict[str, str] | None = None,
) -> list[Scores]:
    """Figures over all held-out records of the silos that answer, and of each, unless they answer
    in totals; `held_out` is the public number of each silo's.

    `without` is told who did not answer, and why.
    """
    statistic = asked.statistic(w)
    found = ask_pooled(fed, statistic, mechanism, held_out, without)
    whole = scores_of("all", found.records, found.mean, found.noise, asked)
    thresholds = thresholds_of(found.records, found.mean, found.noise, asked)
    rows = [replace(whole, thresholds=thresholds)]
    for i, value in found.each.items():
        noise = noise_of(statistic, mechanism, held_out[i], i)
        rows.append(scores_of(names[i], held_out[i], value, noise, asked))
    return rows


def kind_of(classes: int, label: Label | None, loss: Loss | None) -> str:
    """Return the task that is judged: one of `task.KINDS`."""
    if label is not None:
        kind = label.task
    elif isinstance(loss, Poisson):
        kind = "count"
    else:
        kind = Task.plain(classes).kind
    if kind == "multiclass" and classes <= 2:
        return "binary"
    return kind


def asked_of(
    classes: int,
    label: Label | None,
    loss: Loss | None,
    *,
    bins: RiskBins | None = None,
    cap: float | None = None,
) -> Asked:
    """Return what is asked for. BadInput if it has no meaning.

    Without a `cap`, the schema's range decides where errors are clipped: no error can be larger.
    """
    kind = kind_of(classes, label, loss)
    unit = 1.0
    most = 0.0
    usual = LOSS_CAP
    in_range = kind == "regression" and label is not None
    if in_range:
        assert label is not None
        unit = (label.range[1] - label.range[0]) / 2
        usual = 2 * unit
    if isinstance(loss, Poisson):
        most = loss.most
        usual = most
    if cap is None:
        cap = usual
    if not 0 < cap < math.inf:
        raise BadInput(f"the cap is {cap:g}; it must be above 0")
    if bins and not 2 <= bins.count <= MAX_BINS:
        raise BadInput(f"bins is {bins.count}; it must be from 2 to {MAX_BINS}")
    if kind not in ("binary", "survival"):
        bins = None
    weights = loss.weights if isinstance(loss, Weighted) else ()
    outcome = outcome_of(kind, label)
    return Asked(kind, classes, cap, unit, bins, weights, most, in_range, outcome)


def outcome_of(kind: str, label: Label | None) -> str:
    """Return the outcome whose risk is predicted, in words."""
    if kind == "binary":
        if label is None or not label.classes:
            return "the second class"
        return f"{label.name} is {label.classes[1]}"
    if kind == "survival" and label is not None:
        edge = label.edges[middle_of(len(label.edges))]
        return f"{label.columns[1]} by {label.columns[0]} {edge:g}"
    return ""


# --- what one noisy mean over n records says -----------------------------------------------------


def scores_of(name: str, n: int, value: np.ndarray, noise: float, asked: Asked) -> Scores:
    """Return the figures of one noisy mean over n records."""
    numbers = value[: asked.numbers]
    cells = value[asked.numbers :].reshape(2, -1)
    more: list[Bin] = []
    if asked.kind == "regression":
        figures = _of_errors(numbers, noise, n, asked)
        if asked.in_range:
            figures[EXPLAINED] = _explained_variance(numbers, noise, n, asked)
    elif asked.kind == "count":
        figures = _of_errors(numbers, noise, n, asked)
        figures[DEVIANCE] = _explained_deviance(numbers, noise, n, asked)
    elif asked.kind == "survival":
        figures = {"loss": _mean(numbers[0], noise, n, asked.cap)}
        if asked.bins:
            figures = _of_events(numbers[1], cells, noise, n, asked) | figures
    elif asked.kind == "binary":
        figures, more = _of_two(numbers[1], cells, noise, n, asked)
        dispersion = _dispersion(cells, noise, n, asked)
        figures["loss"] = _mean(numbers[0], noise, n, asked.cap, dispersion)
    else:
        wrong, right = cells
        figures = {
            BALANCED: mean_recall(wrong, right, noise, n),
            ACCURACY: _part(float(right.sum()), float(wrong.sum()), cells, noise, n),
            LARGER: _larger(wrong + right, noise * math.sqrt(2), n),
            "loss": _mean(numbers[0], noise, n, asked.cap),
        }
    return Scores(name, n, figures, more)


def _share(value: float, noise: float, n: int) -> Figure:
    """Return the share of records with a property."""
    share = min(max(float(value), 0.0), 1.0)
    inner = (n * share + 0.5) / (n + 1)  # none or all of n records are no proof of 0 or 1
    low, high = proportion(float(value), noise, n)
    return Figure(
        share,
        noise,
        math.sqrt(inner * (1 - inner) / n),
        min(low, share),
        max(high, share),
        2 * Z * noise > WIDEST,
    )


def _mean(value: float, noise: float, n: int, top: float, dispersion: float = 1.0) -> Figure:
    """Return a mean of numbers in [0, top]. With mean m their variance is `dispersion` times
    m (top - m), which is the largest possible one if `dispersion` is 1.
    """
    share = min(max(float(value), 0.0), 1.0)
    inner = (n * share + 0.5) / (n + 1)
    low, high = by_variance(float(value), noise, n, dispersion)
    return Figure(
        top * share,
        top * noise,
        top * math.sqrt(dispersion * inner * (1 - inner) / n),
        top * min(low, share),
        top * max(high, share),
        2 * Z * noise > WIDEST,
    )


def _dispersion(cells: np.ndarray, noise: float, n: int, asked: Asked) -> float:
    """Return the variance of the losses, as a part of the largest that their mean allows.

    It follows from the cells: records of a cell have about the same loss. Noise and a few records
    with the worst loss are added.
    """
    if not asked.bins:
        return 1.0
    risks = np.clip(np.array(asked.bins.means), 1e-9, 1 - 1e-9)
    first, second = asked.weights or (1.0, 1.0)
    odds = second * risks / (first * (1 - risks))
    losses = np.stack([first * np.log1p(odds), second * np.log1p(1 / odds)])
    losses = np.clip(losses / asked.cap, 0, 1)
    total = max(float(cells.sum()), 1e-9)
    mean = min(max(float((cells * losses).sum()) / total, 0.5 / n), 1 - 0.5 / n)
    squares = (losses - mean) ** 2
    variance = float((cells * squares).sum()) / total + PSEUDO / n * float(squares.max())
    variance += Z * noise * math.sqrt(float((squares**2).sum()))
    return min(max(variance, 0.0) / (mean * (1 - mean)), 1.0)


def _of_two(
    excess: float, cells: np.ndarray, noise: float, n: int, asked: Asked
) -> tuple[dict[str, Figure], list[Bin]]:
    """Return the figures of two classes from the cells, and the reliability."""
    negative, positive = cells
    found = {AUC: auc(negative, positive, noise=noise, n=n)}
    prevalence = _prevalence(negative, positive, noise, n)
    bins = asked.bins
    if not bins:
        return found | {PREVALENCE: prevalence, LARGER: _of_both(prevalence)}, []
    at = _at_threshold(negative, positive, bins.above, noise, n)
    found |= {PREVALENCE: prevalence} | at
    found[BALANCED] = _average(at[SENSITIVITY], at[SPECIFICITY])
    found[LARGER] = _of_both(prevalence)
    means = np.array(bins.means)
    brier = float(negative @ means**2 + positive @ (1 - means) ** 2)
    found[IN_THE_LARGE] = mean_risk(excess, noise, n, min(max(brier, 1 / n), 1.0))
    found[SLOPE] = slope(negative, positive, means, noise, n)
    return found, reliability(negative, positive, bins.ends, noise, n)


def thresholds_of(n: int, value: np.ndarray, noise: float, asked: Asked) -> list[dict[str, Any]]:
    """Return what follows from a threshold at each of about `MOST_THRESHOLDS` edges."""
    bins = asked.bins
    if asked.kind != "binary" or not bins:
        return []
    negative, positive = value[asked.numbers :].reshape(2, -1)
    rows = []
    for k in range(1, bins.count, max(1, bins.count // MOST_THRESHOLDS)):
        row: dict[str, Any] = {"risk": float(bins.ends[k])}
        for name, figure in _at_threshold(negative, positive, k, noise, n).items():
            if not figure.too_noisy:
                row[name] = [figure.value, figure.low, figure.high]
        rows.append(row)
    return rows


def _prevalence(negative: np.ndarray, positive: np.ndarray, noise: float, n: int) -> Figure:
    """Return the share of the second class."""
    cells = np.stack([negative, positive])
    return _part(float(positive.sum()), float(negative.sum()), cells, noise, n)


def _part(inside: float, outside: float, cells: np.ndarray, noise: float, n: int) -> Figure:
    """Return the share of records that are in some of the cells.

    Each record is in one cell. So the sum of these cells is 1 less the sum of the others, and the
    mean of both has less noise.
    """
    return _share((1 + inside - outside) / 2, noise * math.sqrt(cells.size) / 2, n)


def _at_threshold(
    negative: np.ndarray, positive: np.ndarray, above: int, noise: float, n: int
) -> dict[str, Figure]:
    """Return what follows if the records of the bins from `above` on are flagged."""
    upper = noise * math.sqrt(len(positive) - above)
    lower = noise * math.sqrt(above)
    found = float(positive[above:].sum())
    missed = float(positive[:above].sum())
    alarms = float(negative[above:].sum())
    passed = float(negative[:above].sum())
    cells = np.stack([negative, positive])
    return {
        SENSITIVITY: ratio(found, missed, upper, lower, n),
        SPECIFICITY: ratio(passed, alarms, lower, upper, n),
        PPV: ratio(found, alarms, upper, upper, n),
        NPV: ratio(passed, missed, lower, lower, n),
        FLAGGED: _part(found + alarms, missed + passed, cells, noise, n),
        ACCURACY: _part(found + passed, missed + alarms, cells, noise, n),
    }


def ratio(above: float, below: float, noise_above: float, noise_below: float, n: int) -> Figure:
    """Return above / (above + below), of two noisy shares of n records."""
    count = above + below
    noise = math.hypot(noise_above, noise_below)
    if not count > max(4 * noise, 1 / n):
        return hidden()
    value = min(max(above / count, 0.0), 1.0)
    low, high = conditional(above, below, noise_above, noise_below, n)
    by_noise = math.hypot((1 - value) * noise_above, value * noise_below) / count
    inner = (n * count * value + 0.5) / (n * count + 1)
    sampling = math.sqrt(inner * (1 - inner) / (n * count))
    hides = 2 * Z * by_noise > WIDEST
    return Figure(value, by_noise, sampling, min(low, value), max(high, value), hides)


def _average(*shares: Figure) -> Figure:
    """Return the mean of shares of different records."""
    if any(not math.isfinite(share.value) for share in shares):
        return hidden()
    count = len(shares)
    value = sum(share.value for share in shares) / count
    parts = [(s.value / count, s.low / count, s.high / count) for s in shares]
    low, high = combined(value, *parts)
    noise = math.hypot(*(share.noise for share in shares)) / count
    sampling = math.hypot(*(share.sampling for share in shares)) / count
    hides = 2 * Z * noise > WIDEST
    return Figure(value, noise, sampling, max(low, 0.0), min(high, 1.0), hides)


def _of_both(prevalence: Figure) -> Figure:
    """Return the share of the larger of two classes."""
    low = max(prevalence.low, 1 - prevalence.high, 0.5)
    return Figure(
        max(prevalence.value, 1 - prevalence.value),
        prevalence.noise,
        prevalence.sampling,
        low,
        max(prevalence.high, 1 - prevalence.low, low),
        prevalence.too_noisy,
    )


def _larger(shares: np.ndarray, noise: float, n: int) -> Figure:
    """Return the share of the largest class. Of classes that noise cannot tell apart the largest
    released one is a little too large, so its interval goes down to the smallest of their lows.
    """
    figures = [_share(float(share), noise, n) for share in shares]
    largest = max(figures, key=lambda figure: figure.value)
    rivals = [figure for figure in figures if figure.high >= largest.low]
    low = max(min(figure.low for figure in rivals), 1 / len(shares))
    return Figure(
        largest.value,
        noise,
        largest.sampling,
        min(low, largest.value),
        max(figure.high for figure in figures),
        largest.too_noisy,
    )


def mean_recall(wrong: np.ndarray, right: np.ndarray, noise: float, n: int) -> Figure:
    """Return, of several classes, the mean over classes of the share that is predicted rightly,
    from noisy shares (classes,) of n records: too noisy where a class is not clear of its noise.
    """
    pairs = zip(right.tolist(), wrong.tolist(), strict=True)
    return _average(*(ratio(r, w, noise, noise, n) for r, w in pairs))


def _of_events(
    excess: float, cells: np.ndarray, noise: float, n: int, asked: Asked
) -> dict[str, Figure]:
    """Return the figures of survival times by the middle time bin, over the records of which it is
    known whether the event had happened.
    """
    negative, positive = cells
    assert asked.bins is not None
    found = {AUC: auc(negative, positive, noise=noise, n=n)}
    known = float(cells.sum())
    wide = noise * math.sqrt(cells.size)
    if not known > max(4 * wide, 1 / n):
        return found | {IN_THE_LARGE: hidden(-1.0)}
    means = np.array(asked.bins.means)
    brier = float(negative @ means**2 + positive @ (1 - means) ** 2)
    all_records = mean_risk(excess, noise, n, min(max(brier, 1 / n), 1.0))
    off = all_records.value / known
    by_noise = math.hypot(all_records.noise, off * wide) / known
    sampling = all_records.sampling / known
    half = Z * math.hypot(by_noise, sampling)
    found[IN_THE_LARGE] = Figure(
        max(-1.0, min(1.0, off)),
        by_noise,
        sampling,
        max(-1.0, off - half),
        min(1.0, off + half),
        all_records.too_noisy,
    )
    return found


def _of_errors(numbers: np.ndarray, noise: float, n: int, asked: Asked) -> dict[str, Figure]:
    """Return the squared and the absolute error of a number or a count."""
    square = min(max(float(numbers[0]), 0.0), 1.0)
    mean = min(max(float(numbers[1]), 0.5 / n), 1 - 0.5 / n)
    # the variance of absolute errors is the mean square less the squared mean
    upper = square + Z * math.hypot(noise, math.sqrt(square * (1 - square) / n)) + PSEUDO / n
    dispersion = min(max(upper - mean**2, 0.0) / (mean * (1 - mean)), 1.0)
    return {
        "squared error": _mean(numbers[0], noise, n, asked.cap**2),
        "absolute error": _mean(numbers[1], noise, n, asked.cap, dispersion),
    }


def _explained_variance(numbers: np.ndarray, noise: float, n: int, asked: Asked) -> Figure:
    """Return 1 - mean squared error / variance of the label."""
    scale = (asked.cap / asked.unit) ** 2
    square = min(max(float(numbers[0]), 0.0), 1.0)
    mean = 2 * float(numbers[2]) - 1
    variance = float(numbers[3]) - mean**2
    farthest = (1 + abs(mean)) ** 2
    return _explained(
        (scale * square, scale * noise, scale * math.sqrt(square * (1 - square) / n)),
        (
            variance,
            noise * math.hypot(1, 4 * mean),
            math.sqrt(max(variance * (farthest - variance), 0.0) / n),
        ),
    )


def _explained_deviance(numbers: np.ndarray, noise: float, n: int, asked: Asked) -> Figure:
    """Return 1 - deviance of the model / deviance of the mean count."""
    most = max(asked.most, 2.0)
    largest = largest_deviance(asked.most)
    deviance = largest * min(max(float(numbers[3]), 0.0), 1.0)
    mean = max(asked.most * float(numbers[2]), 0.5 / n)
    entropy = largest_entropy(asked.most)
    null = 2 * (entropy * float(numbers[4]) - mean * math.log(mean))
    # The tail of the counts bounds how much one record weighs: E[y^2] / E[y] is a typical large
    # count, and few are above a multiple of it.
    square = asked.cap**2 * (max(float(numbers[0]), 0.0) + Z * noise) + mean**2
    large = min(max(TAIL_COUNTS * square / mean, 2 * mean), max(most, 2 * mean))
    farthest = 2 * (large * math.log(large / mean) - large + mean)
    return _explained(
        (deviance, largest * noise, math.sqrt(deviance * max(farthest, deviance) / n)),
        (
            null,
            2 * noise * math.hypot(entropy, asked.most * (1 + math.log(mean))),
            math.sqrt(max(null * farthest, 0.0) / n),
        ),
    )


def _explained(part: tuple[float, float, float], whole: tuple[float, float, float]) -> Figure:
    """Return 1 - part / whole, from (estimate, noise, sampling error) of both (Fieller)."""
    if not whole[0] > 2 * math.hypot(*whole[1:]):
        return hidden(-1.0)
    u = np.linspace(0, 3, 3001)
    error = np.sqrt(part[1] ** 2 + part[2] ** 2 + u**2 * (whole[1] ** 2 + whole[2] ** 2))
    inside = u[np.abs(part[0] - u * whole[0]) <= Z * error]
    left = part[0] / whole[0]
    value = 1 - left
    low = 1 - float(inside.max(initial=min(left, 3.0))) - u[1]
    high = min(1 - float(inside.min(initial=min(left, 3.0))) + u[1], 1.0)
    by_noise = math.hypot(part[1], left * whole[1]) / whole[0]
    sampling = math.hypot(part[2], left * whole[2]) / whole[0]
    hides = 2 * Z * by_noise > WIDEST
    return Figure(value, by_noise, sampling, min(low, value), max(high, value), hides)


def told(figure: Figure) -> dict[str, float | bool | None]:
    """Return a figure for files and --json; what noise leaves unknown is None."""
    return {name: value if math.isfinite(value) else None for name, value in vars(figure).items()}


def as_rows(scores: Sequence[Scores], asked: Asked) -> list[dict]:
    """Return the scores for files and --json: the numbers, the number of classes, and whether they
    are too noisy.
    """
    about: dict[str, Any] = {"classes": asked.classes, "kind": asked.kind}
    if asked.outcome:
        about["outcome"] = asked.outcome
    if asked.kind == "binary" and asked.bins:
        about["threshold"] = asked.bins.threshold
    return [
        {
            "name": s.name,
            "held_out": s.held_out,
            **about,
            "figures": {name: told(figure) for name, figure in s.figures.items()},
            "reliability": [asdict(row) for row in s.reliability],
            "thresholds": s.thresholds,
        }
        for s in scores
    ]
