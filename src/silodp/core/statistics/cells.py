"""Numbers in [0, 1] and cells of which one is 1."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.mechanisms.mechanism import Mechanism
from silodp.core.statistics.statistic import Rowed


class Cells(Rowed):
    """A record's vector is some `numbers` in [0, 1] and then cells, of which at most one is 1 and
    the rest 0.

    Two such vectors differ by at most 1 in each number and sqrt(2) over the cells: one replaced
    record moves a sum by at most sqrt(numbers + 2), which is less than twice a norm. The clip of
    such a statistic is half of that, so that 2 clip is exact.
    """

    view = "filled"

    @property
    def numbers(self) -> int:
        return 0

    @property
    def cells(self) -> int:
        return 0

    @property
    def reach(self) -> int:
        """The square of the largest distance between two records' vectors."""
        return self.numbers + (2 if self.cells else 0)

    @property
    def norm(self) -> float:
        """The smallest clip that may be asked for: half of the reach's root, rounded up."""
        half = math.sqrt(self.reach) / 2
        if 4 * Fraction(half) ** 2 >= self.reach:
            return half
        return math.nextafter(half, math.inf)

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, self.numbers + self.cells

    def check_mechanism(self, mechanism: Mechanism) -> None:
        super().check_mechanism(mechanism)
        if not bool((mechanism.clips <= 2 * self.norm).all()):
            raise Refused(
                "clip"
            )  # a cell is 1 whatever the clip: a larger one only makes the lattice coarser

    def check_reach(self, clip: float) -> None:
        if self.reach > 4 * Fraction(clip) ** 2:
            raise Refused("clip")


def one_hot(index: Tensor, size: int) -> Tensor:
    """(m, size): 1 at each record's index; an index outside is in no cell."""
    return (index[:, None] == torch.arange(size, device=index.device)).double()
