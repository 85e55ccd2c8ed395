"""Alone, together and personal for each silo of a simulation, on the records that are held out.

`silodp silo personalise` makes the same comparison inside a silo, by the same code. Here one
process has the records of all silos. The figures are computed on raw records and are not private,
so they have a file of their own that only its owner can read.
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from silodp.core.local_figures import RAW
from silodp.core.problem.problem import Problem
from silodp.host import atomic
from silodp.runs import RunFolder
from silodp.silo.data.records import Records
from silodp.silo.fits.blend import FEWEST
from silodp.silo.fits.compare import Compared, compare, table_of
from silodp.silo.fits.figures import Scale
from silodp.silo.fits.rows import Rows

MOST_WORK = 2e8
"""Parameters x records of training up to which silos are compared: a few minutes for a network."""


def compare_silos(
    problem: Problem, shared: Tensor, scale: Scale, trained: Records, held: Records
) -> dict[str, Any]:
    """Return what personal.json of a run contains. Networks that would take long are left out.

    Args:
        problem: the model and the loss.
        shared: (d,) the released model.
        scale: what is predicted.
        trained: the records of training, scaled as the model sees them.
        held: the records that are held out, scaled alike.
    """
    about = {"private": False, "note": RAW}
    if problem.dim * sum(trained.counts) > MOST_WORK:
        return about | {"all": {}, "silos": [], "too_few_records": [], "too_large": True}
    start = problem.initial([0])[0]
    silos = []
    compared = list[Compared]()
    left_out = []
    for i, name in enumerate(trained.names):
        own = _rows(problem, trained, i)
        if own.records < FEWEST:
            left_out.append(name)
            continue
        found = compare(problem, shared, own, _rows(problem, held, i), start)
        compared.append(found)
        counts = {"records": found.trained, "held_out": found.scored.records}
        figures = found.table(problem, scale)
        silos.append({"name": name} | counts | {"figures": figures, "shares": found.model.shares})
    every = table_of(problem, scale, compared) if compared else {}
    return about | {"all": every, "silos": silos, "too_few_records": left_out}


def write_comparison(files: RunFolder, found: dict[str, Any]) -> None:
    """Write personal.json, for its owner alone."""
    atomic.write(files.comparison, json.dumps(found, indent=1) + "\n", mode=0o600)


def _rows(problem: Problem, records: Records, silo: int) -> Rows:
    n = records.counts[silo]
    return Rows.of(records.x[silo, :n], records.y[silo, :n], problem.person)
