"""Judge a model on the held-out records."""

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
"""The most bins of a query.

A query is a few numbers long. It must not make a silo allocate more memory than its answer needs.
"""


@dataclass(frozen=True, eq=False)
class Score(Cells):
    """The losses and errors of w on the held-out records.

    For a class, the numbers are loss / cap, and 1 if the prediction is right. With `bins` there are
    also a third number and a cell:

    - Two classes: (risk of the second class - label + 1) / 2, and the cell (label, bin of the
      score).
    - More classes, with as many bins as classes: (chance of the predicted class - right + 1) / 2,
      and the cell (right or not, label).

    For a number or a count, the numbers are (error / cap)^2 and |error| / cap, without cells. All
    numbers are clipped to [0, 1]. A value that is not finite counts as the worst one, and is in no
    cell.

    Sensitivity: 2 or 3 numbers move by at most 1 each. With `bins` a record leaves one cell and
    enters another. So the bound is sqrt(numbers + 2), or sqrt(2) without cells (`Cells`).
    """

    w: Tensor
    bins: int
    cap: float
    wire: ClassVar = {"w": POINT, "bins": INTEGER, "cap": REAL}
    in_totals = True
    on_held_out = True

    @property
    def numbers(self) -> int:
        """Return 3 with cells and 2 without."""
        if self.bins:
            return 3
        return 2

    @property
    def cells(self) -> int:
        """Return the number of cells: two for each bin."""
        return 2 * self.bins

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a mean answer."""
        return len(self.w), self.numbers + self.cells

    def _check_shapes(self, dim: int, runs: int) -> None:
        """Raise Refused for a cap or a number of bins without meaning."""
        super()._check_shapes(dim, runs)
        if not 0 < self.cap < math.inf:
            raise Refused("clip")
        if type(self.bins) is not int or not 0 <= self.bins <= MAX_BINS:
            raise Refused("shape")

    def check_silo(self, features: int, held_out: int) -> None:
        """Raise Refused if the silo holds out no records."""
        if not held_out:
            raise Refused("batch")

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives each record's vector.

        The model sees one record at a time. So a model that mixes the records of a batch cannot mix
        these.
        """
        if dtype is None:
            w = self.w[run]
        else:
            w = self.w[run].to(dtype)
        parameters = problem.split(w) | problem.constants(w)
        bins = self.bins
        cap = self.cap

        def one(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            """Return the outputs and the loss of one record."""
            output = functional_call(problem.model, parameters, (x[None],))[0]
            return output.flatten(), problem.record_loss(output, y)

        @torch.no_grad()
        def rows(x: Tensor, y: Tensor) -> Tensor:
            """Return the vectors (m, d) of these records."""
            output, loss = (part.double() for part in vmap(one)(x, y))
            return judged(problem.loss, output, loss, y, bins, cap)

        return rows


def judged(kind: Loss, output: Tensor, loss: Tensor, y: Tensor, bins: int, cap: float) -> Tensor:
    """Return the vectors (m, d) of records with these outputs (m, k), losses and labels.

    `kind` is the loss with which the model was trained.
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
    if bins:
        empty = output.new_zeros(len(y), 1 + 2 * bins)
    else:
        empty = output.new_zeros(len(y), 0)
    return torch.cat([torch.stack(numbers, 1), empty], 1)


def right_of(kind: Loss, output: Tensor, y: Tensor) -> Tensor:
    """Return a bool (m,): whether the predicted class of outputs (m, k) is the record's class.

    An output that is not finite is wrong.
    """
    prediction = predicted(kind, output)
    if output.shape[1] == 1:
        right = (prediction > 0) == (y > 0)
    else:
        right = prediction == y
    return right & torch.isfinite(output).all(1)


def _cells(loss: Loss, output: Tensor, y: Tensor, right: Tensor, bins: int) -> Tensor:
    """Return (m, 1 + 2 bins): the excess of the predicted risk, and the cell, one-hot.

    The excess is (predicted - observed + 1) / 2. A label outside the classes is in no cell.

    Risks are those that `Task.read` gives, without the weights of the classes. The bins are of
    sigmoid(score), with the weights: there a class that weights favour is predicted from 0.5 on.
    """
    if output.shape[1] == 1:  # one score for two classes: the first class has the score 0
        output = torch.cat([torch.zeros_like(output), output], 1)
    if isinstance(loss, Weighted):
        chances = (output - output.new_tensor(loss.weights).log()).softmax(1)
    else:
        chances = output.softmax(1)
    if output.shape[1] == 2:
        score = (output[:, 1] - output[:, 0]).sigmoid().nan_to_num(0.0)
        index = (score * bins).long().clamp(0, bins - 1)
        excess = chances[:, 1] - y
        labelled = (y == 0) | (y == 1)
        cell = y * bins + index
    else:
        largest = output.nan_to_num(0.0).argmax(1, keepdim=True)
        excess = chances.gather(1, largest)[:, 0] - right.double()
        labelled = (y >= 0) & (y < bins)
        cell = right * bins + y
    finite = torch.isfinite(output).all(1)
    number = ((excess + 1) / 2).nan_to_num(0.5).clamp(0, 1)
    cell = torch.where(labelled & finite, cell, -1)
    return torch.cat([number[:, None], one_hot(cell, 2 * bins)], 1)
