"""The question port as data: what a server may ask, what it asks it with, and what comes back.

A query is frozen data, so it can be priced, refused, counted in a dry run, serialised and replayed before any record is touched.
Neighbours replace one record and n is public; noise multiplier means std / sensitivity, everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar, Self

from torch import Tensor

from silodp.core.errors import BadInput

Number = float | Tensor
"""A hyper-parameter: one number, or one per run with shape (J, 1)."""

CLIP_TOLERANCE = 1e-5
"""Relative rounding error allowed to a clipped norm; every sensitivity is charged for clip x (1 + this)."""


# --- statistics: what is averaged over a silo's records -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Grad:
    """grad f0(w, x) of each record. w has shape (J, d), one point per run."""

    w: Tensor
    releases: int = field(default=1, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a mean answer."""
        return tuple(self.w.shape)


@dataclass(frozen=True, eq=False)
class GradDiff:
    """grad f0(w, x) - grad f0(reference, x) of each record, clipped as one vector."""

    w: Tensor
    reference: Tensor
    releases: int = field(default=1, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape)


@dataclass(frozen=True, eq=False)
class LocalSteps:
    """`steps` noisy proximal gradient steps from w inside the silo; the answer is the silo's last point minus w.

    Each step is a clipped mean gradient with noise of its own, so the answer costs what `steps` releases of Grad cost.
    """

    w: Tensor
    steps: int
    step: Number

    @property
    def releases(self) -> int:
        return self.steps

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape)


@dataclass(frozen=True, eq=False)
class SteeredSteps(LocalSteps):
    """LocalSteps each of which adds `drift` to its noisy gradient: a public vector for the silo that is asked, as SCAFFOLD's c - c_i.

    Nothing but the noisy gradients depends on records, so the answer costs what LocalSteps cost.
    """

    drift: Tensor


@dataclass(frozen=True, eq=False)
class Histogram:
    """For each feature the bin that a record falls in, one-hot over the public `edges`; each record's vector has norm sqrt(features)."""

    edges: Tensor
    features: int
    releases: int = field(default=1, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, self.features * (len(self.edges) + 1)

    @property
    def norm(self) -> float:
        """A record's largest norm: nobody clips it, so no smaller clip may be asked for."""
        return math.sqrt(self.features)


@dataclass(frozen=True, eq=False)
class Moments:
    """Each feature clamped to its public range, mapped to u in [-1, 1], and (u, u^2): each record's vector has norm <= sqrt(2 features)."""

    low: Tensor
    high: Tensor
    releases: int = field(default=1, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, 2 * len(self.low)

    @property
    def features(self) -> int:
        return len(self.low)

    @property
    def norm(self) -> float:
        return math.sqrt(2 * self.features)


class Cells:
    """A record's vector is some `numbers` in [0, 1] and then cells, of which at most one is 1 and the rest 0.

    Two such vectors differ by at most 1 in each number and sqrt(2) over the cells: one replaced record moves a sum by at most
    sqrt(numbers + 2), which is less than twice a norm. The clip of such a statistic is half of that, so that 2 clip is exact.
    """

    releases: ClassVar[int] = 1

    @property
    def numbers(self) -> int: ...

    @property
    def cells(self) -> int: ...

    @property
    def reach(self) -> int:
        """The square of the largest distance between two records' vectors."""
        return self.numbers + (2 if self.cells else 0)

    @property
    def norm(self) -> float:
        """The smallest clip that may be asked for: half of the reach's root, rounded up."""
        half = math.sqrt(self.reach) / 2
        return half if 4 * Fraction(half) ** 2 >= self.reach else math.nextafter(half, math.inf)

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, self.numbers + self.cells


@dataclass(frozen=True, eq=False)
class Score(Cells):
    """How w does on the held-out records. Of a class: loss / cap, right or not, and for two classes the cell (label, bin of the score).

    Of a number: (error / cap)^2 and |error| / cap, and no cells. All are clipped to [0, 1]; what is not finite is the worst.
    """

    w: Tensor
    bins: int
    cap: float

    @property
    def numbers(self) -> int:
        return 2

    @property
    def cells(self) -> int:
        return 2 * self.bins

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.w), self.numbers + self.cells


@dataclass(frozen=True, eq=False)
class ClassCounts(Cells):
    """The class of each record, one-hot; a label outside 0 .. classes - 1 is in no cell."""

    classes: int

    @property
    def numbers(self) -> int:
        return 0

    @property
    def cells(self) -> int:
        return self.classes


@dataclass(frozen=True, eq=False)
class MissingRates(Cells):
    """For each feature 1 where a record's value is missing, else 0: any number of a record's features may be missing."""

    features: int

    @property
    def numbers(self) -> int:
        return self.features

    @property
    def cells(self) -> int:
        return 0


MAX_BINS, MAX_CLASSES = 2**9, 2**16
"""Of a Score and of ClassCounts, at most: a query is a few numbers, and must not make a silo allocate more than it may be sent."""

Statistic = Grad | GradDiff | LocalSteps | SteeredSteps | Histogram | Moments | Score | ClassCounts | MissingRates


# --- sampling: over which records ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FullBatch:
    """Every record of the silo."""

    def batch(self, n: int) -> float:
        return n


@dataclass(frozen=True)
class DisjointBatches:
    """Batch `index` of a stored random partition into `batches` parts of floor(n / batches) records; each record is in at most one."""

    batches: int
    index: int = 0
    partition: str = "run"

    def batch(self, n: int) -> float:
        return n // self.batches


@dataclass(frozen=True)
class Poisson:
    """Each record with probability `rate`, by a secret coin of its own; the mean divides by the expected size rate x n, which is public."""

    rate: float

    def batch(self, n: int) -> float:
        return self.rate * n


@dataclass(frozen=True)
class WithoutReplacement:
    """A fresh uniformly random batch of floor(rate x n) distinct records."""

    rate: float

    def batch(self, n: int) -> float:
        return math.floor(self.rate * n)


Sampling = FullBatch | DisjointBatches | Poisson | WithoutReplacement


# --- mechanism and event, made together -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Event:
    """What one query does to privacy: `count` Gaussian releases at this noise multiplier (std / sensitivity) on these batches."""

    sampling: Sampling
    noise_multiplier: Number
    count: Any = 1
    """An int; in a committed schedule of several silos, an array with one for each."""


@dataclass(frozen=True, eq=False)
class Shared:
    """What one shuffled query does to privacy: `count` totals of d coordinates, each under the noise of `contributions` records.

    Every contribution is an integer vector with entries in 0 .. levels under Bin(noise_bits, p). Numbers, or one per run (J, 1). The
    noise of a silo's own records is all that protects it from whoever sees its message alone: its ledger says how much that is.
    """

    sampling: Sampling
    levels: Any
    noise_bits: Any
    p: float
    contributions: int
    dimension: int
    count: int = 1


class _Clipped:
    """What mechanisms have in common: they clip, and they take a batch."""

    clip: Number
    sampling: Sampling

    def clipped(self, clip: Number) -> Self:
        """The same mechanism at another clip: the noise follows the clip, the price stays."""
        return replace(self, clip=clip)  # type: ignore[type-var]

    def at(self, index: int) -> Self:
        """The mechanism of round `index`: takes that batch of a partition; other samplings draw anew by themselves."""
        if isinstance(self.sampling, DisjointBatches):
            return replace(self, sampling=replace(self.sampling, index=index))  # type: ignore[type-var]
        return self


@dataclass(frozen=True, eq=False)
class Gaussian(_Clipped):
    """A mean of records clipped to `clip`, plus N(0, std^2) with std = noise_multiplier x 2 clip / batch.

    `noise_multiplier` is a number, or one per run and silo with shape (J, N): each silo has a budget of its own.
    `kind` names the release in plans and ledgers.
    """

    kind: str
    clip: Number
    noise_multiplier: Number
    sampling: Sampling = FullBatch()

    def sensitivity(self, n: int) -> Number:
        """Largest change of the mean when one of n records is replaced: 2 clip / batch, with the rounding tolerance charged."""
        batch = self.sampling.batch(n)
        if batch < 1:
            raise BadInput(
                f"sampling gives batches of {batch:g} records of {n}; use fewer batches or a larger rate, so that a batch has 1 or more"
            )
        return 2 * self.clip * (1 + CLIP_TOLERANCE) / batch

    def event(self, releases: int = 1) -> Event:
        return Event(self.sampling, self.noise_multiplier, releases)


@dataclass(frozen=True, eq=False)
class Shuffled(_Clipped):
    """Totals of records clipped to `clip`, rounded onto `levels` steps, each with `noise_bits` coins (core.shuffle), for a shuffler to add.

    The shuffler passes totals on once `contributions` records or more are in them, so this is the noise that the price counts on. Levels
    and noise bits are integers, or one per run (J, 1): unlike a Gaussian's, a silo's noise is part of what protects the others.
    """

    kind: str
    clip: Number
    levels: Any
    noise_bits: Any
    contributions: int
    p: float = 0.5
    sampling: Sampling = FullBatch()

    def contributed(self, counts: Iterable[int]) -> int:
        """How many records silos of these sizes contribute in a round."""
        return sum(int(self.sampling.batch(n)) for n in counts)

    def event(self, releases: int = 1, dimension: int = 1) -> Shared:
        return Shared(self.sampling, self.levels, self.noise_bits, self.p, self.contributions, dimension, releases)


Mechanism = Gaussian | Shuffled


@dataclass(frozen=True, eq=False)
class Query:
    """One question to the silos: this statistic through this mechanism."""

    statistic: Statistic
    mechanism: Mechanism

    def event(self) -> Event | Shared:
        """What an answer costs, known before any record is looked at."""
        if isinstance(self.mechanism, Shuffled):
            return self.mechanism.event(self.statistic.releases, self.statistic.shape[-1])
        return self.mechanism.event(self.statistic.releases)


@dataclass(frozen=True, eq=False)
class Release:
    """What the gate lets out: `value` (J, M, d), one private vector for each run and answering silo. Only gate.py makes one."""

    value: Tensor
    silos: tuple[int, ...]
    event: Event | Shared
