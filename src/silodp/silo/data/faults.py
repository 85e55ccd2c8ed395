"""Count what a gate could not read of its own file. The counts are for the hospital alone.

A server writes the schema and the map of features. If one record could stop a gate, the server
would learn a bit about that record from whether the gate serves. So a gate always serves: a cell
outside the schema is a missing value, and a record that cannot be read counts as zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False, repr=False)
class Faults:
    """Collect bad cells by column, and rows that have another number of cells than the header."""

    cells: dict[str, np.ndarray] = field(default_factory=dict)
    """By column, (n,) bool: cells that the column may not have."""
    ragged: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """The places, among all rows, of rows with another number of cells than the header, in order.
    """
    records: int = 0
    """Records that count as zero."""

    def note(self, column: str, bad: np.ndarray) -> None:
        """Add the bad cells of one column."""
        before = self.cells.get(column)
        if before is not None:
            bad = before | bad
        self.cells[column] = bad

    def bad(self, columns: tuple[str, ...], n: int) -> np.ndarray:
        """Return (n,) bool: ragged rows, and rows with a bad cell in one of these columns."""
        rows = np.zeros(n, bool)
        rows[self.ragged] = True
        for name in columns:
            rows |= self.cells.get(name, False)
        return rows

    def restored(self, column: np.ndarray) -> np.ndarray:
        """Return the column with an empty cell at the place of each ragged row."""
        if not len(self.ragged):
            return column
        empty = np.nan if column.dtype.kind == "f" else b""
        return np.insert(column, self.ragged - np.arange(len(self.ragged)), empty)

    def sentences(self) -> list[str]:
        """Return what the hospital should read, without a cell's value."""
        sentences = []
        for name, bad in self.cells.items():
            if bad.any():
                sentences.append(
                    f"Column {name!r}: {int(bad.sum())} cells are not as they must be. Run "
                    "`silodp silo check`."
                )
        if self.records:
            sentences.append(
                f"{self.records} records cannot be used, and count as zero: their label, their "
                "row or their features are not as they must be. Run `silodp silo check`."
            )
        return sentences
