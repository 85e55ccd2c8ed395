"""How often the predicted outcome happens, by bins of what the model predicts, on the records that
it was trained on: for the recalibration of a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from silodp.core.errors import Refused
from silodp.core.fields import POINT, REAL, VECTOR
from silodp.core.problem.losses import Hazard, Loss, Ordinal, Poisson, Weighted
from silodp.core.problem.problem import Problem
from silodp.core.statistics.statistic import Cells, Rows, one_hot
from silodp.core.statistics.summaries import refuse_unordered

MOST_EDGES = 2**9
"""At most: a query is a few numbers, and must not make a silo allocate more than it may be sent."""


@dataclass(frozen=True, eq=False)
class RiskCells(Cells):
    """A record's outcome o in [0, 1], and the outcome that the model predicts; then, in the bin of
    its score over the public `edges`, 1 - o in one cell and o in another.

    Of two classes the score is the logit of the second class, and o whether it is the record's; of
    more, the logit of the chance of the class that is said, and o whether that is right; of ordered
    classes the logit of the middle threshold, and o whether the label lies above it; of counts the
    log rate, and o is count / cap. Without edges it is two numbers, for survival: whether the
    record has had its event, and the hazard that the model has added up for it, / cap. Everything
    is clipped to [0, 1]. A record with a score or a label that is not known is in no cell.

    Sensitivity: two numbers move by at most 1 each, and cells that are at least 0 and sum to at
    most 1 move by at most sqrt(2): 2 in all (`Cells`). Without edges it is two numbers: sqrt(2).
    """

    w: Tensor
    edges: Tensor
    cap: float
    wire: ClassVar = {"w": POINT, "edges": VECTOR, "cap": REAL}
    in_totals = True

    @property
    def numbers(self) -> int:
        return 2

    @property
    def cells(self) -> int:
        return 2 * (len(self.edges) + 1) if len(self.edges) else 0

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.w), self.numbers + self.cells

    def _check_shapes(self, dim: int, runs: int) -> None:
        super()._check_shapes(dim, runs)
        if not 0 < self.cap < math.inf:
            raise Refused("clip")
        if self.edges.ndim != 1 or len(self.edges) > MOST_EDGES:
            raise Refused("shape")
        if not bool(torch.isfinite(self.edges).all()):
            raise Refused("not-finite")
        if len(self.edges) > 1:
            refuse_unordered(self.edges[:-1], self.edges[1:])

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives each record's vector. The model sees one record at a time,
        so that a model that mixes the records of a batch cannot mix these.
        """
        if dtype is None:
            w = self.w[run]
        else:
            w = self.w[run].to(dtype)
        parameters = problem.split(w) | problem.constants(w)
        edges = self.edges.double()
        cap = self.cap

        def one(x: Tensor) -> Tensor:
            return functional_call(problem.model, parameters, (x[None],))[0].flatten()

        @torch.no_grad()
        def rows(x: Tensor, y: Tensor) -> Tensor:
            if x.is_floating_point():
                x = x.to(w.dtype)
            output = vmap(one)(x).double()
            if not len(edges):
                return _events(problem.loss, output, y, cap)
            score, outcome = scored(problem.loss, output, y, cap)
            known = torch.isfinite(score) & torch.isfinite(outcome)
            outcome = outcome.nan_to_num(0.0).clamp(0, 1)[:, None]
            said = _said(problem.loss, score, cap).nan_to_num(0.0).clamp(0, 1)[:, None]
            said = torch.where(known[:, None], said, 0.0)
            place = torch.bucketize(score.nan_to_num(0.0).contiguous(), edges.to(score))
            cell = one_hot(torch.where(known, place, -1), len(edges) + 1)
            return torch.cat([outcome, said, (1 - outcome) * cell, outcome * cell], 1)

        return rows


def scored(kind: Loss, output: Tensor, y: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return score and outcome (m,) of records with these outputs (m, k) and labels; NaN where a
    label is none of the task's.
    """
    nothing = torch.full((len(y),), math.nan, dtype=output.dtype, device=output.device)
    if isinstance(kind, Poisson):
        return output[:, 0], y.to(output) / cap
    if y.is_floating_point():
        return nothing, nothing
    if isinstance(kind, Ordinal):
        middle = (kind.classes - 2) // 2
        known = (y >= 0) & (y < kind.classes)
        return output[:, middle], torch.where(known, (y > middle).to(output), nothing)
    if output.shape[1] == 1:
        output = torch.cat([torch.zeros_like(output), output], 1)
    if isinstance(kind, Weighted):
        output = output - output.new_tensor(kind.weights).log()
    known = (y >= 0) & (y < output.shape[1])
    if output.shape[1] == 2:
        return output[:, 1] - output[:, 0], torch.where(known, (y == 1).to(output), nothing)
    best, said = output.nan_to_num(0.0).max(1)
    others = output.scatter(1, said[:, None], -math.inf).logsumexp(1)
    return best - others, torch.where(known, (said == y).to(output), nothing)


def _said(kind: Loss, score: Tensor, cap: float) -> Tensor:
    """Return the outcome that the model predicts for these scores (m,)."""
    if isinstance(kind, Poisson):
        return score.exp() / cap
    return score.sigmoid()


def _events(kind: Loss, output: Tensor, y: Tensor, cap: float) -> Tensor:
    """Return (m, 2): the event, and the hazard of the periods in which the record was at risk, of a
    survival time; zeros of other labels.
    """
    if not isinstance(kind, Hazard):
        return output.new_zeros(len(y), 2)
    last = y.long().div(2, rounding_mode="floor")[:, None]
    event = (y.long() % 2 == 1)[:, None]
    place = torch.arange(output.shape[1], device=output.device)
    at_risk = (place < last) | ((place == last) & event)
    known = (y >= 0) & (y <= 2 * output.shape[1]) & torch.isfinite(output).all(1)
    hazard = torch.where(at_risk, output.sigmoid(), 0.0).sum(1, keepdim=True) / cap
    found = torch.cat([event.to(output), hazard.nan_to_num(0.0).clamp(0, 1)], 1)
    return torch.where(known[:, None], found, 0.0)
