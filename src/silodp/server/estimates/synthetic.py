"""A synthetic table from two private releases of each silo.

The silos are asked for the two-way table of every column with the label. Then they are asked for
tables of pairs of columns, in groups of about equal size by the first answer. One-way tables are
sums of these. A mixture is fitted to the columns (`mixture.py`), and the label's distribution given
the columns to its tables (`outcome.py`). Rows are drawn from both. Everything after the answers is
public arithmetic, at no price.

Without the pairs, columns that state the same fact would count several times, and models from the
table would have risks that are far too sure.

Silos are combined by their records, so that the tables are those of the pooled records. Weights by
inverse variance would give large silos more than their share, and change prevalence where silos
differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
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
from silodp.server.estimates.mixture import fit, on_simplex, shrunk
from silodp.server.estimates.outcome import fit_outcome
from silodp.server.estimates.scoring import ask_pooled
from silodp.server.federation import Port

BY_LABEL = 0.6
"""The share of the budget (mu^2) for the tables with the label. Pairs of columns get the rest."""
BINS = (8, 32)
"""The fewest and the most bins of a number in its table with the label."""
GROUPS = (3, 6)
"""The fewest and the most groups of a number's bins in a table with another column."""
HIDDEN = 0.3
"""A correlation of g groups each has an error of about g times that of a share. Numbers have as
many groups as keep it below this.
"""
PAIRS_BELOW = 0.12
"""Pairs are asked for while a count's noise is below this share of the records."""
MOST_PAIRED = 30
"""The most columns of which all pairs are asked for. Fitting takes time."""
PARTS = 4
"""The parts of a bin. Density and effects change from part to part."""
SIMULATED = 10_000
"""The rows on which the label's distribution is fitted."""
MOST_ROWS = 1_000_000
SEED = 0
"""Rows are drawn from public numbers, so the seed is no secret. One answer gives one table."""
RIDGE = 1.0
NEWTON_STEPS = 25


@dataclass(frozen=True, eq=False)
class Design:
    """What is asked for first: a public function of schema, noise and counts. The label is last."""

    grids: tuple[Grid, ...]

    @property
    def columns(self) -> tuple[Grid, ...]:
        """Return the columns without the label."""
        return self.grids[:-1]

    @property
    def statistic(self) -> Marginals:
        """Return the question: one table of each column with the label."""
        label = len(self.columns)
        tables = [(k, label) for k in range(label)]
        return Marginals.of([grid.binned for grid in self.grids], tables)


@dataclass(frozen=True, eq=False)
class Pairs:
    """What is asked for then: a public function of the first answer."""

    grids: tuple[Grid, ...]
    """The columns."""
    merges: tuple[np.ndarray, ...]
    """The group of each cell of a column; the last is for missing values."""
    places: tuple[tuple[int, int], ...]
    """The places of each pair's columns."""

    @property
    def groups(self) -> list[Binned]:
        """Return the groups of every column."""
        found = []
        for grid, merge in zip(self.grids, self.merges, strict=True):
            if len(merge) == merge[-1] + 1:
                found.append(grid.binned)
                continue
            last = np.flatnonzero(np.diff(merge[:-1]))
            edges = tuple(grid.binned.edges[int(k)] for k in last)
            found.append(Binned(grid.binned.first, 1, edges))
        return found

    @property
    def statistic(self) -> Marginals:
        """Return the question: one table of each pair."""
        used = sorted({place for pair in self.places for place in pair})
        groups = self.groups
        tables = [(used.index(a), used.index(b)) for a, b in self.places]
        return Marginals.of([groups[place] for place in used], tables)


@dataclass(frozen=True, eq=False)
class Released:
    """Both answers: shares, and the standard deviation of their noise."""

    by_label: list[np.ndarray]
    noise: float
    pairs: dict[tuple[int, int], np.ndarray]
    pair_noise: float


def shares_of(schema: Schema) -> tuple[float, ...]:
    """Return the share of the budget (mu^2) of each question. One column has no pairs."""
    if len(schema.columns) == 1:
        return (1.0,)
    return (BY_LABEL, 1 - BY_LABEL)


def design(schema: Schema | None, mechanism: Gaussian, counts: Sequence[int]) -> Design:
    """Return what is asked for first. Raise BadInput without a schema of columns."""
    columns = len(grids_of(schema, 2)) - 1
    noise = count_noise(mechanism, columns, counts)
    least, most = BINS
    bins = most
    if noise:
        bins = min(max(round(math.sqrt(sum(counts) / noise)), least), most)
    return Design(tuple(grids_of(schema, bins).values()))


def pairs_of(
    asked: Design,
    alone: Sequence[np.ndarray],
    strength: Sequence[float],
    mechanism: Gaussian,
    counts: Sequence[int],
) -> Pairs:
    """Return what is asked for then: all pairs, or all of those columns on which the label depends
    most, as far as the noise allows.

    `alone` are the shares of each column's cells. `strength` is how much the label depends on it.
    """
    n = sum(counts)
    many = min(len(strength), MOST_PAIRED)
    while many > 2 and count_noise(mechanism, math.comb(many, 2), counts) > PAIRS_BELOW * n:
        many -= 1
    strongest = np.argsort(-np.array(strength), kind="stable")[:many]
    places = tuple(combinations(sorted(int(place) for place in strongest), 2))
    least, most = GROUPS
    groups = most
    if places:
        noise = count_noise(mechanism, len(places), counts) / n
        groups = min(max(round(HIDDEN / max(noise, 1e-9)), least), most)
    merges = [_merged(grid, own, groups) for grid, own in zip(asked.columns, alone, strict=True)]
    return Pairs(asked.columns, tuple(merges), places)


def _merged(grid: Grid, shares: np.ndarray, groups: int) -> np.ndarray:
    """Return the group of each cell of a column. Bins of a number are in groups of like shares."""
    bins = grid.binned.bins
    if grid.kind != "number" or bins <= groups:
        return np.arange(bins + 1)
    known = shares[:-1] / max(shares[:-1].sum(), 1e-9)
    group = np.minimum((known.cumsum() - known / 2) * groups, groups - 1).astype(int)
    _, group = np.unique(group, return_inverse=True)
    return np.append(group, group[-1] + 1)


def synthesise(
    fed: Port, mechanism: Gaussian, schema: Schema, rows: int, counts: Sequence[int]
) -> dict[str, Any]:
    """Return a synthetic table, and how far it agrees with what was released, as plain JSON.

    `table` has the columns of the silos' files by name. `shares_of` states the questions' shares of
    the mechanism's budget.
    """
    if not 1 <= rows <= MOST_ROWS:
        raise BadInput(f"--rows is {rows}; it must be from 1 to {MOST_ROWS:,}")
    mechanisms = [_part(mechanism, share) for share in shares_of(schema)]
    asked = design(schema, mechanisms[0], counts)
    first = ask_pooled(fed, asked.statistic, mechanisms[0], counts)
    by_label = _split(asked.statistic, first.mean)
    alone = _alone(schema, by_label)
    strength = _strength(by_label, first.noise, alone)
    pairs = pairs_of(asked, alone, strength, mechanisms[-1], counts)
    released = Released(by_label, first.noise, {}, first.noise)
    if pairs.places:
        second = ask_pooled(fed, pairs.statistic, mechanisms[1], counts)
        tables = dict(zip(pairs.places, _split(pairs.statistic, second.mean), strict=True))
        released = Released(by_label, first.noise, tables, second.noise)
    codes = drawn(asked, pairs, released, alone, first.records, rows)
    bins = [_bins(grid, code) for grid, code in zip(asked.columns, codes, strict=False)]
    agreement = agreements(asked, pairs, released, [*bins, codes[-1]])
    grids = [*(_refined(grid) for grid in asked.columns), asked.grids[-1]]
    return {
        "records": first.records,
        "rows": rows,
        "tables": len(by_label) + len(pairs.places),
        "pairs": len(pairs.places),
        "count_error": first.records * first.noise,
        "pair_error": first.records * released.pair_noise,
        "table": cells_of(grids, schema, codes, np.random.default_rng(SEED + 1)),
    } | agreement


def _part(mechanism: Gaussian, share: float) -> Gaussian:
    """Return the mechanism of a question that takes this share of the budget (mu^2)."""
    multiplier = torch.as_tensor(mechanism.noise_multiplier, dtype=torch.float64)
    return replace(mechanism, noise_multiplier=multiplier / math.sqrt(share))


def _split(statistic: Marginals, mean: np.ndarray) -> list[np.ndarray]:
    """Return the tables of an answer."""
    return [part.numpy() for part in statistic.split(torch.from_numpy(mean))]


def _alone(schema: Schema, by_label: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the shares of each column's cells. A value that the schema refuses is never missing,
    and neither is the label.
    """
    found = []
    for column, table in zip(schema.columns, by_label, strict=True):
        possible = np.ones(len(table), dtype=bool)
        possible[-1] = column.missing is not None
        found.append(on_simplex(table[:, :-1].sum(1), possible))
    return found


def _strength(
    by_label: Sequence[np.ndarray], noise: float, alone: Sequence[np.ndarray]
) -> list[float]:
    """Return how far each column and the label are from independent, after the noise is reduced."""
    sums = np.mean([table[:, :-1].sum(0) for table in by_label], axis=0)
    label = on_simplex(sums, np.ones(len(sums), dtype=bool))
    found = []
    for table, own in zip(by_label, alone, strict=True):
        rest = shrunk(table[:, :-1], noise, own, label) - np.outer(own, label)
        found.append(float((rest**2).sum()))
    return found


def drawn(
    asked: Design,
    pairs: Pairs,
    released: Released,
    alone: Sequence[np.ndarray],
    records: int,
    rows: int,
) -> list[np.ndarray]:
    """Return the cell of each row in every column, and last in the label.

    The bins of a number are in parts, PARTS of them each (`_refined`).
    """
    coarse = [np.bincount(merge, own) for merge, own in zip(pairs.merges, alone, strict=True)]
    ordered = [
        _patterns(grid, groups, own)
        for grid, groups, own in zip(asked.columns, pairs.groups, coarse, strict=True)
    ]
    tables = {}
    for (a, b), table in released.pairs.items():
        main = (ordered[a], ordered[b])
        tables[a, b] = shrunk(table, released.pair_noise, coarse[a], coarse[b], main)
    mixture = fit(alone, tables, pairs.merges, released.pair_noise)
    random = np.random.default_rng(SEED)

    def columns(many: int) -> list[np.ndarray]:
        """Return the cells of so many rows in every column."""
        found = []
        for grid, own, code in zip(asked.columns, alone, mixture.sample(many, random), strict=True):
            found.append(_parted(grid, own, code, random))
        return found

    simulated = columns(SIMULATED)
    bins = [_bins(grid, code) for grid, code in zip(asked.columns, simulated, strict=True)]
    outcome = fit_outcome(
        [table[:, :-1] for table in released.by_label],
        released.noise,
        records,
        [_refined(grid) for grid in asked.columns],
        asked.grids[-1],
        simulated,
        bins,
    )
    codes = columns(rows)
    return [*codes, outcome.sample(codes, random)]


def _patterns(grid: Grid, groups: Binned, shares: np.ndarray) -> np.ndarray:
    """Return the main patterns of a column's dependence (cells, k): a number rises or falls, or is
    missing. A category may have any.
    """
    if grid.kind != "number":
        return np.eye(groups.cells)
    found = np.zeros((groups.cells, 2))
    place = np.arange(groups.bins)
    known = shares[:-1]
    found[:-1, 0] = known * (place - known @ place / max(known.sum(), 1e-9))
    found[-1, 1] = 1.0
    return found


# --- parts of bins -------------------------------------------------------------------------------


def _refined(grid: Grid) -> Grid:
    """Return a number's grid with every bin in PARTS parts. Other columns stay as they are."""
    if grid.kind != "number":
        return grid
    ends = np.array(grid.ends)
    inner = ends[:-1, None] + np.diff(ends)[:, None] * np.arange(PARTS) / PARTS
    found = (*inner.ravel().tolist(), grid.ends[-1])
    # The edges are in the column's own unit, and nobody asks a silo for these cells.
    return replace(grid, binned=Binned(grid.binned.first, 1, found[1:-1]), ends=found)


def _bins(grid: Grid, code: np.ndarray) -> np.ndarray:
    """Return the cell in a column's grid of each cell in its refined grid."""
    if grid.kind != "number":
        return code
    return code // PARTS


def _parted(
    grid: Grid, shares: np.ndarray, code: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Return a cell of the refined grid within each cell. Between the middles of two bins the
    density is a straight line.
    """
    if grid.kind != "number":
        return code
    bins = grid.binned.bins
    ends = np.array(grid.ends)
    fine = np.array(_refined(grid).ends)
    density = shares[:-1] / np.diff(ends)
    parts = np.interp((fine[1:] + fine[:-1]) / 2, (ends[1:] + ends[:-1]) / 2, density) + 1e-9
    upper = parts.reshape(bins, PARTS).cumsum(1)
    upper = upper / upper[:, -1:]
    own = upper[np.minimum(code, bins - 1)]
    part = np.minimum((random.random(len(code))[:, None] > own).sum(1), PARTS - 1)
    return np.where(code == bins, bins * PARTS, code * PARTS + part)


# --- rows ----------------------------------------------------------------------------------------


def cells_of(
    grids: Sequence[Grid],
    schema: Schema,
    codes: Sequence[np.ndarray],
    random: np.random.Generator,
) -> dict[str, list[Any]]:
    """Return the columns of a file by name, in the silos' own units and categories.

    A number is uniform within its bin. A missing value is None. Every row is a person of its own.
    """
    found: dict[str, list[Any]] = {}
    if schema.person:
        found[schema.person.column] = [f"synthetic-{1 + k}" for k in range(len(codes[0]))]
    for grid, code in zip(grids[:-1], codes, strict=False):
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
    return found | _label_cells(grids[-1], schema, codes[-1], random)


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
    asked: Design, pairs: Pairs, released: Released, codes: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Return how far the synthetic rows agree with the released tables: shares of every column,
    correlations, and a logistic model that is fitted to the rows.

    All of it compares public numbers. No record is read.
    """
    rows = len(codes[0])
    label = asked.grids[-1]
    noise = released.noise
    found: dict[str, Any] = {"columns": [], "correlations": [], "model": None}
    made = [
        _shares(code, codes[-1], table.shape)
        for code, table in zip(codes, released.by_label, strict=False)
    ]
    for grid, table, own in zip(asked.columns, released.by_label, made, strict=True):
        found["columns"].append(_column(grid, table, own, noise, rows))
    found["columns"].append(_label(label, released.by_label, made[0], noise, rows))
    scores = [_scores(grid) for grid in asked.grids]
    for grid, score, table, own in zip(
        asked.columns, scores, released.by_label, made, strict=False
    ):
        found["correlations"] += _compared_pair(
            (grid, label), (score, scores[-1]), table, own, noise
        )
    merged = [merge[code] for merge, code in zip(pairs.merges, codes, strict=False)]
    for (a, b), table in released.pairs.items():
        found["correlations"] += _compared_pair(
            (asked.grids[a], asked.grids[b]),
            (_coarse(scores[a], pairs.merges[a]), _coarse(scores[b], pairs.merges[b])),
            table,
            _shares(merged[a], merged[b], table.shape),
            released.pair_noise,
        )
    cells = [cell for column in found["columns"] for cell in column["cells"]]
    within = sum(abs(cell["synthetic"] - cell["released"]) <= cell["bound"] for cell in cells)
    found["within"] = within / len(cells)
    if label.binned.bins == 2:
        found["model"] = _model(asked, released.by_label, noise, codes)
    return found


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


def _scores(grid: Grid) -> np.ndarray | None:
    """Return a number for each cell of an ordered column, without the missing one, or None."""
    if grid.kind == "survival" or (grid.kind == "category" and grid.binned.bins > 2):
        return None
    if grid.kind != "number":
        return np.arange(2.0)
    return (np.array(grid.ends[1:]) + np.array(grid.ends[:-1])) / 2


def _coarse(scores: np.ndarray | None, merge: np.ndarray) -> np.ndarray | None:
    """Return the mean number of each group of cells."""
    if scores is None:
        return None
    return np.bincount(merge[:-1], scores) / np.bincount(merge[:-1])


def _compared_pair(
    grids: tuple[Grid, Grid],
    scores: tuple[np.ndarray | None, np.ndarray | None],
    table: np.ndarray,
    made: np.ndarray,
    noise: float,
) -> list[dict[str, Any]]:
    """Return the correlation of two ordered columns, released and synthetic."""
    one, other = scores
    if one is None or other is None:
        return []
    released, error = _correlation(table, one, other, noise)
    synthetic, _ = _correlation(made, one, other, 0.0)
    names = {"one": grids[0].name, "other": grids[1].name}
    return [names | {"released": released, "error": error, "synthetic": synthetic}]


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
