"""Numbers in [0, 1] and cells of which one is 1: scores, class counts, missing values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from torch import Tensor

MAX_BINS, MAX_CLASSES = 2**9, 2**16
"""Of a Score and of ClassCounts, at most: a query is a few numbers, and must not make a silo allocate more than it may be sent."""


class Cells:
    """A record's vector is some `numbers` in [0, 1] and then cells, of which at most one is 1 and the rest 0.

    Two such vectors differ by at most 1 in each number and sqrt(2) over the cells: one replaced record moves a sum by at most
    sqrt(numbers + 2), which is less than twice a norm. The clip of such a statistic is half of that, so that 2 clip is exact.
    """

    releases: ClassVar[int] = 1

    @property
    def numbers(self) -> int: ...

    @property
    def cells(self) -> int: ...

    @property
    def reach(self) -> int:
        """The square of the largest distance between two records' vectors."""
        return self.numbers + (2 if self.cells else 0)

    @property
    def norm(self) -> float:
        """The smallest clip that may be asked for: half of the reach's root, rounded up."""
        half = math.sqrt(self.reach) / 2
        return half if 4 * Fraction(half) ** 2 >= self.reach else math.nextafter(half, math.inf)

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, self.numbers + self.cells


@dataclass(frozen=True, eq=False)
class Score(Cells):
    """How w does on the held-out records. Of a class: loss / cap, right or not, and for two classes the cell (label, bin of the score).

    Of a number: (error / cap)^2 and |error| / cap, and no cells. All are clipped to [0, 1]; what is not finite is the worst.
    """

    w: Tensor
    bins: int
    cap: float

    @property
    def numbers(self) -> int:
        return 2

    @property
    def cells(self) -> int:
        return 2 * self.bins

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.w), self.numbers + self.cells


@dataclass(frozen=True, eq=False)
class ClassCounts(Cells):
    """The class of each record, one-hot; a label outside 0 .. classes - 1 is in no cell."""

    classes: int

    @property
    def numbers(self) -> int:
        return 0

    @property
    def cells(self) -> int:
        return self.classes


@dataclass(frozen=True, eq=False)
class MissingRates(Cells):
    """For each feature 1 where a record's value is missing, else 0: any number of a record's features may be missing."""

    features: int

    @property
    def numbers(self) -> int:
        return self.features

    @property
    def cells(self) -> int:
        return 0
