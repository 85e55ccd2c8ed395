"""How often the intervals of `silodp evaluate` contain the truth, over populations that are known.

An evaluation's answer is a mean over records plus noise. So the study draws records, counts them by
the statistic's own rules, adds the noise of the price, and runs the product's estimators.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy import special
from torch import Tensor

from silodp.core.privacy.accounting import Budget
from silodp.core.problem.losses import Hazard, Loss, Poisson, logistic, squared_error
from silodp.core.problem.schema import Label
from silodp.core.statistics.score import judged, middle_of
from silodp.server.estimates.calibration import Figure
from silodp.server.estimates.expected import best_bins
from silodp.server.estimates.placing import RiskSpread, assumed, bins_of
from silodp.server.estimates.scoring import Asked, asked_of, gaussian_for, noise_of, scores_of
from silodp.server.order import default_delta

POPULATION = 200_000
"""Records that have the truth, and from which samples are drawn."""
CHUNK = 20_000
FLAGGED = 0.2
"""The share of a population above the threshold."""
MOST = 77.0
"""The largest count of the schema."""
PERIODS = 4


@dataclass(frozen=True)
class Design:
    """A population, the held-out records of a silo, and the price.

    `off` is added to the true logits of a binary outcome, which else are the predicted ones. With
    `released` the bins follow the distribution of the risks, else an assumed one.
    """

    kind: str
    records: int
    epsilon: float
    prevalence: float = 0.3
    off: float = 0.0
    released: bool = True


EPSILONS = (0.5, 2.0, 8.0, 1000.0)
DESIGNS = (
    *(
        Design("binary", n, epsilon, prevalence)
        for n in (7, 30, 100, 1000)
        for prevalence in (0.02, 0.1, 0.3)
        for epsilon in EPSILONS
    ),
    *(Design("binary", 10000, epsilon, 0.02) for epsilon in EPSILONS),
    *(Design("binary", 1000, epsilon, 0.1, off=0.7) for epsilon in EPSILONS),
    *(Design("binary", 1000, epsilon, 0.1, released=False) for epsilon in EPSILONS),
    *(Design("count", n, epsilon) for n in (30, 1000) for epsilon in EPSILONS),
    *(Design("regression", n, epsilon) for n in (7, 30, 1000) for epsilon in EPSILONS),
    *(Design("survival", n, epsilon) for n in (100, 1000) for epsilon in EPSILONS),
)


@dataclass
class Population:
    """Predictions and labels of many records."""

    loss: Loss
    label: Label | None
    output: Tensor
    y: Tensor
    risk: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Of classes and survival times: the predicted risk, and the outcome, NaN where not known."""
    outcome: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return 2 if self.label is None else 0

    def asked(self, design: Design) -> tuple[Asked, float]:
        """Return the question, with the bins that the product would choose, and the noise."""
        about = self.classes, self.label, self.loss
        asked = asked_of(*about)
        mechanism = gaussian_for("score", [Budget(design.epsilon, default_delta(design.records))])
        statistic = asked.statistic(torch.zeros(1, 1))
        if not len(self.risk):
            return asked, noise_of(statistic, mechanism, design.records, 0)
        noise = noise_of(replace(statistic, bins=2), mechanism, design.records, 0)
        threshold = float(np.quantile(self.risk, 1 - FLAGGED))
        spread = assumed(design.prevalence)
        if design.released:
            shares, ends = np.histogram(special.logit(self.risk), bins=200)
            spread = RiskSpread((ends[1:] + ends[:-1]) / 2, shares / shares.sum(), True)
        count = best_bins(spread, threshold, design.records, noise)
        return asked_of(*about, bins=bins_of(spread, count, threshold)), noise

    def counted(self, asked: Asked) -> tuple[np.ndarray, np.ndarray]:
        """Return each record's numbers, and its cell, -1 for none."""
        statistic = asked.statistic(torch.zeros(1, 1))
        numbers = []
        cells = []
        for start in range(0, POPULATION, CHUNK):
            part = slice(start, start + CHUNK)
            loss = self.loss(self.output[part], self.y[part]).double().reshape(-1)
            rows = judged(self.loss, self.output[part], loss, self.y[part], statistic).numpy()
            numbers.append(rows[:, : asked.numbers])
            hot = rows[:, asked.numbers :]
            if hot.shape[1]:
                cells.append(np.where(hot.any(1), hot.argmax(1), -1))
            else:
                cells.append(np.full(len(rows), -1))
        return np.concatenate(numbers), np.concatenate(cells)

    def truth(self, figures: dict[str, Figure]) -> dict[str, float]:
        """Return the true figures: those of all records without noise, and of risks the exact
        ones.
        """
        found = {name: figure.value for name, figure in figures.items()}
        known = np.isfinite(self.outcome)
        if not known.any():
            return found
        risk = self.risk[known]
        outcome = self.outcome[known]
        ranks = np.argsort(np.argsort(risk)) + 1.0
        ones = outcome.sum()
        above = ranks[outcome == 1].sum() - ones * (ones + 1) / 2
        found["auc"] = float(above / (ones * (len(risk) - ones)))
        found["calibration in the large"] = float((risk - outcome).mean())
        if "calibration slope" in found:
            found["calibration slope"] = float(np.polyfit(risk, outcome, 1)[0])
        return found


def population(design: Design, random: np.random.Generator) -> Population:
    """Return the population of a design."""
    z = random.normal(size=POPULATION)
    if design.kind == "binary":
        logits = 1.2 * z
        logits += _shift(logits, design.prevalence)
        y = (random.random(POPULATION) < special.expit(logits + design.off)).astype(np.int64)
        output = torch.from_numpy(logits)[:, None]
        risk = special.expit(logits)
        return Population(logistic, None, output, torch.from_numpy(y), risk, y.astype(float))
    if design.kind == "count":
        rate = np.exp(0.5 + 0.7 * z)
        tail = random.gamma(0.3, 1 / 0.3, POPULATION)
        y = random.poisson(rate * tail).clip(0, MOST).astype(np.float64)
        label = Label("count", ("visits",), range=(0.0, MOST))
        output = torch.from_numpy(np.log(rate))[:, None]
        return Population(Poisson(MOST), label, output, torch.from_numpy(y))
    if design.kind == "regression":
        y = (0.2 * z + 0.2 * random.normal(size=POPULATION)).clip(-1, 1)
        label = Label("regression", ("days",), range=(-1.0, 1.0))
        output = torch.from_numpy(0.2 * z)[:, None]
        return Population(squared_error, label, output, torch.from_numpy(y))
    return _survival(z, random)


def _survival(z: np.ndarray, random: np.random.Generator) -> Population:
    """Return survival times with censoring that does not depend on the risk."""
    logits = np.repeat(-2 + 0.8 * z[:, None], PERIODS, 1)
    events = random.random((POPULATION, PERIODS)) < special.expit(logits)
    lost = random.random((POPULATION, PERIODS)) < 0.1
    first = np.where(events.any(1), events.argmax(1), PERIODS)
    gone = np.where(lost.any(1), lost.argmax(1), PERIODS)
    last = np.minimum(first, gone)
    event = first <= gone
    y = 2 * last + (event & (first < PERIODS))
    middle = middle_of(PERIODS)
    known = (y % 2 == 1) | (last > middle)
    outcome = np.where(known, last <= middle, np.nan)
    risk = 1 - np.prod(1 - special.expit(logits[:, : middle + 1]), 1)
    edges = tuple(float(k + 1) for k in range(PERIODS))
    label = Label("survival", ("t", "died"), edges=edges)
    output = torch.from_numpy(logits)
    return Population(Hazard(PERIODS), label, output, torch.from_numpy(y), risk, outcome)


def _shift(logits: np.ndarray, prevalence: float) -> float:
    """Return what to add to the logits so that the mean risk is the prevalence."""
    low = -20.0
    high = 20.0
    for _ in range(50):
        middle = (low + high) / 2
        if special.expit(logits + middle).mean() < prevalence:
            low = middle
        else:
            high = middle
    return low


def measure(
    replications: int, designs: tuple[Design, ...] = DESIGNS, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield a row for each figure of each design: how often it has a value, how often its interval
    contains the truth, and half of its median width.
    """
    for at, design in enumerate(designs):
        random = np.random.default_rng([seed, at])
        drawn = population(design, random)
        asked, noise = drawn.asked(design)
        numbers, cells = drawn.counted(asked)
        size = 2 * asked.cells
        whole = _answer(numbers, cells, size)
        truth = drawn.truth(scores_of("all", POPULATION, whole, 0.0, asked).figures)
        found: dict[str, list[Figure]] = {name: [] for name in truth}
        for _ in range(replications):
            chosen = random.integers(0, POPULATION, design.records)
            answer = _answer(numbers[chosen], cells[chosen], size)
            answer += noise * random.normal(size=len(answer))
            figures = scores_of("all", design.records, answer, noise, asked).figures
            for name, figure in figures.items():
                found[name].append(figure)
        for name, own in found.items():
            yield vars(design) | _row(name, own, truth[name])


def _answer(numbers: np.ndarray, cells: np.ndarray, size: int) -> np.ndarray:
    """Return the mean answer over these records."""
    counts = np.bincount(cells[cells >= 0], minlength=size)
    return np.concatenate([numbers.mean(0), counts / len(numbers)])


def _row(name: str, figures: list[Figure], truth: float) -> dict[str, Any]:
    """Return how often a figure has a value, and how often its interval contains the truth."""
    shown = [figure for figure in figures if not figure.too_noisy]
    inside = [figure.low <= truth <= figure.high for figure in figures]
    widths = [figure.high - figure.low for figure in shown]
    return {
        "figure": name,
        "truth": truth,
        "shown": len(shown) / len(figures),
        "coverage": float(np.mean(inside)),
        "half_width": float(np.median(widths)) / 2 if widths else math.nan,
        "replications": len(figures),
    }


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each figure of each kind of label the least and the largest coverage."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row["figure"]), []).append(row)
    found = []
    for (kind, figure), own in groups.items():
        shown = [row["coverage"] for row in own if row["shown"] >= 0.5] or [math.nan]
        found.append(
            {
                "kind": kind,
                "figure": figure,
                "designs": len(own),
                "least": min(row["coverage"] for row in own),
                "shown_least": min(shown),
                "shown_largest": max(shown),
            }
        )
    return found
