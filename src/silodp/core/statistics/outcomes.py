"""Summarise the labels of the training records: the numbers of which the means make the best model
that predicts the same for everybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER
from silodp.core.problem.losses import Loss, Ordinal, Poisson, Weighted
from silodp.core.problem.problem import Problem
from silodp.core.statistics.statistic import Cells, Rows

MOST_OUTCOMES = 2**10


@dataclass(frozen=True, eq=False)
class Outcomes(Cells):
    """What happened to each record, as numbers in [0, 1].

    Of classes: 1 for each class but the first that is the record's, else 0. Of ordered classes: 1
    for each threshold that the label lies above. Of counts: count / the largest. Of numbers in
    [-1, 1]: their place in this range.

    Sensitivity: each number moves by at most 1, so the vector moves by at most sqrt(outcomes)
    (`Cells` without cells).
    """

    outcomes: int
    wire: ClassVar = {"outcomes": INTEGER}
    in_totals = True

    @property
    def numbers(self) -> int:
        """Return how many numbers there are."""
        return self.outcomes

    def _check_shapes(self, dim: int, runs: int) -> None:
        """Raise Refused unless the number of outcomes is a positive integer in range."""
        if type(self.outcomes) is not int or not 1 <= self.outcomes <= MOST_OUTCOMES:
            raise Refused("shape")

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives each record's outcomes (m, outcomes)."""

        def rows(x: Tensor, y: Tensor) -> Tensor:
            """Return the outcomes of these records. What is no number or out of range is cut."""
            return outcomes_of(problem.loss, y, self.outcomes).nan_to_num(0.0).clamp(0, 1)

        return rows


def outcomes_of(kind: Loss, y: Tensor, outcomes: int) -> Tensor:
    """Return (m, outcomes): the outcomes of records with these labels."""
    if isinstance(kind, Weighted):
        kind = kind.loss
    label = y.double()[:, None]
    place = torch.arange(outcomes, device=y.device)
    if isinstance(kind, Poisson):
        return label / kind.most
    if isinstance(kind, Ordinal):
        return (label > place).double()
    if y.is_floating_point():
        return (label + 1) / 2
    return (label == place + 1).double()
