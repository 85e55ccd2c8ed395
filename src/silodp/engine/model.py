"""What the engines know of a model: a tree of modules, if the type of every one is known exactly.

Only of known types it is known that they treat each record alone. A subclass, a hook, a
parametrisation or a forward of its own may compute something else; a model with one is read as
None, and goes to the engine that differentiates each record alone.
"""

from __future__ import annotations

import copy
from collections.abc import Container
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from silodp.core.problem.additive import Shapes
from silodp.core.problem.problem import Problem
from silodp.engine.blocks import MeanPool, Residual, SelfAttention
from silodp.engine.convolution import pair

LAYERS: set[type[nn.Module]] = {nn.Linear, nn.Conv2d, nn.LayerNorm, nn.GroupNorm, nn.Embedding}
"""Modules with parameters; `rules.RULES` has how each takes part."""

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
"""Modules that act on each number alone, whatever the axes. (A Dropout that drops is refused by
Problem.)
"""

AXES: dict[type[nn.Module], int] = {
    nn.MaxPool2d: 4,
    nn.AvgPool2d: 4,
    nn.AdaptiveAvgPool2d: 4,
    SelfAttention: 3,
    MeanPool: 3,
    Shapes: 2,
}
"""Modules without parameters that treat each record alone, on inputs of that many axes."""


class Node(NamedTuple):
    """A module of the model, with what it is made of."""

    module: nn.Module
    names: dict[str, str] = {}  # noqa: RUF012 (never written to)
    """The model's name of each of the layer's parameters."""
    children: tuple[Node, ...] = ()


_READ: WeakKeyDictionary[Problem, tuple[tuple[nn.Module, ...], Node | None]] = WeakKeyDictionary()


def read(problem: Problem) -> Node | None:
    """The model as a tree of known modules whose parameters are all used once; else None. Hooks are
    looked for anew each time.

    None for persons too: the clip is for what a person's rows make together, which the engines that
    know layers do not add up.
    """
    if problem.person or _has_any_global_hook():
        return None
    if problem not in _READ:
        _READ[problem] = tuple(problem.model.modules()), _read(problem)
    modules, root = _READ[problem]
    return root if all(map(_plain, modules)) else None


_BEHIND: WeakKeyDictionary[Problem, Problem] = WeakKeyDictionary()


def behind(problem: Problem) -> tuple[Shapes, Problem] | None:
    """A fixed map of features that the model begins with, and the problem on what it makes of them:
    the same w, and a chain of Linear.
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
    used: list[str] = []
    root = _node(problem.model, "", used)
    layers = [
        module
        for _, module in problem.model.named_modules(remove_duplicate=False)
        if type(module) in LAYERS
    ]
    known = sorted(used) == sorted(name for name, _ in problem.model.named_parameters()) and len(
        set(layers)
    ) == len(layers)
    return root if known else None


def _node(module: nn.Module, prefix: str, used: list[str]) -> Node | None:
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if type(module) in (nn.Sequential, Residual):
        children = [
            _node(child, f"{prefix}{name}.", used)
            for name, child in module._modules.items()
            if child is not None
        ]
        known = _pooled_first([child for child in children if child is not None])
        if len(known) == len(children) and not own:
            return Node(module, children=known)
        return None
    if type(module) in LAYERS:
        used += [prefix + name for name in own]
        fits = set(own) <= {"weight", "bias"} and _owned(module, own)
        if fits:
            return Node(module, {name: prefix + name for name in own})
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
    """The chain with each ReLU behind a MaxPool2d that follows it, where it has fewer numbers to go
    through.

    Outputs and gradients are the same to the last bit, as ReLU keeps order: where the maximum is
    positive the pool chooses the same place, and where it is not the gradient is 0. (A window of
    padding alone would give -inf, so there must be none.)
    """
    for i in range(len(nodes) - 1):
        pool = nodes[i + 1].module
        if (
            type(nodes[i].module) is nn.ReLU
            and type(pool) is nn.MaxPool2d
            and not pool.ceil_mode
            and not any(pair(pool.padding))
        ):
            nodes[i : i + 2] = nodes[i + 1], nodes[i]
    return tuple(nodes)


def _plain(module: nn.Module) -> bool:
    """Whether calling the module does what its type says and nothing else: no hooks of its own
    (everybody's are looked for once), no forward.

    What else it did would see all records at once, and could mix them.
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
    """Whether the layer's weight and bias, where it has them, are parameters: as buffers they would
    be passed over.
    """
    return all(name in names or getattr(module, name, None) is None for name in ("weight", "bias"))


def sequence(node: Node | None) -> list[Node]:
    """The modules one after the other; none where the model is no plain sequence."""
    if node is None:
        return []
    if type(node.module) is nn.Sequential:
        found = [sequence(child) for child in node.children]
        if all(found):
            return [child for part in found for child in part]
        return []
    return [] if node.children else [node]


def chain(problem: Problem, x: Tensor) -> list[Node]:
    """The model as Linear layers, all trained, and element-wise modules, for records x (S, n,
    *features); empty if it is no such chain.
    """
    flat = x.dim() == 3
    layers = []
    for node in sequence(read(problem)) if x.is_floating_point() and x.dim() >= 3 else ():
        if type(node.module) is nn.Flatten:
            flat = True
        elif type(node.module) in ELEMENTWISE or (flat and type(node.module) is nn.Linear):
            layers.append(node)
        else:
            return []
    if sorted(name for node in layers for name in node.names.values()) == sorted(problem.shapes):
        return layers
    return []
