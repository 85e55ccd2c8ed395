"""Differentiate a function of one record by its first argument, under vmap, for any model.

`Gradients` computes every record's gradient by itself, with `grad`. The result of `grad` has the
same bits as that of torch.func.grad. But torch.func.grad loads torch's compiler, only to find that
it is not needed. That is more than a second of every gate's start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

# These are private parts of torch, of which torch.func.grad consists. Tests compare the results.
from torch._C._functorch import (
    _grad_decrement_nesting,
    _grad_increment_nesting,
    _unwrap_for_grad,
    _wrap_for_grad,
    get_inplace_requires_grad_allowed,
    set_inplace_requires_grad_allowed,
)
from torch.func import vmap

if TYPE_CHECKING:
    from silodp.core.problem.problem import Problem


def grad(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function d function(w, *others) / dw.

    It gives zeros where `function` does not depend on w.
    """

    def gradient(*arguments: Tensor) -> Tensor:
        """Return the gradient at these arguments. Raise RuntimeError if the function gives several
        numbers.
        """
        level = _grad_increment_nesting()
        try:
            with torch.enable_grad():
                w, *others = (_wrap_for_grad(tensor, level) for tensor in arguments)
                before = get_inplace_requires_grad_allowed()
                set_inplace_requires_grad_allowed(True)
                try:
                    w.requires_grad_()
                finally:
                    set_inplace_requires_grad_allowed(before)
                value = function(w, *others)
                if value.dim():
                    raise RuntimeError(
                        "a record's loss must be one number, but has the shape "
                        f"{tuple(value.shape)}"
                    )
                if not value.requires_grad:
                    return _unwrap_for_grad(torch.zeros_like(w), level)
                (slope,) = torch.autograd.grad(
                    value, w, create_graph=True, allow_unused=True, materialize_grads=True
                )
                return _unwrap_for_grad(slope, level)
        finally:
            _grad_decrement_nesting()

    return gradient


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
