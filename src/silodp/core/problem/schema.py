"""Read the public schema: the columns of a record, their values, and what is predicted.

It is one TOML file, which server and silos share.

Nothing in it may be derived from the data: ranges, categories and classes come from public
knowledge. The features of a record, their number and their order are a function of the schema
alone. `text` is its one spelling. The hash of `text` is part of what a silo approves.

    # Columns that a silo's file may also have. Each silo has its own list, outside the hash.
    ignore = ["notes"]

    # Optional: all rows with one value here belong to one person, and are protected together.
    person = "patient_id"
    rows_per_person = 8        # the first so many rows of a person in the file are used
    combine = "mean"           # the losses of a person's rows; "sum" for survival in long form,
                               # with a row for each period

    missing_codes = ["?", "-9"]    # what means a missing value, in any silo and column

    # How a silo's CSV is written. Each silo has its own, outside the hash.
    separator = ";"            # , by default, or ; | or a tab
    decimal = ","              # . by default
    encoding = "latin-1"       # utf-8 by default

    [columns.age]
    type = "number"
    range = [0, 110]           # values are clipped to it and scaled to [-1, 1]
    missing = 50               # a public value to fill in; without it a missing value is refused
    indicator = true           # one more feature, which shows where a value was filled in

    [columns.sex]
    type = "category"
    categories = ["female", "male", "other"]   # one feature for each; "other" takes unknown
                                               # values, which are refused without it
    missing = "own"            # a missing value is a separate category
    aliases = {F = "female", w = "female"}     # optional: other spellings, and their categories

    [columns.smoker]
    type = "boolean"
    missing = false

    [label]
    column = "readmitted"
    task = "binary"            # or multiclass; ordinal: classes in order; regression with range;
                               # count with most; survival with time, event and edges
    classes = ["no", "yes"]
    weights = [0.25, 1]        # optional and public; the largest should be 1, since the clip cuts
                               # off what is above
    positive = 0.12            # optional: a public estimate of the share of the second class,
                               # from the literature and not from the data

Images have a table [images] in place of columns, with height, width, channels (1 or 3) and resize,
and a folder for each class. Their order is the order of the files' names, which must all differ.
The rows of a file keep their order. They must not be sorted by a value, because a record's position
decides its batch.

Without `person`, a record is a row. The promise then holds for each row, and is weaker for a person
with several rows. With `person`, a record is a person (`person.py`). That column is not a feature,
and no value of it leaves the silo. The hash covers the column's name, the cap and how rows are
combined, because server and silos must mean the same people.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from silodp.core.errors import BadInput, require
from silodp.core.problem.person import COMBINE, MOST, ROWS, Person
from silodp.core.problem.task import KINDS, Task
from silodp.core.text import check_name, is_name

TYPES = ("number", "category", "boolean")
OTHER = "other"
OWN = "own"


@dataclass(frozen=True)
class Form:
    """How a silo's CSV file is written.

    A silo states it. A guess from the records would let one cell decide how the others are read.
    """

    separator: str = ","
    decimal: str = "."
    encoding: str = "utf-8"

    @classmethod
    def of(cls, table: Mapping[str, Any], source: str) -> Form:
        """Return the form in a table of the schema. Raise BadInput for a value that is not
        supported.
        """
        allowed = {
            "separator": (",", ";", "\t", "|"),
            "decimal": (".", ","),
            "encoding": ("utf-8", "latin-1", "windows-1252", "utf-16"),
        }
        given = {name: table[name] for name in allowed if name in table}
        for name, value in given.items():
            require(
                value in allowed[name],
                f"{source}: {name}",
                value,
                f"one of {', '.join(map(repr, allowed[name]))}",
            )
        form = cls(**given)
        if form.separator == form.decimal:
            raise BadInput(
                f"{source}: separator and decimal are both {form.decimal!r}; a file with "
                "decimal commas has another separator"
            )
        return form


FORM = tuple(Form.__dataclass_fields__)


@dataclass(frozen=True)
class Column:
    """One column of a silo's file, and the features that it becomes.

    `missing` is None if a missing value is refused.
    """

    name: str
    type: str
    range: tuple[float, float] = (-1.0, 1.0)
    categories: tuple[str, ...] = ()
    missing: float | bool | str | None = None
    indicator: bool = False
    aliases: tuple[tuple[str, str], ...] = ()
    """Other spellings of categories: (spelling, category)."""

    @property
    def places(self) -> dict[str, int]:
        """Return the place of each category in the schema's list, by every spelling of it."""
        index = {category: k for k, category in enumerate(self.categories)}
        return index | {spelling: index[category] for spelling, category in self.aliases}

    @property
    def features(self) -> tuple[str, ...]:
        """Return the names of the column's features."""
        if self.type == "category":
            names = [f"{self.name}={c}" for c in self.categories]
        else:
            names = [self.name]
        if self.indicator or self.missing == OWN:
            names.append(f"{self.name} missing")
        return tuple(names)

    def table(self) -> dict[str, Any]:
        """Return the column as the schema's file has it, with every field of its type."""
        table: dict[str, Any] = {"type": self.type}
        if self.type == "number":
            table["range"] = list(self.range)
        if self.type == "category":
            table["categories"] = list(self.categories)
        if self.aliases:
            table["aliases"] = dict(self.aliases)
        if self.missing is not None:
            table["missing"] = self.missing
        if self.type != "category":
            table["indicator"] = self.indicator
        return table


@dataclass(frozen=True)
class Images:
    """Pictures of one public size. Others are resized to it, or refused."""

    height: int
    width: int
    channels: int
    resize: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (channels, height, width)."""
        return self.channels, self.height, self.width

    @property
    def features(self) -> tuple[str, ...]:
        """Return one name for each pixel and channel."""
        return tuple(
            f"c{c}y{y}x{x}"
            for c in range(self.channels)
            for y in range(self.height)
            for x in range(self.width)
        )


@dataclass(frozen=True)
class Label:
    """What is predicted, and the column that contains it.

    Survival has two columns, time and event. Images have none.
    """

    task: str
    columns: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    range: tuple[float, float] = (-1.0, 1.0)
    huber: float = 0.0
    edges: tuple[float, ...] = ()
    positive: float = 0.0
    """A public estimate of the share of records with the second of two classes; 0: none."""

    @property
    def name(self) -> str:
        """Return where the label is, for messages."""
        return " and ".join(self.columns) or "the sub-folder's name"

    def table(self) -> dict[str, Any]:
        """Return the label as the schema's file has it, with every field of its task."""
        if self.task == "survival":
            return {
                "task": self.task,
                "time": self.columns[0],
                "event": self.columns[1],
                "edges": list(self.edges),
            }
        table: dict[str, Any] = {"task": self.task}
        if self.columns:
            table["column"] = self.columns[0]
        if self.task == "count":
            table["most"] = int(self.range[1])
            return table
        if self.task == "regression":
            table["range"] = list(self.range)
            if self.huber:
                table["huber"] = self.huber
            return table
        table["classes"] = list(self.classes)
        if self.weights:
            table["weights"] = list(self.weights)
        if self.positive:
            table["positive"] = self.positive
        return table


@dataclass(frozen=True)
class Schema:
    """The columns in their order, or images, and the label.

    It also has the columns that a file may contain without use, and which rows belong to one
    person.
    """

    columns: tuple[Column, ...]
    images: Images | None
    label: Label
    ignore: tuple[str, ...] = ()
    missing_codes: tuple[str, ...] = field(default=(), kw_only=True)
    person: Person | None = field(default=None, kw_only=True)
    form: Form = field(default=Form(), kw_only=True)

    @classmethod
    def parse(cls, text: str, source: str) -> Schema:
        """Return the schema that `text` spells. Raise BadInput if it spells none."""
        try:
            table = json.loads(text)
        except ValueError:
            table = None
        if not isinstance(table, dict):
            raise BadInput(
                f"{source} contains no schema; take the silo.json that `silodp silo init` wrote"
            )
        return cls.of(table, source)

    @classmethod
    def of(cls, table: Mapping[str, Any], source: str = "the schema") -> Schema:
        """Return the schema in a table as the file has it. Raise BadInput for a field that cannot
        be used.
        """
        _known(
            source,
            table,
            (
                *FORM,
                "ignore",
                "missing_codes",
                "person",
                "rows_per_person",
                "combine",
                "columns",
                "images",
                "label",
            ),
        )
        if ("columns" in table) == ("images" in table):
            raise BadInput(f"{source} must have either [columns.NAME] tables or one table [images]")
        if "images" in table:
            images = _images(source, table["images"])
        else:
            images = None
        if images:
            columns = ()
        else:
            columns = _columns(source, table["columns"])
        codes = _texts(source, "missing_codes", table.get("missing_codes", []))
        label = _label(source, table.get("label"), images is not None)
        ignore = _texts(source, "ignore", table.get("ignore", []))
        schema = cls(
            columns,
            images,
            label,
            ignore,
            missing_codes=codes,
            person=_person(source, table),
            form=Form.of(table, source),
        )
        names = [
            *(column.name for column in columns),
            *schema.label.columns,
            *schema.ignore,
            *schema.own,
        ]
        if twice := repeated(names) or repeated(schema.features):
            raise BadInput(
                f"{source} names {twice!r} twice; a column is a feature, the label, the "
                "person or ignored, and each feature has its own name"
            )
        return schema

    @cached_property
    def features(self) -> tuple[str, ...]:
        """Return the names of the features, in order."""
        if self.images:
            return self.images.features
        return tuple(name for column in self.columns for name in column.features)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the places of the features that are number columns."""
        names = {column.name for column in self.columns if column.type == "number"}
        return tuple(i for i, name in enumerate(self.features) if name in names)

    @property
    def own(self) -> tuple[str, ...]:
        """Return the column that identifies a row's person, if there is one."""
        if self.person:
            return (self.person.column,)
        return ()

    @property
    def by_row(self) -> Schema:
        """Return the same schema for single rows, without persons.

        It is for a file on which a model is only tried.
        """
        return replace(self, person=None, ignore=(*self.ignore, *self.own))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (channels, height, width) for images, and () for columns."""
        if self.images:
            return self.images.shape
        return ()

    @property
    def task(self) -> Task:
        """Return the task that the label defines."""
        label = self.label
        low, high = label.range
        if label.task == "count":
            most = high
        else:
            most = 0.0
        huber = 2 * label.huber / (high - low)  # in units of the scaled label
        return Task(
            label.task,
            len(label.classes),
            label.weights,
            huber=huber,
            bins=len(label.edges),
            periods=tuple(after - before for before, after in pairwise((0.0, *label.edges))),
            most=most,
            positive=label.positive,
        )

    @cached_property
    def text(self) -> str:
        """Return the one spelling of everything that gives the features and the label their
        meaning.

        Ignored columns are not part of it.
        """
        # The order of the fields is part of the spelling, and so of the hash.
        table: dict[str, Any] = {}
        if self.missing_codes:
            table["missing_codes"] = list(self.missing_codes)
        if self.person:
            table["person"] = self.person.column
            table["rows_per_person"] = self.person.rows
            table["combine"] = self.person.combine
        if self.images:
            table["images"] = vars(self.images)
        else:
            table["columns"] = {column.name: column.table() for column in self.columns}
        table["label"] = self.label.table()
        return json.dumps(table)

    @property
    def hash(self) -> str:
        """Return the SHA-256 of `text`, for Problem(schema=...)."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def _person(source: str, table: Mapping[str, Any]) -> Person | None:
    """Return the person in a schema's table, or None. Raise BadInput for a field that cannot be
    used.
    """
    if "person" not in table:
        for name in ("rows_per_person", "combine"):
            if name in table:
                raise BadInput(
                    f"{source}: {name} is {table[name]!r}, but no column identifies people; name "
                    "one by person"
                )
        return None
    if "images" in table:
        raise BadInput(
            f"{source}: person is {table['person']!r}, but images have no columns; remove it, "
            "and keep one image of each person"
        )
    column = _text(source, "person", table["person"])
    rows = table.get("rows_per_person", ROWS)
    combine = table.get("combine", "mean")
    require(
        type(rows) is int and 1 <= rows <= MOST,
        f"{source}: rows_per_person",
        rows,
        f"an integer from 1 to {MOST}, chosen without a look at the data",
    )
    require(combine in COMBINE, f"{source}: combine", combine, f"one of {', '.join(COMBINE)}")
    return Person(column, rows, combine)


def _columns(source: str, tables: Any) -> tuple[Column, ...]:
    """Return the columns of a schema. Raise BadInput if there are none, or one cannot be used."""
    if not isinstance(tables, dict) or not tables:
        raise BadInput(f"{source} has no columns; give a table [columns.NAME] for each")
    for name in tables:
        check_name(f"{source}: the name of a column", name)
    return tuple(
        _column(f"{source}, column {name!r}", name, table) for name, table in tables.items()
    )


def _column(source: str, name: str, table: Any) -> Column:
    """Return one column of a schema. Raise BadInput for a field that cannot be used."""
    if isinstance(table, dict):
        kind: Any = table.get("type")
    else:
        kind = None
    require(kind in TYPES, f"{source}: type", kind, f"one of {', '.join(TYPES)}")
    missing = table.get("missing")
    indicator = table.get("indicator", False)
    if missing == "refuse":
        missing = None
    require(
        isinstance(indicator, bool) and not (indicator and missing is None),
        f"{source}: indicator",
        indicator,
        "true or false, and true only with a value for missing",
    )
    if kind == "number":
        _known(source, table, ("type", "range", "missing", "indicator"))
        low, high = _range(source, table.get("range"))
        within = missing is None or (_is_number(missing) and low <= missing <= high)
        require(within, f"{source}: missing", missing, 'a number within the range, or "refuse"')
        if missing is not None:
            missing = float(missing)
        return Column(name, kind, range=(low, high), missing=missing, indicator=indicator)
    if kind == "boolean":
        _known(source, table, ("type", "missing", "indicator"))
        require(
            missing is None or isinstance(missing, bool),
            f"{source}: missing",
            missing,
            'true, false or "refuse"',
        )
        return Column(name, kind, missing=missing, indicator=indicator)
    _known(source, table, ("type", "categories", "aliases", "missing"))
    categories = _texts(source, "categories", table.get("categories"), least=1)
    require(missing in (None, OWN), f"{source}: missing", missing, '"own" or "refuse"')
    aliases = _aliases(source, table.get("aliases", {}), categories)
    return Column(name, kind, categories=categories, missing=missing, aliases=aliases)


def _aliases(source: str, table: Any, categories: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the other spellings of categories. Raise BadInput unless each is a plain text for one
    of the categories.
    """
    valid = isinstance(table, dict) and all(
        is_name(spelling) and spelling not in categories and category in categories
        for spelling, category in table.items()
    )
    wanted = 'a table of other spellings and their categories, such as {F = "female", f = "female"}'
    require(valid, f"{source}: aliases", table, wanted)
    return tuple(table.items())


def _images(source: str, table: Any) -> Images:
    """Return the images of a schema. Raise BadInput for a field that cannot be used."""
    source = f"{source}, [images]"
    if not isinstance(table, dict):
        raise BadInput(f"{source} must be a table with height, width, channels and resize")
    _known(source, table, ("height", "width", "channels", "resize"))
    for name in ("height", "width"):
        value = table.get(name)
        require(
            type(value) is int and 1 <= value <= 1024,
            f"{source}: {name}",
            value,
            "an integer from 1 to 1024",
        )
    channels = table.get("channels")
    resize = table.get("resize")
    require(channels in (1, 3), f"{source}: channels", channels, "1 (grey) or 3 (colour)")
    require(
        isinstance(resize, bool),
        f"{source}: resize",
        resize,
        "true, or false to refuse an image of another size",
    )
    return Images(**table)


def _label(source: str, table: Any, images: bool) -> Label:
    """Return the label of a schema. Raise BadInput for a field that cannot be used."""
    if not isinstance(table, dict):
        raise BadInput(f"{source} has no table [label]; add it, to define what is predicted")
    source = f"{source}, [label]"
    task: Any = table.get("task")
    if images:
        kinds = KINDS[:2]
    else:
        kinds = KINDS
    require(task in kinds, f"{source}: task", task, f"one of {', '.join(kinds)}")
    fields = {
        "survival": ("time", "event", "edges"),
        "regression": ("column", "range", "huber"),
        "count": ("column", "most"),
        "ordinal": ("column", "classes"),
        "binary": ("column", "classes", "weights", "positive"),
    }.get(task, ("column", "classes", "weights"))
    if images:  # the folders' names are the labels
        fields = tuple(field for field in fields if field != "column")
    _known(source, table, ("task", *fields))
    columns = tuple(
        _text(source, name, table.get(name))
        for name in fields
        if name in ("time", "event", "column")
    )
    if task == "survival":
        edges: Any = table.get("edges")
        rising = (
            isinstance(edges, list)
            and edges
            and all(map(_is_number, edges))
            and all(a < b for a, b in pairwise([0, *edges]))
        )
        require(
            rising,
            f"{source}: edges",
            edges,
            "the ends of the time bins, rising numbers above 0, such as [6, 12, 24]",
        )
        return Label(task, columns, edges=tuple(map(float, edges)))
    if task == "count":
        most: Any = table.get("most")
        require(
            type(most) is int and 1 <= most <= 10**6,
            f"{source}: most",
            most,
            "the public largest count, an integer from 1 to 1,000,000",
        )
        return Label(task, columns, range=(0.0, float(most)))
    if task == "regression":
        huber = table.get("huber", 0)
        wanted = "the error, in the label's units, from which the loss grows linearly only"
        require(_is_number(huber) and huber >= 0, f"{source}: huber", huber, wanted)
        return Label(task, columns, range=_range(source, table.get("range")), huber=float(huber))
    classes = _texts(source, "classes", table.get("classes"), least=2)
    if task == "binary" and len(classes) != 2:
        raise BadInput(
            f"{source}: task is 'binary' with {len(classes)} classes; it must have two, or "
            "be 'multiclass'"
        )
    if task == "ordinal" and len(classes) < 3:
        raise BadInput(
            f"{source}: task is 'ordinal' with {len(classes)} classes; it must have three or "
            "more, in order, or be 'binary'"
        )
    weights = table.get("weights", [])
    each = (
        isinstance(weights, list)
        and len(weights) in (0, len(classes))
        and all(_is_number(w) and w > 0 for w in weights)
    )
    require(
        each,
        f"{source}: weights",
        weights,
        f"a public number above 0 for each of the {len(classes)} classes",
    )
    positive = table.get("positive", 0.0)
    require(
        "positive" not in table or (_is_number(positive) and 0 < positive < 1),
        f"{source}: positive",
        positive,
        f"a public estimate, between 0 and 1, of the share of {classes[-1]!r}, such as 0.12",
    )
    return Label(task, columns, classes, tuple(map(float, weights)), positive=float(positive))


def _known(source: str, table: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise BadInput if the table has a field that is not among these."""
    for name in table:
        if name not in names:
            raise BadInput(
                f"{source}: the field {name!r} is unknown; the fields are {', '.join(names)}"
            )


def _range(source: str, value: Any) -> tuple[float, float]:
    """Return a public range. Raise BadInput unless it is two numbers with low < high."""
    pair = (
        isinstance(value, list)
        and len(value) == 2
        and all(map(_is_number, value))
        and value[0] < value[1]
    )
    require(pair, f"{source}: range", value, "[low, high], two public numbers with low < high")
    return float(value[0]), float(value[1])


def _texts(source: str, name: str, value: Any, least: int = 0) -> tuple[str, ...]:
    """Return a list of texts. Raise BadInput unless it has at least `least`, all different and
    plain.
    """
    texts = isinstance(value, list) and len(value) >= least and all(map(is_name, value))
    if least:
        number = f"{least} or more "
    else:
        number = ""
    wanted = (
        f"a list of {number}different texts, in quotes, each of 1 to 200 visible characters with "
        "single spaces between words"
    )
    require(texts and not repeated(value), f"{source}: {name}", value, wanted)
    return tuple(value)


def _text(source: str, name: str, value: Any) -> str:
    """Return the name of a column. Raise BadInput unless it is one."""
    require(
        isinstance(value, str) and value.strip(), f"{source}: {name}", value, "the name of a column"
    )
    check_name(f"{source}: {name}", value)
    return value


def _is_number(value: Any) -> bool:
    """Return whether a value is a number of a size that arithmetic keeps finite."""
    return type(value) in (int, float) and abs(value) < 1e300


def repeated(items: Sequence[Any]) -> Any:
    """Return the first item that occurs twice, or None."""
    return next((item for item, count in Counter(items).items() if count > 1), None)
