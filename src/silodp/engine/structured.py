"""Sum clipped gradients of convolutional and sequence models of known modules.

All records of a chunk take one pass. A layer's gradient is bilinear in a factor u of its input (the
input itself, its patches, its normalised form) and the gradient e of the loss by its output. One
pass over the batch gives both for every layer, and `rules` gives what the layer contributes. Axes
are (B, ...): the records of S silos, one silo after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap

from silodp.core.differentiate import grad
from silodp.core.problem.problem import Problem
from silodp.engine.convolution import Parameters, max_pool
from silodp.engine.ghost import Term
from silodp.engine.model import AXES, Node, Residual, read
from silodp.engine.rules import RULES, Part
from silodp.engine.task import Task, along, norms, scales


class Structured:
    """One pass over known modules in torch."""

    def supports(self, task: Task) -> bool:
        """Return whether all modules of the model are known."""
        return task.limits is None and numbers(task.problem, task.x) is not None

    def sum(self, task: Task) -> Tensor:
        """Return the clipped sums (J, S, d)."""
        if task.points[0].device.type == "cpu":
            threads = torch.get_num_threads()
        else:
            threads = 1
        fit = min(task.chunk, task.memory // threads) // task.bytes(
            numbers(task.problem, task.x) or 1
        )
        work = _Work(task.laid_out())
        jobs = [
            (run, s, n)
            for run, order in enumerate(work.orders)
            for s, n in _jobs(len(order), order.shape[1], max(1, fit), threads, work.alone)
        ]
        if threads == 1 or len(jobs) < 2:
            for job in jobs:
                work.add(*job)
            return work.out
        # Each thread works on different silos. Several threads in one operation after the other
        # would mostly wait for each other.
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for done in [pool.submit(work.add, *job) for job in jobs]:
                done.result()
        # The workers have changed the default for new threads.
        torch.set_num_threads(threads)
        return work.out


def _jobs(
    silos: int, records: int, fit: int, threads: int, alone: bool
) -> Iterator[tuple[slice, list[slice]]]:
    """Yield the silos of each job, and slices of their records.

    The silos are divided into as many parts as keep all threads busy. A silo's records are divided
    if not all of them `fit`.
    """
    if alone:
        parts = silos
    else:
        parts = math.ceil(silos / max(1, fit // max(1, records)))
    parts = min(silos, math.ceil(parts / threads) * threads)
    step = max(1, math.ceil(records / math.ceil(max(1, records) / fit)))
    for i in range(parts):
        yield (
            slice(i * silos // parts, (i + 1) * silos // parts),
            [slice(n, n + step) for n in range(0, records, step)],
        )


class _Work:
    """A task that is laid out, and its sums (J, S, d) so far.

    Threads add to the sums of different silos.
    """

    def __init__(self, task: Task) -> None:
        root = read(task.problem)
        assert root is not None
        self.task = task
        self.root = root
        self.point_per_silo = task.points[0].shape[0] > 1
        self.alone = self.point_per_silo and not several(task.problem, root)
        self.constants = task.problem.constants(task.points[0])
        self.out = task.points[0].new_zeros(*task.shape[:2], task.problem.dim)
        self.masks = range(task.weight.shape[1])
        self.orders = [_first(task.weight[:, run]) for run in self.masks]

    @torch.no_grad()
    def add(self, run: int, silo: slice, pieces: list[slice]) -> None:
        """Add the clipped sums of some silos in the runs that have this mask: all runs, or one."""
        task = self.task
        mask = task.weight[:, run]
        rows = torch.arange(task.shape[1], device=task.weight.device)[silo, None]
        for n in pieces:
            chosen = self.orders[run][silo, n]
            scale = mask[rows, chosen]
            absent = scale == 0
            x, y = (
                t[rows, chosen]
                .masked_fill_(absent.view(*scale.shape, *(1,) * (t.dim() - 2)), 0)
                .flatten(0, 1)
                for t in (task.x, task.y)
            )
            shared: dict[nn.Module, Tensor] = {}
            runs = range(task.shape[0])
            if len(self.masks) > 1:
                runs = [run]
            for j in runs:
                # one point, or one for each silo
                here = [p[along(silo, p.shape[0]), j].squeeze(0) for p in task.points]
                by_layer = parts(task.problem, self.root, here, self.constants, x, y, shared)
                _add(task.problem, by_layer, scale, task.clips[j], self.out[j, silo])


def _first(mask: Tensor) -> Tensor:
    """Return the places of each silo's records of weight other than 0, (S, m), for a mask (S, n).

    After them come other records, to fill up to the longest silo.
    """
    present = mask != 0
    longest = int(present.sum(1).max())
    order = present.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    return order[:, :longest]


def _add(
    problem: Problem,
    by_layer: list[tuple[dict[str, str], Part]],
    weight: Tensor,
    clips: Tensor,
    out: Tensor,
) -> None:
    """Add the clipped sums of one run to out (S, d), for records of weight (S, n)."""
    squares, sizes, lengths = zip(*(part.squares() for _, part in by_layer), strict=True)
    norm = norms(squares, [size for size in sizes if size is not None], weight.dtype)
    lengths = [
        length.view_as(weight)[:, None]
        for length in (norm.square(), *(length for part in lengths for length in part))
    ]
    scale, sound = scales(norm.view_as(weight)[:, None], lengths, weight[:, None], clips)
    views = problem.split(out)
    for names, part in by_layer:
        part.add(scale.squeeze(1), sound, {name: views[full] for name, full in names.items()})


# --- one pass ------------------------------------------------------------------------------------


class Tap(NamedTuple):
    """What one pass leaves of a layer: the factor u of its input, and its output z."""

    node: Node
    u: Tensor
    z: Tensor


def several(problem: Problem, node: Node) -> bool:
    """Return whether a pass can have a point for each silo.

    It cannot if a layer has both trained and frozen parameters.
    """
    rule = RULES.get(type(node.module))
    fits = rule is None or (
        rule.several and len({full in problem.shapes for full in node.names.values()}) == 1
    )
    return fits and all(several(problem, child) for child in node.children)


_WIDTHS: WeakKeyDictionary[Problem, dict[Any, int | None]] = WeakKeyDictionary()
"""The results of `_width`, which takes as long as some tens of records."""


def numbers(problem: Problem, x: Tensor) -> int | None:
    """Return how many numbers a pass takes for a record of x (S, n, *features).

    Return None if not all modules of the model are known.
    """
    if (root := read(problem)) is None:
        return None
    widths = _WIDTHS.setdefault(problem, {})
    key = (x.shape[2:], x.dtype, x.device.type)
    if key not in widths:
        widths[key] = _width(problem, root, x)
    return widths[key]


class _Unknown(Exception):
    """A known module on an input whose axes it would mix."""


def _width(problem: Problem, root: Node, x: Tensor) -> int | None:
    """Return how many numbers a record takes while its gradient is computed.

    The passes have no data. Return None if a module gets axes that it might mix.

    There is a pass over one record, over two and over three. Every output must have their number as
    its first axis and nowhere else. So nothing is broadcast from one record over others, and an
    input that is refused for a lone record is refused for all.
    """
    nothing = torch.empty(problem.dim, device="meta", dtype=torch.float32)
    passes = [Pass(problem, nothing, problem.constants(nothing), {}) for _ in range(3)]
    if x.is_floating_point():
        dtype = torch.float32
    else:
        dtype = x.dtype
    try:
        for number, run in enumerate(passes, 1):
            run.through(root, torch.empty(number, *x.shape[2:], device="meta", dtype=dtype))
            if any(shape[:1] != (number,) for shape in run.shapes):
                return None
            if [s[1:] for s in run.shapes] != [s[1:] for s in passes[0].shapes]:
                return None
    except (_Unknown, ValueError, RuntimeError, IndexError):
        # The engine for every model reports what is wrong, if anything is.
        return None
    run = passes[1]
    # The pass has two records, so this counts each output once and its gradient once.
    count = run.outputs
    for (module, names, _), u, z in run.taps:
        if type(module) is nn.Conv2d:
            count += u.numel() // 2
        if not (type(module) is nn.Embedding or (type(module) is nn.Linear and z.dim() == 2)):
            count += sum(
                problem.shapes[full].numel() for full in names.values() if full in problem.shapes
            )
    return count


class Pass:
    """The model at one point w (d,), or one for each silo (S, d), over records (B, ...).

    It has a tap at each layer that has parameters to train. `shared` stores the factors of inputs
    that depend on no such parameter, for further points and the same records.
    """

    def __init__(
        self, problem: Problem, w: Tensor, constants: Parameters, shared: dict[nn.Module, Tensor]
    ) -> None:
        self.trained = problem.split(w)
        self.shared = shared
        self.parameters = self.trained | constants
        self.taps: list[Tap] = []
        self.outputs = 0
        """How many numbers the outputs have so far."""
        self.shapes: list[torch.Size] = []
        """The shape of every module's output."""

    def through(self, node: Node, a: Tensor) -> Tensor:
        """Return the output of a node for the input a."""
        z = self._through(node, a)
        self.shapes.append(z.shape)
        return z

    def _through(self, node: Node, a: Tensor) -> Tensor:
        """Return the output of a node. Raise _Unknown for axes that its module could mix."""
        module = node.module
        rule = RULES.get(type(node.module))
        if isinstance(module, nn.Sequential):
            z = a
            for child in node.children:
                z = self.through(child, z)
            if type(module) is not Residual:
                return z
            if z.dim() != a.dim():
                raise _Unknown
            return a + z
        if rule is None:
            if AXES.get(type(module), a.dim()) != a.dim():
                raise _Unknown
            if type(module) is nn.MaxPool2d:
                z = max_pool(module, a)
            else:
                z = module(a)
            self.outputs += z.numel()
            return z
        if not rule.known(module, a.dim()):
            raise _Unknown
        u = self.shared.get(module)
        if u is None:
            u = rule.factor(module, a)
            if not a.requires_grad:
                self.shared[module] = u
        parameters = {name: self.parameters[full] for name, full in node.names.items()}
        z = rule.forward(module, parameters, a, u)
        if any(full in self.trained for full in node.names.values()):
            if u.requires_grad:
                u = u.detach()
            if not z.requires_grad:
                z.requires_grad_()
            self.taps.append(Tap(node, u, z))
        self.outputs += z.numel()
        return z


def parts(
    problem: Problem,
    root: Node,
    points: list[Tensor],
    constants: Parameters,
    x: Tensor,
    y: Tensor,
    shared: dict[nn.Module, Tensor],
) -> list[tuple[dict[str, str], Part]]:
    """Return what each layer that trains contributes, with the model's names of its parameters.

    These are gradients at one point, or differences between two.
    """
    passes = []
    for w in points:
        run = Pass(problem, w, constants, shared)
        with torch.enable_grad():
            output = run.through(root, x)
        slopes = torch.autograd.grad(
            output, [tap.z for tap in run.taps], _slope(problem, output.detach(), y)
        )
        passes.append([(tap.node, Term(tap.u, e)) for tap, e in zip(run.taps, slopes, strict=True)])
    by_layer = []
    for layer in zip(*passes, strict=True):
        node = layer[0][0]
        terms = _terms(*(term for _, term in layer))
        names = {name: full for name, full in node.names.items() if full in problem.shapes}
        rule = RULES[type(node.module)]
        by_layer.append((names, rule.part(node.module, terms, set(names))))
    return by_layer


def _slope(problem: Problem, output: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of each record's loss by the model's outputs."""
    if problem.slope and output.dim() == 2:
        return problem.slope(output.t()[None, None], y[None])[0, 0].t()
    return vmap(grad(problem.record_loss))(output, y)


def _terms(one: Term, other: Term | None = None) -> list[Term]:
    """Return the term of a gradient, or the terms of a difference, whose norms do not cancel."""
    if other is None:
        return [one]
    rise = one.e - other.e
    if one.a is other.a:
        return [Term(one.a, rise)]
    return [Term(one.a, rise), Term(one.a - other.a, other.e)]
