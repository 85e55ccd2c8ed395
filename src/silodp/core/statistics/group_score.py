"""Count right predictions, or classes, in groups of the records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER, POINT
from silodp.core.problem.problem import Problem
from silodp.core.statistics.score import right_of
from silodp.core.statistics.statistic import Cells, Rows, one_hot
from silodp.core.statistics.summaries import MAX_CLASSES

MAX_GROUPS = 2**9
"""The most groups of a query.

A query is a few numbers long. It must not make a silo allocate more memory than its answer needs.
"""


@dataclass(frozen=True, eq=False)
class GroupScore(Cells):
    """The group of a held-out record, and whether w predicts its class.

    That is one cell of (wrong or right) x groups.

    Groups are read from `features` features of the record, starting at `first`. A single feature is
    a boolean: it is above 0 or not. Several features are the one-hot code of a category: the
    largest one that is above 1/2. With `indicator` 1, the feature after them is above 1/2 if the
    value was missing. A record is in no cell if its value is missing or not finite, or if its label
    is a number.

    Sensitivity: a replaced record leaves one cell and enters another, sqrt(2) in length (`Cells`
    with no numbers).
    """

    w: Tensor
    first: int
    features: int
    indicator: int
    wire: ClassVar = {"w": POINT, "first": INTEGER, "features": INTEGER, "indicator": INTEGER}
    in_totals = True
    on_held_out = True

    @property
    def groups(self) -> int:
        """Return the number of groups."""
        return max(self.features, 2)

    @property
    def cells(self) -> int:
        """Return the number of cells: two for each group."""
        return 2 * self.groups

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a mean answer."""
        return len(self.w), self.cells

    def _check_shapes(self, dim: int, runs: int) -> None:
        """Raise Refused for a field of another type or range."""
        super()._check_shapes(dim, runs)
        if any(type(field) is not int for field in (self.first, self.features, self.indicator)):
            raise Refused("shape")
        if not (self.first >= 0 and 1 <= self.features <= MAX_GROUPS and self.indicator in (0, 1)):
            raise Refused("shape")

    def check_silo(self, features: int, held_out: int) -> None:
        """Raise Refused if the silo holds out no records, or has fewer features."""
        if not held_out:
            raise Refused("batch")
        if self.first + self.features + self.indicator > features:
            raise Refused("shape")

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives each record's cell.

        The model sees one record at a time.
        """
        if dtype is None:
            w = self.w[run]
        else:
            w = self.w[run].to(dtype)
        parameters = problem.split(w) | problem.constants(w)

        def one(x: Tensor) -> Tensor:
            """Return the outputs of one record."""
            return functional_call(problem.model, parameters, (x[None],))[0].flatten()

        @torch.no_grad()
        def rows(x: Tensor, y: Tensor) -> Tensor:
            """Return the vectors (m, cells) of these records."""
            if y.is_floating_point():
                return torch.zeros(len(y), self.cells, dtype=torch.float64, device=y.device)
            return one_hot(
                self._cells(x, right_of(problem.loss, vmap(one)(x).double(), y)), self.cells
            )

        return rows

    def _cells(self, x: Tensor, right: Tensor) -> Tensor:
        """Return the number of each record's cell (m,), or -1 for no cell."""
        group = group_of(x, self.first, self.features, self.indicator)
        return torch.where(group >= 0, right * self.groups + group, -1)


@dataclass(frozen=True, eq=False)
class GroupClasses(Cells):
    """The group and the class of a record: one cell of groups x classes.

    Groups are read as by `GroupScore`. A survival time has the class 2 b + event of its time bin b.
    A record without a group, or with a label outside 0 .. classes - 1, is in no cell.

    Sensitivity: a replaced record leaves one cell and enters another, sqrt(2) in length (`Cells`
    with no numbers).
    """

    classes: int
    first: int
    features: int
    indicator: int
    wire: ClassVar = {
        "classes": INTEGER,
        "first": INTEGER,
        "features": INTEGER,
        "indicator": INTEGER,
    }
    in_totals = True

    @property
    def groups(self) -> int:
        """Return the number of groups."""
        return max(self.features, 2)

    @property
    def cells(self) -> int:
        """Return the number of cells: one for each group and class."""
        return self.groups * self.classes

    def _check_shapes(self, dim: int, runs: int) -> None:
        """Raise Refused for a field of another type or range."""
        fields = (self.classes, self.first, self.features, self.indicator)
        if any(type(field) is not int for field in fields):
            raise Refused("shape")
        if not (self.first >= 0 and 1 <= self.features <= MAX_GROUPS and self.indicator in (0, 1)):
            raise Refused("shape")
        if not 2 <= self.classes <= MAX_CLASSES or self.cells > MAX_CLASSES:
            raise Refused("shape")

    def check_silo(self, features: int, held_out: int) -> None:
        """Raise Refused if the silo has fewer features."""
        if self.first + self.features + self.indicator > features:
            raise Refused("shape")

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives each record's cell."""

        def rows(x: Tensor, y: Tensor) -> Tensor:
            """Return the vectors (m, cells) of these records."""
            group = group_of(x, self.first, self.features, self.indicator)
            known = (group >= 0) & (y >= 0) & (y < self.classes)
            return one_hot(torch.where(known, group * self.classes + y, -1), self.cells)

        return rows


def group_of(x: Tensor, first: int, features: int, indicator: int) -> Tensor:
    """Return the group (m,) of each record, or -1 for no group."""
    end = first + features
    category = x.flatten(1)[:, first:end]
    with_indicator = x.flatten(1)[:, first : end + indicator]
    largest, group = category.max(1)
    if features == 1:
        group = (largest > 0).long()
        grouped = torch.ones_like(largest, dtype=torch.bool)
    else:
        grouped = largest > 0.5
    if indicator:
        grouped = grouped & ~(with_indicator[:, -1] > 0.5)
    grouped = grouped & torch.isfinite(with_indicator).all(1)
    return torch.where(grouped, group, -1)
