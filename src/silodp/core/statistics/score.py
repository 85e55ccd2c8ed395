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
from silodp.core.problem.losses import Loss, Ordinal, Poisson, Weighted, predicted
from silodp.core.problem.problem import Problem
from silodp.core.statistics.cells import Cells, one_hot
from silodp.core.statistics.statistic import Rows

MAX_BINS = 2**9
"""At most: a query is a few numbers, and must not make a silo allocate more than it may be sent."""


@dataclass(frozen=True, eq=False)
class Score(Cells):
    """How w does on the held-out records. Of a class: loss / cap, right or not, and with `bins`
    whether risks are too high or low, and a cell.

    Of two classes that is (risk of the second - label + 1) / 2 and the cell (label, bin of the
    score); of more, with as many bins as classes, (chance of the class that is said - right + 1) /
    2 and the cell (right or not, label). Of a number or a count: (error / cap)^2 and
    |error| / cap, and no cells. All are clipped to [0, 1]; what is not finite is the worst, and in
    no cell.

    Sensitivity: 2 or 3 numbers that each move by at most 1, and with `bins` one cell for another:
    sqrt(numbers + 2), or sqrt(2) without cells (`Cells`).
    """

    w: Tensor
    bins: int
    cap: float
    wire: ClassVar = {"w": POINT, "bins": INTEGER, "cap": REAL}
    in_totals = True
    on_held_out = True

    @property
    def numbers(self) -> int:
        return 3 if self.bins else 2

    @property
    def cells(self) -> int:
        return 2 * self.bins

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.w), self.numbers + self.cells

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
        """The model sees one record at a time, so that a model that mixes the records of a batch
        cannot mix these.
        """
        if dtype is None:
            w = self.w[run]
        else:
            w = self.w[run].to(dtype)
        parameters = problem.split(w) | problem.constants(w)
        bins = self.bins
        cap = self.cap

        def one(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            output = functional_call(problem.model, parameters, (x[None],))[0]
            return output.flatten(), problem.record_loss(output, y)

        @torch.no_grad()
        def rows(x: Tensor, y: Tensor) -> Tensor:
            output, loss = (part.double() for part in vmap(one)(x, y))
            return judged(problem.loss, output, loss, y, bins, cap)

        return rows


def judged(kind: Loss, output: Tensor, loss: Tensor, y: Tensor, bins: int, cap: float) -> Tensor:
    """(m, d): the vectors of records with these outputs (m, k), losses and labels, of a model that
    was trained with a loss of this kind.
    """
    if y.is_floating_point():
        if isinstance(kind, Poisson):
            rate = predicted(kind, output)
        else:
            rate = output[:, 0]
        error = ((rate - y).abs() / cap).nan_to_num(1.0, 1.0).clamp(max=1)
        numbers = [error.square(), error]
    else:
        right = right_of(kind, output, y)
        numbers = [(loss / cap).nan_to_num(1.0, 1.0).clamp(0, 1), right.double()]
        if bins and not isinstance(kind, Ordinal):
            return torch.cat([torch.stack(numbers, 1), _cells(kind, output, y, right, bins)], 1)
    return torch.cat(
        [torch.stack(numbers, 1), output.new_zeros(len(y), 1 + 2 * bins if bins else 0)], 1
    )


def right_of(kind: Loss, output: Tensor, y: Tensor) -> Tensor:
    """(m,) bool: whether the class that outputs (m, k) stand for is the record's; nothing that is
    not finite is right.
    """
    alone = output.shape[1] == 1
    said = predicted(kind, output)
    return ((said > 0) == (y > 0) if alone else said == y) & torch.isfinite(output).all(1)


def _cells(loss: Loss, output: Tensor, y: Tensor, right: Tensor, bins: int) -> Tensor:
    """(m, 1 + 2 bins): how far what is said lies above what is, as (difference + 1) / 2, and the
    cell, one-hot; another label is in none.

    Chances are those that `Task.read` says, without the weights of the classes; the bins are of
    sigmoid(score), in which the class that weights favour is said from 0.5 on.
    """
    if output.shape[1] > 1:
        output = output
    else:
        output = torch.cat([torch.zeros_like(output), output], 1)
    chances = (
        output - output.new_tensor(loss.weights).log() if isinstance(loss, Weighted) else output
    ).softmax(1)
    if output.shape[1] == 2:
        at = (
            ((output[:, 1] - output[:, 0]).sigmoid().nan_to_num(0.0) * bins)
            .long()
            .clamp(0, bins - 1)
        )
        above = chances[:, 1] - y
        known = (y == 0) | (y == 1)
        cell = y * bins + at
    else:
        said = chances.gather(1, output.nan_to_num(0.0).argmax(1, keepdim=True))[:, 0]
        above = said - right.double()
        known = (y >= 0) & (y < bins)
        cell = right * bins + y
    finite = torch.isfinite(output).all(1)
    number = ((above + 1) / 2).nan_to_num(0.5).clamp(0, 1)
    return torch.cat([number[:, None], one_hot(torch.where(known & finite, cell, -1), 2 * bins)], 1)
