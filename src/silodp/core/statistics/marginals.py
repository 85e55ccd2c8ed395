"""Count records in the cells of one- and two-way tables of binned columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.fields import VECTOR
from silodp.core.problem.problem import Problem
from silodp.core.statistics.statistic import Cells, Rows
from silodp.core.statistics.summaries import MAX_EDGES, refuse_unordered

LABEL = -1
"""The place of the label, which is no feature."""
NOTHING = -1
"""The second column of a table that has one column only."""
MAX_TABLES = 2**12
MAX_CELLS = 2**20
"""The most tables, and the most cells of all tables together.

A query is a few numbers long. It must not make a silo allocate more memory than its answer needs.
"""


@dataclass(frozen=True, eq=False)
class Binned:
    """One column as bins.

    `first` is the place of its first feature, or LABEL. A single feature is cut at the public
    `edges`: bin k has edges[k - 1] < value <= edges[k]. Several features are the one-hot code of a
    category, and each is a bin. A label with several `features` is a class, and each is a bin.
    """

    first: int
    features: int = 1
    edges: tuple[float, ...] = ()

    @property
    def bins(self) -> int:
        """Return the number of bins, without the one for missing values."""
        if self.features > 1:
            return self.features
        return len(self.edges) + 1

    @property
    def cells(self) -> int:
        """Return the number of bins and one more, the last, for missing values."""
        return self.bins + 1

    def codes(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the cell of each record (m,), from features (m, k) and labels (m,)."""
        if self.first == LABEL and self.features > 1:
            known = torch.full_like(y, not y.is_floating_point(), dtype=torch.bool)
            code = y.nan_to_num().long()
            known = known & (code >= 0) & (code < self.features)
            return torch.where(known, code, self.bins)
        if self.first == LABEL:
            part = y.double()[:, None]
        else:
            part = x[:, self.first : self.first + self.features]
        known = torch.isfinite(part).all(1)
        largest, code = part.nan_to_num().max(1)
        if self.features > 1:
            known = known & (largest > 0.5)
        else:
            code = torch.bucketize(largest, largest.new_tensor(self.edges))
        return torch.where(known, code, self.bins)


@dataclass(frozen=True, eq=False)
class Marginals(Cells):
    """The cell of a record in each of several tables, one-hot.

    A table has one column or two. Its cells are the bins of one column, or the pairs of bins of
    two, row by row. The last bin of every column is for a value that is missing, not finite, or of
    no category. So a record is in exactly one cell of each table.

    `columns` has three numbers for each column: the fields of `Binned`, with the number of edges in
    place of the edges. `edges` has the edges of all columns, one column after the other. `tables`
    has two numbers for each table: its columns, by their place in `columns`. The second is NOTHING
    in a table of one column.

    Sensitivity: sqrt(2 K) for K tables. Let a and b be the vectors of two records.

     1. In each table's block a has entries >= 0 that sum to at most 1: one cell is 1, and a void
        record has zeros. A person's vector is an average of such vectors, so it has the same
        property.
     2. For two such blocks u and v, ||u - v||^2 = ||u||^2 + ||v||^2 - 2 <u, v> <= 1 + 1, because
        <u, v> >= 0 and ||u||^2 <= sum(u) <= 1.
     3. Blocks share no coordinate, so ||a - b||^2 is the sum over blocks, at most 2 K. Two records
        in different cells of every table reach it.
     4. A gate verifies step 1 in integers, block by block (`integers.levelled`). A replaced record
        moves the sum by b - a, so by at most sqrt(2 K), which is 2 `norm`.
    """

    columns: Tensor
    edges: Tensor
    tables: Tensor
    wire: ClassVar = {"columns": VECTOR, "edges": VECTOR, "tables": VECTOR}
    in_totals = True
    view = "given"

    @classmethod
    def of(cls, columns: Sequence[Binned], tables: Sequence[tuple[int, ...]]) -> Marginals:
        """Return the statistic of these columns and tables.

        A table is the place of one column in `columns`, or of two.
        """
        parts = [(column.first, column.features, len(column.edges)) for column in columns]
        pairs = [table if len(table) == 2 else (*table, NOTHING) for table in tables]
        edges = [edge for column in columns for edge in column.edges]
        return cls(
            torch.tensor(parts, dtype=torch.float64).flatten(),
            torch.tensor(edges, dtype=torch.float64),
            torch.tensor(pairs, dtype=torch.float64).flatten(),
        )

    @cached_property
    def binned(self) -> tuple[Binned, ...]:
        """Return the columns. Raise Refused if the fields spell none."""
        numbers = _integers(self.columns, 3)
        edges = self.edges
        if edges.ndim != 1 or not bool(torch.isfinite(edges).all()):
            raise Refused("shape")
        found = []
        start = 0
        for first, features, many in zip(*[iter(numbers)] * 3, strict=True):
            sound = first >= LABEL and 1 <= features <= MAX_CELLS and 0 <= many <= MAX_EDGES
            if not sound or (features > 1 and many):
                raise Refused("shape")
            own = edges[start : start + many].double()
            refuse_unordered(own[:-1], own[1:])
            found.append(Binned(first, features, tuple(own.tolist())))
            start += many
        if start != len(edges) or not found:
            raise Refused("shape")
        return tuple(found)

    @cached_property
    def pairs(self) -> tuple[tuple[int, ...], ...]:
        """Return the columns of each table. Raise Refused if the fields spell none."""
        numbers = _integers(self.tables, 2)
        found = []
        for a, b in zip(*[iter(numbers)] * 2, strict=True):
            if not (0 <= a < len(self.binned) and NOTHING <= b < len(self.binned) and a != b):
                raise Refused("shape")
            if b == NOTHING:
                found.append((a,))
            else:
                found.append((a, b))
        # Each column belongs to a table, so that a record's codes are fewer than its cells.
        if {place for pair in found for place in pair} != set(range(len(self.binned))):
            raise Refused("shape")
        if sum(self._sizes(found)) > MAX_CELLS:
            raise Refused("shape")
        return tuple(found)

    def _sizes(self, pairs: Sequence[tuple[int, ...]]) -> list[int]:
        """Return the number of cells of each table."""
        return [math.prod(self.binned[place].cells for place in pair) for pair in pairs]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Return the number of cells of each table."""
        return tuple(self._sizes(self.pairs))

    @property
    def cells(self) -> int:
        """Return the number of cells of all tables."""
        return sum(self.blocks)

    def _check_shapes(self, dim: int, runs: int) -> None:
        """Raise Refused unless the fields spell columns and tables of a size that is allowed."""
        if not self.blocks:
            raise Refused("shape")

    def check_silo(self, features: int, held_out: int) -> None:
        """Raise Refused if the silo has fewer features."""
        if any(column.first + column.features > features for column in self.of_features):
            raise Refused("shape")

    @property
    def of_features(self) -> list[Binned]:
        """Return the columns without the label."""
        return [column for column in self.binned if column.first != LABEL]

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives each record's cells."""
        binned = self.binned
        pairs = self.pairs
        blocks = self.blocks
        size = self.cells

        def rows(x: Tensor, y: Tensor) -> Tensor:
            """Return the vectors (m, cells) of these records."""
            x = x.flatten(1).double()
            codes = [column.codes(x, y) for column in binned]
            vectors = torch.zeros(len(x), size, dtype=torch.float64, device=x.device)
            start = 0
            for pair, block in zip(pairs, blocks, strict=True):
                cell = codes[pair[0]]
                for place in pair[1:]:
                    cell = cell * binned[place].cells + codes[place]
                vectors.scatter_(1, (start + cell)[:, None], 1.0)
                start += block
            return vectors

        return rows

    def split(self, mean: Tensor) -> list[Tensor]:
        """Return each table of an answer (cells,): (cells of a,) or (cells of a, cells of b)."""
        parts = mean.split(list(self.blocks))
        shapes = [[self.binned[place].cells for place in pair] for pair in self.pairs]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _integers(field: Tensor, group: int) -> list[int]:
    """Return the integers in a field, which are in groups. Raise Refused for anything else."""
    if field.ndim != 1 or len(field) % group or len(field) > 2 * group * MAX_TABLES:
        raise Refused("shape")
    values = field.double()
    if not bool(torch.isfinite(values).all()):
        raise Refused("not-finite")
    if not bool(((values == values.round()) & (values.abs() <= 2**31)).all()):
        raise Refused("shape")
    return [int(value) for value in values.tolist()]
