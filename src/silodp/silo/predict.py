"""Predict for a silo's own new records. The predictions are computed here and sent nowhere.

The model is public and has been paid for, so using it costs nothing. A prediction is about one row,
and is as private as the row.
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
    """Return a row for each record of the file, in its order, and notes for the reader.

    The columns to `keep` come first. Raise BadInput if the threshold, a column or the file cannot
    be used.
    """
    if threshold is not None and not (len(model.schema.label.classes) == 2 and 0 <= threshold <= 1):
        raise BadInput(
            f"the threshold is {threshold:g}; it must be a risk from 0 to 1, and is for "
            "labels of two classes alone"
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
    """Return the columns `first`, the figures of each row, and the predicted class if there are
    classes.

    Raise BadInput if a figure is not finite.
    """
    import pandas as pd  # slow to load, and not needed by an import of this module

    with torch.no_grad():
        parts = [
            model.reading(torch.from_numpy(part))
            for part in np.array_split(np.array(rows, np.float64), max(1, len(rows) // 4096))
        ]
    values = torch.cat(parts)
    if not bool(values.isfinite().all()):
        raise BadInput(
            "the model gives no finite number for some rows; check that their values are as "
            "the schema describes them"
        )
    columns: dict[str, object] = dict(
        zip(figures(model.schema), values.double().numpy().T, strict=True)
    )
    classes = decided(model.schema, values, threshold)
    if classes is not None:
        columns["predicted"] = classes
    return pd.DataFrame(first | columns)


def outside(schema: Schema, rows: np.ndarray) -> list[str]:
    """Return a sentence for each column with values beyond its public range.

    The model was trained on clipped values, so it has no experience with such a value.
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
    texts = []
    for cell in cells:
        if isinstance(cell, bytes):
            texts.append(cell.decode(errors="backslashreplace"))
        else:
            texts.append(cell)
    return np.array(texts, object)
