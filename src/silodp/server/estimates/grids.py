"""The columns of a public schema as bins, for tables of counts (`statistics.Marginals`).

All of it follows from the schema and public numbers. The bins of a number are cut at round values
of its public range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Column, Label, Schema
from silodp.core.statistics import LABEL, Binned

BINS = (8, 100)
"""The fewest and the most bins of a number."""
ROUND = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""A bin is as wide as one of these, times a power of ten."""


@dataclass(frozen=True)
class Grid:
    """One column as bins: a number, a category, a boolean, or a survival time."""

    name: str
    kind: str
    binned: Binned
    labels: tuple[str, ...] = ()
    """The name of each bin of a category. A boolean has "no" and "yes"."""
    ends: tuple[float, ...] = ()
    """Of a number, the ends of the bins in its own unit: one more than there are bins."""


def grids_of(schema: Schema | None, bins: int) -> dict[str, Grid]:
    """Return the schema's columns and its label as bins, by name, in their order.

    A number has about `bins` bins. Raise BadInput for images and without a schema.
    """
    if schema is None or schema.images:
        raise BadInput(
            "there is no schema of columns, which gives the public ranges and categories; give "
            "one with --schema"
        )
    found = {}
    first = 0
    for column in schema.columns:
        found[column.name] = _of_column(column, first, bins)
        first += len(column.features)
    label = _of_label(schema.label, bins)
    found[label.name] = label
    return found


def _of_column(column: Column, first: int, bins: int) -> Grid:
    """Return the bins of a column whose features start at `first`."""
    if column.type == "category":
        binned = Binned(first, len(column.categories))
        return Grid(column.name, "category", binned, labels=column.categories)
    if column.type == "boolean":
        return Grid(column.name, "boolean", Binned(first, 1, (0.0,)), labels=("no", "yes"))
    ends = ends_of(*column.range, bins)
    return Grid(column.name, "number", _cut(first, ends, column.range), ends=ends)


def _of_label(label: Label, bins: int) -> Grid:
    """Return the bins of the label."""
    name = label.name
    if label.classes:
        return Grid(name, "category", Binned(LABEL, len(label.classes)), labels=label.classes)
    if label.task == "survival":
        codes = [f"{what} by {edge:g}" for edge in label.edges for what in ("lost", "event")]
        codes.append(f"after {label.edges[-1]:g}")
        return Grid(name, "survival", Binned(LABEL, len(codes)), labels=tuple(codes))
    low, high = label.range
    if label.task == "count":
        # A count is not scaled. Its bins are cut halfway between whole numbers.
        whole = [math.floor(end) for end in ends_of(low - 0.5, high + 0.5, bins)]
        ends = tuple(count + 0.5 for count in dict.fromkeys(whole))
        return Grid(name, "number", Binned(LABEL, 1, ends[1:-1]), ends=ends)
    ends = ends_of(low, high, bins)
    return Grid(name, "number", _cut(LABEL, ends, label.range), ends=ends)


def _cut(first: int, ends: tuple[float, ...], bounds: tuple[float, float]) -> Binned:
    """Return the bins of a feature that is scaled to [-1, 1].

    An edge is rounded as the silos round a value, so that a value at an end is in the bin below.
    """
    low, high = bounds
    scaled = (2 * (np.array(ends[1:-1]) - low) / (high - low) - 1).astype(np.float32)
    return Binned(first, 1, tuple(scaled.tolist()))


def ends_of(low: float, high: float, bins: int) -> tuple[float, ...]:
    """Return the ends of at most `bins` bins of a public range, at multiples of a round width."""
    least = (high - low) / max(bins - 1, 1)
    scale = 10.0 ** math.floor(math.log10(least))
    width = next(scale * step for step in ROUND if scale * step >= least * (1 - 1e-9))
    first = math.floor(low / width * (1 + 1e-12)) + 1
    inner = [float(f"{width * k:.12g}") for k in range(first, first + bins + 1)]
    return (low, *(end for end in inner if low < end < high), high)


def bins_for(records: float, noise: float) -> int:
    """Return how many bins a number should have, by the records and the noise of a count.

    Few bins are wide, and many add their noise up. A quantile's error by the width is about n / B
    records, and by the noise about noise x sqrt(B / 4). The two are equal at B = (2 n /
    noise)^(2/3).
    """
    least, most = BINS
    if not noise:
        return most
    return min(max(round((2 * records / noise) ** (2 / 3)), least), most)
