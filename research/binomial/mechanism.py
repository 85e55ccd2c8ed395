"""The mechanism of the paper's shuffle protocol, and what it does to privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from research.binomial.accountant import MAX_LEVELS, MAX_TRIALS, is_power_of_half
from research.binomial.protocol import mean_in_total
from silodp.core.errors import Refused
from silodp.core.fields import INTEGER, NAME, REAL
from silodp.core.mechanisms.mechanism import Mechanism
from silodp.core.numbers import Number
from silodp.core.sampling import FullBatch, Sampling
from silodp.core.weights import Weights

if TYPE_CHECKING:
    from silodp.core.statistics import Statistic


@dataclass(frozen=True, eq=False)
class BinomialEvent:
    """What one shuffled query does to privacy: `count` totals of d coordinates, each under the
    noise of `contributions` records.

    Every contribution is an integer vector with entries in 0 .. levels under Bin(noise_bits, p).
    Numbers, or one per run (J, 1). The noise of a silo's own records is all that protects it from
    whoever sees its message alone: its ledger says how much that is.
    """

    sampling: Sampling
    levels: Any
    noise_bits: Any
    p: float
    contributions: int
    dimension: int
    count: int = 1
    wire: ClassVar[dict[str, str]] = {
        "levels": INTEGER,
        "noise_bits": INTEGER,
        "p": REAL,
        "contributions": INTEGER,
        "dimension": INTEGER,
    }
    total: ClassVar[bool] = True

    @property
    def multiplier(self) -> float:
        """Noise over sensitivity, of all the contributions that the query counts on."""
        return math.sqrt(self.contributions * self.noise_bits * self.p * (1 - self.p)) / self.levels

    def of(self, silo: int) -> BinomialEvent:
        import torch  # slow to load

        levels, bits = (int(torch.as_tensor(v).item()) for v in (self.levels, self.noise_bits))
        return replace(self, levels=levels, noise_bits=bits)

    def alone(self, own: int | None) -> BinomialEvent:
        """What somebody learns who sees the silo's own counts: they are under the noise of its
        `own` records alone.
        """
        if own is None:
            return self
        return replace(self, contributions=own)

    def single(self) -> BinomialEvent:
        if not all(
            type(n) is int and n >= 1
            for n in (self.levels, self.noise_bits, self.contributions, self.dimension, self.count)
        ):
            raise Refused("noise")
        return self


@dataclass(frozen=True, eq=False)
class Binomial(Mechanism):
    """Totals of records clipped to `clip`, rounded onto `levels` steps, each with `noise_bits`
    coins (`protocol`), for a shuffler to add.

    The shuffler passes totals on once `contributions` records or more are in them, so this is the
    noise that the price counts on. Levels and noise bits are integers, or one per run (J, 1):
    unlike a Gaussian's, a silo's noise is part of what protects the others.

    Sensitivity: a ball of diameter 2 clip is scaled to `levels`, so that a replaced record moves
    the totals by at most `levels` in length before rounding; what rounding adds to that, and what
    Bin(contributions noise_bits, p) then costs, is proven in `accountant`.
    """

    kind: str
    clip: Number
    levels: Any
    noise_bits: Any
    contributions: int
    p: float = 0.5
    sampling: Sampling = FullBatch()  # noqa: RUF009 -- frozen

    wire: ClassVar = {
        "kind": NAME,
        "clip": REAL,
        "levels": INTEGER,
        "noise_bits": INTEGER,
        "contributions": INTEGER,
        "p": REAL,
    }
    noise = ("levels", "noise_bits")
    total = True

    def check(self, statistic: Statistic, runs: int, silos: int) -> None:
        """Totals are of sums over records that are clipped (`Statistic.in_totals`), on batches that
        the totals rule can price.
        """
        super().check(statistic, runs, silos)
        if not statistic.in_totals:
            raise Refused("statistic")
        if self.sampling.sampled:
            raise Refused("sampling")
        levels = torch.as_tensor(self.levels)
        bits = torch.as_tensor(self.noise_bits)
        if any(t.shape not in ((), (runs, 1)) or t.dtype != torch.int64 for t in (levels, bits)):
            raise Refused("noise")
        if type(self.contributions) is int and self.contributions >= 1:
            most = MAX_TRIALS // self.contributions
        else:
            most = 0
        if not (
            bool(((levels >= 1) & (levels <= MAX_LEVELS)).all())
            and bool(((bits >= 1) & (bits <= most)).all())
        ):
            raise Refused("noise")
        if type(self.p) is not float or not is_power_of_half(self.p):
            raise Refused("noise")

    def event(self, releases: int = 1, dimension: int = 1) -> BinomialEvent:  # type: ignore[override]
        return BinomialEvent(
            self.sampling,
            self.levels,
            self.noise_bits,
            self.p,
            self.contributions,
            dimension,
            releases,
        )

    def of(self, silo: int) -> Self:
        levels, bits = (int(torch.as_tensor(v).item()) for v in (self.levels, self.noise_bits))
        return replace(self, levels=levels, noise_bits=bits)

    def combine(self, value: Tensor, silos: Sequence[int], weights: Weights) -> Tensor:
        """(J, d), float64: the analyzer's unbiased estimate of the mean over all records that these
        silos contributed to the total (J, 1, d).

        Held-out records contribute zero, and the mean is over the others.
        """
        weights = weights.for_totals()
        batches = {i: int(self.sampling.batch(weights.counts[i])) for i in silos}
        records = sum(batches.values())
        trained = sum(
            batch * (1 - weights.held_out[i] / weights.counts[i]) for i, batch in batches.items()
        )
        return analysed(value[:, 0], self, records) * (records / trained)


def analysed(total: Tensor, mechanism: Binomial, records: int) -> Tensor:
    """A_vec for every run: the mean in a total (J, d) of so many contributed records."""
    clip, levels, bits = (
        torch.as_tensor(v, dtype=torch.float64, device=total.device)
        for v in (mechanism.clip, mechanism.levels, mechanism.noise_bits)
    )
    return mean_in_total(total, clip, records, levels, bits, mechanism.p)
