"""Predictions for a silo's own new records: computed here, about people whose rows are here, and
sent nowhere.

The model is public and has been paid for: to use it costs nothing. What it says of a row is about
that row, so that it is as private as the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from silodp.core.errors import BadInput
from silodp.core.problem.reading import decided, figures
from silodp.core.problem.schema import Schema
from silodp.host.model import Stored
from silodp.silo.data.images import read_unsorted
from silodp.silo.data.tables import read_rows

if TYPE_CHECKING:
    import pandas as pd


def predict(
    model: Stored, path: Path, *, threshold: float | None = None, keep: Sequence[str] = ()
) -> tuple[pd.DataFrame, list[str]]:
    """A row for each record of the file, in its order, with the columns to `keep` first; and what
    the reader should know of them.
    """
    if threshold is not None and not (len(model.schema.label.classes) == 2 and 0 <= threshold <= 1):
        raise BadInput(
            f"the threshold is {threshold:g}; it must be a risk from 0 to 1, and is for a "
            "label of two classes alone"
        )
    if model.schema.images:
        names, rows = read_unsorted(path, model.schema.images)
        kept = {"file": np.array(names, object)}
        notes = []
    else:
        rows, cells = read_rows(path, model.schema)
        if unknown := [name for name in keep if name not in cells]:
            raise BadInput(
                f"{path} has no column {unknown[0]!r} to keep; give --keep one of its columns"
            )
        kept = {name: _texts(cells[name]) for name in keep}
        notes = outside(model.schema, rows)
    return said(model, rows, threshold, kept), notes


def said(
    model: Stored, rows: np.ndarray, threshold: float | None, first: dict[str, np.ndarray]
) -> pd.DataFrame:
    """`first`, the figures of each row, and the class that is predicted where there are classes."""
    import pandas as pd  # slow to load: whoever only imports this module does without

    with torch.no_grad():
        parts = [
            model.reading(torch.from_numpy(part))
            for part in np.array_split(np.array(rows, np.float64), max(1, len(rows) // 4096))
        ]
    found = torch.cat(parts)
    if not bool(found.isfinite().all()):
        raise BadInput(
            "the model gives no finite number for some rows; are their values as the "
            "schema has them?"
        )
    columns: dict[str, object] = dict(
        zip(figures(model.schema), found.double().numpy().T, strict=True)
    )
    if (classes := decided(model.schema, found, threshold)) is not None:
        columns["predicted"] = classes
    return pd.DataFrame(first | columns)


def outside(schema: Schema, rows: np.ndarray) -> list[str]:
    """A sentence for each column with values beyond its public range: the model has never seen such
    a value as it is.
    """
    sentences = []
    for j, column in enumerate(schema.columns):
        low, high = column.range
        if column.type == "number" and (out := (rows[:, j] < low) | (rows[:, j] > high)).any():
            sentences.append(
                f"Column {column.name!r} is outside its public range in {int(out.sum())} "
                f"of {len(rows)} rows, first in row "
                f"{int(out.argmax()) + 1}, and was clipped; are the units right?"
            )
    return sentences


def _texts(cells: np.ndarray) -> np.ndarray:
    return np.array(
        [
            cell.decode(errors="backslashreplace") if isinstance(cell, bytes) else cell
            for cell in cells
        ],
        object,
    )
