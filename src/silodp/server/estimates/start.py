"""Where training starts: at the model that predicts the mean outcome for everybody, found by one
question.

From there the steps have only to find how records differ. From equal chances most of the way is the
way to the mean. It takes long steps, and these carry their noise into every slope.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from silodp.core.problem.losses import (
    Hazard,
    Huber,
    Ordinal,
    Poisson,
    Weighted,
    cross_entropy,
    logistic,
    squared_error,
)
from silodp.core.problem.problem import Problem
from silodp.core.statistics import Outcomes, RiskCells
from silodp.server.estimates.recalibration import last_layer

MEAN_SHARE = 0.05
"""Share of a run's budget (mu^2) for the question, unless the order gives another."""
UNKNOWN = 1.5
"""Spread of a logit or a log rate before anything is asked."""
ESTIMATED = 0.5
"""Spread of a logit about a public estimate."""
NUMBERS = 0.4
"""Spread of the mean of a label in [-1, 1]."""
MOST_HAZARD = 1.0
"""Added-up hazard at which a record is cut. That of the starting point is less."""
GRID = torch.linspace(-9, 9, 721, dtype=torch.float64)


def question(problem: Problem, w: Tensor) -> Outcomes | RiskCells:
    """Return the question whose answer `started` takes."""
    loss = _unweighted(problem)
    if isinstance(loss, Hazard):
        return RiskCells(w, torch.zeros(0, dtype=torch.float64), MOST_HAZARD)
    bias = _bias(problem, w)
    if bias is not None and loss is cross_entropy:
        return Outcomes(bias.shape[-1] - 1)
    if bias is not None and isinstance(loss, Ordinal):
        return Outcomes(bias.shape[-1])
    return Outcomes(1)


def started(problem: Problem, w: Tensor, answers: Tensor, noise: float) -> Tensor:
    """Return the points (J, d) whose last bias makes them predict the mean outcome, as far as their
    answers (J or 1, k) show it through the noise. A model without such a bias stays where it is,
    and so does one of a loss of its own.
    """
    made = w.clone()
    bias = _bias(problem, made)
    if bias is None:
        return made
    answers = answers[: len(w)].double().expand(len(w), -1)
    for own, answer in zip(bias, answers, strict=True):
        if isinstance(_unweighted(problem), Hazard):
            found = own + _of_events(answer, noise)
        else:
            found = _constant(problem, answer, noise)
        # Peers must start at the same point, though their processors may round otherwise.
        own.copy_(found.round(decimals=6))
    return made


def curvature(problem: Problem, w: Tensor) -> Tensor:
    """Return (J,): how fast the mean gradient by a slope of a standardised feature grows with this
    slope, where all records have the outputs of the bias; 0 where that is not known.
    """
    loss = problem.loss
    bias = _bias(problem, w)
    if bias is None:
        return w.new_zeros(len(w))
    outputs = bias.double()
    if isinstance(loss, Poisson):
        return outputs.exp().clamp(max=loss.most).mean(-1)
    if loss is squared_error:
        return 2 * torch.ones_like(outputs[..., 0])
    if isinstance(loss, Huber):
        return torch.ones_like(outputs[..., 0])
    if _unweighted(problem) is cross_entropy:
        chance = outputs.softmax(-1)
        return (chance * (1 - chance)).mean(-1)
    chance = outputs.sigmoid()
    steep = (chance * (1 - chance)).sum(-1)
    if isinstance(loss, Hazard):
        at_risk = (1 - chance).cumprod(-1) / (1 - chance)
        steep = (at_risk * chance * (1 - chance)).sum(-1)
    return steep


def _unweighted(problem: Problem) -> object:
    if isinstance(problem.loss, Weighted):
        return problem.loss.loss
    return problem.loss


def _bias(problem: Problem, w: Tensor) -> Tensor | None:
    """Return the last bias of the points, which is a part of them. Return None if the model does
    not end in a layer with a bias, or if the loss is none of silodp's.
    """
    names = last_layer(problem)
    known = _unweighted(problem) in (logistic, cross_entropy, squared_error)
    known = known or isinstance(problem.loss, Hazard | Huber | Ordinal | Poisson)
    if names is None or not known:
        return None
    _, bias = names
    return problem.split(w)[bias]


def _constant(problem: Problem, answer: Tensor, noise: float) -> Tensor:
    """Return the outputs (k,) that are the same for everybody and most likely after this answer."""
    loss = _unweighted(problem)
    weights = torch.ones(len(answer) + 1, dtype=torch.float64)
    if isinstance(problem.loss, Weighted):
        weights = torch.tensor(problem.loss.weights, dtype=torch.float64)
    if isinstance(loss, Poisson):
        return _likely(GRID.exp() / loss.most - answer[0], noise, 0.0, 2 * UNKNOWN)[None]
    if isinstance(loss, Ordinal):
        found = [_likely(GRID.sigmoid() - share, noise, 0.0, UNKNOWN) for share in answer]
        return torch.stack(found).sort(descending=True).values
    if loss is not logistic and loss is not cross_entropy:
        return (2 * answer - 1) / (1 + (2 * noise / NUMBERS) ** 2)
    usual = -math.log(len(answer))
    spread = UNKNOWN
    if problem.intercept:
        usual = problem.intercept[0] - float((weights[1] / weights[0]).log())
        spread = ESTIMATED
    others = torch.stack([_likely(GRID.sigmoid() - s, noise, usual, spread) for s in answer])
    if loss is logistic:
        return others + (weights[1:] / weights[:1]).log()
    shares = torch.cat([(1 - others.sigmoid().sum())[None].clamp_min(0.01), others.sigmoid()])
    found = shares.log() + weights.log()
    return found - found.mean()


def _likely(off: Tensor, noise: float, centre: float, spread: float) -> Tensor:
    """Return the mean of GRID under a normal prior, when the answer is so far off at each place."""
    distance = (off / max(noise, 1e-6)).square() + ((GRID - centre) / spread).square()
    return ((-distance / 2).softmax(0) * GRID).sum()


def _of_events(answer: Tensor, noise: float) -> Tensor:
    """Return the shift of the logits of all hazards with which as many events are expected as have
    happened.
    """
    off = (answer[0] - GRID.exp() * answer[1] * MOST_HAZARD) / (
        1 + (GRID.exp() * MOST_HAZARD).square()
    ).sqrt()
    return _likely(off, noise, 0.0, UNKNOWN)
