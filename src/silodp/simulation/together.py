"""The spend of all simulations that share files. It is what the ledgers of their silos
would show if each silo had a gate.

A simulation owns the records, so nothing is refused here. It only reports what a federation would
have reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import added
from silodp.pages.runs import Run, Silo, found_in, read
from silodp.runs import RunFolder
from silodp.silo.data.files import silo_names

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
    """Return the run in `folder` and the runs beside it that read one of its files, and each silo's
    (epsilon, delta) over all of them.

    A silo is its file, whatever other files a run had. Formal guarantees: sums of Gaussian runs at
    one delta are exact. All others add epsilons and deltas.
    """
    own = sources(folder)
    sharing = [
        (run, read_files)
        for run in trainings(folder.parent)
        if not set(own.values()).isdisjoint((read_files := sources(run.folder)).values())
    ]
    spent = {
        name: composed(
            part for run, read_files in sharing if (part := _part(run, read_files, file))
        )
        for name, file in own.items()
    }
    return [run for run, _ in sharing], spent


def _part(run: Run, files: Mapping[str, str], file: str) -> Silo | None:
    """Return what the run has spent of this file's budget, or None if it did not read the file.

    A run that names its silos in another way, as a curator's does, has spent the most of any silo.
    """
    names = [name for name, read_file in files.items() if read_file == file]
    if not names:
        return None
    named = [silo for silo in run.silos if silo.name in names]
    return max(named or run.silos, key=lambda silo: silo.together, default=None)


def composed(parts: Iterable[Silo]) -> tuple[float, float]:
    """Return the (epsilon, delta) of all releases about one silo's records, including
    evaluations.
    """
    listed = list(parts)
    return added([silo.together for silo in listed], gaussian=all(silo.gaussian for silo in listed))


def sources(folder: Path) -> dict[str, str]:
    """Return the file of each silo of a run. A silo of a built-in set has the set's name and its
    own. Return nothing if the description does not have them.
    """
    try:
        description = json.loads(RunFolder(folder).description.read_text("utf-8"))
        source = description["source"]
        files = [str(file) for file in source["silos"]]
        if files:
            return dict(zip(silo_names([Path(file) for file in files]), files, strict=True))
        return {silo["name"]: f"{source['data']}:{silo['name']}" for silo in description["silos"]}
    except (OSError, ValueError, KeyError, TypeError, BadInput):
        return {}
