"""Read a silo's own file (CSV, Parquet or NPZ) into features and labels.

A bad file is refused with the place of the wrong cell. No sentence contains a cell, nor the first
line of a file that may have no header: sentences end up in journals, notebooks and screenshots.
"""

import contextlib
import csv
import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as parquet

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Form, repeated
from silodp.silo.data.cells import column_of, factorized
from silodp.silo.data.faults import Faults

T = TypeVar("T")
PLAIN = Form()
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""The first bytes of a text in UTF-16, as spreadsheets write it."""
MISSING = {"", "na", "n/a", "#n/a", "nan", "<na>", "none", "null"}


@dataclass(frozen=True, eq=False, repr=False)
class Loaded:
    """The result of `load_silos`: one (x, y) pair for each silo, and what is public about them.

    `Records.of(records_raw, names, missing)` pads the pairs.
    """

    records_raw: list[tuple[np.ndarray, np.ndarray]]
    """x: (n_i, *features) float32; y: (n_i,) int64, or float32 for regression."""
    features: tuple[str, ...]
    classes: tuple[str, ...]
    """Class k has label k. Empty for regression."""
    names: tuple[str, ...]
    cells: list[dict[str, np.ndarray]] = field(default_factory=list)
    """Each silo's columns as they are in its file, for a ledger."""
    missing: list[np.ndarray | None] = field(default_factory=list)
    """As x, bool: where a value was filled in by a schema."""


@dataclass(frozen=True, eq=False, repr=False)
class _Sheet:
    columns: dict[str, np.ndarray]
    label: str
    shape: tuple[int, ...] | None = None
    """The shape of one record, if the features are one array rather than columns."""


def load_silos(
    paths: Sequence[Path],
    label: str,
    *,
    classes: Sequence[str] | None,
    holes: bool = False,
    faults: Faults | None = None,
) -> Loaded:
    """Read one file per silo. Every x is finite and has the first file's columns in their order.

    Raise BadInput for a file that is not as required. A file whose first line is most likely a
    record is refused, since its names of columns would be printed and published as features.
    `classes` is declared, never read off the data. Labels become 0..k-1 in that order. None takes
    the labels 0 and 1 only. An empty sequence means regression, with float targets. An NPZ may
    contain arrays x and y; then y is the label. With `holes` a feature's missing value is NaN;
    otherwise it is refused. With `faults`, for one file, no record is refused: a bad cell is NaN, a
    bad label is 0, and both are noted there.
    """
    paths = [Path(path) for path in paths]
    names = silo_names(paths)
    if classes is not None and (len(classes) == 1 or len(set(classes)) != len(classes)):
        raise BadInput(f"--classes needs two or more different classes, but is {listed(classes)}.")
    records = []
    cells = []
    order = []
    first = {}
    for path in paths:
        sheet = _read(path, label, text_label=classes is None or len(classes) > 0, faults=faults)
        columns = [name for name in sheet.columns if name != sheet.label]
        _refuse_headless(path, columns, sheet.label, classes)
        call = _sayings(path, sheet)
        order = order or columns
        first = first or call
        if set(columns) != set(order):
            lacks = [c for c in order if c not in columns]
            others = [c for c in columns if c not in order]
            parts = []
            if lacks:
                parts.append(f"lacks {_joined([first[c] for c in lacks])} of {paths[0]}")
            if others:
                parts.append(f"also has {_joined([call[c] for c in others])}")
            raise BadInput(
                f"{path} and {paths[0]} must have the same columns, but {path} "
                f"{' and '.join(parts)}."
            )
        if len(sheet.columns[sheet.label]) == 0:
            raise BadInput(f"{path} has columns but no rows; a silo needs at least one record.")
        y = _labels(path, call[sheet.label], sheet.columns[sheet.label], classes, faults)
        x = np.empty((len(order), len(y)), np.float32)
        for j, column in enumerate(order):
            x[j] = _numbers(path, call[column], sheet.columns[column], holes, faults)
        x = np.ascontiguousarray(x.T)
        if sheet.shape:
            x = x.reshape(-1, *sheet.shape)
        records.append((x, y))
        cells.append(sheet.columns)
    if classes is None:
        classes = ("0", "1")
    return Loaded(records, tuple(order), tuple(classes), names, cells)


def silo_names(paths: Sequence[Path]) -> tuple[str, ...]:
    """Return a different name for each silo: the name of its file, or the whole path if two are
    equal.

    Raise BadInput if a file is given twice, or none is given.
    """
    if not paths:
        raise BadInput("no files are given; each silo needs one.")
    twice = repeated([path.resolve() for path in paths])
    if twice:
        raise BadInput(f"{twice} is given twice; each silo needs its own file.")
    stems = tuple(path.stem for path in paths)
    if repeated(stems):
        return tuple(map(str, paths))
    return stems


def read_cells(
    path: Path, form: Form = PLAIN, faults: Faults | None = None
) -> dict[str, np.ndarray]:
    """Return every column of a silo's file by its name. The cells of a CSV in this form are text.

    A schema defines what they must be. With `faults` a row with another number of cells than the
    header is a row of empty cells. Raise BadInput if the file cannot be read.
    """
    return _opened(
        path,
        {
            ".csv": lambda path: _csv_cells(path, form, faults),
            ".parquet": lambda path: _parquet_cells(path, faults),
            ".npz": _npz_cells,
        },
    )


def form_of(path: Path) -> Form:
    """Return how a CSV seems to be written, by its first line alone, which is the header.

    With semicolons, decimal commas are likely.
    """
    if path.suffix.lower() != ".csv" or not path.is_file():
        return Form()
    with path.open("rb") as file:
        first = file.readline(2**20)
    if first[:2] in UTF_16:
        encoding = "utf-16"
        with path.open(encoding=encoding, errors="replace") as text:
            first = text.readline(2**20).encode()
        return _form_of_line(first, encoding)
    try:
        first.decode("utf-8-sig")
        encoding = "utf-8"
    except UnicodeDecodeError:
        encoding = "latin-1"
    return _form_of_line(first, encoding)


def _form_of_line(first: bytes, encoding: str) -> Form:
    """Return the form of a file in this encoding with this first line."""
    separator = max(",;\t|", key=lambda sign: first.count(sign.encode()))
    decimal = "," if separator == ";" else "."
    return Form(separator, decimal, encoding)


def header(path: Path, form: Form = PLAIN) -> list[str]:
    """Return the names of the columns, without reading any record."""
    readers = {
        ".csv": lambda path: _csv_header(path, form)[1],
        ".parquet": lambda path: _parquet_names(parquet.ParquetFile(path).schema_arrow.names),
    }
    return _opened(path, readers | {".npz": _npz_names})


def _read(path: Path, label: str, *, text_label: bool, faults: Faults | None = None) -> _Sheet:
    readers = {
        ".csv": lambda path: _read_csv(path, label, text_label, faults),
        ".parquet": lambda path: _read_parquet(path, label, faults),
    }
    return _opened(path, readers | {".npz": lambda path: _read_npz(path, label)})


def _opened(path: Path, readers: dict[str, Callable[[Path], T]]) -> T:
    suffix = path.suffix.lower()
    if suffix not in readers and path.is_dir():
        raise BadInput(
            f"{path} is a folder, not a file; a folder of images needs a schema with a "
            "table [images]."
        )
    if suffix not in readers:
        raise BadInput(
            f"{path} has the suffix {suffix!r}; a silo's file must be .csv, .parquet or .npz."
        )
    if path.is_dir():
        raise BadInput(f"{path} is a folder, not a file.")
    if not path.is_file():
        raise BadInput(f"{path} does not exist.")
    try:
        return readers[suffix](path)
    except UnicodeError:
        raise BadInput(f"{not_utf8(path)}.") from None
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read as {suffix}: {error.strerror or 'the file is damaged'}."
        ) from None
    except (pa.ArrowException, csv.Error, zipfile.BadZipFile, zlib.error, EOFError):
        raise BadInput(
            f"{path} is not a complete {suffix} file; it may be damaged or cut short."
        ) from None


def not_utf8(path: Path) -> str:
    """Return what is wrong with a file that is not UTF-8 text, and what to do."""
    with path.open("rb") as file:
        start = file.read(2)
    if start in UTF_16:
        found = "UTF-16 and not UTF-8 text"
        encoding = "utf-16"
    else:
        found = "not UTF-8 text"
        encoding = "latin-1"
    return (
        f"{path} is {found}; save it again as 'CSV UTF-8', or declare it in the schema: "
        f'encoding = "{encoding}"'
    )


def _csv_header(
    path: Path, form: Form = PLAIN, *, lenient: bool = False
) -> tuple[list[str], list[str]]:
    """Return the first row as it is, and the names in it.

    With `lenient` no later byte is refused.
    """
    if form.encoding == "utf-8":
        encoding = "utf-8-sig"
        errors = "surrogateescape"
    else:
        encoding = form.encoding
        errors = "replace" if lenient else "strict"
    with path.open(encoding=encoding, errors=errors, newline="") as file:
        header = next((row for row in csv.reader(file, delimiter=form.separator) if row), None)
    if header is None:
        raise BadInput(f"{path} is empty; it needs a header and at least one row.")
    # This fails if the header itself, not just some cell, is not UTF-8.
    names = [name.encode().decode().strip() for name in header]
    for sign, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(names) < 3 and sign != form.separator and any(sign in name for name in names):
            fields = f"separator = {json.dumps(sign)}"
            if sign == ";":
                fields = f'{fields}, decimal = ","'
            raise BadInput(
                f"{path}: the cells are separated by {word}; save it again with commas, "
                f"and with points in decimal numbers, or declare it in the schema: {fields}."
            )
    if any("\n" in name for name in names):
        raise BadInput(
            f"{path} has a line break within its header; each column's name must be on the "
            "first line."
        )
    return header, names


def _csv_cells(path: Path, form: Form, faults: Faults | None = None) -> dict[str, np.ndarray]:
    header, names = _csv_header(path, form, lenient=faults is not None)
    _check_names(path, names)
    table = _csv_as_text(path, header, None, form, faults)
    cells = {name: _column(table, i, faults) for i, name in enumerate(names)}
    if form.decimal == ",":
        cells = {
            name: np.array([pointed(as_text(cell)) for cell in column], dtype=object)
            for name, column in cells.items()
        }
    return cells


def pointed(text: str) -> str:
    """Return a number with a decimal comma, such as 1.234,5 or 12,5, with a point.

    Other text is returned as it is. The cell alone decides.
    """
    if "," in text and re.fullmatch(r"\s*[-+]?(\d+|\d{1,3}(\.\d{3})+),\d+([eE][-+]?\d+)?\s*", text):
        return text.replace(".", "").replace(",", ".")
    return text


def _column(table: pa.Table, i: int, faults: Faults | None) -> np.ndarray:
    column = column_of(table, i)
    if faults:
        return faults.restored(column)
    return column


def _read_csv(path: Path, label: str, text_label: bool, faults: Faults | None = None) -> _Sheet:
    header, names = _csv_header(path)
    _check_columns(path, names, label)
    types = dict.fromkeys(header, pa.float64())
    if text_label:
        types |= {name: pa.string() for name in header if name.strip() == label}
    try:
        table = pacsv.read_csv(path, convert_options=pacsv.ConvertOptions(column_types=types))
    except pa.ArrowInvalid:
        # Some cell is bad. All cells are read as text, and the checks of each column name it.
        table = _csv_as_text(path, header, label, faults=faults)
    return _Sheet({name: _column(table, i, faults) for i, name in enumerate(names)}, label)


def _csv_as_text(
    path: Path,
    header: Sequence[str],
    label: str | None,
    form: Form = PLAIN,
    faults: Faults | None = None,
) -> pa.Table:
    ragged = []
    options = pacsv.ParseOptions(
        delimiter=form.separator, invalid_row_handler=lambda row: ragged.append(row) or "skip"
    )
    types = pacsv.ConvertOptions(column_types=dict.fromkeys(header, pa.binary()))
    encoding = form.encoding.replace("utf-8", "utf8")
    content = path
    text = b""
    # One byte that is no letter must not stop the file, and no message may print its row.
    if faults is not None or encoding == "utf8":
        text = _as_utf8(path.read_bytes(), form.encoding)
        content = io.BytesIO(text)
        encoding = "utf8"
    # One long cell must not stop it either, so the reader's blocks are as long as the file.
    block = None
    if faults is not None:
        block = min(2**31 - 1, max(2**20, len(text) + 1))
    # With several threads, rows would have no number.
    reading = pacsv.ReadOptions(use_threads=False, encoding=encoding, block_size=block)
    table = pacsv.read_csv(content, reading, options, types)
    if faults is not None:
        faults.ragged = np.array([row.number - 2 for row in ragged], np.int64)
    elif ragged:
        row = ragged[0]
        what = (
            f"there are {row.actual_columns} cells, but the header names "
            f"{row.expected_columns} columns"
        )
        raise BadInput(f"{path}, {where(row.number - 2)}: {what}.")
    if label is None:
        return table
    for i, name in enumerate(header):
        if name.strip() == label:
            continue
        # Only columns with a bad cell stay text, so only they are searched cell by cell.
        with contextlib.suppress(pa.ArrowInvalid):
            numbers = table.column(i).cast(pa.string()).cast(pa.float64())
            table = table.set_column(i, name, numbers)
    return table


def _as_utf8(content: bytes, encoding: str) -> bytes:
    """Return the content in UTF-8. Each byte that is no letter becomes an escape, as `as_text`
    writes it; of an encoding with such bytes, a sign that says so.
    """
    if encoding == "utf-8":
        errors = "backslashreplace"
    else:
        errors = "replace"
    return content.decode(encoding, errors).encode()


def _parquet_names(names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.startswith("__index_level_")]  # pandas' row index


def _parquet_cells(path: Path, faults: Faults | None = None) -> dict[str, np.ndarray]:
    # Not read_table, which adds columns that it finds in the path.
    table = parquet.ParquetFile(path).read()
    _check_names(path, _parquet_names(table.column_names))
    for column in table.schema:
        kind = column.type
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if pa.types.is_nested(kind):
            raise BadInput(
                f"{path}: column {column.name!r} contains lists or structs; each of its cells "
                "must be one number or one text."
            )
    return {
        name: _parquet_column(table, i, name, faults)
        for i, name in enumerate(table.column_names)
        if not name.startswith("__index_level_")
    }


_UNREADABLE = (ValueError, OverflowError, NotImplementedError, pa.ArrowException)


def _spelled(column: np.ndarray) -> np.ndarray:
    """Return the column. Raise what its first cell without a text raises, such as a moment of a
    time zone in a year of five digits.
    """
    if column.dtype.kind == "O":
        for cell in column:
            as_text(cell)
    return column


def _parquet_column(table: pa.Table, i: int, name: str, faults: Faults | None) -> np.ndarray:
    """Return a column's cells.

    With `faults` a cell that cannot be read, such as a date in a year of five digits, is missing,
    and noted there.
    """
    try:
        return _spelled(column_of(table, i))
    except _UNREADABLE:
        if faults is None:
            raise
    cells = np.empty(len(table), object)
    bad = np.zeros(len(table), bool)
    spans = [(0, len(table))]
    while spans:
        start, end = spans.pop()
        try:
            cells[start:end] = _spelled(column_of(table.slice(start, end - start), i))
        except _UNREADABLE:
            middle = (start + end) // 2
            if middle == start:
                bad[start] = True
            else:
                spans += [(start, middle), (middle, end)]
    faults.note(name, bad)
    return cells


def _read_parquet(path: Path, label: str, faults: Faults | None = None) -> _Sheet:
    columns = _parquet_cells(path, faults)
    _check_columns(path, list(columns), label)
    return _Sheet(columns, label)


def _npz_names(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def _npz_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: np.asarray(archive[name]) for name in archive.files}
    except (ValueError, AttributeError, TypeError):
        # numpy raises one of these for pickled objects, and for a file that is no archive.
        raise BadInput(
            f"{path} is not an archive of plain arrays of numbers or text; pickled objects "
            "are never loaded."
        ) from None


def _npz_cells(path: Path) -> dict[str, np.ndarray]:
    arrays = _npz_arrays(path)
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        raise BadInput(
            f"{path} must have one array of one axis for each column, all of one length."
        )
    _check_names(path, list(arrays))
    return arrays


def _read_npz(path: Path, label: str) -> _Sheet:
    arrays = _npz_arrays(path)
    if set(arrays) == {"x", "y"} and arrays["x"].ndim > 1:
        x = arrays["x"]
        label = "y"
        shape = x.shape[1:]
        columns = x.reshape(len(x), int(np.prod(x.shape[1:])))
        arrays = {f"x{j}": columns[:, j] for j in range(columns.shape[1])} | {"y": arrays["y"]}
    else:
        shape = None
    _check_columns(path, list(arrays), label)
    for name, array in arrays.items():
        if array.shape != arrays[label].shape or array.ndim != 1:
            raise BadInput(
                f"{path}: array {name!r} has shape {array.shape}, but needs one entry for "
                f"each of the labels {label!r}."
            )
    return _Sheet(arrays, label, shape)


def _check_names(path: Path, names: list[str]) -> None:
    if "" in names:
        raise BadInput(
            f"{path}: column {names.index('') + 1} has no name; name it, or drop it "
            "(pandas: index=False)."
        )
    twice = repeated(names)
    if twice:
        raise BadInput(
            f"{path} has more than one column with the name of column "
            f"{names.index(twice) + 1}; each name may occur once in the header."
        )


def _check_columns(path: Path, names: list[str], label: str) -> None:
    _check_names(path, names)
    if label not in names:
        raise BadInput(
            f"{path} has no label column {label!r}; is the first line a header of names, "
            "with cells separated by commas?"
        )
    if len(names) == 1:
        raise BadInput(f"{path} has the label column {label!r} but no feature columns.")


def _refuse_headless(
    path: Path, features: Sequence[str], label: str, classes: Sequence[str] | None
) -> None:
    suffix = path.suffix.lower()
    if suffix == ".csv" and (_is_number(label) or label in (classes or ())):
        raise BadInput(
            f"{path} seems to have no header, since the name of the label's column is a number "
            "or a class; give each column a name."
        )
    # pandas names columns without names by their numbers.
    counted = suffix == ".parquet" and set(features) <= set(map(str, range(len(features) + 1)))
    if suffix != ".npz" and all(map(_is_number, features)) and not counted:
        raise BadInput(
            f"{path} seems to have no header, since the names of its columns are numbers; give "
            "each column a name."
        )


def _is_number(name: str) -> bool:
    return name.lower() in MISSING or not np.isnan(number(name))


def _sayings(path: Path, sheet: _Sheet) -> dict[str, str]:
    """Return what to call each column in a sentence.

    It is the number if the name may be a cell, as in a CSV. The label's name is the user's own
    word.
    """
    numbered = path.suffix.lower() == ".csv"
    words = {}
    for i, name in enumerate(sheet.columns, 1):
        if numbered and name != sheet.label:
            words[name] = f"column {i}"
        else:
            words[name] = f"column {name!r}"
    return words


def _numbers(
    path: Path,
    column: str,
    values: np.ndarray,
    holes: bool = False,
    faults: Faults | None = None,
) -> np.ndarray:
    """Return the column as finite float32. Raise BadInput for the first cell that is not one."""
    if values.dtype.kind in "biuf":
        numbers = values.astype(np.float64)
    elif values.dtype.kind in "OUST":
        numbers = np.array([number(value) for value in values], np.float64)
    else:
        numbers = np.full(len(values), np.nan)
    with np.errstate(over="ignore"):
        single = numbers.astype(np.float32)
    bad = ~np.isfinite(single)
    if holes:
        bad[bad] = [as_text(value).strip().lower() not in MISSING for value in values[bad]]
    if faults is not None:
        faults.note(column, bad)
        return np.where(bad, np.float32(np.nan), single)
    if bad.any():
        _refuse_cell(
            path, column, int(bad.argmax()), values, "a finite number (in single precision)"
        )
    return single


def _labels(
    path: Path,
    column: str,
    values: np.ndarray,
    classes: Sequence[str] | None,
    faults: Faults | None = None,
) -> np.ndarray:
    """Return the class numbers, or the targets for regression. Raise BadInput for a bad label."""
    if classes is not None and len(classes) == 0:
        return np.nan_to_num(_numbers(path, column, values, faults=faults))
    if classes is None:
        names = ["0", "1"]
        wanted = (
            "0 or 1; declare other classes with --classes (public: the set of classes must "
            "not be read off the data)"
        )
    else:
        names = list(classes)
        wanted = f"one of the classes {listed(names)}"
    index = {name: k for k, name in enumerate(names)}
    codes, different = factorized(values)
    # A missing value has the code -1, and so the last entry.
    of_code = np.array([_class(value, index) for value in different] + [-1])
    y = of_code[codes]
    if faults is not None:
        faults.note(column, y < 0)
        return y.clip(0).astype(np.int64)
    if (y < 0).any():
        _refuse_cell(path, column, int((y < 0).argmax()), values, wanted)
    return y.astype(np.int64)


def _class(value: Any, index: dict[str, int]) -> int:
    """Return the class number of one label, or -1.

    1, 1.0 and '1.0' are the class '1' unless the class '1.0' is declared.
    """
    text = as_text(value).strip()
    if text not in index and text.endswith(".0"):
        text = text[:-2]
    return index.get(text, -1)


def _refuse_cell(path: Path, column: str, row: int, values: np.ndarray, wanted: str) -> NoReturn:
    """Raise BadInput for the cell in this row."""
    if as_text(values[row]).strip().lower() in MISSING:
        what = "missing, but must be"
    else:
        what = "not"
    raise BadInput(f"{path}, {column}, {where(row)}: the value is {what} {wanted}.")


def where(row: int) -> str:
    """Return the name of a row in sentences."""
    return f"row {row + 1} (counted from 1, without the header)"


def as_text(value: Any) -> str:
    """Return a cell's text, which can be encoded: what is no letter is written as an escape."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    text = str(value)
    if text.isascii():
        return text
    return text.encode(errors="backslashreplace").decode()


def number(value: Any) -> float:
    """Return the nearest float64 to a cell, or NaN.

    The cell alone decides. pandas would choose a type for the column by all its cells.
    """
    if isinstance(value, bool | int):
        return float(value)
    text = as_text(value).strip()
    try:
        if text.isascii() and "_" not in text:
            return float(text)
        return np.nan
    except ValueError:
        return np.nan


def listed(items: Sequence[str]) -> str:
    """Return the items in quotes, separated by commas, the first eight of them."""
    return _joined(list(map(repr, items)))


def _joined(items: Sequence[str]) -> str:
    text = ", ".join(items[:8])
    if len(items) <= 8:
        return text
    return f"{text} and {len(items) - 8} more"
