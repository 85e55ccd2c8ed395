"""How often intervals with privacy noise cover, over well-specified models.

They are linear models, with the clip inactive and where clip or noise bite; columns' means,
quantiles and shares (`measure_columns`); and logistic, Poisson and Cox models (`measure_ratios`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import MissingRates, Moments
from silodp.core.statistics.gram import Gram
from silodp.core.statistics.regression import COUNTS, COX, LOGISTIC
from silodp.core.weights import Weights
from silodp.server.estimates.columns import count_noise, share_of
from silodp.server.estimates.grids import bins_for, ends_of
from silodp.server.estimates.intervals import SOUND, coefficients, covers, heaviest, never_scaled
from silodp.server.estimates.linear import question
from silodp.server.estimates.profile import scaled
from silodp.server.estimates.quantiles import mean, quantile
from silodp.server.estimates.regression import Model, Term, regress
from silodp.server.estimates.scoring import gaussian_for, noise_of
from silodp.server.federation import Measured
from silodp.server.order import default_delta

SPREAD = 0.15
"""Standard deviation of what the features do not explain; a label's range is [-1, 1]."""


@dataclass(frozen=True)
class Design:
    """Features, records of each silo, epsilon, the clip (2: none is scaled down), and how features
    share a common part.
    """

    features: int
    counts: tuple[int, ...]
    epsilon: float
    clip: float = 2.0
    common: float = 0.0


DESIGNS = (
    Design(2, (500,), 1.0),
    Design(2, (303, 261, 46, 130), 3.0),
    Design(5, (1000,), 3.0),
    Design(5, (3000, 2000), 1.0),
    Design(5, (3000, 2000), 3.0, common=0.6),
    Design(10, (5000,), 3.0),
    Design(5, (3000, 2000), 1.0, clip=1.0),
    Design(5, (3000, 2000), 8.0, clip=0.5),
    Design(5, (300,), 1.0),
    Design(10, (1000,), 0.5),
)


def measure(
    replications: int, designs: tuple[Design, ...] = DESIGNS, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """A row for each design: the least and the largest share of intervals, over its coefficients,
    that hold the truth.
    """
    for at, design in enumerate(designs):
        random = torch.Generator().manual_seed(seed + at)
        features = design.features
        n = sum(design.counts)
        gram = question(Problem(torch.nn.Linear(features, 1), squared_error), design.clip, 1.0)
        mechanism: Gaussian = gaussian_for(
            "gram", [Budget(design.epsilon, default_delta(k)) for k in design.counts]
        )
        noise, _ = mechanism.clipped(gram.norm).deviation(
            range(len(design.counts)), Weights("records", design.counts)
        )
        theta = torch.tensor(
            [0.1, *(0.3 * (-1) ** j / (j + 1) for j in range(features))], dtype=torch.float64
        )
        found = list[torch.Tensor]()
        chunk = max(1, 2**21 // (n * gram.size))
        for start in range(0, replications, chunk):
            found.append(
                covers(
                    _products(gram, design, theta, min(chunk, replications - start), random),
                    theta,
                    noise,
                    n,
                    random,
                    heaviest(gram),
                )
            )
        shares = torch.cat(found).double().mean(0)
        typical = coefficients(
            _products(gram, design, theta, 1, random),
            noise,
            torch.full_like(noise, n),
            heaviest(gram),
        )
        low = float(shares.min())
        high = float(shares.max())
        inactive = never_scaled(gram)
        yield {
            "features": features,
            "records": list(design.counts),
            "epsilon": design.epsilon,
            "clip": design.clip,
            "clip_inactive": inactive,
            "common": design.common,
            "replications": replications,
            "least": low,
            "largest": high,
            "mean": float(shares.mean()),
            "standard_error": math.sqrt(0.95 * 0.05 / replications),
            "half_width": 1.96 * float(typical.error[0, 1:].median()),
            "called_95": inactive and SOUND[0] <= low and high <= SOUND[1],
        }


def _products(
    gram: Gram, design: Design, theta: torch.Tensor, repeats: int, random: torch.Generator
) -> torch.Tensor:
    """(R, p, p): the noiseless mean products of so many samples, by the statistic's own factors."""
    n = sum(design.counts)
    on = {"generator": random, "dtype": torch.float64}
    x = (1 - design.common) * (2 * torch.rand(repeats, n, design.features, **on) - 1)
    x = x + design.common * (2 * torch.rand(repeats, n, 1, **on) - 1)
    y = theta[0] + x @ theta[1:] + SPREAD * torch.randn(repeats, n, **on)
    z = gram.factors(None, 0)(x.flatten(0, 1), y.flatten()).reshape(repeats, n, -1)  # type: ignore[arg-type]
    return z.mT @ z / n


@dataclass(frozen=True)
class RatioDesign:
    """A logistic, Poisson or Cox model: its features, six silos of equal size, epsilon, trust, the
    share of records with the event (the mean of a count), and the share that is lost to follow-up.
    """

    family: int
    features: int
    records: int
    epsilon: float
    trust: str = "masks"
    events: float = 0.5
    lost: float = 0.0


SILOS = 6
MOST = 12.0
BINS = 12
RATIO_DESIGNS = (
    RatioDesign(LOGISTIC, 3, 1800, 3.0),
    RatioDesign(LOGISTIC, 5, 6000, 1.0),
    RatioDesign(LOGISTIC, 5, 6000, 3.0, trust="isrl"),
    RatioDesign(LOGISTIC, 5, 6000, 3.0, events=0.05),
    RatioDesign(COUNTS, 3, 6000, 3.0, events=1.5),
    RatioDesign(COX, 3, 1800, 3.0, lost=0.3),
    RatioDesign(COX, 5, 6000, 1.0, lost=0.3),
    RatioDesign(COX, 5, 6000, 3.0, trust="isrl", lost=0.3),
    RatioDesign(COX, 5, 6000, 3.0, events=0.1, lost=0.3),
)


def measure_ratios(
    replications: int, designs: tuple[RatioDesign, ...] = RATIO_DESIGNS, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Return a row for each design: the least and the largest share of intervals that hold the
    truth, over its slopes. The estimator's own code asks sums of drawn records, under drawn noise.
    """
    for at, design in enumerate(designs):
        random = np.random.default_rng([seed, at])
        counts = (design.records // SILOS,) * SILOS
        budgets = [Budget(design.epsilon, default_delta(n)) for n in counts]
        mechanism = gaussian_for("ratios", budgets, trust=design.trust, counted=SILOS)
        terms = tuple(
            Term(f"x{j}", j, 1.0, 0.0, (-1.0, 1.0) if j % 2 else None)
            for j in range(design.features)
        )
        edges = tuple(range(1, BINS + 1)) if design.family == COX else ()
        most = MOST if design.family == COUNTS else 1.0
        model = Model(design.family, terms, design.features, edges, most)
        truth = np.array([0.5 * (-1) ** j / (1 + j / 2) for j in range(design.features)])
        truth[0] *= 2  # it varies less
        held = []
        errors = []
        none = 0
        for _ in range(replications):
            x, y = _drawn(design, truth, random)
            port = Drawn(x, y, counts, mechanism.total, random)
            try:
                fitted = regress(port, mechanism, model, counts)  # type: ignore[arg-type]
            except BadInput:
                none += 1
                continue
            slopes = slice(len(fitted.names) - design.features, None)
            error = fitted.error[slopes]
            held.append(np.abs(fitted.value[slopes] - truth) <= 1.959964 * error)
            errors.append(fitted.noise[slopes] / error)
        shares = np.mean(held, axis=0) if held else np.zeros(design.features)
        yield {
            "model": model.name,
            "features": design.features,
            "records": design.records,
            "epsilon": design.epsilon,
            "trust": design.trust,
            "events": design.events,
            "lost": design.lost,
            "replications": replications,
            "without_interval": none,
            "least": float(shares.min()),
            "mean": float(shares.mean()),
            "largest": float(shares.max()),
            "noise_share": float(np.mean(errors)) if errors else math.nan,
        }


class Drawn:
    """A federation of drawn records, which answers with exact sums and drawn noise."""

    def __init__(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        counts: tuple[int, ...],
        total: bool,
        random: np.random.Generator,
    ) -> None:
        self._x = x
        self._y = y
        self._counts = counts
        self._total = total
        self._random = random

    def measure(self, query: Query) -> Measured:
        """Return the mean over all records, under the noise of a total."""
        rows = query.statistic.rows(None, 0)(self._x, self._y)  # type: ignore[arg-type,misc]
        weights = Weights("records", self._counts).for_totals()
        noise, records = query.mechanism.deviation(range(len(self._counts)), weights)
        return Measured(rows.mean(0)[None] + self._noise(noise, rows), noise, records)

    def each(self) -> dict[int, Silo]:
        """Return a port to each silo alone."""
        parts = zip(
            self._x.split(list(self._counts)), self._y.split(list(self._counts)), strict=True
        )
        return {i: Silo(self, i, *part) for i, part in enumerate(parts)}

    def _noise(self, deviation: torch.Tensor | float, rows: torch.Tensor) -> torch.Tensor:
        """Return noise for one answer."""
        return deviation * torch.from_numpy(self._random.standard_normal((1, rows.shape[1])))


class Silo:
    """One silo of `Drawn`."""

    def __init__(self, whole: Drawn, number: int, x: torch.Tensor, y: torch.Tensor) -> None:
        self._whole = whole
        self._number = number
        self._x = x
        self._y = y

    def mean(self, query: Query) -> torch.Tensor:
        """Return the silo's mean under its own noise."""
        rows = query.statistic.rows(None, 0)(self._x, self._y)  # type: ignore[arg-type,misc]
        noise = noise_of(query.statistic, query.mechanism, len(self._x), self._number)  # type: ignore[arg-type]
        return rows.mean(0)[None] + self._whole._noise(noise, rows)


def _drawn(
    design: RatioDesign, truth: np.ndarray, random: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features and labels of a model that is right. Odd features are 1 or -1.

    Survival times are known by bin. Records are lost at the ends of bins.
    """
    shape = (design.records, design.features)
    x = random.uniform(-1, 1, shape)
    x[:, 1::2] = np.where(random.random(x[:, 1::2].shape) < 0.4, 1.0, -1.0)
    risk = x @ truth
    if design.family == LOGISTIC:
        level = math.log(design.events / (1 - design.events))
        y = random.random(len(x)) < 1 / (1 + np.exp(-level - risk))
        return torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))
    if design.family == COUNTS:
        y = random.poisson(design.events * np.exp(risk - risk.var() / 2)).clip(0, MOST)
        return torch.from_numpy(x), torch.from_numpy(y.astype(np.float32))
    hazard = -math.log(1 - design.events) / BINS * 1.2 * np.exp(risk)
    time = np.floor(random.exponential(1 / hazard)).astype(int)
    lost = np.where(random.random(len(x)) < design.lost, random.integers(1, BINS + 1, len(x)), BINS)
    event = time < lost
    last = np.where(event, time, lost - 1)
    code = np.where(event, 2 * time + 1, np.where(lost >= BINS, 2 * BINS, 2 * last + 2))
    return torch.from_numpy(x), torch.from_numpy(code.astype(np.int64))


# --- columns -------------------------------------------------------------------------------------

LAWS = {
    "symmetric": stats.norm(60, 14),
    "skewed": stats.gamma(2, scale=10),
    "even": stats.uniform(0, 110),
}
"""What the values of a number column follow, within its public range."""
RANGE = (0.0, 110.0)
SHARES = (0.3, 0.1, 0.02, 0.58)
"""The categories of a column; the third is rare."""
GONE = 0.2
"""The share of values that are missing."""
FIGURES = ("5 %", "25 %", "50 %", "75 %", "95 %", "mean", "share", "rare share")


@dataclass(frozen=True)
class ColumnDesign:
    """A column of a table of so many columns and groups, as it is asked for."""

    law: str
    counts: tuple[int, ...]
    epsilon: float
    trust: str
    columns: int = 10
    groups: int = 2


COLUMN_DESIGNS = (
    ColumnDesign("symmetric", (300,) * 6, 1.0, "masks"),
    ColumnDesign("skewed", (300,) * 6, 1.0, "masks"),
    ColumnDesign("even", (300,) * 6, 1.0, "masks"),
    ColumnDesign("symmetric", (300,) * 6, 3.0, "masks"),
    ColumnDesign("skewed", (300,) * 6, 3.0, "masks"),
    ColumnDesign("skewed", (300,) * 6, 3.0, "isrl"),
    ColumnDesign("symmetric", (20_000,) * 5, 3.0, "masks"),
    ColumnDesign("symmetric", (300,) * 6, 1.0, "isrl"),
    ColumnDesign("symmetric", (300,), 1.0, "isrl", 5, 1),
)


def measure_columns(
    replications: int, designs: tuple[ColumnDesign, ...] = COLUMN_DESIGNS, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield a row for each design: the share of intervals of each figure that hold the truth.

    The figures are of one group. Counts are drawn by the exact shares of the bins, which is the
    law of the counts of records.
    """
    for at, design in enumerate(designs):
        random = np.random.default_rng(seed + at)
        budgets = [Budget(design.epsilon, default_delta(k)) for k in design.counts]
        counted = {"trust": design.trust, "counted": len(design.counts)}
        mechanism = gaussian_for("columns", budgets, **counted)
        n = sum(design.counts) // design.groups
        noise = count_noise(mechanism, design.columns, design.counts)
        ends = ends_of(*RANGE, bins_for(n, noise))
        law = LAWS[design.law]
        below = law.cdf(ends)
        below[0] = 0.0
        below[-1] = 1.0
        bins = (1 - GONE) * np.diff(below)
        centre = float(np.clip(law.ppf((np.arange(200_000) + 0.5) / 200_000), *RANGE).mean())
        levels = (0.05, 0.25, 0.5, 0.75, 0.95)
        truth = [*np.clip(law.ppf(levels), *RANGE), centre, SHARES[0], SHARES[2]]
        hits = np.zeros(len(FIGURES))
        width = np.zeros(len(FIGURES))
        profiled = np.zeros(2)
        profile_noise = _profile_noise(design, budgets, counted)
        for _ in range(replications):
            drawn = random.multinomial(n, [*bins, GONE])[:-1]
            counts = drawn + noise * random.normal(size=len(bins))
            found = [quantile(counts, noise, ends, level) for level in levels]
            intervals = [(q.low, q.high) for q in found]
            middle = mean(counts, noise, ends)
            intervals.append((middle.low, middle.high))
            own = random.multinomial(n, SHARES) + noise * random.normal(size=len(SHARES))
            for place in (0, 2):
                share = share_of(own[place], own.sum() - own[place], noise, len(own))
                intervals.append((share["low"], share["high"]))
            for k, (low, high) in enumerate(intervals):
                hits[k] += low <= truth[k] <= high
                width[k] += (high - low) / 2
            profiled += _profiled(design, centre, profile_noise, random)
        shares = hits / replications
        yield {
            "law": design.law,
            "records": n,
            "bins": len(bins),
            "count_noise": noise,
            "epsilon": design.epsilon,
            "trust": design.trust,
            "replications": replications,
            "covered": dict(zip(FIGURES, shares.tolist(), strict=True)),
            "half_width": dict(zip(FIGURES, (width / replications).tolist(), strict=True)),
            "profile_mean": profiled[0] / replications,
            "profile_missing": profiled[1] / replications,
        }


def _profile_noise(
    design: ColumnDesign, budgets: list[Budget], counted: dict[str, Any]
) -> tuple[float, float]:
    """Return the noise of moments and of missing shares in a profile of as many features."""
    mechanism = gaussian_for("profile", budgets, 3, **counted)
    ones = torch.ones(design.columns, dtype=torch.float64)
    norms = Moments(-ones, ones).norm, MissingRates(design.columns).norm
    weights = Weights("records", design.counts)
    silos = range(len(design.counts))
    moments, missing = (mechanism.clipped(norm).deviation(silos, weights)[0] for norm in norms)
    return float(moments.max()), float(missing.max())


def _profiled(
    design: ColumnDesign,
    centre: float,
    noise: tuple[float, float],
    random: np.random.Generator,
) -> tuple[bool, bool]:
    """Return whether a profile's intervals of mean and missing share hold the truth."""
    n = sum(design.counts)
    there = random.random(n) >= GONE
    values = np.clip(LAWS[design.law].ppf(random.random(int(there.sum()))), *RANGE)
    low, high = RANGE
    u = 2 * (values - low) / (high - low) - 1
    first, second, third = random.normal(size=3)
    row = scaled(
        float(u.sum()) / n + noise[0] * first,
        float((u**2).sum()) / n + noise[0] * second,
        1 - len(u) / n + noise[1] * third,
        *noise,
        n,
    )
    true = 2 * (centre - low) / (high - low) - 1
    return (
        row["mean_low"] <= true <= row["mean_high"],
        row["missing_low"] <= GONE <= row["missing_high"],
    )
