"""Compute the gradients of the records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from silodp.core.fields import POINT
from silodp.core.statistics.statistic import Statistic


@dataclass(frozen=True, eq=False)
class Grad(Statistic):
    """grad f0(w, x) of each record. w has shape (J, d), one point per run.

    Sensitivity: the mechanism clips a record's gradient over all layers, as one vector, to its clip
    C. So replacing a record moves the sum by |g - g'| <= |g| + |g'| <= 2 C, at every w. Opposite
    gradients reach this bound.
    """

    w: Tensor
    wire: ClassVar = {"w": POINT}
    in_totals = True
