"""Count how many records each class has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER
from silodp.core.problem.problem import Problem
from silodp.core.statistics.cells import Cells, one_hot
from silodp.core.statistics.statistic import Rows

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
