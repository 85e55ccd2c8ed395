"""`silodp silo check`: what is wrong with a silo's file, in sentences for the person who can mend
it. Local: nothing is sent, and no budget is spent.

Every sentence has the column, the row and what to do. A cell is shown only where it is one of the
usual codes for a missing value, below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Column, Form, Schema
from silodp.silo.data.files import as_text, header, listed, number, read_cells
from silodp.silo.data.persons import grouped, whose
from silodp.silo.data.tables import blanked, check_columns, coded, label_of, read_table

CODES = (
    "?",
    "-",
    ".",
    "*",
    "-1",
    "-9",
    "-99",
    "-999",
    "-9999",
    "99",
    "999",
    "9999",
    "unknown",
    "missing",
    "not known",
    "n.a.",
    "k.a.",
    "(null)",
)
"""What often stands for a missing value; named in a sentence only where it is no value that the
column may have.
"""
FACTORS = {
    10: "10 times too large, as mm for cm",
    100: "100 times too large, as cm for m",
    1000: "1000 times too large, as g for kg",
    0.1: "10 times too small, as cm for mm",
    0.01: "100 times too small, as m for cm",
    0.001: "1000 times too small, as kg for g",
    2.54: "2.54 times too large, as cm for inches",
    1 / 2.54: "2.54 times too small, as inches for cm",
    2.20462: "2.2 times too large, as pounds for kg",
    1 / 2.20462: "2.2 times too small, as kg for pounds",
    18.018: "18 times too large, as mg/dl for mmol/l of glucose",
    1 / 18.018: "18 times too small, as mmol/l for mg/dl of glucose",
    88.42: "88 times too large, as µmol/l for mg/dl of creatinine",
    1 / 88.42: "88 times too small, as mg/dl for µmol/l of creatinine",
}
DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([ T].*)?|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})( .*)?"
)
COMMA = re.compile(r"[-+]?\d+,\d+")
FAR = 100.0
"""So many widths of its range beyond it, a number is a mistake and no extreme."""


@dataclass(frozen=True)
class Finding:
    """One sentence; with `stops` the file cannot be trained on as it is, or would teach something
    wrong.
    """

    stops: bool
    sentence: str


def check(path: Path, schema: Schema) -> list[Finding]:
    """Everything that is found, what stops first."""
    found: list[Finding] = []
    try:
        if schema.images:
            table = read_table(path, schema)
            return records_said(table.x, table.y, schema.features, schema.label.classes)[:1]
        found += _shape(path, schema.form)
        if found:
            cells = {}
        else:
            cells = read_cells(path, schema.form)
    except BadInput as error:
        return [*found, Finding(True, _sentence(error))]
    if found:
        return found
    said = [_told(check_columns, path, cells, schema)]
    own = {name: cells[name] for name in schema.own if name in cells}
    cells = blanked(cells, schema.missing_codes) | own  # no code stands for a person
    if not len(next(iter(cells.values()), ())):
        return [Finding(True, f"{path} has columns but no rows; a silo needs at least one record.")]
    columns = [column for column in schema.columns if column.name in cells]
    for column in columns:
        said += _column(path, column, cells[column.name])
    if all(name in cells for name in schema.label.columns):
        said += _label(path, schema, cells)
    found = [finding for finding in said if finding]
    if not any(finding.stops for finding in found):
        rows = np.nan_to_num(
            np.column_stack([coded(path, column, cells[column.name]) for column in columns]),
            nan=-1e30,
        )
        if schema.person:
            people = len(grouped(cells[schema.person.column], schema.person).ids)
        else:
            people = None
        found += records_said(
            rows,
            label_of(path, schema, cells),
            [column.name for column in columns],
            schema.label.classes,
            people,
            copies=_copies(cells),
        )
        found += [
            Finding(False, sentence) for sentence in whose(cells, schema)[1:]
        ]  # the first is no finding
    return sorted(found, key=lambda finding: not finding.stops)


def records_said(
    x: np.ndarray,
    y: np.ndarray,
    columns: Sequence[str],
    classes: Sequence[str],
    persons: int | None = None,
    copies: int | None = None,
) -> list[Finding]:
    """What an operator should know of records that can be read: few, copies, constant or numbering
    columns, classes that are not there, an order.

    x and y are of rows; where the rows are those of so many `persons`, copies and the rows' order
    do no harm.
    """
    n = len(y)
    said = []
    if (few := n if persons is None else persons) < 100:
        said.append(
            f"There are {few} records only: noise for such a budget will drown most of "
            "what they say."
        )
    if copies is None:
        copies = n - len(np.unique(np.column_stack([x, y]), axis=0))
    else:
        copies = copies
    if copies and persons is None:
        said.append(
            f"{copies} records are copies of others: a person with several records is "
            "protected less; use one row per person."
        )
    spread = x.max(0) - x.min(0)
    if same := [columns[int(j)] for j in np.flatnonzero(spread == 0)[:5]]:
        said.append(
            f"Columns that are the same in every record tell a model nothing: {', '.join(same)}."
        )
    for j in range(x.shape[1]):
        if (
            n > 20
            and bool((x[:, j] == np.round(x[:, j])).all())
            and spread[j] == n - 1
            and len(np.unique(x[:, j])) == n
        ):
            said.append(
                f"Column {columns[j]} numbers the records; leave such a column out of the features."
            )
    empty = [name for k, name in enumerate(classes) if not bool((y == k).any())]
    if empty and len(empty) == len(classes) - 1:
        said.append(
            f"The label has one class only: there is no record of {listed(empty)}; is the "
            "file whole, and not one group of patients?"
        )
    elif empty:
        said.append(
            f"There is no record of {'the class' if len(empty) == 1 else 'the classes'} "
            f"{', '.join(empty)}."
        )
    elif persons is None and classes and n > 20 and (np.diff(y.astype(float)) >= 0).all():
        said.append(
            "The rows are sorted by the label: a record's position decides its batch, and "
            "must follow from no value; bring them in another order."
        )
    return [Finding(False, sentence) for sentence in said]


def _copies(cells: dict[str, np.ndarray]) -> int:
    """Rows that are alike in every column, those that the schema ignores too: with a number of its
    own a row is nobody's copy.
    """
    rows = list(
        zip(*([as_text(cell).strip() for cell in column] for column in cells.values()), strict=True)
    )
    return len(rows) - len(set(rows))


# --- the file ------------------------------------------------------------------------------------


def _shape(path: Path, form: Form) -> list[Finding]:
    """What no reader is told: that it is a spreadsheet, or that a cell, and not the header, is in
    another encoding.
    """
    if path.suffix.lower() in (".xlsx", ".xls", ".ods"):
        return [Finding(True, f"{path} is a spreadsheet; save its sheet as 'CSV UTF-8'.")]
    if path.suffix.lower() != ".csv" or not path.is_file():
        return []
    header(path, form)  # says what is wrong with it
    if form.encoding != "utf-8":
        return []
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        bad = len((error.object[: error.start] + b"?").splitlines())
        said = "save it again as 'CSV UTF-8', or say so in the schema: encoding = \"latin-1\""
        return [
            Finding(
                True, f"{path} is not UTF-8 text; {said} (the first line that is not is {bad})."
            )
        ]
    return []


def _told(check: Callable[..., object], *arguments: object) -> Finding | None:
    try:
        check(*arguments)
    except BadInput as error:
        return Finding(True, _sentence(error))
    return None


def _sentence(error: BadInput) -> str:
    text = str(error)
    if text.endswith((".", "?")):
        return text
    return f"{text}."


# --- a column ------------------------------------------------------------------------------------


def _column(path: Path, column: Column, cells: np.ndarray) -> list[Finding | None]:
    texts = [as_text(cell).strip() for cell in cells]
    if stop := _codes(path, column, texts) or (
        _numbers_as_text(path, column, texts)
        if column.type == "number"
        else _spelling(path, column, texts)
    ):
        return [stop]
    if stop := _told(coded, path, column, cells):
        return [stop]
    numbers = coded(path, column, cells)
    if column.type == "number" and not np.isnan(numbers).all():
        return [_units(path, column, numbers[~np.isnan(numbers)], numbers)]
    return []


def _codes(path: Path, column: Column, texts: Sequence[str]) -> Finding | None:
    low, high = column.range
    for code in CODES:
        value = number(code)
        if column.type == "number":
            allowed = low <= value <= high
        else:
            allowed = code in column.categories
        if allowed:
            rows = []
        else:
            rows = [
                k for k, text in enumerate(texts) if code in (text.lower(), text.removesuffix(".0"))
            ]
        if (
            rows
            and (np.isnan(value) or len(rows) > 1)
            and (column.type != "boolean" or np.isnan(value))
        ):
            said = (
                f"{code!r} seems to stand for a missing value; list it in the schema, "
                f'missing_codes = ["{code}"], and say what a missing'
            )
            return _at(path, column, rows, f"{said} value becomes, or mend the cells.")
    return None


def _numbers_as_text(path: Path, column: Column, texts: Sequence[str]) -> Finding | None:
    bad = [k for k, text in enumerate(texts) if text and np.isnan(number(text))]
    for pattern, what in (
        (
            DATE,
            (
                "the cells are dates; give a number in their place, such as the age in years, "
                "or the days since an event"
            ),
        ),
        (COMMA, "the decimal sign is a comma; write 36.6, and not 36,6"),
        (
            re.compile(r"[<>≤≥]\s*[\d.]+"),
            (
                "the cell is a bound, such as 'below 5'; write a number, by a rule that all "
                "silos share"
            ),
        ),
        (
            re.compile(r"[-+]?[\d.]+\s*[^\d\s.,:/-][^\d]*"),
            "there is a unit, or a sign, after the number; write the number alone",
        ),
    ):
        if rows := [k for k in bad if pattern.fullmatch(texts[k])]:
            return _at(path, column, rows, f"{what}.")
    return None


def _spelling(path: Path, column: Column, texts: Sequence[str]) -> Finding | None:
    known = set(column.categories)
    folded = {c.casefold() for c in column.categories}
    if rows := [
        k for k, text in enumerate(texts) if text not in known and text.casefold() in folded
    ]:
        return _at(
            path,
            column,
            rows,
            "the value is a category in other capital letters; write it as the schema does.",
        )
    return None


def _units(path: Path, column: Column, values: np.ndarray, rows: np.ndarray) -> Finding | None:
    low, high = column.range
    out = (values < low) | (values > high)
    bounds = f"the schema's range [{low:g}, {high:g}]"
    far = np.flatnonzero(
        (rows < low - FAR * (high - low)) | (rows > high + FAR * (high - low))
    ).tolist()
    many = f"{int(out.sum())} of {len(values)} values are outside {bounds}"
    if out.mean() > 0.5:
        fits = [
            words
            for factor, words in FACTORS.items()
            if ((values / factor >= low) & (values / factor <= high)).mean() > 0.95
        ]
        other = f"; they look {fits[0]}" if fits else ""
        return _at(path, column, (), f"{many}{other}: bring them into its unit.")
    if far:
        return _at(
            path,
            column,
            far,
            (
                f"the value is beyond all that {bounds} allows; is it a slip, or a code for a "
                "missing value?"
            ),
        )
    if out.mean() > 0.05:
        return _at(
            path, column, (), f"{many}, and will be clipped; is it wide enough?", stops=False
        )
    width = float(np.quantile(values, 0.95) - np.quantile(values, 0.05))
    if len(values) > 20 and 0 < width < 0.02 * (high - low):
        return _at(
            path,
            column,
            (),
            f"nine of ten values lie within a fiftieth of {bounds}; are they in another unit?",
            stops=False,
        )
    return None


def _label(path: Path, schema: Schema, cells: dict[str, np.ndarray]) -> list[Finding | None]:
    label = schema.label
    if label.task == "regression":
        column = Column(label.columns[0], "number", range=label.range)
        return _column(path, column, cells[column.name])
    if label.classes:
        column = Column(label.columns[0], "category", categories=label.classes)
        texts = [as_text(cell).strip() for cell in cells[column.name]]
        if stop := _codes(path, column, texts) or _spelling(path, column, texts):
            return [stop]
    return [_told(label_of, path, schema, cells)]


def _at(
    path: Path, column: Column, rows: Sequence[int], what: str, *, stops: bool = True
) -> Finding:
    """What was found in a column, and in which of its rows, where it is not in most of them."""
    if rows:
        row = f", row {rows[0] + 1}{f' and {len(rows) - 1} more' if len(rows) > 1 else ''}"
    else:
        row = ""
    return Finding(stops, f"{path}, column {column.name!r}{row}: {what}")
