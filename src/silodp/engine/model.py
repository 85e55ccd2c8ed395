"""Read a model as a tree of modules, if the type of every module is known exactly.

Only known types are known to treat each record alone. A subclass, a hook, a parametrisation or a
replaced forward may compute something else. A model with one is read as None, and goes to the
engine that differentiates each record alone.

Three known types are defined here: the building blocks of small transformers. For example:

    Sequential(
        Embedding(V, D),
        Residual(LayerNorm(D), Linear(D, 3 * D), SelfAttention(4), Linear(D, D)),
        MeanPool(),
        Linear(D, 2),
    )
"""

from __future__ import annotations

import copy
from collections.abc import Container
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from silodp.core.errors import BadInput
from silodp.core.problem.models import Shapes
from silodp.core.problem.problem import Problem
from silodp.engine.convolution import pair


class Residual(nn.Sequential):
    """x + body(x), where the body is the chain of the given modules."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input plus the body's output."""
        return input + super().forward(input)


class SelfAttention(nn.Module):
    """softmax(q k' / sqrt(D / heads)) v within each record.

    q, k and v are side by side in the input: (B, T, 3 D) becomes (B, T, D).
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        if heads < 1:
            raise BadInput(f"heads is {heads}; use 1 or more")
        self.heads = heads

    def forward(self, input: Tensor) -> Tensor:
        """Return the attention (B, T, D).

        Raise BadInput if the heads do not divide the last axis.
        """
        if input.shape[-1] % (3 * self.heads):
            raise BadInput(
                f"the last axis has size {input.shape[-1]}; use a multiple of 3 x "
                f"{self.heads} heads, for q, k and v"
            )
        q, k, v = input.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        """Return what a definition contains of this module."""
        return f"{self.heads}"


class MeanPool(nn.Module):
    """The mean over a sequence: (B, T, D) to (B, D)."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the mean over the sequence."""
        return input.mean(1)


# --- reading a model ------------------------------------------------------------------------------

LAYERS: set[type[nn.Module]] = {nn.Linear, nn.Conv2d, nn.LayerNorm, nn.GroupNorm, nn.Embedding}
"""The modules with parameters. `rules.RULES` has a rule for each."""

ELEMENTWISE: set[type[nn.Module]] = {
    *(
        nn.CELU,
        nn.Dropout,
        nn.ELU,
        nn.GELU,
        nn.Hardshrink,
        nn.Hardsigmoid,
        nn.Hardswish,
        nn.Hardtanh,
        nn.Identity,
        nn.LeakyReLU,
    ),
    *(
        nn.LogSigmoid,
        nn.Mish,
        nn.ReLU,
        nn.ReLU6,
        nn.SELU,
        nn.SiLU,
        nn.Sigmoid,
        nn.Softplus,
        nn.Softshrink,
        nn.Softsign,
        nn.Tanh,
    ),
}
"""The modules that act on each number alone, whatever the axes.

(Problem refuses a Dropout that drops.)
"""

AXES: dict[type[nn.Module], int] = {
    nn.MaxPool2d: 4,
    nn.AvgPool2d: 4,
    nn.AdaptiveAvgPool2d: 4,
    SelfAttention: 3,
    MeanPool: 3,
    Shapes: 2,
}
"""The modules without parameters that treat each record alone, on inputs of that many axes."""


class Node(NamedTuple):
    """A module of the model, with its parts."""

    module: nn.Module
    names: dict[str, str] = {}  # noqa: RUF012 (never written to)
    """The model's name of each of the layer's parameters."""
    children: tuple[Node, ...] = ()


_READ: WeakKeyDictionary[Problem, tuple[tuple[nn.Module, ...], Node | None]] = WeakKeyDictionary()


def read(problem: Problem) -> Node | None:
    """Return the model as a tree of known modules whose parameters are all used once, or None.

    Hooks are looked for in each call. For persons it is None too. The clip is then for the sum over
    a person's rows, which the engines with rules for layers do not compute.
    """
    if problem.person or _has_any_global_hook():
        return None
    if problem not in _READ:
        _READ[problem] = tuple(problem.model.modules()), _read(problem)
    modules, root = _READ[problem]
    if all(map(_plain, modules)):
        return root
    return None


_BEHIND: WeakKeyDictionary[Problem, Problem] = WeakKeyDictionary()


def behind(problem: Problem) -> tuple[Shapes, Problem] | None:
    """Return the fixed basis that the model begins with, and the problem on its outputs.

    The problem has the same w, and is a chain of Linear. Return None if the model does not begin
    so.
    """
    if not (
        isinstance(problem.model, nn.Sequential)
        and type(first := next(iter(problem.model), None)) is Shapes
        and read(problem)
    ):
        return None
    if problem not in _BEHIND:
        _BEHIND[problem] = Problem(problem.model[1:], problem.loss, problem.prox)
    return first, _BEHIND[problem]


def _read(problem: Problem) -> Node | None:
    """Return the tree of a model, or None. It does not look for hooks."""
    used: list[str] = []
    root = _node(problem.model, "", used)
    layers = [
        module
        for _, module in problem.model.named_modules(remove_duplicate=False)
        if type(module) in LAYERS
    ]
    all_used = sorted(used) == sorted(name for name, _ in problem.model.named_parameters())
    shared = len(set(layers)) < len(layers)
    if all_used and not shared:
        return root
    return None


def _node(module: nn.Module, prefix: str, used: list[str]) -> Node | None:
    """Return the tree of a module, or None. Append the names of its parameters to `used`."""
    parameters = [name for name, _ in module.named_parameters(recurse=False)]
    if type(module) in (nn.Sequential, Residual):
        children = [
            _node(child, f"{prefix}{name}.", used)
            for name, child in module._modules.items()
            if child is not None
        ]
        readable = _pooled_first([child for child in children if child is not None])
        if len(readable) == len(children) and not parameters:
            return Node(module, children=readable)
        return None
    if type(module) in LAYERS:
        used += [prefix + name for name in parameters]
        fits = set(parameters) <= {"weight", "bias"} and _owned(module, parameters)
        if fits:
            return Node(module, {name: prefix + name for name in parameters})
        return None
    if type(module) in ELEMENTWISE:
        if getattr(module, "inplace", False):
            module = copy.copy(module)
            vars(module)["inplace"] = False
        return Node(module)
    flatten = type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    flatten |= type(module) is nn.Unflatten and module.dim == 1
    if (flatten or type(module) in AXES) and not getattr(module, "return_indices", False):
        return Node(module)
    return None


def _pooled_first(nodes: list[Node]) -> tuple[Node, ...]:
    """Return the chain with each ReLU moved behind a MaxPool2d that follows it.

    There it has fewer numbers to work on. Outputs and gradients are the same to the last bit,
    because ReLU keeps order:

    1. If the maximum is positive, the pool chooses the same place.
    2. If it is not, the gradient is 0.

    (A window of padding alone would give -inf, so there must be no padding.)
    """
    for i in range(len(nodes) - 1):
        pool = nodes[i + 1].module
        if (
            type(nodes[i].module) is nn.ReLU
            and type(pool) is nn.MaxPool2d
            and not pool.ceil_mode
            and not any(pair(pool.padding))
        ):
            nodes[i : i + 2] = [nodes[i + 1], nodes[i]]
    return tuple(nodes)


def _plain(module: nn.Module) -> bool:
    """Return whether calling the module does what its type does and nothing else.

    It has no hooks and no forward of its own. (Global hooks are looked for once.) Such code would
    see all records at once, and could mix them.
    """
    hooks = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
    return not hooks and _CALLS.isdisjoint(vars(module))


_CALLS = frozenset(("forward", "_call_impl", "__call__"))


def _owned(module: nn.Module, names: Container[str]) -> bool:
    """Return whether the layer's weight and bias, if it has them, are parameters.

    The engines would not see buffers.
    """
    return all(name in names or getattr(module, name, None) is None for name in ("weight", "bias"))


def sequence(node: Node | None) -> list[Node]:
    """Return the modules one after the other, or none if the model is not a plain sequence."""
    if node is None:
        return []
    if type(node.module) is nn.Sequential:
        parts = [sequence(child) for child in node.children]
        if all(parts):
            return [child for part in parts for child in part]
        return []
    if node.children:
        return []
    return [node]


def chain(problem: Problem, x: Tensor) -> list[Node]:
    """Return the model as Linear layers, all trained, and element-wise modules.

    It is for records x (S, n, *features). It is empty if the model is not such a chain.
    """
    if not x.is_floating_point() or x.dim() < 3:
        return []
    flat = x.dim() == 3
    layers = []
    for node in sequence(read(problem)):
        if type(node.module) is nn.Flatten:
            flat = True
        elif type(node.module) in ELEMENTWISE or (flat and type(node.module) is nn.Linear):
            layers.append(node)
        else:
            return []
    if sorted(name for node in layers for name in node.names.values()) == sorted(problem.shapes):
        return layers
    return []
