"""What simulations over the same files have spent together: the ledger that their silos would have
kept, had they been gates.

A simulation owns the records, so nothing is refused here; it says what a federation would have
said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import added
from silodp.pages.runs import Run, Silo, found_in, read
from silodp.runs import RunFolder

Spent = dict[str, tuple[float, float]]


def trainings(runs: Path) -> list[Run]:
    """The runs of `silodp train` in a folder that can be read, the oldest first; comparisons and
    tunings are not among them.
    """
    found = []
    for path in found_in(runs, depth=1).values():
        try:
            run = read(path)
        except BadInput:
            continue
        if run.kind == "train":
            found.append(run)
    return sorted(
        found,
        key=lambda run: (
            RunFolder(run.folder).description.stat().st_mtime
            if RunFolder(run.folder).description.exists()
            else 0.0
        ),
    )


def together(folder: Path) -> tuple[list[Run], Spent]:
    """The run in `folder` and those beside it that read the same files, and what each silo has
    spent over them all, (epsilon, delta).

    Formal guarantees: sums of Gaussian runs at one delta are exact; all others add epsilons and
    deltas.
    """
    own = sources(folder)
    same = [run for run in trainings(folder.parent) if own and sources(run.folder) == own]
    if same:
        names = [silo.name for silo in same[0].silos]
    else:
        names = []
    return same, {
        name: composed(silo for run in same for silo in run.silos if silo.name == name)
        for name in names
    }


def composed(parts: Iterable[Silo]) -> tuple[float, float]:
    """(epsilon, delta) of all that was said of one silo's records, evaluations included."""
    listed = list(parts)
    return added([silo.together for silo in listed], gaussian=all(silo.gaussian for silo in listed))


def sources(folder: Path) -> Any:
    """The files that a run has read, or the built-in set; nothing where that is not known."""
    try:
        source = json.loads(RunFolder(folder).description.read_text("utf-8"))["source"]
        return sorted(map(str, source["silos"])) or source["data"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
