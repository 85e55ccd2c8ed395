"""Many penalised fits of one convex model at once, each by Newton's method to convergence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

OutputLoss = Callable[[Tensor, Tensor], Tensor]
"""Outputs (N, k) and targets (N,) to losses (N,)."""
STEPS = 60
CLOSE = 1e-9
"""A fit has converged when its next step would win less than this share of its objective."""
AT_ONCE = 2**24
"""Numbers of the largest temporary tensor."""


def minimise(
    design: Tensor,
    offset: Tensor,
    y: Tensor,
    weight: Tensor,
    loss: OutputLoss,
    penalty: Tensor,
    centre: Tensor,
) -> Tensor:
    """Return (J, P): for each j the minimum over t of

    sum_i weight[j, i] loss(offset[i] + design[i] t, y[i]) + sum_p penalty[j, p] (t - centre)_p^2/2.

    Args:
        design: (m, k, P), the outputs' derivative by the coefficients.
        offset: (m, k), the outputs at t = 0.
        y: (m,) targets.
        weight: (J, m); 0 leaves a row out.
        loss: a convex loss of outputs and targets.
        penalty: (J, P), positive.
        centre: (J, P), where the penalty is zero; the fits start there.
    """
    m, k, size = design.shape
    flat = design.reshape(m * k, size)
    t = centre.clone()
    running = torch.arange(len(t))
    for _ in range(STEPS):
        own = _Objective(flat, offset, y, weight[running], loss, penalty[running], centre[running])
        value, slope, curvature = own.derivatives(t[running])
        step = -_solve(curvature, slope)
        gain = -(slope * step).sum(1)
        scale = torch.ones_like(value)
        moved = t[running] + step
        worse = torch.zeros_like(value, dtype=torch.bool)
        for _ in range(30):
            found = own.value(moved)
            worse = ~(found <= value - 1e-4 * scale * gain + 1e-12 * value.abs())
            if not bool(worse.any()):
                break
            scale = torch.where(worse, scale / 2, scale)
            moved = t[running] + scale[:, None] * step
        else:
            moved = torch.where(worse[:, None], t[running], moved)
        t[running] = moved
        open_ = gain > CLOSE * (value.abs() + 1)
        if not bool(open_.any()):
            break
        running = running[open_]
    return t


class _Objective:
    def __init__(
        self,
        flat: Tensor,
        offset: Tensor,
        y: Tensor,
        weight: Tensor,
        loss: OutputLoss,
        penalty: Tensor,
        centre: Tensor,
    ) -> None:
        self._flat = flat
        self._offset = offset
        self._y = y
        self._weight = weight
        self._loss = loss
        self._penalty = penalty
        self._centre = centre

    def value(self, t: Tensor) -> Tensor:
        each = self._losses(self._outputs(t))
        return each.sum(1) + (self._penalty * (t - self._centre).square()).sum(1) / 2

    def derivatives(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the values (J,), gradients (J, P) and Hessians (J, P, P)."""
        outputs = self._outputs(t).requires_grad_(True)
        with torch.enable_grad():
            each = self._losses(outputs)
            (first,) = torch.autograd.grad(each.sum(), outputs, create_graph=True)
            second = []
            for column in range(outputs.shape[-1]):
                (row,) = torch.autograd.grad(
                    first[..., column].sum(),
                    outputs,
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
                second.append(row)
        value = each.detach().sum(1) + (self._penalty * (t - self._centre).square()).sum(1) / 2
        slope = first.detach().flatten(1) @ self._flat + self._penalty * (t - self._centre)
        curvature = self._curvature(torch.stack(second, -2).detach())
        return value, slope, curvature + torch.diag_embed(self._penalty)

    def _curvature(self, second: Tensor) -> Tensor:
        """Return (J, P, P) from the losses' second derivatives by the outputs, (J, m, k, k)."""
        count, m, k, _ = second.shape
        size = self._flat.shape[1]
        design = self._flat.reshape(m, k, size)
        found = second.new_empty(count, size, size)
        for j in range(count):
            if k == 1:
                turned = second[j, :, :, 0] * design[:, 0]
            else:
                turned = (second[j] @ design).reshape(m * k, size)
            found[j] = self._flat.T @ turned
        return found

    def _outputs(self, t: Tensor) -> Tensor:
        return self._offset + (t @ self._flat.T).unflatten(1, self._offset.shape)

    def _losses(self, outputs: Tensor) -> Tensor:
        count, m, _ = outputs.shape
        each = self._loss(outputs.flatten(0, 1), self._y.repeat(count)).unflatten(0, (count, m))
        return torch.where(self._weight > 0, each, 0) * self._weight


def _solve(curvature: Tensor, slope: Tensor) -> Tensor:
    """Return the Newton steps (J, P), with a damping where a matrix is not positive definite."""
    size = curvature.diagonal(dim1=1, dim2=2).abs().amax(1)
    damping = torch.zeros_like(size)
    factor = torch.zeros_like(curvature)
    for power in range(-10, 3):
        damped = curvature + torch.diag_embed(damping[:, None].expand_as(slope))
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed.any()):
            break
        damping = torch.where(failed > 0, size * 10.0**power, damping)
    return torch.cholesky_solve(slope[..., None], factor)[..., 0]
