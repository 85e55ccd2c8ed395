"""Describe a model as `c/native.c` needs it, with the places of its weights in a point.

A model is stages and layers, or the ops of a sequence model.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from silodp.core.problem.losses import Loss, cross_entropy, logistic, squared_error
from silodp.core.problem.problem import Problem
from silodp.engine.convolution import conv_known, pair, side_by_side
from silodp.engine.model import MeanPool, Node, Residual, SelfAttention, chain, read, sequence
from silodp.engine.structured import numbers
from silodp.engine.task import Task

LOSSES: list[Loss] = [cross_entropy, logistic, squared_error]
MOST = 16
"""The most Linear layers, and the most stages, as in `c/vectors.c`."""
STEPS = 128
"""The most ops of a sequence model, as in `c/vectors.c`."""


class Layer(ctypes.Structure):
    """A Linear layer, with or without a ReLU behind it."""

    _fields_ = [(name, ctypes.c_long) for name in ("inputs", "outputs", "weight", "bias", "relu")]


class Stage(ctypes.Structure):
    """A convolution, with or without ReLU and max-pooling behind it."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("channels", "height", "width", "outputs")),
        *((name, ctypes.c_long * 2) for name in ("kernel", "padding", "pool")),
        *((name, ctypes.c_long) for name in ("relu", "weight", "bias")),
    ]


class Op(ctypes.Structure):
    """One step of a sequence model."""

    _fields_ = [
        *(
            (name, ctypes.c_long)
            for name in ("kind", "rows", "inputs", "outputs", "weight", "bias", "setting", "other")
        ),
        ("eps", ctypes.c_double),
    ]


EMBEDDING, LINEAR, LAYER_NORM, RELU, GELU, ATTENTION, POOL, BRANCH, MERGE = range(9)
"""The kinds of Op, in the order of `c/sequences.c`."""


class Compiled(NamedTuple):
    """A model as C takes it."""

    stages: ctypes.Array[Stage]
    chain: ctypes.Array[Layer]
    ops: ctypes.Array[Op]
    """A model with ops has no stages and no layers."""
    targets: int
    """How many numbers a record's label has."""


class _Other(Exception):
    """A module, the loss or a shape is not for C."""


_COMPILED: WeakKeyDictionary[Problem, dict[Any, Compiled | None]] = WeakKeyDictionary()


def compiled(task: Task) -> Compiled | None:
    """Return the model as C takes it, or None if a module, the loss or a shape is not for C."""
    problem = task.problem
    x = task.x
    y = task.y
    if (root := read(problem)) is None:
        return None
    models = _COMPILED.setdefault(problem, {})
    key = (x.shape[2:], x.dtype, y.shape[2:], y.dtype)
    if key not in models:
        models[key] = None
        for build in (_Layers, _Sequence):
            with contextlib.suppress(_Other):
                models[key] = build(problem).model(root, x, y)
                break
    return models[key]


class _Builder:
    """The parts that both kinds of model share."""

    def __init__(self, problem: Problem) -> None:
        ends = [*itertools.accumulate(problem.sizes)]
        self.problem = problem
        self.places = dict(zip(problem.shapes, [0, *ends], strict=False))

    def weight_and_bias(self, node: Node, *shapes: dict[str, tuple[int, ...]]) -> tuple[int, int]:
        """Return the places of weight and bias in a point, or -1 for an absent one.

        Raise _Other unless the parameters have one of these shapes. A parameter may have been
        replaced, added or frozen.
        """
        actual = {
            name: tuple(self.problem.shapes.get(full, ())) for name, full in node.names.items()
        }
        if actual not in shapes:
            raise _Other
        places = {name: self.places[full] for name, full in node.names.items()}
        return places.get("weight", -1), places.get("bias", -1)

    def linear(self, node: Node, width: int) -> tuple[int, int, int, int]:
        """Return inputs, outputs, and the places of weight and bias. Raise _Other for another
        layer.
        """
        layer = node.module
        if not isinstance(layer, nn.Linear) or layer.in_features != width:
            raise _Other
        weight = (layer.out_features, width)
        bias = (layer.out_features,)
        return (
            width,
            layer.out_features,
            *self.weight_and_bias(node, {"weight": weight}, {"weight": weight, "bias": bias}),
        )

    def targets(self, y: Tensor, width: int) -> int:
        """Return how many numbers a record's label has, for outputs of that width."""
        fits: dict[Loss, bool] = {
            # C gets float32, in which a number close to a label could become the label
            cross_entropy: y.dim() == 2 and y.dtype != torch.float64,
            logistic: y.dim() == 2 and width == 1,
            squared_error: y.shape[2:].numel() == width,
        }
        if not fits.get(self.problem.loss):
            raise _Other
        if self.problem.loss is squared_error:
            return width
        return 1


class _Layers(_Builder):
    """Stages, if any, and a chain of layers."""

    def model(self, root: Node, x: Tensor, y: Tensor) -> Compiled:
        """Return the model. Raise _Other if it is not stages and layers."""
        rest = chain(self.problem, x)
        if not rest and numbers(self.problem, x) is not None:
            rest = sequence(root)
        shape = tuple(x.shape[2:])
        if rest and type(first := rest[0].module) is nn.Unflatten:
            shape = tuple(first.unflattened_size)
            rest = rest[1:]
            # A size of -1, which torch would replace, is not for C.
            if min(shape) < 1 or tuple(x.shape[2:]) != (math.prod(shape),):
                raise _Other
        stages: list[Stage] = []
        while rest and type(rest[0].module) is nn.Conv2d:
            stage, shape, rest = self.stage(shape, rest)
            stages.append(stage)
        if rest and type(rest[0].module) is nn.Flatten:
            rest = rest[1:]
        elif stages:
            raise _Other
        layers: list[Layer] = []
        width = math.prod(shape)
        for node in rest:
            if type(node.module) is nn.ReLU and layers:
                layers[-1].relu = True
            else:
                layers.append(Layer(*self.linear(node, width), False))
                width = layers[-1].outputs
        if not 0 < len(layers) <= MOST or len(stages) > MOST:
            raise _Other
        targets = self.targets(y, layers[-1].outputs)
        return Compiled(
            (Stage * len(stages))(*stages), (Layer * len(layers))(*layers), (Op * 0)(), targets
        )

    def stage(
        self, shape: tuple[int, ...], modules: list[Node]
    ) -> tuple[Stage, tuple[int, ...], list[Node]]:
        """Return the stage that begins with the first of `modules`, its output shape, and the
        modules after it.

        The first module is a convolution. Raise _Other if C does not have its settings.
        """
        node, *rest = modules
        pool = [1, 1]
        relu = False
        layer = node.module
        while rest and type(rest[0].module) in (nn.ReLU, nn.MaxPool2d):
            after = rest[0].module
            rest = rest[1:]
            if type(after) is nn.MaxPool2d:
                if pool != [1, 1] or not side_by_side(after):
                    raise _Other
                pool = pair(after.kernel_size)
            relu |= type(after) is nn.ReLU
        assert isinstance(layer, nn.Conv2d)
        plain = (
            layer.stride == (1, 1)
            and layer.dilation == (1, 1)
            and layer.groups == 1
            and layer.padding != "same"
            and conv_known(layer, 4)
        )
        if len(shape) != 3 or not plain or shape[0] != layer.in_channels:
            raise _Other
        if isinstance(layer.padding, str):
            padding = (0, 0)
        else:
            padding = layer.padding
        sizes = [shape[1 + i] + 2 * padding[i] - layer.kernel_size[i] + 1 for i in (0, 1)]
        if min(sizes[i] // pool[i] for i in (0, 1)) < 1:
            raise _Other
        settings = ((ctypes.c_long * 2)(*two) for two in (layer.kernel_size, padding, pool))
        weight = (layer.out_channels, layer.in_channels, *layer.kernel_size)
        bias = (layer.out_channels,)
        places = self.weight_and_bias(node, {"weight": weight}, {"weight": weight, "bias": bias})
        stage = Stage(*shape, layer.out_channels, *settings, relu, *places)
        output = (layer.out_channels, *(sizes[i] // pool[i] for i in (0, 1)))
        return stage, output, rest


class _Sequence(_Builder):
    """The ops of a model from tokens, or from rows of numbers, to one row of outputs."""

    def model(self, root: Node, x: Tensor, y: Tensor) -> Compiled:
        """Return the model. Raise _Other if it is not a sequence model."""
        tokens = x.dtype in (torch.int32, torch.int64)
        if tokens:
            axes = 3
        else:
            axes = 4
        if x.dim() != axes or min(x.shape[2:]) < 1 or numbers(self.problem, x) is None:
            raise _Other
        self.ops: list[Op] = []
        self.rows = x.shape[2]
        if tokens:
            self.width = 0
        else:
            self.width = x.shape[3]
        self.pooled = False
        self.put(root)
        if not (
            self.pooled and len(self.ops) <= STEPS and (self.ops[0].kind == EMBEDDING) == tokens
        ):
            raise _Other
        return Compiled(
            (Stage * 0)(),
            (Layer * 0)(),
            (Op * len(self.ops))(*self.ops),
            self.targets(y, self.width),
        )

    def op(
        self,
        kind: int,
        width: int,
        weight: int = -1,
        bias: int = -1,
        setting: int = 0,
        other: int = 0,
        eps: float = 0.0,
    ) -> None:
        """Append an op, whose output has this width."""
        self.ops.append(Op(kind, self.rows, self.width, width, weight, bias, setting, other, eps))
        self.width = width

    def put(self, node: Node) -> None:
        """Append the ops of a node, for an input of (rows, width). Raise _Other if C does not have
        one.
        """
        module = node.module
        start = len(self.ops)
        width = self.width
        if isinstance(module, nn.Sequential):
            before = self.rows, width
            if type(module) is Residual:
                self.op(BRANCH, width)
            for child in node.children:
                self.put(child)
            if type(module) is Residual:
                if (self.rows, self.width) != before:
                    raise _Other
                self.op(MERGE, width, other=start)
        elif isinstance(module, nn.Embedding):
            table = (module.num_embeddings, module.embedding_dim)
            if self.ops or table[0] > 2**24:  # tokens reach C as float32
                raise _Other
            if module.padding_idx is None:
                padding = -1
            else:
                padding = module.padding_idx
            self.op(
                EMBEDDING,
                table[1],
                *self.weight_and_bias(node, {"weight": table}),
                table[0],
                padding,
            )
        elif isinstance(module, nn.LayerNorm):
            one = (width,)
            allowed = ({}, {"weight": one}, {"bias": one}, {"weight": one, "bias": one})
            if module.normalized_shape != one:
                raise _Other
            self.op(LAYER_NORM, width, *self.weight_and_bias(node, *allowed), eps=module.eps)
        elif isinstance(module, nn.Linear):
            self.op(LINEAR, *self.linear(node, width)[1:])
        elif isinstance(module, SelfAttention):
            self.op(ATTENTION, width // 3, setting=module.heads)
        elif isinstance(module, MeanPool):
            self.op(POOL, width)
            self.rows = 1
            self.pooled = True
        elif isinstance(module, nn.ReLU):
            self.op(RELU, width)
        elif isinstance(module, nn.GELU) and module.approximate == "none":
            self.op(GELU, width)
        elif not isinstance(module, nn.Identity | nn.Dropout):
            raise _Other
