"""The arithmetic of one layer's factors for a chunk of records: lengths, and integers on grids. `products` has what is claimed of it, and why.

A small model's chunk is a hundred operations of a few microseconds, and the interpreter would take as long between them as they do. So
on a processor torch's own interpreter runs these functions (`run`): the same operations in the same order, without Python.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def run(function: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    """The function for tensors like this one: on a GPU as it is, for there torch's interpreter may join operations and round otherwise."""
    return function if like.is_cuda else _compiled(function)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return torch.jit.script(function)
        except (AttributeError, NotImplementedError):  # of a torch that has it no more: the same numbers, later
            return function


def square_of(inputs: list[Tensor], slopes: list[Tensor], bias: bool) -> Tensor:
    """(m,): an upper estimate of each record's ||sum_t e_t (x) a_t||^2, in float64 of float32 products; terms (m, T, f) and (m, T, h)."""
    if len(inputs) == 1 and inputs[0].shape[1] == 1:
        aa = torch.linalg.vector_norm(inputs[0], 2.0, [1, 2]).double().square_()
        ee = torch.linalg.vector_norm(slopes[0], 2.0, [1, 2]).double().square_()
        return ee * (aa + 1 if bias else aa)
    wide = inputs
    if bias:  # a last input of 1, which does not differ between two points
        wide = [functional.pad(a, [0, 1], value=1.0 if at == 0 else 0.0) for at, a in enumerate(inputs)]
    return squared(torch.cat(wide, 1).double(), torch.cat(slopes, 1).double(), 2.0**-32)


def scale_of(squares: list[Tensor], room: float, stretch: float) -> tuple[Tensor, Tensor]:
    """(m,): what brings each record, made `stretch` times as long, within the room, 0 for one that is not finite; and whether it is."""
    length = torch.stack(squares).sum(0).sqrt_()
    scale = torch.where(length * stretch > room, room / length, stretch)
    sound = torch.isfinite(length) & torch.isfinite(scale)
    return torch.where(sound, scale, 0.0), sound


def within(squares: list[Tensor], more: float, bound: float, sound: Tensor) -> Tensor:
    """(m,): whether a sound record's squares, and the part more for what float64 may have lost of them, keep to the bound."""
    return (torch.stack(squares).sum(0) * more <= bound) & sound


def on_grids(
    inputs: list[Tensor], slopes: list[Tensor], bias: bool, scale: Tensor, masked: Tensor | None, most: float, top: float, grid: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The integers A of inputs, at most `most` in size, and V of slopes, at most `top`; and (m,) each record's ||sum_t V_t (x) A_t||^2."""
    left: list[Tensor] = []
    right: list[Tensor] = []
    for at in range(len(inputs)):
        a = inputs[at]
        largest = a.abs().amax([1, 2]).double()  # a norm of this kind takes five times as long
        if bias and at == 0:
            largest = largest.clamp_(min=1.0)
        else:
            largest = torch.where(largest > 0, largest, 1.0)
        if masked is not None:
            largest = largest.masked_fill(masked, 1.0)
        width = a.shape[2]
        # a product into a part of a tensor of another type would take ten times as long
        whole = torch.empty([a.shape[0], a.shape[1], width + int(bias)], dtype=torch.float64, device=a.device)
        whole[:, :, :width] = a
        if bias:
            whole[:, :, width:] = 1.0 if at == 0 else 0.0
        right.append(whole.mul_((most / largest)[:, None, None]).round_())  # by the largest of its kind: rounded to 2^a at most
        left.append(slopes[at].double().mul_((scale * largest / grid)[:, None, None]).round_().clamp_(-top, top))
        if masked is not None:
            right[at].masked_fill_(masked[:, None, None], 0.0)
            left[at].masked_fill_(masked[:, None, None], 0.0)
    a = right[0] if len(right) == 1 else torch.cat(right, 1)
    v = left[0] if len(left) == 1 else torch.cat(left, 1)
    return a, v, squared(a, v)


def squared(a: Tensor, e: Tensor, cancelled: float = 2.0**-52) -> Tensor:
    """(m,): ||sum_t e_t (x) a_t||^2, with an allowance for what cancels between places if numbers are known to so much of themselves."""
    aa = torch.linalg.vector_norm(a, 2.0, [2]).square_()
    ee = torch.linalg.vector_norm(e, 2.0, [2]).square_()
    if a.shape[1] == 1:
        return (aa * ee)[:, 0]
    products = torch.bmm(a, a.transpose(1, 2)) * torch.bmm(e, e.transpose(1, 2))
    allowed = cancelled * (a.shape[2] + e.shape[2] + a.shape[1] ** 2 + 8)
    return products.sum([1, 2]).clamp_(min=0.0) + allowed * (aa * ee).sqrt_().sum(1).square_()
