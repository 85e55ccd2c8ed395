"""A silo's own file, checked against the public schema and made into features and labels.

What is wrong is said with file, column and row, and without a cell's value: the sentences are for
the silo's operator, end up in the daemon's journal, and must never travel.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Sequence
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
# in place of a category's number: the value is missing, or is none that the schema has
GONE = -1
BAD = -2
ABSENT = "the value is missing, which the schema does not allow"


def load_by_schema(paths: Sequence[Path], schema: Schema) -> Loaded:
    """Read one file, or one folder of images, for each silo; afterwards every x is (n_i, features),
    in the schema's order, within [-1, 1]; (n_i, P, features) where a record is a person."""
    paths = [Path(path) for path in paths]
    names = silo_names(paths)
    tables = [read_table(path, schema) for path in paths]
    return Loaded(
        [(table.x, table.y) for table in tables], schema.features, schema.label.classes, names
    )


Known = tuple[np.ndarray, np.ndarray, bytes, list[str] | None, str]
"""What `ledger.identity.Identity.of` takes: two arrays, an exact digest, and where records are
persons who they are, by which column.
"""


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """One silo's records by the schema, and `raw`: what its file holds whatever the schema says,
    for a ledger to recognise it by.

    Where the schema names a person, x is (n, P, features) and y (n, P), for n persons
    (`core.problem.person`).
    """

    x: np.ndarray  # (n, features) float32, within [-1, 1]
    # (n,): classes, survival codes 2 bin + event (see `losses.Hazard`), or float32: counts, or
    # numbers scaled to [-1, 1]
    y: np.ndarray
    raw: Known
    missing: np.ndarray | None = (
        None  # as x, bool: where a value was filled in; None where none can be missing
    )
    void: np.ndarray | None = None  # (n,) bool: records that count as zero; None where none does


def read_table(path: Path, schema: Schema, faults: Faults | None = None) -> Table:
    """The records of a CSV, Parquet or NPZ file, or of a folder of images, if they are as the
    schema says.

    With `faults` no record is refused: a bad cell is a missing value, and a record with a bad label
    or row is void. What was found is noted there.
    """
    if schema.images:
        from silodp.silo.data.images import read_images

        x, y, prints, void = read_images(path, schema.images, schema.label.classes, faults)
        return Table(x, y, (prints, y, exactly([x]), None, ""), void=void)
    return table_of(path, read_cells(path, schema.form, faults), schema, faults)


def table_of(
    path: Path | str, cells: dict[str, np.ndarray], schema: Schema, faults: Faults | None = None
) -> Table:
    """The records in these columns; `path` is what sentences call them."""
    check_columns(path, cells, schema)
    raw_cells = cells
    cells = blanked(cells, schema.missing_codes)
    if len(next(iter(cells.values()))) == 0:
        raise BadInput(f"{path} has columns but no rows; a silo needs at least one record.")
    each = [_features(path, column, cells[column.name], faults) for column in schema.columns]
    x, missing = (np.column_stack(parts) for parts in zip(*each, strict=True))
    x = x.astype(np.float32)
    y = label_of(path, schema, cells, faults)
    known = raw(raw_cells)
    if faults:
        void = faults.bad(schema.label.columns, len(y))
    else:
        void = None
    if schema.person is None:
        return Table(x, y, known, missing, void)
    from silodp.silo.data.persons import grouped

    # A server writes the codes for a missing value: they must not take a person's rows apart.
    people = grouped(raw_cells[schema.person.column], schema.person, void)
    who = (*known[:3], people.ids, schema.person.column)
    if void is None:
        nobody = None
    else:
        nobody = void[people.places[:, 0]]
    return Table(people.x(x), people.y(y), who, people.x(missing), nobody)


def read_rows(path: Path, schema: Schema) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The columns of records whose label is not known, (n, columns) float64 as `coded` has them,
    and all cells; columns besides do no harm.
    """
    # a model's own schema does not say how a file is written
    if schema.form != Form():
        form = schema.form
    else:
        form = form_of(path)
    cells = read_cells(path, form)
    return rows_of(path, cells, schema), cells


def rows_of(path: Path | str, cells: dict[str, np.ndarray], schema: Schema) -> np.ndarray:
    check_columns(path, cells, schema, labelled=False)
    cells = blanked(cells, schema.missing_codes)
    if not len(next(iter(cells.values()))):
        raise BadInput(f"{path} has columns but no rows; give one row for each record to predict.")
    return np.column_stack([coded(path, column, cells[column.name]) for column in schema.columns])


def blanked(cells: dict[str, np.ndarray], codes: Sequence[str]) -> dict[str, np.ndarray]:
    """The cells with nothing in the place of the schema's codes for a missing value; -9 stands for
    -9.0 too.
    """
    if codes:
        return {name: _blanked(column, set(codes)) for name, column in cells.items()}
    return cells


def _blanked(column: np.ndarray, codes: set[str]) -> np.ndarray:
    which, texts = _distinct(column)
    gone = np.array([text in codes or text.removesuffix(".0") in codes for text in texts])[which]
    if not gone.any():
        return column
    if (
        column.dtype.kind in "fM"
    ):  # NaN and NaT are missing; another type would spell everybody else's cell otherwise
        column = column.copy()
        column[gone] = "NaT" if column.dtype.kind == "M" else np.nan
        return column
    return np.where(gone, "", column.astype(object))


def raw(cells: dict[str, np.ndarray]) -> Known:
    """All that a file holds, as numbers in two arrays: the same ones with and without a schema, or
    a ledger would not know the file again.

    And the exact digest of its cells, since texts of one meaning, such as yes and 1, are one
    number. Of persons nothing is known yet.
    """
    columns = [cells[name] for name in sorted(cells)]
    first, *rest = map(_as_numbers, columns)
    return np.column_stack(rest), first, exactly(columns), None, ""


def _as_numbers(cells: np.ndarray) -> np.ndarray:
    """A number for each cell: its own, 1 or 0 for a true or false in any spelling, or one made of
    its text in small letters.
    """
    if cells.dtype.kind in "biuf":
        return cells.astype(np.float64)
    code, texts = _distinct(cells)
    return np.array([_as_number(text.casefold()) for text in texts], np.float64)[code]


def _as_number(text: str) -> float:
    if text in TRUE or text in FALSE:
        return float(text in TRUE)
    own = number(
        pointed(text)
    )  # whether a schema says that commas are decimal or not, it is the same file
    if own == own or text in MISSING:
        return own
    digits = "".join(re.findall("[0-9]", text))
    if len(digits) > 8:
        return _hashed(text)
    return _hashed(re.sub("[0-9]+", "0", text)) * 2**27 + int(
        digits or 0
    )  # P0001 and P0002 stay neighbours: they are record numbers


def _hashed(text: str) -> float:
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:3], "big"))


def check_columns(
    path: Path | str, cells: dict[str, np.ndarray], schema: Schema, *, labelled: bool = True
) -> None:
    wanted = [
        *(column.name for column in schema.columns),
        *((*schema.label.columns, *schema.own) if labelled else ()),
    ]
    lacks = [name for name in wanted if name not in cells]
    besides = [name for name in cells if name not in wanted and name not in schema.ignore]
    if lacks:
        hint = "; is the first line a header of names, with cells separated by commas?"
        if len(lacks) < len(wanted):  # there is a header, so a name in it is no cell
            close = difflib.get_close_matches(
                lacks[0].lower(), [name.lower() for name in besides], n=1
            )
            if close:
                hint = (
                    "; did you mean its column "
                    f"{next(name for name in besides if name.lower() == close[0])!r}?"
                )
            else:
                hint = "."
        raise BadInput(f"{path} lacks {listed(lacks)} of the schema's columns{hint}")
    if besides and labelled:
        raise BadInput(
            f"{path} has {listed(besides)} besides the schema's columns; drop them, or "
            "list them in the schema's `ignore`."
        )


def _features(
    path: Path | str, column: Column, cells: np.ndarray, faults: Faults | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(n, features of the column), float64, within [-1, 1], and where they are missing; a feature
    that says so is itself never missing.

    Where the schema has no value to fill in, the middle of the range is filled in, which is public,
    and no category at all.
    """
    codes = coded(path, column, cells, faults)
    missing = np.isnan(codes)
    if column.type == "category":
        values = (codes[:, None] == np.arange(len(column.categories))).astype(float)
        said = column.missing is not None
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
        said = column.indicator
    gone = np.repeat(missing[:, None], values.shape[1], axis=1)
    if said:
        return (np.column_stack([values, missing]), np.column_stack([gone, np.zeros_like(missing)]))
    return (values, gone)


def coded(
    path: Path | str, column: Column, cells: np.ndarray, faults: Faults | None = None
) -> np.ndarray:
    """(n,) float64: each cell's number, the place of its category in the schema's list, or 0 and 1;
    NaN where one is missing that may be, or, with `faults`, is none that the column may have.
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
                path, name, cells, column.categories, gone=gone, other=other, faults=faults
            )
        missing = numbers < 0
    return np.where(missing, np.nan, numbers)


def label_of(
    path: Path | str,
    schema: Schema,
    cells: dict[str, np.ndarray],
    faults: Faults | None = None,
) -> np.ndarray:
    """Return the targets. With `faults` a label that is none is noted there, and is 0 here."""
    label = schema.label
    first = schema.label.columns[0]
    if label.task in ("binary", "multiclass", "ordinal"):
        return _codes(path, first, cells[first], label.classes, faults=faults).clip(0)
    numbers, missing = _numbers(path, first, cells[first], gone=False, faults=faults)
    numbers = np.where(missing, 0.0, numbers)
    if label.task == "regression":
        return _scaled(numbers, label.range).astype(np.float32)
    if label.task == "count":
        what = "the count is below 0 or not whole"
        _refuse(path, first, (numbers < 0) | (numbers != np.round(numbers)), what, faults)
        return numbers.clip(*label.range).astype(np.float32)
    _refuse(path, first, numbers < 0, "the time is below 0", faults)
    last = np.searchsorted(
        label.edges, numbers, side="left"
    )  # bin b is (edge b - 1, edge b]; after the last edge nobody is followed
    second = label.columns[1]
    event = _booleans(path, second, cells[second], gone=False, faults=faults).clip(0)
    return np.where(last < len(label.edges), 2 * last + event, 2 * last).astype(np.int64)


def _numbers(
    path: Path | str, name: str, cells: np.ndarray, *, gone: bool, faults: Faults | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers, and where there is none; refused unless each is finite, or missing where that
    may be. With `faults` those that would be refused are missing.
    """
    if cells.dtype.kind in "iuf":
        numbers = cells.astype(np.float64)
        missing = np.isnan(numbers)
    else:
        code, texts = _distinct(cells)
        numbers = np.array([number(text) for text in texts], np.float64)[code]
        missing = np.array([text.lower() in MISSING for text in texts])[code]
    if not gone:
        _refuse(path, name, missing, ABSENT, faults)
    bad = ~missing & ~np.isfinite(numbers)
    _refuse(path, name, bad, "the value is not a finite number", faults)
    return numbers, missing | bad


def _scaled(numbers: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    low, high = bounds
    return (2 * (np.clip(numbers, low, high) - low) / (high - low) - 1).clip(-1, 1)


def _codes(
    path: Path | str,
    name: str,
    cells: np.ndarray,
    known: tuple[str, ...],
    *,
    gone: bool = False,
    other: bool = False,
    faults: Faults | None = None,
) -> np.ndarray:
    """The number of each value's category, or GONE where a value may be missing; 1.0 is the
    category "1" unless "1.0" is one.
    """
    index = {text: k for k, text in enumerate(known)}

    def code(text: str) -> int:
        found = index.get(
            text, index.get(text.removesuffix(".0"), GONE if text.lower() in MISSING else BAD)
        )
        if found == BAD and other:
            return index[OTHER]
        return found

    wanted = f"one of {listed(known)}"
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
        _refuse(path, name, codes == GONE, ABSENT, faults)
    _refuse(path, name, codes == BAD, f"the value is not {wanted}", faults)
    return codes


def _distinct(cells: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """For each cell the place of its text in a list of different ones; a null is the empty text.

    A cell's text is its own: cells that are equal and spelled otherwise, such as 0.0 and -0.0 or 1
    and True, are told apart by their texts.
    """
    # -0 equals 0, and the first of them would spell both
    if cells.dtype.kind == "f":
        cells = cells + 0.0
    else:
        cells = cells
    if cells.dtype.kind == "O":
        cells = np.array([None if is_null(cell) else as_text(cell) for cell in cells], dtype=object)
    code, found = factorized(cells)
    return code, [*(as_text(value).strip() for value in found), ""]


def _refuse(
    path: Path | str, name: str, bad: np.ndarray, what: str, faults: Faults | None = None
) -> None:
    """Raise BadInput if any row is bad, or note the rows where `faults` are collected."""
    if faults is not None:
        faults.note(name, bad)
        return
    if bad.any():
        if bad.sum() > 1:
            more = f" (and in {int(bad.sum()) - 1} more rows)"
        else:
            more = ""
        raise BadInput(f"{path}, column {name!r}, {where(int(bad.argmax()))}: {what}{more}.")
