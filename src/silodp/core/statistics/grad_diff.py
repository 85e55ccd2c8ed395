"""Differences of gradients at two points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from silodp.core.fields import POINT
from silodp.core.statistics.statistic import Statistic


@dataclass(frozen=True, eq=False)
class GradDiff(Statistic):
    """grad f0(w, x) - grad f0(reference, x) of each record, clipped as one vector."""

    w: Tensor
    reference: Tensor
    wire: ClassVar = {"w": POINT, "reference": POINT}
    in_totals = True
