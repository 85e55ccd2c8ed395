"""Define a mean to which the silo itself adds Gaussian noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event
from silodp.core.fields import NAME, REAL
from silodp.core.mechanisms.mechanism import Mechanism
from silodp.core.numbers import CLIP_TOLERANCE, Number
from silodp.core.sampling import FullBatch, Sampling
from silodp.core.weights import Weights

if TYPE_CHECKING:
    from silodp.core.statistics import Statistic


@dataclass(frozen=True, eq=False)
class Gaussian(Mechanism):
    """A mean of clipped records, plus N(0, std^2) with std = noise_multiplier x 2 clip / batch.

    `noise_multiplier` is a number, or one number per run and silo with shape (J, N), because each
    silo has its own budget. `kind` names the release in plans and ledgers.

    Sensitivity: two records' vectors are at most 2 clip apart (each statistic states why). So one
    replaced record moves the mean over a batch of B by at most 2 clip / B. Noise of z times that
    makes a full batch mu-GDP with mu = 1 / z (Dong, Roth and Su 2022). This holds in every
    dimension, because a Gaussian looks alike from all sides. Batches of a partition have each
    record in at most one batch. Secret batches are priced by their amplification (`core.privacy`).
    `silo.answer.exact` has the proof that a gate's integers satisfy all this.
    """

    kind: str
    clip: Number
    noise_multiplier: Number
    sampling: Sampling = FullBatch()  # noqa: RUF009 -- frozen
    wire: ClassVar = {"kind": NAME, "clip": REAL, "noise_multiplier": REAL}
    noise = ("noise_multiplier",)

    def check(self, statistic: Statistic, runs: int, silos: int) -> None:
        """Raise Refused as `Mechanism.check` does, and for a noise multiplier of another shape or
        below 0.
        """
        super().check(statistic, runs, silos)
        multiplier = torch.as_tensor(self.noise_multiplier)
        if multiplier.shape not in ((), (1, silos), (runs, silos)) or not bool(
            (multiplier >= 0).all()
        ):
            raise Refused("noise")

    def sensitivity(self, n: int) -> Number:
        """Return the largest change of the mean when one of n records is replaced.

        That is 2 clip / batch, with the rounding tolerance charged. Raise BadInput if a batch would
        have less than one record.
        """
        batch = self.sampling.batch(n)
        if batch < 1:
            raise BadInput(
                f"sampling gives batches of {batch:g} records of {n}; use fewer batches or "
                "a larger rate, so that a batch has 1 or more"
            )
        return 2 * self.clip * (1 + CLIP_TOLERANCE) / batch

    def event(self, releases: int = 1, dimension: int = 1) -> Event:
        """Return the event of so many releases at this noise."""
        return Event(self.sampling, self.noise_multiplier, releases)

    def noisy(self, event: Event) -> Event:
        """Return the event with this mechanism's noise multiplier."""
        return replace(event, noise_multiplier=self.noise_multiplier)

    def of(self, silo: int) -> Self:
        """Return the mechanism with the noise multiplier of this silo, as a number."""
        multiplier = torch.as_tensor(self.noise_multiplier, dtype=torch.float64)
        if multiplier.ndim:
            multiplier = multiplier[0, silo]
        return replace(self, noise_multiplier=float(multiplier))

    def multipliers(self, silos: Sequence[int]) -> Tensor:
        """Return the noise multipliers of these silos in float64.

        The shape is (1, M), or (J, M) if the runs differ.
        """
        multipliers = torch.as_tensor(self.noise_multiplier, dtype=torch.float64).cpu()
        if multipliers.ndim == 0:
            multipliers = multipliers.reshape(1, 1)
        if multipliers.shape[-1] > 1:
            multipliers = multipliers[..., list(silos)]
        return multipliers.reshape(-1, multipliers.shape[-1]).expand(-1, len(silos))

    def combine(self, value: Tensor, silos: Sequence[int], weights: Weights) -> Tensor:
        """Return (J, d): the weighted mean of the releases (J, M, d) of these silos.

        Equal weights give a plain mean.
        """
        if weights.rule == "equal":
            return value.mean(1)
        shares = self.shares(silos, weights).to(value).unsqueeze(-1)
        return sum(
            (shares[:, k] * value[:, k] for k in range(len(silos))), torch.zeros_like(value[:, 0])
        )

    def raw_shares(self, silos: Sequence[int], weights: Weights) -> Tensor:
        """Return how much each of these silos counts, up to a common factor.

        The shape is (1, M) or (J, M), in float64.
        """
        if weights.rule == "precision":
            return weights.raw(silos, self._precision(silos, weights))
        return weights.raw(silos)

    def shares(self, silos: Sequence[int], weights: Weights) -> Tensor:
        """Return how much each of these silos counts, with sum 1."""
        raw = self.raw_shares(silos, weights)
        return raw / raw.sum(1, keepdim=True)

    def deviation(self, silos: Sequence[int], weights: Weights) -> tuple[Tensor, Tensor]:
        """Return the standard deviation of the combined noise, and the number of records.

        Raise BadInput if the weights have no numbers of records.
        """
        if not weights.counts:
            raise BadInput(
                "the weights have no numbers of records; the noise of a mean needs the number of "
                "records of each silo"
            )
        batch = self._batches(silos, weights)
        shares = self.shares(silos, weights)
        reach = 2 * self.clips.reshape(-1, 1) * (1 + CLIP_TOLERANCE)
        relative = (shares * self.multipliers(silos) / batch).square().sum(1, keepdim=True).sqrt()
        noise = reach * relative
        records = 1 / (shares.square() / batch).sum(1, keepdim=True)
        return noise, records.expand(noise.shape)

    def _batches(self, silos: Sequence[int], weights: Weights) -> Tensor:
        """Return the batch size (M,) of each of these silos, in float64."""
        sizes = [float(self.sampling.batch(weights.trained[i])) for i in silos]
        return torch.tensor(sizes, dtype=torch.float64)

    def _precision(self, silos: Sequence[int], weights: Weights) -> Tensor:
        """Return (batch / noise multiplier)^2 of each silo.

        If some silos add no noise at all, they share the weight by batch^2 and the others get none.
        """
        z = self.multipliers(silos)
        without = z == 0
        z = torch.where(without.any(1, keepdim=True), torch.where(without, 1.0, torch.inf), z)
        return (self._batches(silos, weights) / z).square()
