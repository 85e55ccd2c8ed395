"""How a model does on the held-out records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER, POINT, REAL
from silodp.core.problem.losses import Poisson, predicted
from silodp.core.problem.problem import Problem
from silodp.core.statistics.cells import Cells, one_hot
from silodp.core.statistics.statistic import Rows

MAX_BINS = 2**9
"""At most: a query is a few numbers, and must not make a silo allocate more than it may be sent."""


@dataclass(frozen=True, eq=False)
class Score(Cells):
    """How w does on the held-out records. Of a class: loss / cap, right or not, and for two classes the cell (label, bin of the score).

    Of a number or a count: (error / cap)^2 and |error| / cap, and no cells. All are clipped to [0, 1]; what is not finite is the worst.
    """

    w: Tensor
    bins: int
    cap: float
    wire: ClassVar = {"w": POINT, "bins": INTEGER, "cap": REAL}
    on_held_out = True

    @property
    def numbers(self) -> int:
        return 2

    @property
    def cells(self) -> int:
        return 2 * self.bins

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.w), self.numbers + self.cells

    @property
    def points(self) -> tuple[Tensor, ...]:
        return (self.w,)

    def _check_shapes(self, dim: int, runs: int) -> None:
        super()._check_shapes(dim, runs)
        if not 0 < self.cap < math.inf:
            raise Refused("clip")
        if type(self.bins) is not int or not 0 <= self.bins <= MAX_BINS:
            raise Refused("shape")

    def check_silo(self, features: int, held_out: int) -> None:
        if not held_out:
            raise Refused("batch")

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """The model sees one record at a time, so that a model that mixes the records of a batch cannot mix these."""
        w = self.w[run] if dtype is None else self.w[run].to(dtype)
        parameters, bins, cap = problem.split(w) | problem.constants(w), self.bins, self.cap

        def one(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            output = functional_call(problem.model, parameters, (x[None],))[0]
            return output.flatten(), problem.record_loss(output, y)

        @torch.no_grad()
        def rows(x: Tensor, y: Tensor) -> Tensor:
            output, loss = (part.double() for part in vmap(one)(x, y))
            finite = torch.isfinite(output).all(1)
            if y.is_floating_point():
                rate = predicted(problem.loss, output) if isinstance(problem.loss, Poisson) else output[:, 0]
                error = ((rate - y).abs() / cap).nan_to_num(1.0, 1.0).clamp(max=1)
                numbers = [error.square(), error]
                cells = torch.zeros(len(y), 2 * bins, dtype=torch.float64, device=x.device)
            else:
                alone, said = output.shape[1] == 1, predicted(problem.loss, output)
                right = ((said > 0) == (y > 0) if alone else said == y) & finite
                numbers = [(loss / cap).nan_to_num(1.0, 1.0).clamp(0, 1), right.double()]
                cells = _auc_cells(output[:, 0] if alone else output[:, 1] - output[:, 0], y, bins)
                cells *= (output.shape[1] <= 2) & finite[:, None]
            return torch.cat([torch.stack(numbers, 1), cells], 1)

        return rows


def _auc_cells(margin: Tensor, y: Tensor, bins: int) -> Tensor:
    """One-hot over (label, bin of sigmoid(margin)): bins of the labels 0, then of the labels 1; another label is in none."""
    at = (margin.sigmoid().nan_to_num(0.0) * bins).long().clamp(0, max(bins - 1, 0))
    return one_hot(torch.where((y == 0) | (y == 1), y * bins + at, -1), 2 * bins)
