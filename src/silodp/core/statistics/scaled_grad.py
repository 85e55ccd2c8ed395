"""Compute gradients of the records in features that are shifted and scaled by public numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from silodp.core.differentiate import Gradients
from silodp.core.errors import Refused
from silodp.core.fields import POINT, REAL, VECTOR
from silodp.core.numbers import Number
from silodp.core.problem.problem import Problem
from silodp.core.statistics.statistic import Rowed, Rows


@dataclass(frozen=True, eq=False)
class ScaledGrad(Rowed):
    """grad f0(w, (z, y)) of each record with z = (x - shift) / scale, clipped as one vector to
    `bound`. Before that, a record counts less by as much as z is longer than usual (`weight_of`).

    Features of one size make every part of the gradient count alike. Gradients of raw features have
    most of their length, and so of their noise, where a column is wide or lies far from 0.

    Sensitivity: shift, scale and w are public numbers of the query. So a record's vector depends on
    that record alone, and is at most `bound` long. One replaced record moves the sum by at most 2
    bound, which a clip of at least `bound` prices. A gate clips the vector again, in integers.
    """

    w: Tensor
    shift: Tensor
    scale: Tensor
    bound: Number
    wire: ClassVar = {"w": POINT, "shift": VECTOR, "scale": VECTOR, "bound": REAL}
    in_totals = True
    view = "filled"

    @property
    def norm(self) -> Number:
        """Return the smallest clip that a query may have."""
        return self.bound

    @property
    def about_features(self) -> int:
        """Return the number of features."""
        return len(self.shift)

    def _check_shapes(self, dim: int, runs: int) -> None:
        """Raise Refused unless there is a finite shift and a positive scale for each feature."""
        super()._check_shapes(dim, runs)
        if self.shift.ndim != 1 or self.scale.shape != self.shift.shape:
            raise Refused("shape")
        if not bool((self.shift.isfinite() & self.scale.isfinite()).all()):
            raise Refused("not-finite")
        if not bool((self.scale > 0).all()):
            raise Refused("shape")
        bound = torch.as_tensor(self.bound)
        if bound.shape not in ((), (runs, 1)) or not bool((bound > 0).all()):
            raise Refused("clip")

    def check_silo(self, features: int, held_out: int) -> None:
        """Raise Refused unless there is a shift for each of the silo's features."""
        if len(self.shift) != features:
            raise Refused("shape")

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives each record's clipped gradient."""
        bound = torch.as_tensor(self.bound, dtype=torch.float64).flatten()
        limit = float(bound[min(run, len(bound) - 1)])
        gradients = Gradients(problem, [self.w[run : run + 1]])

        def rows(x: Tensor, y: Tensor) -> Tensor:
            """Return the gradients (m, d) of these records."""
            z = self.features_of(x)
            found = gradients(z, y) * self.weight_of(z)[:, None]
            length = found.norm(dim=1, keepdim=True)
            # a record whose gradient is not finite adds nothing
            return torch.where(length.isfinite(), found * (limit / length.clamp_min(limit)), 0.0)

        return rows

    def features_of(self, x: Tensor) -> Tensor:
        """Return the shifted and scaled features of records (m, features)."""
        return (x.double() - self.shift.to(x.device)) / self.scale.to(x.device)

    def weight_of(self, z: Tensor) -> Tensor:
        """Return (m,): how much each record counts, 1 unless it is longer than sqrt(1 + features).

        A clip alone would shorten a rare outcome's gradients most, and so lower its risk.
        """
        most = math.sqrt(1 + len(self.shift))
        return most / (1 + z.square().sum(1)).sqrt().clamp_min(most)
