"""Whose rows a file's rows are: they are put together by person, in as many places as the public
cap has, and counted where nobody is named.

Persons come in the order of their first rows; `answer.exact` and `heldout` give them secret places,
which follow from nobody's rows.
"""

from __future__ import annotations

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
"""Names of columns that often say who somebody is."""
KNOWN_BY = 5
"""Columns by which rows that are alike in all of them may be one person's, at least: of fewer many
people are alike.
"""


@dataclass(frozen=True, eq=False, repr=False)
class Grouped:
    """Which rows of a file are whose, and which of them are used: `places` (n, P) has the number of
    a row, or -1 where there is none.
    """

    ids: list[
        str
    ]  # of each person, in their order; "" where a row has none, and so is a person of its own
    places: np.ndarray

    def x(self, values: np.ndarray) -> np.ndarray:
        """(n, P, ...) of a row's (...): where there is no row, that of the person's first."""
        return values[np.where(self.places < 0, self.places[:, :1], self.places)]

    def y(self, targets: np.ndarray) -> np.ndarray:
        """(n, P): where there is no row, the target that says so."""
        return np.where(
            self.places < 0,
            np.array(nowhere(targets.dtype.kind == "f"), targets.dtype),
            self.x(targets),
        )


def grouped(cells: np.ndarray, person: Person, void: np.ndarray | None = None) -> Grouped:
    """The rows of each person: the first of its own rows in the file, as many as the cap has. Of
    the others' rows nothing decides.

    A `void` row is left out. A person of nothing but such rows keeps its place, with its first.
    """
    texts = ids_of(cells)
    alone = np.array([text == "" for text in texts])
    keys = np.where(alone, np.arange(len(texts)), -1 - factorized(np.array(texts, object))[0])
    who, _ = factorized(keys)  # in the order of the first rows
    if void is None:
        unread = np.zeros(len(who), bool)
    else:
        unread = void
    order = np.lexsort((unread, who))  # stable, and of each person the rows that can be read first
    sizes = np.bincount(who)
    rank = np.arange(len(who)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    kept = (rank < person.rows) & ((rank == 0) | ~unread[order])
    places = np.full((len(sizes), person.rows), -1, np.int64)
    places[who[order][kept], rank[kept]] = order[kept]
    return Grouped([texts[row] for row in places[:, 0]], places)


def ids_of(cells: np.ndarray) -> list[str]:
    """Who each row is of, in one spelling; "" where that is missing. Two that are taken for one are
    protected together, which harms nobody.
    """
    found = (as_text(value).strip().casefold() for value in cells)
    return ["" if text in MISSING else text.removesuffix(".0") for text in found]


def alike(cells: Mapping[str, np.ndarray], label: tuple[str, ...] = ()) -> tuple[int, str]:
    """How many rows look like another row's person's, and by what: for the silo's operator alone.

    By the column whose name says that it tells people apart, if a value of it is in several rows;
    else by all columns but the label's, where there are enough of them to tell people apart.
    """
    best = (0, "")
    for name in (name for name in cells if name not in label and NAMED.search(name)):
        count = Counter(ids_of(cells[name]))
        shared = sum(times for text, times in count.items() if times > 1 and text)
        if (
            2 * len(count) > count.total() ** 0.5 and shared > best[0]
        ):  # with fewer values it names wards, not people
            best = shared, f"the column {name!r}"
    others = [name for name in cells if name not in label]
    if not best[0] and len(others) >= KNOWN_BY:
        rows = Counter(
            zip(
                *([as_text(value).strip() for value in cells[name]] for name in others), strict=True
            )
        )
        best = sum(times for times in rows.values() if times > 1), "all columns but the label's"
    return best if best[0] else (0, "")


def whose(cells: Mapping[str, np.ndarray], schema: Schema | None) -> list[str]:
    """What is protected, rows or people, and what speaks against it; for the operator alone, since
    how many rows people have is private.
    """
    if schema and schema.person:
        used = grouped(cells[schema.person.column], schema.person).places >= 0
        dropped = len(cells[schema.person.column]) - int(used.sum())
        lost = (
            f"{dropped} rows are beyond the cap of {schema.person.rows} for a person, and are "
            "not used."
        )
        return [unit(schema.person), *([lost] if dropped else [])]
    rows, by = alike(cells, schema.label.columns if schema else ())
    return [
        BY_ROW,
        *([f"{rows} rows look like those of people who have several, by {by}."] if rows else []),
    ]


def said_of(path: Path, schema: Schema | None) -> list[str]:
    """`whose`, of a file; of images, and of an archive of one array, whose columns have no names,
    nothing more can be said.
    """
    try:
        if path.is_dir():
            cells = {}
        else:
            cells = read_cells(path, schema.form if schema else Form())
    except BadInput:
        cells = {}
    return whose(cells, schema)
