"""Judge a model on the held-out records."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.functional import softplus

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER, POINT, REAL, VECTOR
from silodp.core.problem.losses import Hazard, Loss, Ordinal, Poisson, Weighted, predicted
from silodp.core.problem.problem import Problem
from silodp.core.statistics.statistic import Cells, Rows, one_hot
from silodp.core.statistics.summaries import refuse_unordered

MAX_BINS = 2**9
"""The most bins of a query.

A query is a few numbers long. It must not make a silo allocate more memory than its answer needs.
"""
MAX_NUMBERS = 5
"""The most numbers of a query: as many as the longest list of `Score` has."""


def no_edges() -> Tensor:
    """Return an empty vector of edges."""
    return torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Score(Cells):
    """The losses and errors of w on the held-out records.

    A query asks for the first `numbers` of a list. All of them are clipped to [0, 1]:

    - Classes and survival times: loss / cap; (chance - outcome + 1) / 2.
    - A number y in [-1, 1]: (error / cap)^2; |error| / cap; (y + 1) / 2; y^2.
    - A count y up to the public `most`: (error / cap)^2; |error| / cap; y / most;
      deviance(y, rate) / deviance(most, 1); y log y / (most log most).

    After the list the numbers are 0. With `bins` there are also two cells for each bin:

    - Two classes: the cell (outcome, bin of the logit of the risk over the public `edges`). The
      chance is the risk of the second class, and the outcome is whether it is the record's class.
    - Survival times: the same, of the event by the middle time bin (`middle_of`). A record that was
      last seen before is in no cell, and its chance less its outcome counts as 0.
    - More classes, in an order or not: the cell (right or not, label). The chance is that of the
      predicted class, and the outcome is whether the prediction is right.

    A value that is not finite counts as the worst one, and is in no cell.

    Sensitivity: each number moves by at most 1. With `bins` a record leaves one cell and enters
    another. So the bound is sqrt(numbers + 2), or sqrt(numbers) without cells (`Cells`).
    """

    w: Tensor
    bins: int
    cap: float
    numbers: int = 2  # type: ignore[reportIncompatibleMethodOverride]
    edges: Tensor = field(default_factory=no_edges)
    wire: ClassVar = {
        "w": POINT,
        "bins": INTEGER,
        "cap": REAL,
        "numbers": INTEGER,
        "edges": VECTOR,
    }
    in_totals = True
    on_held_out = True

    @property
    def cells(self) -> int:
        """Return the number of cells: two for each bin."""
        return 2 * self.bins

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a mean answer."""
        return len(self.w), self.numbers + self.cells

    def _check_shapes(self, dim: int, runs: int) -> None:
        """Raise Refused for a cap, a number of bins or edges without meaning."""
        super()._check_shapes(dim, runs)
        if not 0 < self.cap < math.inf:
            raise Refused("clip")
        if type(self.bins) is not int or not 0 <= self.bins <= MAX_BINS:
            raise Refused("shape")
        if type(self.numbers) is not int or not 1 <= self.numbers <= MAX_NUMBERS:
            raise Refused("shape")
        if self.edges.ndim != 1 or len(self.edges) not in (0, self.bins - 1):
            raise Refused("shape")
        if not bool(torch.isfinite(self.edges).all()):
            raise Refused("not-finite")
        if len(self.edges) > 1:
            refuse_unordered(self.edges[:-1], self.edges[1:])

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

        def one(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            """Return the outputs and the loss of one record."""
            output = functional_call(problem.model, parameters, (x[None],))[0]
            return output.flatten(), problem.record_loss(output, y)

        @torch.no_grad()
        def rows(x: Tensor, y: Tensor) -> Tensor:
            """Return the vectors (m, d) of these records."""
            output, loss = (part.double() for part in vmap(one)(x, y))
            return judged(problem.loss, output, loss, y, self)

        return rows


def judged(kind: Loss, output: Tensor, loss: Tensor, y: Tensor, asked: Score) -> Tensor:
    """Return the vectors (m, d) of records with these outputs (m, k), losses and labels.

    `kind` is the loss with which the model was trained.
    """
    cells = output.new_zeros(len(y), asked.cells)
    if isinstance(kind, Poisson):
        numbers = _of_counts(kind, output, y.to(output), asked.cap)
    elif y.is_floating_point():
        numbers = _of_numbers(output[:, 0], y.to(output), asked.cap)
    else:
        if isinstance(kind, Hazard):
            chance, outcome, score = _by_the_middle(output, y)
        else:
            chance, outcome, score = _of_classes(kind, output, y)
        excess = ((chance - outcome + 1) / 2).nan_to_num(0.5)
        numbers = [(loss / asked.cap).nan_to_num(1.0, 1.0), excess]
        if asked.bins:
            finite = torch.isfinite(output).all(1)
            cells = _cells(score, outcome, y, finite, asked)
    numbers = numbers[: asked.numbers]
    numbers += [torch.zeros_like(numbers[0])] * (asked.numbers - len(numbers))
    return torch.cat([torch.stack(numbers, 1).clamp(0, 1), cells], 1)


def _of_numbers(value: Tensor, y: Tensor, cap: float) -> list[Tensor]:
    """Return the list of numbers of a label that is a number."""
    error = ((value - y).abs() / cap).nan_to_num(1.0, 1.0).clamp(max=1)
    label = y.nan_to_num(0.0).clamp(-1, 1)
    return [error.square(), error, (label + 1) / 2, label.square()]


def _of_counts(kind: Poisson, output: Tensor, y: Tensor, cap: float) -> list[Tensor]:
    """Return the list of numbers of a label that is a count."""
    rate = predicted(kind, output)
    error = ((rate - y).abs() / cap).nan_to_num(1.0, 1.0).clamp(max=1)
    label = y.nan_to_num(0.0).clamp(0, kind.most)
    deviance = deviance_of(label, rate) / largest_deviance(kind.most)
    by_itself = torch.xlogy(label, label) / largest_entropy(kind.most)
    return [
        error.square(),
        error,
        label / kind.most,
        deviance.nan_to_num(1.0, 1.0),
        by_itself,
    ]


def deviance_of(y: Tensor, rate: Tensor) -> Tensor:
    """Return the Poisson deviance of counts at these rates."""
    return 2 * (torch.xlogy(y, y) - torch.xlogy(y, rate) - y + rate)


def largest_deviance(most: float) -> float:
    """Return the deviance of the largest count where 1 was expected; larger ones are clipped."""
    top = max(most, 2.0)
    return 2 * (top * math.log(top) - top + 1)


def largest_entropy(most: float) -> float:
    """Return y log y of the largest count, and at least that of 2."""
    top = max(most, 2.0)
    return top * math.log(top)


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


def middle_of(periods: int) -> int:
    """Return the place of the middle time bin, from 0, by whose end the event is judged."""
    return (periods - 1) // 2


def _by_the_middle(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the risk of the event by the end of the middle time bin, the outcome, and the logit of
    the risk. The outcome is NaN if it is not known.
    """
    middle = middle_of(output.shape[1])
    hazard = softplus(output[:, : middle + 1]).sum(1)
    last = y.long().div(2, rounding_mode="floor")
    event = y.long() % 2 == 1
    known = (y >= 0) & (y <= 2 * output.shape[1]) & ((last > middle) | event)
    outcome = torch.where(known, (last <= middle).to(output), torch.nan)
    return -torch.expm1(-hazard), outcome, hazard + torch.log(-torch.expm1(-hazard))


def _of_classes(kind: Loss, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the chance and the outcome (`Score`), and the score by which records are ordered.

    Risks are those that `Task.read` gives, without the weights of the classes.
    """
    right = right_of(kind, output, y).double()
    if isinstance(kind, Ordinal):
        return kind.chances(output).amax(1), right, output[:, 0]
    if output.shape[1] == 1:  # one score for two classes: the first class has the score 0
        output = torch.cat([torch.zeros_like(output), output], 1)
    weighted = output
    if isinstance(kind, Weighted):
        output = output - output.new_tensor(kind.weights).log()
    chances = output.softmax(1)
    if output.shape[1] == 2:
        outcome = torch.where((y == 0) | (y == 1), y.to(output), torch.nan)
        return chances[:, 1], outcome, output[:, 1] - output[:, 0]
    largest = weighted.nan_to_num(0.0).argmax(1, keepdim=True)
    return chances.gather(1, largest)[:, 0], right, weighted[:, 0]


def _cells(score: Tensor, outcome: Tensor, y: Tensor, finite: Tensor, asked: Score) -> Tensor:
    """Return the cell of each record, one-hot (m, 2 bins).

    With `edges` it is the bin of the score, else the label. A record whose outcome or label is not
    known is in no cell.
    """
    bins = asked.bins
    if len(asked.edges):
        place = torch.bucketize(
            score.nan_to_num(0.0).contiguous(), asked.edges.to(score), right=True
        )
    else:
        place = y.long()
    known = finite & torch.isfinite(outcome) & (place >= 0) & (place < bins)
    cell = outcome.nan_to_num(0.0).long() * bins + place
    return one_hot(torch.where(known, cell, -1), 2 * bins)
