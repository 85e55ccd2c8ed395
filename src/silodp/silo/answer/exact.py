"""Compute the answers of a deployed gate: exact sums of verified integers, under exact noise.

Clipped records are integers on a lattice. They are summed exactly, and exact Gaussian noise is
added. The numbered steps below are the proof. Comments in the code name the step that they belong
to.

Formal guarantees. Let C be the clip, z the noise multiplier and gamma the lattice's step. Let D and
D' be data sets that differ in record j. S and S' are their sums.

 1. One record, one vector (`_sum`, `slots`). Record i's integer vector k_i depends on that record,
    its position and public numbers alone. It depends neither on the content of other records nor on
    which of them are drawn. All n vectors are computed for every query, in the same chunks, and the
    batch is a mask on the integers. So only k_j differs between D and D'. S with record j drawn is
    S without it plus k_j, as amplification requires.
 2. Bounds are verified in integers (`_integers`, `integers.quantised`). The check of sum(k_i^2) <=
    floor((C / gamma)^2) comes after all floating point. A vector that fails is replaced by zero. So
    ||k_j|| <= C / gamma. The int64 sums S and S' are exact, and differ by at most 2 C / gamma in
    norm. Two kinds of statistics have another check, with the same result for S and S':
    a. Numbers and blocks of cells (`statistics.Cells`, `integers.levelled`). Each number is in 0 ..
       1 / gamma. The cells of a block are >= 0 and sum to at most 1 / gamma. Two such vectors
       differ by at most sqrt(numbers + 2 blocks) / gamma in norm. That numbers + 2 blocks <=
       (2 C)^2 is verified in fractions before the charge.
    b. Products (`statistics.gram`, `integers.multiplied`). The factors are verified as a vector is,
       by a bound from C, d and gamma alone, and are multiplied in integers. Two such vectors differ
       by at most 2 C / gamma, which is sqrt(2) of their largest norm and not twice it.
 3. The noise is exact (`_release`, `core.lattice.noise_scale`). round(N(0, s^2)) with s >= z 2 C /
    gamma is added to each coordinate, by the exact law (`lattice.rounded_gaussian`). S is an
    integer, so S + round(N) = round(S + N). This is post-processing of a Gaussian mechanism with mu
    = (2 C / gamma) / s <= 1 / z.
 4. The release is post-processing (`_mean`). It is gamma x integer / batch, where gamma and
    batch are public. So the mean is mu-GDP with mu = 1 / z, as the event states, without any
    tolerance. Sub-sampled batches are drawn by secret coins, independent of the data (`_batch`),
    and take the time of a full pass. Each local step is such a release, at a point that earlier
    releases determine (`_local_steps`).
 5. Held-out records are a mask too (`_part`, `_mean`). A Score (or one by groups) uses
    the vectors of held-out records and takes the others as zero. Every other
    statistic does the reverse. Which records are held out is a function of position and n
    (`heldout`). So steps 1 to 4 hold for all n records. The release divides by the batch's expected
    number of records of its part, which is public. This makes nothing cheaper: all charges add up.
 6. Persons have secret places (`_places`). If a record is a person, D and D' differ in all rows of
    one person: in their number, their content, their places in the file, and the person's id.
    - a. Every person has the same P places, so no shape follows its rows.
    - b. Secret marks, which persons keep through edits, decide who is held out
      (`heldout.held_out_persons`): the persons with the smallest h of n marks. So one exchanged
      person changes the set of persons of either part by one person at most. Every query is about
      one part and sees no more than that one person, for whom it is charged.
    - c. The other part may then have another person too. Both of these are in two batches of a
      stored partition, of which only the dearer one is paid for. So queries about held-out persons
      may not use such batches (`check`).
    - d. The list numbers that a loader gives to the other persons may follow from one person's
      rows. So each person has a place in its part by a permutation. It is drawn uniformly at random
      for these records, stored in the ledger and never published. Whatever lists a loader makes of
      D and D', under such a permutation a part of one has the law of that of the other with one
      person exchanged at its place. Given the places, steps 1 to 5 hold. A bound on the trade-off
      between two laws that holds given the places also holds for their mixture over the places.
    - e. A feature map rounds by place as any kernel does. It is therefore applied at these places,
      once they are drawn.

Gradients of models of known layers are summed by exact products of whole chunks (`products`). Its
docstring proves steps 1 to 4 for these. There S with record j is within C / gamma of S without it.
Step 3 and amplification use no more than that.

Totals rest on the same steps. For a total, a silo rounds the integers S + round(N(0, s^2)) of steps
1 to 3 to multiples of 2^k, halves upwards (`coarser`). Since floor((floor(x) + a) / b) = floor((x +
a) / b) for integers a and b, that is round((S + 1/2 + N) / 2^k): one rounding of a real sum under
Gaussian noise. Lattice and k follow from the query alone, so the integers of several silos add up.

By itself such an answer is post-processing of the release of step 3, with z the silo's share of the
noise. A party that sees the answer learns that much. The sum over the honest silos is priced by
`core.privacy.totals`. The answer leaves under masks, or sealed for the shuffler's key alone
(`silo.service.trust`).

No step requires floats to be right. Wrong gradients, rounding or overflow cost accuracy, never
privacy.

Assumed: at fixed shapes a tensor kernel computes a record's row from that row and its place.
`verify` tries this with the silo's own model before a gate serves, and the tests try it bit for bit
with several instruction sets. ChaCha20 is secure. Time is not observed: it depends on the noise
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

from silodp.core.differentiate import Gradients
from silodp.core.errors import BadInput, Refused
from silodp.core.lattice import lattice_step, most, noise_scale
from silodp.core.mechanisms import Gaussian, Mechanism
from silodp.core.mechanisms.totals import as_total
from silodp.core.numbers import Number
from silodp.core.problem.person import filled, present
from silodp.core.problem.problem import Problem
from silodp.core.protocol.packing import Packing
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, Sampling
from silodp.core.statistics import (
    LABEL,
    Binned,
    ClassCounts,
    ClippedDiff,
    Grad,
    GradDiff,
    Histogram,
    LocalSteps,
    Marginals,
    MissingRates,
    Moments,
    Outcomes,
    Rows,
    ScaledGrad,
    Statistic,
)
from silodp.core.statistics.gram import MAX_FACTORS, Gram
from silodp.core.statistics.group_score import MAX_GROUPS, GroupClasses, GroupScore
from silodp.core.statistics.regression import COX, FAMILIES, Regression
from silodp.core.statistics.risk_cells import MOST_EDGES, RiskCells
from silodp.core.statistics.score import MAX_BINS, Score
from silodp.silo.answer import lattice
from silodp.silo.answer.integers import levelled, multiplied, quantised
from silodp.silo.answer.slots import computed, lengths, pinned, size_of, slots, verify
from silodp.silo.data.heldout import held_out, held_out_persons
from silodp.silo.data.records import Records

if TYPE_CHECKING:
    from silodp.core.features.feature_map import FeatureMap
    from silodp.silo.answer.products import Products

MAX_DIM = 2**26
MAX_RECORDS = 2**31
_CLIPS = 2.0**-400, 2.0**400
"""Clips between these cannot make a power of two below over- or underflow."""
SCORED = max(3 + 2 * max(MAX_BINS, MAX_GROUPS), 2 + 2 * (MOST_EDGES + 1))
"""Numbers in the longest row of a statistic that needs the model's output."""
DIMS = [2**power for power in range(27)]
"""Dimensions up to MAX_DIM. Every width of chunks (`Exact._width`) belongs to one of them."""
MOST_TABLES = 32
"""The tables of `Marginals` that a gate tries. One takes as long as another."""
WIDEST = 2**22
"""Most numbers that a query may need of a record, unless the model or twice the features are more.
With chunks of `slots.CHUNK` numbers, of a person's rows too, it bounds the memory of every answer.
"""
Levels = tuple[int, tuple[int, ...]]
"""How many numbers in [0, 1] come before the cells, and how many cells each block has."""
PLACES = "places of persons", 0
"""The stored permutation of persons. No sampling has 0 batches, so no query can use this name."""


def devices() -> list[str]:
    """Return where products of layers may be computed, the best first.

    It is chosen once, when a gate starts. SILODP_GPU=0 leaves a GPU out.
    """
    if os.environ.get("SILODP_GPU") != "0" and torch.cuda.is_available():
        return ["cuda", "cpu"]
    return ["cpu"]


MOST_IN_PRODUCTS = 2**22
"""Records up to which a sum of integers of 2^30 is exact in float64."""


class Exact:
    """Answer the queries of one silo.

    It has the silo's records, and noise only while the noise is added. There is no seed and no way
    without noise. `partition(name, batches)` is the ledger's stored permutation of 0 .. n - 1,
    drawn once for each name and number of batches. `marks` has one secret mark for each person,
    from the ledger too: persons with small marks are held out. Without marks their places alone
    decide.
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
                f"a deployed gate has the records of one silo, but was given {len(records)} silos"
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
        if problem.person:
            self._rows = problem.person.rows
        else:
            self._rows = 1
        self._threads = torch.get_num_threads()
        self._map = mapped
        raw = self._x.flatten(0, self._y.dim() - 1)
        self._raw = torch.zeros_like(raw[:1]), torch.zeros_like(self._y.flatten()[:1])
        if mapped:
            # Step 6e: the map is applied once the places are drawn.
            with pinned(self._threads):
                features, failed = mapped.of_each(raw)
            self._x = features.unflatten(0, self._y.shape)
            self._void |= failed.reshape(self._n, -1).any(1)
            self._absent = torch.zeros_like(self._x, dtype=torch.bool)
        self._forget_void()
        self.features = math.prod(self._x.shape[1:]) // self._rows
        self._products = self._products_of()
        if self._products:
            self._known = self._products.known(self._x)
        else:
            self._known = []

    def _products_of(self) -> Products | None:
        """Return exact products for this model on the best device, or None if none is possible."""
        if self._n > MOST_IN_PRODUCTS or self.problem.person:
            return None
        # A gate of persons has no products, and does not load them.
        from silodp.silo.answer.products import Products

        for device in devices():
            products = Products.of(self.problem, self._x.shape[1:], self._y.shape[1:], device)
            if products:
                return products
        return None

    def _forget_void(self) -> None:
        """Replace void records by zeros, so that no kernel sees them.

        `_sum` leaves such a record out, so it counts as zero in every query.
        """
        self._x = self._x.masked_fill(_beside(self._void, self._x), 0)
        self._y = self._y.masked_fill(_beside(self._void, self._y), 0)
        self._absent = self._absent & ~_beside(self._void, self._absent)

    @property
    def void(self) -> int:
        """Return how many records count as zero, for the hospital alone."""
        return int(self._void.sum())

    def _places(self, marks: Sequence[bytes] | None) -> np.ndarray:
        """Return the list number of the person at each place. Raise BadInput if the ledger has no
        places.
        """
        try:
            order = self._permutation(*PLACES)
        except Refused:
            raise BadInput(
                "the ledger has no places for these persons; restore the ledger, or let it "
                "recognise the records first"
            ) from None
        if marks is None:
            return order
        return held_out_persons(order, self._held, marks)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the features and of the targets of all records, which are public."""
        return tuple(self._x.shape), tuple(self._y.shape)

    @property
    def retries(self) -> float:
        """Return how many times as long an answer takes in which the model raises on one record.

        The record's chunk is then computed again in halves (`slots.computed`). Sums of known
        layers never raise.
        """
        if self._products:
            return 1.0
        size = min(self._n, size_of(self._width(None)))
        more = 2 * math.ceil(math.log2(size)) or 1
        return 1 + more / math.ceil(self._n / size)

    @property
    def number(self) -> bool:
        """Return whether a target is a number, and not a class."""
        return self._y.is_floating_point()

    def verify(self) -> None:
        """Raise BadInput if on this machine a record's vector depends on other records.

        No price allows for that. The test uses the silo's own model and threads, in chunks of all
        sizes in which a query can be answered, at an ordinary point and at one that overflows.
        Records are invented. It covers the floats, and the integers that are made of them.
        """
        if (
            os.environ.get("OMP_DYNAMIC", "false").lower() != "false"
            or "OMP_THREAD_LIMIT" in os.environ
        ):
            raise BadInput(
                "OMP_DYNAMIC or OMP_THREAD_LIMIT is set, so this machine's load would "
                "decide how a record's numbers are rounded; unset both"
            )
        ordinary = self.problem.initial([0]).double().cpu()
        like = (self._x, self._y)
        dim = self.problem.dim
        if not ordinary.any():
            # A convex problem starts at zero. Products of zeros could not show any mixing.
            normal = np.random.default_rng(0).normal(size=ordinary.shape)
            ordinary = torch.from_numpy(normal) / math.sqrt(dim)
        trials = self._trials(ordinary)
        mapped = self._map
        with pinned(self._threads):
            if mapped and mapped.at_once > 1:
                verify(lambda x, y: mapped.unchecked(x), self._raw, {mapped.at_once}, None)
            elif mapped:
                mapped.refuse_memory(self._raw[0].shape[1])
            for statistic, sizes in trials:
                rows, numbers = self._tried(statistic)
                alive = type(statistic) in (Grad, Score) and statistic.points[0] is ordinary
                verify(rows, like, sizes, numbers, alive=alive)
            # Products are made in the same way of all factors.
            regressions = [_regression(family, self.features) for family in FAMILIES]
            for products in (self._gram(), *regressions):
                factors = self._of_each(products.factors(self.problem, 0))
                numbers = self._rows * products.terms * products.size
                verify(factors, like, self._wide(), numbers)
        if self._products:
            with pinned(1):  # as in each thread of `in_threads`
                self._products.verify(self._n)
                for points in ([ordinary], [ordinary, 0.9 * ordinary], [1e30 * ordinary]):
                    rows = self._products.rows(points, 1.0, lattice_step(1.0, dim))
                    verify(
                        rows, like, self._products.sizes(self._n), None, alive=points[0] is ordinary
                    )

    def _trials(self, ordinary: Tensor) -> list[tuple[Statistic, set[int]]]:
        """Return statistics of every type with the lengths of the chunks in which they are tried.

        Local steps release the gradients of `Grad`, at points of their own. Their trial is its
        trial.
        """
        dim = self.problem.dim
        gradients = self._sizes(None)
        scores = self._sizes(SCORED)
        wide = self._wide()
        huge = 1e150 * ordinary
        groups = min(self.features, MAX_GROUPS)
        gram = self._gram()
        regression = _regression(COX, self.features)
        edges = torch.linspace(-6, 6, MOST_EDGES, dtype=torch.float64)
        each = torch.ones(self.features, dtype=torch.float64)
        return [
            (Grad(ordinary), gradients),
            (Grad(huge), gradients),
            (GradDiff(ordinary, 0.9 * ordinary), gradients),
            (ClippedDiff(ordinary, 0.9 * ordinary, 1.0), gradients),
            (Score(ordinary, MAX_BINS, 1.0), scores),
            (Score(huge, MAX_BINS, 1.0), scores),
            (GroupScore(ordinary, 0, groups, 0), scores),
            (GroupScore(huge, 0, groups, 0), scores),
            (ScaledGrad(ordinary, 0.1 * each, 0.5 * each, 1.0), self._sizes(dim)),
            (ScaledGrad(huge, 0.1 * each, 0.5 * each, 1.0), self._sizes(dim)),
            (RiskCells(ordinary, edges, 1.0), scores),
            (RiskCells(huge, edges, 1.0), scores),
            (RiskCells(ordinary, edges[:0], 1.0), scores),
            (RiskCells(huge, edges[:0], 1.0), scores),
            (gram, self._sizes(gram.shape[-1])),
            (Gram(1, 2, 1.0, 1.0), wide),
            (regression, self._sizes(regression.shape[-1])),
            (ClassCounts(2), wide),
            (GroupClasses(2, 0, groups, 0), wide),
            (Histogram(torch.zeros(1), self.features), wide),
            (Marginals.of(*_columns(min(self.features, MOST_TABLES))), wide),
            (MissingRates(self.features), wide),
            (Moments(-each, each), wide),
            (Outcomes(1), wide),
        ]

    def _wide(self) -> set[int]:
        """Return the lengths of all chunks for statistics of any number of numbers."""
        return set[int]().union(*map(self._sizes, DIMS))

    def _gram(self) -> Gram:
        """Return the Gram matrix of up to as many features as a query may have."""
        return Gram(min(self.features, MAX_FACTORS - 2), 2, 1.0, 1.0)

    def _tried(self, statistic: Statistic) -> tuple[Rows, int]:
        """Return all floats and integers that a statistic makes of each record, and how many they
        are.
        """
        factors = statistic.factors(self.problem, 0, torch.float64)
        clip = float(getattr(statistic, "norm", 1.0))
        dim = statistic.shape[-1]
        if factors:
            rows = self._of_each(factors)
        else:
            rows = self._rows_of(statistic)
        terms = 0
        if factors:
            terms = statistic.terms
        integers = self._integers(clip, lattice_step(clip, dim), _levels(statistic), terms)

        def floats_and_integers(x: Tensor, y: Tensor) -> Tensor:
            values = rows(x, y)
            return torch.cat([values, integers(values, y).double()], 1)

        if factors:
            return floats_and_integers, dim + self._rows * terms * statistic.size
        return floats_and_integers, 2 * dim

    def check(self, query: Query) -> None:
        """Raise Refused, before any charge, for a query that this silo cannot answer.

        These checks are not in `gate.check`: the silo's own features, more than one run, the
        lattice.
        """
        query.statistic.check_silo(self.features, int(self._held.sum()))
        batches = isinstance(query.mechanism.sampling, DisjointBatches)
        if self.problem.person and query.statistic.on_held_out and batches:
            raise Refused("sampling")  # step 6c
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
            noisy = self._noisy_sum(statistic, mechanism)
            return torch.from_numpy(coarser(noisy, as_total(mechanism).shift(len(noisy))))
        noisy = self._noisy_sum(statistic, mechanism)
        return self._mean(noisy, mechanism, self._part(statistic))

    def packing(self, query: Query) -> Packing | None:
        """Return how the answer's numbers are sent, or None if they are on no lattice.

        It follows from the query, n and the number of held-out records.
        """
        mechanism = query.mechanism
        statistic = query.statistic
        # The end of local steps is on no lattice.
        if not isinstance(mechanism, Gaussian) or isinstance(statistic, LocalSteps):
            return None
        clip = float(mechanism.clip) or 1.0
        gamma = lattice_step(clip, statistic.shape[-1])
        records = int(self._part(statistic).sum())
        expected = mechanism.sampling.batch(self._n) * records / self._n
        top = most(mechanism.noise_multiplier, clip, statistic.shape[-1], records)
        scale = noise_scale(mechanism.noise_multiplier, clip, gamma)
        return Packing.of(gamma, expected, top, scale)

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
            case "given":
                # A value that was filled in does not belong to the record.
                source = self._x.masked_fill(self._absent, math.nan)
            case "missing":
                source = self._absent
        return self._release(
            factors or self._rows_of(statistic),
            mechanism,
            statistic.shape[-1],
            self._part(statistic),
            _levels(statistic),
            source,
            statistic.terms if factors else 0,
        )

    def _rows_of(self, statistic: Statistic) -> Rows:
        """Return the function from records to the statistic's vectors."""
        dim = statistic.shape[-1]
        vectors = statistic.vectors(self.problem, 0, torch.float64, size_of(dim))
        if vectors:
            return vectors
        return self._gradients(list(statistic.points), getattr(statistic, "limit", None))

    def _local_steps(self, statistic: LocalSteps, mechanism: Gaussian) -> Tensor:
        """Return the last point minus w. Steps end early if prox raises or a point is not finite.

        All but the releases is public arithmetic.
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
        levels: Levels | None = None,
        source: Tensor | None = None,
        terms: int = 0,
    ) -> np.ndarray:
        """Return (d,) int64: S + round(N(0, s^2)) over the part's records in a fresh batch, with
        fresh noise.

        `levels` are those of a statistic of cells. With `terms`, rows are the factors of so many
        terms. Another view of the records' features is taken where it is given.
        """
        clip = float(mechanism.clip)
        if clip == 0:
            return np.zeros(dim, np.int64)
        gamma = lattice_step(clip, dim)
        chosen = self._batch(mechanism.sampling)
        total = self._sum(rows, chosen[part[chosen]], clip, gamma, dim, levels, source, terms)
        scale = noise_scale(mechanism.noise_multiplier, clip, gamma)
        return total + lattice.rounded_gaussian(scale, dim)

    def _mean(self, noisy: np.ndarray, mechanism: Gaussian, part: np.ndarray) -> Tensor:
        """Return (1, d): what a noisy sum says of the mean over the part's records in a batch."""
        expected = mechanism.sampling.batch(self._n) * int(part.sum()) / self._n
        gamma = lattice_step(float(mechanism.clip) or 1.0, len(noisy))
        return torch.from_numpy(gamma * noisy.astype(np.float64) / expected)[None]

    def _batch(self, sampling: Sampling) -> np.ndarray:
        """Return the positions of the batch's records.

        They follow from secret coins or from the stored partition, and never from the content of
        records.
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
        """Return the stored permutation. Raise Refused if it is none of 0 .. n - 1."""
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
        levels: Levels | None = None,
        source: Tensor | None = None,
        terms: int = 0,
    ) -> np.ndarray:
        """Return S exactly: the sum of the integers of the chosen records. All records are
        computed.
        """

        # Step 1: the batch is a mask, and all n records are computed.
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
        if source is None:
            source = self._x
        if isinstance(rows, Gradients):
            width = self._width(None)
        else:
            width = self._width(dim)
        floats = rows
        if terms:
            floats = self._of_each(rows)
        integers = self._integers(clip, gamma, levels, terms)
        total = torch.zeros(dim, dtype=torch.int64)
        for slot in slots(self._n, width):
            vectors = computed(
                lambda x, y: integers(floats(x, y), y),
                source[slot],
                self._y[slot],
                dim,
                torch.int64,
            )
            total += vectors.where(torch.from_numpy(drawn[slot, None]), 0).sum(0)
        return total.numpy()

    def _integers(
        self,
        clip: float,
        gamma: float,
        levels: Levels | None,
        terms: int = 0,
    ) -> Rows:
        """Return the function from records' floats (m, ...) and targets to their verified integers
        (m, d).
        """
        # Step 2 has a check for each of these.
        if terms and self.problem.person:
            return lambda values, y: multiplied(
                values.reshape(-1, values.shape[1] // self._rows), clip, gamma, present(y), terms
            )
        if terms:
            return lambda values, y: multiplied(values, clip, gamma, None, terms)
        if levels is not None:
            numbers, blocks = levels
            return lambda values, y: levelled(values, numbers, gamma, blocks)
        return lambda values, y: quantised(values, clip, gamma)

    def _of_each(self, factors: Rows) -> Rows:
        """Return the function to the factors of records, (m, p), or of persons at all their places,
        (m, P p).
        """
        if not self.problem.person:
            return factors
        return lambda x, y: factors(x.flatten(0, 1), filled(y).flatten()).reshape(len(x), -1)

    def _width(self, dim: int | None) -> int:
        """Return how many numbers a record makes on its way, by which chunks are measured.

        They are of gradients, or of a statistic of `dim` numbers. No query chooses the chunks in
        which the model is evaluated: they follow from the gate's own model, and from the longest
        score. What a score makes on its way, features and layers, may be longer still. Wider rows
        belong to statistics that do not evaluate the model. They have chunks of an eighth, a 64th,
        and so on: few enough for `verify` to try them all. Of a person all this is made for each of
        its places, whether it has a row there or not.
        """
        width = max(self.problem.dim, self.features)
        if dim:
            width = max(width, SCORED)
        while dim and width < dim:
            width *= 8
        return self._rows * width

    def _sizes(self, dim: int | None) -> set[int]:
        """Return the lengths of all chunks for a statistic of `dim` numbers, or for gradients."""
        return lengths(self._n, size_of(self._width(dim)))

    def _gradients(self, points: list[Tensor], limit: Number | None = None) -> Gradients:
        if limit is not None:
            limit = float(limit)
        return Gradients(self.problem, points, limit)


def _levels(statistic: Statistic) -> Levels | None:
    """Return the numbers and blocks of a statistic of cells, or None for any other."""
    if statistic.numbers is None:
        return None
    return statistic.numbers, statistic.blocks


def _regression(family: int, features: int) -> Regression:
    """Return a step of a regression on up to 1,024 features, for a gate's test of itself."""
    scale = (torch.arange(features) < 2**10).double()
    slopes = 0.1 * torch.ones(int(scale.sum()), dtype=torch.float64)
    levels = torch.tensor([-1.0, 0.0, 0.5], dtype=torch.float64)
    periods = torch.tensor([0, 0, 1])
    if family != COX:
        levels = levels[:1]
        periods = periods[:1]
    return Regression(family, slopes, levels, periods, 0 * scale, scale, 2.0, 1.5)


def _columns(features: int) -> tuple[list[Binned], list[tuple[int, ...]]]:
    """Return columns and tables for a gate's test of itself: each feature with the label."""
    columns = [Binned(place, 1, (-1.0, 0.0, 1.0)) for place in range(features)]
    columns.append(Binned(LABEL, 2))
    return columns, [(place, features) for place in range(features)]


def _beside(void: Tensor, values: Tensor) -> Tensor:
    """Return (n,) bool with as many axes as the values (n, ...)."""
    return void.view(-1, *(1,) * (values.dim() - 1))


# --- the lattice ---------------------------------------------------------------------------------


def coarser(numbers: np.ndarray, shift: int) -> np.ndarray:
    """Return the integers (int64) in steps of 2^shift, the nearest ones, half a step upwards."""
    if shift == 0:
        return numbers
    return (numbers + 2 ** (shift - 1)) >> shift


def check_lattice(query: Query, dim: int, n: int) -> None:
    """Raise Refused, before the charge, for a query that the lattice cannot carry.

    That is more than one run, too many coordinates, or a clip or noise off its scale.
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
    """Raise Refused for Gaussian noise that the lattice cannot draw.

    A clip of 0 needs no noise, but its price follows from the noise. A price of 0 would allow it to
    be queried for ever. So its noise is checked as at a clip of 1.
    """
    clip = float(mechanism.clip) or 1.0
    scale = noise_scale(mechanism.noise_multiplier, clip, lattice_step(clip, dim))
    if not 1 <= scale <= lattice.MAX_SCALE:
        raise Refused("noise")


def _check_clip(mechanism: Mechanism) -> None:
    """Raise Refused for a clip with which powers of two could over- or underflow."""
    if mechanism.clip != 0 and not _CLIPS[0] <= mechanism.clip <= _CLIPS[1]:
        raise Refused("clip")
