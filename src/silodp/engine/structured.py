"""The structured engine: per-record gradients of convolutional and sequence models of known
modules, with all records of a chunk in one pass.

A layer's gradient is bilinear in a factor u of its input (the input itself, its patches, its
normalised form) and the gradient e of the loss by its output. One pass over the batch gives both
for every layer, and `rules` what the layer contributes. Axes are (B, ...): the records of S silos,
one silo after the other.
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
from silodp.engine.blocks import Residual
from silodp.engine.convolution import Parameters, max_pool
from silodp.engine.ghost import Term
from silodp.engine.model import AXES, Node, read
from silodp.engine.rules import RULES, Part
from silodp.engine.task import Task, norms, scales


class Structured:
    """One pass over known modules in torch."""

    def supports(self, task: Task) -> bool:
        return task.limits is None and numbers(task.problem, task.x) is not None

    def sum(self, task: Task) -> Tensor:
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
        # Silos side by side, each by one thread: the threads of one operation after the other would
        # mostly wait for each other.
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for done in [pool.submit(work.add, *job) for job in jobs]:
                done.result()
        torch.set_num_threads(threads)  # what the next thread to start would find, beside our own
        return work.out


def _jobs(
    silos: int, records: int, fit: int, threads: int, alone: bool
) -> Iterator[tuple[slice, list[slice]]]:
    """Silos that are done together, as many parts as keep all threads busy; and the records of each
    silo that are, where not all `fit`.
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
    """A task that is laid out, and the sums (J, S, d) so far; threads add to the sums of different
    silos.
    """

    def __init__(self, task: Task) -> None:
        root = read(task.problem)
        assert root is not None
        self.task = task
        self.root = root
        self.own = task.points[0].shape[0] > 1
        self.alone = self.own and not several(task.problem, root)
        self.constants = task.problem.constants(task.points[0])
        self.out = task.points[0].new_zeros(*task.shape[:2], task.problem.dim)
        self.masks = range(task.weight.shape[1])
        self.orders = [_first(task.weight[:, run]) for run in self.masks]

    @torch.no_grad()
    def add(self, run: int, silo: slice, pieces: list[slice]) -> None:
        """Adds the clipped sums of some silos in the runs that have this mask: all, or one."""
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
            for j in [run] if len(self.masks) > 1 else range(task.shape[0]):
                here = [
                    p[silo if self.own else slice(None), j].squeeze(0) for p in task.points
                ]  # one point, or one for each silo
                found = parts(task.problem, self.root, here, self.constants, x, y, shared)
                _add(task.problem, found, scale, task.clips[j], self.out[j, silo])


def _first(mask: Tensor) -> Tensor:
    """For each silo of mask (S, n) the places of its records of weight other than 0, before others
    to fill up to the longest, (S, m).
    """
    there = mask != 0
    return there.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[
        :, : int(there.sum(1).max())
    ]


def _add(
    problem: Problem,
    found: list[tuple[dict[str, str], Part]],
    weight: Tensor,
    clips: Tensor,
    out: Tensor,
) -> None:
    """Adds the clipped sums of one run to out (S, d), for records of weight (S, n)."""
    squares, sizes, lengths = zip(*(part.squares() for _, part in found), strict=True)
    norm = norms(squares, [size for size in sizes if size is not None], weight.dtype)
    lengths = [
        length.view_as(weight)[:, None]
        for length in (norm.square(), *(length for part in lengths for length in part))
    ]
    scale, sound = scales(norm.view_as(weight)[:, None], lengths, weight[:, None], clips)
    views = problem.split(out)
    for names, part in found:
        part.add(scale.squeeze(1), sound, {name: views[full] for name, full in names.items()})


# --- one pass ------------------------------------------------------------------------------------


class Tap(NamedTuple):
    """What one pass leaves of a layer: the factor u of its input, and its output z."""

    node: Node
    u: Tensor
    z: Tensor


def several(problem: Problem, node: Node) -> bool:
    """Whether a pass can have a point for each silo: not where a layer has trained and frozen
    parameters side by side.
    """
    rule = RULES.get(type(node.module))
    fits = rule is None or (
        rule.several and len({full in problem.shapes for full in node.names.values()}) == 1
    )
    return fits and all(several(problem, child) for child in node.children)


_WIDTHS: WeakKeyDictionary[Problem, dict[Any, int | None]] = WeakKeyDictionary()
"""What `_width` found, which takes as long as some tens of records."""


def numbers(problem: Problem, x: Tensor) -> int | None:
    """Numbers that a pass holds for a record of x (S, n, *features); None for a model that is not
    of known modules.
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
    """Numbers held for a record while its gradient is taken, from passes without data; None if a
    module is given axes it might mix.

    One record, two and three: every output must have their number as its first axis and nowhere
    else, so that nothing is broadcast from one record over others, and what a lone record would be
    refused is refused to all.
    """
    nothing = torch.empty(problem.dim, device="meta", dtype=torch.float32)
    passes = [Pass(problem, nothing, problem.constants(nothing), {}) for _ in range(3)]
    try:
        for number, run in enumerate(passes, 1):
            run.through(
                root,
                torch.empty(
                    number,
                    *x.shape[2:],
                    device="meta",
                    dtype=torch.float32 if x.is_floating_point() else x.dtype,
                ),
            )
            if any(shape[:1] != (number,) for shape in run.shapes) or [
                s[1:] for s in run.shapes
            ] != [s[1:] for s in passes[0].shapes]:
                return None
    except (
        _Unknown,
        ValueError,
        RuntimeError,
        IndexError,
    ):  # the fallback says what is wrong, if anything is
        return None
    run = passes[1]
    held = run.made  # of two records: each output once and its gradient once
    for (module, names, _), u, z in run.taps:
        if type(module) is nn.Conv2d:
            held += u.numel() // 2
        if not (type(module) is nn.Embedding or (type(module) is nn.Linear and z.dim() == 2)):
            held += sum(
                problem.shapes[full].numel() for full in names.values() if full in problem.shapes
            )
    return held


class Pass:
    """The model at one point w (d,), or one for each silo (S, d), over records (B, ...), with a tap
    at each layer that has parameters to train.

    `shared` keeps, for further points and the same records, the factors of inputs that depend on no
    such parameter.
    """

    def __init__(
        self, problem: Problem, w: Tensor, constants: Parameters, shared: dict[nn.Module, Tensor]
    ) -> None:
        self.trained = problem.split(w)
        self.shared = shared
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
        module = node.module
        rule = RULES.get(type(node.module))
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
            if type(module) is nn.MaxPool2d:
                z = max_pool(module, a)
            else:
                z = module(a)
            self.made += z.numel()
            return z
        if not rule.known(module, a.dim()):
            raise _Unknown
        u = self.shared.get(module)
        if u is None:
            u = rule.factor(module, a)
            if not a.requires_grad:
                self.shared[module] = u
        z = rule.forward(
            module, {name: self.parameters[full] for name, full in node.names.items()}, a, u
        )
        if any(full in self.trained for full in node.names.values()):
            self.taps.append(
                Tap(
                    node,
                    u.detach() if u.requires_grad else u,
                    z if z.requires_grad else z.requires_grad_(),
                )
            )
        self.made += z.numel()
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
    """For each layer that trains, the model's names of its parameters and what it contributes:
    gradients at one point, or differences.
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
    found = []
    for layer in zip(*passes, strict=True):
        node = layer[0][0]
        terms = [term for _, term in layer]
        names = {name: full for name, full in node.names.items() if full in problem.shapes}
        found.append(
            (names, RULES[type(node.module)].part(node.module, _terms(*terms), set(names)))
        )
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
    if one.a is other.a:
        return [Term(one.a, rise)]
    return [Term(one.a, rise), Term(one.a - other.a, other.e)]
