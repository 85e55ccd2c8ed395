"""The engine for small convolutional networks on a GPU: two stages of convolution, ReLU and
pooling, then Linear layers, with cross-entropy.

All runs see the same records, which are read where they lie. The stages are the kernels of
`pictures.cu`, compiled for a network's sizes when it is first seen; the Linear layers, of which a
record's gradient is never made, are products of matrices.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from research.kernels.cuda import compiler, kernels
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.engine.compiled import Compiled, compiled
from silodp.engine.task import Task, scales

SHARED = 48 * 1024
"""Bytes of fast memory that a block may have anywhere."""
THREADS = 224
STEP = 16
"""Of a block of the forward pass; and records that a block takes one after the other."""


class Pictures:
    """Two stages and a chain of layers on a GPU, in CUDA."""

    def supports(self, task: Task) -> bool:
        point = task.points[0]
        if (
            not point.is_cuda
            or point.dtype != torch.float32
            or task.y.is_floating_point()
            or task.problem.loss is not cross_entropy
        ):
            return False
        plain = (
            len(task.points) == 1
            and task.limits is None
            and task.weight.dim() == 2
            and task.x.is_floating_point()
        )
        return (
            plain
            and (model := compiled(task)) is not None
            and fits(model)
            and compiler() is not None
        )

    def sum(self, task: Task) -> Tensor:
        model = compiled(task)
        assert model is not None
        (runs, silos, _), point = task.shape, task.points[0].detach()
        x = task.x.detach().float().contiguous()
        weight = task.weight.float().contiguous()
        out = torch.zeros(runs, silos, task.problem.dim, device=point.device)
        step = max(1, task.memory // max(1, _bytes(model) * weight.numel()))
        for j in range(0, runs if weight.numel() else 0, step):
            net = Network(model, point[j : j + step].contiguous(), x, weight)
            net.add(task.problem.slope, task.y, task.clips[j : j + step], out[j : j + step])
        return out


def outputs(problem: Problem, w: Tensor, x: Tensor) -> Tensor | None:
    """The outputs (J, n, k) at points w (J, d) for records x (n, ...), or None where the kernels do
    not know the network.
    """
    nothing = torch.zeros(1, len(x), dtype=torch.int64, device=x.device)
    task = Task(
        problem,
        [w],
        x[None],
        nothing,
        nothing + 1.0,
        torch.zeros(len(w), 1, dtype=torch.float64, device=w.device),
    )
    if not Pictures().supports(task) or (model := compiled(task)) is None:
        return None
    return Network(model, w.contiguous(), task.x.float().contiguous(), task.weight).outputs[:, 0]


class Network:
    """The network at points (J, d) or (J, S, d), over records x (S, n, ...) of which those of
    weight (S, n) 0 are not looked at.
    """

    def __init__(self, model: Compiled, points: Tensor, x: Tensor, weight: Tensor) -> None:
        self.model = model
        self.points = points
        self.x = x
        self.weight = weight
        self.own = points.dim() == 3
        self.shape = len(points), *weight.shape
        self.kernels = _kernels(_sizes(model))
        self.strides = (math.prod(points.shape[1:]), points.shape[-1] if self.own else 0)
        self.flow: list[Tensor] = []
        """The inputs of the Linear layers, (J, S, n, i), and behind them the outputs."""
        self._forward()

    @property
    def outputs(self) -> Tensor:
        return self.flow[-1]

    def _launch(self, kernel: Any, block: int, *tensors: Tensor) -> None:
        runs, silos, records = self.shape
        kernel(
            (math.ceil(records / STEP), silos, runs),
            (block, 1, 1),
            [*tensors, records, *self.strides, STEP],
        )

    def _forward(self) -> None:
        sizes = [stage.outputs * math.prod(_pooled(stage)) for stage in self.model.stages]
        self.kept = [
            t
            for size in sizes
            for t in (
                self.x.new_empty(*self.shape, size),
                self.x.new_empty(*self.shape, size, dtype=torch.uint8),
            )
        ]
        self._launch(self.kernels.forward, THREADS, self.x, self.points, self.weight, *self.kept)
        self.flow.append(self.kept[2])
        for layer in self.model.chain:
            weight, bias = self._layer(layer)
            z = torch.baddbmm(bias[:, None], self._rows(self.flow[-1]), weight.transpose(1, 2))
            self.flow.append((z.relu_() if layer.relu else z).view(*self.shape, -1))

    def _rows(self, t: Tensor) -> Tensor:
        """One matrix of records for each point."""
        if self.own:
            return t.flatten(0, 1)
        return t.flatten(1, 2)

    def _layer(self, layer: Any) -> tuple[Tensor, Tensor]:
        point = self.points.flatten(0, -2)
        weight = point[:, layer.weight : layer.weight + layer.inputs * layer.outputs].unflatten(
            1, (layer.outputs, layer.inputs)
        )
        return weight, point[:, layer.bias : layer.bias + layer.outputs]

    def add(self, slope: Any, y: Tensor, clips: Tensor, out: Tensor) -> None:
        """Adds the clipped sums to out (J, S, d)."""
        flow = self.flow
        slopes = []
        e = slope(self.outputs.permute(1, 0, 3, 2), y).permute(1, 0, 3, 2).contiguous()
        for layer, z in zip(reversed(self.model.chain), reversed(flow[1:]), strict=True):
            if layer.relu:
                e = e.masked_fill(z <= 0, 0)
            slopes.append(e)
            e = torch.bmm(self._rows(e), self._layer(layer)[0]).view(*self.shape, -1)
        sizes = _sizes(self.model)
        gradient = e.new_empty(*self.shape, sizes.gradient)
        square = torch.empty(self.shape, dtype=torch.float64, device=e.device)
        self._launch(
            self.kernels.backward,
            32 * sizes.O1,
            self.x,
            self.points,
            self.weight,
            *self.kept,
            e,
            gradient,
            square,
        )
        lengths = [_square(a) for a in flow[:-1]]
        for a, e in zip(lengths, reversed(slopes), strict=True):
            square = square + _square(e) * (a + 1)
        silos_first = [t.transpose(0, 1) for t in (square, *lengths)]
        scale, sound = scales(
            silos_first[0].sqrt(), silos_first, self.weight[:, None], clips
        )  # (S, J, n)
        there = self.weight[:, None] != 0
        there = (there if sound is None else sound & there).transpose(0, 1)
        scale = scale.transpose(0, 1)
        scale = torch.where(there, scale, 0).contiguous()
        self._add_stages(gradient, scale, sizes, out)
        for layer, a, e in zip(self.model.chain, flow, reversed(slopes), strict=False):
            e = (e * scale[..., None]).masked_fill_(~there[..., None], 0)
            a = a.masked_fill(~there[..., None], 0)
            found = torch.bmm(e.flatten(0, 1).transpose(1, 2), a.flatten(0, 1)).view(
                *out.shape[:2], -1
            )
            out[..., layer.weight : layer.weight + found.shape[-1]] += found
            out[..., layer.bias : layer.bias + layer.outputs] += e.sum(2)

    def _add_stages(self, gradient: Tensor, scale: Tensor, sizes: Sizes, out: Tensor) -> None:
        total = gradient.new_empty(*out.shape[:2], sizes.gradient)
        self.kernels.add(
            (math.ceil(sizes.gradient / 128), out.shape[:2].numel(), 1),
            (128, 1, 1),
            [gradient, scale, total, self.shape[2]],
        )
        start = 0
        for stage in self.model.stages:
            for place, size in (
                (stage.weight, stage.outputs * stage.channels * math.prod(stage.kernel)),
                (stage.bias, stage.outputs),
            ):
                out[..., place : place + size] += total[..., start : start + size]
                start += size


def _square(u: Tensor) -> Tensor:
    return torch.linalg.vector_norm(u, dim=-1, dtype=torch.float64).square_()


class Sizes(NamedTuple):
    """What the kernels are compiled for; in `pictures.cu` each has its name."""

    CHANNELS: int
    HEIGHT: int
    WIDTH: int
    SIDE: int
    O1: int
    ROWS1: int
    COLUMNS1: int
    O2: int
    ROWS2: int
    COLUMNS2: int
    W1: int
    B1: int
    W2: int
    B2: int
    THREADS: int = THREADS

    @property
    def gradient(self) -> int:
        """Numbers of a record's gradient by both stages."""
        return (self.O1 * self.CHANNELS + self.O2 * self.O1) * self.SIDE**2 + self.O1 + self.O2

    @property
    def shared(self) -> int:
        """Bytes that a block holds at the most, a little more than it does."""
        apart = [next((k for k in (19, 38) if k >= n), n) for n in (self.WIDTH, self.COLUMNS1)]
        held = (
            self.CHANNELS * self.HEIGHT * apart[0]
            + 2 * self.O1 * self.ROWS1 * apart[1]
            + self.O2 * self.ROWS2 * self.COLUMNS2 * 4
        )
        forward = self.CHANNELS * self.HEIGHT * (self.WIDTH + 1) + self.O1 * self.ROWS1 * (
            self.COLUMNS1 + 1
        )
        weights = (
            (self.O1 + 1) * (self.CHANNELS * self.SIDE**2 + 1)
            + self.O2 * (self.O1 * self.SIDE**2 + 1)
            + 2
        )
        return 4 * max(held + 72 * self.O1, forward + weights)


def _pooled(stage: Any) -> tuple[int, int]:
    return (stage.height - stage.kernel[0] + 1) // 2, (stage.width - stage.kernel[1] + 1) // 2


def _sizes(model: Compiled) -> Sizes:
    one, two = model.stages
    return Sizes(
        *(one.channels, one.height, one.width, one.kernel[0], one.outputs, *_pooled(one)),
        *(two.outputs, *_pooled(two), one.weight, one.bias, two.weight, two.bias),
    )


def fits(model: Compiled) -> bool:
    """Whether the kernels know it: two stages with square kernels of 3 or 5, and a bias
    everywhere.
    """
    stages = [*model.stages]
    layers = [*model.chain]
    if len(stages) != 2 or min(part.bias for part in (*stages, *layers)) < 0 or layers[-1].relu:
        return False
    side = stages[0].kernel[0]
    plain = all(
        [*s.kernel] == [side, side] and [*s.padding] == [0, 0] and [*s.pool] == [2, 2] and s.relu
        for s in stages
    )
    sizes = _sizes(model)
    return (
        plain and side in (3, 5) and sizes.O1 <= 8 and sizes.O2 % 4 == 0 and sizes.shared <= SHARED
    )


def _bytes(model: Compiled) -> int:
    """That a record takes in one run."""
    stages = sum(5 * stage.outputs * math.prod(_pooled(stage)) for stage in model.stages)
    return (
        stages
        + 4 * _sizes(model).gradient
        + 16 * sum(layer.inputs + layer.outputs for layer in model.chain)
    )


class _Kernels(NamedTuple):
    forward: Any
    backward: Any
    add: Any


@functools.lru_cache(maxsize=32)
def _kernels(sizes: Sizes) -> _Kernels:
    return _Kernels(*kernels(Path(__file__).with_suffix(".cu"), _Kernels._fields, sizes._asdict()))
