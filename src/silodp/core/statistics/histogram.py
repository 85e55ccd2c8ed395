"""In which of some public bins each feature of a record falls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER, VECTOR
from silodp.core.problem.problem import Problem
from silodp.core.statistics.statistic import Rowed, Rows

MAX_EDGES = 2**10


@dataclass(frozen=True, eq=False)
class Histogram(Rowed):
    """For each feature the bin that a record falls in, one-hot over the public `edges`; each
    record's vector has norm sqrt(features).

    A value that is missing or not finite is in no bin.

    Sensitivity: of each feature a replaced record leaves one bin and enters another, sqrt(2
    features) in all. Charged is twice the norm, 2 sqrt(features), since a gate verifies the norm in
    integers and nothing else: that is safe, and sqrt(2) more noise than is needed.
    """

    edges: Tensor
    features: int
    wire: ClassVar = {"edges": VECTOR, "features": INTEGER}
    in_totals = True

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, self.features * (len(self.edges) + 1)

    @property
    def norm(self) -> float:
        return math.sqrt(self.features)

    @property
    def about_features(self) -> int:
        return self.features

    def _check_shapes(self, dim: int, runs: int) -> None:
        if self.edges.ndim != 1:
            raise Refused("shape")

    def check_silo(self, features: int, held_out: int) -> None:
        if self.features != features or not 1 <= len(self.edges) <= MAX_EDGES:
            raise Refused("shape")
        if not bool(torch.isfinite(self.edges).all()):
            raise Refused("not-finite")
        refuse_unordered(self.edges[:-1], self.edges[1:])

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        if dtype is None:
            edges = self.edges
        else:
            edges = self.edges.to(dtype)

        def rows(x: Tensor, y: Tensor) -> Tensor:
            x = x.flatten(1).to(torch.float64 if dtype is None else dtype).contiguous()
            hot = torch.nn.functional.one_hot(torch.bucketize(x, edges.to(x)), len(edges) + 1)
            return (hot * torch.isfinite(x)[..., None]).flatten(1).double()

        return rows


def refuse_unordered(low: Tensor, high: Tensor) -> None:
    """Raises Refused unless low < high everywhere, with distances that are numbers."""
    if not bool(
        torch.isfinite(low).all()
        and torch.isfinite(high).all()
        and torch.isfinite(high.double() - low.double()).all()
    ):
        raise Refused("not-finite")
    if not bool((low < high).all()):
        raise Refused("shape")
