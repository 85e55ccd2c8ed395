"""The public schema: which columns a record has, what they may hold, and what is predicted. One
TOML file, shared by server and silos.

Nothing in it may be read off the data: ranges, categories and classes come from what everybody
knows. The features of a record, their number and their order are a function of the schema alone;
`text` is its one spelling, and its hash is part of what a silo approves.

    ignore = ["notes"]                            # columns that a silo's file may have besides;
    each silo's own business, not in the hash person = "patient_id"                         #
    optional: all rows with one value here are one person's, and protected together rows_per_person
    = 8                           # public: so many rows of a person are used, the first in the file
    combine = "mean"                              # of the losses of a person's rows; "sum" for
    survival in long form, a row for each period

    missing_codes = ["?", "-9"]                   # what stands for a missing value in some silo's
    file, in any column

    separator = ";"                               # how a silo's CSV is written, its own business
    too: , by default, or ; | or a tab decimal = ","                                 # . by default
    encoding = "latin-1"                          # utf-8 by default

    [columns.age] type = "number" range = [0, 110]                              # values are clipped
    to it and scaled to [-1, 1] missing = 50                                  # a public value to
    fill in; without it a missing value is refused indicator = true                              # a
    feature of its own that says where a value was filled in

    [columns.sex] type = "category" categories = ["female", "male", "other"]      # one feature for
    each; with "other" in the list an unknown value is that, else refused missing = "own"
    # a missing value is a category of its own

    [columns.smoker]
    type = "boolean"
    missing = false

    [label] column = "readmitted" task = "binary"                               # or multiclass;
    ordinal: classes in order; regression with range; count with most;
                                                  # survival with time, event and edges
    classes = ["no", "yes"] weights = [0.25, 1]                           # optional, public; with
    the largest at 1, since what the clip cuts off is not weighed

Images have a table [images] in place of columns, with height, width, channels (1 or 3) and resize,
and a folder for each class. Their order is that of the files' names, all different; rows of a file
keep theirs, and must not be sorted by a value: a record's position decides its batch.

Without `person`, a record is a row: what is promised is promised for each row, and less for
somebody who has several. With it a record is a person (`person.py`). The column is no feature, and
nothing in it ever leaves; that there is such a unit, what its column is called, the cap and how
rows are combined are in the hash, for server and silos must mean the same people.
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
    """How a silo's CSV file is written: said, never guessed from records, or one cell would decide
    how the others are read.
    """

    separator: str = ","
    decimal: str = "."
    encoding: str = "utf-8"

    @classmethod
    def of(cls, table: Mapping[str, Any], source: str) -> Form:
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
        made = cls(**given)
        if made.separator == made.decimal:
            raise BadInput(
                f"{source}: separator and decimal are both {made.decimal!r}; a file with "
                "decimal commas has another separator"
            )
        return made


FORM = tuple(Form.__dataclass_fields__)


@dataclass(frozen=True)
class Column:
    """One column of a silo's file and the features that it becomes. `missing` is None where a
    missing value is refused.
    """

    name: str
    type: str
    range: tuple[float, float] = (-1.0, 1.0)
    categories: tuple[str, ...] = ()
    missing: float | bool | str | None = None
    indicator: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        if self.type == "category":
            names = [f"{self.name}={c}" for c in self.categories]
        else:
            names = [self.name]
        return (
            *names,
            *([f"{self.name} missing"] if self.indicator or self.missing == OWN else []),
        )

    def table(self) -> dict[str, Any]:
        """The column as the schema's file has it, with every field that its type has."""
        own = {
            "number": {"range": list(self.range)},
            "category": {"categories": list(self.categories)},
            "boolean": {},
        }[self.type]
        if self.missing is None:
            rule = {}
        else:
            rule = {"missing": self.missing}
        return (
            {"type": self.type}
            | own
            | rule
            | ({} if self.type == "category" else {"indicator": self.indicator})
        )


@dataclass(frozen=True)
class Images:
    """Pictures of one public size; others are resized to it, or refused."""

    height: int
    width: int
    channels: int
    resize: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(
            f"c{c}y{y}x{x}"
            for c in range(self.channels)
            for y in range(self.height)
            for x in range(self.width)
        )


@dataclass(frozen=True)
class Label:
    """What is predicted, and in which column it stands; survival has two, time and event, and
    images none.
    """

    task: str
    columns: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    range: tuple[float, float] = (-1.0, 1.0)
    huber: float = 0.0
    edges: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return " and ".join(self.columns) or "the sub-folder's name"

    def table(self) -> dict[str, Any]:
        if self.task == "survival":
            return {
                "task": self.task,
                "time": self.columns[0],
                "event": self.columns[1],
                "edges": list(self.edges),
            }
        if self.columns:
            where = {"column": self.columns[0]}
        else:
            where = {}
        if self.task == "count":
            return {"task": self.task} | where | {"most": int(self.range[1])}
        if self.task == "regression":
            return (
                {"task": self.task}
                | where
                | {"range": list(self.range)}
                | ({"huber": self.huber} if self.huber else {})
            )
        return (
            {"task": self.task}
            | where
            | {"classes": list(self.classes)}
            | ({"weights": list(self.weights)} if self.weights else {})
        )


@dataclass(frozen=True)
class Schema:
    """Columns in their order, or images; the label; the columns that a file may have besides; and
    whose rows belong together, if it says so.
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
        """The schema that `text` spelled."""
        try:
            table = json.loads(text)
        except ValueError:
            table = None
        if not isinstance(table, dict):
            raise BadInput(
                f"{source} holds no schema; take the silo.json that `silodp silo init` wrote"
            )
        return cls.of(table, source)

    @classmethod
    def of(cls, table: Mapping[str, Any], source: str = "the schema") -> Schema:
        """The schema in a table as the file has it."""
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
        """Names of the features, in order."""
        if self.images:
            return self.images.features
        return tuple(name for column in self.columns for name in column.features)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The places of the features that are number columns."""
        names = {column.name for column in self.columns if column.type == "number"}
        return tuple(i for i, name in enumerate(self.features) if name in names)

    @property
    def own(self) -> tuple[str, ...]:
        """The column that says whose a row is, if there is one."""
        return (self.person.column,) if self.person else ()

    @property
    def by_row(self) -> Schema:
        """The same for rows by themselves, whoever they are of: for a file on which a model is only
        tried.
        """
        return replace(self, person=None, ignore=(*self.ignore, *self.own))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an image, (channels, height, width); () for columns."""
        return self.images.shape if self.images else ()

    @property
    def task(self) -> Task:
        label, (low, high) = self.label, self.label.range
        most = high if label.task == "count" else 0.0
        huber = 2 * label.huber / (high - low)
        return Task(
            label.task,
            len(label.classes),
            label.weights,
            huber=huber,
            bins=len(label.edges),
            most=most,
        )

    @cached_property
    def text(self) -> str:
        """The one spelling of everything that gives the features and the label their meaning; what
        is ignored has none.
        """
        if self.images:
            what: dict[str, Any] = {"images": vars(self.images)}
        else:
            what = {"columns": {column.name: column.table() for column in self.columns}}
        if self.missing_codes:
            codes = {"missing_codes": list(self.missing_codes)}
        else:
            codes = {}
        if self.person:
            unit = {
                "person": self.person.column,
                "rows_per_person": self.person.rows,
                "combine": self.person.combine,
            }
        else:
            unit = {}
        return json.dumps(codes | unit | what | {"label": self.label.table()})

    @property
    def hash(self) -> str:
        """SHA-256 of `text`: for Problem(schema=...)."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def _person(source: str, table: Mapping[str, Any]) -> Person | None:
    if "person" not in table:
        for name in ("rows_per_person", "combine"):
            if name in table:
                raise BadInput(
                    f"{source}: {name} is {table[name]!r}, but no column says whose a row "
                    "is; name one by person"
                )
        return None
    if "images" in table:
        raise BadInput(
            f"{source}: person is {table['person']!r}, but images have no columns; leave "
            "it out, and keep one image of each person"
        )
    column = _text(source, "person", table["person"])
    rows = table.get("rows_per_person", ROWS)
    combine = table.get("combine", "mean")
    whole = type(rows) is int and 1 <= rows <= MOST
    require(
        whole,
        f"{source}: rows_per_person",
        rows,
        f"an integer from 1 to {MOST}, known without a look at the data",
    )
    require(combine in COMBINE, f"{source}: combine", combine, f"one of {', '.join(COMBINE)}")
    return Person(column, rows, combine)


def _columns(source: str, tables: Any) -> tuple[Column, ...]:
    if not isinstance(tables, dict) or not tables:
        raise BadInput(f"{source} has no columns; give a table [columns.NAME] for each")
    for name in tables:
        check_name(f"{source}: the name of a column", name)
    return tuple(
        _column(f"{source}, column {name!r}", name, table) for name, table in tables.items()
    )


def _column(source: str, name: str, table: Any) -> Column:
    if isinstance(table, dict):
        kind: Any = table.get("type")
    else:
        kind = None
    require(kind in TYPES, f"{source}: type", kind, f"one of {', '.join(TYPES)}")
    missing = table.get("missing")
    indicator = table.get("indicator", False)
    missing = None if missing == "refuse" else missing
    told = isinstance(indicator, bool) and not (indicator and missing is None)
    require(
        told,
        f"{source}: indicator",
        indicator,
        "true or false, and true only with a value for missing",
    )
    if kind == "number":
        _known(source, table, ("type", "range", "missing", "indicator"))
        low, high = _range(source, table.get("range"))
        within = missing is None or (_is_number(missing) and low <= missing <= high)
        require(within, f"{source}: missing", missing, 'a number within the range, or "refuse"')
        return Column(
            name,
            kind,
            range=(low, high),
            missing=missing if missing is None else float(missing),
            indicator=indicator,
        )
    if kind == "boolean":
        _known(source, table, ("type", "missing", "indicator"))
        require(
            missing is None or isinstance(missing, bool),
            f"{source}: missing",
            missing,
            'true, false or "refuse"',
        )
        return Column(name, kind, missing=missing, indicator=indicator)
    _known(source, table, ("type", "categories", "missing"))
    categories = _texts(source, "categories", table.get("categories"), least=1)
    require(missing in (None, OWN), f"{source}: missing", missing, '"own" or "refuse"')
    return Column(name, kind, categories=categories, missing=missing)


def _images(source: str, table: Any) -> Images:
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
    if not isinstance(table, dict):
        raise BadInput(f"{source} has no table [label]; it says what is predicted")
    source = f"{source}, [label]"
    task: Any = table.get("task")
    kinds = KINDS[:2] if images else KINDS
    require(task in kinds, f"{source}: task", task, f"one of {', '.join(kinds)}")
    fields = {
        "survival": ("time", "event", "edges"),
        "regression": ("column", "range", "huber"),
        "count": ("column", "most"),
        "ordinal": ("column", "classes"),
    }.get(task, ("column", "classes", "weights"))
    _known(
        source, table, ("task", *(field for field in fields if not (images and field == "column")))
    )
    if images:
        columns = ()
    else:
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
        whole = type(most) is int and 1 <= most <= 10**6
        require(
            whole,
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
            f"{source}: task is 'ordinal' with two classes; it must have three or more, in "
            "order, or be 'binary'"
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
    return Label(task, columns, classes, tuple(map(float, weights)))


def _known(source: str, table: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in table:
        if name not in names:
            raise BadInput(
                f"{source}: the field {name!r} is unknown; the fields are {', '.join(names)}"
            )


def _range(source: str, value: Any) -> tuple[float, float]:
    pair = (
        isinstance(value, list)
        and len(value) == 2
        and all(map(_is_number, value))
        and value[0] < value[1]
    )
    require(pair, f"{source}: range", value, "[low, high], two public numbers with low < high")
    return float(value[0]), float(value[1])


def _texts(source: str, name: str, value: Any, least: int = 0) -> tuple[str, ...]:
    texts = isinstance(value, list) and len(value) >= least and all(map(is_name, value))
    wanted = (
        f"a list of {f'{least} or more ' if least else ''}different texts, in quotes, each of 1 "
        "to 200 visible characters with single spaces between words"
    )
    require(texts and not repeated(value), f"{source}: {name}", value, wanted)
    return tuple(value)


def _text(source: str, name: str, value: Any) -> str:
    require(
        isinstance(value, str) and value.strip(), f"{source}: {name}", value, "the name of a column"
    )
    check_name(f"{source}: {name}", value)
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def repeated(items: Sequence[Any]) -> Any:
    """The first that stands there twice; None if none does."""
    return next((item for item, count in Counter(items).items() if count > 1), None)
