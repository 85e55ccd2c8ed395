"""How a model does on the held-out records, as a total over silos."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER, POINT, REAL
from silodp.core.mechanisms.mechanism import Mechanism
from silodp.core.problem.problem import Problem
from silodp.core.statistics.score import Score
from silodp.core.statistics.statistic import Rowed, Rows


@dataclass(frozen=True, eq=False)
class ScoreTotal(Rowed):
    """The vectors of a `Score` less their `centre`, 1/2 in each number, so that a shuffler can add
    them: it adds vectors within a norm.

    Sensitivity: such a vector has numbers in [-1/2, 1/2] and cells that are at least 0 and sum to 1
    at most: its norm is at most sqrt(numbers / 4 + 1). That is the clip, at which nothing is cut;
    whatever a record holds, the shuffle's own clip keeps it within that ball, whose diameter is
    priced.
    """

    w: Tensor
    bins: int
    cap: float
    wire: ClassVar = {"w": POINT, "bins": INTEGER, "cap": REAL}
    in_totals = True
    on_held_out = True
    view = "filled"

    @property
    def score(self) -> Score:
        return Score(self.w, self.bins, self.cap)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.score.shape

    @property
    def points(self) -> tuple[Tensor, ...]:
        return (self.w,)

    @property
    def centre(self) -> Tensor:
        """(d,): what the server adds back to the mean."""
        return torch.tensor(
            [0.5] * self.score.numbers + [0.0] * self.score.cells, dtype=torch.float64
        )

    @property
    def norm(self) -> float:
        square = Fraction(self.score.numbers, 4) + (1 if self.bins else 0)
        root = math.sqrt(square)
        if Fraction(root) ** 2 >= square:
            return root
        return math.nextafter(root, math.inf)

    def _check_shapes(self, dim: int, runs: int) -> None:
        self.score._check_shapes(dim, runs)

    def check_mechanism(self, mechanism: Mechanism) -> None:
        if not mechanism.total:
            raise Refused(
                "statistic"
            )  # by itself a silo is asked for a Score, which has less noise at the same price
        super().check_mechanism(mechanism)

    def check_silo(self, features: int, held_out: int) -> None:
        self.score.check_silo(features, held_out)

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        rows = self.score.rows(problem, run, dtype)
        centre = self.centre
        return lambda x, y: rows(x, y) - centre.to(x.device)
