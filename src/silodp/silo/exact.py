"""How a deployed gate computes: clipped records as integers on a lattice, summed exactly, under exact Gaussian noise.

Formal guarantees. Let C be the clip, z the noise multiplier, gamma the lattice's step, D and D' data sets that differ in record j.
 1. Record i's integer vector k_i depends on that record, its position and public numbers alone (see `_rows`), so only k_j differs.
 2. sum(k_i^2) <= floor((C / gamma)^2) is verified in integers, after all floating point; a vector that fails is replaced by zero.
    So ||k_j|| <= C / gamma, and the int64 sums S, S' are exact and differ by at most 2 C / gamma in norm.
    A statistic of numbers and cells (`query.Cells`) is verified otherwise, in integers too (`levelled`): each number is in 0 .. 1 / gamma,
    and of the cells at most one is not 0, and that is 1 / gamma. Two such vectors differ by at most sqrt(numbers + 2) / gamma in norm,
    and numbers + 2 <= (2 C)^2 is verified in fractions before the charge: S and S' differ by at most 2 C / gamma once more.
 3. Added is round(N(0, s^2)) with s >= z 2 C / gamma, coordinate by coordinate, by the exact law (`lattice.rounded_gaussian`). As S is
    an integer, S + round(N) = round(S + N): post-processing of a Gaussian mechanism with mu = (2 C / gamma) / s <= 1 / z.
 4. The release gamma x integer / batch is post-processing, with gamma and batch public. So the mean is mu-GDP with mu = 1 / z: what
    the event says, with nothing left to a tolerance. Sub-sampled batches are drawn by secret coins, independent of the data.
    Each of the local steps is such a release, at a point that earlier releases determine.
 5. With held-out records, a Score takes the vectors of these for what they are and of the others as zero, and every other statistic
    the reverse. Which they are is a function of position and n (`heldout`), so 1 to 4 stand as they are, for all n records; the release
    divides by the batch's expected number of records of its part, which is public. Nothing is cheaper for it: all charges add up.
Shuffled totals (`_counts`) rest on `core.shuffle` and `core.binomial` instead: each record's row is clipped and scaled to [0, g]^d in float64,
which moves it by at most g (1 + 1e-6) against its neighbour's (the price has 1e-5), rounded at random and summed in integers, and exact
binomial noise is added. What leaves is for the shuffler's key alone (`door`).
No step of a Gaussian release asks floats to be right: wrong gradients, rounding or overflow cost accuracy, never privacy.
Assumed: a tensor kernel computes a record's row from that row and the shapes alone (so it is for matrix products, convolutions and
element-wise functions; the tests check it bit for bit), ChaCha20 is secure, and time is not observed: it depends on the noise drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from silodp.core import shuffle
from silodp.core.binomial import MAX_TRIALS
from silodp.core.errors import BadInput, Refused
from silodp.core.problem import Problem
from silodp.core.query import (
    Cells,
    DisjointBatches,
    FullBatch,
    Gaussian,
    Grad,
    GradDiff,
    Histogram,
    LocalSteps,
    MissingRates,
    Moments,
    Poisson,
    Query,
    Sampling,
    Score,
    Shuffled,
    Statistic,
    SteeredSteps,
)
from silodp.silo import lattice
from silodp.silo.heldout import held_out
from silodp.silo.records import Records
from silodp.silo.scoring import Rows, cell_rows

GRAIN = 16
"""A record loses at most 2^-(GRAIN + 1) of its clip to the lattice: gamma <= 2^-GRAIN C / sqrt(d)."""
MAX_DIM, MAX_RECORDS, MAX_EDGES = 2**26, 2**31, 2**10
_CLIPS = 2.0**-400, 2.0**400  # within which no power of two below can over- or underflow
MAX_COINS = 2**37
"""Coins that one answer for a shuffler may toss in all: about a minute's work."""
_CHUNK = 2**20  # numbers in a chunk of records' gradients: 8 MiB


class Exact:
    """Answers the queries of one silo. Holds its records, and noise only while it is added; there is no seed and no way without noise.

    `partition(name, batches)` is the ledger's stored permutation of 0 .. n - 1, drawn once for each name and number of batches.
    """

    label = "deployment: exact lattice noise from operating-system entropy"

    def __init__(
        self, problem: Problem, records: Records, *, partition: Callable[[str, int], np.ndarray], held_out_share: float = 0.0
    ) -> None:
        if len(records) != 1:
            raise BadInput(f"a deployed gate keeps the records of one silo, but was given {len(records)}")
        if not (problem.dim <= MAX_DIM and records.counts[0] <= MAX_RECORDS):
            raise BadInput(
                f"the lattice has room for 2^26 parameters and 2^31 records, but there are {problem.dim} and {records.counts[0]}"
            )
        self.problem, self._partition, self._n = problem, partition, records.counts[0]
        self._x, self._y = records.x[0, : self._n].cpu(), records.y[0, : self._n].cpu()
        self._absent, self._held = records.absent[0, : self._n].cpu(), held_out(self._n, held_out_share)
        self.features = math.prod(self._x.shape[1:])

    def check(self, query: Query) -> None:
        """Raises Refused, before any charge, for what gate.check does not know of: feature statistics, runs beside the first, the lattice."""
        match query.statistic:
            case Histogram(edges=edges, features=features):
                if features != self.features or not 1 <= len(edges) <= MAX_EDGES:
                    raise Refused("shape")
                if not bool(torch.isfinite(edges).all()):
                    raise Refused("not-finite")
                _refuse_unordered(edges[:-1], edges[1:])
            case Moments(low=low, high=high):
                if not len(low) == len(high) == self.features:
                    raise Refused("shape")
                _refuse_unordered(low, high)
            case Score() if not self._held.any():
                raise Refused("batch")
        check_lattice(query, query.statistic.shape[-1], self._n)
        if isinstance(query.statistic, Cells) and query.statistic.reach > 4 * Fraction(query.mechanism.clip) ** 2:
            raise Refused("clip")

    def answer(self, query: Query, silos: Sequence[int]) -> Tensor:
        """(1, 1, d), float64 and finite, whatever the records hold. Raises only where entropy or the stored partition fails."""
        mechanism = query.mechanism
        if isinstance(mechanism, Shuffled):
            return torch.from_numpy(self._counts(self._rows_of(query.statistic), mechanism, query.statistic.shape[-1])).reshape(1, 1, -1)
        match query.statistic:
            case LocalSteps() as statistic:
                answer = self._local_steps(statistic, mechanism)
            case Cells() as statistic:
                answer = self._cells(statistic, mechanism)
            case Histogram() | Moments() as statistic:  # a value that was filled in is none of the record's
                source = self._x.masked_fill(self._absent, math.nan)
                answer = self._release(self._rows_of(statistic), mechanism, statistic.shape[-1], source=source)
            case _:
                answer = self._release(self._rows_of(query.statistic), mechanism, query.statistic.shape[-1])
        return answer.nan_to_num().reshape(1, 1, -1)

    def _rows_of(self, statistic: Statistic) -> Rows:
        match statistic:
            case Grad(w=w):
                return self._gradients([w])
            case GradDiff(w=w, reference=reference):
                return self._gradients([w, reference])
            case Histogram(edges=edges):
                return _histogram(edges.double())
            case Moments(low=low, high=high):
                return _moments(low.double(), high.double())
        raise AssertionError("local steps are no sum over records, and cells have an arithmetic of their own")

    def _local_steps(self, statistic: LocalSteps, mechanism: Gaussian) -> Tensor:
        """The last point minus w. All but the releases is public arithmetic; where it leaves the numbers, the steps end."""
        start = local = statistic.w.double()
        drift = statistic.drift.double() if isinstance(statistic, SteeredSteps) else 0.0
        for _ in range(statistic.steps):
            g = self._release(self._gradients([local]), mechanism, start.shape[-1])
            try:
                moved = self.problem.prox(local - statistic.step * (g + drift), statistic.step)
            except Exception:
                break
            if not bool(torch.isfinite(moved).all()):
                break
            local = moved
        return local - start

    def _cells(self, statistic: Cells, mechanism: Gaussian) -> Tensor:
        scored = isinstance(statistic, Score)
        rows = cell_rows(statistic, self.problem, statistic.w[0].double() if scored else None)
        part = self._held if scored else None
        source = self._absent if isinstance(statistic, MissingRates) else None
        return self._release(rows, mechanism, statistic.shape[-1], statistic.numbers, source, part)

    def _release(
        self,
        rows: Rows,
        mechanism: Gaussian,
        dim: int,
        numbers: int | None = None,
        source: Tensor | None = None,
        part: np.ndarray | None = None,
    ) -> Tensor:
        """(1, d): gamma (S + round(N(0, s^2))) / batch, with a fresh batch and fresh noise, over the records that are not held out.

        For a statistic of cells: how many `numbers` come before them. Other records than the training part, and another view of their
        features, where they are given.
        """
        clip = float(mechanism.clip)
        if clip == 0:
            return torch.zeros(1, dim, dtype=torch.float64)
        gamma, part = lattice_step(clip, dim), ~self._held if part is None else part
        chosen = self._batch(mechanism.sampling)
        try:
            total = self._sum(rows, chosen[part[chosen]], clip, gamma, dim, numbers, source)
        except Exception:  # paid for, so an answer there must be: noise around zero
            total = np.zeros(dim, np.int64)
        noisy = total + lattice.rounded_gaussian(noise_scale(mechanism, gamma), dim)
        expected = mechanism.sampling.batch(self._n) * int(part.sum()) / self._n
        return torch.from_numpy(gamma * noisy.astype(np.float64) / expected)[None]

    def _counts(self, rows: Rows, mechanism: Shuffled, dim: int) -> np.ndarray:
        """(d,) int64: the sum of the batch's rounded rows plus Bin(K b, p). Rows of held-out records, or all with a clip of 0, are zero."""
        parameters = shuffle.Parameters(mechanism.levels, mechanism.noise_bits, mechanism.p)
        random, chosen = lattice.Keystream().bytes, self._batch(mechanism.sampling)
        clip, total = float(mechanism.clip) or 1.0, np.zeros(dim, np.int64)
        for at in self._chunks(rows, chosen, dim, self._x):
            try:
                values = _rows(rows, _wide(self._x[at]), _wide(self._y[at]), dim).numpy()
            except Exception:  # paid for, so an answer there must be: these records as zero
                values = np.zeros((len(at), dim))
            values[self._held[at.numpy()] | (mechanism.clip == 0)] = 0.0
            total += shuffle.rounded(values, clip, parameters, random).sum(axis=0)
        return total + shuffle.binomial(random, len(chosen) * mechanism.noise_bits, mechanism.p, dim)

    def _batch(self, sampling: Sampling) -> np.ndarray:
        """Positions of the batch's records, by secret coins or by the stored partition: in no way by what the records hold."""
        match sampling:
            case FullBatch():
                return np.arange(self._n)
            case Poisson(rate):
                return np.flatnonzero(lattice.Keystream().coins(self._n, rate))
            case DisjointBatches(batches=batches, index=index, partition=name):
                order, size = np.ascontiguousarray(self._partition(name, batches)), self._n // batches
                if not np.array_equal(np.sort(order), np.arange(self._n)):
                    raise Refused("ledger")
                return order[index * size : (index + 1) * size]
        return lattice.Keystream().permutation(self._n)[: int(sampling.batch(self._n))]

    def _sum(
        self,
        rows: Rows,
        chosen: np.ndarray,
        clip: float,
        gamma: float,
        dim: int,
        numbers: int | None = None,
        source: Tensor | None = None,
    ) -> np.ndarray:
        """S, exactly."""
        total, source = torch.zeros(dim, dtype=torch.int64), self._x if source is None else source
        for at in self._chunks(rows, chosen, dim, source):
            floats = _rows(rows, _wide(source[at]), _wide(self._y[at]), dim)
            total += (quantised(floats, clip, gamma) if numbers is None else levelled(floats, numbers, gamma)).sum(0)
        return total.numpy()

    def _chunks(self, rows: Rows, chosen: np.ndarray, dim: int, source: Tensor) -> Iterator[Tensor]:
        """Positions of records that are computed together: one at a time where the all-zero record, which is public, makes kernels raise.

        What a score makes on its way, features and layers, is longer than the score itself.
        """
        together = _alone(rows, _wide(torch.zeros_like(source[:1])), _wide(torch.zeros_like(self._y[:1]))) is not None
        size = max(1, _CHUNK // max(dim, self.problem.dim, self.features)) if together else 1
        yield from (torch.from_numpy(chosen[start : start + size]) for start in range(0, len(chosen), size))

    def _gradients(self, points: list[Tensor]) -> Rows:
        """grad f0(w, x) of each record in float64, or its difference between two points."""
        constants = self.problem.constants(points[0].double())

        def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
            output = functional_call(self.problem.model, self.problem.split(w) | constants, (x[None],))
            return self.problem.record_loss(output[0], y)

        def gradients(x: Tensor, y: Tensor) -> Tensor:
            each = [vmap(grad(loss), (None, 0, 0))(w[0].double(), x, y) for w in points]
            return each[0] if len(each) == 1 else each[0] - each[1]

        return gradients


# --- one record's vector, whatever the others are -------------------------------------------------------------------------------------


def _rows(rows: Rows, x: Tensor, y: Tensor, dim: int) -> Tensor:
    """(m, d): row i depends on record i, its position and the shapes alone, to the last bit; a record on which `rows` raises gives zero.

    Batched kernels may round by the batch's shape, so a record that raises must not change the shape in which the others are computed:
    an all-zero record, on which `rows` does not raise (or else m is 1), takes its place, and the same batch is computed again. Should
    that raise too, a library's fault, the others' own rows computed alone come closest: no record takes others with it.
    """
    try:
        return rows(x, y)
    except Exception:
        each = [_alone(rows, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    bad = torch.tensor([row is None for row in each])
    wide = [bad.view(-1, *(1,) * (t.dim() - 1)) for t in (x, y)]
    again = _alone(rows, x.masked_fill(wide[0], 0), y.masked_fill(wide[1], 0))
    if again is None:
        again = torch.cat([torch.zeros(1, dim, dtype=torch.float64) if row is None else row for row in each])
    return again.masked_fill(bad[:, None], 0)


def _alone(rows: Rows, x: Tensor, y: Tensor) -> Tensor | None:
    try:
        return rows(x, y)
    except Exception:
        return None


def _wide(values: Tensor) -> Tensor:
    return values.double() if values.is_floating_point() else values


def _histogram(edges: Tensor) -> Rows:
    """As silo.scaling.histogram_sum: each feature one-hot over the bins, a value that is not finite in none; norm <= sqrt(features)."""

    def rows(x: Tensor, y: Tensor) -> Tensor:
        x = x.flatten(1).double().contiguous()
        hot = torch.nn.functional.one_hot(torch.bucketize(x, edges), len(edges) + 1)
        return (hot * torch.isfinite(x)[..., None]).flatten(1).double()

    return rows


def _moments(low: Tensor, high: Tensor) -> Rows:
    """As silo.scaling.moments_sum: u and u^2, u the feature clamped to its public range and mapped to [-1, 1]; norm <= sqrt(2 features)."""

    def rows(x: Tensor, y: Tensor) -> Tensor:
        u = (2 * (x.flatten(1).double() - low) / (high - low) - 1).clamp(-1, 1).nan_to_num(0.0)
        return torch.cat([u, u.square()], 1)

    return rows


def _refuse_unordered(low: Tensor, high: Tensor) -> None:
    if not bool(torch.isfinite(low).all() and torch.isfinite(high).all() and torch.isfinite(high.double() - low.double()).all()):
        raise Refused("not-finite")
    if not bool((low < high).all()):
        raise Refused("shape")


# --- the lattice ----------------------------------------------------------------------------------------------------------------------


def lattice_step(clip: float, dim: int) -> float:
    """gamma, a power of two from C and d alone, with 2^-(GRAIN + 3) C / sqrt(d) < gamma <= 2^-GRAIN C / sqrt(d).

    With sqrt(d) <= 2^b it is 2^(e - 1 - b - GRAIN) for C in [2^(e-1), 2^e). So C / gamma < 2^(b + GRAIN + 1) <= 2^30 for d <= 2^26: a
    record's squares sum to less than 2^60, and 2^31 records to less than 2^61 per coordinate, to which noise adds less than 2^62.
    """
    root = (math.isqrt(dim - 1) if dim > 1 else 0) + 1
    return math.ldexp(1.0, math.frexp(clip)[1] - 1 - (root - 1).bit_length() - GRAIN)


def noise_scale(mechanism: Gaussian, gamma: float) -> float:
    """s = z 2 C / gamma in lattice units, rounded up: 2 C / gamma is exact, since gamma is a power of two."""
    return math.nextafter(float(mechanism.noise_multiplier) * (2 * float(mechanism.clip) / gamma), math.inf)


def check_lattice(query: Query, dim: int, n: int) -> None:
    """Refuses, before the charge, what the lattice cannot carry: more than one run, too many coordinates, a clip or noise off its scale."""
    mechanism = query.mechanism
    if len(query.statistic.shape) != 2 or query.statistic.shape[0] != 1 or not 1 <= dim <= MAX_DIM:
        raise Refused("shape")
    if n > MAX_RECORDS:
        raise Refused("batch")
    if isinstance(mechanism, Shuffled):
        coins = int(mechanism.sampling.batch(n)) * mechanism.noise_bits if mechanism.noise_bits > 0 else 0
        if not 0 < coins <= MAX_TRIALS or coins * dim > MAX_COINS:
            raise Refused("noise")
        if mechanism.clip != 0 and not _CLIPS[0] <= mechanism.clip <= _CLIPS[1]:
            raise Refused("clip")
        return
    if mechanism.clip != 0 and not _CLIPS[0] <= mechanism.clip <= _CLIPS[1]:
        raise Refused("clip")
    anyway = mechanism.clipped(mechanism.clip or 1.0)  # a clip of 0 needs no noise, but is priced by it: a price of 0 would be for ever
    if not 1 <= noise_scale(anyway, lattice_step(float(anyway.clip), dim)) <= lattice.MAX_SCALE:
        raise Refused("noise")


def quantised(rows: Tensor, clip: float, gamma: float) -> Tensor:
    """Rows (m, d) of any floats as int64 rows k with sum(k^2) <= floor((C / gamma)^2), each a function of its own row alone.

    A row is clipped to C less what rounding can add, gamma sqrt(d) / 2 (and 2^-30 of it for floats), divided by gamma and rounded to the
    nearest integers. A row that is zero, not finite or, against all arithmetic, above the bound becomes zero.
    """
    rows = rows.contiguous()  # whatever one record holds, the others' squares are added in one order
    most = int(Fraction(clip / gamma) ** 2)
    room = clip / gamma * (1 - 2.0**-30) - math.sqrt(rows.shape[1]) / 2
    largest = rows.abs().amax(1, keepdim=True)
    sound = torch.isfinite(largest) & (largest > 0)
    rows = rows.masked_fill(~sound, 0.0) if not bool(sound.all()) else rows
    unit = rows / torch.where(sound, largest, 1.0)  # entries within [-1, 1]: no square overflows
    length = torch.linalg.vector_norm(unit, dim=1, keepdim=True).clamp_(min=1.0)
    whole = unit.mul_(torch.minimum(torch.where(sound, largest, 0.0) / gamma, room / length)).round_()
    # float64 first, to about d 2^-53: below twice the bound an int64 sum of squares cannot wrap, and then it decides
    whole[_squares(whole) > 2.0 * most] = 0.0
    integers = whole.long()
    integers[_squares(integers) > most] = 0
    return integers


def levelled(rows: Tensor, numbers: int, gamma: float) -> Tensor:
    """Rows of `numbers` numbers in [0, 1] and cells, at most one of them 1, as int64 multiples of gamma: those verified to be such.

    gamma is a power of two below 1, so that 1 / gamma is an integer; a row of any other form becomes zero, which is of this form.
    """
    top = int(1 / gamma)
    whole = (rows.nan_to_num(0.0, 0.0, 0.0) / gamma).clamp(-1, top + 1).round().long()
    values, cells = whole[:, :numbers], whole[:, numbers:]
    sound = ((values >= 0) & (values <= top)).all(1) & ((cells == 0) | (cells == top)).all(1) & ((cells != 0).sum(1) <= 1)
    whole[~sound] = 0
    return whole


def _squares(rows: Tensor) -> Tensor:
    return torch.from_numpy(np.einsum("md,md->m", rows.numpy(), rows.numpy()))
