"""Reads a silo's own file (CSV, Parquet or NPZ) into features and labels, and refuses a bad one
with the place of the cell that is wrong.

No sentence holds a cell, nor the first line of a file that may have no header: sentences end up in
journals, notebooks and screenshots.
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
MISSING = {"", "na", "n/a", "#n/a", "nan", "<na>", "none", "null"}


@dataclass(frozen=True, eq=False, repr=False)
class Loaded:
    """What `load_silos` read: one (x, y) pair for each silo, and what is public about them;
    `Records.of(records_raw, names)` pads them.
    """

    records_raw: list[
        tuple[np.ndarray, np.ndarray]
    ]  # x: (n_i, *features) float32; y: (n_i,) int64, or float32 for regression
    features: tuple[str, ...]
    classes: tuple[str, ...]  # class k has label k; empty for regression
    names: tuple[str, ...]
    cells: list[dict[str, np.ndarray]] = field(
        default_factory=list
    )  # each silo's columns as its file holds them, for a ledger


@dataclass(frozen=True, eq=False, repr=False)
class _Sheet:
    columns: dict[str, np.ndarray]
    label: str
    shape: tuple[int, ...] | None = (
        None  # of one record, where the features are one array rather than columns
    )


def load_silos(
    paths: Sequence[Path],
    label: str,
    *,
    classes: Sequence[str] | None,
    holes: bool = False,
    faults: Faults | None = None,
) -> Loaded:
    """Read one file per silo; afterwards every x is finite, with the first file's columns in their
    order, and every label is a class.

    Refuses a file whose first line is most likely a record: the names of its columns would be
    printed and published as features. `classes` is declared, never read off the data: labels become
    0..k-1 in that order. None takes the labels 0 and 1 only; an empty sequence means regression,
    with float targets. An NPZ may hold arrays x and y, in which case y is the label. With `holes` a
    feature's missing value is NaN; otherwise it is refused. With `faults`, for one file, no record
    is refused: a bad cell is NaN, a bad label is 0, and they are noted there.
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
        said = _sayings(path, sheet)
        order = order or columns
        first = first or said
        if set(columns) != set(order):
            lacks = [c for c in order if c not in columns]
            besides = [c for c in columns if c not in order]
            if lacks:
                parts = [f"lacks {_joined([first[c] for c in lacks])} of {paths[0]}"]
            else:
                parts = []
            if besides:
                parts += [f"has {_joined([said[c] for c in besides])} besides"]
            else:
                parts += []
            raise BadInput(
                f"{path} and {paths[0]} must have the same columns, but {path} "
                f"{' and '.join(parts)}."
            )
        if len(sheet.columns[sheet.label]) == 0:
            raise BadInput(f"{path} has columns but no rows; a silo needs at least one record.")
        y = _labels(path, said[sheet.label], sheet.columns[sheet.label], classes, faults)
        x = np.empty((len(order), len(y)), np.float32)
        for j, column in enumerate(order):
            x[j] = _numbers(path, said[column], sheet.columns[column], holes, faults)
        x = np.ascontiguousarray(x.T)
        records.append((x.reshape(-1, *sheet.shape) if sheet.shape else x, y))
        cells.append(sheet.columns)
    return Loaded(
        records, tuple(order), ("0", "1") if classes is None else tuple(classes), names, cells
    )


def silo_names(paths: Sequence[Path]) -> tuple[str, ...]:
    """A different name for each silo: its file's own, or the whole path where two files are called
    the same.
    """
    if not paths:
        raise BadInput("no files are given; each silo needs one.")
    if twice := repeated([path.resolve() for path in paths]):
        raise BadInput(f"{twice} is given twice; each silo needs its own file.")
    stems = tuple(path.stem for path in paths)
    if repeated(stems):
        return tuple(map(str, paths))
    return stems


def read_cells(
    path: Path, form: Form = PLAIN, faults: Faults | None = None
) -> dict[str, np.ndarray]:
    """Every column of a silo's file by its name, the cells of a CSV, written in this form, as text;
    a schema says what they must be.

    With `faults` a row with another number of cells than the header is a row of empty cells.
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
    """How a CSV seems to be written, by its first line alone, which is the header; with semicolons,
    decimal commas are likely.
    """
    if path.suffix.lower() != ".csv" or not path.is_file():
        return Form()
    with path.open("rb") as file:
        first = file.readline(2**20)
    if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return Form()  # refused in a sentence
    try:
        first.decode("utf-8-sig")
        encoding = "utf-8"
    except UnicodeDecodeError:
        encoding = "latin-1"
    separator = max(",;\t|", key=lambda sign: first.count(sign.encode()))
    return Form(separator, "," if separator == ";" else ".", encoding)


def header(path: Path, form: Form = PLAIN) -> list[str]:
    """The names of the columns, without a look at any record."""
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
    if not path.is_file():
        raise BadInput(
            f"{path} is a folder, not a file." if path.is_dir() else f"{path} does not exist."
        )
    try:
        return readers[suffix](path)
    except UnicodeError:
        raise BadInput(
            f"{path} is not UTF-8 text; save it again as 'CSV UTF-8', or say so in the "
            'schema: encoding = "latin-1".'
        ) from None
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read as {suffix}: {error.strerror or 'the file is damaged'}."
        ) from None
    except (pa.ArrowException, csv.Error, zipfile.BadZipFile, zlib.error, EOFError):
        raise BadInput(
            f"{path} is not a whole {suffix} file; it may be damaged or have been cut short."
        ) from None


def _csv_header(
    path: Path, form: Form = PLAIN, *, lenient: bool = False
) -> tuple[list[str], list[str]]:
    """The first row as it stands, and the names in it. With `lenient` no later byte is refused."""
    if form.encoding == "utf-8":
        encoding = "utf-8-sig"
    else:
        encoding = form.encoding
    other = "replace" if lenient else "strict"
    with path.open(
        encoding=encoding,
        errors="surrogateescape" if form.encoding == "utf-8" else other,
        newline="",
    ) as file:
        header = next((row for row in csv.reader(file, delimiter=form.separator) if row), None)
    if header is None:
        raise BadInput(f"{path} is empty; it needs a header and at least one row.")
    names = [
        name.encode().decode().strip() for name in header
    ]  # fails if the header itself, not just some cell, is not UTF-8
    for sign, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(names) < 3 and sign != form.separator and any(sign in name for name in names):
            said = json.dumps(sign)
            raise BadInput(
                f"{path}: the cells are separated by {word}; save it again with commas, "
                "and with points in decimal numbers, or say so in the schema: "
                f"separator = {said}{', decimal = ' + json.dumps(',') if sign == ';' else ''}."
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
    """A number with a decimal comma, 1.234,5 or 12,5, with a point; everything else as it is. The
    cell alone decides.
    """
    if "," in text and re.fullmatch(r"\s*[-+]?(\d+|\d{1,3}(\.\d{3})+),\d+([eE][-+]?\d+)?\s*", text):
        return text.replace(".", "").replace(",", ".")
    return text


def _column(table: pa.Table, i: int, faults: Faults | None) -> np.ndarray:
    column = column_of(table, i)
    return faults.restored(column) if faults else column


def _read_csv(path: Path, label: str, text_label: bool, faults: Faults | None = None) -> _Sheet:
    header, names = _csv_header(path)
    _check_columns(path, names, label)
    labels = {name for name in header if name.strip() == label}
    types = {
        name: pa.string() if text_label and name in labels else pa.float64() for name in header
    }
    try:
        table = pacsv.read_csv(path, convert_options=pacsv.ConvertOptions(column_types=types))
    except (
        pa.ArrowInvalid
    ):  # some cell is bad: take all as text, and let the checks of each column find and name it
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
    # One byte that is no letter stops no file, and nothing prints the row that it is in.
    if faults is not None or encoding == "utf8":
        text = _as_utf8(path.read_bytes(), form.encoding)
        content = io.BytesIO(text)
        encoding = "utf8"
    # one long cell stops no file either: the reader's blocks are as long as the whole
    block = None
    if faults is not None:
        block = min(2**31 - 1, max(2**20, len(text) + 1))
    reading = pacsv.ReadOptions(use_threads=False, encoding=encoding, block_size=block)
    table = pacsv.read_csv(content, reading, options, types)  # one thread, or rows have no number
    if faults is not None:
        faults.ragged = np.array([row.number - 2 for row in ragged], np.int64)
    elif ragged:
        row = ragged[0]
        what = (
            f"there are {row.actual_columns} cells, but the header names "
            f"{row.expected_columns} columns"
        )
        raise BadInput(f"{path}, {where(row.number - 2)}: {what}.")
    for i, name in enumerate(header if label is not None else ()):
        with contextlib.suppress(
            pa.ArrowInvalid
        ):  # only the columns with a bad cell stay text, and only they are searched cell by cell
            if name.strip() != label:
                table = table.set_column(
                    i, name, table.column(i).cast(pa.string()).cast(pa.float64())
                )
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
    table = parquet.ParquetFile(
        path
    ).read()  # not read_table, which adds columns that it finds in the path
    _check_names(path, _parquet_names(table.column_names))
    for column in table.schema:
        if isinstance(column.type, pa.BaseExtensionType):
            kind = column.type.storage_type
        else:
            kind = column.type
        if pa.types.is_nested(kind.value_type if pa.types.is_dictionary(kind) else kind):
            raise BadInput(
                f"{path}: column {column.name!r} holds lists or structs; each of its cells "
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
    """Return a column's cells. With `faults` one that cannot be read, such as a date in a year of
    five digits, is missing, and noted there.
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
    except (
        ValueError,
        AttributeError,
        TypeError,
    ):  # numpy's ways to say: pickled objects, or not an archive
        raise BadInput(
            f"{path} is not an archive of plain arrays of numbers or text; pickled objects "
            "are never loaded."
        ) from None


def _npz_cells(path: Path) -> dict[str, np.ndarray]:
    arrays = _npz_arrays(path)
    if len({array.shape for array in arrays.values()}) > 1 or any(
        array.ndim != 1 for array in arrays.values()
    ):
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
    if twice := repeated(names):
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
            f"{path} seems to have no header, for the label's column is named by a number "
            "or a class; give each column a name."
        )
    counted = suffix == ".parquet" and set(features) <= set(
        map(str, range(len(features) + 1))
    )  # as pandas names columns without names
    if suffix != ".npz" and all(map(_is_number, features)) and not counted:
        raise BadInput(
            f"{path} seems to have no header, for its columns are named by numbers; give "
            "each column a name."
        )


def _is_number(name: str) -> bool:
    return name.lower() in MISSING or not np.isnan(number(name))


def _sayings(path: Path, sheet: _Sheet) -> dict[str, str]:
    """What to call each column: by number where its name may be a cell, as in a CSV; the label's
    name is the user's own word.
    """
    numbered = path.suffix.lower() == ".csv"
    return {
        name: f"column {i}" if numbered and name != sheet.label else f"column {name!r}"
        for i, name in enumerate(sheet.columns, 1)
    }


def _numbers(
    path: Path,
    column: str,
    values: np.ndarray,
    holes: bool = False,
    faults: Faults | None = None,
) -> np.ndarray:
    """The column as finite float32, or a refusal that names the first cell that is not one."""
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
    if classes is not None and len(classes) == 0:
        return np.nan_to_num(_numbers(path, column, values, faults=faults))
    index = {name: k for k, name in enumerate(("0", "1") if classes is None else classes)}
    codes, found = factorized(values)
    of_code = np.array(
        [_class(value, index) for value in found] + [-1]
    )  # a missing value has code -1, and so the last entry
    y = of_code[codes]
    if faults is not None:
        faults.note(column, y < 0)
        return y.clip(0).astype(np.int64)
    if (y < 0).any():
        wanted = f"one of the classes {listed(list(index))}"
        if classes is None:
            wanted = (
                "0 or 1; declare other classes with --classes (public: the set of classes must "
                "not be read off the data)"
            )
        _refuse_cell(path, column, int((y < 0).argmax()), values, wanted)
    return y.astype(np.int64)


def _class(value: Any, index: dict[str, int]) -> int:
    """Class number of one label, or -1; 1, 1.0 and '1.0' are the class '1' unless the class '1.0'
    is declared.
    """
    text = as_text(value).strip()
    if text not in index and text.endswith(".0"):
        text = text[:-2]
    return index.get(text, -1)


def _refuse_cell(path: Path, column: str, row: int, values: np.ndarray, wanted: str) -> NoReturn:
    if as_text(values[row]).strip().lower() in MISSING:
        what = "missing, but must be"
    else:
        what = "not"
    raise BadInput(f"{path}, {column}, {where(row)}: the value is {what} {wanted}.")


def where(row: int) -> str:
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
    """The nearest float64 to a cell, or NaN; the cell alone decides, where pandas would choose a
    way for the column by all its cells.
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
    return _joined(list(map(repr, items)))


def _joined(items: Sequence[str]) -> str:
    text = ", ".join(items[:8])
    if len(items) <= 8:
        return text
    return f"{text} and {len(items) - 8} more"
