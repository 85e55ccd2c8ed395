"""A schema is read with one sentence for each mistake, and its features, hash and task are
functions of it alone.
"""

import copy
import json
import tomllib
from dataclasses import replace

import pytest

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema
from silodp.core.problem.task import Task
from silodp.host.schema import load_schema

TEXT = """
ignore = ["id"]
[columns.age]
type = "number"
range = [0, 110]
missing = 50
indicator = true
[columns.sex]
type = "category"
categories = ["female", "male", "other"]
missing = "own"
[columns.smoker]
type = "boolean"
missing = false
[label]
column = "ill"
task = "binary"
classes = ["no", "yes"]
weights = [1, 4]
"""
IMAGES = (
    "[images]\nheight = 2\nwidth = 3\nchannels = 1\nresize = true\n[label]\ntask = "
    '"binary"\nclasses = ["cat", "dog"]\n'
)
TABLE = tomllib.loads(TEXT)


def changed(place: str, value: object = None, table: dict = TABLE) -> dict:
    """The table with one field, named by its path, set or (with None) removed."""
    table, path = copy.deepcopy(table), place.split(".")
    inner = table
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
    inner.pop(path[-1], None)
    if value is not None:
        inner[path[-1]] = value
    return table


def test_the_features_follow_from_the_schema_alone():
    schema = Schema.of(TABLE)
    assert schema.features == (
        "age",
        "age missing",
        "sex=female",
        "sex=male",
        "sex=other",
        "sex missing",
        "smoker",
    )
    assert schema.task == Task("binary", 2, (1.0, 4.0))
    assert Schema.of(tomllib.loads(IMAGES)).features == (
        "c0y0x0",
        "c0y0x1",
        "c0y0x2",
        "c0y1x0",
        "c0y1x1",
        "c0y1x2",
    )


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        IMAGES,
        '[columns.a]\ntype="boolean"\n[label]\ntask="survival"\ntime="t"\nevent="e"\nedges=[1, 2]',
    ],
)
def test_the_one_spelling_gives_the_same_schema_again(text):
    schema = Schema.of(tomllib.loads(text))
    again = Schema.parse(schema.text, "the card")
    assert again == replace(schema, ignore=())
    assert again.hash == schema.hash


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("columns.age.range", [0, 120]),
        ("columns.age.missing", 51),
        ("columns.age.indicator", False),
        ("columns.sex.categories", ["male", "female", "other"]),
        ("columns.sex.missing", None),
        ("columns.smoker.missing", True),
        ("columns.smoker", {"type": "number", "range": [0, 1]}),
        ("columns.more", {"type": "boolean"}),
        ("label.classes", ["yes", "no"]),
        ("label.weights", [1, 5]),
        ("label.column", "sick"),
    ],
)
def test_whatever_gives_a_feature_its_meaning_changes_the_hash(place, value):
    assert Schema.of(changed(place, value)).hash != Schema.of(TABLE).hash


def test_the_order_of_the_columns_is_part_of_the_hash_and_what_is_ignored_is_not():
    turned = changed("columns", dict(reversed(TABLE["columns"].items())))
    assert Schema.of(turned).hash != Schema.of(TABLE).hash
    assert Schema.of(changed("ignore", ["name", "ward"])).hash == Schema.of(TABLE).hash
    assert Schema.of(changed("columns.age.range", [0.0, 110.0])).hash == Schema.of(TABLE).hash


REGRESSION = {"column": "ill", "task": "regression", "range": [0, 50], "huber": 5}
COUNT = {"column": "ill", "task": "count", "most": 20}
ORDINAL = {"column": "ill", "task": "ordinal", "classes": ["none", "mild", "severe"]}
SURVIVAL = {"task": "survival", "time": "t", "event": "e", "edges": [6, 12, 24]}


def test_tasks():
    assert Schema.of(changed("label", REGRESSION)).task == Task(
        "regression", huber=0.2
    )  # in units of the scaled label, [-1, 1]
    survival = Task("survival", bins=3, periods=(6, 6, 12))
    assert Schema.of(changed("label", SURVIVAL)).task == survival
    count, ordinal = (Schema.of(changed("label", label)) for label in (COUNT, ORDINAL))
    assert (count.task, ordinal.task) == (Task("count", most=20.0), Task("ordinal", 3))
    assert count.hash != Schema.of(changed("label", COUNT | {"most": 21})).hash
    assert all(Schema.parse(schema.text, "s").text == schema.text for schema in (count, ordinal))


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        ("columns", None, r"either \[columns.NAME\] tables or one table \[images\]"),
        ("columns", {}, "has no columns"),
        ("label", None, r"no table \[label\]"),
        ("colums", {}, "the field 'colums' is unknown"),
        (
            "columns.age.type",
            "float",
            "column 'age': type is 'float'; it must be one of number, category, boolean",
        ),
        ("columns.age.type", None, "column 'age': type is None"),
        ("columns.age.range", None, "column 'age': range is None; it must be"),
        ("columns.age.range", [110, 0], "low < high"),
        ("columns.age.range", [0, float("nan")], "two public numbers"),
        ("columns.age.range", [0, 10**400], "two public numbers"),
        ("columns.age.range", "fill in", "two public numbers"),
        ("columns.age.missing", 200, "a number within the range"),
        ("columns.age.missing", "own", "a number within the range"),
        ("columns.age.missing", "refuse", "indicator is True; .* only with a value for missing"),
        ("columns.age.categories", ["a"], "the field 'categories' is unknown"),
        (
            "columns.sex.categories",
            None,
            "categories is None; it must be a list of 1 or more different texts",
        ),
        ("columns.sex.categories", [1, 2], "in quotes"),
        ("columns.sex.categories", ["a", "a"], "different texts"),
        ("columns.sex.missing", 3, '"own" or "refuse"'),
        ("columns.smoker.missing", "no", 'true, false or "refuse"'),
        ("columns.ill", {"type": "boolean"}, "names 'ill' twice"),
        ("columns.age missing", {"type": "boolean"}, "names 'age missing' twice"),
        ("ignore", "id", "ignore is 'id'; it must be a list"),
        ("ignore", ["age"], "names 'age' twice"),
        (
            "label.task",
            "classes",
            "it must be one of binary, multiclass, ordinal, regression, count, survival",
        ),
        ("label.column", None, "column is None; it must be the name of a column"),
        ("label.classes", ["yes"], "2 or more different texts"),
        ("label.classes", ["a", "b", "c"], "'binary' with 3 classes"),
        ("label.weights", [1, 2, 3], "for each of the 2 classes"),
        ("label.weights", [1, 0], "above 0"),
        ("label", REGRESSION | {"huber": -1}, "huber is -1"),
        ("label", REGRESSION | {"classes": ["a", "b"]}, "the field 'classes' is unknown"),
        ("label", COUNT | {"most": 2.5}, "most is 2.5; it must be the public largest count"),
        ("label", ORDINAL | {"classes": ["no", "yes"]}, "three or more, in order, or be 'binary'"),
        ("label", ORDINAL | {"weights": [1, 2, 3]}, "the field 'weights' is unknown"),
        ("label", SURVIVAL | {"edges": [12, 6]}, "rising numbers above 0"),
        ("label", SURVIVAL | {"edges": [0, 6]}, "rising numbers above 0"),
        ("label", SURVIVAL | {"event": ""}, "event is ''"),
        ("images", {"height": 2}, r"either \[columns.NAME\] tables"),
    ],
)
def test_a_mistake_gets_one_sentence(place, value, sentence):
    with pytest.raises(BadInput, match=sentence) as caught:
        Schema.of(changed(place, value), "the schema s.toml")
    assert str(caught.value).startswith("the schema s.toml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        ("images.height", 0, "height is 0; it must be an integer from 1"),
        ("images.channels", 4, "1 .grey. or 3 .colour."),
        ("images.resize", None, "resize is None"),
        ("label.task", "regression", "one of binary, multiclass$"),
        ("label.column", "ill", "the field 'column' is unknown"),
    ],
)
def test_a_mistake_about_images_gets_one_sentence(place, value, sentence):
    with pytest.raises(BadInput, match=sentence):
        Schema.of(changed(place, value, tomllib.loads(IMAGES)))


def test_a_file_that_is_no_schema_is_refused(tmp_path):
    for text, sentence in (("[columns", "is not TOML"), (None, "cannot be read")):
        path = tmp_path / f"{sentence}.toml"
        if text:
            path.write_text(text)
        with pytest.raises(BadInput, match=sentence):
            load_schema(path)
    for text in ("", "[1]", json.dumps("x")):
        with pytest.raises(BadInput, match="contains no schema"):
            Schema.parse(text, "the card")
