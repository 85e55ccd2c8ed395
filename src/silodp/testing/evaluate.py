"""Score a model on raw data, as a convenience for research.

Nothing here is private, and nothing deployed may import it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from silodp.core.problem.losses import predicted
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import gradient_mapping
from silodp.engine.clipping import clipped_sum
from silodp.silo.data.records import Records


def _parts(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Return the points in parts, each with as many runs as take a few hundred megabytes."""
    return w.split(max(1, 2**23 // max(1, x.numel())))


@torch.no_grad()
def training_loss(problem: Problem, w: Tensor, records: Records) -> Tensor:
    """Return F(w) (J,): the mean over silos of each silo's mean loss, plus f1(w)."""
    per_silo = [
        torch.cat(
            [
                problem.losses(part, records.x[i, :n], records.y[i, :n]).double().mean(-1)
                for part in _parts(w, records.x[i])
            ]
        )
        for i, n in enumerate(records.counts)
    ]
    return torch.stack(per_silo).mean(0) + problem.prox.value(w).double()


@torch.no_grad()
def error_rate(problem: Problem, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the share of records whose class is predicted wrongly, (J,).

    A model whose output is not finite is wrong everywhere.
    """
    return torch.cat([_error_rate(problem, part, x, y) for part in _parts(w, x)])


def _error_rate(problem: Problem, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the error rates of a few runs."""
    scores = problem.outputs(w, x)
    prediction = predicted(problem.loss, scores)
    if scores.shape[-1] == 1:
        wrong = (prediction > 0) != (y > 0)
    else:
        wrong = prediction != y
    return (wrong | ~torch.isfinite(scores).all(-1)).double().mean(-1)


@torch.no_grad()
def balanced_accuracy(problem: Problem, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the share of right predictions, averaged over the classes, (J,).

    A constant prediction of one of k classes scores 1/k.
    """
    return torch.stack([1 - error_rate(problem, w, x[y == k], y[y == k]) for k in y.unique()]).mean(
        0
    )


def mapping_norm(problem: Problem, w: Tensor, records: Records, step: float) -> Tensor:
    """Return the norm of the proximal gradient mapping on the raw data, (J,).

    This is the paper's measure of stationarity.
    """
    total = clipped_sum(
        problem, w, records.x, records.y, records.mask.to(records.x.dtype), torch.inf
    )
    counts = torch.tensor(records.counts).to(total).unsqueeze(-1)
    return gradient_mapping(w, (total / counts).mean(1), problem.prox, step).norm(dim=-1)
