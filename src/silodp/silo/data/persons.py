"""Group a file's rows by person, up to the public cap, and count rows where no column names
persons.

Persons are in the order of their first rows. `answer.exact` and `heldout` give them secret places,
which follow from no person's rows.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from silodp.core.errors import BadInput
from silodp.core.problem.person import BY_ROW, Person, nowhere, unit
from silodp.core.problem.schema import Form, Schema
from silodp.silo.data.cells import factorized
from silodp.silo.data.files import MISSING, as_text, read_cells

NAMED = re.compile(
    r"(^|[^a-z])(id|ids|nr|no|mrn|ssn|pid|nhs|uuid|guid|key)([^a-z]|$)|patient|person|subject|participant|client|member|customer|insur",
    re.I,
)
"""Names of columns that often identify a person."""
FEWEST_COLUMNS = 5
"""Fewest columns for which rows that are equal in all of them may be one person's. In fewer columns
many people are equal.
"""


@dataclass(frozen=True, eq=False, repr=False)
class Grouped:
    """The rows of each person, and which of them are used.

    `places` (n, P) has the number of a row, or -1 if there is none.
    """

    ids: list[str]
    """The id of each person, in their order. "" is a row without an id, a person of its own."""
    places: np.ndarray

    def x(self, values: np.ndarray) -> np.ndarray:
        """Return (n, P, ...) of a row's (...). A place without a row has that of the person's first
        row.
        """
        return values[np.where(self.places < 0, self.places[:, :1], self.places)]

    def y(self, targets: np.ndarray) -> np.ndarray:
        """Return (n, P) targets. A place without a row has the target that marks this."""
        no_row = np.array(nowhere(targets.dtype.kind == "f"), targets.dtype)
        return np.where(self.places < 0, no_row, self.x(targets))


def grouped(cells: np.ndarray, person: Person, void: np.ndarray | None = None) -> Grouped:
    """Return the rows of each person: the first of its own rows in the file, up to the cap.

    No other person's rows matter. A `void` row is left out. A person with void rows only keeps its
    place, with its first row.
    """
    texts = ids_of(cells)
    alone = np.array([text == "" for text in texts])
    keys = np.where(alone, np.arange(len(texts)), -1 - factorized(np.array(texts, object))[0])
    who, _ = factorized(keys)  # persons are numbered in the order of their first rows
    if void is None:
        unread = np.zeros(len(who), bool)
    else:
        unread = void
    # A stable sort by person, where each person's rows that can be read come first.
    order = np.lexsort((unread, who))
    sizes = np.bincount(who)
    rank = np.arange(len(who)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    kept = (rank < person.rows) & ((rank == 0) | ~unread[order])
    places = np.full((len(sizes), person.rows), -1, np.int64)
    places[who[order][kept], rank[kept]] = order[kept]
    return Grouped([texts[row] for row in places[:, 0]], places)


def ids_of(cells: np.ndarray) -> list[str]:
    """Return the person's id of each row in one spelling, "" if it is missing.

    Two persons that are taken for one are protected together, which harms neither.
    """
    ids = []
    for value in cells:
        text = as_text(value).strip().casefold()
        if text in MISSING:
            ids.append("")
        else:
            ids.append(text.removesuffix(".0"))
    return ids


def alike(cells: Mapping[str, np.ndarray], label: tuple[str, ...] = ()) -> tuple[int, str]:
    """Return how many rows look like those of a person with several rows, and by what.

    This is for the silo's operator alone. It looks at a column whose name suggests ids, if a value
    of it is in several rows. Otherwise it compares all columns but the label's, if there are enough
    of them to identify people.
    """
    others = [name for name in cells if name not in label]
    most = 0
    column = ""
    for name in filter(NAMED.search, others):
        count = Counter(ids_of(cells[name]))
        shared = sum(times for text, times in count.items() if times > 1 and text)
        # A column with few different values names wards, not people.
        if 2 * len(count) > count.total() ** 0.5 and shared > most:
            most = shared
            column = name
    if most:
        return most, f"the column {column!r}"
    if len(others) >= FEWEST_COLUMNS:
        texts = ([as_text(value).strip() for value in cells[name]] for name in others)
        rows = Counter(zip(*texts, strict=True))
        equal = sum(times for times in rows.values() if times > 1)
        if equal:
            return equal, "all columns but the label's"
    return 0, ""


def whose(cells: Mapping[str, np.ndarray], schema: Schema | None) -> list[str]:
    """Return what is protected, rows or people, and what speaks against it.

    This is for the operator alone, since how many rows people have is private.
    """
    if schema and schema.person:
        used = grouped(cells[schema.person.column], schema.person).places >= 0
        dropped = len(cells[schema.person.column]) - int(used.sum())
        if not dropped:
            return [unit(schema.person)]
        return [
            unit(schema.person),
            f"{dropped} rows are beyond the cap of {schema.person.rows} for a person, and are "
            "not used.",
        ]
    label: tuple[str, ...] = ()
    if schema:
        label = schema.label.columns
    rows, by = alike(cells, label)
    if not rows:
        return [BY_ROW]
    return [BY_ROW, f"{rows} rows look like those of people who have several, by {by}."]


def said_of(path: Path, schema: Schema | None) -> list[str]:
    """Return the sentences of `whose` for a file.

    Images, and an archive of one array, have no column names to look at.
    """
    form = schema.form if schema else Form()
    cells = {}
    if not path.is_dir():
        with contextlib.suppress(BadInput):
            cells = read_cells(path, form)
    return whose(cells, schema)
