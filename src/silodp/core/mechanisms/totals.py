"""Totals over silos under the noise of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.events import TotalEvent
from silodp.core.fields import INTEGER
from silodp.core.lattice import lattice_step, most, total_shift
from silodp.core.mechanisms.gaussian import Gaussian
from silodp.core.mechanisms.mechanism import Mechanism
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.weights import Weights

if TYPE_CHECKING:
    from silodp.core.statistics import Statistic


@dataclass(frozen=True, eq=False)
class Shuffled(Gaussian):
    """A sum of records clipped to `clip`, as integers on the public lattice, plus the silo's share
    of the total's noise: for a shuffler to add.

    Every silo adds the same share, N(0, s^2) with s = noise_multiplier x 2 clip, and rounds once.
    The price counts on the shares of `counted` silos. `noise_multiplier` is one number, or one per
    run (J, 1): unlike a Gaussian's, a silo's noise is part of what protects the others.

    Sensitivity: that of `Gaussian`, 2 clip for a sum. The total has noise of `counted` shares at
    least, and is mu-GDP with mu = 1 / (noise_multiplier sqrt(counted)), up to a term that the price
    contains (`core.privacy.totals`). Who sees the silo's own numbers is up against its own share,
    exactly: mu = 1 / noise_multiplier.
    """

    counted: int = 1
    wire: ClassVar = Gaussian.wire | {"counted": INTEGER}
    total = True

    def check(self, statistic: Statistic, runs: int, silos: int) -> None:
        """Refuse what cannot be in a total: several releases in one answer, secret batches, and
        shares that differ from silo to silo.
        """
        Mechanism.check(self, statistic, runs, silos)
        if not statistic.in_totals:
            raise Refused("statistic")
        if self.sampling.sampled:
            raise Refused("sampling")
        share = torch.as_tensor(self.noise_multiplier)
        if share.shape not in ((), (runs, 1)) or not bool((share >= 0).all()):
            raise Refused("noise")
        if type(self.counted) is not int or self.counted < 1:
            raise Refused("noise")

    def event(self, releases: int = 1, dimension: int = 1) -> TotalEvent:
        return TotalEvent(self.sampling, self.noise_multiplier, releases, self.counted)

    def of(self, silo: int) -> Self:
        share = torch.as_tensor(self.noise_multiplier, dtype=torch.float64)
        return replace(self, noise_multiplier=share.item())

    def combine(self, value: Tensor, silos: Sequence[int], weights: Weights) -> Tensor:
        """Return (J, d), float64: the mean over all records that these silos contributed to the
        total (J, 1, d), which is in steps of the lattice.
        """
        return self.mean_in(value[:, 0], self._records(silos, weights))

    def mean_in(self, total: Tensor, records: float) -> Tensor:
        """Return the mean over so many records in a total (J, d), float64."""
        return total.double() * self.steps(total.shape[-1]).to(total.device) / records

    def shift(self, dim: int) -> int:
        """Return how many bits coarser this total's numbers are than the lattice, of one run."""
        share = float(torch.as_tensor(self.noise_multiplier))
        return total_shift(share, float(self.clip), dim, self.counted)

    def steps(self, dim: int) -> Tensor:
        """Return the step of each run's numbers, (J, 1) or (1, 1) float64; at a clip of 0 that of
        1.
        """
        shares = torch.as_tensor(self.noise_multiplier, dtype=torch.float64).reshape(-1, 1)
        shares, clips = torch.broadcast_tensors(shares, self.clips.double().cpu().reshape(-1, 1))
        steps = [
            math.ldexp(lattice_step(clip or 1.0, dim), total_shift(share, clip, dim, self.counted))
            for share, clip in zip(shares.flatten().tolist(), clips.flatten().tolist(), strict=True)
        ]
        return torch.tensor(steps, dtype=torch.float64).reshape(-1, 1)

    def largest(self, dim: int, records: int, silos: int) -> float:
        """Return the largest size of a number in a total over these silos and records, of one
        run.
        """
        share = float(torch.as_tensor(self.noise_multiplier))
        whole = most(share, self.clip, dim, records, silos)
        # Each silo rounds once more.
        return whole / 2 ** self.shift(dim) + silos

    def noise_in(self, silos: int, records: float) -> Tensor:
        """Return (J, 1): the standard deviation of the noise in each coordinate of a mean over so
        many records of so many silos.
        """
        share = torch.as_tensor(self.noise_multiplier, dtype=torch.float64).reshape(-1, 1)
        reach = 2 * self.clips.reshape(-1, 1) * (1 + CLIP_TOLERANCE)
        return reach * share * math.sqrt(silos) / records

    def deviation(self, silos: Sequence[int], weights: Weights) -> tuple[Tensor, Tensor]:
        records = self._records(silos, weights)
        noise = self.noise_in(len(silos), records)
        return noise, torch.full_like(noise, records)

    def _records(self, silos: Sequence[int], weights: Weights) -> float:
        """Return the expected number of records in the total: of a silo its batch's part that
        `weights` counts, as in its own mean.
        """
        weights = weights.for_totals()
        return sum(
            self.sampling.batch(weights.counts[i]) * weights.trained[i] / weights.counts[i]
            for i in silos
        )


def as_total(mechanism: Mechanism) -> Shuffled:
    """Return the mechanism, known to be one of totals: where a query has come on a path that only
    totals take.
    """
    assert isinstance(mechanism, Shuffled)
    return mechanism
