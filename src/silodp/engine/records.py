"""Sum clipped gradients of every model: torch.func differentiates each record alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from silodp.core.differentiate import grad
from silodp.core.problem.problem import Problem
from silodp.engine.task import Task, along, chunks, scales


class Records:
    """Each record by torch.func."""

    def supports(self, task: Task) -> bool:
        """Return True: this engine has no limits."""
        return True

    def sum(self, task: Task) -> Tensor:
        """Return the clipped sums (J, S, d)."""
        if task.problem.person:
            rows = task.x.shape[2:].numel()
        else:
            rows = 0
        size = task.bytes(3 * (task.problem.dim + rows))
        task = task.laid_out()
        out = task.points[0].new_zeros(*task.shape[:2], task.problem.dim)
        for j, s, n in chunks(task.shape, size, task.memory, task.memory):
            points = [p[along(s, p.shape[0]), j] for p in task.points]
            weight = task.weight[s, along(j, task.weight.shape[1]), n]
            if task.limits is None:
                limits = None
            else:
                limits = task.limits[j]
            _add(
                task.problem,
                points,
                task.x[s, n],
                task.y[s, n],
                weight,
                task.clips[j],
                out[j, s].transpose(0, 1),
                limits,
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
    """Add the clipped sums to out (S, J, d).

    points are (S or 1, J, d) and weight is (S, J or 1, n).
    """
    gradients = _gradients(problem, points, x, y, limits)
    norm = torch.linalg.vector_norm(gradients, dim=-1, dtype=torch.float64)
    scale, sound = scales(norm, [norm.square()], weight, clips)
    if sound is None:
        sound = torch.ones_like(scale, dtype=torch.bool)
    # This is done always, so that the product's factors are laid out in memory in one way.
    gradients = torch.where(sound[..., None], gradients, 0)
    out += torch.matmul(scale[:, :, None], gradients).squeeze(2)


def _gradients(
    problem: Problem, points: list[Tensor], x: Tensor, y: Tensor, limits: Tensor | None
) -> Tensor:
    """Return the gradients (S, J, n, d), or their differences between two points.

    Every record is a batch of one, so none can mix.
    """
    constants = problem.constants(points[0])

    def loss(w: Tensor, record: Tensor, target: Tensor) -> Tensor:
        """Return f0 of one record."""
        return problem.loss_of(w, constants, record, target)

    def gradients(w: Tensor) -> Tensor:
        """Return the gradients at the points w."""
        records = vmap(grad(loss), (None, 0, 0))
        if len(w) > 1:  # a point for each silo
            return vmap(vmap(records, (0, None, None)))(w, x, y)
        flat = x.flatten(0, 1), y.flatten(0, 1)
        if w.shape[1] == 1:
            by_run = records(w[0, 0], *flat)[None]
        else:
            by_run = vmap(records, (0, None, None))(w[0], *flat)
        return by_run.unflatten(1, y.shape[:2]).transpose(0, 1)

    def limited(w: Tensor) -> Tensor:
        """Return the gradients at the points w, clipped to the limits."""
        g = gradients(w)
        if limits is None:
            return g
        norm = torch.linalg.vector_norm(g, dim=-1, keepdim=True, dtype=torch.float64)
        limit = limits[None, :, None]
        return g * (limit / torch.maximum(norm, limit)).to(g)

    first = limited(points[0])
    if len(points) == 1:
        return first
    return first - limited(points[1])
