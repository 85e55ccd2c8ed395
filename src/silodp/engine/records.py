"""The engine for every model: each record is differentiated alone, by torch.func."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from silodp.core.differentiate import grad
from silodp.core.problem.problem import Problem
from silodp.engine.task import Task, chunks, scales


class Records:
    """Each record by torch.func."""

    def supports(self, task: Task) -> bool:
        return True

    def sum(self, task: Task) -> Tensor:
        if task.problem.person:
            rows = task.x.shape[2:].numel()
        else:
            rows = 0
        size = task.bytes(3 * (task.problem.dim + rows))
        task = task.laid_out()
        out = task.points[0].new_zeros(*task.shape[:2], task.problem.dim)
        for j, s, n in chunks(task.shape, size, task.memory, task.memory):
            points = [p[s if p.shape[0] > 1 else slice(None), j] for p in task.points]
            weight = task.weight[s, j if task.weight.shape[1] > 1 else slice(None), n]
            _add(
                task.problem,
                points,
                task.x[s, n],
                task.y[s, n],
                weight,
                task.clips[j],
                out[j, s].transpose(0, 1),
                None if task.limits is None else task.limits[j],
            )
        return out


def _add(
    problem: Problem,
    points: list[Tensor],
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    clips: Tensor,
    out: Tensor,
    limits: Tensor | None = None,
) -> None:
    """Adds the clipped sums to out (S, J, d); points are (S or 1, J, d), weight (S, J or 1, n)."""
    gradients = _gradients(problem, points, x, y, limits)
    norm = torch.linalg.vector_norm(gradients, dim=-1, dtype=torch.float64)
    scale, sound = scales(norm, [norm.square()], weight, clips)
    if sound is None:
        sound = torch.ones_like(scale, dtype=torch.bool)
    else:
        sound = sound
    gradients = torch.where(
        sound[..., None], gradients, 0
    )  # always, so that what a product reads lies the same way
    out += torch.matmul(scale[:, :, None], gradients).squeeze(2)


def _gradients(
    problem: Problem, points: list[Tensor], x: Tensor, y: Tensor, limits: Tensor | None
) -> Tensor:
    """The gradients (S, J, n, d), or their differences between two points: every record is a batch
    of one, so none can mix.
    """
    constants = problem.constants(points[0])

    def loss(w: Tensor, record: Tensor, target: Tensor) -> Tensor:
        return problem.loss_of(w, constants, record, target)

    def gradients(w: Tensor) -> Tensor:
        records = vmap(grad(loss), (None, 0, 0))
        if len(w) > 1:  # a point for each silo
            return vmap(vmap(records, (0, None, None)))(w, x, y)
        flat = x.flatten(0, 1), y.flatten(0, 1)
        if w.shape[1] == 1:
            found = records(w[0, 0], *flat)[None]
        else:
            found = vmap(records, (0, None, None))(w[0], *flat)
        return found.unflatten(1, y.shape[:2]).transpose(0, 1)

    def limited(w: Tensor) -> Tensor:
        found = gradients(w)
        if limits is None:
            return found
        norm = torch.linalg.vector_norm(found, dim=-1, keepdim=True, dtype=torch.float64)
        return found * (limits[None, :, None] / torch.maximum(norm, limits[None, :, None])).to(
            found
        )

    found = limited(points[0])
    if len(points) == 1:
        return found
    return found - limited(points[1])
