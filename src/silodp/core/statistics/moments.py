"""Compute the mean and mean square of each feature within a public range."""

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
    """(u, u^2) of each feature, where u is the feature mapped to [-1, 1].

    A feature is clamped to its public range first. So each record's vector has norm <= sqrt(2
    features). A missing value counts as u = 0.

    Sensitivity: u moves by at most 2 and u^2 by at most 1. So a replaced record moves the sum by at
    most sqrt(5 features). The price is for twice the norm, 2 sqrt(2 features), which is more.
    """

    low: Tensor
    high: Tensor
    wire: ClassVar = {"low": VECTOR, "high": VECTOR}
    in_totals = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a mean answer."""
        return 1, 2 * len(self.low)

    @property
    def features(self) -> int:
        """Return the number of features."""
        return len(self.low)

    @property
    def norm(self) -> float:
        """Return the smallest clip that a query may have."""
        return math.sqrt(2 * self.features)

    @property
    def about_features(self) -> int:
        """Return the number of features."""
        return self.features

    def _check_shapes(self, dim: int, runs: int) -> None:
        """Raise Refused unless both ranges are vectors of one length."""
        if self.low.ndim != 1 or self.high.shape != self.low.shape:
            raise Refused("shape")

    def check_silo(self, features: int, held_out: int) -> None:
        """Raise Refused unless there is a range for each of the silo's features, with low <
        high.
        """
        if not len(self.low) == len(self.high) == features:
            raise Refused("shape")
        refuse_unordered(self.low, self.high)

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives each record's (u, u^2)."""
        low = self.low
        high = self.high
        if dtype is not None:
            low = low.to(dtype)
            high = high.to(dtype)

        def rows(x: Tensor, y: Tensor) -> Tensor:
            """Return the vectors (m, 2 features) of these records."""
            u = (2 * (x.flatten(1).double() - low) / (high - low) - 1).clamp(-1, 1).nan_to_num(0.0)
            return torch.cat([u, u.square()], 1)

        return rows
