"""Sum clipped gradients of chains of Linear layers and element-wise activations.

A record's gradient is never built. In each layer it is an outer product e (x) a of the layer's
input a and the gradient e of the loss by its output. So its norm and the clipped sum follow from a
and e. (`c/native.c` is the same in C, for ReLU.) Axes are (S, J, features, n): silos, runs,
features, records. Records come last, so that sums over few features vectorise.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from silodp.core.differentiate import grad
from silodp.core.problem.problem import Problem
from silodp.engine.convolution import Parameters
from silodp.engine.model import Node, chain
from silodp.engine.task import Task, along, chunks, norms, scales


class Term(NamedTuple):
    """One product e (x) a in a record's gradient.

    a (S, J or 1, f, n) is a layer's input and e (S, J, h, n) the gradient by its output.

    A gradient is one term (a, e). A difference is the sum of two terms, (a1, De) and (Da, e2) with
    De = e1 - e2 and Da = a1 - a2. It is the first alone if both points see the same input. A part
    that does not depend on the input, such as a bias, comes from the first term alone.
    """

    a: Tensor
    e: Tensor


class Ghost:
    """Ghost norms in torch."""

    def supports(self, task: Task) -> bool:
        """Return whether the model is a chain of Linear layers and element-wise modules."""
        return bool(chain(task.problem, task.x))

    def sum(self, task: Task) -> Tensor:
        """Return the clipped sums (J, S, d)."""
        layers = chain(task.problem, task.x)
        chunk = task.chunk
        task = task.laid_out()
        size = task.bytes(
            4
            * sum(
                n.module.in_features + n.module.out_features
                for n in layers
                if isinstance(n.module, nn.Linear)
            )
        )
        out = task.points[0].new_zeros(*task.shape[:2], task.problem.dim)
        for j, s, n in chunks(task.shape, size, chunk, task.memory):
            points = [p[along(s, p.shape[0]), j] for p in task.points]
            weight = task.weight[s, along(j, task.weight.shape[1]), n]
            x = task.x[s, n].clone(memory_format=torch.contiguous_format)
            if task.limits is None:
                limits = None
            else:
                limits = task.limits[j]
            _add(
                task.problem,
                layers,
                points,
                x,
                task.y[s, n],
                weight,
                task.clips[j],
                out[j, s].transpose(0, 1),
                limits,
            )
        return out


def _add(
    problem: Problem,
    layers: list[Node],
    points: list[Tensor],
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    clips: Tensor,
    out: Tensor,
    limits: Tensor | None,
) -> None:
    """Add the clipped sums to out (S, J, d).

    points are (S or 1, J, d) and weight is (S, J or 1, n). x is overwritten.

    A product may round differently by where its factors are in memory. So unsound records are set
    to zero in place, and other records' sums keep every bit.
    """
    runs = points[0].shape[1]
    joined = points[0]
    if len(points) > 1:
        # The points follow each other on the axis of runs, so that one pass serves both.
        joined = torch.cat(points, 1)
    parameters = problem.split(joined)
    by_layer = [{name: parameters[full] for name, full in node.names.items()} for node in layers]
    inputs, slopes = _flow(problem, layers, by_layer, x.flatten(2).transpose(1, 2)[:, None], y)
    linear = [node.names for node in layers if type(node.module) is nn.Linear]
    if limits is not None:
        _limit(linear, inputs, slopes, limits)
    terms = [_terms(a, e, runs) for a, e in zip(inputs, slopes, strict=True)]
    by_layer_squares = [squares(names, t) for names, t in zip(linear, terms, strict=True)]
    squared, sizes, lengths = zip(*by_layer_squares, strict=True)
    if len(points) == 1:
        sizes = ()  # one term cannot cancel
    norm = norms(squared, sizes, x.dtype)
    scale, sound = scales(norm, [length for part in lengths for length in part], weight, clips)
    if sound is not None:
        for factor in (u for t in terms for term in t for u in term):
            _zero(factor, sound)
    views = problem.split(out)
    for names, t in zip(linear, terms, strict=True):
        for term in t:
            term.e.mul_(scale[:, :, None])
        for name, total in contract(names, t).items():
            views[names[name]].add_(total)


def _limit(
    linear: list[dict[str, str]], inputs: list[Tensor], slopes: list[Tensor], limits: Tensor
) -> None:
    """Shorten the gradients at both points to the limits (J, 1), by scaling their slopes.

    The points follow each other on the axis of runs.
    """
    norm = norms(
        [
            squares(names, [Term(a, e)])[0]
            for names, a, e in zip(linear, inputs, slopes, strict=True)
        ],
        [],
        slopes[0].dtype,
    )
    both = torch.cat([limits, limits])
    scale = (both / torch.maximum(norm, both)).to(slopes[0])
    for e in slopes:
        e.mul_(scale[:, :, None])


def _flow(
    problem: Problem, layers: list[Node], by_layer: list[Parameters], a: Tensor, y: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs of the Linear layers, and each record's gradients by their outputs."""
    inputs = []
    kept = []
    slopes = []
    owned = False
    for node, p in zip(layers, by_layer, strict=True):
        if linear := type(node.module) is nn.Linear:
            inputs.append(a)
            a = _forward(p, a)
        else:
            a, keep = _activate(node.module, a, owned)
            kept.append(keep)
        owned = linear
    e = _slope(problem, a, y)
    for node, p in zip(reversed(layers), reversed(by_layer), strict=True):
        if type(node.module) is not nn.Linear:
            e = _deactivate(node.module, kept.pop(), e)
            continue
        slopes.append(e)
        if len(slopes) == len(inputs):
            break
        e = _backward(p, e)
    return inputs, slopes[::-1]


def _terms(a: Tensor, e: Tensor, runs: int) -> list[Term]:
    """Return the terms of a layer whose outputs have `runs` runs.

    With a reference there are `runs` more behind them.
    """
    if e.shape[1] == runs:
        return [Term(a, e)]
    e2 = e[:, runs:]
    if a.shape[1] == 1:
        return [Term(a, e[:, :runs] - e2)]
    return [Term(a[:, :runs], e[:, :runs] - e2), Term(a[:, :runs] - a[:, runs:], e2)]


def _slope(problem: Problem, output: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of each record's loss by the model's outputs (S, J, k, n), in new
    memory.
    """
    if problem.slope:
        return problem.slope(output, y)
    by_record = vmap(grad(problem.record_loss), (-1, 0), -1)
    by_run = vmap(by_record, (0, None))
    by_silo = vmap(by_run)
    return by_silo(output, y).clone(memory_format=torch.contiguous_format)


def _zero(u: Tensor, sound: Tensor) -> None:
    """Write 0 for unsound records into u (S, J or 1, ., n).

    An input that all runs share is kept if it is sound in one.
    """
    if u.shape[1] != sound.shape[1]:
        sound = sound.any(1, keepdim=True)
    u.masked_fill_(~sound[:, :, None], 0)


# --- element-wise modules ------------------------------------------------------------------------


def _activate(module: nn.Module, z: Tensor, owned: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the module's outputs, and what its backward needs.

    It may overwrite z if z is `owned`.
    """
    if type(module) is nn.ReLU:
        if owned:
            a = z.relu_()
        else:
            a = z.relu()
        return a, (a, a)
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        a = module(leaf)
    return a.detach(), (leaf, a)


def _deactivate(module: nn.Module, kept: tuple[Tensor, Tensor], e: Tensor) -> Tensor:
    """Return the gradient by the module's inputs, from the gradient by its outputs.

    It may overwrite the latter.
    """
    z, a = kept
    if type(module) is nn.ReLU:
        # This is what autograd calls, but in place.
        return torch.ops.aten.threshold_backward.grad_input(e, a, 0, grad_input=e)
    return torch.autograd.grad(a, z, e)[0]


# --- Linear layers -------------------------------------------------------------------------------


def _forward(p: Parameters, a: Tensor) -> Tensor:
    """Return the layer's outputs (S, J, h, n) in new memory, for inputs (S, J or 1, f, n)."""
    weight = p["weight"]
    bias = p.get("bias")
    silos = a.shape[0]
    runs, rows, columns = weight.shape[1:]
    if a.shape[1] > 1:
        z = torch.matmul(weight, a)
        if bias is None:
            return z
        return z.add_(bias[..., None])
    # All runs have the same input, so one product serves all.
    stacked = weight.reshape(-1, runs * rows, columns).expand(silos, -1, -1)
    if bias is None:
        z = torch.bmm(stacked, a.squeeze(1))
    else:
        z = torch.baddbmm(bias.reshape(-1, runs * rows, 1), stacked, a.squeeze(1))
    return z.view(silos, runs, rows, -1)


def _backward(p: Parameters, e: Tensor) -> Tensor:
    """Return the gradient by the inputs in new memory, from the gradient by the outputs."""
    weight = p["weight"].transpose(2, 3)
    if weight.shape[1] > 1:
        return torch.matmul(weight, e)
    return torch.bmm(weight.squeeze(1).expand(e.shape[0], -1, -1), e.squeeze(1))[:, None]


def squares(names: Container[str], terms: list[Term]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return, in float64 and (S, J or 1, n), the squares that a norm is made of.

    These are the squared norm of the sum of the terms, the sum of their squared norms, and the
    squared norms of the inputs a.
    """
    bias = int("bias" in names)  # a bias is a weight whose input is 1
    if len(terms) == 1:
        aa, ee = (_square(u) for u in terms[0])
        square = ee * (aa + bias)
        return square, square, [aa]
    (a, e), (b, f) = terms
    aa, bb, ab = _products(a, b)
    ee, ff, ef = _products(e, f)
    size = (ee * (aa + bias)).addcmul_(bb, ff)
    return torch.addcmul(size, ab, ef, value=2), size, [aa, bb]


def contract(names: Container[str], terms: list[Term]) -> dict[str, Tensor]:
    """Return the sum over records of the terms, (S, J, *shape), by parameter name."""
    total = _outer(*terms[0])
    for term in terms[1:]:
        total += _outer(*term)
    if "bias" in names:
        return {"weight": total, "bias": terms[0].e.sum(-1)}
    return {"weight": total}


def _outer(a: Tensor, e: Tensor) -> Tensor:
    """Return the sum over records of e (x) a, (S, J, h, f)."""
    if a.shape[1] > 1:
        return torch.matmul(e, a.transpose(2, 3))
    silos, runs, rows, records = e.shape
    return torch.bmm(e.reshape(silos, runs * rows, records), a.squeeze(1).transpose(1, 2)).view(
        silos, runs, rows, -1
    )


def _square(u: Tensor) -> Tensor:
    """Return ||u||^2 over features, in float64 but for blocks of 64.

    Of a float32 norm it misses 1e-7 as measured, and at most 2e-6, in whatever order torch sums a
    block. What squares may have lost to underflow is added. (float64 throughout costs a fifth of
    the whole call.)
    """
    if u.stride(-2) == 1:
        # Features are side by side, so no temporary is needed: up to four times as fast.
        first, *rest = (
            torch.linalg.vector_norm(block, dim=-1).double().square_()
            for block in u.transpose(-1, -2).split(64, -1)
        )
    else:
        first, *rest = (block.sum(-2).double() for block in (u * u).split(64, -2))
    for block in rest:
        first += block
    return first.add_(u.shape[-2] * torch.finfo(u.dtype).tiny)


def _products(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ||u||^2, ||v||^2 and u.v over features, in float64.

    There, products of float32 numbers are exact. This matters because they are about to cancel.
    """
    u = u.double()
    v = v.double()
    return (u * u).sum(-2), (v * v).sum(-2), (u * v).sum(-2)
