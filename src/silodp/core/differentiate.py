"""The gradient of a function of one record by its first argument, under vmap: as torch.func.grad
has it, bit for bit.

torch.func.grad loads torch's compiler, only to tell it that it is not wanted: more than a second of
every gate's start.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Not offered by torch, and what torch.func.grad is made of: tests hold the one to the other.
from torch._C._functorch import (
    _grad_decrement_nesting,
    _grad_increment_nesting,
    _unwrap_for_grad,
    _wrap_for_grad,
    get_inplace_requires_grad_allowed,
    set_inplace_requires_grad_allowed,
)


def grad(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """d function(w, *others) / dw; zeros where the function does not depend on w."""

    def gradient(*given: Tensor) -> Tensor:
        level = _grad_increment_nesting()
        try:
            with torch.enable_grad():
                w, *others = (_wrap_for_grad(tensor, level) for tensor in given)
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
                (found,) = torch.autograd.grad(
                    value, w, create_graph=True, allow_unused=True, materialize_grads=True
                )
                return _unwrap_for_grad(found, level)
        finally:
            _grad_decrement_nesting()

    return gradient
