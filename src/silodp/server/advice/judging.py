"""How good a candidate is on made-up records: by a proper score, beside the best constant."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from silodp.core.problem.losses import Weighted, logistic
from silodp.core.problem.problem import Problem
from silodp.core.problem.task import Task
from silodp.server.advice.worlds import Sample
from silodp.server.estimates.recalibration import PRIOR

WORST = 3.0
"""The loss, as a share of a constant's, of a model with outputs that are not finite, and the most
that any model gets.
"""


SLOPE_DOUBT = 6.0
"""Noise in the slope over that in the mean outcome: the slope comes from many bins."""


def counted(task: Task) -> bool:
    """Return whether people judge a model by its share of wrong classes; else by its loss."""
    return task.kind in ("binary", "multiclass")


@torch.no_grad()
def relative_loss(
    problem: Problem, w: Tensor, sample: Sample, doubt: float | None = None
) -> Tensor:
    """Return (J,): the mean loss of each w in units of `unit`. Losses count from that of a model
    that knows the label: of counts it is the deviance.

    With `doubt`, the noise in the mean outcome of the question that recalibrates the model, risks
    of two classes are judged as they are after it, and half as much as they are before it. So a
    candidate must rank well, and needs that question little.
    """
    scores = problem.outputs(w, sample.test_x)
    y = sample.test_y
    bad = ~torch.isfinite(scores).all(-1).all(-1)
    scores = scores.nan_to_num(0.0).clamp(-1e3, 1e3).double()
    recalibrated = scores
    if doubt is not None and scores.shape[-1] == 1 and problem.loss is logistic:
        recalibrated = _recalibrated(scores[..., 0], y.double(), doubt)[..., None]
    before, after = (
        torch.stack([problem.record_losses(each, y).double().mean() for each in made])
        for made in (scores, recalibrated)
    )
    loss = (before + 2 * after) / 3
    least = _least(sample.task, y)
    share = (loss - least) / unit(problem, sample)
    return torch.where(bad, WORST, share.clamp(max=WORST))


def unit(problem: Problem, sample: Sample) -> float:
    """Return what losses are compared in: for two or more classes the log loss of equal chances,
    so that worlds with a rare outcome, where there is less to lose, count for less; otherwise the
    loss of the best constant.
    """
    if counted(sample.task):
        return math.log(sample.task.classes)
    return _of_constant(problem, sample)


def constant_loss(problem: Problem, sample: Sample) -> float:
    """Return the loss of the best constant, in units of `unit`."""
    return _of_constant(problem, sample) / unit(problem, sample)


def _of_constant(problem: Problem, sample: Sample) -> float:
    y = sample.test_y
    loss = float(problem.record_losses(_constant(problem, sample), y).double().mean())
    return max(loss - _least(sample.task, y), 1e-9)


def _recalibrated(logit: Tensor, y: Tensor, doubt: float) -> Tensor:
    """Return logits (J, n) with the intercept and slope that fit best, drawn back to no change
    by as much as the noise hides them.
    """
    centre = logit.mean(1, keepdim=True)
    off = logit - centre
    spread = off.std(1, keepdim=True).clamp_min(1e-3)
    z = off / spread
    intercept = centre.clamp(-4, 4)
    slope = spread.clamp(max=3)
    h00 = torch.ones_like(slope)
    h11 = torch.ones_like(slope)
    for _ in range(8):
        risk = (intercept + slope * z).sigmoid()
        steep = risk * (1 - risk) + 1e-4
        h00 = steep.mean(1, keepdim=True)
        h01 = (steep * z).mean(1, keepdim=True)
        h11 = (steep * z * z).mean(1, keepdim=True)
        g0 = (y - risk).mean(1, keepdim=True)
        g1 = ((y - risk) * z).mean(1, keepdim=True)
        size = (h00 * h11 - h01.square()).clamp_min(1e-9)
        intercept = intercept + ((h11 * g0 - h01 * g1) / size).clamp(-1, 1)
        slope = slope + ((h00 * g1 - h01 * g0) / size).clamp(-1, 1)
    ratio = (slope / spread).clamp(0.02, 50).log()
    of_intercept = 1 / (1 + (doubt / h00 / PRIOR[0]).square())
    error = SLOPE_DOUBT * doubt / h11 / slope.abs().clamp_min(0.1)
    of_slope = 1 / (1 + (error / PRIOR[1]).square())
    moved = centre + of_intercept * (intercept - centre).clamp(-3, 3)
    return moved + (of_slope * ratio).exp() * off


def _least(task: Task, y: Tensor) -> float:
    """Return the mean loss of a model that knows each label."""
    if task.kind != "count":
        return 0.0
    y = y.double()
    return float((y - torch.special.xlogy(y, y)).mean())


def _constant(problem: Problem, sample: Sample) -> Tensor:
    """Return (n, k): the outputs of the best constant."""
    task = sample.task
    y = sample.test_y
    n = len(y)
    if task.kind == "count":
        return y.double().mean().clamp_min(1e-3).log().expand(n, 1)
    if task.kind == "regression":
        return y.double().mean().expand(n, 1)
    if task.kind == "ordinal":
        above = (y[:, None] > torch.arange(task.classes - 1)).double().mean(0)
        return above.clamp(1 / (2 * n), 1 - 1 / (2 * n)).logit().expand(n, -1)
    if task.bins:
        place = torch.arange(task.bins)
        last = (y // 2)[:, None]
        ended = (place == last) & (y % 2 == 1)[:, None]
        at_risk = ((place < last) | ended).double().sum(0)
        hazard = (ended.double().sum(0) + 0.5) / (at_risk + 1)
        return hazard.logit().expand(n, -1)
    counts = torch.bincount(y, minlength=task.classes).double() + 0.5
    if isinstance(problem.loss, Weighted):
        counts = counts * torch.tensor(problem.loss.weights, dtype=torch.float64)
    logits = counts.log()
    outputs = problem.outputs(problem.initial([0]), sample.test_x[:1]).shape[-1]
    if outputs == 1:
        logits = logits[1:] - logits[:1]
    return logits.expand(n, -1)


@torch.no_grad()
def judged(
    problem: Problem,
    w: Tensor,
    sample: Sample,
    doubt: float | None = None,
) -> dict[str, float]:
    """Return the error of w (1, d), and of always saying one class; of two classes also log loss,
    AUC and calibration slope, after recalibration where there is a `doubt`. For labels that are no
    classes: the loss as a share of a constant's, and 1.
    """
    task = sample.task
    if not counted(task):
        return {"error": float(relative_loss(problem, w, sample)), "guessing": 1.0}
    scores = problem.outputs(w, sample.test_x)[0].double().nan_to_num(0.0)
    y = sample.test_y
    weights = torch.tensor(task.weights or (1.0,) * task.classes, dtype=torch.float64)
    importance = weights[y] / weights[y].mean()
    if scores.shape[-1] == 1:
        wrong = (scores[:, 0] > 0) != (y > 0)
    else:
        wrong = scores.argmax(-1) != y
    found = {
        "error": float((wrong.double() * importance).mean()),
        "guessing": 1 - float(torch.bincount(y, importance).max()) / len(y),
    }
    if task.kind == "binary":
        logit = scores[:, -1] - (scores[:, 0] if scores.shape[-1] > 1 else 0.0)
        if task.weights:
            logit = logit + math.log(task.weights[0] / task.weights[1])
        if doubt is not None:
            logit = _recalibrated(logit[None], y.double(), doubt)[0]
        found |= of_risks(logit, y.double())
    return found


def of_risks(logit: Tensor, y: Tensor) -> dict[str, float]:
    """Return log loss, AUC and calibration slope of logits (n,) for labels 0 and 1."""
    loss = float((torch.nn.functional.softplus(logit) - y * logit).mean())
    rank = torch.empty(len(y), dtype=torch.float64)
    rank[logit.argsort()] = torch.arange(1, len(y) + 1, dtype=torch.float64)
    ill = float(y.sum())
    well = len(y) - ill
    above = float((rank * y).sum()) - ill * (ill + 1) / 2
    return {
        "log_loss": loss,
        "auc": above / max(ill * well, 1.0),
        "slope": fitted_slope(logit, y),
    }


def fitted_slope(score: Tensor, y: Tensor) -> float:
    """Return b of the most likely a + b score, where the scores are logits, by Newton's method with
    a little ridge.
    """
    spread = float(score.std().clamp_min(1e-6))
    design = torch.stack([torch.ones_like(score), (score - score.mean()) / spread], 1)
    found = torch.zeros(2, dtype=torch.float64)
    for _ in range(15):
        mean = (design @ found).sigmoid()
        curve = (design.T * (mean * (1 - mean))) @ design + 1e-3 * torch.eye(2)
        move = torch.linalg.solve(curve, design.T @ (y - mean) - 1e-3 * found)
        found = found + move.clamp(-2, 2)
    return float(found[1]) / spread
