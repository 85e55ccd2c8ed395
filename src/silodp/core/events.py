"""What a query does to privacy, as data: accountants give it meaning."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER, REAL
from silodp.core.sampling import Sampling

if TYPE_CHECKING:
    from silodp.core.numbers import Number


@dataclass(frozen=True, eq=False)
class Event:
    """What one query does to privacy: `count` Gaussian releases at this noise multiplier (std /
    sensitivity) on these batches.
    """

    sampling: Sampling
    noise_multiplier: Number
    count: Any = 1
    """An int; in a committed schedule of several silos, an array with one for each."""
    wire: ClassVar[dict[str, str]] = {"noise_multiplier": REAL}
    total: ClassVar[bool] = False
    """Whether the answer is for a shuffler, who adds it to others' under the noise of all."""

    @property
    def multiplier(self) -> float:
        """Noise over sensitivity."""
        return float(self.noise_multiplier)

    def of(self, silo: int) -> Event:
        """The event at the noise of this silo, in one run."""
        import torch  # slow to load: who reads a ledger does without

        known = torch.as_tensor(self.noise_multiplier, dtype=torch.float64)
        return replace(
            self,
            noise_multiplier=float(
                known if known.ndim == 0 else known.flatten()[silo if known.numel() > 1 else 0]
            ),
        )

    def alone(self, own: int | None) -> Event:
        """What somebody learns who sees the silo's own answer: the same."""
        return self

    def single(self) -> Event:
        """The event in plain numbers, as one data set's ledger takes it; Refused where it is of
        several, or senseless.
        """
        try:
            multiplier = np.asarray(self.noise_multiplier, dtype=np.float64)
            count = operator.index(self.count)
        except (TypeError, ValueError):
            raise Refused("noise") from None
        if multiplier.size != 1:
            raise Refused("shape")
        if not (
            count >= 1 and 0 <= multiplier.item() < math.inf
        ):  # a negative count would pay the budget back
            raise Refused("noise")
        return replace(self, noise_multiplier=multiplier.item(), count=count)


@dataclass(frozen=True, eq=False)
class TotalEvent:
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

    def of(self, silo: int) -> TotalEvent:
        import torch  # slow to load

        levels, bits = (int(torch.as_tensor(v).item()) for v in (self.levels, self.noise_bits))
        return replace(self, levels=levels, noise_bits=bits)

    def alone(self, own: int | None) -> TotalEvent:
        """What somebody learns who sees the silo's own counts: they are under the noise of its
        `own` records alone.
        """
        if own is None:
            return self
        return replace(self, contributions=own)

    def single(self) -> TotalEvent:
        if not all(
            type(n) is int and n >= 1
            for n in (self.levels, self.noise_bits, self.contributions, self.dimension, self.count)
        ):
            raise Refused("noise")
        return self


EVENTS: tuple[type[Event] | type[TotalEvent], ...] = (Event, TotalEvent)
