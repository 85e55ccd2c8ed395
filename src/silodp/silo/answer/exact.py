"""How a deployed gate computes: clipped records as integers on a lattice, summed exactly, under
exact Gaussian noise.

Formal guarantees. Let C be the clip, z the noise multiplier, gamma the lattice's step, D and D'
data sets that differ in record j.
 1. Record i's integer vector k_i depends on that record, its position and public numbers alone (see
    `slots`): neither on what the other records hold nor on which of them are drawn. All n are
    computed for every question, in the same chunks, and the batch is a mask on the integers. So
    only k_j differs between D and D', and S with record j drawn is S without it plus k_j: what
    amplification asks for.
 2. sum(k_i^2) <= floor((C / gamma)^2) is verified in integers, after all floating point; a vector
    that fails is replaced by zero. So ||k_j|| <= C / gamma, and the int64 sums S, S' are exact and
    differ by at most 2 C / gamma in norm. A statistic of numbers and cells (`query.Cells`) is
    verified otherwise, in integers too (`levelled`): each number is in 0 .. 1 / gamma, and the
    cells are >= 0 and sum to 1 / gamma at most. Two such vectors differ by at most sqrt(numbers +
    2) / gamma in norm, and numbers + 2 <= (2 C)^2 is verified in fractions before the charge: S and
    S' differ by at most 2 C / gamma once more. Of products (`statistics.gram`) the factors are
    verified as a vector is, by a bound from C, d and gamma alone, and multiplied in integers
    (`multiplied`): two such vectors differ by at most 2 C / gamma, which is sqrt(2) of their
    largest norm and not twice it.
 3. Added is round(N(0, s^2)) with s >= z 2 C / gamma, coordinate by coordinate, by the exact law
    (`lattice.rounded_gaussian`). As S is an integer, S + round(N) = round(S + N): post-processing
    of a Gaussian mechanism with mu = (2 C / gamma) / s <= 1 / z.
 4. The release gamma x integer / batch is post-processing, with gamma and batch public. So the mean
    is mu-GDP with mu = 1 / z: what the event says, with nothing left to a tolerance. Sub-sampled
    batches are drawn by secret coins, independent of the data, and cost the time of a full pass.
    Each of the local steps is such a release, at a point that earlier releases determine.
 5. With held-out records, a Score (or a total of it, or one by groups) takes the vectors of these
    for what they are and of the others as zero, and every other statistic the reverse. Which they
    are is a function of position and n (`heldout`), so 1 to 4 stand as they are, for all n records;
    the release divides by the batch's expected number of records of its part, which is public.
    Nothing is cheaper for it: all charges add up.
 6. Where a record is a person, D and D' differ in all rows of one person: in how many there are, in
    what they hold, in where in the file they stand, and in who it is. Every person has the same P
    places, so no shape follows its rows. Who is held out follows from secret marks, which persons
    keep through edits (`heldout.held_out_persons`): the smallest h of n marks, so that one
    exchanged person changes the set of persons of either part by one person at most. Every
    question is about one part and sees no more than that one person: what it is charged for. (The
    other part may then have another person too. Both stand in two batches of a stored partition,
    of which only the dearer one is paid for; so held-out persons are not asked about in such
    batches, `check`.) Which list number a loader gives to the others may well follow from one
    person's rows, so each stands at a place of its part by a permutation that is drawn uniformly
    at random for these records, kept in the ledger and never told. Whatever lists a loader makes of
    D and D', under such a permutation a part of one has the law of that of the other with one
    person exchanged at its place: given the places, 1 to 5 hold, and a bound on the trade-off
    between two laws that holds given the places holds for their mixture over the places too. A map
    of features rounds by place as any kernel does, and is therefore applied at these places, once
    they are drawn.
Gradients of models of known layers are summed by exact products of whole chunks (`products`), for
which 1 to 4 hold as well: its docstring has the proof. There S with record j is within C / gamma of
S without it, and that is all that 3 and amplification use. A total rests on the same: a
silo gives the integers S + round(N(0, s^2)) of 1 to 3, on a lattice that is the question's alone,
so that those of several silos add up. By itself such an answer is the release of 3 with z the
silo's share, and that is what whoever sees it learns. The sum over honest silos is priced by
`core.privacy.totals`. What leaves is masked, or for the shuffler's key alone (`door`). No step asks
floats to be right: wrong gradients, rounding or overflow cost accuracy, never privacy.
Assumed: at fixed shapes a tensor kernel computes a record's row from that row and its place
(`verify` tries it with the silo's own model before a gate serves, and the tests bit for bit with
several instruction sets), ChaCha20 is secure, and time is not observed: it depends on the noise
drawn, and on whether there are records on which a model raises.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from silodp.core.errors import BadInput, Refused
from silodp.core.lattice import lattice_step, most, noise_scale
from silodp.core.mechanisms import Gaussian, Mechanism
from silodp.core.numbers import Number
from silodp.core.problem.person import filled, present
from silodp.core.problem.problem import Problem
from silodp.core.protocol.packing import Packing
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, Sampling
from silodp.core.statistics import (
    ClassCounts,
    ClippedDiff,
    Grad,
    Histogram,
    LocalSteps,
    Rows,
    Statistic,
)
from silodp.core.statistics.gram import MAX_FACTORS, Gram
from silodp.core.statistics.group_score import MAX_GROUPS, GroupScore
from silodp.core.statistics.score import MAX_BINS, Score
from silodp.silo.answer import lattice
from silodp.silo.answer.gradients import Gradients
from silodp.silo.answer.integers import levelled, multiplied, quantised
from silodp.silo.answer.products import Products
from silodp.silo.answer.slots import computed, lengths, pinned, size_of, slots, verify
from silodp.silo.data.heldout import held_out, held_out_persons
from silodp.silo.data.records import Records

if TYPE_CHECKING:
    from silodp.core.features.feature_map import FeatureMap

MAX_DIM = 2**26
MAX_RECORDS = 2**31
_CLIPS = 2.0**-400, 2.0**400  # within which no power of two below can over- or underflow
SCORED = 3 + 2 * max(MAX_BINS, MAX_GROUPS)
"""Numbers in the longest row of a statistic that asks for the model's output."""
DIMS = [2**power for power in range(27)]
"""Dimensions up to MAX_DIM, so many that every width of a kernel is among theirs."""
WIDEST = 2**22
"""Numbers of a record that may be asked for, or as many as the model or twice the features are:
with chunks of `slots.CHUNK` numbers, of a person's rows too, it bounds the memory that an answer
takes, whatever is asked."""
PLACES = "places of persons", 0
"""The stored permutation of persons: no sampling has 0 batches, so that nobody can ask for one of
this name.
"""


def devices() -> list[str]:
    """Where products of layers may be computed, the best first: chosen once, when a gate starts.
    SILODP_GPU=0 leaves a GPU out.
    """
    if os.environ.get("SILODP_GPU") != "0" and torch.cuda.is_available():
        return ["cuda", "cpu"]
    return ["cpu"]


MOST_IN_PRODUCTS = 2**22
"""Records up to which a sum of integers of 2^30 is exact in float64."""


class Exact:
    """Answers the queries of one silo. Holds its records, and noise only while it is added; there
    is no seed and no way without noise.

    `partition(name, batches)` is the ledger's stored permutation of 0 .. n - 1, drawn once for each
    name and number of batches. `marks` has one secret mark for each person, from the ledger too:
    persons with small marks are held out. Without marks their places alone decide.
    """

    label = "deployment: exact lattice noise from operating-system entropy"

    def __init__(
        self,
        problem: Problem,
        records: Records,
        *,
        partition: Callable[[str, int], np.ndarray],
        held_out_share: float = 0.0,
        marks: Sequence[bytes] | None = None,
        mapped: FeatureMap | None = None,
    ) -> None:
        if len(records) != 1:
            raise BadInput(
                f"a deployed gate keeps the records of one silo, but was given {len(records)}"
            )
        if not (problem.dim <= MAX_DIM and records.counts[0] <= MAX_RECORDS):
            raise BadInput(
                "the lattice has room for 2^26 parameters and 2^31 records, but there are "
                f"{problem.dim} and {records.counts[0]}"
            )
        records.check_unit(problem.person)
        self.problem = problem
        self._partition = partition
        self._n = records.counts[0]
        self._held = held_out(self._n, held_out_share)
        if problem.person:
            at = torch.from_numpy(self._places(marks))
        else:
            at = slice(None)
        self._x, self._y, self._absent = (
            part[0, : self._n].cpu()[at] for part in (records.x, records.y, records.absent)
        )
        if records.void is None:
            void = torch.zeros(1, self._n, dtype=torch.bool)
        else:
            void = records.void
        self._void = void[0, : self._n].cpu()[at].clone()
        self._rows = problem.person.rows if problem.person else 1
        self._threads = torch.get_num_threads()
        self._map = mapped
        raw = self._x.flatten(0, self._y.dim() - 1)
        self._raw = torch.zeros_like(raw[:1]), torch.zeros_like(self._y.flatten()[:1])
        if mapped:
            with pinned(self._threads):
                made, failed = mapped.of_each(raw)
            self._x = made.unflatten(0, self._y.shape)
            self._void |= failed.reshape(self._n, -1).any(1)
            self._absent = torch.zeros_like(self._x, dtype=torch.bool)
        self._forget_void()
        self.features = math.prod(self._x.shape[1:]) // self._rows
        known = self._n <= MOST_IN_PRODUCTS and problem.person is None
        shapes = self._x.shape[1:], self._y.shape[1:]
        found = (Products.of(problem, *shapes, device) for device in devices() if known)
        self._products = next((products for products in found if products), None)
        if self._products:
            self._known = self._products.known(self._x)
        else:
            self._known = []

    def _forget_void(self) -> None:
        """Put zeros in the place of what cannot be used: no kernel sees it. `_sum` leaves such a
        record out, so that it counts as zero whatever is asked.
        """
        self._x = self._x.masked_fill(_beside(self._void, self._x), 0)
        self._y = self._y.masked_fill(_beside(self._void, self._y), 0)
        self._absent = self._absent & ~_beside(self._void, self._absent)

    @property
    def void(self) -> int:
        """How many records count as zero. For the hospital alone."""
        return int(self._void.sum())

    def _places(self, marks: Sequence[bytes] | None) -> np.ndarray:
        """Return the list number of the person at each place."""
        try:
            order = self._permutation(*PLACES)
        except Refused:
            raise BadInput(
                "the ledger has no places for these persons; restore it, or show it the "
                "records first"
            ) from None
        if marks is None:
            return order
        return held_out_persons(order, self._held, marks)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of the features and targets of all records, which are public."""
        return tuple(self._x.shape), tuple(self._y.shape)

    @property
    def number(self) -> bool:
        """Whether a target is a number, and not a class."""
        return self._y.is_floating_point()

    def verify(self) -> None:
        """Raises BadInput if this machine's kernels let a record's vector depend on other records,
        which no price here allows for.

        With the silo's own model and threads, in chunks of all sizes in which a question can be
        answered, at an ordinary point and at one that overflows, on made-up records: the floats,
        and the integers that are made of them.
        """
        if (
            os.environ.get("OMP_DYNAMIC", "false").lower() != "false"
            or "OMP_THREAD_LIMIT" in os.environ
        ):
            raise BadInput(
                "OMP_DYNAMIC or OMP_THREAD_LIMIT is set, so this machine's load would "
                "decide how a record's numbers are rounded; unset it"
            )
        ordinary = self.problem.initial([0]).double().cpu()
        like = (self._x, self._y)
        dim = self.problem.dim
        if (
            not ordinary.any()
        ):  # where a convex problem starts, products are of zeros, and nothing could be seen to mix
            ordinary = torch.from_numpy(
                np.random.default_rng(0).normal(size=ordinary.shape)
            ) / math.sqrt(dim)
        gradients = self._sizes(None)
        scores = self._sizes(SCORED)
        wide = set[int]().union(*map(self._sizes, DIMS))
        huge = 1e150 * ordinary
        gram = Gram(min(self.features, MAX_FACTORS - 2), 2, 1.0, 1.0)
        alive = Grad(ordinary), Score(ordinary, MAX_BINS, 1.0)
        trials = [
            (statistic, gradients)
            for statistic in (alive[0], Grad(huge), ClippedDiff(ordinary, 0.9 * ordinary, 1.0))
        ]
        trials += [
            (statistic, scores)
            for statistic in (
                alive[1],
                Score(huge, MAX_BINS, 1.0),
            )
        ]
        trials += [
            (GroupScore(w, 0, min(self.features, MAX_GROUPS), 0), scores) for w in (ordinary, huge)
        ]
        trials += [
            (gram, self._sizes(gram.shape[-1])),
            (Gram(1, 2, 1.0, 1.0), wide),
            (ClassCounts(2), wide),
        ]
        trials += [(Histogram(torch.zeros(1), self.features), wide)]
        with pinned(self._threads):
            if (mapped := self._map) and mapped.at_once > 1:
                verify(lambda x, y: mapped.unchecked(x), self._raw, {mapped.at_once}, None)
            elif mapped:
                mapped.refuse_memory(self._raw[0].shape[1])
            for statistic, sizes in trials:
                rows, numbers = self._tried(statistic)
                verify(rows, like, sizes, numbers, alive=statistic in alive)
            verify(self._of_each(gram.factors(self.problem, 0)), like, wide, self._rows * gram.size)
        if self._products:
            with pinned(1):  # as each of its threads has
                self._products.verify(self._n)
                for points in ([ordinary], [ordinary, 0.9 * ordinary], [1e30 * ordinary]):
                    rows = self._products.rows(points, 1.0, lattice_step(1.0, dim))
                    verify(
                        rows, like, self._products.sizes(self._n), None, alive=points[0] is ordinary
                    )

    def _tried(self, statistic: Statistic) -> tuple[Rows, int]:
        """All that is made of each record for a statistic, floats and integers, as rows of so many
        numbers.
        """
        factors = statistic.factors(self.problem, 0, torch.float64)
        clip = float(getattr(statistic, "norm", 1.0))
        dim = statistic.shape[-1]
        if factors:
            rows = self._of_each(factors)
        else:
            rows = self._rows_of(statistic)
        integers = self._integers(
            clip, lattice_step(clip, dim), statistic.numbers, multiply=factors is not None
        )

        def tried(x: Tensor, y: Tensor) -> Tensor:
            values = rows(x, y)
            return torch.cat([values, integers(values, y).double()], 1)

        return tried, dim + (self._rows * statistic.size if factors else dim)

    def check(self, query: Query) -> None:
        """Raises Refused, before any charge, for what gate.check does not know of: the silo's own
        features, runs beside the first, the lattice.
        """
        query.statistic.check_silo(self.features, int(self._held.sum()))
        batches = isinstance(query.mechanism.sampling, DisjointBatches)
        if self.problem.person and query.statistic.on_held_out and batches:
            raise Refused("sampling")  # see 6 above
        check_lattice(query, query.statistic.shape[-1], self._n)
        if query.statistic.shape[-1] > max(WIDEST, self.problem.dim, 2 * self.features):
            raise Refused("shape")
        query.statistic.check_reach(float(query.mechanism.clip))

    def answer(self, query: Query, silos: Sequence[int]) -> Tensor:
        """Return the private answer, (1, 1, d), float64 and finite, whatever the records hold.

        Raises only where entropy, memory or the stored partition fails.
        """
        with pinned(self._threads):
            value = self._private(query.statistic, query.mechanism)
            return value.nan_to_num().reshape(1, 1, -1)

    def _private(self, statistic: Statistic, mechanism: Mechanism) -> Tensor:
        """Compute a statistic and add the noise of its mechanism."""
        if not isinstance(mechanism, Gaussian):
            raise Refused("noise")
        if isinstance(statistic, LocalSteps):
            return self._local_steps(statistic, mechanism)
        if mechanism.total:
            return torch.from_numpy(self._noisy_sum(statistic, mechanism))
        noisy = self._noisy_sum(statistic, mechanism)
        return self._mean(noisy, mechanism, self._part(statistic))

    def packing(self, query: Query) -> Packing | None:
        """How the answer's numbers are sent: by query, n and how many records are held out; None
        where they are on no lattice.
        """
        m = query.mechanism
        statistic = query.statistic
        if not isinstance(m, Gaussian) or isinstance(
            statistic, LocalSteps
        ):  # where local steps end is on no lattice
            return None
        clip = float(m.clip) or 1.0
        gamma = lattice_step(clip, statistic.shape[-1])
        records = int(self._part(statistic).sum())
        expected = m.sampling.batch(self._n) * records / self._n
        top = most(m.noise_multiplier, clip, statistic.shape[-1], records)
        return Packing.of(gamma, expected, top, noise_scale(m.noise_multiplier, clip, gamma))

    def _part(self, statistic: Statistic) -> np.ndarray:
        """Return (n,) bool: the records that a statistic is of. The others count as zero."""
        if statistic.on_held_out:
            return self._held
        return ~self._held

    def _noisy_sum(self, statistic: Statistic, mechanism: Gaussian) -> np.ndarray:
        """Return (d,) int64: the sum of the statistic's integers under the silo's own noise."""
        factors = statistic.factors(self.problem, 0, torch.float64)
        source = None
        match statistic.view:
            case "given":  # a value that was filled in is none of the record's
                source = self._x.masked_fill(self._absent, math.nan)
            case "missing":
                source = self._absent
        return self._release(
            factors or self._rows_of(statistic),
            mechanism,
            statistic.shape[-1],
            self._part(statistic),
            statistic.numbers,
            source,
            multiply=factors is not None,
        )

    def _rows_of(self, statistic: Statistic) -> Rows:
        return statistic.vectors(
            self.problem, 0, torch.float64, size_of(statistic.shape[-1])
        ) or self._gradients(list(statistic.points), getattr(statistic, "limit", None))

    def _local_steps(self, statistic: LocalSteps, mechanism: Gaussian) -> Tensor:
        """The last point minus w. All but the releases is public arithmetic; where it leaves the
        numbers, the steps end.
        """
        start = local = statistic.w.double()
        drift = torch.as_tensor(statistic.pull, dtype=torch.float64)
        for _ in range(statistic.steps):
            part = ~self._held
            noisy = self._release(self._gradients([local]), mechanism, start.shape[-1], part)
            g = self._mean(noisy, mechanism, part)
            try:
                moved = self.problem.prox(local - statistic.step * (g + drift), statistic.step)
            except Exception:
                break
            if not bool(torch.isfinite(moved).all()):
                break
            local = moved
        return local - start

    def _release(
        self,
        rows: Rows,
        mechanism: Gaussian,
        dim: int,
        part: np.ndarray,
        numbers: int | None = None,
        source: Tensor | None = None,
        *,
        multiply: bool = False,
    ) -> np.ndarray:
        """Return (d,) int64: S + round(N(0, s^2)) over the part's records in a fresh batch, with
        fresh noise.

        For a statistic of cells: how many `numbers` come before them. With `multiply`, rows are
        factors. Another view of the records' features is taken where it is given.
        """
        clip = float(mechanism.clip)
        if clip == 0:
            return np.zeros(dim, np.int64)
        gamma = lattice_step(clip, dim)
        chosen = self._batch(mechanism.sampling)
        total = self._sum(rows, chosen[part[chosen]], clip, gamma, dim, numbers, source, multiply)
        scale = noise_scale(mechanism.noise_multiplier, clip, gamma)
        return total + lattice.rounded_gaussian(scale, dim)

    def _mean(self, noisy: np.ndarray, mechanism: Gaussian, part: np.ndarray) -> Tensor:
        """Return (1, d): what a noisy sum says of the mean over the part's records in a batch."""
        expected = mechanism.sampling.batch(self._n) * int(part.sum()) / self._n
        gamma = lattice_step(float(mechanism.clip) or 1.0, len(noisy))
        return torch.from_numpy(gamma * noisy.astype(np.float64) / expected)[None]

    def _batch(self, sampling: Sampling) -> np.ndarray:
        """Positions of the batch's records, by secret coins or by the stored partition: in no way
        by what the records hold.
        """
        match sampling:
            case FullBatch():
                return np.arange(self._n)
            case Poisson(rate):
                return np.flatnonzero(lattice.Keystream().coins(self._n, rate))
            case DisjointBatches(batches=batches, index=index, partition=name):
                size = self._n // batches
                return self._permutation(name, batches)[index * size : (index + 1) * size]
        return lattice.Keystream().permutation(self._n)[: int(sampling.batch(self._n))]

    def _permutation(self, name: str, batches: int) -> np.ndarray:
        order = np.ascontiguousarray(self._partition(name, batches))
        if not np.array_equal(np.sort(order), np.arange(self._n)):
            raise Refused("ledger")
        return order

    def _sum(
        self,
        rows: Rows,
        chosen: np.ndarray,
        clip: float,
        gamma: float,
        dim: int,
        numbers: int | None = None,
        source: Tensor | None = None,
        multiply: bool = False,
    ) -> np.ndarray:
        """S, exactly: the integers of the chosen records, of all that are computed."""

        drawn = np.zeros(self._n, bool)
        drawn[chosen] = True
        drawn[self._void.numpy()] = False
        if self._products and isinstance(rows, Gradients) and rows.limit is None:
            return self._products.sum(
                rows.points,
                self._x,
                self._y,
                drawn,
                clip,
                gamma,
                self._threads,
                self._known,
            )
        total = torch.zeros(dim, dtype=torch.int64)
        source = self._x if source is None else source
        each = self._of_each(rows) if multiply else rows
        integers = self._integers(clip, gamma, numbers, multiply)
        for slot in slots(self._n, self._width(None if isinstance(rows, Gradients) else dim)):
            found = computed(
                lambda x, y: integers(each(x, y), y), source[slot], self._y[slot], dim, torch.int64
            )
            total += found.where(torch.from_numpy(drawn[slot, None]), 0).sum(0)
        return total.numpy()

    def _integers(
        self,
        clip: float,
        gamma: float,
        numbers: int | None,
        multiply: bool = False,
    ) -> Rows:
        """From records' floats (m, ...) and targets their integers (m, d), verified as the
        statistic's bound wants.
        """
        if multiply:
            person = self.problem.person is not None
            return lambda values, y: multiplied(
                values.reshape(-1, values.shape[1] // self._rows),
                clip,
                gamma,
                present(y) if person else None,
            )
        if numbers is not None:
            return lambda values, y: levelled(values, numbers, gamma)
        return lambda values, y: quantised(values, clip, gamma)

    def _of_each(self, factors: Rows) -> Rows:
        """Factors of records, (m, p); of persons those at all their places, (m, P p)."""
        if not self.problem.person:
            return factors
        return lambda x, y: factors(x.flatten(0, 1), filled(y).flatten()).reshape(len(x), -1)

    def _width(self, dim: int | None) -> int:
        """Numbers that a record makes on its way, by which chunks are measured: of gradients, or of
        a statistic of `dim` numbers.

        No question chooses the chunks in which the model is asked: they are of the gate's own
        model, and of scores as long as any is. What a score makes on its way, features and layers,
        may be longer still. Wider rows than that are of statistics that do not ask the model, and
        have chunks of an eighth, a 64th, and so on: few enough for `verify` to try them all. Of a
        person all this is made for each of its places, whether it has a row there or not.
        """
        width = max(self.problem.dim, self.features, SCORED if dim else 0)
        while dim and width < dim:
            width *= 8
        return self._rows * width

    def _sizes(self, dim: int | None) -> set[int]:
        return lengths(self._n, size_of(self._width(dim)))

    def _gradients(self, points: list[Tensor], limit: Number | None = None) -> Gradients:
        return Gradients(self.problem, points, None if limit is None else float(limit))


def _beside(void: Tensor, values: Tensor) -> Tensor:
    """Return (n,) bool with as many axes as the values (n, ...)."""
    return void.view(-1, *(1,) * (values.dim() - 1))


# --- the lattice ---------------------------------------------------------------------------------


def check_lattice(query: Query, dim: int, n: int) -> None:
    """Refuse, before the charge, what the lattice cannot carry: more than one run, too many
    coordinates, a clip or noise off its scale.
    """
    if len(query.statistic.shape) != 2 or query.statistic.shape[0] != 1 or not 1 <= dim <= MAX_DIM:
        raise Refused("shape")
    if n > MAX_RECORDS:
        raise Refused("batch")
    if not isinstance(query.mechanism, Gaussian):
        raise Refused("noise")
    _check_clip(query.mechanism)
    _check_scale(query.mechanism, dim)


def _check_scale(mechanism: Gaussian, dim: int) -> None:
    """Refuse Gaussian noise that the lattice cannot draw.

    A clip of 0 needs no noise, but its price follows from the noise: a price of 0 would let it be
    asked for ever. So its noise is checked as at a clip of 1.
    """
    clip = float(mechanism.clip) or 1.0
    scale = noise_scale(mechanism.noise_multiplier, clip, lattice_step(clip, dim))
    if not 1 <= scale <= lattice.MAX_SCALE:
        raise Refused("noise")


def _check_clip(mechanism: Mechanism) -> None:
    if mechanism.clip != 0 and not _CLIPS[0] <= mechanism.clip <= _CLIPS[1]:
        raise Refused("clip")
