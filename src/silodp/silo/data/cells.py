"""What the cells of one column have in common, without pandas where they are text or numbers: it is
slow to load, and no gate needs it for them.
"""

from typing import Any

import numpy as np
import pyarrow as pa


def column_of(table: pa.Table, i: int) -> np.ndarray:
    """The column's cells, each made from itself alone: a null must not turn the integers, or
    category codes, of other rows into floats.
    """
    column = table.column(i)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if (
        len(column) and column.null_count == 0
    ):  # without pandas, which is slow to load, and which to_numpy would load
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            return np.array(column.to_pylist(), object)
        if pa.types.is_floating(column.type) or pa.types.is_integer(column.type):
            return np.concatenate([np.from_dlpack(chunk) for chunk in column.chunks])
    return column.to_pandas(integer_object_nulls=True).to_numpy()


def factorized(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each cell the place of its value among the different ones, which are in the order in
    which they come first; -1 for a null.
    """
    texts = cells.dtype.kind == "O" and all(
        cell is None or isinstance(cell, str | bytes) for cell in cells
    )
    if not texts and cells.dtype.kind not in "biufUS":
        # slow to load, and needed for columns of several kinds of values, and of dates, alone
        import pandas as pd

        codes, found = pd.factorize(
            pd.Series(cells, dtype=object) if cells.dtype.kind in "OT" else cells
        )
        return codes, np.asarray(found)
    places: dict[Any, int] = {}
    codes = np.array(
        [
            -1 if cell is None or cell != cell else places.setdefault(cell, len(places))
            for cell in cells.tolist()
        ],
        np.intp,
    )
    first = np.unique(codes, return_index=True)[1]
    return codes, cells[first[len(first) - len(places) :]]


def is_null(cell: object) -> bool:
    """Whether there is no value: None, or one of the many that pandas has for it."""
    if cell is None or isinstance(cell, str | bytes | int):
        return cell is None
    import pandas as pd  # slow to load, and text has no other null

    return bool(pd.isna(cell))  # type: ignore[call-overload]
