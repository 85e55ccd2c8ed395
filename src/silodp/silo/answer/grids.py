"""Compute lengths and integers on grids for one layer's factors in a chunk of records.

`products` has the guarantees and their proof. A small model's chunk is a hundred operations of a
few microseconds. The interpreter would take as long between them, and longer if two threads take
turns at it. So on a processor torch's own interpreter runs these functions (`run`), three of them
for a chunk: the same operations in the same order, without Python.

No function here branches on a number of a record. Every chunk takes the same operations on the same
shapes, whether all its records are finite and drawn or none is. Otherwise the time of an answer
would show it. A record that is not finite is made zero by arithmetic: its scale is 0, and what is
not a number then becomes 0 (`nan_to_num_`, which runs on every chunk).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Inputs = tuple[Tensor, Tensor, list[Tensor], Tensor | None]
"""The result of `inputs_of`."""


def run(function: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    """Return the function in the form for tensors like this one.

    On a processor torch's interpreter runs it, unless this interpreter may join operations and
    round in another way. On a GPU Python runs it.
    """
    if like.is_cuda or _joins():
        return function
    return _compiled(function)


_joins: Callable[[], bool] = getattr(torch._C, "_jit_can_fuse_on_cpu", lambda: True)
"""Whether torch's interpreter may join operations on a processor, as builds with LLVM do."""


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return torch.jit.script(function)
        except (AttributeError, NotImplementedError):
            # A later torch may lack this interpreter. Python gets the same numbers, more slowly.
            return function


def inputs_of(inputs: list[Tensor], bias: bool, most: float) -> Inputs:
    """Return all that is made of a layer's inputs, terms (m, T, f), whatever the slopes.

    These are the integers A, at most `most` in size; their squared lengths, (m, T); for each term
    the number that `most` stands for; and the squared length of the inputs themselves, (m,), if
    there is one term of one place. A is finite: a record's term that is not finite has zeros there.
    """
    right: list[Tensor] = []
    tops: list[Tensor] = []
    for at, a in enumerate(inputs):
        largest = a.abs().amax([1, 2]).double()  # a norm of this kind takes five times as long
        if bias and at == 0:
            tops.append(largest.clamp_(min=1.0))
        else:
            tops.append(torch.where(largest > 0, largest, 1.0))
        width = a.shape[2]
        # A product into a part of a tensor of another type would take ten times as long.
        wide = torch.empty(
            [a.shape[0], a.shape[1], width + int(bias)], dtype=torch.float64, device=a.device
        )
        wide[:, :, :width] = a
        if bias:
            # The bias has a last input of 1, which does not differ between two points.
            wide[:, :, width:] = 1.0 if at == 0 else 0.0
        # Divided by the largest of its kind, a number is rounded to 2^a at most.
        wide.mul_((most / tops[at])[:, None, None]).round_()
        # If the largest is infinite, or no number, each product is 0 or no number.
        right.append(wide.nan_to_num_(0.0, 0.0, 0.0))
    if len(right) == 1:
        a = right[0]
    else:
        a = torch.cat(right, 1)
    length: Tensor | None = None
    if a.shape[1] == 1:
        length = torch.linalg.vector_norm(inputs[0], 2.0, [1, 2]).double().square_() + int(bias)
    return a, torch.linalg.vector_norm(a, 2.0, [2]).square_(), tops, length


def square_of(
    inputs: list[Tensor], slopes: list[Tensor], bias: bool, length: Tensor | None
) -> Tensor:
    """Return an upper estimate of each record's ||sum_t e_t (x) a_t||^2, (m,).

    It is in float64 of float32 products. Terms are (m, T, f) and (m, T, h).
    """
    if length is not None:
        return torch.linalg.vector_norm(slopes[0], 2.0, [1, 2]).double().square_() * length
    wide = inputs
    if bias:
        wide = [
            functional.pad(a, [0, 1], value=1.0 if at == 0 else 0.0) for at, a in enumerate(inputs)
        ]
    a = torch.cat(wide, 1).double()
    return squared(
        a, torch.linalg.vector_norm(a, 2.0, [2]).square_(), torch.cat(slopes, 1).double(), 2.0**-32
    )


def scale_of(squares: list[Tensor], room: float) -> tuple[Tensor, Tensor]:
    """(m,): what brings each record within the room, 0 for one that is not finite; and whether it
    is.
    """
    length = torch.stack(squares).sum(0).sqrt_()
    scale = torch.where(length > room, room / length, 1.0)
    sound = (length < math.inf) & (
        scale < math.inf
    )  # neither is negative, and a NaN is below nothing
    return torch.where(sound, scale, 0.0), sound


def within(squares: list[Tensor], more: float, bound: float, sound: Tensor) -> Tensor:
    """Return whether a sound record's squares keep to the bound, (m,).

    `more` is the factor for what float64 may have lost of them.
    """
    return (torch.stack(squares).sum(0) * more <= bound) & sound


def on_grids(
    a: Tensor,
    aa: Tensor,
    tops: list[Tensor],
    slopes: list[Tensor],
    scale: Tensor,
    top: float,
    grid: float,
) -> tuple[Tensor, Tensor]:
    """Return the integers V of slopes, and each record's ||sum_t V_t (x) A_t||^2, (m,).

    V is at most `top` in size, and zero where the scale is 0. A scale of 0 times a slope is 0 if
    the slope is finite, and no number if it is not.
    """
    left: list[Tensor] = []
    for at, e in enumerate(slopes):
        integers = e.double().mul_((scale * tops[at] / grid)[:, None, None]).round_()
        left.append(integers.nan_to_num_(0.0).clamp_(-top, top))
    if len(left) == 1:
        v = left[0]
    else:
        v = torch.cat(left, 1)
    return v, squared(a, aa, v)


def squared(a: Tensor, aa: Tensor, e: Tensor, cancelled: float = 2.0**-52) -> Tensor:
    """Return ||sum_t e_t (x) a_t||^2, (m,), with an allowance for what cancels between places.

    `cancelled` is the relative precision of the numbers. aa are the ||a_t||^2.
    """
    ee = torch.linalg.vector_norm(e, 2.0, [2]).square_()
    if a.shape[1] == 1:
        return (aa * ee)[:, 0]
    products = torch.bmm(a, a.transpose(1, 2)) * torch.bmm(e, e.transpose(1, 2))
    allowed = cancelled * (a.shape[2] + e.shape[2] + a.shape[1] ** 2 + 8)
    return products.sum([1, 2]).clamp_(min=0.0) + allowed * (aa * ee).sqrt_().sum(1).square_()


def total_of(a: Tensor, v: Tensor, chosen: Tensor, rho: float) -> Tensor:
    """Return round(rho sum V (x) A) over places and the chosen records, (h, f). V is overwritten.

    V is multiplied by the choice even if all are chosen: the time must not show whether all are.
    """
    v.mul_(chosen[:, None, None])
    return (v.flatten(0, 1).t() @ a.flatten(0, 1)).mul_(rho).round_()


# --- all layers of a chunk -----------------------------------------------------------------------


def prepared(
    inputs: list[list[Tensor]],
    slopes: list[list[Tensor]],
    bias: list[bool],
    most: list[float],
    known: list[Inputs | None],
    wholes: list[Tensor],
    order: list[int],
) -> tuple[list[Inputs], list[Tensor]]:
    """Return what is made of the inputs of every layer in factors, and all layers' squared lengths.

    Inputs that are known before are not made again. The lengths are in the model's order.
    """
    gridded: list[Inputs] = []
    squares = [torch.linalg.vector_norm(rows, 2.0, [1]).square_() for rows in wholes]
    for at in range(len(inputs)):
        before = known[at]
        if before is None:
            integers = inputs_of(inputs[at], bias[at], most[at])
        else:
            integers = before
        gridded.append(integers)
        squares.append(square_of(inputs[at], slopes[at], bias[at], integers[3]))
    return gridded, [squares[at] for at in order]


def integers_of(
    made: list[Inputs],
    slopes: list[list[Tensor]],
    wholes: list[Tensor],
    squares: list[Tensor],
    room: float,
    tops: list[float],
    grids: list[float],
    rhos: list[float],
    gamma: float,
    more: float,
    bound: float,
    order: list[int],
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return A and V of every layer in factors, and which records keep to the bound, (m,).

    The others' numbers are finite too. Wholes become integers in place.
    """
    scale, sound = scale_of(squares, room)
    found: list[Tensor] = []
    for rows in wholes:
        rows.mul_((scale / gamma)[:, None]).round_().nan_to_num_(0.0, 0.0, 0.0)
        found.append(torch.linalg.vector_norm(rows, 2.0, [1]).square_())
    left: list[Tensor] = []
    right: list[Tensor] = []
    for at in range(len(made)):
        a, aa, largest, _ = made[at]
        v, square = on_grids(a, aa, largest, slopes[at], scale, tops[at], grids[at])
        right.append(a)
        left.append(v)
        found.append(square * rhos[at] ** 2)
    return right, left, within([found[at] for at in order], more, bound, sound)


def totals_of(
    right: list[Tensor], left: list[Tensor], rhos: list[float], wholes: list[Tensor], chosen: Tensor
) -> list[Tensor]:
    """Return the sums over the chosen records, (m,) bool: of wholes, then of factors, rounded.

    V is overwritten.
    """
    weight = chosen.double()
    totals = [weight @ rows for rows in wholes]
    for at in range(len(left)):
        totals.append(total_of(right[at], left[at], weight, rhos[at]))
    return totals
