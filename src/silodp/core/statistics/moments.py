"""Mean and mean square of each feature within a public range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.fields import VECTOR
from silodp.core.problem.problem import Problem
from silodp.core.statistics.histogram import refuse_unordered
from silodp.core.statistics.statistic import Rowed, Rows


@dataclass(frozen=True, eq=False)
class Moments(Rowed):
    """Each feature clamped to its public range, mapped to u in [-1, 1], and (u, u^2): each record's
    vector has norm <= sqrt(2 features).

    A value that is missing counts as u = 0.

    Sensitivity: u moves by at most 2 and u^2 by at most 1, so a replaced record moves the sum by
    sqrt(5 features) at most. Charged is twice the norm, 2 sqrt(2 features), which is more.
    """

    low: Tensor
    high: Tensor
    wire: ClassVar = {"low": VECTOR, "high": VECTOR}
    in_totals = True

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, 2 * len(self.low)

    @property
    def features(self) -> int:
        return len(self.low)

    @property
    def norm(self) -> float:
        return math.sqrt(2 * self.features)

    @property
    def about_features(self) -> int:
        return self.features

    def _check_shapes(self, dim: int, runs: int) -> None:
        if self.low.ndim != 1 or self.high.shape != self.low.shape:
            raise Refused("shape")

    def check_silo(self, features: int, held_out: int) -> None:
        if not len(self.low) == len(self.high) == features:
            raise Refused("shape")
        refuse_unordered(self.low, self.high)

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        low, high = (v if dtype is None else v.to(dtype) for v in (self.low, self.high))

        def rows(x: Tensor, y: Tensor) -> Tensor:
            u = (2 * (x.flatten(1).double() - low) / (high - low) - 1).clamp(-1, 1).nan_to_num(0.0)
            return torch.cat([u, u.square()], 1)

        return rows
