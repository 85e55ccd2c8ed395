"""How good a model is for each group of the held-out records: one more private release of each
silo, and public arithmetic.

A group is a category, or a yes or no, of one column of the public schema.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.figures import ACCURACY
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.schema import Column, Schema
from silodp.core.statistics import MAX_GROUPS, GroupScore
from silodp.server.estimates.scoring import ask_pooled, ratio, told
from silodp.server.federation import Port, StopRun

KIND = "groups"
QUESTIONS = 2
"""What its release is called in a ledger, and how many an evaluation by groups is: its own, and
that of all records.
"""


@dataclass(frozen=True)
class Groups:
    """The groups of one column, and where the features are that say which a record is in."""

    by: str
    names: tuple[str, ...]
    first: int
    features: int
    indicator: int
    note: str
    """What becomes of a missing value, where that is not plain."""


def groups_of(schema: Schema | None, by: str, *, feature_map: str = "") -> Groups:
    """Return the groups of the column `by`; BadInput, before anything is asked, says why there are
    none, and which columns have some.
    """
    if schema is None:
        raise BadInput(
            f"--by is {by!r}, but the run has no schema, which defines the groups of "
            "a column; train with --schema"
        )
    if feature_map:
        raise BadInput(
            f"--by is {by!r}, but the feature map {feature_map} leaves no column of "
            "a record; leave --by out"
        )
    if schema.label.task not in ("binary", "multiclass", "ordinal"):
        raise BadInput(
            f"--by is {by!r}, but groups are compared by their shares of right answers, "
            f"and a {schema.label.task} has none; leave it out"
        )
    return places_of(schema, by)


def places_of(schema: Schema, by: str) -> Groups:
    """Return the groups of the column `by`, and the places of their features. Raise BadInput for a
    column that is no category and no boolean.
    """
    usable = dict[str, tuple[Column, int]]()
    first = 0
    for column in schema.columns:
        if column.type == "boolean" or 2 <= len(column.categories) <= MAX_GROUPS:
            usable[column.name] = column, first
        first += len(column.features)
    if by not in usable:
        raise BadInput(
            f"--by is {by!r}; it must be a category or boolean column of the schema: "
            f"{', '.join(usable) or 'it has none'}"
        )
    (column, first), note = usable[by], ""
    if column.indicator or (column.type == "category" and column.missing):
        note = f"Records in which {by} is missing are in no group."
    elif column.missing is not None:
        note = (
            f"Where {by} is missing it counts as {'yes' if column.missing else 'no'}, as the "
            "schema says."
        )
    names = column.categories or ("no", "yes")
    return Groups(by, names, first, len(column.categories) or 1, int(column.indicator), note)


def score_groups(
    fed: Port,
    w: Tensor,
    mechanism: Gaussian,
    groups: Groups,
    held_out: Sequence[int],
    without: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return the groups for files and --json. For each group they have the number of records, the
    share of right answers, and that of all other groups together. It is the first question of an
    evaluation: where no policy allows it, nothing has been paid for yet. `without` receives the
    silos that did not answer, and why.
    """
    statistic = GroupScore(w, groups.first, groups.features, groups.indicator)
    try:
        found = ask_pooled(fed, statistic, mechanism, held_out, without)
    except (BadInput, StopRun) as stop:
        raise BadInput(f"there are no figures of groups: {stop}") from None
    n = found.records
    noise = found.noise
    wrong, right = found.mean.reshape(2, -1)
    rows = []
    others = noise * math.sqrt(len(groups.names) - 1)
    for g, name in enumerate(groups.names):
        rest = ratio(
            float(np.delete(right, g).sum()), float(np.delete(wrong, g).sum()), others, others, n
        )
        rows.append(
            {
                "name": name,
                "records": n * float(right[g] + wrong[g]),
                "records_noise": n * noise * math.sqrt(2),
                "figures": {
                    ACCURACY: told(ratio(float(right[g]), float(wrong[g]), noise, noise, n))
                },
                "rest": {"figures": {ACCURACY: told(rest)}},
            }
        )
    return {"by": groups.by, "held_out": n, "rows": rows, "note": groups.note}
