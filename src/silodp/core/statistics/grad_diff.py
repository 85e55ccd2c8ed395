"""Subtract gradients of each record at two points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from silodp.core.fields import POINT
from silodp.core.statistics.statistic import Statistic


@dataclass(frozen=True, eq=False)
class GradDiff(Statistic):
    """grad f0(w, x) - grad f0(reference, x) of each record, clipped as one vector.

    Sensitivity: the difference is clipped to C. So replacing a record moves the sum by at most 2 C,
    however far apart the points are. This assumes nothing about the loss. A smooth loss has short
    differences and allows a small C, which matters for accuracy alone.
    """

    w: Tensor
    reference: Tensor
    wire: ClassVar = {"w": POINT, "reference": POINT}
    in_totals = True
