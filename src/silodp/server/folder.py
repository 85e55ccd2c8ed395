"""The files that every run's folder has: run.json (the order, and what it was given for), the
model, and a summary at the end.

Every file is public, or private already. `silodp train` and `silodp federation run` write the same
files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.problem import Problem
from silodp.host import atomic
from silodp.runs import RunFolder


def open_run(
    folder: Path, wanted: Mapping[str, Any], *, own: Mapping[str, Any] | None = None, advice: str
) -> dict[str, Any]:
    """Write run.json before the first question, and return its content.

    Arguments:

    - `wanted`: what must be the same if the run is resumed.
    - `own`: facts of this run alone, such as its id. They are written once and not compared.
    - `advice`: the end of the message, if `wanted` differs.

    Return the content of the file that exists already. Raise BadInput if the run in it differs from
    `wanted`.
    """
    # What is compared with a file must have the types of a file: lists, not tuples.
    compared: dict[str, Any] = json.loads(json.dumps(wanted))
    stored: dict[str, Any] = json.loads(json.dumps(own or {}))
    if RunFolder(folder).description.exists():
        existing = read_run(folder)
        comparable = {name: value for name, value in existing.items() if name not in stored}
        if differs := _different(compared, comparable):
            raise BadInput(
                f"the run in {folder} was begun with another {', '.join(differs)}; {advice}"
            )
        return existing
    description = stored | compared
    atomic.write_json(RunFolder(folder).description, description)
    return description


def read_run(folder: Path) -> dict[str, Any]:
    """Return the content of run.json. Raise BadInput if it cannot be read."""
    try:
        description = json.loads(RunFolder(folder).description.read_text())
        if not isinstance(description, dict):
            raise ValueError
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{folder} contains no run that this version can read ({type(error).__name__}); give "
            "a run folder"
        ) from None
    return description


def _different(wanted: Mapping[str, Any], existing: Mapping[str, Any]) -> list[str]:
    """Return the names of what differs, sorted.

    Within an order, and within the source of the records, each differing field has its own name.
    """
    names = set()
    for name in wanted.keys() | existing.keys():
        one = wanted.get(name)
        other = existing.get(name)
        if (
            one != other
            and isinstance(one, dict)
            and isinstance(other, dict)
            and name in ("order", "source")
        ):
            names |= {
                word for word in one.keys() | other.keys() if one.get(word) != other.get(word)
            }
        elif one != other:
            names.add(name)
    return sorted(names)


def silo_rows(
    names: Sequence[str], counts: Sequence[int], budgets: Sequence[Budget]
) -> list[dict[str, Any]]:
    """Return the name, number of records and budget of each silo for the run. The number is
    public.
    """
    return [
        {"name": name, "records": n, "epsilon": b.epsilon, "delta": b.delta}
        for name, n, b in zip(names, counts, budgets, strict=True)
    ]


def write_model(
    folder: Path,
    problem: Problem,
    w: Tensor,
    about: Mapping[str, str],
    more: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write model.safetensors, and return its path.

    The file contains the parameters by their names in the model, the tensors of `more`, and the
    words of `about` as metadata.
    """
    parameters = {name: value[0].contiguous() for name, value in problem.split(w).items()}
    path = RunFolder(folder).model
    atomic.write(path, save(parameters | dict(more or {}), metadata=dict(about)), mode=0o644)
    return path
