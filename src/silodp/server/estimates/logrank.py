"""The log-rank test between two groups, from one private count of groups by time bins, with the
privacy noise in its p-value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.schema import Label, Schema
from silodp.core.statistics import GroupClasses
from silodp.server.estimates.groups import Groups, places_of
from silodp.server.estimates.scoring import ask_pooled
from silodp.server.estimates.survival import survival_label
from silodp.server.federation import Port

LEAST = 5.0
"""A bin counts while this many standard errors of the noise are at risk in each group."""


def two_groups(schema: Schema | None, by: str) -> tuple[Label, Groups]:
    """Return the label and the two groups of the column `by`. Raise BadInput for another column."""
    label = survival_label(schema.label if schema else None)
    groups = places_of(schema, by)  # type: ignore[arg-type]
    if len(groups.names) != 2:
        raise BadInput(
            f"--by is {by!r}, which has {len(groups.names)} groups; a log-rank test compares two: "
            "give a boolean column, or a category of two"
        )
    return label, groups


def logrank(
    fed: Port, mechanism: Gaussian, label: Label, groups: Groups, counts: Sequence[int]
) -> dict[str, Any]:
    """Return the test over all records of the silos that answer, by one question.

    Raise BadInput if the noise hides one of the groups.
    """
    classes = 2 * len(label.edges) + 1
    statistic = GroupClasses(classes, groups.first, groups.features, groups.indicator)
    found = ask_pooled(fed, statistic, mechanism, counts)
    n = found.records
    cells = n * found.mean.reshape(2, classes)
    noise = n * found.noise
    test = compared(cells, noise)
    events = cells[:, 1::2].sum(1)
    return {
        "by": groups.by,
        "note": groups.note,
        "groups": [
            {
                "name": name,
                "records": float(cells[g].sum()),
                "events": float(events[g]),
                "expected": test["expected"] if g else float(events.sum()) - test["expected"],
            }
            for g, name in enumerate(groups.names)
        ],
        "records": n,
        "count_error": noise,
    } | test


def compared(cells: np.ndarray, noise: float) -> dict[str, Any]:
    """Return the test of noisy counts (2, classes) of the codes 2 b + event.

    Observed less expected events of the second group is U = sum of d_1 - d n_1 / n over the bins,
    with n at risk (of those lost in the bin a half) and d events. Its variance is that of the
    hypergeometric law, plus noise^2 x the squared gradient of U by the counts. Raise
    BadInput if no bin is clear of the noise.
    """
    risk = _at_risk(cells)
    counted = np.arange(cells.shape[1], 1, -2)
    clear = np.logical_and.accumulate((risk > LEAST * noise * np.sqrt(counted)).all(0))
    if not clear.any():
        raise BadInput(
            "the noise hides how many of each group are at risk; use a larger epsilon, more "
            "records or longer time bins"
        )
    difference, variance, expected = _tested(cells, clear)
    # Every count is moved by a half, up and down, in a table of its own.
    moved = np.eye(cells.size).reshape(-1, *cells.shape) / 2
    gradient = _tested(cells + moved, clear)[0] - _tested(cells - moved, clear)[0]
    by_noise = noise**2 * float(gradient @ gradient)
    difference, variance, expected = map(float, (difference, variance, expected))
    z = difference / math.sqrt(max(variance, 1.0) + by_noise)
    return {
        "expected": expected,
        "difference": difference,
        "se": math.sqrt(max(variance, 1.0) + by_noise),
        "noise_se": math.sqrt(by_noise),
        "z": z,
        "chi_squared": z * z,
        "p": math.erfc(abs(z) / math.sqrt(2)),
        "bins": int(clear.sum()),
    }


def _at_risk(cells: np.ndarray) -> np.ndarray:
    """Return how many of each group are at risk in each bin, (..., 2, bins)."""
    present = cells[..., ::-1].cumsum(-1)[..., ::-1][..., :-1:2]
    return present - cells[..., 0:-1:2] / 2


def _tested(cells: np.ndarray, clear: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return U, its variance without noise, and the events that the second group would have, each
    (...), of counts (..., 2, codes).
    """
    risk = _at_risk(cells)[..., clear]
    events = cells[..., 1::2][..., clear]
    n = risk.sum(-2)
    d = events.sum(-2)
    share = risk[..., 1, :] / n
    expected = d * share
    variance = d * share * (1 - share) * (n - d) / np.maximum(n - 1, 1)
    difference = (events[..., 1, :] - expected).sum(-1)
    return difference, variance.sum(-1), expected.sum(-1)
