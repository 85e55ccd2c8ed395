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
from silodp.core.figures import ACCURACY, too_noisy
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.schema import Column, Schema
from silodp.core.quality import Z
from silodp.core.statistics import MAX_GROUPS, GroupScore
from silodp.server.estimates.calibration import Figure
from silodp.server.estimates.scoring import ask_pooled, told
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
            f"--by is {by!r}, but there is no schema, which alone says what the groups of "
            "a column are; train with --schema"
        )
    if feature_map:
        raise BadInput(
            f"--by is {by!r}, but the model sees what {feature_map} makes of a record, in "
            "which no column is left; leave it out"
        )
    if schema.label.task not in ("binary", "multiclass", "ordinal"):
        raise BadInput(
            f"--by is {by!r}, but groups are compared by their shares of right answers, "
            f"and a {schema.label.task} has none; leave it out"
        )
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

    It is the first question of an evaluation: where no policy allows it, nothing has been paid for
    yet. `without` is told who did not answer, and why.
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
        rest = share(float(np.delete(right, g).sum()), float(np.delete(wrong, g).sum()), others, n)
        rows.append(
            {
                "name": name,
                "records": n * float(right[g] + wrong[g]),
                "records_noise": n * noise * math.sqrt(2),
                "figures": {ACCURACY: told(share(float(right[g]), float(wrong[g]), noise, n))},
                "rest": {"figures": {ACCURACY: told(rest)}},
            }
        )
    return {"by": groups.by, "held_out": n, "rows": rows, "note": groups.note}


def share(right: float, wrong: float, noise: float, n: int) -> Figure:
    """right / (right + wrong), of two noisy shares of n records.

    The interval inverts a test, as that of an AUC does: at the true theta, (1 - theta) right -
    theta wrong has mean 0 and standard deviation noise sqrt((1 - theta)^2 + theta^2). Too noisy
    where the group is not clear of its noise.
    """
    count = right + wrong
    if not count > 4 * math.sqrt(2) * noise:
        return Figure(math.nan, math.inf, math.inf, 0.0, 1.0, True)
    theta = np.linspace(
        0, 1, 2001
    )  # the interval is wider by a step at each end, so that the grid leaves nothing out
    inside = theta[np.abs(right - theta * count) <= Z * noise * np.hypot(1 - theta, theta)]
    value = min(max(right / count, 0.0), 1.0)
    low = max(float(min(inside.min(initial=1), value) - theta[1]), 0.0)
    high = min(float(max(inside.max(initial=0), value) + theta[1]), 1.0)
    error = noise * math.hypot(1 - value, value) / count
    inner = (n * count * value + 0.5) / (
        n * count + 1
    )  # none or all of a group is no proof of 0 or 1
    return Figure(
        value,
        error,
        math.sqrt(inner * (1 - inner) / (n * count)),
        low,
        high,
        too_noisy(low, high, error),
    )
