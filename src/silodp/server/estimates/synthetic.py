"""A synthetic table from one private release of each silo.

The silos are asked for the two-way table of every column with the label, and of some pairs of
columns. One-way tables are sums of these. A mixture is fitted to the answer (`mixture.py`), and
rows are drawn from it. Everything after the answer is public arithmetic, at no price.

Silos are combined by their records, so that the tables are those of the pooled records. Weights by
inverse variance would give large silos more than their share, and change prevalence where silos
differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy import special

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.schema import Schema
from silodp.core.quality import Z
from silodp.core.statistics import Binned, Marginals
from silodp.server.estimates.columns import count_noise
from silodp.server.estimates.grids import Grid, grids_of
from silodp.server.estimates.mixture import Mixture, fit, on_simplex, shrunk
from silodp.server.estimates.scoring import ask_pooled
from silodp.server.federation import Port

BINS = (8, 32)
"""The fewest and the most bins of a number in its table with the label."""
COARSE = 6
"""The bins of a number in a table with another column."""
PAIRS_BELOW = 0.004
"""Pairs of columns are asked for while a count's noise is below this share of the records."""
MOST_ROWS = 1_000_000
SEED = 0
"""Rows are drawn from public numbers, so the seed is no secret. One answer gives one table."""
RIDGE = 1.0
NEWTON_STEPS = 25


@dataclass(frozen=True, eq=False)
class Design:
    """What is asked for: a public function of schema, noise and counts. The label is last."""

    grids: tuple[Grid, ...]
    merges: tuple[np.ndarray, ...]
    """The coarse cell of each cell of a column; the last is for missing values."""
    pairs: tuple[tuple[int, int], ...]
    """The pairs of columns, without those with the label."""

    @property
    def columns(self) -> tuple[Grid, ...]:
        """Return the columns without the label."""
        return self.grids[:-1]

    @property
    def statistic(self) -> Marginals:
        """Return the question: one table of each column with the label, then one of each pair."""
        binned = [grid.binned for grid in self.grids]
        label = len(self.columns)
        tables = [(k, label) for k in range(label)]
        coarse = {}
        for place in sorted({place for pair in self.pairs for place in pair}):
            grid = self.grids[place]
            if len(self.merges[place]) == self.merges[place][-1] + 1:
                coarse[place] = place
                continue
            coarse[place] = len(binned)
            last = np.flatnonzero(np.diff(self.merges[place][:-1]))
            edges = tuple(grid.binned.edges[int(k)] for k in last)
            binned.append(Binned(grid.binned.first, 1, edges))
        tables += [(coarse[a], coarse[b]) for a, b in self.pairs]
        return Marginals.of(binned, tables)


def design(schema: Schema | None, mechanism: Gaussian, counts: Sequence[int]) -> Design:
    """Return what is asked for. Raise BadInput without a schema of columns."""
    columns = len(grids_of(schema, 2)) - 1
    n = sum(counts)
    reach = 0
    pairs: tuple[tuple[int, int], ...] = ()
    while len(pairs) < columns * (columns - 1) // 2:
        more = near(columns, reach + 1)
        if count_noise(mechanism, columns + len(more), counts) > PAIRS_BELOW * n:
            break
        reach += 1
        pairs = more
    noise = count_noise(mechanism, columns + len(pairs), counts)
    least, most = BINS
    bins = most
    if noise:
        bins = min(max(round(math.sqrt(n / noise)), least), most)
    grids = tuple(grids_of(schema, bins).values())
    return Design(grids, tuple(_merged(grid) for grid in grids), pairs)


def near(columns: int, reach: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of columns that are at most `reach` apart in the schema, in a ring.

    The choice depends on no record, and every column is in equally many pairs.
    """
    found = set()
    for k in range(columns):
        for step in range(1, reach + 1):
            other = (k + step) % columns
            if other != k:
                found.add((min(k, other), max(k, other)))
    return tuple(sorted(found))


def _merged(grid: Grid) -> np.ndarray:
    """Return the coarse cell of each cell of a column. Only the bins of a number are merged."""
    bins = grid.binned.bins
    if grid.kind != "number" or bins <= COARSE:
        return np.arange(bins + 1)
    return np.append(np.arange(bins) * COARSE // bins, COARSE)


def synthesise(
    fed: Port, mechanism: Gaussian, schema: Schema, rows: int, counts: Sequence[int]
) -> dict[str, Any]:
    """Return a synthetic table, and how far it agrees with what was released, as plain JSON.

    `table` has the columns of the silos' files by name. One release of each silo.
    """
    if not 1 <= rows <= MOST_ROWS:
        raise BadInput(f"--rows is {rows}; it must be from 1 to {MOST_ROWS:,}")
    asked = design(schema, mechanism, counts)
    statistic = asked.statistic
    found = ask_pooled(fed, statistic, mechanism, counts)
    tables = [part.numpy() for part in statistic.split(torch.from_numpy(found.mean))]
    codes = fitted(asked, schema, tables, found.noise).sample(rows, np.random.default_rng(SEED))
    agreement = agreements(asked, tables, found.noise, codes)
    return {
        "records": found.records,
        "rows": rows,
        "tables": len(tables),
        "pairs": len(asked.pairs),
        "count_error": found.records * found.noise,
        "table": cells_of(asked, schema, codes, np.random.default_rng(SEED + 1)),
    } | agreement


def fitted(asked: Design, schema: Schema, tables: Sequence[np.ndarray], noise: float) -> Mixture:
    """Return the mixture that is fitted to released shares, after their noise is reduced."""
    k = len(asked.columns)
    by_label = tables[:k]
    possible = [_possible(asked.grids[-1], refuses=True)]
    sums = np.mean([table.sum(0) for table in by_label], axis=0)
    label = on_simplex(sums, possible[0])
    found = []
    shares = []
    allowed = []
    for column, grid, table in zip(schema.columns, asked.columns, by_label, strict=True):
        allowed.append(_possible(grid, refuses=column.missing is None))
        shares.append(on_simplex(table.sum(1), allowed[-1]))
        found.append(shrunk(table, noise, shares[-1], label)[:, :-1])
    coarse = [np.bincount(merge, own) for merge, own in zip(asked.merges, shares, strict=False)]
    pairs = {
        (a, b): shrunk(table, noise, coarse[a], coarse[b])
        for (a, b), table in zip(asked.pairs, tables[k:], strict=True)
    }
    return fit(found, pairs, asked.merges[:k], allowed, label[:-1], noise)


def _possible(grid: Grid, *, refuses: bool) -> np.ndarray:
    """Return which cells can have records: a value that the schema `refuses` is never missing."""
    found = np.ones(grid.binned.cells, dtype=bool)
    found[-1] = not refuses
    return found


# --- rows ----------------------------------------------------------------------------------------


def cells_of(
    asked: Design, schema: Schema, codes: Sequence[np.ndarray], random: np.random.Generator
) -> dict[str, list[Any]]:
    """Return the columns of a file by name, in the silos' own units and categories.

    A number is uniform within its bin. A missing value is None. Every row is a person of its own.
    """
    found: dict[str, list[Any]] = {}
    if schema.person:
        found[schema.person.column] = [f"synthetic-{1 + k}" for k in range(len(codes[0]))]
    for grid, code in zip(asked.columns, codes, strict=False):
        missing = code == grid.binned.bins
        code = np.where(missing, 0, code)
        if grid.kind == "number":
            values = _numbers(_within(grid.ends, code, random))
        else:
            words = ("false", "true") if grid.kind == "boolean" else grid.labels
            values = [words[k] for k in code]
        found[grid.name] = [
            None if gone else value for gone, value in zip(missing, values, strict=True)
        ]
    return found | _label_cells(asked.grids[-1], schema, codes[-1], random)


def _label_cells(
    grid: Grid, schema: Schema, code: np.ndarray, random: np.random.Generator
) -> dict[str, list[Any]]:
    """Return the label's columns."""
    label = schema.label
    if label.classes:
        return {label.columns[0]: [label.classes[k] for k in code]}
    if label.task == "survival":
        last = label.edges[-1]
        # The last code is for follow-up beyond the last edge. It ends one bin later.
        beyond = last + (last - (0.0, *label.edges)[-2])
        times = _within((0.0, *label.edges, beyond), code // 2, random)
        events = np.where(code % 2 == 1, "true", "false").tolist()
        return {label.columns[0]: _numbers(times), label.columns[1]: events}
    values = _within(grid.ends, code, random)
    if label.task == "count":
        return {label.columns[0]: [int(k) for k in np.round(values).clip(*label.range)]}
    return {label.columns[0]: _numbers(values)}


def _within(ends: Sequence[float], code: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return a value within each bin, above its lower end and at most its upper end."""
    bounds = np.asarray(ends)
    low = bounds[code]
    high = bounds[code + 1]
    return high - random.random(len(code)) * (high - low)


def _numbers(values: np.ndarray) -> list[float]:
    """Return the numbers with six digits."""
    return [float(f"{value:.6g}") for value in values]


# --- agreement with what was released ------------------------------------------------------------


def agreements(
    asked: Design, tables: Sequence[np.ndarray], noise: float, codes: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Return how far the synthetic rows agree with the released tables: shares of every column,
    correlations, and a logistic model that is fitted to the rows.

    All of it compares public numbers. No record is read.
    """
    k = len(asked.columns)
    rows = len(codes[0])
    own = [
        _table(grid, asked.grids[-1], codes[place], codes[-1])
        for place, grid in enumerate(asked.columns)
    ]
    merged = [merge[code] for merge, code in zip(asked.merges, codes, strict=True)]
    shapes = [table.shape for table in tables[k:]]
    own += [
        _shares(merged[a], merged[b], shape)
        for (a, b), shape in zip(asked.pairs, shapes, strict=True)
    ]
    pairs = [*((place, k) for place in range(k)), *asked.pairs]
    found: dict[str, Any] = {"columns": [], "correlations": [], "model": None}
    for place, grid in enumerate(asked.columns):
        found["columns"].append(_column(grid, tables[place], own[place], noise, rows))
    found["columns"].append(_label(asked.grids[-1], tables[:k], own[0], noise, rows))
    for (a, b), table, made in zip(pairs, tables, own, strict=True):
        fine = b == k
        scores = [_scores(asked, place, fine=fine) for place in (a, b)]
        if scores[0] is not None and scores[1] is not None:
            one = _correlation(table, scores[0], scores[1], noise)
            two = _correlation(made, scores[0], scores[1], 0.0)
            names = {"one": asked.grids[a].name, "other": asked.grids[b].name}
            found["correlations"].append(
                names | {"released": one[0], "error": one[1], "synthetic": two[0]}
            )
    cells = [cell for column in found["columns"] for cell in column["cells"]]
    within = sum(abs(cell["synthetic"] - cell["released"]) <= cell["bound"] for cell in cells)
    found["within"] = within / len(cells)
    if asked.grids[-1].binned.bins == 2:
        found["model"] = _model(asked, tables[:k], noise, codes)
    return found


def _table(grid: Grid, label: Grid, code: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the shares of rows in each cell of a column and of the label."""
    return _shares(code, labels, (grid.binned.cells, label.binned.cells))


def _shares(one: np.ndarray, other: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the shares of rows in each cell of two columns."""
    cells = np.bincount(one * shape[1] + other, minlength=math.prod(shape))
    return cells.reshape(shape) / len(one)


def _column(
    grid: Grid, table: np.ndarray, made: np.ndarray, noise: float, rows: int
) -> dict[str, Any]:
    """Return the shares of a column's cells, as released and in the rows."""
    error = noise * math.sqrt(table.shape[1])
    return _compared(grid, table.sum(1), made.sum(1), error, rows)


def _label(
    grid: Grid, tables: Sequence[np.ndarray], made: np.ndarray, noise: float, rows: int
) -> dict[str, Any]:
    """Return the shares of the label's values, which every table has."""
    sums = np.mean([table.sum(0) for table in tables], axis=0)
    cells = sum(table.shape[0] for table in tables)
    return _compared(grid, sums, made.sum(0), noise * math.sqrt(cells) / len(tables), rows)


def _compared(
    grid: Grid, released: np.ndarray, made: np.ndarray, error: float, rows: int
) -> dict[str, Any]:
    """Return released and synthetic shares. The bound is that of 95 per cent: privacy noise, and
    the drawing of the rows.
    """
    cells = []
    for name, one, two in zip([*_names(grid), "missing"], released, made, strict=True):
        drawn = two * (1 - two) / rows
        bound = Z * math.hypot(error, math.sqrt(drawn))
        cells.append(
            {"cell": name, "released": float(one), "synthetic": float(two), "bound": bound}
        )
    return {"column": grid.name, "kind": grid.kind, "error": error, "cells": cells}


def _scores(asked: Design, place: int, *, fine: bool) -> np.ndarray | None:
    """Return a number for each cell of an ordered column, without the missing one, or None."""
    grid = asked.grids[place]
    if grid.kind == "survival" or (grid.kind == "category" and grid.binned.bins > 2):
        return None
    if grid.kind != "number":
        return np.arange(2.0)
    middle = (np.array(grid.ends[1:]) + np.array(grid.ends[:-1])) / 2
    if fine:
        return middle
    merge = asked.merges[place][:-1]
    return np.bincount(merge, middle) / np.bincount(merge)


def _correlation(
    table: np.ndarray, one: np.ndarray, other: np.ndarray, noise: float
) -> tuple[float | None, float | None]:
    """Return the correlation of two columns, in records that have both, and its standard error by
    the noise. Both are None where noise hides the columns' own deviations.
    """
    known = table[:-1, :-1]
    total = max(float(known.sum()), 1e-9)
    rows = one - known.sum(1) @ one / total
    columns = other - known.sum(0) @ other / total
    squares = (float(known.sum(1) @ rows**2), float(known.sum(0) @ columns**2))
    hidden = (
        noise * math.sqrt(known.shape[1] * float((rows**4).sum())),
        noise * math.sqrt(known.shape[0] * float((columns**4).sum())),
    )
    if any(square <= 2 * error for square, error in zip(squares, hidden, strict=True)):
        return None, None
    scale = math.sqrt(squares[0] * squares[1])
    found = float(rows @ known @ columns) / scale
    if abs(found) > 1:
        found = math.copysign(1.0, found)
    return found, noise * math.sqrt(float((rows**2).sum() * (columns**2).sum())) / scale


def _model(
    asked: Design, tables: Sequence[np.ndarray], noise: float, codes: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Return a logistic model's mean risk in every cell, beside the released share of the label's
    second value there. The model is fitted to the synthetic rows.
    """
    risks = _risks(
        [_inputs(grid, code) for grid, code in zip(asked.columns, codes, strict=False)], codes[-1]
    )
    found = []
    for place, grid in enumerate(asked.columns):
        for cell, name in enumerate(_names(grid)):
            own = codes[place] == cell
            no, yes = tables[place][cell, :2]
            total = float(no + yes)
            if not own.any() or total < 5 * noise * math.sqrt(2):
                continue
            share = float(yes) / total
            error = noise * math.hypot(share, 1 - share) / total
            found.append(
                {
                    "column": grid.name,
                    "cell": name,
                    "released": share,
                    "error": error,
                    "predicted": float(risks[own].mean()),
                }
            )
    near_enough = sum(abs(one["predicted"] - one["released"]) <= Z * one["error"] for one in found)
    return {
        "positive": asked.grids[-1].labels[1],
        "cells": found,
        "within": near_enough / len(found) if found else None,
    }


def _names(grid: Grid) -> list[str]:
    """Return the name of each cell of a column without the missing one."""
    if grid.kind != "number":
        return list(grid.labels)
    return [f"{low:g} to {high:g}" for low, high in pairwise(grid.ends)]


def _inputs(grid: Grid, code: np.ndarray) -> np.ndarray:
    """Return the inputs of a column: a number's place in its range, or one for each category."""
    bins = grid.binned.bins
    missing = (code == bins)[:, None].astype(float)
    if grid.kind != "number":
        return np.column_stack([code[:, None] == np.arange(1, bins), missing]).astype(float)
    place = np.where(code == bins, bins / 2, code) / bins
    return np.column_stack([place, missing])


def _risks(inputs: Sequence[np.ndarray], labels: np.ndarray) -> np.ndarray:
    """Return each row's risk by a logistic regression with a small ridge, by Newton's method."""
    x = np.column_stack([np.ones(len(labels)), *inputs])
    w = np.zeros(x.shape[1])
    for _ in range(NEWTON_STEPS):
        risk = special.expit(x @ w)
        curvature = x.T @ (x * (risk * (1 - risk))[:, None]) + RIDGE * np.eye(len(w))
        w = w + np.linalg.solve(curvature, x.T @ (labels - risk) - RIDGE * w)
    return special.expit(x @ w)
