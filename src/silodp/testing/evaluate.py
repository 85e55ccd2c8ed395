"""Looks at raw data to score a model. A research convenience: nothing here is private, and nothing
deployed may import it.
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
    """As many runs at a time as keep a few hundred megabytes busy."""
    return w.split(max(1, 2**23 // max(1, x.numel())))


@torch.no_grad()
def training_loss(problem: Problem, w: Tensor, records: Records) -> Tensor:
    """(J,): F(w) = mean over silos of each silo's mean loss, plus f1(w)."""
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
    """(J,): share of records whose class is predicted wrongly. A model whose output is not finite
    is wrong everywhere.
    """
    return torch.cat([_error_rate(problem, part, x, y) for part in _parts(w, x)])


def _error_rate(problem: Problem, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    scores = problem.outputs(w, x)
    said = predicted(problem.loss, scores)
    if scores.shape[-1] == 1:
        wrong = (said > 0) != (y > 0)
    else:
        wrong = said != y
    return (wrong | ~torch.isfinite(scores).all(-1)).double().mean(-1)


@torch.no_grad()
def balanced_accuracy(problem: Problem, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(J,): share of records of a class that are predicted rightly, averaged over the classes;
    always saying one of k classes scores 1/k.
    """
    return torch.stack([1 - error_rate(problem, w, x[y == k], y[y == k]) for k in y.unique()]).mean(
        0
    )


def mapping_norm(problem: Problem, w: Tensor, records: Records, step: float) -> Tensor:
    """(J,): norm of the proximal gradient mapping on the raw data, the paper's measure of
    stationarity.
    """
    total = clipped_sum(
        problem, w, records.x, records.y, records.mask.to(records.x.dtype), torch.inf
    )
    counts = torch.tensor(records.counts).to(total).unsqueeze(-1)
    return gradient_mapping(w, (total / counts).mean(1), problem.prox, step).norm(dim=-1)
