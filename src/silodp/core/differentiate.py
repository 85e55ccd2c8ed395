"""Differentiate a function of one record by its first argument, under vmap.

The result has the same bits as torch.func.grad. But torch.func.grad loads torch's compiler, only to
find that it is not needed. That is more than a second of every gate's start.
"""

from collections.abc import Callable

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
