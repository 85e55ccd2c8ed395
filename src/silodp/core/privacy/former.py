"""The rule `totals` of ledgers that earlier versions made, for totals with binomial noise.

New ledgers have the rule `gdp`. A ledger of this rule stays readable and keeps its budget: what it
has spent counts as it was written down, and what is left pays for Gaussian answers and for totals
of today.

Prices are shares of the budget (epsilon, delta) at one Renyi order. An answer's divergence D is at
most share x room, with room = epsilon - conversion(order, (1 - STAKE) delta), and its distance from
the law that is priced is at most share x STAKE delta. Shares add up, and 1 is the budget.

**Claim.** Whoever chooses queries adaptively, if the shares on every path add up to at most 1, the
transcript is (epsilon, delta)-DP in both directions. Along a path the divergences sum to at most
room, which is a filter with one fixed order (Feldman and Zrnic 2021). The conversion takes (1 -
STAKE) delta. The rest pays for the tails of binomial noise and for the distance of totals of today
(`core.privacy.totals`), which is far below the part that their divergence takes of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from silodp.core.errors import BadInput
from silodp.core.events import Event, TotalEvent
from silodp.core.fields import INTEGER, REAL
from silodp.core.privacy.accounting import (
    Buckets,
    Budget,
    elementwise,
    renyi_conversion,
    sum_with_partitions,
)
from silodp.core.privacy.totals import total_price

STAKE = 0.01
"""Share of delta that pays for what is no divergence."""
ORDERS = np.arange(2, 513)
"""Renyi orders of which a ledger was given one."""


@dataclass(frozen=True, eq=False)
class BinomialEvent(Event):
    """A charge for totals with binomial noise, as ledgers have it. Nothing prices it again: what
    was written down counts.
    """

    noise_multiplier: Any = 0.0
    levels: int = 1
    noise_bits: int = 1
    p: float = 0.5
    contributions: int = 1
    dimension: int = 1
    wire: ClassVar[dict[str, str]] = {
        "levels": INTEGER,
        "noise_bits": INTEGER,
        "p": REAL,
        "contributions": INTEGER,
        "dimension": INTEGER,
    }
    total: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class Totals:
    """Gaussian answers and totals on full or disjoint batches. Prices are shares of the budget."""

    budget: Budget
    order: float
    name: str = "totals"

    def __post_init__(self) -> None:
        if not self.order >= 2:
            raise BadInput(f"the Renyi order is {self.order}; totals need 2 or more")

    def price(self, event: Event | TotalEvent, n: np.ndarray) -> tuple[str, np.ndarray]:
        if event.sampling.sampled or isinstance(event, BinomialEvent):
            raise BadInput(
                "a ledger of the totals rule prices Gaussian answers and totals on full or "
                f"disjoint batches, and not {type(event).__name__} on "
                f"{type(event.sampling).__name__}"
            )
        counted = event.counted if isinstance(event, TotalEvent) else 1
        share = elementwise(self._share, np.asarray(event.noise_multiplier, float), counted)
        return event.sampling.bucket, event.count * share

    def _share(self, noise_multiplier: float, counted: int) -> float:
        room = self._room()
        if not room > 0:
            return math.inf
        return self.order / 2 * total_price(noise_multiplier, counted) / room * (1 + 1e-12)

    def total(self, buckets: Buckets) -> np.ndarray:
        return sum_with_partitions(buckets)

    def capacity(self, budgets: np.ndarray) -> np.ndarray:
        """1, of the one budget that the prices are shares of; nothing of any other."""
        return elementwise(lambda own: 1.0 if self.budget == own else 0.0, budgets)

    def epsilon(self, buckets: Buckets, delta: np.ndarray) -> np.ndarray:
        """Return epsilon at the budget's own delta, whatever `delta` is: the tails were bought with
        it.
        """
        return elementwise(self._spent, self.total(buckets))

    def _conversion(self) -> float:
        return renyi_conversion(self.order, (1 - STAKE) * self.budget.delta) + 1e-12

    def _room(self) -> float:
        return self.budget.epsilon - self._conversion()

    def _spent(self, share: float) -> float:
        if share == 0:
            return 0.0
        return max(0.0, share * self._room() + self._conversion())
