"""Totals over silos under the noise of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from silodp.core.events import Shared
from silodp.core.mechanisms.clipped import Clipped
from silodp.core.numbers import Number
from silodp.core.sampling import FullBatch, Sampling


@dataclass(frozen=True, eq=False)
class Shuffled(Clipped):
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
    sampling: Sampling = FullBatch()  # noqa: RUF009 -- frozen

    def contributed(self, counts: Iterable[int]) -> int:
        """How many records silos of these sizes contribute in a round."""
        return sum(int(self.sampling.batch(n)) for n in counts)

    def event(self, releases: int = 1, dimension: int = 1) -> Shared:
        return Shared(self.sampling, self.levels, self.noise_bits, self.p, self.contributions, dimension, releases)
