"""Compute every record's gradient by itself, for any model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from silodp.core.differentiate import grad
from silodp.core.problem.problem import Problem


class Gradients:
    """Gradients grad f0(w, x) of each record in float64, or differences between two points.

    With a limit, each gradient is clipped to it first. Each record is computed by itself, whatever
    the model.
    """

    def __init__(self, problem: Problem, points: list[Tensor], limit: float | None = None) -> None:
        self.problem = problem
        self.points = points
        self.limit = limit
        self._constants = problem.constants(points[0].double())

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        each = [vmap(grad(self._loss), (None, 0, 0))(w[0].double(), x, y) for w in self.points]
        if self.limit is not None:
            lengths = [torch.linalg.vector_norm(g, dim=1, keepdim=True) for g in each]
            each = [
                g * (self.limit / length.clamp(min=self.limit))
                for g, length in zip(each, lengths, strict=True)
            ]
        if len(each) == 1:
            return each[0]
        return each[0] - each[1]

    def _loss(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self.problem.loss_of(w, self._constants, x, y)
