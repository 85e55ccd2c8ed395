"""Summarise columns before a training: classes, missing values, histograms and moments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER, VECTOR
from silodp.core.problem.problem import Problem
from silodp.core.statistics.statistic import Cells, Rowed, Rows, one_hot

MAX_CLASSES = 2**16
"""The most classes of a query.

A query is a few numbers long. It must not make a silo allocate more memory than its answer needs.
"""


@dataclass(frozen=True, eq=False)
class ClassCounts(Cells):
    """The class of each record, one-hot. A label outside 0 .. classes - 1 is in no cell.

    Sensitivity: a replaced record leaves one cell and enters another, sqrt(2) in length (`Cells`
    with no numbers).
    """

    classes: int
    wire: ClassVar = {"classes": INTEGER}
    in_totals = True

    @property
    def cells(self) -> int:
        """Return the number of classes."""
        return self.classes

    def _check_shapes(self, dim: int, runs: int) -> None:
        """Raise Refused unless the number of classes is an integer in range."""
        if type(self.classes) is not int or not 2 <= self.classes <= MAX_CLASSES:
            raise Refused("shape")

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives each record's class, one-hot."""
        return lambda x, y: one_hot(y, self.classes)


@dataclass(frozen=True, eq=False)
class MissingRates(Cells):
    """1 for each feature of a record whose value is missing, otherwise 0.

    Any number of a record's features may be missing.

    Sensitivity: each number moves by at most 1, so the vector moves by at most sqrt(features)
    (`Cells` without cells).
    """

    features: int
    wire: ClassVar = {"features": INTEGER}
    in_totals = True
    view = "missing"

    @property
    def numbers(self) -> int:
        """Return the number of features."""
        return self.features

    @property
    def about_features(self) -> int:
        """Return the number of features."""
        return self.features

    def _check_shapes(self, dim: int, runs: int) -> None:
        """Raise Refused unless the number of features is a positive integer."""
        if type(self.features) is not int or self.features < 1:
            raise Refused("shape")

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives which features are missing, as numbers."""
        return lambda missing, y: missing.flatten(1).double()


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
