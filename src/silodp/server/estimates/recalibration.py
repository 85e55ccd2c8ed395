"""Recalibration: one question about how often outcomes happen by bins of the model's score, and the
intercept and slope that make the model's risks right.

All of it but the question is arithmetic on released numbers. The law of the noise is known, so a
likelihood says how much the answer is worth; where noise hides the truth, the prior leaves the
model as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import special
from torch import Tensor, nn

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import (
    Hazard,
    Ordinal,
    Poisson,
    Weighted,
    cross_entropy,
    logistic,
)
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import FullBatch
from silodp.core.statistics import RiskCells
from silodp.server.federation import Port

KIND = "recalibration"
SHARE = 0.08
"""Of a run's budget (mu^2), where the advisor decides."""
WIDTH = 0.4
"""Of a bin of the score, in logits."""
REACH = 6.0
"""Logits beyond which all scores are in one bin."""
FEWEST_RATES = 8.0
"""Log rates lie between the largest count's and so much less."""
PRIOR = np.array([0.5, 0.3])
"""Spread of the intercept at the middle score, and of the log of the slope, before anything is
asked.
"""
BENDS = (0.03, 0.1, 0.3, 1.0)
"""Spread of the third difference of the log share of records from bin to bin: 0 is a normal law.
With more, noise in empty bins passes for records with extreme scores. So the first is taken with
which the answer is no further off than noise makes likely.
"""
LIKELY = 2.0
"""Standard deviations that the sum of squares may be above its mean."""
OFFSET = WIDTH / 4
"""Spread of the distance of the scores in a bin from its middle."""
MOST_HAZARD = 3.0
"""Added-up hazard at which a record is cut: few records outlive it."""


@dataclass(frozen=True)
class Recalibrated:
    """What was found: logit (or log rate) = intercept + slope x the model's."""

    intercept: float
    slope: float
    logits: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    """Of the recalibrated score: places, and the smoothed share of records at each."""


# --- the question --------------------------------------------------------------------------------


def mechanism() -> Gaussian:
    """Return how the question is asked; its noise is still to be set."""
    return Gaussian(KIND, _rehearsed(torch.zeros(1, 1)).norm, 0.0, FullBatch())


def question(problem: Problem, w: Tensor, noise: Gaussian) -> Query:
    """Return the question about the model w (1, d)."""
    statistic = RiskCells(w, *_bins(problem.loss))
    return Query(statistic, noise.clipped(statistic.norm))


def rehearsal(w: Tensor, noise: Gaussian) -> Query:
    """Return a question of the same price, about no problem at all."""
    return Query(_rehearsed(w), noise)


def _rehearsed(w: Tensor) -> RiskCells:
    return RiskCells(w, torch.zeros(1, dtype=torch.float64), 1.0)


def _bins(loss: object) -> tuple[Tensor, float]:
    """Return the edges of the bins, and the cap."""
    if isinstance(loss, Hazard):
        return torch.zeros(0, dtype=torch.float64), MOST_HAZARD
    if isinstance(loss, Poisson):
        high = math.log(loss.most)
        low = high - FEWEST_RATES
        cap = float(loss.most)
    else:
        high = REACH
        low = -REACH
        cap = 1.0
    steps = round((high - low) / WIDTH)
    return torch.linspace(low, high, steps + 1, dtype=torch.float64), cap


def supports(problem: Problem) -> bool:
    """Return whether a model of this kind can be recalibrated: its outputs are risks or rates, and
    come from a linear layer.
    """
    loss = problem.loss
    if isinstance(loss, Weighted):
        loss = loss.loss
    known = loss in (logistic, cross_entropy) or isinstance(loss, Hazard | Poisson | Ordinal)
    return known and last_layer(problem) is not None


def check(problem: Problem) -> None:
    """Raise BadInput unless a model of this kind can be recalibrated."""
    if not supports(problem):
        raise BadInput(
            "this model cannot be recalibrated: it needs classes, counts or survival times, and a "
            "linear layer at its end; use --no-recalibration"
        )


# --- the answer ----------------------------------------------------------------------------------


def recalibrated(
    fed: Port, problem: Problem, w: Tensor, noise: Gaussian
) -> tuple[Tensor, Recalibrated]:
    """Ask the question about w (1, d). Return the recalibrated model, and what was found."""
    asked = question(problem, w, noise)
    mean, std, records = fed.measure(asked)
    found = fit(
        problem.loss,
        mean[0].double().cpu().numpy(),
        float(std.flatten()[0]),
        float(records.flatten()[0]),
    )
    # Peers must make the same model, though their processors may round the fit otherwise.
    found = replace(found, intercept=round(found.intercept, 6), slope=round(found.slope, 6))
    return folded(problem, w, found), found


def fit(
    loss: object,
    answer: np.ndarray,
    noise: float,
    records: float,
) -> Recalibrated:
    """Return intercept and slope by the likelihood of the answer, in each number of which is noise
    of this standard deviation, times a prior about no change.
    """
    edges, cap = _bins(loss)
    if isinstance(loss, Hazard):
        return _hazard_scale(answer, noise, records, cap)
    if isinstance(loss, Poisson):
        link = _Rates(cap)
    else:
        link = _Risks()
    return _fitted(link, edges.numpy(), answer, noise, records)


class _Risks:
    """The mean outcome of a logit, and its slope."""

    def __call__(self, line: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        risk = special.expit(line)
        return risk, risk * (1 - risk)


class _Rates:
    """The mean outcome of a log rate, and its slope."""

    def __init__(self, cap: float) -> None:
        self._cap = cap

    def __call__(self, line: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rate = np.exp(np.minimum(line, math.log(self._cap))) / self._cap
        return rate, np.where(line < math.log(self._cap), rate, 0.0)


def _fitted(
    link: _Risks | _Rates,
    edges: np.ndarray,
    answer: np.ndarray,
    noise: float,
    records: float,
) -> Recalibrated:
    """Return the most likely intercept and slope. Beside them the share of records in each bin is
    fitted, whose logarithm is a smooth curve.
    """
    from scipy import optimize  # slow to load

    middles = np.concatenate([edges[:1] - WIDTH / 2, (edges[1:] + edges[:-1]) / 2])
    middles = np.append(middles, edges[-1] + WIDTH / 2)
    bins = len(middles)
    differences = np.diff(np.eye(bins), 3, axis=0)
    spreads = np.append(PRIOR, OFFSET)
    cells = answer[2 : 2 + bins] + answer[2 + bins :]
    rough = np.convolve(np.pad(cells.clip(1e-3), 2, mode="edge"), np.ones(5) / 5, "valid")
    centre = float((rough * middles).sum() / rough.sum())

    def predicted(v: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the share of records in each bin; their recalibrated risk, its slope and how far
        their scores are from the centre; and their risk as the model says it, and its slope.
        """
        share = special.softmax(v[3:])
        off = middles + v[2] - centre
        risk, steep = link(centre + v[0] + math.exp(v[1]) * off)
        said, steep_said = link(middles + v[2])
        return share, risk, steep, off, said, steep_said

    def expected(v: np.ndarray) -> np.ndarray:
        share, risk, _, _, said, _ = predicted(v)
        return np.concatenate([[share @ risk, share @ said], share * (1 - risk), share * risk])

    def residuals(v: np.ndarray) -> np.ndarray:
        misfit = (answer - expected(v)) / deviation
        return np.concatenate([misfit, third @ v[3:], v[:3] / spreads])

    def jacobian(v: np.ndarray) -> np.ndarray:
        share, risk, steep, off, said, steep_said = predicted(v)
        slope = math.exp(v[1])
        of_risk = np.column_stack(
            [share * steep, share * steep * slope * off, share * steep * slope]
        )
        of_said = [0.0, 0.0, share @ steep_said]
        shifted = np.diag(share) - np.outer(share, share)
        of_line = np.vstack([of_risk.sum(0), of_said, -of_risk, of_risk])
        of_share = np.vstack(
            [
                risk @ shifted,
                said @ shifted,
                (1 - risk)[:, None] * shifted,
                risk[:, None] * shifted,
            ]
        )
        return np.vstack(
            [
                np.hstack([-of_line, -of_share]) / deviation[:, None],
                np.hstack([np.zeros((len(third), 3)), third]),
                np.eye(3, bins + 3) / spreads[:, None],
            ]
        )

    def from_shares(shares: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros(3), np.log(shares / shares.sum())])

    start = from_shares(rough)
    for bend in BENDS:
        third = differences / bend
        if bend > BENDS[0]:  # what was found does not explain the answer: start anew, less smooth
            start = from_shares(cells.clip(max(noise / 2, 1e-4)))
        for _ in range(4):
            middle = float(predicted(start)[0] @ middles) + start[2]
            start[0] += (math.exp(start[1]) - 1) * (middle - centre)
            centre = middle  # the prior is about a change at the middle score
            spread = expected(start)
            spread = np.maximum(spread * (1 - spread), 0.5 / records)
            deviation = np.sqrt(noise**2 + spread / records)
            start = optimize.least_squares(residuals, start, jacobian, max_nfev=40).x  # type: ignore[arg-type]
        misfit = residuals(start)[: len(answer)]
        if misfit @ misfit <= len(answer) + LIKELY * math.sqrt(2 * len(answer)):
            break
    slope = math.exp(start[1])
    intercept = centre + start[0] - slope * centre
    share = special.softmax(start[3:])
    return Recalibrated(
        intercept,
        slope,
        tuple(intercept + slope * (middles + start[2])),
        tuple(share / share.sum()),
    )


def _hazard_scale(answer: np.ndarray, noise: float, records: float, cap: float) -> Recalibrated:
    """Return the shift of all logits of hazards with which as many events are expected as have
    happened.
    """
    events = max(float(answer[0]), 1e-6)
    expected = max(float(answer[1]) * cap, 1e-6)
    found = math.log(events / expected)
    error = (noise / events) ** 2 + (noise * cap / expected) ** 2 + 1 / (records * events)
    return Recalibrated(found / (1 + error / PRIOR[0] ** 2), 1.0)


# --- the model -----------------------------------------------------------------------------------


def last_layer(problem: Problem) -> tuple[str, str] | None:
    """Return the names of the weights and of the bias that make the outputs, or None."""
    modules = [(name, m) for name, m in problem.model.named_modules() if not list(m.children())]
    if not modules or type(modules[-1][1]) is not nn.Linear or modules[-1][1].bias is None:
        return None
    weight = f"{modules[-1][0]}.weight".lstrip(".")
    bias = f"{modules[-1][0]}.bias".lstrip(".")
    if weight not in problem.shapes and len(modules) > 1 and type(modules[-2][1]) is nn.Linear:
        weight = f"{modules[-2][0]}.weight"  # of ordered classes: one score, then thresholds
    if not isinstance(problem.model, nn.Sequential | nn.Linear):
        return None
    if weight not in problem.shapes or bias not in problem.shapes:
        return None
    return weight, bias


def folded(problem: Problem, w: Tensor, found: Recalibrated) -> Tensor:
    """Return the model (1, d) with these intercept and slope in its last layer.

    Of two outputs for two classes the intercept goes to the second. Of more classes the slope is
    the inverse of a temperature, and there is no intercept.
    """
    names = last_layer(problem)
    assert names is not None
    weight, bias = names
    made = w.clone()
    parts = problem.split(made)
    shift = torch.zeros_like(parts[bias])
    outputs = shift.shape[-1]
    loss = problem.loss
    if isinstance(loss, Hazard | Poisson | Ordinal):
        shift += found.intercept
    elif outputs == 2:
        shift[..., 1] += found.intercept
    elif outputs == 1:
        shift += found.intercept
    if isinstance(loss, Weighted):  # the score is free of the classes' weights, which stay
        weights = torch.tensor(loss.weights, dtype=shift.dtype).log()
        if outputs == 1:
            weights = weights[1:] - weights[:1]
        shift += (1 - found.slope) * weights
    parts[weight].mul_(found.slope)
    parts[bias].mul_(found.slope).add_(shift)
    return made
