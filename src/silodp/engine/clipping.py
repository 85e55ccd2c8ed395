"""Sums of clipped per-record gradients for many runs and silos at once: what every Grad and GradDiff query is computed by.

Three paths give the same numbers. The ghost path, for chains of Linear layers and element-wise activations, never materialises a record's
gradient: layer by layer it is an outer product e (x) a of the layer's input a and the gradient e of the loss by its output, so its norm
and the clipped sum follow from a and e (`native.c` is the same path in C, for ReLU). The structured path, for convolutional and sequence
models of known modules, takes a and e of a batch from one pass and makes each record's gradient of one layer from them. The fallback, for
every other model, differentiates each record alone.

Inside, the axes are (S, J, features, n): silos, runs, features, records. Records come last, so that sums over few features vectorise.
A norm is that of the very terms that are contributed; where terms can cancel, it is taken in float64 and their rounding is added to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from silodp.core.errors import BadInput
from silodp.core.numbers import Number
from silodp.core.problem.problem import Problem
from silodp.engine.layers import Layer, Parameters, Term, activate, chain, deactivate
from silodp.engine.native import sums as in_c
from silodp.engine.structured import Node, Part, parts, sequence, several, structure

CHUNK = 2**26
"""Bytes that the temporaries of one chunk of runs, or of records of one run in the structured path, take on a CPU: less is all
overhead, more falls out of the cache.
"""

LIMITS = {torch.float32: (1e15, 1e-19), torch.float64: (1e100, 1e-40)}
"""The longest layer input and the smallest clip that are told from infinite and 0: beyond them a product of two factors loses digits."""

# glibc hands freed blocks back to the system, and each call would fault its temporaries in again (1,600 pages for 25 silos of 300 records,
# a third of the time), until a block of nearly 32 MiB has once been freed: from then on it keeps them. The block is never touched.
torch.empty(2**25 - 2**13, dtype=torch.uint8)


def clipped_sum(
    problem: Problem,
    w: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    clip: Number,
    *,
    reference: Tensor | None = None,
    memory: int = 2**28,
    native: bool = False,
) -> Tensor:
    """For each run and silo the sum over records of weight * g * min(1, clip / ||g||), of shape (J, S, d).

    g is a record's whole gradient of f0 at w, all parameters as one vector, or with `reference` grad f0(w, x) - grad f0(reference, x).
    w is (J, d), or (J, S, d) where each silo has a point of its own; x (S, n, *features); y (S, n, *target); weight (S, n) or (J, S, n),
    0 for records that do not take part; clip a number or (J, 1), where inf clips nothing. Temporaries take about `memory` bytes. With
    `native` the chains that `native.c` knows are left to it.

    Formal guarantees: a record contributes a vector of norm <= clip * (1 + CLIP_TOLERANCE), and exactly zero where its gradient is zero
    or not finite, or clip is 0; a record of weight 0 may hold anything, NaN too, and changes nothing. What is beyond LIMITS counts as
    not finite, or 0.
    """
    points = [w] if reference is None else [w, reference]
    _refuse_unusable(points, x, y, weight, clip)
    layers, root, width = _path(problem, x)
    runs, silos, records = w.shape[0], x.shape[0], x.shape[1]
    clips = torch.as_tensor(clip, dtype=torch.float64, device=w.device).reshape(-1, 1)
    clips = torch.where(clips >= LIMITS[w.dtype][1], clips.clamp(max=1e300), 0).expand(runs, 1)
    if native and (sums := in_c(problem, layers or sequence(root), points, x, y, weight, clips, memory)) is not None:
        return sums
    points = [(p[None] if p.dim() == 2 else p.transpose(0, 1)).detach() for p in points]
    weight = (weight[:, None] if weight.dim() == 2 else weight.transpose(0, 1)).to(w.dtype)
    x = x.detach().to(w.dtype) if x.is_floating_point() else x
    if not bool(weight.all()):  # what padding holds must not stop the model or the loss, nor be seen by a product's rounding
        absent = ~weight.any(1)
        x, y = (t.masked_fill(absent.view(silos, records, *(1,) * (t.dim() - 2)), 0) for t in (x, y))

    out = w.new_zeros(runs, silos, problem.dim)
    size = width * len(points) * w.element_size()
    if root:
        _add_structured(problem, root, points, x, y, weight, clips, out, size, min(CHUNK, memory) if w.device.type == "cpu" else memory)
        return out
    chunk = min(CHUNK, memory) if layers and w.device.type == "cpu" else memory
    for j, s, n in _chunks(runs, silos, records, size, chunk, memory):
        part = [p[s if p.shape[0] > 1 else slice(None), j] for p in points]
        mask = weight[s, j if weight.shape[1] > 1 else slice(None), n]
        into = out[j, s].transpose(0, 1)
        if layers:
            _add_ghost(problem, layers, part, x[s, n].clone(memory_format=torch.contiguous_format), y[s, n], mask, clips[j], into)
        else:
            _add_records(problem, part, x[s, n], y[s, n], mask, clips[j], into)
    return out


def record_bytes(problem: Problem, x: Tensor, dtype: torch.dtype = torch.float32, *, difference: bool = False) -> int:
    """Bytes that the temporaries of `clipped_sum` take for one record of x (S, n, *features) in one run."""
    return _path(problem, x)[2] * (1 + difference) * dtype.itemsize


def records_at_once(problem: Problem, x: Tensor, silos: int, records: int, *, difference: bool = False, memory: int = 2**28) -> int:
    """How many of silos x records records like those of x one chunk of `clipped_sum` holds, for one run in float32 on a CPU."""
    small = min(CHUNK, memory) if _path(problem, x)[1] else memory
    size = record_bytes(problem, x, difference=difference)
    _, s, n = next(_chunks(1, silos, records, size, small, small))
    return min(s.stop, silos) * min(n.stop, records)


def modules(problem: Problem, x: Tensor) -> Sequence[Layer | Node]:
    """The model as a plain sequence of modules whose types are known; none if it is not one."""
    layers, root, _ = _path(problem, x)
    return layers or sequence(root)


def _path(problem: Problem, x: Tensor) -> tuple[list[Layer], Node | None, int]:
    """The model as a chain, or else as a structure, or neither for the fallback; and the numbers held for a record."""
    if layers := chain(problem, x):
        return layers, None, sum(layer.width for layer in layers) * 4
    if found := structure(problem, x):
        return [], *found
    return [], None, problem.dim * 3


# --- the ghost path ----------------------------------------------------------------------------------------------------------------


def _add_ghost(
    problem: Problem, layers: list[Layer], points: list[Tensor], x: Tensor, y: Tensor, weight: Tensor, clips: Tensor, out: Tensor
) -> None:
    """Adds the clipped sums to out (S, J, d); points are (S or 1, J, d), weight (S, J or 1, n); x is overwritten.

    A product may round by where its factors lie, so unsound records are zeroed where they are: other records' sums keep every bit.
    """
    runs = points[0].shape[1]
    parameters = problem.split(points[0] if len(points) == 1 else torch.cat(points, 1))
    own = [{name: parameters[full] for name, full in layer.names.items()} for layer in layers]
    inputs, slopes = _flow(problem, layers, own, x.flatten(2).transpose(1, 2)[:, None], y)
    ruled = [(layer.rule, layer.names, p) for layer, p in zip(layers, own, strict=True) if layer.rule]
    terms = [_terms(a, e, runs) for a, e in zip(inputs, slopes, strict=True)]
    squares, sizes, lengths = zip(*(rule.squares(p, t) for (rule, _, p), t in zip(ruled, terms, strict=True)), strict=True)
    norm = _norm(squares, sizes if len(points) > 1 else [], x.dtype)
    scale, sound = _scale(norm, [length for part in lengths for length in part], weight, clips)
    if sound is not None:
        for factor in (u for t in terms for term in t for u in term):
            _zero(factor, sound)
    views = problem.split(out)
    for (rule, names, p), t in zip(ruled, terms, strict=True):
        for term in t:
            term.e.mul_(scale[:, :, None])
        for name, total in rule.contract(p, t).items():
            views[names[name]].add_(total)


def _flow(problem: Problem, layers: list[Layer], own: list[Parameters], a: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The inputs of the layers that have a rule, and the gradients of each record's loss by their outputs."""
    inputs, kept, slopes = [], [], []
    owned = False
    for (module, rule, _, _), p in zip(layers, own, strict=True):
        if rule is None:
            a, keep = activate(module, a, owned)
            kept.append(keep)
        else:
            inputs.append(a)
            a = rule.forward(p, a)
        owned = rule is not None
    e = _slope(problem, a, y)
    for (module, rule, _, _), p in zip(reversed(layers), reversed(own), strict=True):
        if rule is None:
            e = deactivate(module, kept.pop(), e)
        else:
            slopes.append(e)
            if len(slopes) == len(inputs):
                break
            e = rule.backward(p, e)
    return inputs, slopes[::-1]


def _terms(a: Tensor, e: Tensor, runs: int) -> list[Term]:
    """The terms of a layer whose outputs have `runs` runs, or a second `runs` for the reference behind them."""
    if e.shape[1] == runs:
        return [Term(a, e)]
    e2 = e[:, runs:]
    if a.shape[1] == 1:
        return [Term(a, e[:, :runs] - e2)]
    return [Term(a[:, :runs], e[:, :runs] - e2), Term(a[:, :runs] - a[:, runs:], e2)]


def _slope(problem: Problem, output: Tensor, y: Tensor) -> Tensor:
    """The gradient of each record's loss by the model's outputs (S, J, k, n), newly made."""
    if problem.slope:
        return problem.slope(output, y)
    return vmap(vmap(vmap(grad(problem.record_loss), (-1, 0), -1), (0, None)))(output, y).clone(memory_format=torch.contiguous_format)


def _total(parts: Iterable[Tensor]) -> Tensor:
    first, *rest = parts
    for part in rest:
        first = first + part
    return first


# --- the structured path -----------------------------------------------------------------------------------------------------------


def _add_structured(
    problem: Problem,
    root: Node,
    points: list[Tensor],
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    clips: Tensor,
    out: Tensor,
    size: int,
    memory: int,
) -> None:
    """Adds the clipped sums to out (J, S, d), at `size` bytes for a record; points are (S or 1, J, d), weight (S, J or 1, n)."""
    runs, own, constants = len(clips), points[0].shape[0] > 1, problem.constants(points[0])
    together = several(problem, root)
    for group in [range(runs)] if weight.shape[1] == 1 else [range(j, j + 1) for j in range(runs)]:
        mask = weight[:, group[0] if weight.shape[1] > 1 else 0]
        order = _first(mask)
        silos, records = order.shape
        for _, s, n in _chunks(1, silos, records, size, memory, memory):
            for silo in [slice(i, i + 1) for i in range(silos)[s]] if own and not together else [s]:
                chosen = order[silo, n]
                rows = torch.arange(silos, device=x.device)[silo, None]
                scale = mask[rows, chosen]
                features, target = (
                    t[rows, chosen].masked_fill_((scale == 0).view(*scale.shape, *(1,) * (t.dim() - 2)), 0).flatten(0, 1) for t in (x, y)
                )
                shared: dict[nn.Module, Tensor] = {}
                for j in group:
                    here = [p[silo if own else slice(None), j].squeeze(0) for p in points]  # one point, or one for each silo
                    _add_parts(problem, parts(problem, root, here, constants, features, target, shared), scale, clips[j], out[j, silo])


def _first(mask: Tensor) -> Tensor:
    """For each silo of mask (S, n) the places of its records of weight other than 0, before others to fill up to the longest, (S, m)."""
    there = mask != 0
    return there.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : int(there.sum(1).max())]


def _add_parts(problem: Problem, found: list[tuple[dict[str, str], Part]], weight: Tensor, clips: Tensor, out: Tensor) -> None:
    """Adds the clipped sums of one run to out (S, d), for records of weight (S, n)."""
    squares, sizes, lengths = zip(*(part.squares() for _, part in found), strict=True)
    norm = _norm(squares, [size for size in sizes if size is not None], weight.dtype)
    lengths = [length.view_as(weight)[:, None] for length in (norm.square(), *(length for part in lengths for length in part))]
    scale, sound = _scale(norm.view_as(weight)[:, None], lengths, weight[:, None], clips)
    views = problem.split(out)
    for names, part in found:
        part.add(scale.squeeze(1), sound, {name: views[full] for name, full in names.items()})


# --- the fallback: each record alone -----------------------------------------------------------------------------------------------


def _add_records(problem: Problem, points: list[Tensor], x: Tensor, y: Tensor, weight: Tensor, clips: Tensor, out: Tensor) -> None:
    gradients = _record_gradients(problem, points, x, y)
    norm = torch.linalg.vector_norm(gradients, dim=-1, dtype=torch.float64)
    scale, sound = _scale(norm, [norm.square()], weight, clips)
    sound = torch.ones_like(scale, dtype=torch.bool) if sound is None else sound
    gradients = torch.where(sound[..., None], gradients, 0)  # always, so that what a product reads lies the same way
    out += torch.matmul(scale[:, :, None], gradients).squeeze(2)


def _record_gradients(problem: Problem, points: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The gradients (S, J, n, d), or their differences between two points: every record is a batch of one, so none can mix."""
    constants = problem.constants(points[0])

    def loss(w: Tensor, record: Tensor, target: Tensor) -> Tensor:
        return problem.record_loss(functional_call(problem.model, problem.split(w) | constants, (record[None],))[0], target)

    def gradients(w: Tensor) -> Tensor:
        records = vmap(grad(loss), (None, 0, 0))
        if len(w) > 1:  # a point for each silo
            return vmap(vmap(records, (0, None, None)))(w, x, y)
        flat = x.flatten(0, 1), y.flatten(0, 1)
        found = records(w[0, 0], *flat)[None] if w.shape[1] == 1 else vmap(records, (0, None, None))(w[0], *flat)
        return found.unflatten(1, y.shape[:2]).transpose(0, 1)

    found = gradients(points[0])
    return found if len(points) == 1 else found - gradients(points[1])


# --- shared ----------------------------------------------------------------------------------------------------------------


def _norm(squares: Iterable[Tensor], sizes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Norms from the layers' squares; `sizes` are those of terms that may cancel, whose rounding, a few ulps, is contributed all the same."""
    square = _total(squares)
    if not sizes:
        return square.sqrt_()
    size = _total(sizes)
    return torch.add(square, size, alpha=1e-13).clamp_(min=0).sqrt_().add_(size.sqrt(), alpha=8 * torch.finfo(dtype).eps)


def _scale(norm: Tensor, lengths: list[Tensor], weight: Tensor, clips: Tensor) -> tuple[Tensor, Tensor | None]:
    """weight * min(1, clips / norm), (S, J, n), 0 for unsound records; and which are sound, or None when all are.

    Unsound is a record whose norm, or one of whose squared `lengths`, is not finite or beyond LIMITS; and each where the clip is 0.
    """
    tiny, (longest, smallest) = torch.finfo(weight.dtype).tiny, LIMITS[weight.dtype]
    scale = clips / torch.maximum(norm, clips.clamp(min=smallest))
    # to look at numbers is to wait for a GPU, so there they are masked unseen
    if not scale.is_cuda and bool(scale.amin() >= tiny) and all(bool(length.amax() < longest**2) for length in lengths):
        return scale.to(weight.dtype).mul_(weight), None
    sound = scale >= tiny
    for length in lengths:
        sound &= length < longest**2
    return torch.where(sound, scale, 0).to(weight.dtype).mul_(weight), sound


def _zero(u: Tensor, sound: Tensor) -> None:
    """Writes 0 for unsound records into u (S, J or 1, ., n); an input shared by all runs is kept where it is sound in one."""
    u.masked_fill_(~(sound if u.shape[1] == sound.shape[1] else sound.any(1, keepdim=True))[:, :, None], 0)


def _chunks(runs: int, silos: int, records: int, size: int, chunk: int, memory: int) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of runs, silos and records, at `size` bytes for a record: whole runs to fill `chunk` bytes, else what `memory` holds."""
    fit = max(1, memory // size)
    steps = (1, max(1, min(silos, fit // max(1, records))), max(1, math.ceil(records / math.ceil(max(1, records) / fit))))
    if fit >= silos * records:
        steps = (max(1, chunk // (size * max(1, silos * records))), max(1, silos), max(1, records))
    for j in range(0, runs, steps[0]):
        for s in range(0, silos, steps[1]):
            for n in range(0, records, steps[2]):
                yield slice(j, j + steps[0]), slice(s, s + steps[1]), slice(n, n + steps[2])


def _refuse_unusable(points: list[Tensor], x: Tensor, y: Tensor, weight: Tensor, clip: Number) -> None:
    w, (runs, silos, records) = points[0], (points[0].shape[0], *x.shape[:2])
    if w.dtype not in LIMITS:
        raise BadInput(f"w is {w.dtype}; use float32 or float64")
    if w.dim() not in (2, 3) or w.shape[1:-1] not in ((), (silos,)):
        raise BadInput(f"w has shape {tuple(w.shape)}; use (runs, parameters), or (runs, {silos} silos, parameters)")
    if points[-1].shape != w.shape:
        raise BadInput(f"reference has shape {tuple(points[-1].shape)}; use that of w, {tuple(w.shape)}")
    if y.shape[:2] != (silos, records) or weight.shape not in ((silos, records), (runs, silos, records)):
        raise BadInput(f"y and weight have shapes {tuple(y.shape)} and {tuple(weight.shape)}; use ({silos}, {records}) as x has")
    if isinstance(clip, Tensor):
        if clip.numel() not in (1, runs):
            raise BadInput(f"clip has shape {tuple(clip.shape)}; use a number, or one for each run in shape ({runs}, 1)")
    elif math.isnan(clip) or clip < 0:
        raise BadInput(f"clip is {clip}; use a number >= 0, or inf for no clipping")
    if torch.get_float32_matmul_precision() != "highest" or torch.is_autocast_enabled(w.device.type):
        raise BadInput("matrix products are set to reduced precision, which breaks clipping; use 'highest' and no autocast")
