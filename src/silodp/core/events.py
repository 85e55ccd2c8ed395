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

    def alone(self) -> Event:
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
class TotalEvent(Event):
    """What one question for a total does to privacy: `count` totals, each under the noise of
    `counted` silos at least.

    `noise_multiplier` is each silo's share: its own noise over the sensitivity. It is all that
    protects a silo from whoever sees its own numbers: its ledger says how much that is.
    """

    counted: int = 1
    wire: ClassVar[dict[str, str]] = {"noise_multiplier": REAL, "counted": INTEGER}
    total: ClassVar[bool] = True

    @property
    def multiplier(self) -> float:
        """Noise over sensitivity, of all the shares that the query counts on."""
        return float(self.noise_multiplier) * math.sqrt(self.counted)

    def alone(self) -> Event:
        """What somebody learns who sees the silo's own numbers: they are under its own share."""
        return Event(self.sampling, self.noise_multiplier, self.count)

    def single(self) -> Event:
        if type(self.counted) is not int or self.counted < 1:
            raise Refused("noise")
        return super().single()


EVENTS: tuple[type[Event], ...] = (Event, TotalEvent)
