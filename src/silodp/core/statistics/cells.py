"""Define statistics of numbers in [0, 1] and of cells, of which one is 1."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.mechanisms.mechanism import Mechanism
from silodp.core.statistics.statistic import Rowed


class Cells(Rowed):
    """A statistic whose vectors are `numbers` in [0, 1] and then cells.

    At most one cell is 1 and the rest are 0.

    Two such vectors differ by at most 1 in each number and by sqrt(2) over the cells. So one
    replaced record moves a sum by at most sqrt(numbers + 2), which is less than twice a norm. The
    clip of such a statistic is half of that, so that 2 clip is exact.
    """

    view = "filled"

    @property
    def numbers(self) -> int:
        """Return how many numbers come before the cells."""
        return 0

    @property
    def cells(self) -> int:
        """Return how many cells there are."""
        return 0

    @property
    def reach(self) -> int:
        """Return the square of the largest distance between two records' vectors."""
        if self.cells:
            return self.numbers + 2
        return self.numbers

    @property
    def norm(self) -> float:
        """Return the smallest clip that a query may have: half of the reach's root, rounded up."""
        half = math.sqrt(self.reach) / 2
        if 4 * Fraction(half) ** 2 >= self.reach:
            return half
        return math.nextafter(half, math.inf)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a mean answer."""
        return 1, self.numbers + self.cells

    def check_mechanism(self, mechanism: Mechanism) -> None:
        """Raise Refused for batches, for a clip below `norm` and for a clip above 2 norm.

        A cell is 1 whatever the clip is. So a larger clip would only make the lattice coarser.
        """
        super().check_mechanism(mechanism)
        if not bool((mechanism.clips <= 2 * self.norm).all()):
            raise Refused("clip")

    def check_reach(self, clip: float) -> None:
        """Raise Refused unless reach <= (2 clip)^2, by exact arithmetic."""
        if self.reach > 4 * Fraction(clip) ** 2:
            raise Refused("clip")


def one_hot(index: Tensor, size: int) -> Tensor:
    """Return (m, size) with 1 at each record's index. An index outside is in no cell."""
    return (index[:, None] == torch.arange(size, device=index.device)).double()
