"""Differences of gradients at two points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from silodp.core.fields import POINT
from silodp.core.statistics.statistic import Statistic


@dataclass(frozen=True, eq=False)
class GradDiff(Statistic):
    """grad f0(w, x) - grad f0(reference, x) of each record, clipped as one vector.

    Sensitivity: it is the difference that is clipped to C, so replacing a record moves the sum by
    at most 2 C, however far apart the points are. Nothing is assumed of the loss: that a smooth one
    has short differences lets C be small, and is a matter of accuracy alone.
    """

    w: Tensor
    reference: Tensor
    wire: ClassVar = {"w": POINT, "reference": POINT}
    in_totals = True
