"""Count how often each feature is missing."""

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
