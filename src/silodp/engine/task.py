"""One question to an engine, and the arithmetic that the engines in torch share: norms, scales and
chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from silodp.core.problem.problem import Problem

CHUNK = 2**26
"""Bytes that the temporaries of one chunk of runs, or of records of one run in the structured
engine, take on a CPU: less is all overhead, more falls out of the cache.
"""

LIMITS = {torch.float32: (1e15, 1e-19), torch.float64: (1e100, 1e-40)}
"""The longest layer input and the smallest clip that are told from infinite and 0: beyond them a
product of two factors loses digits.
"""


@dataclass(frozen=True)
class Task:
    """The clipped sums that are wanted, as `clipping.clipped_sum` says: at one point, or of
    differences between two.
    """

    problem: Problem
    points: list[Tensor]
    """Each (J, d) or (J, S, d)."""
    x: Tensor
    y: Tensor
    weight: Tensor
    clips: Tensor
    """(J, 1) in float64: 0, or a number between the limits."""
    memory: int = 2**28
    limits: Tensor | None = None
    """(J, 1) in float64: what the gradients at two points are clipped to before they are
    subtracted; few engines know how.
    """

    @property
    def shape(self) -> tuple[int, int, int]:
        """Runs, silos and records of a silo."""
        return len(self.clips), self.x.shape[0], self.x.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.points[0].dtype

    @property
    def chunk(self) -> int:
        if self.points[0].device.type == "cpu":
            return min(CHUNK, self.memory)
        return self.memory

    def bytes(self, numbers: int) -> int:
        """Of so many numbers at each point."""
        return numbers * len(self.points) * self.dtype.itemsize

    def laid_out(self) -> Task:
        """The same with points (S or 1, J, d) and weight (S, J or 1, n), in one dtype, and zeros in
        padding.
        """
        weight = (
            self.weight[:, None] if self.weight.dim() == 2 else self.weight.transpose(0, 1)
        ).to(self.dtype)
        points = [(p[None] if p.dim() == 2 else p.transpose(0, 1)).detach() for p in self.points]
        if self.x.is_floating_point():
            x = self.x.detach().to(self.dtype)
        else:
            x = self.x
        y = self.y
        if not bool(
            weight.all()
            # what padding holds must not stop the model or the loss, nor be seen by a product's
            # rounding
        ):
            absent = ~weight.any(1)
            x, y = (
                t.masked_fill(absent.view(*absent.shape, *(1,) * (t.dim() - 2)), 0) for t in (x, y)
            )
        return replace(self, points=points, x=x, y=y, weight=weight)


class Engine(Protocol):
    """One way to compute clipped sums."""

    def supports(self, task: Task) -> bool:
        """Whether it knows this model and loss, in this dtype, on this device and within this
        memory.
        """
        ...

    def sum(self, task: Task) -> Tensor:
        """The sums (J, S, d) of a task that it supports."""
        ...


def norms(squares: Iterable[Tensor], sizes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Norms from the layers' squares; `sizes` are those of terms that may cancel, whose rounding, a
    few ulps, is contributed all the same.
    """
    square = _total(squares)
    if not sizes:
        return square.sqrt_()
    size = _total(sizes)
    return (
        torch.add(square, size, alpha=1e-13)
        .clamp_(min=0)
        .sqrt_()
        .add_(size.sqrt(), alpha=8 * torch.finfo(dtype).eps)
    )


def _total(parts: Iterable[Tensor]) -> Tensor:
    first, *rest = parts
    for part in rest:
        first = first + part
    return first


def scales(
    norm: Tensor, lengths: list[Tensor], weight: Tensor, clips: Tensor
) -> tuple[Tensor, Tensor | None]:
    """weight * min(1, clips / norm), (S, J, n), 0 for unsound records; and which are sound, or None
    when all are.

    Unsound is a record whose norm, or one of whose squared `lengths`, is not finite or beyond
    LIMITS; and each where the clip is 0.
    """
    tiny, (longest, smallest) = torch.finfo(weight.dtype).tiny, LIMITS[weight.dtype]
    scale = clips / torch.maximum(norm, clips.clamp(min=smallest))
    # to look at numbers is to wait for a GPU, so there they are masked unseen
    if (
        not scale.is_cuda
        and bool(scale.amin() >= tiny)
        and all(bool(length.amax() < longest**2) for length in lengths)
    ):
        return scale.to(weight.dtype).mul_(weight), None
    sound = scale >= tiny
    for length in lengths:
        sound &= length < longest**2
    return torch.where(sound, scale, 0).to(weight.dtype).mul_(weight), sound


def chunks(
    shape: tuple[int, int, int], size: int, chunk: int, memory: int
) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of runs, silos and records, at `size` bytes for a record: whole runs to fill `chunk`
    bytes, else what `memory` holds.
    """
    (runs, silos, records), fit = shape, max(1, memory // size)
    steps = (
        1,
        max(1, min(silos, fit // max(1, records))),
        max(1, math.ceil(records / math.ceil(max(1, records) / fit))),
    )
    if fit >= silos * records:
        steps = (max(1, chunk // (size * max(1, silos * records))), max(1, silos), max(1, records))
    for j in range(0, runs, steps[0]):
        for s in range(0, silos, steps[1]):
            for n in range(0, records, steps[2]):
                yield slice(j, j + steps[0]), slice(s, s + steps[1]), slice(n, n + steps[2])
