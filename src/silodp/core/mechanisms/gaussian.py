"""A mean with Gaussian noise of the silo itself."""

from __future__ import annotations

from dataclasses import dataclass

from silodp.core.errors import BadInput
from silodp.core.events import Event
from silodp.core.mechanisms.clipped import Clipped
from silodp.core.numbers import CLIP_TOLERANCE, Number
from silodp.core.sampling import FullBatch, Sampling


@dataclass(frozen=True, eq=False)
class Gaussian(Clipped):
    """A mean of records clipped to `clip`, plus N(0, std^2) with std = noise_multiplier x 2 clip / batch.

    `noise_multiplier` is a number, or one per run and silo with shape (J, N): each silo has a budget of its own.
    `kind` names the release in plans and ledgers.
    """

    kind: str
    clip: Number
    noise_multiplier: Number
    sampling: Sampling = FullBatch()  # noqa: RUF009 -- frozen

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
