"""By the schema every silo's file becomes the same features, whatever its order and kind; a bad one
is refused without a cell's value.
"""

import json
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema
from silodp.host.schema import schema_text
from silodp.silo.data.heldout import held_out
from silodp.silo.data.tables import load_by_schema, read_table, table_of
from silodp.silo.ledger.identity import Identity

SCHEMA = Schema.of(
    tomllib.loads("""
ignore = ["id"]
[columns.age]
type = "number"
range = [0, 100]
missing = 50
indicator = true
[columns.sex]
type = "category"
categories = ["female", "male", "other"]
missing = "own"
[columns.ward]
type = "category"
categories = ["1", "2", "none"]
[columns.smoker]
type = "boolean"
missing = false
indicator = true
[columns.bp]
type = "number"
range = [50, 250]
[label]
column = "ill"
task = "binary"
classes = ["no", "yes"]
""")
)
GOOD = "age,sex,ward,smoker,bp,ill\n25,female,1,yes,150,no\nNA,male,2.0,,50,yes\n130,diverse,none,0,300,yes\n0,,1,FALSE,100,no\n"  # noqa: E501
X = [
    [-0.5, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0],
    [0, 1, 0, 1, 0, 0, 0, 1, 0, -1, 1, -1],
    [1, 0, 0, 0, 1, 0, 0, 0, 1, -1, 0, 1],
    [-1, 0, 0, 0, 0, 1, 1, 0, 0, -1, 0, -0.5],
]


def read_silo(path: Path, schema: Schema) -> tuple[np.ndarray, np.ndarray]:
    table = read_table(path, schema)
    return table.x, table.y


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_cells_become_features(tmp_path):
    x, y = read_silo(write(tmp_path / "a.csv", GOOD), SCHEMA)
    np.testing.assert_array_equal(x, np.array(X, np.float32))
    assert (x.shape[1], x.dtype) == (len(SCHEMA.features), np.float32)
    assert (y.tolist(), y.dtype) == ([0, 1, 1, 0], np.int64)


def test_other_spellings_of_a_category_are_the_category_and_part_of_what_a_silo_approves(tmp_path):
    (tmp_path / "a.csv").write_text(GOOD.replace("female", "W"))
    table = json.loads(SCHEMA.text) | {"ignore": ["id"]}
    assert "aliases" not in SCHEMA.text
    table["columns"]["sex"]["aliases"] = {"W": "female", "Weiblich": "female"}
    schema = Schema.of(table)
    np.testing.assert_array_equal(read_silo(tmp_path / "a.csv", schema)[0], X)
    assert schema.hash != SCHEMA.hash
    assert Schema.parse(schema.text, "x").text == schema.text
    assert Schema.of(tomllib.loads(schema_text(table))).text == schema.text
    for wrong in ({"W": "woman"}, {"male": "female"}, ["W"], {"": "female"}):
        table["columns"]["sex"]["aliases"] = wrong
        with pytest.raises(BadInput, match=r"aliases is .* it must be a table of other spellings"):
            Schema.of(table)


def test_order_extra_columns_and_kind_of_file_do_not_matter(tmp_path):
    first = write(tmp_path / "a.csv", GOOD)
    frame = pd.read_csv(
        first, keep_default_na=False, na_values=["NA"], dtype={"sex": str, "ward": str}
    )
    turned = frame[["ill", "bp", "smoker", "ward", "sex", "age"]].assign(id=range(4))
    turned.to_csv(tmp_path / "b.csv", index=False)
    turned.to_parquet(tmp_path / "c.parquet")
    np.savez(tmp_path / "d.npz", **{str(name): np.array(turned[name].tolist()) for name in turned})
    loaded = load_by_schema(
        [first, *(tmp_path / name for name in ("b.csv", "c.parquet", "d.npz"))], SCHEMA
    )
    for x, y in loaded.records_raw:
        np.testing.assert_array_equal(x, loaded.records_raw[0][0])
        np.testing.assert_array_equal(y, loaded.records_raw[0][1])
    assert loaded.names == ("a", "b", "c", "d")


CODES = ["999000011000000103", "999000041000000102"]
LARGE = [2**53 + 1, 2**60 + 2**36 + 1, 2**53 + 3, 7]
DAYS = ["2020-01-01 00:00:00", "2021-05-06 07:08:09"]
KINDS = {
    "codes": (
        [int(code) for code in CODES] * 2,
        pa.int64(),
        {"type": "category", "categories": [*CODES, "other"], "missing": "own"},
    ),
    "coded": (
        [int(code) for code in CODES] * 2,
        pa.dictionary(pa.int8(), pa.int64()),
        {"type": "category", "categories": [*CODES, "other"], "missing": "own"},
    ),
    "integers": (LARGE, pa.int64(), {"type": "number", "range": [0, 2.0**61], "missing": 2.0**61}),
    "texts": (
        ["a", "b", "c", "a"],
        pa.string(),
        {"type": "category", "categories": ["a", "b", "other"], "missing": "own"},
    ),
    "booleans": (
        [True, False, True, False],
        pa.bool_(),
        {"type": "boolean", "missing": False, "indicator": True},
    ),
    "floats": (
        [0.1, 1e-30, 123456.789012345678, 0.3],
        pa.float64(),
        {"type": "number", "range": [0, 1e6], "missing": 1e6},
    ),
    "zeros": (
        [0.0, -0.0, 0.0, -0.0],
        pa.float64(),
        {"type": "category", "categories": ["0", "other"], "missing": "own"},
    ),
    "times": (
        pd.to_datetime(DAYS * 2).to_list(),
        pa.timestamp("us"),
        {"type": "category", "categories": [*DAYS, "other"], "missing": "own"},
    ),
}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_that_goes_missing_changes_no_other_record(tmp_path, kind, suffix):
    """To the last bit, in features and in what a ledger knows a record by: so one replaced record
    stays one.
    """
    values, arrow, column = KINDS[kind]
    schema = Schema.of(
        {
            "columns": {"c": column},
            "label": {"column": "y", "task": "binary", "classes": ["0", "1"]},
        }
    )

    def read(cells):
        path = tmp_path / f"a.{suffix}"
        if suffix == "csv":
            path.write_text(
                "c,y\n"
                + "".join(
                    f"{'' if cell is None else cell},{k % 2}\n" for k, cell in enumerate(cells)
                )
            )
        else:
            plain = arrow.value_type if pa.types.is_dictionary(arrow) else arrow
            column = pa.array(cells, plain)
            column = column.dictionary_encode() if plain is not arrow else column
            parquet.write_table(pa.table({"c": column, "y": pa.array([0, 1] * 2)}), path)
        table = read_table(path, schema)
        return np.column_stack([table.x, *table.raw[:2]])

    whole = read(values)
    for gone in range(len(values)):
        others = [k for k in range(len(values)) if k != gone]
        holed = read([None if k == gone else value for k, value in enumerate(values)])
        np.testing.assert_array_equal(holed[others].view(np.uint32), whole[others].view(np.uint32))
        assert not np.array_equal(holed[gone], whole[gone])


def test_a_ledger_knows_records_in_another_kind_of_file_and_spelling(tmp_path):
    """Or a second budget is to be had by saving the file again."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": draw.integers(18, 99, 60),
            "smoker": draw.random(60) < 0.3,
            "sex": draw.choice(["f", "m"], 60),
            "y": draw.integers(0, 2, 60),
        }
    )
    columns = {
        "age": {"type": "number", "range": [0, 110]},
        "smoker": {"type": "boolean"},
        "sex": {"type": "category", "categories": ["f", "m", "other"]},
    }
    schema = Schema.of(
        {"columns": columns, "label": {"column": "y", "task": "binary", "classes": ["0", "1"]}}
    )
    frame.to_parquet(tmp_path / "first.parquet", index=False)
    first = Identity.of(*read_table(tmp_path / "first.parquet", schema).raw)
    for k, words in enumerate(
        ("True False", "TRUE FALSE", "true false", "1 0", "1.0 0.0", "yes no")
    ):
        yes, no = words.split()
        again = frame.assign(
            smoker=np.where(frame["smoker"], yes, no),
            sex=frame["sex"].str.upper() if k % 2 else frame["sex"],
        )
        again.to_csv(tmp_path / "again.csv", index=False)
        assert (
            first.sketch(b"k" * 32)
            .compare(Identity.of(*read_table(tmp_path / "again.csv", schema).raw))
            .known
            == 1.0
        )
    assert (
        first.sketch(b"k" * 32)
        .compare(Identity.of(*read_table(tmp_path / "first.parquet", schema).raw))
        .known
        == 1.0
    )
    other = frame.assign(age=frame["age"] + 1000)
    other.to_csv(tmp_path / "other.csv", index=False)
    assert (
        not first.sketch(b"k" * 32)
        .compare(Identity.of(*read_table(tmp_path / "other.csv", schema).raw))
        .same
    )


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "age,sex",
            "Age,sex",
            "lacks 'age' of the schema's columns; did you mean its column 'Age'?",
        ),
        ("bp,ill", "bp,sick", "lacks 'ill' of the schema's columns."),
        ("age,sex,ward,smoker,bp,ill\n", "", "is the first line a header of names"),
        (",", ";", "the cells are separated by semicolons; save it again with commas"),
        (
            "age,sex,ward,smoker,bp,ill",
            "age,sex,ward,smoker,bp,ill,name",
            "cells, but the header names",
        ),
        (
            "25,",
            "abc,",
            (
                "column 'age', row 1 (counted from 1, without the header): the value is not a "
                "finite number."
            ),
        ),
        (
            "25,",
            "inf,",
            (
                "column 'age', row 1 (counted from 1, without the header): the value is not a "
                "finite number."
            ),
        ),
        (
            ",150,",
            ",,",
            (
                "column 'bp', row 1 (counted from 1, without the header): the value is missing, "
                "which the schema does not allow."
            ),
        ),
        (
            ",1,",
            ",17,",
            (
                "column 'ward', row 1 (counted from 1, without the header): the value is not one "
                "of '1', '2', 'none' (and in 1 more rows)."
            ),
        ),
        (
            ",1,yes",
            ",,yes",
            "column 'ward', row 1 (counted from 1, without the header): the value is missing",
        ),
        (
            ",FALSE,",
            ",perhaps,",
            (
                "column 'smoker', row 4 (counted from 1, without the header): the value is not "
                "true or false"
            ),
        ),
        (
            "50,yes",
            "50,maybe",
            (
                "column 'ill', row 2 (counted from 1, without the header): the value is not one of "
                "'no', 'yes'."
            ),
        ),
        (
            "50,yes",
            "50,",
            "column 'ill', row 2 (counted from 1, without the header): the value is missing",
        ),
        (GOOD[GOOD.index("\n") :], "\n", "has columns but no rows"),
        (GOOD, "", "is empty"),
    ],
)
def test_a_bad_file_gets_one_sentence_without_a_value(tmp_path, old, new, sentence):
    assert old in GOOD
    with pytest.raises(BadInput) as caught:
        read_silo(write(tmp_path / "a.csv", GOOD.replace(old, new)), SCHEMA)
    said = str(caught.value)
    assert said.startswith(str(tmp_path / "a.csv"))
    assert sentence in said
    for secret in ("abc", "17", "perhaps", "maybe", "diverse", "130"):
        assert secret not in said.replace(str(tmp_path), "")


def test_columns_besides_are_refused_unless_listed(tmp_path):
    text = "".join(f"{line},x\n" for line in GOOD.splitlines())
    with pytest.raises(
        BadInput,
        match=(
            "has 'x' in addition to the schema's columns; drop them, or list them in the "
            "schema's `ignore`"
        ),
    ):
        read_silo(write(tmp_path / "a.csv", text), SCHEMA)
    assert (
        len(read_silo(write(tmp_path / "b.csv", text.replace(",x\n", ",id\n", 1)), SCHEMA)[1]) == 4
    )


@pytest.mark.parametrize("nested", [[[1], [2]], [{"a": 1}, {"a": 2}], [np.zeros(3), np.ones(3)]])
@pytest.mark.parametrize("role", ["id", "label", "x"])
def test_a_column_of_lists_or_structs_gets_one_sentence_even_if_ignored(
    tmp_path, silodp, nested, role
):
    pd.DataFrame({"x": [1.0, 2.0], "id": [1, 2], "label": [0, 1]} | {role: nested}).to_parquet(
        tmp_path / "a.parquet"
    )
    (tmp_path / "s.toml").write_text(
        'ignore = ["id"]\n[columns.x]\ntype = "number"\nrange = [0, 1]\n[label]\ncolumn = '
        '"label"\ntask = "binary"\nclasses = ["0", "1"]\n'
    )
    for words in ((), ("--schema", tmp_path / "s.toml")):
        code, out, err = silodp(
            "silo",
            "init",
            tmp_path / "gate",
            "--data",
            tmp_path / "a.parquet",
            "--epsilon",
            3,
            *words,
        )
        assert (code, out) == (2, "")
        assert f"column '{role}' contains lists or structs" in err
        assert err.count("\n") == 1


def with_label(**label) -> Schema:
    return Schema.of({"columns": {"age": {"type": "number", "range": [0, 100]}}, "label": label})


def test_a_number_to_predict_is_scaled_to_its_public_range(tmp_path):
    path = write(tmp_path / "a.csv", "age,days\n10,0\n20,15\n30,99\n")
    _, y = read_silo(path, with_label(task="regression", column="days", range=[0, 30]))
    assert (y.tolist(), y.dtype) == ([-1.0, 0.0, 1.0], np.float32)


def test_survival_times_become_the_bin_and_whether_the_event_was_seen(tmp_path):
    rows = [
        (0, 1, 1),
        (6, 1, 1),
        (6.1, 1, 3),
        (6, 0, 0),
        (12, 0, 2),
        (24, 1, 5),
        (25, 1, 6),
        (99, 0, 6),
    ]
    path = write(tmp_path / "a.csv", "age,t,died\n" + "".join(f"50,{t},{e}\n" for t, e, _ in rows))
    schema = with_label(task="survival", time="t", event="died", edges=[6, 12, 24])
    assert read_silo(path, schema)[1].tolist() == [code for _, _, code in rows]
    for old, new, sentence in (
        (",6.1,", ",-1,", "'t', row 3 .*the time is below 0"),
        (",99,0", ",99,", "'died', row 8 .*is missing"),
    ):
        with pytest.raises(BadInput, match=sentence):
            read_silo(write(tmp_path / "b.csv", path.read_text().replace(old, new)), schema)


def test_counts_are_whole_and_clipped_to_the_public_most_and_ordered_classes_keep_their_order(
    tmp_path,
):
    path = write(tmp_path / "a.csv", "age,ill\n50,0\n50,3\n50,99\n")
    y = read_silo(path, with_label(column="ill", task="count", most=20))[1]
    assert (y.tolist(), y.dtype) == ([0.0, 3.0, 20.0], np.float32)
    for bad in ("-1", "1.5"):
        with pytest.raises(BadInput, match=r"'ill', row 2 .*below 0 or not a whole number"):
            read_silo(
                write(tmp_path / "b.csv", f"age,ill\n50,0\n50,{bad}\n"),
                with_label(column="ill", task="count", most=20),
            )
    path = write(tmp_path / "c.csv", "age,ill\n50,severe\n50,none\n50,mild\n")
    ordered = with_label(column="ill", task="ordinal", classes=["none", "mild", "severe"])
    assert read_silo(path, ordered)[1].tolist() == [2, 0, 1]


# --- images --------------------------------------------------------------------------------------


def images(channels: int = 1, *, resize: bool = False) -> Schema:
    label = {"task": "binary", "classes": ["healthy", "ill"]}
    return Schema.of(
        {
            "images": {"height": 4, "width": 6, "channels": channels, "resize": resize},
            "label": label,
        }
    )


@pytest.fixture
def folder(tmp_path):
    for name, shade, size, mode in (
        ("ill/b.png", 255, (6, 4), "L"),
        ("healthy/a.png", 0, (6, 4), "RGB"),
        ("ill/b.jpg", 51, (6, 4), "L"),
    ):
        (tmp_path / "north" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size, shade if mode == "L" else (shade,) * 3).save(
            tmp_path / "north" / name
        )
    return tmp_path / "north"


def test_images_are_records_in_one_order_with_their_folders_as_classes(folder):
    (folder / ".DS_Store").write_text("")
    (folder / "ill" / ".hidden").write_text("")
    for channels in (1, 3):
        x, y = read_silo(folder, images(channels))
        assert y.tolist() == [0, 1, 1]
        np.testing.assert_allclose(
            x, np.array([[-1.0], [-0.6], [1.0]]) * np.ones(channels * 24), atol=0.02
        )


def test_the_class_of_one_image_moves_no_other_between_the_parts(tmp_path):
    for name in ("healthy", "ill"):
        (tmp_path / name).mkdir()
    for i in range(40):
        Image.new("L", (6, 4), 5 * i).save(tmp_path / ("healthy", "ill")[i % 2] / f"{i:02d}.png")
    parts = []
    for _ in range(2):
        x, y = read_silo(tmp_path, images())
        parts.append(set(x[held_out(len(y), 0.3), 0].tolist()))
        if y.sum() == 20:
            (tmp_path / "healthy" / "00.png").replace(tmp_path / "ill" / "00.png")
    assert y.sum() == 21
    assert parts[0] == parts[1]


def test_a_ledger_knows_images_by_their_pixels_however_they_are_packed(tmp_path):
    draw, found = np.random.default_rng(0), []
    pictures = [Image.fromarray(draw.integers(0, 256, (9, 9), dtype=np.uint8)) for _ in range(20)]
    other = [*pictures[:19], Image.new("L", (9, 9))]
    ways = {"a": {}, "b": {"compress_level": 0}, "c": {"mode": "RGB"}, "d": {"mode": "P"}, "e": {}}
    for way, options in ways.items():
        for i, picture in enumerate(other if way == "e" else pictures):
            path = tmp_path / way / ("healthy", "ill")[i % 2] / f"{i:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.convert(options.get("mode", "L")).save(
                path, compress_level=options.get("compress_level", 6)
            )
        found.append(
            Identity.of(
                *read_table(tmp_path / way, images(3 if way == "c" else 1, resize=True)).raw
            )
        )
    assert [found[0].sketch(b"k" * 32).compare(one).known for one in found] == [1, 1, 1, 1, 0.95]


def test_rows_are_rows_and_channels_come_first(folder):
    picture = Image.new("RGB", (6, 4))
    picture.putpixel((5, 0), (255, 0, 0))
    picture.save(folder / "healthy" / "a.png")
    schema = images(3)
    assert schema.features[int(read_silo(folder, schema)[0][0].argmax())] == "c0y0x5"


def test_sixteen_bits_are_scaled_and_a_palette_is_resolved(folder):
    Image.fromarray(np.full((4, 6), 65535 // 2, np.uint16)).save(folder / "healthy" / "a.png")
    assert abs(read_silo(folder, images())[0][0]).max() < 0.02
    Image.new("L", (6, 4), 255).convert("P").save(folder / "healthy" / "a.png", transparency=0)
    assert read_silo(folder, images())[0][0].min() > 0.98


def test_another_size_is_resized_or_refused(folder):
    Image.new("L", (20, 30), 255).save(folder / "healthy" / "a.png")
    x, _ = read_silo(folder, images(resize=True))
    assert (x.shape, x[0].min()) == ((3, 24), 1.0)
    with pytest.raises(BadInput, match=r"a.png does not have the schema's size of 6 x 4 pixels"):
        read_silo(folder, images())


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "healthy/c.gif",
            b"GIF89a",
            "has the suffix '.gif'; an image must be .png, .jpg or .jpeg.",
        ),
        ("healthy/c.png", b"\x89PNG", "is not a complete PNG or JPEG image"),
        (
            "dead/c.png",
            b"",
            "dead is not a sub-folder for one of the schema's classes 'healthy', 'ill'",
        ),
        ("readme.txt", b"", "readme.txt is not a sub-folder"),
        ("ill/a.png", b"", "ill/a.png have one name; give each image of a silo its own"),
    ],
)
def test_a_bad_folder_gets_one_sentence(folder, name, content, sentence):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_silo(folder, images())
    assert sentence in str(caught.value)


def test_a_folder_that_is_none_or_empty_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, sentence in (("empty", "has no images"), ("absent", "is not a folder")):
        with pytest.raises(BadInput, match=sentence):
            read_silo(tmp_path / name, images())


CELLS = {
    "float32": [np.float32(v) for v in (0.1, -9.0, -0.0, 0.0, np.nan)],
    "float64": [0.1, -9.0, -0.0, 0.0, 1.0, np.nan],
    "int64": [1, -9, 0, 2],
    "object": ["0.1", 0.1, True, 1, 1.0, -0.0, 0.0, "-9", -9, None, ""],
}


@pytest.mark.parametrize("dtype", CELLS)
def test_one_records_cell_changes_no_other_records_features(dtype):
    """Missing codes, -0.0, and values that are equal but not of one type: whatever one cell holds,
    the others read as they did, bit for bit.
    """
    schema = Schema.of(
        {
            "missing_codes": ["-9"],
            "columns": {
                "dose": {
                    "type": "category",
                    "categories": ["0.1", "0.0", "1", "True", "0", "other"],
                    "missing": "own",
                }
            },
            "label": {"column": "ill", "task": "binary", "classes": ["0", "1"]},
        }
    )
    rng = np.random.default_rng(0)
    for _ in range(20):
        others = [CELLS[dtype][k] for k in rng.integers(len(CELLS[dtype]), size=5)]
        seen = []
        for mine in CELLS[dtype]:
            column = np.empty(6, dtype)
            column[:] = [mine, *others]
            seen.append(table_of("file", {"dose": column, "ill": np.zeros(6, int)}, schema).x[1:])
        assert all(np.array_equal(x, seen[0]) for x in seen)
