"""Record-level vectors of scores, classes and missing values, each of the form of `query.Cells` whatever a record or w holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from silodp.core.problem.problem import Problem
from silodp.core.statistics import Cells, ClassCounts, Score
from silodp.silo.answer.slots import Rows
from silodp.silo.data.records import Records

_CHUNK = 2**12


def cell_rows(statistic: Cells, problem: Problem, w: Tensor | None = None) -> Rows:
    """The rows of a statistic of numbers and cells; of a Score at the point w (d,)."""
    if isinstance(statistic, Score):
        assert w is not None
        return _score_rows(problem, w, statistic.bins, statistic.cap)
    if isinstance(statistic, ClassCounts):
        return lambda x, y: _one_hot(y, statistic.classes)
    return lambda missing, y: missing.flatten(1).double()


def cell_sums(statistic: Cells, problem: Problem, records: Records) -> Tensor:
    """(J, N, d): each silo's sum of its records' vectors; J is 1 but for a Score of several points."""
    points = statistic.w if isinstance(statistic, Score) else [None]
    source = records.x if isinstance(statistic, Score | ClassCounts) else records.absent
    sums = torch.zeros(len(points), len(records), statistic.shape[-1], dtype=torch.float64)
    for j, w in enumerate(points):
        rows = cell_rows(statistic, problem, w)
        for i, n in enumerate(records.counts):
            for start in range(0, n, _CHUNK):
                part = slice(start, min(n, start + _CHUNK))
                sums[j, i] += rows(source[i, part], records.y[i, part]).sum(0).cpu()
    return sums


def _score_rows(problem: Problem, w: Tensor, bins: int, cap: float) -> Rows:
    """The model sees one record at a time, so that a model that mixes the records of a batch cannot mix these."""
    parameters = problem.split(w) | problem.constants(w)

    def one(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        output = functional_call(problem.model, parameters, (x[None],))[0]
        return output.flatten(), problem.record_loss(output, y)

    @torch.no_grad()
    def rows(x: Tensor, y: Tensor) -> Tensor:
        output, loss = (part.double() for part in vmap(one)(x, y))
        finite = torch.isfinite(output).all(1)
        if y.is_floating_point():
            error = ((output[:, 0] - y).abs() / cap).nan_to_num(1.0, 1.0).clamp(max=1)
            numbers = [error.square(), error]
            cells = torch.zeros(len(y), 2 * bins, dtype=torch.float64, device=x.device)
        else:
            alone = output.shape[1] == 1
            right = ((output[:, 0] > 0) == (y > 0) if alone else output.argmax(1) == y) & finite
            numbers = [(loss / cap).nan_to_num(1.0, 1.0).clamp(0, 1), right.double()]
            cells = _auc_cells(output[:, 0] if alone else output[:, 1] - output[:, 0], y, bins)
            cells *= (output.shape[1] <= 2) & finite[:, None]
        return torch.cat([torch.stack(numbers, 1), cells], 1)

    return rows


def _auc_cells(margin: Tensor, y: Tensor, bins: int) -> Tensor:
    """One-hot over (label, bin of sigmoid(margin)): bins of the labels 0, then of the labels 1; another label is in none."""
    at = (margin.sigmoid().nan_to_num(0.0) * bins).long().clamp(0, max(bins - 1, 0))
    return _one_hot(torch.where((y == 0) | (y == 1), y * bins + at, -1), 2 * bins)


def _one_hot(index: Tensor, size: int) -> Tensor:
    return (index[:, None] == torch.arange(size, device=index.device)).double()
