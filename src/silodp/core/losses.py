"""Per-record losses, and in closed form their gradients by the model's output.

A loss takes outputs (N, k) and targets (N, ...) to one number per record, (N,). Any torch loss that sees one record at a time will do
(the engine shows an unknown loss single records only); those of this file are known to be record by record and have a slope in SLOPES.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """-log softmax(output)[target], for logits (..., k) and labels (...) in 0..k-1; another label gives NaN, and a zero gradient."""
    hit = target[..., None] == torch.arange(output.shape[-1], device=output.device)
    loss = output.logsumexp(-1) - torch.where(hit, output, 0).sum(-1)
    return torch.where(hit.any(-1), loss, torch.nan)


def logistic(output: Tensor, target: Tensor) -> Tensor:
    """log(1 + exp(z)) - target z, for one logit z (..., 1) and labels 0 or 1."""
    z = output.squeeze(-1)
    return torch.nn.functional.softplus(z) - target * z


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """(output - target)^2, summed over the outputs (..., k); target is (..., k), or (...) for one output."""
    return (output - target.reshape(output.shape)).square().sum(-1)


def _cross_entropy_slope(output: Tensor, target: Tensor) -> Tensor:
    hit = target[:, None, None] == torch.arange(output.shape[2], device=output.device)[:, None]
    slope = output.softmax(2).sub_(hit.to(output.dtype))
    return slope if int(hit.count_nonzero()) == target.numel() else slope.mul_(hit.any(2, keepdim=True))


def _logistic_slope(output: Tensor, target: Tensor) -> Tensor:
    return output.sigmoid().sub_(target[:, None, None].to(output.dtype))


def _squared_error_slope(output: Tensor, target: Tensor) -> Tensor:
    rows = target[..., None] if target.dim() == 2 else target
    return (output - rows.movedim(1, -1)[:, None].to(output.dtype)).mul_(2)


SLOPES: dict[Loss, Callable[[Tensor, Tensor], Tensor]] = {
    cross_entropy: _cross_entropy_slope,
    logistic: _logistic_slope,
    squared_error: _squared_error_slope,
}
"""Gradient of each known loss by the outputs: outputs (S, J, k, n) and targets (S, n, ...) to (S, J, k, n), the axes of `clipping`."""
