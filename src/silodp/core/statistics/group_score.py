"""Whether a model is right, by groups of the held-out records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER, POINT
from silodp.core.problem.problem import Problem
from silodp.core.statistics.cells import Cells, one_hot
from silodp.core.statistics.score import right_of
from silodp.core.statistics.statistic import Rows

MAX_GROUPS = 2**9
"""At most: a query is a few numbers, and must not make a silo allocate more than it may be sent."""


@dataclass(frozen=True, eq=False)
class GroupScore(Cells):
    """In which group a held-out record is, and whether w says its class: one cell of (not or right)
    x groups.

    Groups are read from `features` features of the record, from `first` on. One is a boolean: not
    above 0, or above. More are the one-hot of a category: the largest of them, where it is above
    1/2. With `indicator` 1 the feature after them is above 1/2 where the value was missing. In no
    cell is a record whose value is missing, or not finite there, or whose label is a number.

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
        return max(self.features, 2)

    @property
    def cells(self) -> int:
        return 2 * self.groups

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.w), self.cells

    def _check_shapes(self, dim: int, runs: int) -> None:
        super()._check_shapes(dim, runs)
        if any(type(field) is not int for field in (self.first, self.features, self.indicator)):
            raise Refused("shape")
        if not (self.first >= 0 and 1 <= self.features <= MAX_GROUPS and self.indicator in (0, 1)):
            raise Refused("shape")

    def check_silo(self, features: int, held_out: int) -> None:
        if not held_out:
            raise Refused("batch")
        if self.first + self.features + self.indicator > features:
            raise Refused("shape")

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """The model sees one record at a time, as for a `Score`."""
        if dtype is None:
            w = self.w[run]
        else:
            w = self.w[run].to(dtype)
        parameters = problem.split(w) | problem.constants(w)

        def one(x: Tensor) -> Tensor:
            return functional_call(problem.model, parameters, (x[None],))[0].flatten()

        @torch.no_grad()
        def rows(x: Tensor, y: Tensor) -> Tensor:
            if y.is_floating_point():
                return torch.zeros(len(y), self.cells, dtype=torch.float64, device=y.device)
            return one_hot(
                self._cells(x, right_of(problem.loss, vmap(one)(x).double(), y)), self.cells
            )

        return rows

    def _cells(self, x: Tensor, right: Tensor) -> Tensor:
        """(m,): the number of each record's cell, or -1."""
        end = self.first + self.features
        own = x.flatten(1)[:, self.first : end]
        said = x.flatten(1)[:, self.first : end + self.indicator]
        largest, group = own.max(1)
        if self.features == 1:
            group = (largest > 0).long()
            known = torch.ones_like(right)
        else:
            known = largest > 0.5
        if self.indicator:
            known = known & ~(said[:, -1] > 0.5)
        return torch.where(known & torch.isfinite(said).all(1), right * self.groups + group, -1)
