"""Sum clipped gradients for a deployed gate by matrix products that are exact.

No record's own gradient is made if a product suffices. For a layer, record i's gradient is a sum
over places t of e_it (x) a_it. Here a_it is the layer's input there, and e_it the slope of the loss
by its output. Both are put on grids of integers before they are multiplied, so that a product of
whole chunks is exact in any order.

Formal guarantees. C is the clip, gamma the lattice's step, d the number of coordinates. Everything
below is in units of gamma.

 1. Of record i the floats of a_it and e_it follow from that record, its place in its chunk and
    public numbers (`slots`; `verify` tries it). Its integers follow from these alone: A_it, at most
    2^a in size, and V_it, at most 2^v, with (a + v) + log2(records x places of a chunk) <= 53, and
    a public power of two rho such that the record's part of the layer is k_i = rho sum_t V_it (x)
    A_it. If the parts are smaller than their factors (early convolutions, norms), k_i is made and
    rounded to integers itself. If the inputs of a linear layer follow from the record alone, its
    A_i is the same in every query. It is made once, of the same chunks by the same operations, and
    stored (`known`).
 2. ||k_i|| <= C / gamma - sqrt(d) is verified on these integers, in float64. A sum of m squares is
    off by at most m 2^-53 of itself in whatever order they are added, and (d + 2^22) 2^-52 of it is
    added. If terms of several places may cancel, so is (f + h + T^2 + 8) 2^-52 (sum_t ||V_it||
    ||A_it||)^2, for T places of f inputs and h outputs. A record that fails has no part in any sum.
    One that is not finite is zero in V and in k, and A is finite for every record: no product meets
    an infinity.
 3. A chunk's sum over the drawn records is a float64 product of V, with zeros for the others, and
    A. Every partial sum is an integer below 2^53, so it is the true sum, whatever the order, fused
    or not (`verify` compares the machine's product with integers). Then it is rounded to integers,
    once. Record j is in one chunk only, so it moves the rounded sum S by at most ||k_j|| + sqrt(d)
    <= C / gamma. So S with record j drawn is within C / gamma of S without it, and S and S' of
    neighbours are within 2 C / gamma: what `exact` requires, sampled batches too.

Every chunk takes the same operations on the same shapes, whatever its records contain and whichever
are drawn. Records that fail, or are not drawn, are multiplied by zero, even if there are none.
`tests/silo/answer/test_paths.py` compares the operations and the lines of neighbours.

No step requires the floats of step 1 to be right. Steps 2 and 3 require IEEE addition and
multiplication of float64 in any order: no algorithm that subtracts (Strassen, Winograd, FFT) and no
shorter numbers, on which `verify` would fail. If the silo has a GPU, floats and products are made
there, by cuDNN and cuBLAS without trials, shortened numbers or additions by atomics. The same tests
stop a gate whose GPU differs. No answer moves back to the processor.

Only known types of modules and losses are supported, which raise on no record. Every other model is
computed record by record.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from silodp.core.errors import BadInput
from silodp.core.problem.problem import Problem
from silodp.engine.convolution import Parameters
from silodp.silo.answer.factors import (
    Chunk,
    FixedInputs,
    Layer,
    bits_of,
    factors_of,
    gridded,
    outputs,
    share_of,
)
from silodp.silo.answer.slots import in_threads, lengths, pinned
from silodp.silo.answer.traces import Tracer

NUMBERS = {"cpu": 2**23, "cuda": 2**28}
"""Most numbers that a chunk makes on its way, in addition to two for each parameter, by kind of
device. A processor's caches have room for few.
"""
MOST = 2**11
"""Most records of a chunk."""
KEPT = 2**24
"""Most numbers that are stored of all records from answer to answer: 128 MiB."""
SLACK = 2.0**-19, 2.0**-9
"""The least and the largest part of the clip by which a record stays below it, so that what grids
add does not take the record past the bound.
"""


class Products:
    """Sums of clipped gradients, or differences, of all records of one silo.

    It stores no record, and nothing of one sum while it makes the next.
    """

    def __init__(
        self,
        problem: Problem,
        shape: Sequence[int],
        target: Sequence[int] = (),
        device: str = "cpu",
    ) -> None:
        """Prepare for records of this shape, with targets of that shape.

        Raise BadInput if the model or the loss is not of the known kinds.
        """
        self._problem = problem
        self._tracer = Tracer(problem, device)
        self.device = self._tracer.device
        self._layers = {
            name: Layer(module, names) for name, (module, names) in self._tracer.layers.items()
        }
        self._measure(tuple(shape), tuple(target))

    @classmethod
    def of(
        cls, problem: Problem, shape: Sequence[int], target: Sequence[int] = (), device: str = "cpu"
    ) -> Products | None:
        """Return the sums for this problem, or None if every record must be computed by itself."""
        try:
            return cls(problem, shape, target, device)
        except (BadInput, RuntimeError, IndexError):
            # torch raises the last two for shapes that do not fit, for instance.
            return None

    def _measure(self, shape: tuple[int, ...], target: tuple[int, ...]) -> None:
        """Measure every layer with one record of zeros.

        The sizes decide how each layer is summed, and how many records are in a chunk. Two and
        three records are tried too. Every first axis must be that of records, with one loss for
        each. Otherwise something is broadcast along records, and one record's slope would depend on
        the others' targets. Raise BadInput then.
        """
        on = self.device
        for m in (3, 2, 1):
            output, trace = self._tracer.forward(
                self._tracer.parameters(self._problem.initial([0])),
                torch.zeros((m, *shape), device=on),
            )
            alone = output.dim() == 2 and self._problem.record_losses(
                output, torch.zeros((m, *target), device=on)
            ).shape == (m,)
            if not alone or any(len(t) != m for both in trace.values() for t in both):
                raise BadInput("a batch's first axis is not that of records everywhere")
        if len(trace) != len(self._layers) or not output.requires_grad:
            raise BadInput("a layer is used more than once, or not at all")
        numbers = 0
        patches = 0
        for name, (given, output) in trace.items():
            layer = self._layers[name]
            module = layer.module
            layer.depends = given.requires_grad
            if isinstance(module, nn.Linear | nn.Conv2d):
                a, e = factors_of(module, given.detach(), output.detach())
                layer.places = a.shape[1]
                layer.width = a.shape[2]
                h = e.shape[2]
                # A share is made itself if it is smaller than the factors of many places.
                layer.made = (
                    2 * layer.places > 3
                    and (2 * layer.places) ** 2 * (h + layer.width) > 8 * h * layer.width
                )
                if layer.made:
                    patches = max(patches, layer.places * layer.width)
                    numbers += 2 * h * layer.width
                else:
                    numbers += 4 * layer.places * (h + layer.width)
            numbers += given.numel() + output.numel()
        room = NUMBERS[on.type] + 2 * self._problem.dim
        self.chunk = max(1, min(MOST, room // (numbers + patches)))
        self._room = 1 - min(SLACK[1], SLACK[0] + sum(map(self._growth, self._layers.values())) / 8)

    def _growth(self, layer: Layer) -> float:
        """Return by how much of the clip grids could lengthen a layer's part, if all roundings
        added up.
        """
        if layer.made:
            return 0.0
        a, v = bits_of(self.chunk * layer.places * layer.terms)
        wide = layer.places * layer.terms * math.sqrt(outputs(layer.module) * (layer.width + 1))
        return wide * 2.0**-v + math.sqrt(layer.places * (layer.width + 1)) * 2.0**-a

    def _traced(
        self, parameters: Parameters, x: Tensor, y: Tensor
    ) -> list[tuple[Layer, Tensor, Tensor]]:
        """Return every layer's input and the slopes by its output, in float32."""
        return [
            (self._layers[name], *both)
            for name, both in self._tracer.traced(parameters, x, y).items()
        ]

    def known(self, x: Tensor) -> list[FixedInputs]:
        """Return for every chunk of the records x (n, ...) what no query changes.

        These are integers of the inputs of linear layers that depend on no parameter. They are made
        as every answer would make them, of the same chunks, and are for a sum of these records
        alone. The list is empty if it would be more than KEPT numbers.
        """
        fixed = {
            name: layer
            for name, layer in self._layers.items()
            if not layer.made and not layer.depends and layer.places == 1
        }
        # A record's integers, one of them the bias's, and three of their lengths.
        numbers = sum(layer.width + 4 for layer in fixed.values())
        if not fixed or len(x) * numbers > KEPT:
            return []
        start = self._tracer.parameters(self._problem.initial([0]))
        chunks = list[FixedInputs]()
        with self._fixed(), pinned(1):
            for rows in x.split(self.chunk):
                _, trace = self._tracer.forward(start, self._own(rows).float())
                integers: FixedInputs = {}
                for name, layer in fixed.items():
                    given, output = (t.detach() for t in trace[name])
                    inputs, _ = factors_of(layer.module, given, output)
                    integers[layer] = gridded(layer, [inputs], self.chunk)
                chunks.append(integers)
        return chunks

    # --- integers --------------------------------------------------------------------------------

    def _records(
        self,
        points: list[Parameters],
        x: Tensor,
        y: Tensor,
        clip: float,
        gamma: float,
        known: FixedInputs | None = None,
    ) -> tuple[Chunk, Tensor]:
        """Return the records' integers, and which records keep to the bound, (m,); the others'
        integers are finite.
        """
        traced = [self._traced(w, x, y) for w in points]
        chunk = Chunk([share_of(*found) for found in zip(*traced, strict=True)], self.chunk, known)
        room = (clip - 1.25 * gamma * math.sqrt(self._problem.dim)) * self._room
        most = clip / gamma - math.sqrt(self._problem.dim)
        if most > 0:
            bound = most * most * (1 - 2.0**-40)
        else:
            bound = -1.0
        more = 1 + (self._problem.dim + 2**22) * 2.0**-52
        return chunk, chunk.quantise(chunk.squares(), room, clip, gamma, more, bound)

    def sum(
        self,
        points: list[Tensor],
        x: Tensor,
        y: Tensor,
        drawn: np.ndarray,
        clip: float,
        gamma: float,
        threads: int = 1,
        known: Sequence[FixedInputs] = (),
    ) -> np.ndarray:
        """Return S of all records x (n, ...) that are drawn, (d,) int64, at the points (1, d).

        The bits are the same with any number of threads, and with or without `known`.
        """
        total = torch.zeros(self._problem.dim, dtype=torch.float64, device=self.device)
        views = self._problem.split(total)
        lock = threading.Lock()
        parameters = [self._tracer.parameters(w) for w in points]

        def add(start: int) -> None:
            slot = slice(start, start + self.chunk)
            before = known[start // self.chunk] if known else None
            chunk, kept = self._records(
                parameters, self._own(x[slot]), self._own(y[slot]), clip, gamma, before
            )
            for name, added in chunk.added(
                kept & torch.from_numpy(drawn[slot]).to(kept.device)
            ).items():
                with lock:  # sums of integers below 2^53: exact, in whatever order chunks end
                    views[name].add_(added.reshape(views[name].shape))

        with self._fixed():
            in_threads(
                add, range(0, len(x), self.chunk), threads if self.device.type == "cpu" else 1
            )
        return (
            total.cpu().numpy().astype(np.int64)
        )  # float64 holds it exactly: 2^31 records of 2^30 would not fit, 2^22 do

    def _own(self, values: Tensor) -> Tensor:
        return values.to(self.device, copy=True, memory_format=torch.contiguous_format)

    @contextlib.contextmanager
    def _fixed(self) -> Iterator[None]:
        """Make a GPU compute in a fixed way while the body runs.

        No kernel is chosen by trying several, none adds in an order of its own, and no number is
        shortened.
        """
        if self.device.type == "cpu":
            yield
            return
        products = torch.backends.cuda.matmul
        before = products.allow_tf32
        products.allow_tf32 = False
        try:
            with torch.backends.cudnn.flags(
                enabled=True, benchmark=False, deterministic=True, allow_tf32=False
            ):
                yield
        finally:
            products.allow_tf32 = before

    # --- a gate's test of itself -----------------------------------------------------------------

    def sizes(self, n: int) -> set[int]:
        """Return the lengths of the chunks of n records."""
        return lengths(n, self.chunk)

    def rows(self, points: list[Tensor], clip: float, gamma: float):
        """Return a function to every number that is made of each record of a chunk, for
        `slots.verify`.

        These are floats and integers, also of the integers that are known before, as rows.
        """
        parameters = [self._tracer.parameters(w) for w in points]

        def rows(x: Tensor, y: Tensor) -> Tensor:
            x = self._own(x)
            y = self._own(y)
            parts: list[Tensor] = []
            with self._fixed():
                for known in (None, *self.known(x)):
                    chunk, kept = self._records(parameters, x, y, clip, gamma, known=known)
                    parts.append(chunk.numbers() * kept[:, None])
                for w in parameters:
                    for _, given, slopes in self._traced(w, x, y):
                        parts += [given.flatten(1).double(), slopes.flatten(1).double()]
            return torch.cat(parts, 1).cpu()

        return rows

    def verify(self, n: int) -> None:
        """Raise BadInput unless this machine multiplies the largest integers exactly, at the same
        shapes.
        """
        rng = np.random.default_rng(0)
        for layer in self._layers.values():
            if layer.made:
                continue
            for size in self.sizes(n):
                for terms in {1, layer.terms}:
                    a, v = bits_of(self.chunk * layer.places * terms)
                    rows = size * layer.places * terms
                    h = outputs(layer.module)
                    width = layer.width + ("bias" in layer.names)
                    left, right = (
                        rng.integers(-(2**b), 2**b + 1, (rows, k)) for b, k in ((v, h), (a, width))
                    )
                    left[:, 0] = 2**v
                    right[:, 0] = 2**a
                    v_floats, a_floats = (
                        torch.from_numpy(t).to(self.device).double() for t in (left, right)
                    )
                    product = (v_floats.t() @ a_floats).cpu().numpy()
                    some = rng.permutation(h)[:4]
                    some[0] = 0
                    if not np.array_equal(product[some].astype(np.int64), left[:, some].T @ right):
                        raise BadInput(
                            "on this machine a float64 product of integers is not exact, "
                            "so the gate does not serve; use another build of torch"
                        )
