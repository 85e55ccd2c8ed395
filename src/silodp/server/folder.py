"""A run's folder, as far as every run has one: run.json (its order, and what it was given for), the
model, and a summary at the end.

Everything in it is public, or private already. `silodp train` and `silodp federation run` write it
alike.
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
    """Writes run.json before the first question, with what is this run's `own` too; BadInput if the
    run there wants anything else.
    """
    asked = json.loads(json.dumps(wanted))
    if RunFolder(folder).description.exists():
        found = read_run(folder)
        if differs := _different(
            asked, {name: value for name, value in found.items() if name not in (own or {})}
        ):
            raise BadInput(
                f"the run in {folder} was begun with another {', '.join(differs)}; {advice}"
            )
        return found
    made = json.loads(json.dumps(own or {})) | asked
    atomic.write_json(RunFolder(folder).description, made)
    return made


def read_run(folder: Path) -> dict[str, Any]:
    """What run.json says; BadInput where there is none that can be read."""
    try:
        found = json.loads(RunFolder(folder).description.read_text())
        if not isinstance(found, dict):
            raise ValueError
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{folder} holds no run of this version that can be read "
            f"({type(error).__name__}); give its run folder"
        ) from None
    return found


def _different(asked: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What differs, by name; of an order, and of where the records lie, word by word."""
    names = set()
    for name in asked.keys() | found.keys():
        one = asked.get(name)
        other = found.get(name)
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
    """Each silo's budget for the run; n is public."""
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
    """model.safetensors: the parameters by their names in the model, and in what words it was
    made.
    """
    parameters = {name: value[0].contiguous() for name, value in problem.split(w).items()}
    path = RunFolder(folder).model
    atomic.write(path, save(parameters | dict(more or {}), metadata=dict(about)), mode=0o644)
    return path
