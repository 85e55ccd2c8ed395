"""Read and factorise the cells of one column, without pandas if they are text or numbers.

pandas is slow to load, and no gate needs it for these.
"""

from typing import Any

import numpy as np
import pyarrow as pa


def column_of(table: pa.Table, i: int) -> np.ndarray:
    """Return the column's cells, each made from itself alone.

    A null must not turn the integers, or category codes, of other rows into floats.
    """
    column = table.column(i)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if len(column) and column.null_count == 0:
        # pyarrow's to_numpy would load pandas, which is slow to load.
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            return np.array(column.to_pylist(), object)
        if pa.types.is_floating(column.type) or pa.types.is_integer(column.type):
            return np.concatenate([np.from_dlpack(chunk) for chunk in column.chunks])
    return column.to_pandas(integer_object_nulls=True).to_numpy()


def factorized(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each cell the place of its value among the different ones, and these.

    The different values are in the order of their first cells. A null has the place -1.
    """
    texts = cells.dtype.kind == "O" and all(
        cell is None or isinstance(cell, str | bytes) for cell in cells
    )
    if not texts and cells.dtype.kind not in "biufUS":
        # Slow to load, and needed only for columns of several kinds of values, or of dates.
        import pandas as pd

        if cells.dtype.kind in "OT":
            codes, values = pd.factorize(pd.Series(cells, dtype=object))
        else:
            codes, values = pd.factorize(cells)
        return codes, np.asarray(values)
    places: dict[Any, int] = {}
    codes = np.empty(len(cells), np.intp)
    for k, cell in enumerate(cells.tolist()):
        if cell is None or cell != cell:  # NaN differs from itself
            codes[k] = -1
        else:
            codes[k] = places.setdefault(cell, len(places))
    first = np.unique(codes, return_index=True)[1]
    return codes, cells[first[len(first) - len(places) :]]


def is_null(cell: object) -> bool:
    """Return whether there is no value: None, or one of the values by which pandas marks that."""
    if cell is None or isinstance(cell, str | bytes | int):
        return cell is None
    import pandas as pd  # slow to load, and text has no other null

    return bool(pd.isna(cell))  # type: ignore[call-overload]
