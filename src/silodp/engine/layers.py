"""The layer rules of the ghost path: how a layer's outputs, and the norms and sums of per-record gradients, come from what flows through it.

Adding a layer type is one entry in RULES, made of pure functions; an activation is one entry in ELEMENTWISE. `clipping` drives them.
Axes are (S, J, features, n): silos, runs, features, records. Records come last, so that sums over few features vectorise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from silodp.core.problem.problem import Problem


class Term(NamedTuple):
    """One product e (x) a in a record's gradient: a (S, J or 1, f, n) a layer's input, e (S, J, h, n) the gradient by its output."""

    a: Tensor
    e: Tensor


Parameters = dict[str, Tensor]
"""A layer's parameters by its own names for them, each (S or 1, J, *shape)."""


class Rule(NamedTuple):
    """How a layer type takes part in the ghost path.

    A gradient is one term (a, e). A difference is the sum of two, (a1, De) and (Da, e2) with De = e1 - e2 and Da = a1 - a2, or of the first
    alone where both points see the same input; what does not depend on the input, as a bias, comes from the first term alone.
    """

    width: Callable[[nn.Module], int]
    """Numbers held for a record, for the memory limit."""
    forward: Callable[[Parameters, Tensor], Tensor]
    """The layer's outputs (S, J, h, n), newly made, for inputs (S, J or 1, f, n)."""
    backward: Callable[[Parameters, Tensor], Tensor]
    """The gradient by the inputs, newly made, from that by the outputs."""
    squares: Callable[[Parameters, list[Term]], tuple[Tensor, Tensor, list[Tensor]]]
    """In float64, (S, J or 1, n): squared norm of the sum of the terms, sum of their squared norms, squared norms of the inputs a."""
    contract: Callable[[Parameters, list[Term]], dict[str, Tensor]]
    """The sum over records of the terms, (S, J, *shape), by parameter name."""


def _linear_width(layer: nn.Module) -> int:
    assert isinstance(layer, nn.Linear)
    return layer.in_features + layer.out_features


def _linear_forward(p: Parameters, a: Tensor) -> Tensor:
    weight, bias = p["weight"], p.get("bias")
    silos, runs, (rows, columns) = a.shape[0], weight.shape[1], weight.shape[2:]
    if a.shape[1] > 1:
        z = torch.matmul(weight, a)
        return z if bias is None else z.add_(bias[..., None])
    stacked = weight.reshape(-1, runs * rows, columns).expand(silos, -1, -1)  # the same input for all runs: one product for all
    z = torch.bmm(stacked, a.squeeze(1)) if bias is None else torch.baddbmm(bias.reshape(-1, runs * rows, 1), stacked, a.squeeze(1))
    return z.view(silos, runs, rows, -1)


def _linear_backward(p: Parameters, e: Tensor) -> Tensor:
    weight = p["weight"].transpose(2, 3)
    if weight.shape[1] > 1:
        return torch.matmul(weight, e)
    return torch.bmm(weight.squeeze(1).expand(e.shape[0], -1, -1), e.squeeze(1))[:, None]


def _linear_squares(p: Parameters, terms: list[Term]) -> tuple[Tensor, Tensor, list[Tensor]]:
    if len(terms) == 1:
        aa, ee = (_square(u) for u in terms[0])
        square = ee * (aa + 1 if "bias" in p else aa)
        return square, square, [aa]
    (a, e), (b, f) = terms
    (aa, bb, ab), (ee, ff, ef) = _products(a, b), _products(e, f)
    size = (ee * (aa + 1 if "bias" in p else aa)).addcmul_(bb, ff)
    return torch.addcmul(size, ab, ef, value=2), size, [aa, bb]


def _linear_contract(p: Parameters, terms: list[Term]) -> dict[str, Tensor]:
    total = _outer(*terms[0])
    for term in terms[1:]:
        total += _outer(*term)
    return {"weight": total, "bias": terms[0].e.sum(-1)} if "bias" in p else {"weight": total}


def _outer(a: Tensor, e: Tensor) -> Tensor:
    """The sum over records of e (x) a, (S, J, h, f)."""
    if a.shape[1] > 1:
        return torch.matmul(e, a.transpose(2, 3))
    silos, runs, rows, records = e.shape
    return torch.bmm(e.reshape(silos, runs * rows, records), a.squeeze(1).transpose(1, 2)).view(silos, runs, rows, -1)


def kernels() -> Any:
    """The kernels for a GPU; Triton is there where there is one."""
    from silodp.engine import kernels

    return kernels


def _square(u: Tensor) -> Tensor:
    """||u||^2 over features, in float64 but for blocks of 64: of a float32 norm it misses 1e-7 as measured, and 2e-6 at most, in whatever
    order torch sums a block. What squares may have lost to underflow is added. (float64 throughout costs a fifth of the whole call.)
    """
    if u.is_cuda:
        return kernels().square(u).add_(u.shape[-2] * torch.finfo(u.dtype).tiny)
    if u.stride(-2) == 1:  # features side by side, as in records: no temporary, up to four times as fast
        first, *rest = (torch.linalg.vector_norm(block, dim=-1).double().square_() for block in u.transpose(-1, -2).split(64, -1))
    else:
        first, *rest = (block.sum(-2).double() for block in (u * u).split(64, -2))
    for block in rest:
        first += block
    return first.add_(u.shape[-2] * torch.finfo(u.dtype).tiny)


def _products(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """||u||^2, ||v||^2 and u.v over features in float64, where products of float32 numbers are exact: they are about to cancel."""
    if u.is_cuda:
        return kernels().products(u, v)
    u, v = u.double(), v.double()
    return (u * u).sum(-2), (v * v).sum(-2), (u * v).sum(-2)


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule(_linear_width, _linear_forward, _linear_backward, _linear_squares, _linear_contract),
}

ELEMENTWISE: set[type[nn.Module]] = {
    *(nn.CELU, nn.Dropout, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU),
    *(nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh),
}
"""Modules that act on each number alone, whatever the axes. (A Dropout that drops is refused by Problem.)"""


def activate(module: nn.Module, z: Tensor, owned: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """An element-wise module's outputs, and what its backward needs; it may overwrite z when that is `owned`."""
    if type(module) is nn.ReLU:
        a = z.relu_() if owned else z.relu()
        return a, (a, a)
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        a = module(leaf)
    return a.detach(), (leaf, a)


def deactivate(module: nn.Module, kept: tuple[Tensor, Tensor], e: Tensor) -> Tensor:
    """The gradient by the module's inputs from that by its outputs, which it may overwrite."""
    z, a = kept
    if type(module) is nn.ReLU:
        return torch.ops.aten.threshold_backward.grad_input(e, a, 0, grad_input=e)  # autograd's own, in place
    return torch.autograd.grad(a, z, e)[0]


class Layer(NamedTuple):
    module: nn.Module
    rule: Rule | None
    names: dict[str, str]
    """The model's name of each of the layer's parameters."""
    width: int


def chain(problem: Problem, x: Tensor) -> list[Layer]:
    """The model as a chain of layers that have a rule or act element-wise, for records x (S, n, *features); empty if it is no such chain.

    Types must match exactly: a subclass, a hook or a parametrisation may compute something else. So must the parameters: all used once.
    """
    layers: list[Layer] = []
    flat = x.dim() == 3
    for prefix, module in _leaves(problem.model):
        names = {name: prefix + name for name, parameter in module._parameters.items() if parameter is not None}
        if not plain(module):
            return []
        if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            flat = True
        elif type(module) in ELEMENTWISE:
            if getattr(module, "inplace", False):
                module = copy.copy(module)
                vars(module)["inplace"] = False
            layers.append(Layer(module, None, {}, 0))
        elif flat and (rule := RULES.get(type(module))) and owned(module, names):
            layers.append(Layer(module, rule, names, rule.width(module)))
        else:
            return []
    used = [name for layer in layers for name in layer.names.values()]
    return layers if x.is_floating_point() and x.dim() >= 3 and sorted(used) == sorted(problem.shapes) else []


def plain(module: nn.Module) -> bool:
    """Whether calling the module does what its type says and nothing else: no hooks, its own or everybody's, no forward of its own.

    What else it did would see all records at once, and could mix them.
    """
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return not (any(hooks) or _has_any_global_hook() or {"forward", "_call_impl", "__call__"} & vars(module).keys())


def owned(module: nn.Module, names: Container[str]) -> bool:
    """Whether the layer's weight and bias, where it has them, are parameters: as buffers they would be passed over."""
    return all(name in names or getattr(module, name, None) is None for name in ("weight", "bias"))


def _leaves(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    if type(module) is nn.Sequential and plain(module):
        for name, child in module._modules.items():  # named_children would leave out a module that is used twice
            assert child is not None
            yield from _leaves(child, f"{prefix}{name}.")
    else:
        yield prefix, module
