"""How often each feature is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER
from silodp.core.problem.problem import Problem
from silodp.core.statistics.cells import Cells
from silodp.core.statistics.statistic import Rows


@dataclass(frozen=True, eq=False)
class MissingRates(Cells):
    """For each feature 1 where a record's value is missing, else 0: any number of a record's
    features may be missing.

    Sensitivity: each number moves by at most 1, so the vector by sqrt(features) (`Cells` without
    cells).
    """

    features: int
    wire: ClassVar = {"features": INTEGER}
    in_totals = True
    view = "missing"

    @property
    def numbers(self) -> int:
        return self.features

    @property
    def about_features(self) -> int:
        return self.features

    def _check_shapes(self, dim: int, runs: int) -> None:
        if type(self.features) is not int or self.features < 1:
            raise Refused("shape")

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        return lambda missing, y: missing.flatten(1).double()
