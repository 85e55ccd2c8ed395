"""Describe what a query does to privacy, as data that accountants interpret."""

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
    """What one query does to privacy: `count` Gaussian releases on these batches.

    The noise multiplier is std / sensitivity.
    """

    sampling: Sampling
    noise_multiplier: Number
    count: Any = 1
    """An integer. In a committed schedule of several silos, an array with one for each."""
    wire: ClassVar[dict[str, str]] = {"noise_multiplier": REAL}
    total: ClassVar[bool] = False
    """Whether the answer becomes part of a total over silos, under the noise of all of them."""

    @property
    def multiplier(self) -> float:
        """Return noise over sensitivity."""
        return float(self.noise_multiplier)

    def of(self, silo: int) -> Event:
        """Return the event with the noise of this silo, in one run."""
        import torch  # slow to load, and not needed to read a ledger

        multipliers = torch.as_tensor(self.noise_multiplier, dtype=torch.float64).flatten()
        if len(multipliers) == 1:  # one number for all silos
            silo = 0
        return replace(self, noise_multiplier=float(multipliers[silo]))

    def alone(self, own: int | None) -> Event:
        """Return the event against a reader of the silo's own answer, which is the same event."""
        return self

    def single(self) -> Event:
        """Return the event in plain numbers, as one data set's ledger takes it.

        Raise Refused if it has several values, or values without meaning.
        """
        try:
            multiplier = np.asarray(self.noise_multiplier, dtype=np.float64)
            count = operator.index(self.count)
        except (TypeError, ValueError):
            raise Refused("noise") from None
        if multiplier.size != 1:
            raise Refused("shape")
        # A negative count would pay budget back.
        if not (count >= 1 and 0 <= multiplier.item() < math.inf):
            raise Refused("noise")
        return replace(self, noise_multiplier=multiplier.item(), count=count)


@dataclass(frozen=True, eq=False)
class TotalEvent:
    """What one shuffled query does to privacy: `count` totals of d coordinates.

    Each total is under the noise of `contributions` records. Every contribution is an integer
    vector with entries in 0 .. levels under Bin(noise_bits, p). The values are numbers, or one per
    run (J, 1). Against a reader of one silo's message alone, only the noise of the silo's own
    records protects it. The silo's ledger records how much that is.
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
        """Return noise over sensitivity, for all the contributions that the query counts on."""
        return math.sqrt(self.contributions * self.noise_bits * self.p * (1 - self.p)) / self.levels

    def of(self, silo: int) -> TotalEvent:
        """Return the event with plain numbers. All silos have the same."""
        import torch  # slow to load

        levels, bits = (int(torch.as_tensor(v).item()) for v in (self.levels, self.noise_bits))
        return replace(self, levels=levels, noise_bits=bits)

    def alone(self, own: int | None) -> TotalEvent:
        """Return the event against a reader of the silo's own counts.

        They are under the noise of its `own` records alone.
        """
        if own is None:
            return self
        return replace(self, contributions=own)

    def single(self) -> TotalEvent:
        """Return the event. Raise Refused unless all its numbers are positive integers."""
        if not all(
            type(n) is int and n >= 1
            for n in (self.levels, self.noise_bits, self.contributions, self.dimension, self.count)
        ):
            raise Refused("noise")
        return self


EVENTS: tuple[type[Event] | type[TotalEvent], ...] = (Event, TotalEvent)
