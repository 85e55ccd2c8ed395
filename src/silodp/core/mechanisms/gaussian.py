"""A mean with Gaussian noise of the silo itself."""

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
    """A mean of records clipped to `clip`, plus N(0, std^2) with std = noise_multiplier x 2 clip /
    batch.

    `noise_multiplier` is a number, or one per run and silo with shape (J, N): each silo has a
    budget of its own. `kind` names the release in plans and ledgers.

    Sensitivity: two records' vectors are at most 2 clip apart (each statistic says why), so one
    replaced record moves the mean over a batch of B by at most 2 clip / B. Noise of z times that
    makes a full batch mu-GDP with mu = 1 / z (Dong, Roth and Su 2022), in every dimension, as a
    Gaussian looks alike from all sides. Batches of a partition have each record in at most one;
    secret ones are priced by their amplification (`core.privacy`). That a gate's integers keep to
    all this is proven in `silo.answer.exact`.
    """

    kind: str
    clip: Number
    noise_multiplier: Number
    sampling: Sampling = FullBatch()  # noqa: RUF009 -- frozen
    wire: ClassVar = {"kind": NAME, "clip": REAL, "noise_multiplier": REAL}
    noise = ("noise_multiplier",)

    def check(self, statistic: Statistic, runs: int, silos: int) -> None:
        super().check(statistic, runs, silos)
        multiplier = torch.as_tensor(self.noise_multiplier)
        if multiplier.shape not in ((), (1, silos), (runs, silos)) or not bool(
            (multiplier >= 0).all()
        ):
            raise Refused("noise")

    def sensitivity(self, n: int) -> Number:
        """Largest change of the mean when one of n records is replaced: 2 clip / batch, with the
        rounding tolerance charged.
        """
        batch = self.sampling.batch(n)
        if batch < 1:
            raise BadInput(
                f"sampling gives batches of {batch:g} records of {n}; use fewer batches or "
                "a larger rate, so that a batch has 1 or more"
            )
        return 2 * self.clip * (1 + CLIP_TOLERANCE) / batch

    def event(self, releases: int = 1, dimension: int = 1) -> Event:
        return Event(self.sampling, self.noise_multiplier, releases)

    def noisy(self, event: Event) -> Event:
        return replace(event, noise_multiplier=self.noise_multiplier)

    def of(self, silo: int) -> Self:
        known = torch.as_tensor(self.noise_multiplier, dtype=torch.float64)
        return replace(self, noise_multiplier=float(known if known.ndim == 0 else known[0, silo]))

    def multipliers(self, silos: Sequence[int]) -> Tensor:
        """Noise multipliers of these silos, float64: (1, M), or (J, M) where each run has its
        own.
        """
        known = torch.as_tensor(self.noise_multiplier, dtype=torch.float64).cpu()
        if known.ndim and known.shape[-1] > 1:
            known = known[..., list(silos)]
        else:
            known = known
        return known.reshape(-1, known.shape[-1] if known.ndim else 1).expand(-1, len(silos))

    def combine(self, value: Tensor, silos: Sequence[int], weights: Weights) -> Tensor:
        """(J, d): the weighted mean of the releases (J, M, d) of these silos; equal weights are a
        plain mean.
        """
        if weights.rule == "equal":
            return value.mean(1)
        shares = self.shares(silos, weights).to(value).unsqueeze(-1)
        return sum(
            (shares[:, k] * value[:, k] for k in range(len(silos))), torch.zeros_like(value[:, 0])
        )

    def raw_shares(self, silos: Sequence[int], weights: Weights) -> Tensor:
        """How much each of these silos counts, up to a common factor: (1, M) or (J, M), float64."""
        return weights.raw(
            silos, self._precision(silos, weights) if weights.rule == "precision" else None
        )

    def shares(self, silos: Sequence[int], weights: Weights) -> Tensor:
        """The same, with sum 1."""
        raw = self.raw_shares(silos, weights)
        return raw / raw.sum(1, keepdim=True)

    def deviation(self, silos: Sequence[int], weights: Weights) -> tuple[Tensor, Tensor]:
        if not weights.counts:
            raise BadInput("the noise of a mean needs the number of records of each silo")
        batch = torch.tensor(
            [float(self.sampling.batch(weights.trained[i])) for i in silos], dtype=torch.float64
        )
        shares = self.shares(silos, weights)
        reach = 2 * self.clips.reshape(-1, 1) * (1 + CLIP_TOLERANCE)
        noise = (
            reach * (shares * self.multipliers(silos) / batch).square().sum(1, keepdim=True).sqrt()
        )
        return noise, (1 / (shares.square() / batch).sum(1, keepdim=True)).expand(noise.shape)

    def _precision(self, silos: Sequence[int], weights: Weights) -> Tensor:
        """(batch / noise multiplier)^2 of each silo; where somebody adds no noise at all, those who
        do not share the weight by batch^2.
        """
        z = self.multipliers(silos)
        without = z == 0
        z = torch.where(without.any(1, keepdim=True), torch.where(without, 1.0, torch.inf), z)
        return (
            torch.tensor(
                [float(self.sampling.batch(weights.trained[i])) for i in silos], dtype=torch.float64
            )
            / z
        ).square()
