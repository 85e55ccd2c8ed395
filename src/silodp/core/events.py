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

    def alone(self) -> Event:
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
class TotalEvent(Event):
    """The cost in privacy of one question for a total: `count` totals, each under the noise of
    `counted` silos at least.

    `noise_multiplier` is each silo's share: its own noise over the sensitivity. Against a party
    that sees the silo's own numbers, only this share protects. The ledger records how much.
    """

    counted: int = 1

    wire: ClassVar[dict[str, str]] = {"noise_multiplier": REAL, "counted": INTEGER}
    total: ClassVar[bool] = True

    @property
    def multiplier(self) -> float:
        """Noise over sensitivity, of all the shares that the query counts on."""
        return float(self.noise_multiplier) * math.sqrt(self.counted)

    def alone(self) -> Event:
        """Return the event for a party that sees the silo's own numbers, under its own share."""
        return Event(self.sampling, self.noise_multiplier, self.count)

    def single(self) -> Event:
        if type(self.counted) is not int or self.counted < 1:
            raise Refused("noise")
        return super().single()


EVENTS: tuple[type[Event], ...] = (Event, TotalEvent)
