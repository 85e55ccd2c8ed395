"""Find what is wrong with a silo's file, for `silodp silo check`.

The sentences are for the person who can fix the file. The check is local: nothing is sent, and no
budget is spent. Every sentence has the column, the row and what to do. A cell is shown only if it
is one of the usual codes for a missing value, below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Column, Form, Schema
from silodp.silo.data.faults import Faults
from silodp.silo.data.files import (
    MISSING,
    as_text,
    form_of,
    header,
    listed,
    not_utf8,
    number,
    read_cells,
)
from silodp.silo.data.persons import grouped, whose
from silodp.silo.data.suspicious import many_categories, other_unit, predicts_alone, second_unit
from silodp.silo.data.tables import (
    ABSENT,
    blanked,
    coded,
    label_of,
    read_table,
    refuse,
    wrong_columns,
)

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
    """Return everything that is wrong with the file in one pass, what stops training first."""
    if schema.images:
        try:
            table = read_table(path, schema)
        except BadInput as error:
            return [Finding(True, _sentence(error))]
        return records_said(table.x, table.y, schema.features, schema.label.classes)[:1]
    findings, cells, ragged = _read(path, schema.form)
    if cells is None:
        return findings
    columns = [column for column in schema.columns if column.name in cells]
    findings += [Finding(True, sentence) for sentence in wrong_columns(path, cells, schema)]
    labelled = all(name in cells for name in schema.label.columns)
    if not columns and not labelled:
        return findings
    ids = {name: cells[name] for name in schema.own if name in cells}
    cells = blanked(cells, schema.missing_codes) | ids  # no code stands for a person
    n = len(next(iter(cells.values())))
    if not n:
        return [Finding(True, f"{path} has columns but no rows; a silo needs at least one record.")]
    for column in columns:
        findings += _column(path, column, cells[column.name], ragged)
    if labelled:
        findings += _label(path, schema, cells, ragged)
    findings += _records(path, schema, columns, cells)
    return sorted(findings, key=lambda finding: not finding.stops)


def _records(
    path: Path, schema: Schema, columns: Sequence[Column], cells: dict[str, np.ndarray]
) -> list[Finding]:
    """Return findings about the records, by the cells that can be read."""
    n = len(next(iter(cells.values())))
    faults = Faults()
    numbers = {column.name: coded(path, column, cells[column.name], faults) for column in columns}
    readable = [name for name in numbers if not np.any(faults.cells.get(name, False))]
    if all(name in cells for name in schema.label.columns):
        y = label_of(path, schema, cells, faults)
        labelled = ~faults.bad(schema.label.columns, n)
        classes = schema.label.classes
    else:
        y = np.zeros(n)
        labelled = np.zeros(n, bool)
        classes = ()
    people = None
    if schema.person and schema.person.column in cells:
        people = len(grouped(cells[schema.person.column], schema.person).ids)
    rows = np.column_stack([np.zeros((n, 0)), *(numbers[name] for name in readable)])
    findings = records_said(
        np.nan_to_num(rows, nan=-1e30), y, readable, classes, people, copies=_copies(cells)
    )
    for column in columns:
        values = numbers[column.name][labelled]
        if predicts_alone(values, y[labelled], schema.label.task):
            findings.append(_leak(path, column))
    if schema.person is None or people is not None:
        # The first sentence is the unit of privacy, which is no finding.
        findings += [Finding(False, sentence) for sentence in whose(cells, schema)[1:]]
    return findings


def _leak(path: Path, column: Column) -> Finding:
    """Return the finding about a column that predicts the label almost alone."""
    return _at(
        path,
        column,
        (),
        "it predicts the label almost alone. If it is written down only once the outcome is "
        "known, a model with it fails on new records: remove it from the schema, or list it in "
        "`ignore`.",
        stops=False,
    )


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


def _read(path: Path, form: Form) -> tuple[list[Finding], dict[str, np.ndarray] | None, np.ndarray]:
    """Return findings about the file's form, its cells, and the rows with too few or many cells.

    A file in another form is read by its own, so that its cells are checked in the same pass. The
    cells are None if the file cannot be read.
    """
    faults = Faults()
    if path.suffix.lower() in (".xlsx", ".xls", ".ods"):
        words = f"{path} is a spreadsheet; save its sheet as 'CSV UTF-8'."
        return [Finding(True, words)], None, faults.ragged
    findings = []
    if path.suffix.lower() == ".csv" and path.is_file():
        if error := _error_of(header, path, form):
            findings.append(error)
            own = form_of(path)
            findings += _also_declare(path, form, own, error.sentence)
            form = own
        findings += _not_utf8(path, form)
    try:
        return findings, read_cells(path, form), faults.ragged
    except BadInput as error:
        if not findings:
            findings.append(Finding(True, _sentence(error)))
    try:
        return findings, read_cells(path, form, faults), faults.ragged
    except BadInput:
        return findings, None, faults.ragged


def _also_declare(path: Path, form: Form, own: Form, said: str) -> list[Finding]:
    """Return a finding about what else is different in the form of a file, after one sentence."""
    fields = [
        f"{name} = {json.dumps(value)}"
        for name, value in asdict(own).items()
        if value != getattr(form, name) and f"{name} =" not in said
    ]
    if not fields:
        return []
    words = f"{path} differs in its form too; save it again, or declare it: {', '.join(fields)}."
    return [Finding(True, words)]


def _not_utf8(path: Path, form: Form) -> list[Finding]:
    """Return a finding about a cell after the header in another encoding, which no reader
    reports.
    """
    if form.encoding != "utf-8":
        return []
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        line = len((error.object[: error.start] + b"?").splitlines())
        return [Finding(True, f"{not_utf8(path)} (the first line that is not is {line}).")]
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


def _column(path: Path, column: Column, cells: np.ndarray, ragged: np.ndarray) -> list[Finding]:
    """Return everything that is wrong with one column. Ragged rows are reported already."""
    texts = [as_text(cell).strip() for cell in cells]
    groups = _codes(column, texts)
    if column.type == "number":
        groups += _numbers_as_text(texts)
    else:
        groups += _spelling(column, texts)
    findings = []
    reported = np.zeros(len(texts), bool)
    reported[ragged] = True
    for rows, what in groups:
        if left := [row for row in rows if not reported[row]]:
            findings.append(_at(path, column, left, what))
            reported[left] = True
    gone = np.array([text.lower() in MISSING for text in texts]) & ~reported
    if column.missing is None and gone.any():
        findings.append(_error_of(refuse, path, column.name, gone, ABSENT))
        reported |= gone
    findings.append(_error_of(coded, path, column, _with_valid(column, cells, reported)))
    numbers = coded(path, column, cells, Faults())
    if column.type == "number" and not np.isnan(numbers).all():
        findings.append(_units(path, column, numbers[~np.isnan(numbers)], numbers))
    if column.type == "category" and (words := many_categories(column, texts)):
        findings.append(_at(path, column, (), words, stops=False))
    return [finding for finding in findings if finding]


def _with_valid(column: Column, cells: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the cells with a valid one in these rows, so that a reader stops at another row."""
    if not rows.any():
        return cells
    valid = {"number": f"{column.range[0]!r}", "boolean": "true"}.get(column.type)
    if valid is None:
        valid = column.categories[0]
    return np.where(rows, valid, cells.astype(object))


Group = tuple[list[int], str]
"""The rows of one kind of bad cell, and what is wrong with them."""


def _codes(column: Column, texts: Sequence[str]) -> list[Group]:
    """Return the cells that seem to be codes for a missing value, by code."""
    low, high = column.range
    groups = []
    for code in CODES:
        value = number(code)
        if column.type == "number":
            allowed = low <= value <= high
        else:
            allowed = code in column.places
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
            what = (
                f"{code!r} seems to stand for a missing value; list it in the schema, "
                f'missing_codes = ["{code}"], and state what a missing value becomes, or fix '
                "the cells."
            )
            groups.append((rows, what))
    return groups


def _numbers_as_text(texts: Sequence[str]) -> list[Group]:
    """Return the cells that are dates, bounds, or numbers in another form, by form."""
    bad = [k for k, text in enumerate(texts) if text and np.isnan(number(text))]
    return [
        ([k for k in bad if pattern.fullmatch(texts[k])], what) for pattern, what in NOT_NUMBERS
    ]


def _spelling(column: Column, texts: Sequence[str]) -> list[Group]:
    """Return the cells that are a category in other capital letters."""
    folded = {spelling.casefold() for spelling in column.places}
    rows = [
        k for k, text in enumerate(texts) if text not in column.places and text.casefold() in folded
    ]
    what = (
        "the value is a category in other capital letters; write it as the schema does, or list "
        "the spelling in the column's `aliases`."
    )
    return [(rows, what)]


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
        if words := other_unit(values, column.range):
            many = f"{many}; they look {words}"
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
    if second := second_unit(values):
        return _at(path, column, (), f"{second}: bring them into its unit.", stops=False)
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


def _label(
    path: Path, schema: Schema, cells: dict[str, np.ndarray], ragged: np.ndarray
) -> list[Finding]:
    """Return everything that is wrong with the label."""
    label = schema.label
    name = label.columns[0]
    findings = []
    if label.classes:
        column = Column(name, "category", categories=label.classes)
        findings = _column(path, column, cells[name], ragged)
    elif label.task in ("regression", "count"):
        column = Column(name, "number", range=label.range)
        findings = _column(path, column, cells[name], ragged)
    if findings or not label.columns:
        return findings
    error = _error_of(label_of, path, schema, cells)
    return [error] if error and not len(ragged) else []


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
