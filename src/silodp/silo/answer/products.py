"""Clipped sums of gradients for a deployed gate by matrix products that are exact: no record's gradient is made where a product will do.

For a layer, record i's gradient is a sum over places t of e_it (x) a_it: a_it is what the layer is given there, and e_it the slope of the loss by
what it gives. Both are put on grids of integers before they are multiplied, so that a product of whole chunks is exact in any order.

Formal guarantees. C is the clip, gamma the lattice's step, d the number of coordinates, and everything below is in units of gamma.
 1. Of record i the floats of a_it and e_it follow from that record, its place in its chunk and public numbers (`slots`; `verify` tries it).
    From these alone follow its integers: A_it, at most 2^a in size, and V_it, at most 2^v, with (a + v) + log2(records x places of a chunk) <= 53,
    and a public power of two rho such that the record's part of the layer is k_i = rho sum_t V_it (x) A_it. Where the parts are smaller than
    what makes them (early convolutions, norms), k_i is made and rounded to integers itself.
 2. ||k_i|| <= C / gamma - sqrt(d) is verified on these integers, in float64: a sum of m squares is off by at most m 2^-53 of itself in whatever
    order they are added, and (d + 2^22) 2^-52 of it is added; where terms of several places may cancel, so is (f + h + T^2 + 8) 2^-52
    (sum_t ||V_it|| ||A_it||)^2, for T places of f inputs and h outputs. A record that fails has no part in any sum, and one that is not finite
    is zero in V, in A and in k: no product meets an infinity.
 3. A chunk's sum over the drawn records is a float64 product of V with zeros for the others and A. Every partial sum is an integer below 2^53, so
    it is the true sum, whatever the order, fused or not (`verify` compares the machine's product with integers). Then it is rounded to integers,
    once: record j is in one chunk only, so it moves the rounded sum S by at most ||k_j|| + sqrt(d) <= C / gamma. So S with record j drawn is within
    C / gamma of S without it, and S and S' of neighbours are within 2 C / gamma: what `exact` asks for, sampled batches too.
No step asks the floats of 1 to be right. What 2 and 3 ask of float64 is IEEE addition and multiplication in any order: no algorithm that
subtracts (Strassen, Winograd, FFT) and no shorter numbers, on which `verify` would fail.
Known types of modules and losses only, which raise on no record; every other model goes record by record.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from silodp.core.errors import BadInput
from silodp.core.problem.problem import Problem
from silodp.engine.blocks import Residual
from silodp.engine.convolution import conv_known
from silodp.engine.model import AXES, Node, read
from silodp.silo.answer.factors import Factored, Layer, Whole, bits_of, factors_of, outputs, part_of

NUMBERS, MOST = 2**25, 256
"""Numbers that a chunk may hold on the way, and its most records."""
SLACK = 2.0**-19, 2.0**-9
"""Part of the clip, at least and at most, that a record is kept below, so that what grids add does not take it past the bound."""


class Products:
    """Sums of clipped gradients, or differences, of all records of one silo. Holds no record."""

    def __init__(self, problem: Problem, shape: Sequence[int], target: Sequence[int] = ()) -> None:
        """For records of this shape, with targets of that; BadInput if the model or the loss is not of the known kinds."""
        layers = _known(problem)
        if layers is None:
            raise BadInput("the model is not made of known layers with a known loss")
        self._problem, self._model = problem, copy.deepcopy(problem.model).float().requires_grad_(False)
        for module in self._model.modules():
            if getattr(module, "inplace", False):
                vars(module)["inplace"] = False  # else it writes over what a layer gave
        modules = dict(self._model.named_modules())
        self._layers = {modules[name]: Layer(modules[name], names) for name, names in layers.items()}
        self._seen: list[tuple[nn.Module, Tensor, Tensor]] = []
        for module in self._layers:
            module.register_forward_hook(self._hook)
        for module in self._model.modules():
            if type(module) in AXES or type(module) is Residual:
                module.register_forward_hook(_axes)
        try:
            self._measure(tuple(shape), tuple(target))
        finally:
            self._seen = []

    @classmethod
    def of(cls, problem: Problem, shape: Sequence[int], target: Sequence[int] = ()) -> Products | None:
        """None where every record must be asked by itself."""
        try:
            return cls(problem, shape, target)
        except (BadInput, RuntimeError, IndexError):  # of shapes that do not fit, for instance
            return None

    def _measure(self, shape: tuple[int, ...], target: tuple[int, ...]) -> None:
        """The sizes of every layer, of one record of zeros: they decide how each is summed, and how many records are in a chunk.

        Tried with two and three records too: unless every first axis is that of records and there is one loss for each, something is
        broadcast along records, and one's slope would depend on the others' targets.
        """
        with torch.enable_grad():
            for m in (3, 2, 1):
                self._seen = []
                output = self._forward(self._problem.initial([0]), torch.zeros(m, *shape))
                alone = output.dim() == 2 and self._problem.record_losses(output, torch.zeros(m, *target)).shape == (m,)
                if not alone or any(len(t) != m for _, given, made in self._seen for t in (given, made)):
                    raise BadInput("a batch's first axis is not that of records everywhere")
        if len(self._seen) != len(self._layers) or not output.requires_grad:
            raise BadInput("a layer is used more than once, or not at all")
        numbers = patches = 0
        for module, given, made in self._seen:
            layer = self._layers[module]
            layer.depends = given.requires_grad
            if isinstance(module, nn.Linear | nn.Conv2d):
                a, e = factors_of(module, given.detach(), made.detach())
                layer.places, layer.width, h = a.shape[1], a.shape[2], e.shape[2]
                layer.made = 2 * layer.places > 3 and (2 * layer.places) ** 2 * (h + layer.width) > 8 * h * layer.width
                patches = max(patches, layer.places * layer.width) if layer.made else patches
                numbers += 2 * h * layer.width if layer.made else 4 * layer.places * (h + layer.width)
            numbers += given.numel() + made.numel()
        self.chunk = max(1, min(MOST, NUMBERS // (numbers + patches)))
        self._room = 1 - min(SLACK[1], SLACK[0] + sum(map(self._growth, self._layers.values())) / 8)

    def _growth(self, layer: Layer) -> float:
        """By how much of the clip grids could lengthen a layer's part, if every rounding went the same way."""
        if layer.made:
            return 0.0
        a, v = bits_of(self.chunk * layer.places * layer.terms)
        wide = layer.places * layer.terms * math.sqrt(outputs(layer.module) * (layer.width + 1))
        return wide * 2.0**-v + math.sqrt(layer.places * (layer.width + 1)) * 2.0**-a

    # --- floats: what each layer is given, and the slopes -------------------------------------------------------------------------

    def _hook(self, module: nn.Module, given: Any, made: Tensor) -> Tensor:
        made = made if made.requires_grad else made.detach().requires_grad_()
        self._seen.append((module, given[0], made))
        return made

    def _forward(self, w: Tensor, x: Tensor) -> Tensor:
        parameters = {name: p.squeeze(0) for name, p in self._problem.split(w.float()).items()}
        return functional_call(self._model, parameters | self._problem.constants(x), (x,))

    def _traced(self, w: Tensor, x: Tensor, y: Tensor) -> list[tuple[Layer, Tensor, Tensor]]:
        """Of every layer its input and the slopes by its output, in float32."""
        self._seen, x, y = [], x.float(), y.float() if y.is_floating_point() else y
        try:
            with torch.enable_grad():
                losses = self._problem.record_losses(self._forward(w, x), y)
                if losses.shape != (len(x),):
                    raise BadInput("the loss is not one number for each record")
                slopes = torch.autograd.grad(losses.sum(), [made for _, _, made in self._seen], allow_unused=True)
            return [
                (self._layers[module], given.detach(), torch.zeros_like(made) if e is None else e)
                for (module, given, made), e in zip(self._seen, slopes, strict=True)
            ]
        finally:
            self._seen = []

    # --- integers -----------------------------------------------------------------------------------------------------------------

    def _records(self, points: list[Tensor], x: Tensor, y: Tensor, clip: float, gamma: float) -> tuple[list[Whole | Factored], Tensor]:
        """The records' integers, layer by layer, and which records keep to the bound, (m,); the others' integers are finite."""
        traced = [self._traced(w, x, y) for w in points]
        parts = [part_of(*found) for found in zip(*traced, strict=True)]
        square = torch.stack([part.square() for part in parts]).sum(0)
        room = (clip - 1.25 * gamma * math.sqrt(self._problem.dim)) * self._room
        sound = torch.isfinite(square)
        scale = torch.where(sound & (square > room**2), room / square.sqrt(), 1.0)
        for part in parts:
            part.quantise(torch.where(sound, scale, 0.0), sound, clip, gamma, self.chunk)
        norm = torch.stack([part.verified() for part in parts]).sum(0)
        most = clip / gamma - math.sqrt(self._problem.dim)
        return parts, (norm * (1 + (self._problem.dim + 2**22) * 2.0**-52) <= most * most * (1 - 2.0**-40)) & sound & (most > 0)

    def sum(self, points: list[Tensor], x: Tensor, y: Tensor, drawn: np.ndarray, clip: float, gamma: float) -> np.ndarray:
        """(d,) int64, S of all records x (n, ...) that are drawn, at the points (1, d)."""
        total = torch.zeros(self._problem.dim, dtype=torch.float64)
        views = self._problem.split(total)
        for start in range(0, len(x), self.chunk):
            slot = slice(start, start + self.chunk)
            parts, kept = self._records(points, _own(x[slot]), _own(y[slot]), clip, gamma)
            chosen = (kept & torch.from_numpy(drawn[slot])).double()
            for part in parts:
                for name, added in part.added(chosen).items():
                    views[name].add_(added.reshape(views[name].shape))
        return total.numpy().astype(np.int64)  # float64 holds it exactly: 2^31 records of 2^30 would not fit, 2^22 do

    # --- a gate's test of itself --------------------------------------------------------------------------------------------------

    def sizes(self, n: int) -> set[int]:
        """The lengths of the chunks of n records."""
        return {min(self.chunk, n), n % self.chunk or min(self.chunk, n)}

    def rows(self, points: list[Tensor], clip: float, gamma: float):
        """Every number that is made of each record, floats and integers, as rows: for `slots.verify`."""

        def rows(x: Tensor, y: Tensor) -> Tensor:
            parts, kept = self._records(points, x, y, clip, gamma)
            floats = [t.flatten(1).double() for w in points for _, *both in self._traced(w, x, y) for t in both]
            return torch.cat([*(part.numbers() * kept[:, None] for part in parts), *floats], 1)

        return rows

    def verify(self, n: int) -> None:
        """Raises BadInput unless this machine's products of the largest integers are those of integers, at the very shapes."""
        rng = np.random.default_rng(0)
        for layer in self._layers.values():
            if layer.made:
                continue
            for size in self.sizes(n):
                for terms in {1, layer.terms}:
                    a, v = bits_of(self.chunk * layer.places * terms)
                    rows, h = size * layer.places * terms, outputs(layer.module)
                    width = layer.width + ("bias" in layer.names)
                    left, right = (rng.integers(-(2**b), 2**b + 1, (rows, k)) for b, k in ((v, h), (a, width)))
                    left[:, 0], right[:, 0] = 2**v, 2**a
                    found = (torch.from_numpy(left).double().t() @ torch.from_numpy(right).double()).numpy()
                    some = rng.permutation(h)[:4]
                    some[0] = 0
                    if not np.array_equal(found[some].astype(np.int64), left[:, some].T @ right):
                        raise BadInput(
                            "on this machine a float64 product of integers is not exact, so the gate does not serve; use another build of torch"
                        )


def _axes(module: nn.Module, given: Any, made: Tensor) -> None:
    """As in `structured`: what has another number of axes would be broadcast along the records."""
    if made.shape != given[0].shape if type(module) is Residual else given[0].dim() != AXES[type(module)]:
        raise BadInput("a module is given another number of axes than it is known with")


def _known(problem: Problem) -> dict[str, dict[str, str]] | None:
    """Layers by the module's name, each with the model's names of its parameters; None unless all is known."""
    root, found = read(problem), dict[str, dict[str, str]]()
    if root is None or not problem.known_loss:
        return None

    def walk(node: Node) -> bool:
        if node.names:
            kind, own = type(node.module), {short: full for short, full in node.names.items() if full in problem.shapes}
            if own and (own != node.names or kind not in (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.GroupNorm)):
                return False
            if isinstance(node.module, nn.Conv2d) and (node.module.groups != 1 or not conv_known(node.module, 4)):
                return False
            if own:
                found[next(iter(own.values())).rpartition(".")[0]] = own
        return all(walk(child) for child in node.children)

    whole = walk(root)
    return found if whole and sum(map(len, found.values())) == len(problem.shapes) else None


def _own(values: Tensor) -> Tensor:
    return values.to(copy=True, memory_format=torch.contiguous_format)
