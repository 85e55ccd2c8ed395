"""Totals over silos under the noise of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from silodp.core.events import TotalEvent
from silodp.core.mechanisms.clipped import Clipped
from silodp.core.mechanisms.shuffle import mean_in_total
from silodp.core.numbers import Number
from silodp.core.sampling import FullBatch, Sampling
from silodp.core.weights import Weights


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

    def event(self, releases: int = 1, dimension: int = 1) -> TotalEvent:
        return TotalEvent(self.sampling, self.levels, self.noise_bits, self.p, self.contributions, dimension, releases)

    def combine(self, value: Tensor, silos: Sequence[int], weights: Weights) -> Tensor:
        """(J, d), float64: the analyzer's unbiased estimate of the mean over all records that these silos contributed to the total (J, 1, d).

        Held-out records contribute zero, and the mean is over the others.
        """
        weights = weights.for_totals()
        batches = {i: int(self.sampling.batch(weights.counts[i])) for i in silos}
        records = sum(batches.values())
        trained = sum(batch * (1 - weights.held_out[i] / weights.counts[i]) for i, batch in batches.items())
        return analysed(value[:, 0], self, records) * (records / trained)


def analysed(total: Tensor, mechanism: Shuffled, records: int) -> Tensor:
    """A_vec for every run: the mean in a total (J, d) of so many contributed records."""
    clip, levels, bits = (
        torch.as_tensor(v, dtype=torch.float64, device=total.device) for v in (mechanism.clip, mechanism.levels, mechanism.noise_bits)
    )
    return mean_in_total(total, clip, records, levels, bits, mechanism.p)
