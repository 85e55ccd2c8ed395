"""Columns by group, from one release of each silo: counts, shares, means and quantiles.

All columns are in one question. Each record is in one cell of each column's table, which is the
column's bins by the groups. Everything after the answer is public arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.schema import Schema
from silodp.core.quality import Z
from silodp.core.statistics import Marginals
from silodp.core.weights import Weights
from silodp.server.estimates.grids import Grid, bins_for, grids_of
from silodp.server.estimates.quantiles import LEVELS, mean, quantile
from silodp.server.estimates.scoring import ask_pooled
from silodp.server.federation import Port

OVERALL = "Overall"
MOST_GROUPS = 20
"""The most groups of a table. Each has a column of its own."""


def chosen(
    schema: Schema | None, by: str | None, columns: Sequence[str] = (), *, numbers: bool = False
) -> list[str]:
    """Return the names of the columns that are asked for: `columns`, or else all but `by`.

    With `numbers` only numbers. Raise BadInput for a column that is not there or cannot be used.
    """
    grids = grids_of(schema, 2)
    if by is not None:
        usable = [
            name
            for name, grid in grids.items()
            if grid.kind in ("category", "boolean") and 2 <= len(grid.labels) <= MOST_GROUPS
        ]
        if by not in usable:
            raise BadInput(
                f"--by is {by!r}; it must be a category or boolean column of the schema: "
                f"{', '.join(usable) or 'it has none'}"
            )
    possible = [
        name
        for name, grid in grids.items()
        if name != by and (grid.kind == "number" or not numbers)
    ]
    for name in columns:
        if name not in possible:
            raise BadInput(f"--columns has {name!r}; choose from {', '.join(possible) or 'none'}")
    if not possible:
        raise BadInput("the schema has no number; there is nothing to compute a quantile of")
    return list(dict.fromkeys(columns)) or possible


def columns_by_group(
    fed: Port,
    mechanism: Gaussian,
    schema: Schema | None,
    names: Sequence[str],
    by: str | None,
    counts: Sequence[int],
) -> dict[str, Any]:
    """Return the figures of these columns over the silos that answer, as plain JSON.

    One release of each silo. The number of bins follows from the noise and the public counts.
    """
    groups = len(grids_of(schema, 2)[by].labels) if by else 1
    noise = count_noise(mechanism, len(names), counts)
    bins = bins_for(sum(counts) / groups, noise)
    grids = grids_of(schema, bins)
    wanted = [grids[name] for name in names]
    if by:
        pairs = [(len(wanted), k) for k in range(len(wanted))]
        statistic = Marginals.of([*(grid.binned for grid in [*wanted, grids[by]])], pairs)
    else:
        statistic = Marginals.of(
            [grid.binned for grid in wanted], [(k,) for k in range(len(wanted))]
        )
    found = ask_pooled(fed, statistic, mechanism, counts)
    n = found.records
    tables = statistic.split(torch.from_numpy(n * found.mean))
    arrays = [np.atleast_2d(table.numpy()) for table in tables]
    return figures(arrays, wanted, grids[by] if by else None, n * found.noise, n) | {"bins": bins}


def count_noise(mechanism: Gaussian, tables: int, counts: Sequence[int]) -> float:
    """Return the standard deviation of a count's noise if every silo answers: a public number."""
    norm = math.sqrt(2 * tables) / 2
    silos = range(len(counts))
    weights = Weights("records", tuple(counts))
    noise, records = mechanism.clipped(norm).deviation(silos, weights)
    return float(noise.max() * records.max())


def figures(
    arrays: Sequence[np.ndarray], grids: Sequence[Grid], by: Grid | None, noise: float, n: int
) -> dict[str, Any]:
    """Return the figures from noisy counts: (groups + 1, bins + 1) for each column, missing last.

    Without `by` there is one group. Every count has noise of this standard deviation.
    """
    labels = list(by.labels) if by else []
    several = math.sqrt(len(arrays[0]))
    sizes, size_error = _sizes(arrays, noise)
    groups = [{"name": OVERALL, "records": float(n), "records_error": 0.0}]
    for name, size in zip(labels, sizes, strict=False):
        groups.append({"name": name, "records": float(size), "records_error": size_error})
    columns = []
    for grid, array in zip(grids, arrays, strict=True):
        overall = array.sum(0)
        cells = [_of(grid, overall[:-1], noise * several)]
        cells += [_of(grid, array[g, :-1], noise) for g in range(len(labels))]
        absent = float(overall[-1])
        columns.append(
            {
                "column": grid.name,
                "kind": grid.kind,
                "labels": list(grid.labels),
                "missing": share_of(
                    absent, float(overall[:-1].sum()), noise * several, len(overall)
                ),
                "groups": cells,
            }
        )
    return {
        "by": by.name if by else None,
        "records": n,
        "count_error": noise,
        "overall_error": noise * several,
        "groups": groups,
        "columns": columns,
    }


def _sizes(arrays: Sequence[np.ndarray], noise: float) -> tuple[np.ndarray, float]:
    """Return the records of each group and their standard error, from all columns' tables.

    A table of c bins has sqrt(c) times the noise in the size of a group. Tables are averaged by
    the inverse of their variances.
    """
    weights = np.array([1 / array.shape[1] for array in arrays])
    sums = np.stack([array.sum(1) for array in arrays])
    return weights @ sums / weights.sum(), noise / math.sqrt(float(weights.sum()))


def _of(grid: Grid, counts: np.ndarray, noise: float) -> dict[str, Any]:
    """Return the figures of one column in one group."""
    size = float(counts.sum())
    found: dict[str, Any] = {
        "records": size,
        "records_error": noise * math.sqrt(len(counts)),
        "count_error": noise,
    }
    if grid.kind != "number":
        found["levels"] = [
            share_of(float(count), size - float(count), noise, len(counts)) for count in counts
        ]
        return found
    centre = mean(counts, noise, grid.ends)
    found["mean"] = asdict(centre) | {"low": centre.low, "high": centre.high}
    found["quantiles"] = [asdict(quantile(counts, noise, grid.ends, level)) for level in LEVELS]
    found["range"] = [grid.ends[0], grid.ends[-1]]
    return found


def share_of(count: float, rest: float, noise: float, bins: int) -> dict[str, float]:
    """Return a count, its share of count + rest, and the share's 95 per cent interval.

    `noise` is the standard deviation of each of so many `bins`, of which the count is one.

    The interval inverts a test, as Wilson's does. With N = count + rest, count - theta N has mean 0
    at the true share theta. Its variance is N theta (1 - theta) by sampling and noise^2 ((1 -
    theta)^2 + theta^2 (bins - 1)) by noise. |count - theta N| <= 1.96 errors is a quadratic
    inequality in theta.
    """
    total = max(count + rest, 1.0)
    square = Z * Z
    a = total**2 + square * (total - noise**2 * bins)
    b = 2 * count * total + square * (total - 2 * noise**2)
    c = count**2 - square * noise**2
    low = 0.0
    high = 1.0
    root = b * b - 4 * a * c
    if a > 0 and root >= 0:
        low = (b - math.sqrt(root)) / (2 * a)
        high = (b + math.sqrt(root)) / (2 * a)
    share = min(max(count / total, 0.0), 1.0)
    return {
        "count": count,
        "count_error": noise,
        "share": share,
        "low": min(max(low, 0.0), share),
        "high": max(min(high, 1.0), share),
    }
