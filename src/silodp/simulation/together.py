"""The spend of all simulations over the same files together. It is what the ledgers of their silos
would show if each silo had a gate.

A simulation owns the records, so nothing is refused here. It only reports what a federation would
have reported.
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
    """Return the readable runs of `silodp train` in a folder, the oldest first. Comparisons and
    tunings are not among them.
    """
    readable = []
    for path in found_in(runs, depth=1).values():
        try:
            run = read(path)
        except BadInput:
            continue
        if run.kind == "train":
            readable.append(run)
    return sorted(readable, key=_begun)


def _begun(run: Run) -> float:
    """Return when the run began, as seconds since 1970, or 0 without a description."""
    description = RunFolder(run.folder).description
    if description.exists():
        return description.stat().st_mtime
    return 0.0


def together(folder: Path) -> tuple[list[Run], Spent]:
    """Return the run in `folder` and the runs beside it that read the same files, and each silo's
    (epsilon, delta) over all of them.

    Formal guarantees: sums of Gaussian runs at one delta are exact. All others add epsilons and
    deltas.
    """
    own = sources(folder)
    same = [run for run in trainings(folder.parent) if own and sources(run.folder) == own]
    if same:
        names = [silo.name for silo in same[0].silos]
    else:
        names = []
    spent = {
        name: composed(silo for run in same for silo in run.silos if silo.name == name)
        for name in names
    }
    return same, spent


def composed(parts: Iterable[Silo]) -> tuple[float, float]:
    """Return the (epsilon, delta) of all releases about one silo's records, including
    evaluations.
    """
    listed = list(parts)
    return added([silo.together for silo in listed], gaussian=all(silo.gaussian for silo in listed))


def sources(folder: Path) -> Any:
    """Return the files that a run has read, or the name of the built-in set. Return None if the
    description does not have them.
    """
    try:
        source = json.loads(RunFolder(folder).description.read_text("utf-8"))["source"]
        return sorted(map(str, source["silos"])) or source["data"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
