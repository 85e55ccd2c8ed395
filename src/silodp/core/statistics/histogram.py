"""Count in which of some public bins each feature of a record falls."""

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
    """The bin of each feature of a record, one-hot over the public `edges`.

    Each record's vector has norm sqrt(features). A value that is missing or not finite is in no
    bin.

    Sensitivity: of each feature a replaced record leaves one bin and enters another, sqrt(2
    features) in all. The price is for twice the norm, 2 sqrt(features), because a gate verifies
    only the norm in integers. That is safe, but has sqrt(2) times the noise that is needed.
    """

    edges: Tensor
    features: int
    wire: ClassVar = {"edges": VECTOR, "features": INTEGER}
    in_totals = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a mean answer: one more bin than edges for each feature."""
        return 1, self.features * (len(self.edges) + 1)

    @property
    def norm(self) -> float:
        """Return the smallest clip that a query may have."""
        return math.sqrt(self.features)

    @property
    def about_features(self) -> int:
        """Return the number of features."""
        return self.features

    def _check_shapes(self, dim: int, runs: int) -> None:
        """Raise Refused unless the edges are a vector."""
        if self.edges.ndim != 1:
            raise Refused("shape")

    def check_silo(self, features: int, held_out: int) -> None:
        """Raise Refused for another number of features, and for edges that are not finite and
        increasing.
        """
        if self.features != features or not 1 <= len(self.edges) <= MAX_EDGES:
            raise Refused("shape")
        if not bool(torch.isfinite(self.edges).all()):
            raise Refused("not-finite")
        refuse_unordered(self.edges[:-1], self.edges[1:])

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives each record's bins."""
        edges = self.edges
        type_of_x = torch.float64
        if dtype is not None:
            edges = edges.to(dtype)
            type_of_x = dtype

        def rows(x: Tensor, y: Tensor) -> Tensor:
            """Return the vectors (m, d) of these records."""
            x = x.flatten(1).to(type_of_x).contiguous()
            hot = torch.nn.functional.one_hot(torch.bucketize(x, edges.to(x)), len(edges) + 1)
            return (hot * torch.isfinite(x)[..., None]).flatten(1).double()

        return rows


def refuse_unordered(low: Tensor, high: Tensor) -> None:
    """Raise Refused unless low < high everywhere, and all distances are finite."""
    if not bool(
        torch.isfinite(low).all()
        and torch.isfinite(high).all()
        and torch.isfinite(high.double() - low.double()).all()
    ):
        raise Refused("not-finite")
    if not bool((low < high).all()):
        raise Refused("shape")
