"""The structured path: per-record gradients of convolutional and sequence models, with all records of a chunk in one pass.

A layer's gradient is bilinear in a factor u of its input (the input itself, its patches, its normalised form) and the gradient e of the loss
by its output. One pass over the batch gives both for every layer. Only modules whose type is known exactly take part, as only of those it
is known that they treat each record alone; `clipping` sends every other model through its fallback.

Axes are (B, ...): the records of S silos, one silo after the other. Adding a layer type is one entry in STRUCTURED.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from silodp.core.problem.problem import Problem
from silodp.engine.blocks import MeanPool, Residual, SelfAttention
from silodp.engine.convolution import by_kernel, conv_factor, conv_forward, conv_gradients, conv_known, max_pool, pair
from silodp.engine.layers import ELEMENTWISE, RULES, Parameters, Term, owned, plain

# --- what a layer contributes ------------------------------------------------------------------------------------------------------


class Part(Protocol):
    """A layer's share of each record's gradient."""

    def squares(self) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """(B,) in float64: squared norms; sums of squared norms of terms that may cancel, if any; and other squares that must be finite."""
        ...

    def add(self, scale: Tensor, sound: Tensor | None, out: dict[str, Tensor]) -> None:
        """Adds the sums over each silo's sound records, scaled by scale (S, n), to out's (S, *shape); may overwrite what the part holds.

        A product may round by where its factors lie: they lie the same way whether or not a record is unsound, so others' sums keep every bit.
        """
        ...


class Whole:
    """Each record's gradient by each parameter, (B, *shape), newly made; its axes may lie in memory in any order."""

    def __init__(self, gradients: dict[str, Tensor]) -> None:
        self.axes = {name: sorted(range(1, g.dim()), key=lambda axis, g=g: -g.stride(axis)) for name, g in gradients.items()}
        self.gradients = {name: g.permute(0, *self.axes[name]).flatten(1) for name, g in gradients.items()}

    def squares(self) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        return torch.stack([_square(g) for g in self.gradients.values()]).sum(0), None, []

    def add(self, scale: Tensor, sound: Tensor | None, out: dict[str, Tensor]) -> None:
        for name, g in self.gradients.items():
            if sound is not None:
                g.masked_fill_(~sound.view(-1, 1), 0)
            total = torch.bmm(scale[:, None], g.unflatten(0, scale.shape))
            into = out[name].permute(0, *self.axes[name])
            into.add_(total.view(into.shape))


class Outer:
    """A Linear layer on plain vectors: e (x) u is never made, as in the ghost path, whose rule does the sums."""

    def __init__(self, terms: list[Term], names: Any) -> None:
        self.terms, self.names = terms, names

    def squares(self) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        if len(self.terms) == 1:
            uu, ee = (_square(t) for t in self.terms[0])
            return ee * (uu + 1 if "bias" in self.names else uu), None, [uu]
        square, size, lengths = RULES[nn.Linear].squares(self.names, [Term(u.t()[None, None], e.t()[None, None]) for u, e in self.terms])
        return square.flatten(), size.flatten(), [length.flatten() for length in lengths]

    def add(self, scale: Tensor, sound: Tensor | None, out: dict[str, Tensor]) -> None:
        terms = []
        for u, e in self.terms:
            e = e * scale.view(-1, 1)
            if sound is not None:  # u is shared with other runs; a clone has its strides
                u, e = (t.masked_fill_(~sound.view(-1, 1), 0) for t in (u.clone(), e))
            terms.append(Term(*(t.unflatten(0, scale.shape).transpose(1, 2)[:, None] for t in (u, e))))
        for name, total in RULES[nn.Linear].contract(self.names, terms).items():
            if name in out:
                out[name].add_(total.squeeze(1))


class Tokens:
    """An Embedding: for each record one row of gradient for each token that it holds, however often."""

    def __init__(self, layer: nn.Embedding, tokens: Tensor, e: Tensor) -> None:
        if layer.padding_idx is not None:
            e = e.masked_fill((tokens == layer.padding_idx)[..., None], 0)
        self.records, table = len(tokens), layer.num_embeddings
        place = tokens.flatten(1) + table * torch.arange(self.records, device=tokens.device)[:, None]
        places, row = place.flatten().unique(return_inverse=True)
        self.record, self.token = places // table, places % table
        self.rows = e.new_zeros(len(places), layer.embedding_dim).index_add_(0, row, e.reshape(-1, layer.embedding_dim))

    def squares(self) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        square = _square(self.rows)
        return square.new_zeros(self.records).index_add_(0, self.record, square), None, []

    def add(self, scale: Tensor, sound: Tensor | None, out: dict[str, Tensor]) -> None:
        rows = self.rows * scale.flatten()[self.record, None]
        if sound is not None:
            rows.masked_fill_(~sound.flatten()[self.record, None], 0)
        out["weight"].index_put_((self.record // scale.shape[1], self.token), rows, accumulate=True)


def _square(g: Tensor) -> Tensor:
    """||g||^2 of each row (B, d) in float64; of long rows but for blocks of 64, as in `layers`, with what their squares lose added."""
    if g.shape[1] < 1024:
        return torch.linalg.vector_norm(g, dim=1, dtype=torch.float64).square_()
    whole = g.shape[1] // 64 * 64
    total = torch.linalg.vector_norm(g[:, :whole].unflatten(1, (-1, 64)), dim=2).double().square_().sum(1)
    if whole < g.shape[1]:
        total += torch.linalg.vector_norm(g[:, whole:], dim=1, dtype=torch.float64).square_()
    return total.add_(g.shape[1] * torch.finfo(g.dtype).tiny)


# --- the layers --------------------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """How a layer type takes part."""

    known: Callable[..., bool]
    """(module, number of axes of its input): whether its settings are covered, and it treats each record alone."""
    factor: Callable[..., Tensor]
    """(module, input) to u."""
    forward: Callable[..., Tensor]
    """(module, parameters, input, u) to the output, newly made; parameters (S, *shape) where `several` and each silo has a point of its own."""
    part: Callable[..., Part]
    """(module, terms, names of the parameters to train) to what the layer contributes.

    A gradient is one term (u, e). A difference is the sum of two, (u1, De) and (Du, e2), or of the first alone where both points see the
    same input; what does not depend on the input, as a bias, comes from the first term alone.
    """
    several: bool = False


def _whole(weight: Callable[..., Tensor], bias: Callable[..., Tensor]) -> Callable[..., Part]:
    """The rule of a layer whose gradients by weight and bias are (module, u, e) and (module, e) to (B, *shape)."""

    def part(layer: nn.Module, terms: list[Term], names: set[str]) -> Part:
        found = {}
        if "weight" in names:
            found["weight"] = weight(layer, *terms[0])
            for term in terms[1:]:
                found["weight"] += weight(layer, *term)
        if "bias" in names:
            found["bias"] = bias(layer, terms[0].e)
        return Whole(found)

    return part


def _linear_forward(layer: nn.Linear, p: Parameters, a: Tensor, u: Tensor) -> Tensor:
    weight, bias = p["weight"], p.get("bias")
    if weight.dim() == 2:
        return functional.linear(a, weight, bias)
    z = torch.bmm(a.reshape(len(weight), -1, a.shape[-1]), weight.transpose(1, 2))
    return (z if bias is None else z + bias[:, None]).reshape(*a.shape[:-1], -1)


def _linear_gradients(layer: nn.Linear, u: Tensor, e: Tensor) -> Tensor:
    return torch.bmm(e.flatten(1, -2).transpose(1, 2), u.flatten(1, -2))


def _group_norm_forward(layer: nn.GroupNorm, p: Parameters, a: Tensor, u: Tensor) -> Tensor:
    return _affine(layer, {name: q.view(-1, *(1,) * (a.dim() - 2)) for name, q in p.items()}, a, u)


def _affine(layer: nn.Module, p: Parameters, a: Tensor, u: Tensor) -> Tensor:
    z = u * p["weight"] if "weight" in p else u.clone()
    return z + p["bias"] if "bias" in p else z


def _embedding_known(layer: nn.Embedding, axes: int) -> bool:
    return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse


def _embedding_forward(layer: nn.Embedding, p: Parameters, a: Tensor, u: Tensor) -> Tensor:
    return functional.embedding(a, p["weight"])


def _sum_middle(layer: nn.Linear, e: Tensor) -> Tensor:
    return e.flatten(1, -2).sum(1) if e.dim() > 2 else e.clone()


def _sum_places(layer: nn.Conv2d | nn.GroupNorm, e: Tensor) -> Tensor:
    return e.flatten(2).sum(2) if e.dim() > 2 else e.clone()


def _sum_rows(layer: nn.LayerNorm, e: Tensor) -> Tensor:
    return e.reshape(len(e), -1, *layer.normalized_shape).sum(1)


def _linear_part(layer: nn.Linear, terms: list[Term], names: set[str]) -> Part:
    plain = terms[0].e.dim() == 2 and "weight" in names
    return Outer(terms, names) if plain else _whole(_linear_gradients, _sum_middle)(layer, terms, names)


def _embedding_part(layer: nn.Embedding, terms: list[Term], names: set[str]) -> Part:
    return Tokens(layer, *terms[0])


STRUCTURED: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule(lambda layer, axes: axes >= 2, lambda layer, a: a, _linear_forward, _linear_part, several=True),
    nn.Conv2d: Rule(conv_known, conv_factor, conv_forward, _whole(conv_gradients, _sum_places), several=True),
    nn.LayerNorm: Rule(
        lambda layer, axes: axes > len(layer.normalized_shape),
        lambda layer, a: functional.layer_norm(a, layer.normalized_shape, eps=layer.eps),
        _affine,
        _whole(lambda layer, u, e: _sum_rows(layer, u * e), _sum_rows),
    ),
    nn.GroupNorm: Rule(
        lambda layer, axes: axes >= 2,
        lambda layer, a: functional.group_norm(a, layer.num_groups, eps=layer.eps),
        _group_norm_forward,
        _whole(lambda layer, u, e: _sum_places(layer, u * e), _sum_places),
    ),
    nn.Embedding: Rule(_embedding_known, lambda layer, a: a, _embedding_forward, _embedding_part),
}

AXES: dict[type[nn.Module], int] = {nn.MaxPool2d: 4, nn.AvgPool2d: 4, nn.AdaptiveAvgPool2d: 4, SelfAttention: 3, MeanPool: 3}
"""Modules without parameters that treat each record alone, on inputs of that many axes. (Those of ELEMENTWISE do on any.)"""


# --- the model ---------------------------------------------------------------------------------------------------------------------


class Node(NamedTuple):
    """A module of the model, with what it is made of."""

    module: nn.Module
    rule: Rule | None = None
    names: dict[str, str] = {}  # noqa: RUF012 (never written to)
    """The model's name of each of the layer's parameters."""
    children: tuple[Node, ...] = ()


class Tap(NamedTuple):
    """What one pass leaves of a layer: the factor u of its input, and its output z."""

    node: Node
    u: Tensor
    z: Tensor


def structure(problem: Problem, x: Tensor) -> tuple[Node, int] | None:
    """The model and the numbers that a pass holds for a record of x (S, n, *features), if every module is known; else None.

    Types must match exactly: a subclass, a hook or a parametrisation may compute something else. So must the parameters: all used once.
    """
    used: list[str] = []
    root = _node(problem.model, "", used)
    if root is None or sorted(used) != sorted(name for name, _ in problem.model.named_parameters()):
        return None
    layers = [module for _, module in problem.model.named_modules(remove_duplicate=False) if type(module) in STRUCTURED]
    if len(set(layers)) < len(layers):
        return None
    key = x.shape[2:], x.dtype, x.device.type
    widths = _WIDTHS.setdefault(problem, {})
    if key not in widths:
        widths[key] = _width(problem, root, x)
    width = widths[key]
    return None if width is None else (root, width)


def sequence(node: Node | None) -> list[Node]:
    """The modules one after the other; none where the model is no plain sequence."""
    if node is None:
        return []
    if type(node.module) is nn.Sequential:
        parts = [sequence(child) for child in node.children]
        return [child for part in parts for child in part] if all(parts) else []
    return [] if node.children else [node]


def several(problem: Problem, node: Node) -> bool:
    """Whether a pass can have a point for each silo: not where a layer has trained and frozen parameters side by side."""
    fits = node.rule is None or (node.rule.several and len({full in problem.shapes for full in node.names.values()}) == 1)
    return fits and all(several(problem, child) for child in node.children)


def _node(module: nn.Module, prefix: str, used: list[str]) -> Node | None:
    if not plain(module):
        return None
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if type(module) in (nn.Sequential, Residual):
        children = [_node(child, f"{prefix}{name}.", used) for name, child in module._modules.items() if child is not None]
        known = _pooled_first([child for child in children if child is not None])
        return Node(module, children=known) if len(known) == len(children) and not own else None
    if rule := STRUCTURED.get(type(module)):
        used += [prefix + name for name in own]
        fits = set(own) <= {"weight", "bias"} and owned(module, own)
        return Node(module, rule, {name: prefix + name for name in own}) if fits else None
    if type(module) in ELEMENTWISE:
        if getattr(module, "inplace", False):
            module = copy.copy(module)
            vars(module)["inplace"] = False
        return Node(module)
    flatten = type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    flatten |= type(module) is nn.Unflatten and module.dim == 1
    return Node(module) if (flatten or type(module) in AXES) and not getattr(module, "return_indices", False) else None


def _pooled_first(nodes: list[Node]) -> tuple[Node, ...]:
    """The chain with each ReLU behind a MaxPool2d that follows it, where it has fewer numbers to go through.

    Outputs and gradients are the same to the last bit, as ReLU keeps order: where the maximum is positive the pool chooses the same place,
    and where it is not the gradient is 0. (A window of padding alone would give -inf, so there must be none.)
    """
    for i in range(len(nodes) - 1):
        pool = nodes[i + 1].module
        if type(nodes[i].module) is nn.ReLU and type(pool) is nn.MaxPool2d and not pool.ceil_mode and not any(pair(pool.padding)):
            nodes[i : i + 2] = nodes[i + 1], nodes[i]
    return tuple(nodes)


_WIDTHS: WeakKeyDictionary[Problem, dict[Any, int | None]] = WeakKeyDictionary()
"""What `_width` found, which takes as long as some tens of records."""


class _Unknown(Exception):
    """A known module on an input whose axes it would mix."""


def _width(problem: Problem, root: Node, x: Tensor) -> int | None:
    """Numbers held for a record while its gradient is taken, from passes without data; None if a module is given axes it might mix.

    One record, two and three: every output must have their number as its first axis and nowhere else, so that nothing is broadcast from
    one record over others, and what a lone record would be refused is refused to all.
    """
    nothing = torch.empty(problem.dim, device="meta", dtype=torch.float32)
    passes = [Pass(problem, nothing, problem.constants(nothing), {}) for _ in range(3)]
    try:
        for number, run in enumerate(passes, 1):
            run.through(root, torch.empty(number, *x.shape[2:], device="meta", dtype=torch.float32 if x.is_floating_point() else x.dtype))
            if any(shape[:1] != (number,) for shape in run.shapes) or [s[1:] for s in run.shapes] != [s[1:] for s in passes[0].shapes]:
                return None
    except (_Unknown, ValueError, RuntimeError, IndexError):  # the fallback says what is wrong, if anything is
        return None
    run = passes[1]
    held = run.made  # of two records: each output once and its gradient once
    for (module, _, names, _), u, z in run.taps:
        if type(module) is nn.Conv2d:
            held += u.numel() // 2 // (module.kernel_size[1] if by_kernel(x) else 1)
        if not (type(module) is nn.Embedding or (type(module) is nn.Linear and z.dim() == 2)):
            held += sum(problem.shapes[full].numel() for full in names.values() if full in problem.shapes)
    return held


# --- one pass ----------------------------------------------------------------------------------------------------------------------


class Pass:
    """The model at one point w (d,), or one for each silo (S, d), over records (B, ...), with a tap at each layer that has parameters to train.

    `shared` keeps, for further points and the same records, the factors of inputs that depend on no such parameter.
    """

    def __init__(self, problem: Problem, w: Tensor, constants: Parameters, shared: dict[nn.Module, Tensor]) -> None:
        self.trained, self.shared = problem.split(w), shared
        self.parameters = self.trained | constants
        self.taps: list[Tap] = []
        self.made = 0
        """Numbers in the outputs so far."""
        self.shapes: list[torch.Size] = []
        """Of every module's output."""

    def through(self, node: Node, a: Tensor) -> Tensor:
        """The output of a node for the input a."""
        z = self._through(node, a)
        self.shapes.append(z.shape)
        return z

    def _through(self, node: Node, a: Tensor) -> Tensor:
        module, rule = node.module, node.rule
        if isinstance(module, nn.Sequential):
            z = a
            for child in node.children:
                z = self.through(child, z)
            if type(module) is Residual and z.dim() != a.dim():
                raise _Unknown
            return a + z if type(module) is Residual else z
        if rule is None:
            if AXES.get(type(module), a.dim()) != a.dim():
                raise _Unknown
            z = max_pool(module, a) if type(module) is nn.MaxPool2d else module(a)
            self.made += z.numel()
            return z
        if not rule.known(module, a.dim()):
            raise _Unknown
        u = self.shared.get(module)
        if u is None:
            u = rule.factor(module, a)
            if not a.requires_grad:
                self.shared[module] = u
        z = rule.forward(module, {name: self.parameters[full] for name, full in node.names.items()}, a, u)
        if any(full in self.trained for full in node.names.values()):
            self.taps.append(Tap(node, u.detach() if u.requires_grad else u, z if z.requires_grad else z.requires_grad_()))
        self.made += z.numel()
        return z


def parts(
    problem: Problem, root: Node, points: list[Tensor], constants: Parameters, x: Tensor, y: Tensor, shared: dict[nn.Module, Tensor]
) -> list[tuple[dict[str, str], Part]]:
    """For each layer that trains, the model's names of its parameters and what it contributes: gradients at one point, or differences."""
    passes = []
    for w in points:
        run = Pass(problem, w, constants, shared)
        with torch.enable_grad():
            output = run.through(root, x)
        slopes = torch.autograd.grad(output, [tap.z for tap in run.taps], _slope(problem, output.detach(), y))
        passes.append([(tap.node, Term(tap.u, e)) for tap, e in zip(run.taps, slopes, strict=True)])
    found = []
    for layer in zip(*passes, strict=True):
        node, terms = layer[0][0], [term for _, term in layer]
        names = {name: full for name, full in node.names.items() if full in problem.shapes}
        assert node.rule is not None
        found.append((names, node.rule.part(node.module, _terms(*terms), set(names))))
    return found


def _slope(problem: Problem, output: Tensor, y: Tensor) -> Tensor:
    """The gradient of each record's loss by the model's outputs."""
    if problem.slope and output.dim() == 2:
        return problem.slope(output.t()[None, None], y[None])[0, 0].t()
    return vmap(grad(problem.record_loss))(output, y)


def _terms(one: Term, other: Term | None = None) -> list[Term]:
    """A gradient's term, or a difference's, whose norm does not cancel."""
    if other is None:
        return [one]
    rise = one.e - other.e
    return [Term(one.a, rise)] if one.a is other.a else [Term(one.a, rise), Term(one.a - other.a, other.e)]
