"""Find what is wrong with a silo's file, for `silodp silo check`.

The sentences are for the person who can fix the file. The check is local: nothing is sent, and no
budget is spent. Every sentence has the column, the row and what to do. A cell is shown only if it
is one of the usual codes for a missing value, below.
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
"""Codes that often stand for a missing value. A sentence names one only if the column may not have
it as a value.
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
NOT_NUMBERS = (
    (
        DATE,
        "the cells are dates; give a number in their place, such as the age in years, or the "
        "days since an event.",
    ),
    (COMMA, "the decimal sign is a comma; write 36.6, and not 36,6."),
    (
        re.compile(r"[<>≤≥]\s*[\d.]+"),
        "the cell is a bound, such as 'below 5'; write a number, by a rule that all silos share.",
    ),
    (
        re.compile(r"[-+]?[\d.]+\s*[^\d\s.,:/-][^\d]*"),
        "there is a unit, or a sign, after the number; write the number alone.",
    ),
)
"""Forms of a cell in a column of numbers, each with what is wrong and what to do."""
FAR = 100.0
"""A number that is this many widths of its range beyond the range is a mistake, not an extreme."""


@dataclass(frozen=True)
class Finding:
    """One sentence about a file.

    With `stops`, the file cannot be trained on as it is, or would teach a model something wrong.
    """

    stops: bool
    sentence: str


def check(path: Path, schema: Schema) -> list[Finding]:
    """Return everything that is wrong with the file, what stops training first."""
    try:
        if schema.images:
            table = read_table(path, schema)
            return records_said(table.x, table.y, schema.features, schema.label.classes)[:1]
        findings = _shape(path, schema.form)
        if findings:
            return findings
        cells = read_cells(path, schema.form)
    except BadInput as error:
        return [Finding(True, _sentence(error))]
    results = [_error_of(check_columns, path, cells, schema)]
    ids = {name: cells[name] for name in schema.own if name in cells}
    cells = blanked(cells, schema.missing_codes) | ids  # no code stands for a person
    if not len(next(iter(cells.values()), ())):
        return [Finding(True, f"{path} has columns but no rows; a silo needs at least one record.")]
    columns = [column for column in schema.columns if column.name in cells]
    for column in columns:
        results += _column(path, column, cells[column.name])
    if all(name in cells for name in schema.label.columns):
        results += _label(path, schema, cells)
    findings = [finding for finding in results if finding]
    if not any(finding.stops for finding in findings):
        rows = np.nan_to_num(
            np.column_stack([coded(path, column, cells[column.name]) for column in columns]),
            nan=-1e30,
        )
        if schema.person:
            people = len(grouped(cells[schema.person.column], schema.person).ids)
        else:
            people = None
        findings += records_said(
            rows,
            label_of(path, schema, cells),
            [column.name for column in columns],
            schema.label.classes,
            people,
            copies=_copies(cells),
        )
        # The first sentence is the unit of privacy, which is no finding.
        findings += [Finding(False, sentence) for sentence in whose(cells, schema)[1:]]
    return sorted(findings, key=lambda finding: not finding.stops)


def records_said(
    x: np.ndarray,
    y: np.ndarray,
    columns: Sequence[str],
    classes: Sequence[str],
    persons: int | None = None,
    copies: int | None = None,
) -> list[Finding]:
    """Return what an operator should read about records that can be used.

    The findings are: few records, copies, columns that are constant or number the records, classes
    without records, and sorted rows. x and y are of rows. If the rows belong to `persons` persons,
    copies and the order of the rows do no harm.
    """
    n = len(y)
    sentences = []
    if persons is None:
        records = n
    else:
        records = persons
    if records < 100:
        sentences.append(
            f"There are only {records} records: the noise will hide most of what a model could "
            "learn from them."
        )
    if copies is None:
        copies = n - len(np.unique(np.column_stack([x, y]), axis=0))
    if copies and persons is None:
        sentences.append(
            f"{copies} records are copies of others: a person with several records is "
            "protected less; use one row per person."
        )
    spread = x.max(0) - x.min(0)
    constant = [columns[int(j)] for j in np.flatnonzero(spread == 0)[:5]]
    if constant:
        sentences.append(
            "Columns that are the same in every record are of no use to a model: "
            f"{', '.join(constant)}."
        )
    for j in range(x.shape[1]):
        if (
            n > 20
            and bool((x[:, j] == np.round(x[:, j])).all())
            and spread[j] == n - 1
            and len(np.unique(x[:, j])) == n
        ):
            sentences.append(
                f"Column {columns[j]} numbers the records; leave such a column out of the features."
            )
    empty = [name for k, name in enumerate(classes) if not bool((y == k).any())]
    if empty and len(empty) == len(classes) - 1:
        sentences.append(
            f"The label has one class only: there is no record of {listed(empty)}; is the "
            "file complete, and not one group of patients?"
        )
    elif len(empty) == 1:
        sentences.append(f"There is no record of the class {empty[0]}.")
    elif empty:
        sentences.append(f"There is no record of the classes {', '.join(empty)}.")
    elif persons is None and classes and n > 20 and (np.diff(y.astype(float)) >= 0).all():
        sentences.append(
            "The rows are sorted by the label: a record's position decides its batch, and "
            "must not depend on any value; bring the rows into another order."
        )
    return [Finding(False, sentence) for sentence in sentences]


def _copies(cells: dict[str, np.ndarray]) -> int:
    """Return how many rows equal another row in every column, also in those that the schema
    ignores.

    A row with a number of its own is therefore no copy.
    """
    texts = ([as_text(cell).strip() for cell in column] for column in cells.values())
    rows = list(zip(*texts, strict=True))
    return len(rows) - len(set(rows))


# --- the file ------------------------------------------------------------------------------------


def _shape(path: Path, form: Form) -> list[Finding]:
    """Return findings about the file's form that no reader reports.

    These are a spreadsheet, and a cell after the header in another encoding.
    """
    if path.suffix.lower() in (".xlsx", ".xls", ".ods"):
        return [Finding(True, f"{path} is a spreadsheet; save its sheet as 'CSV UTF-8'.")]
    if path.suffix.lower() != ".csv" or not path.is_file():
        return []
    header(path, form)  # raises BadInput if the header is wrong
    if form.encoding != "utf-8":
        return []
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        line = len((error.object[: error.start] + b"?").splitlines())
        return [
            Finding(
                True,
                f"{path} is not UTF-8 text; save it again as 'CSV UTF-8', or declare it in the "
                f'schema: encoding = "latin-1" (the first line that is not is {line}).',
            )
        ]
    return []


def _error_of(check: Callable[..., object], *arguments: object) -> Finding | None:
    """Return the error that this check raises as a finding, or None."""
    try:
        check(*arguments)
    except BadInput as error:
        return Finding(True, _sentence(error))
    return None


def _sentence(error: BadInput) -> str:
    """Return the error's text as a sentence."""
    text = str(error)
    if text.endswith((".", "?")):
        return text
    return f"{text}."


# --- a column ------------------------------------------------------------------------------------


def _column(path: Path, column: Column, cells: np.ndarray) -> list[Finding | None]:
    """Return what is wrong with one column."""
    texts = [as_text(cell).strip() for cell in cells]
    stop = _codes(path, column, texts)
    if not stop and column.type == "number":
        stop = _numbers_as_text(path, column, texts)
    elif not stop:
        stop = _spelling(path, column, texts)
    if not stop:
        stop = _error_of(coded, path, column, cells)
    if stop:
        return [stop]
    numbers = coded(path, column, cells)
    if column.type == "number" and not np.isnan(numbers).all():
        return [_units(path, column, numbers[~np.isnan(numbers)], numbers)]
    return []


def _codes(path: Path, column: Column, texts: Sequence[str]) -> Finding | None:
    """Return a finding if cells seem to have a code for a missing value, or None."""
    low, high = column.range
    for code in CODES:
        value = number(code)
        if column.type == "number":
            allowed = low <= value <= high
        else:
            allowed = code in column.categories
        if allowed:
            continue
        rows = [
            k for k, text in enumerate(texts) if code in (text.lower(), text.removesuffix(".0"))
        ]
        # A number that occurs once may be a slip, and in a boolean column it may be a value.
        is_number = not np.isnan(value)
        if is_number and (len(rows) == 1 or column.type == "boolean"):
            continue
        if rows:
            return _at(
                path,
                column,
                rows,
                f"{code!r} seems to stand for a missing value; list it in the schema, "
                f'missing_codes = ["{code}"], and state what a missing value becomes, or fix '
                "the cells.",
            )
    return None


def _numbers_as_text(path: Path, column: Column, texts: Sequence[str]) -> Finding | None:
    """Return a finding if cells are dates, bounds, or numbers in another form, or None."""
    bad = [k for k, text in enumerate(texts) if text and np.isnan(number(text))]
    for pattern, what in NOT_NUMBERS:
        rows = [k for k in bad if pattern.fullmatch(texts[k])]
        if rows:
            return _at(path, column, rows, what)
    return None


def _spelling(path: Path, column: Column, texts: Sequence[str]) -> Finding | None:
    """Return a finding if cells have a category in other capital letters, or None."""
    folded = {category.casefold() for category in column.categories}
    rows = [
        k
        for k, text in enumerate(texts)
        if text not in column.categories and text.casefold() in folded
    ]
    if rows:
        return _at(
            path,
            column,
            rows,
            "the value is a category in other capital letters; write it as the schema does.",
        )
    return None


def _units(path: Path, column: Column, values: np.ndarray, rows: np.ndarray) -> Finding | None:
    """Return a finding if the numbers seem to be in another unit or beyond the public range, or
    None.
    """
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
        if fits:
            many = f"{many}; they look {fits[0]}"
        return _at(path, column, (), f"{many}: bring them into its unit.")
    if far:
        return _at(
            path,
            column,
            far,
            (
                f"the value is far beyond {bounds}; is it a typing error, or a code for a "
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
    """Return what is wrong with the label."""
    label = schema.label
    if label.task == "regression":
        column = Column(label.columns[0], "number", range=label.range)
        return _column(path, column, cells[column.name])
    if label.classes:
        column = Column(label.columns[0], "category", categories=label.classes)
        texts = [as_text(cell).strip() for cell in cells[column.name]]
        stop = _codes(path, column, texts) or _spelling(path, column, texts)
        if stop:
            return [stop]
    return [_error_of(label_of, path, schema, cells)]


def _at(
    path: Path, column: Column, rows: Sequence[int], what: str, *, stops: bool = True
) -> Finding:
    """Return a finding about a column and the rows where it occurs, if not in most of them."""
    place = f"{path}, column {column.name!r}"
    if rows:
        place = f"{place}, row {rows[0] + 1}"
    if len(rows) > 1:
        place = f"{place} and {len(rows) - 1} more"
    return Finding(stops, f"{place}: {what}")
