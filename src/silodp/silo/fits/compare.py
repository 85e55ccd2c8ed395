"""Alone, together or personal: what each has for one silo, on records that no fit has seen.

- *together*: the released model as it is.
- *alone*: fitted to this silo's own records, without the released model.
- *personal*: as `blend` makes it.

Where records are held out, the figures are of those. Else they are of all records, by nested
cross-validation: each record's outputs come from fits, strengths and weights that were found
without its fold. The released model has seen those records under noise, the other two have not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.problem.problem import Problem
from silodp.silo.fits.blend import ALONE, FEWEST, Personal, personal_model
from silodp.silo.fits.figures import Scale, figures
from silodp.silo.fits.head import outputs_at
from silodp.silo.fits.rows import Rows

TOGETHER = "together"
PERSONAL = "personal"
NAMES: tuple[str, ...] = (ALONE, TOGETHER, PERSONAL)
FOLDS = 5
HELD_OUT = "held out"
NESTED = "by nested cross-validation"

Table = dict[str, dict[str, float | None]]
"""Figures by name, for each of `NAMES`."""


@dataclass(frozen=True, eq=False)
class Compared:
    """The personal model of a silo, and what each model has for it."""

    model: Personal
    scored: Rows
    outputs: dict[str, Tensor]
    """For each of `NAMES` the outputs for the rows that are scored."""
    how: str
    trained: int
    """Records that the personal model was fitted to."""

    def table(self, problem: Problem, scale: Scale) -> Table:
        """Return the figures of each model."""
        return table_of(problem, scale, [self])


def compare(
    problem: Problem, shared: Tensor, own: Rows, held_out: Rows | None, start: Tensor
) -> Compared:
    """Fit a personal model to `own` records, and compare it with the other two.

    Args:
        problem: the model and the loss.
        shared: (d,) the released model.
        own: the silo's records, without those that are held out.
        held_out: the records to score on; None for nested cross-validation.
        start: (d,) where a network starts that is fitted alone.

    Raises:
        BadInput: there are fewer than 20 records to fit to.
    """
    if own.records < FEWEST:
        raise BadInput(
            f"the silo has {own.records} records to fit to; a personal model needs {FEWEST} or "
            "more: use the released model as it is"
        )
    rows_problem = problem.by_row
    shared = shared.double()
    model = personal_model(rows_problem, shared, own, start)
    if held_out is not None:
        points = _points(model, shared)
        found = outputs_at(rows_problem, points, held_out.x)
        outputs = dict(zip(NAMES, found, strict=True))
        return Compared(model, held_out, outputs, HELD_OUT, own.records)
    fold = own.folds(FOLDS)
    kept = outputs_at(rows_problem, shared.repeat(len(NAMES), 1), own.x)
    for k in range(FOLDS):
        train = own.of_records(torch.nonzero(fold != k)[:, 0])
        fitted = personal_model(rows_problem, shared, train, start)
        out = fold[own.owner] == k
        kept[:, out] = outputs_at(rows_problem, _points(fitted, shared), own.x[out])
    return Compared(model, own, dict(zip(NAMES, kept, strict=True)), NESTED, own.records)


def table_of(problem: Problem, scale: Scale, silos: list[Compared]) -> Table:
    """Return the figures of each model over the scored records of these silos together."""
    rows = _together([one.scored for one in silos])
    return {
        name: figures(problem.by_row, scale, torch.cat([one.outputs[name] for one in silos]), rows)
        for name in NAMES
    }


def _points(model: Personal, shared: Tensor) -> Tensor:
    return torch.stack([model.alone, shared, model.personal])


def _together(parts: list[Rows]) -> Rows:
    owners = []
    records = 0
    for part in parts:
        owners.append(part.owner + records)
        records += part.records
    return Rows(
        torch.cat([part.x for part in parts]),
        torch.cat([part.y for part in parts]),
        torch.cat([part.weight for part in parts]),
        torch.cat(owners),
        records,
    )
