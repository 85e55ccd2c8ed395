"""Define one task for an engine, and the arithmetic that the engines in torch share.

The arithmetic is norms, scales and chunks.
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
"""How many bytes the temporaries of one chunk take on a CPU.

A chunk has several runs, or in the structured engine records of one run. With less, overhead
dominates. With more, the temporaries do not fit into the cache.
"""

LIMITS = {torch.float32: (1e15, 1e-19), torch.float64: (1e100, 1e-40)}
"""The longest layer input and the smallest clip that do not count as infinite and 0.

Beyond them a product of two factors loses digits.
"""


@dataclass(frozen=True)
class Task:
    """The clipped sums that `clipping.clipped_sum` returns, at one point or of differences."""

    problem: Problem
    points: list[Tensor]
    """One or two points, each (J, d) or (J, S, d)."""
    x: Tensor
    y: Tensor
    weight: Tensor
    clips: Tensor
    """(J, 1) in float64: 0, or a number between the limits."""
    memory: int = 2**28
    limits: Tensor | None = None
    """(J, 1) in float64, to which the gradients at two points are clipped before the subtraction.

    Few engines support it.
    """

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the numbers of runs, of silos and of a silo's records."""
        return len(self.clips), self.x.shape[0], self.x.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the points."""
        return self.points[0].dtype

    @property
    def chunk(self) -> int:
        """Return how many bytes a chunk's temporaries may take."""
        if self.points[0].device.type == "cpu":
            return min(CHUNK, self.memory)
        return self.memory

    def bytes(self, numbers: int) -> int:
        """Return the bytes of so many numbers at each point."""
        return numbers * len(self.points) * self.dtype.itemsize

    def laid_out(self) -> Task:
        """Return the task with points (S or 1, J, d) and weight (S, J or 1, n).

        Everything is in one dtype, and padding is zero.
        """
        if self.weight.dim() == 2:
            weight = self.weight[:, None]
        else:
            weight = self.weight.transpose(0, 1)
        weight = weight.to(self.dtype)
        points = []
        for point in self.points:
            if point.dim() == 2:
                points.append(point[None].detach())
            else:
                points.append(point.transpose(0, 1).detach())
        x = self.x
        if x.is_floating_point():
            x = x.detach().to(self.dtype)
        y = self.y
        # The values of padding must not stop the model or the loss, or change a product's rounding.
        if not bool(weight.all()):
            absent = ~weight.any(1)
            x, y = (
                t.masked_fill(absent.view(*absent.shape, *(1,) * (t.dim() - 2)), 0) for t in (x, y)
            )
        return replace(self, points=points, x=x, y=y, weight=weight)


class Engine(Protocol):
    """One way to compute clipped sums."""

    def supports(self, task: Task) -> bool:
        """Return whether the engine can compute the task.

        This depends on model, loss, dtype, device and memory.
        """
        ...

    def sum(self, task: Task) -> Tensor:
        """Return the sums (J, S, d) of a task that the engine supports."""
        ...


def along(index: slice, size: int) -> slice:
    """Return the index for an axis of this size. An axis of size 1 stands for all, so it has one
    index.
    """
    if size > 1:
        return index
    return slice(None)


def norms(squares: Iterable[Tensor], sizes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return norms from the layers' squares.

    `sizes` are those of terms that may cancel. Their rounding, a few ulps, is part of the sum even
    then, so it is added.
    """
    square = _total(squares)
    if not sizes:
        return square.sqrt_()
    size = _total(sizes)
    norm = torch.add(square, size, alpha=1e-13).clamp_(min=0).sqrt_()
    return norm.add_(size.sqrt(), alpha=8 * torch.finfo(dtype).eps)


def _total(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of the parts."""
    first, *rest = parts
    for part in rest:
        first = first + part
    return first


def scales(
    norm: Tensor, lengths: list[Tensor], weight: Tensor, clips: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return weight * min(1, clips / norm), (S, J, n), and which records are sound.

    Unsound records have scale 0. The second value is None if all are sound. A record is unsound if
    its norm, or one of its squared `lengths`, is not finite or beyond LIMITS. Every record is
    unsound if the clip is 0.
    """
    tiny = torch.finfo(weight.dtype).tiny
    longest, smallest = LIMITS[weight.dtype]
    scale = clips / torch.maximum(norm, clips.clamp(min=smallest))
    # To look at numbers is to wait for a GPU, so there the mask is always computed.
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
    """Yield slices of runs, silos and records, at `size` bytes for a record.

    A slice has whole runs to fill `chunk` bytes, or as many records as `memory` allows.
    """
    runs, silos, records = shape
    fit = max(1, memory // size)
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
