"""The engine for one hidden layer on a GPU: Linear, ReLU, Linear with cross-entropy, all between
the first layer's products in one kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from silodp.core.problem.losses import cross_entropy
from silodp.engine.compiled import Compiled, compiled
from silodp.engine.task import Task

UNITS = 128
CLASSES = 16
"""Hidden units and outputs that registers hold."""


class Gpu:
    """One kernel for a hidden layer on a GPU."""

    def supports(self, task: Task) -> bool:
        point = task.points[0]
        fits = (
            task.limits is None
            and point.is_cuda
            and point.dtype == torch.float32
            and point.shape[-1] == task.problem.dim
        )
        if not fits or task.y.is_floating_point() or task.problem.loss is not cross_entropy:
            return False
        return (model := compiled(task)) is not None and _fits(model)

    def sum(self, task: Task) -> Tensor:
        from research.kernels.kernels import network_sums  # Triton is only installed beside a GPU

        model = compiled(task)
        assert model is not None
        first, second = model.chain
        sizes = (first.inputs, first.outputs, second.outputs)
        places = (first.weight, first.bias, second.weight, second.bias)
        points = [point.detach() for point in task.points]
        x = task.x.detach().to(torch.float32)
        return network_sums(points, x, task.y, task.weight, task.clips, sizes, places, task.memory)


def _fits(model: Compiled) -> bool:
    layers = [*model.chain]
    if (
        model.stages
        or [layer.relu for layer in layers] != [1, 0]
        or min(layer.bias for layer in layers) < 0
    ):
        return False
    return layers[0].outputs <= UNITS and layers[1].outputs <= CLASSES
