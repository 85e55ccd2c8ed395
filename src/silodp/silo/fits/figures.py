"""How good risks are on records whose outcome is known: loss, discrimination and calibration.

These figures are computed on raw records. They are not private.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from silodp.core.problem.losses import Huber, Poisson, squared_error
from silodp.core.problem.problem import Problem
from silodp.core.problem.schema import Schema
from silodp.core.problem.task import Task
from silodp.silo.fits.head import likelihood
from silodp.silo.fits.newton import minimise
from silodp.silo.fits.rows import Rows

LOOSE = 1e-6
"""The penalty that keeps a calibration slope finite where outcomes can be separated."""
STEEPEST = 100.0
"""A calibration slope beyond this means that it cannot be estimated."""


@dataclass(frozen=True)
class Scale:
    """What is predicted, and the public range of a number."""

    task: Task
    low: float = -1.0
    high: float = 1.0

    @property
    def half(self) -> float:
        """Return the label's units in one unit of the outputs, for a number."""
        return (self.high - self.low) / 2


def scale_of(known: Schema | Task, *, own_loss: bool) -> Scale:
    """Return the scale of a schema's label, or of a plain task.

    With a loss of the user's own the weights of the classes have no part in the model.
    """
    if isinstance(known, Task):
        return Scale(known)
    task = known.task
    if own_loss:
        task = replace(task, weights=())
    return Scale(task, *known.label.range)


def figures(problem: Problem, scale: Scale, outputs: Tensor, rows: Rows) -> dict[str, float | None]:
    """Return the figures of outputs (m, k) for rows, by name.

    The loss is the mean log loss of the risks, the deviance of counts, the squared error of numbers
    in the label's own unit, or the mean of any other loss. Then come AUC, accuracy, R2, c-index or
    the share of the deviance that is explained. Mean predicted and observed are those of the second
    of two classes, of the predicted class of more, of the last time, or of the number itself. None
    stands for what these records cannot show.
    """
    task = scale.task
    weight = (rows.weight / rows.weight.sum()).numpy()
    said = task.read(outputs).double().numpy()
    y = rows.y.numpy()
    if task.kind == "survival":
        own = _survival(said, y, task.bins, weight)
    elif task.kind == "count":
        own = _counts(said[:, 0], y, weight)
    elif task.classes:
        own = _classes(said, y, weight)
    else:
        own = _numbers(said[:, 0], y, weight, scale)
    name, value = _loss(problem, task, outputs, rows, own)
    slope = {"calibration slope": calibration_slope(problem, outputs, rows)}
    rest = {key: found for key, found in own.items() if key not in LOSSES}
    return {name: value} | rest | slope


LOSSES = ("log loss", "deviance", "squared error")


def _loss(
    problem: Problem, task: Task, outputs: Tensor, rows: Rows, own: dict[str, float | None]
) -> tuple[str, float | None]:
    """Return the loss's name and value: the task's, where the problem has that or its kin."""
    first = next(iter(own))
    loss = problem.loss
    kin = isinstance(loss, Poisson | Huber) or loss is squared_error or task.classes > 0
    if problem.known_loss and kin:
        return first, own[first]
    each = rows.by_record(likelihood(problem)(outputs, rows.y))
    return "loss", float(each.mean())


def calibration_slope(problem: Problem, outputs: Tensor, rows: Rows) -> float | None:
    """Return the factor by which the outputs, with free intercepts, fit these records best.

    Below 1 risks are too extreme, above 1 too cautious. None where it cannot be estimated.
    """
    k = outputs.shape[1]
    same = bool((rows.y == rows.y[0]).all())
    if rows.records < 2 or same or float(outputs.std(0).max()) < 1e-9:
        return None
    shift = torch.eye(k, dtype=torch.float64).expand(len(outputs), k, k)
    design = torch.cat([outputs[..., None], shift], -1)
    centre = torch.zeros(1, k + 1, dtype=torch.float64)
    centre[0, 0] = 1
    found = minimise(
        design,
        torch.zeros_like(outputs),
        rows.y,
        rows.weight[None],
        likelihood(problem),
        torch.full_like(centre, LOOSE),
        centre,
    )
    slope = float(found[0, 0])
    if not abs(slope) < STEEPEST:
        return None
    return slope


def _classes(said: np.ndarray, y: np.ndarray, weight: np.ndarray) -> dict[str, float | None]:
    from sklearn.metrics import roc_auc_score

    chance = np.clip(said[np.arange(len(y)), y], 1e-12, 1)
    found: dict[str, float | None] = {"log loss": float(-(weight * np.log(chance)).sum())}
    if said.shape[1] == 2:
        both = 0 < y.sum() < len(y)
        auc = float(roc_auc_score(y, said[:, 1], sample_weight=weight)) if both else None
        predicted = said[:, 1]
        observed = y == 1
        found["auc"] = auc
    else:
        predicted = said.max(1)
        observed = said.argmax(1) == y
        found["accuracy"] = float((weight * observed).sum())
    return found | _means(predicted, observed, weight)


def _means(predicted: np.ndarray, observed: np.ndarray, weight: np.ndarray) -> dict[str, float]:
    return {
        "mean predicted": float((weight * predicted).sum()),
        "mean observed": float((weight * observed).sum()),
    }


def _numbers(
    said: np.ndarray, y: np.ndarray, weight: np.ndarray, scale: Scale
) -> dict[str, float | None]:
    squares = float((weight * (said - y) ** 2).sum())
    spread = float((weight * (y - (weight * y).sum()) ** 2).sum())
    means = _means(said, y, weight)
    return {
        "squared error": squares * scale.half**2,
        "r2": 1 - squares / spread if spread > 0 else None,
    } | {name: scale.low + (mean + 1) * scale.half for name, mean in means.items()}


def _counts(said: np.ndarray, y: np.ndarray, weight: np.ndarray) -> dict[str, float | None]:
    def deviance(rate: np.ndarray) -> float:
        log = y * np.log(np.where(y > 0, y / rate, 1.0))
        return float((weight * 2 * (log - (y - rate))).sum())

    own = deviance(np.maximum(said, 1e-12))
    mean = (weight * y).sum()
    constant = deviance(np.full(len(y), mean)) if mean > 0 else 0.0
    explained = 1 - own / constant if constant > 0 else None
    return {"deviance": own, "deviance explained": explained} | _means(said, y, weight)


def _survival(
    said: np.ndarray, y: np.ndarray, bins: int, weight: np.ndarray
) -> dict[str, float | None]:
    """Return the c-index, the mean risk by the end, and the Kaplan-Meier estimate of it."""
    last, event = np.divmod(y, 2)
    event = event == 1
    right = 0.0
    pairs = 0.0
    alive = 1.0
    for b in range(bins):
        fell = event & (last == b)
        beyond = (last > b) | ((last == b) & ~event)
        if fell.any() and beyond.any():
            risk = said[beyond, -1]
            order = np.argsort(risk)
            risk = risk[order]
            below = np.concatenate([[0.0], np.cumsum(weight[beyond][order])])
            left = below[np.searchsorted(risk, said[fell, -1], "left")]
            upto = below[np.searchsorted(risk, said[fell, -1], "right")]
            right += float((weight[fell] * (left + upto) / 2).sum())
            pairs += float(weight[fell].sum() * below[-1])
        at_risk = weight[fell | (last > b)].sum()
        if at_risk > 0:
            alive *= 1 - weight[fell].sum() / at_risk
    return {
        "c-index": right / pairs if pairs > 0 else None,
        "mean predicted": float((weight * said[:, -1]).sum()),
        "mean observed": float(1 - alive),
    }
