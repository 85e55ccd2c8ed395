"""Read a silo's own file by the public schema, and make features and labels of it.

An error names file, column and row, and never a cell's value. The sentences are for the silo's
operator, are written to the daemon's journal, and must never travel.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from silodp.core.errors import BadInput
from silodp.core.problem.schema import OTHER, Column, Form, Schema
from silodp.silo.data.cells import factorized, is_null
from silodp.silo.data.faults import Faults
from silodp.silo.data.files import (
    MISSING,
    Loaded,
    as_text,
    form_of,
    listed,
    number,
    pointed,
    read_cells,
    silo_names,
    where,
)
from silodp.silo.ledger.columns import exactly

TRUE = {
    "true",
    "t",
    "yes",
    "y",
    "1",
    "1.0",
    "ja",
    "j",
    "wahr",
    "oui",
    "vrai",
    "si",
    "sí",
    "sì",
    "sim",
}
FALSE = {"false", "f", "no", "n", "0", "0.0", "nein", "falsch", "non", "faux", "nee", "não", "nej"}
# These stand in place of a category's number, for a missing value and for one that the schema does
# not have.
GONE = -1
BAD = -2
ABSENT = "the value is missing, which the schema does not allow"


def load_by_schema(paths: Sequence[Path], schema: Schema) -> Loaded:
    """Read one file, or one folder of images, for each silo.

    Every x is (n_i, features), in the schema's order, within [-1, 1]; or (n_i, P, features) if a
    record is a person. Raise BadInput if a file is not as the schema requires.
    """
    paths = [Path(path) for path in paths]
    names = silo_names(paths)
    tables = [read_table(path, schema) for path in paths]
    return Loaded(
        [(table.x, table.y) for table in tables],
        schema.features,
        schema.label.classes,
        names,
        missing=[table.missing for table in tables],
    )


KnownBy = tuple[np.ndarray, np.ndarray, bytes, list[str] | None, str]
"""The arguments of `ledger.identity.Identity.of`: two arrays, an exact digest and, if records are
persons, their ids and the name of the id's column.
"""


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """One silo's records by the schema.

    `raw` is the file's content whatever the schema contains, for a ledger to recognise it by. If
    the schema names a person, x is (n, P, features) and y (n, P), for n persons
    (`core.problem.person`).
    """

    x: np.ndarray
    """(n, features) float32, within [-1, 1]."""
    y: np.ndarray
    """(n,): classes, survival codes 2 bin + event (see `losses.Hazard`), or float32: counts, or
    numbers scaled to [-1, 1].
    """
    raw: KnownBy
    missing: np.ndarray | None = None
    """As x, bool: where a value was filled in; None if none can be missing."""
    void: np.ndarray | None = None
    """(n,) bool: records that count as zero; None if none does."""


def read_table(path: Path, schema: Schema, faults: Faults | None = None) -> Table:
    """Return the records of a CSV, Parquet or NPZ file, or of a folder of images.

    Raise BadInput if they are not as the schema requires. With `faults` no record is refused: a bad
    cell is a missing value, and a record with a bad label or row is void. The faults are noted
    there.
    """
    if schema.images:
        from silodp.silo.data.images import read_images

        x, y, prints, void = read_images(path, schema.images, schema.label.classes, faults)
        return Table(x, y, (prints, y, exactly([x]), None, ""), void=void)
    return table_of(path, read_cells(path, schema.form, faults), schema, faults)


def table_of(
    path: Path | str, cells: dict[str, np.ndarray], schema: Schema, faults: Faults | None = None
) -> Table:
    """Return the records in these columns. Errors call the file `path`."""
    check_columns(path, cells, schema)
    raw_cells = cells
    cells = blanked(cells, schema.missing_codes)
    if len(next(iter(cells.values()))) == 0:
        raise BadInput(f"{path} has columns but no rows; a silo needs at least one record.")
    parts = [_features(path, column, cells[column.name], faults) for column in schema.columns]
    x = np.column_stack([values for values, _ in parts]).astype(np.float32)
    missing = np.column_stack([gone for _, gone in parts])
    y = label_of(path, schema, cells, faults)
    known = raw(raw_cells)
    if faults:
        void = faults.bad(schema.label.columns, len(y))
    else:
        void = None
    if schema.person is None:
        return Table(x, y, known, missing, void)
    from silodp.silo.data.persons import grouped

    # A server writes the codes for a missing value: they must not separate a person's rows.
    people = grouped(raw_cells[schema.person.column], schema.person, void)
    known = (*known[:3], people.ids, schema.person.column)
    if void is not None:
        void = void[people.places[:, 0]]
    return Table(people.x(x), people.y(y), known, people.x(missing), void)


def read_rows(path: Path, schema: Schema) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the columns of records without a label, (n, columns) float64 as `coded` has them.

    Also return all cells. Other columns in the file do no harm.
    """
    # A model's own schema has no form of a file.
    if schema.form != Form():
        form = schema.form
    else:
        form = form_of(path)
    cells = read_cells(path, form)
    return rows_of(path, cells, schema), cells


def rows_of(path: Path | str, cells: dict[str, np.ndarray], schema: Schema) -> np.ndarray:
    """Return the columns of the schema as numbers, (n, columns). Raise BadInput if there are no
    rows.
    """
    check_columns(path, cells, schema, labelled=False)
    cells = blanked(cells, schema.missing_codes)
    if not len(next(iter(cells.values()))):
        raise BadInput(f"{path} has columns but no rows; give one row for each record to predict.")
    return np.column_stack([coded(path, column, cells[column.name]) for column in schema.columns])


def blanked(cells: dict[str, np.ndarray], codes: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the cells with nothing in place of the schema's codes for a missing value.

    The code -9 stands for -9.0 too.
    """
    if codes:
        return {name: _blanked(column, set(codes)) for name, column in cells.items()}
    return cells


def _blanked(column: np.ndarray, codes: set[str]) -> np.ndarray:
    """Return one column with nothing in place of these codes."""
    which, texts = _distinct(column)
    gone = np.array([text in codes or text.removesuffix(".0") in codes for text in texts])[which]
    if not gone.any():
        return column
    # NaN and NaT stand for a missing value. Another type would change the text of all other cells.
    if column.dtype.kind == "f":
        column = column.copy()
        column[gone] = np.nan
        return column
    if column.dtype.kind == "M":
        column = column.copy()
        column[gone] = "NaT"
        return column
    return np.where(gone, "", column.astype(object))


def raw(cells: dict[str, np.ndarray]) -> KnownBy:
    """Return a file's whole content: numbers in two arrays, and an exact digest.

    The numbers are the same with and without a schema, so that a ledger recognises the file again.
    The digest is of the cells, since texts of one meaning, such as yes and 1, are one number. No
    person is known yet.
    """
    columns = [cells[name] for name in sorted(cells)]
    first, *rest = map(_as_numbers, columns)
    return np.column_stack(rest), first, exactly(columns), None, ""


def _as_numbers(cells: np.ndarray) -> np.ndarray:
    """Return a number for each cell.

    It is the cell's own number, 1 or 0 for true or false in any spelling, or one made of its text
    in small letters.
    """
    if cells.dtype.kind in "biuf":
        return cells.astype(np.float64)
    code, texts = _distinct(cells)
    return np.array([_as_number(text.casefold()) for text in texts], np.float64)[code]


def _as_number(text: str) -> float:
    if text in TRUE or text in FALSE:
        return float(text in TRUE)
    # A file is the same one whether or not a schema declares decimal commas.
    value = number(pointed(text))
    if value == value or text in MISSING:  # NaN differs from itself
        return value
    digits = "".join(re.findall("[0-9]", text))
    if len(digits) > 8:
        return _hashed(text)
    # P0001 and P0002 stay neighbours: they are record numbers.
    return _hashed(re.sub("[0-9]+", "0", text)) * 2**27 + int(digits or 0)


def _hashed(text: str) -> float:
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:3], "big"))


def check_columns(
    path: Path | str, cells: dict[str, np.ndarray], schema: Schema, *, labelled: bool = True
) -> None:
    """Raise BadInput if the file lacks a column of the schema, or has others when `labelled`."""
    for sentence in wrong_columns(path, cells, schema, labelled=labelled):
        raise BadInput(sentence)


def wrong_columns(
    path: Path | str, cells: Mapping[str, np.ndarray], schema: Schema, *, labelled: bool = True
) -> list[str]:
    """Return a sentence about the columns that a file lacks, and one about others that it has.

    A renamed column makes one sentence. Others do no harm in a file without labels.
    """
    sentences = []
    wanted = [column.name for column in schema.columns]
    if labelled:
        wanted += [*schema.label.columns, *schema.own]
    lacks = [name for name in wanted if name not in cells]
    others = [name for name in cells if name not in wanted and name not in schema.ignore]
    if lacks:
        if len(lacks) == len(wanted):
            hint = "; is the first line a header of names, with cells separated by commas?"
        else:
            # There is a header, so a name in it is no cell and may be shown.
            hint = _hint(lacks[0], others)
        sentences.append(f"{path} lacks {listed(lacks)} of the schema's columns{hint}")
    if labelled and len(others) > len(lacks):
        sentences.append(
            f"{path} has {listed(others)} in addition to the schema's columns; drop them, or "
            "list them in the schema's `ignore`."
        )
    return sentences


def _hint(missing: str, others: Sequence[str]) -> str:
    """Return the end of a sentence about a missing column, with a similar name if there is one."""
    close = difflib.get_close_matches(missing.lower(), [name.lower() for name in others], n=1)
    for name in others:
        if close and name.lower() == close[0]:
            return f"; did you mean its column {name!r}?"
    return "."


def _features(
    path: Path | str, column: Column, cells: np.ndarray, faults: Faults | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the features of a column, (n, k) float64 within [-1, 1], and which are missing.

    A feature that marks missing values is itself never missing. If the schema has no value to fill
    in, the middle of the range is filled in, which is public, and for a category none.
    """
    codes = coded(path, column, cells, faults)
    missing = np.isnan(codes)
    if column.type == "category":
        values = (codes[:, None] == np.arange(len(column.categories))).astype(float)
        marked = column.missing is not None
    else:
        if column.type == "number":
            bounds = column.range
        else:
            bounds = (0.0, 1.0)
        if column.missing is None:
            fill = sum(bounds) / 2
        else:
            fill = float(column.missing)
        values = _scaled(np.where(missing, fill, codes), bounds)[:, None]
        marked = column.indicator
    gone = np.repeat(missing[:, None], values.shape[1], axis=1)
    if marked:
        values = np.column_stack([values, missing])
        gone = np.column_stack([gone, np.zeros_like(missing)])
    return values, gone


def coded(
    path: Path | str, column: Column, cells: np.ndarray, faults: Faults | None = None
) -> np.ndarray:
    """Return each cell's number, (n,) float64.

    It is the number itself, the place of the category in the schema's list, or 0 and 1. It is NaN
    for a missing value, if that is allowed, and with `faults` for a cell that the column may not
    have. Raise BadInput for any other cell.
    """
    gone = column.missing is not None
    name = column.name
    if column.type == "number":
        numbers, missing = _numbers(path, name, cells, gone=gone, faults=faults)
    else:
        other = OTHER in column.categories
        if column.type == "boolean":
            numbers = _booleans(path, name, cells, gone=gone, faults=faults)
        else:
            numbers = _codes(
                path, name, cells, column.places, gone=gone, other=other, faults=faults
            )
        missing = numbers < 0
    return np.where(missing, np.nan, numbers)


def label_of(
    path: Path | str,
    schema: Schema,
    cells: dict[str, np.ndarray],
    faults: Faults | None = None,
) -> np.ndarray:
    """Return the targets. Raise BadInput for a bad label. With `faults` it is noted there and is 0
    here.
    """
    label = schema.label
    first = schema.label.columns[0]
    if label.task in ("binary", "multiclass", "ordinal"):
        places = {name: k for k, name in enumerate(label.classes)}
        return _codes(path, first, cells[first], places, faults=faults).clip(0)
    numbers, missing = _numbers(path, first, cells[first], gone=False, faults=faults)
    numbers = np.where(missing, 0.0, numbers)
    if label.task == "regression":
        return _scaled(numbers, label.range).astype(np.float32)
    if label.task == "count":
        what = "the count is below 0 or not a whole number"
        refuse(path, first, (numbers < 0) | (numbers != np.round(numbers)), what, faults)
        return numbers.clip(*label.range).astype(np.float32)
    refuse(path, first, numbers < 0, "the time is below 0", faults)
    # Bin b is (edge b - 1, edge b]. Nobody is followed after the last edge.
    last = np.searchsorted(label.edges, numbers, side="left")
    second = label.columns[1]
    event = _booleans(path, second, cells[second], gone=False, faults=faults).clip(0)
    return np.where(last < len(label.edges), 2 * last + event, 2 * last).astype(np.int64)


def _numbers(
    path: Path | str, name: str, cells: np.ndarray, *, gone: bool, faults: Faults | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers, and which are missing.

    Raise BadInput unless each is finite, or missing if that is allowed. With `faults` those that
    would be refused are missing.
    """
    if cells.dtype.kind in "iuf":
        numbers = cells.astype(np.float64)
        missing = np.isnan(numbers)
    else:
        code, texts = _distinct(cells)
        numbers = np.array([number(text) for text in texts], np.float64)[code]
        missing = np.array([text.lower() in MISSING for text in texts])[code]
    if not gone:
        refuse(path, name, missing, ABSENT, faults)
    bad = ~missing & ~np.isfinite(numbers)
    refuse(path, name, bad, "the value is not a finite number", faults)
    return numbers, missing | bad


def _scaled(numbers: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    """Return the numbers clipped to these bounds and scaled to [-1, 1]."""
    low, high = bounds
    return (2 * (np.clip(numbers, low, high) - low) / (high - low) - 1).clip(-1, 1)


def _codes(
    path: Path | str,
    name: str,
    cells: np.ndarray,
    index: Mapping[str, int],
    *,
    gone: bool = False,
    other: bool = False,
    faults: Faults | None = None,
) -> np.ndarray:
    """Return the number of each value's category in `index`, or GONE for a missing one if that is
    allowed.

    1.0 is the category "1" unless "1.0" is one.
    """

    def code(text: str) -> int:
        for spelling in (text, text.removesuffix(".0")):
            if spelling in index:
                return index[spelling]
        if text.lower() in MISSING:
            return GONE
        if other:
            return index[OTHER]
        return BAD

    wanted = f"one of {listed(list(index))}"
    return _coded(path, name, cells, code, gone=gone, wanted=wanted, faults=faults)


def _booleans(
    path: Path | str, name: str, cells: np.ndarray, *, gone: bool, faults: Faults | None = None
) -> np.ndarray:
    def code(text: str) -> int:
        text = text.lower()
        if text in TRUE:
            return 1
        if text in FALSE:
            return 0
        if text in MISSING:
            return GONE
        return BAD

    return _coded(
        path,
        name,
        cells,
        code,
        gone=gone,
        wanted="true or false, yes or no, ja or nein, oui or non, 1 or 0",
        faults=faults,
    )


def _coded(
    path: Path | str,
    name: str,
    cells: np.ndarray,
    code: Callable[[str], int],
    *,
    gone: bool,
    wanted: str,
    faults: Faults | None,
) -> np.ndarray:
    which, texts = _distinct(cells)
    codes = np.array([code(text) for text in texts], np.int64)[which]
    if not gone:
        refuse(path, name, codes == GONE, ABSENT, faults)
    refuse(path, name, codes == BAD, f"the value is not {wanted}", faults)
    return codes


def _distinct(cells: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Return for each cell the place of its text in a list of different ones, and this list.

    A null is the empty text. A cell's text is its own: equal cells of another spelling, such as 1
    and True, have different texts.
    """
    if cells.dtype.kind == "f":
        cells = cells + 0.0  # -0 equals 0, and the first of them would give both its text
    if cells.dtype.kind == "O":
        texts = np.empty(len(cells), object)
        for k, cell in enumerate(cells):
            texts[k] = None if is_null(cell) else as_text(cell)
        cells = texts
    code, values = factorized(cells)
    return code, [*(as_text(value).strip() for value in values), ""]


def refuse(
    path: Path | str, name: str, bad: np.ndarray, what: str, faults: Faults | None = None
) -> None:
    """Raise BadInput if any row is bad, or note the rows where `faults` are collected."""
    if faults is not None:
        faults.note(name, bad)
        return
    count = int(bad.sum())
    if count > 1:
        what = f"{what} (and in {count - 1} more rows)"
    if count:
        raise BadInput(f"{path}, column {name!r}, {where(int(bad.argmax()))}: {what}.")
