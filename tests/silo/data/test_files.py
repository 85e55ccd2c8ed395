"""load_silos reads CSV, Parquet and NPZ to the same arrays, and each bad file is refused with one
sentence that names the place.
"""

import re
import zipfile
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from silodp.core.errors import BadInput
from silodp.silo.data.files import load_silos
from silodp.silo.data.records import Records

FRAME = pd.DataFrame(
    {"age": [40, 50, 60], "bp": [1.5, -2.0, 1e-3], "diagnosis": ["benign", "malignant", "benign"]}
)
CLASSES = ["benign", "malignant"]


def write(path: Path, frame: pd.DataFrame = FRAME) -> Path:
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        np.savez(path, **{str(name): np.array(frame[name].tolist()) for name in frame})
    return path


def text(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(*paths: Path, label="diagnosis", classes=CLASSES, **options) -> str:
    with pytest.raises(BadInput) as caught:
        load_silos(paths, label, classes=classes, **options)
    sentence = str(caught.value)
    assert sentence[-1] in ".?"
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("suffix", ["csv", "parquet", "npz"])
def test_every_format_gives_the_same_arrays(tmp_path, suffix):
    loaded = load_silos([write(tmp_path / f"north.{suffix}")], "diagnosis", classes=CLASSES)
    (x, y) = loaded.records_raw[0]
    assert (loaded.features, loaded.classes, loaded.names) == (
        ("age", "bp"),
        ("benign", "malignant"),
        ("north",),
    )
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(x, np.array([[40, 1.5], [50, -2], [60, 1e-3]], np.float32))
    assert y.tolist() == [0, 1, 0]


def test_columns_are_aligned_by_name_across_formats(tmp_path):
    paths = [
        write(tmp_path / "a.csv"),
        write(tmp_path / "b.parquet", FRAME[["diagnosis", "bp", "age"]]),
        write(tmp_path / "c.npz"),
    ]
    loaded = load_silos(paths, "diagnosis", classes=CLASSES)
    for x, y in loaded.records_raw:
        np.testing.assert_array_equal(x, loaded.records_raw[0][0])
        assert y.tolist() == [0, 1, 0]
    assert Records.of(loaded.records_raw, loaded.names).x.shape == (3, 3, 2)


def test_an_npz_may_hold_images_x_and_labels_y(tmp_path):
    images = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    np.savez(tmp_path / "a.npz", x=images, y=[1, 0])
    loaded = load_silos([tmp_path / "a.npz"], "diagnosis", classes=None)
    np.testing.assert_array_equal(loaded.records_raw[0][0], images.astype(np.float32))
    assert loaded.records_raw[0][1].tolist() == [1, 0]
    assert loaded.features == tuple(f"x{j}" for j in range(48))


@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [
        ([0, 1], None, [0, 1]),
        ([0.0, 1.0], None, [0, 1]),
        (["1", "0"], None, [1, 0]),
        ([3, 1], ["1", "2", "3"], [2, 0]),
        ([True, False], ["False", "True"], [1, 0]),
        ([0.5, -3], (), [0.5, -3.0]),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "parquet", "npz"])
def test_labels_become_class_numbers_or_targets(tmp_path, suffix, labels, classes, expected):
    loaded = load_silos(
        [write(tmp_path / f"a.{suffix}", pd.DataFrame({"x1": [1, 2], "t": labels}))],
        "t",
        classes=classes,
    )
    assert loaded.records_raw[0][1].tolist() == expected
    assert loaded.records_raw[0][1].dtype == (np.float32 if classes == () else np.int64)


def test_a_byte_order_mark_spaces_blank_lines_and_quotes_are_no_obstacle(tmp_path):
    path = text(
        tmp_path / "a.csv", '\ufeffage, bp ,diagnosis\n 1 ,2, "benign"\n\n3,"4",malignant \n'
    )
    loaded = load_silos([path], "diagnosis", classes=["benign", "malignant", '"benign"'])
    assert loaded.features == ("age", "bp")
    assert loaded.records_raw[0][0].tolist() == [[1, 2], [3, 4]]


def test_whole_numbers_may_be_followed_by_fractions_far_down_the_file(tmp_path):
    path = text(tmp_path / "a.csv", "a,t\n" + "1,0\n" * 300_000 + "0.5,1\n")
    x, y = load_silos([path], "t", classes=None).records_raw[0]
    assert (x[-1, 0], y[-1], len(y)) == (0.5, 1, 300_001)


def test_pandas_row_index_in_a_parquet_file_is_no_feature_and_decimals_are(tmp_path):
    frame = pd.DataFrame({"a": [Decimal("1.5"), Decimal("2")], "t": [0, 1]}, index=[7, 9])
    loaded = load_silos([write(tmp_path / "a.parquet", frame)], "t", classes=None)
    assert loaded.features == ("a",)
    assert loaded.records_raw[0][0].tolist() == [[1.5], [2.0]]


def test_names_fall_back_to_paths_where_stems_repeat(tmp_path):
    (tmp_path / "b").mkdir()
    paths = [write(tmp_path / "data.csv"), write(tmp_path / "b" / "data.csv")]
    assert load_silos(paths, "diagnosis", classes=CLASSES).names == tuple(map(str, paths))
    assert "given twice" in refusal(paths[0], paths[0])


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["a.csv is empty"]),
        ("age,diagnosis\n", ["a.csv has columns but no rows"]),
        ("age,Diagnosis_\n1,benign\n", ["no label column 'diagnosis'; is the first line a header"]),
        ("age;diagnosis\n1;benign\n", ["separated by semicolons; save it again with commas"]),
        ("47.25,Ms Jones,98765,benign\n", ["is the first line a header"]),
        ("diagnosis\nbenign\n", ["no feature columns"]),
        ("age,age ,diagnosis\n1,2,benign\n", ["more than one column with the name of column 1"]),
        (",age,diagnosis\n0,1,benign\n", ["column 1 has no name", "index=False"]),
        ('"a\nge",diagnosis\n1,benign\n', ["line break within its header"]),
        (
            "age,bp,diagnosis\n1,2,benign\n1,abc,benign\n",
            ["column 2, row 2 ", "not a finite number"],
        ),
        (
            "age,bp,diagnosis\n1,2,benign\n\n1,1_000,benign\n",
            ["column 2, row 2 ", "not a finite number"],
        ),
        ("age,bp,diagnosis\n1,2,benign\n1,,benign\n", ["column 2, row 2 ", "missing"]),
        (
            "age,bp,diagnosis\nx,2,benign\n1,NA,benign\n",
            ["column 1, row 1 ", "not a finite number"],
        ),
        (
            "age,bp,diagnosis\n1,2,benign\n1,x,benign\n1,NA,benign\n",
            ["column 2, row 2 ", "not a finite number"],
        ),
        ("age,diagnosis\nNaN,benign\n", ["column 1, row 1 ", "missing"]),
        ("age,diagnosis\n1,benign\n-inf,benign\n", ["column 1, row 2 ", "not a finite number"]),
        ("age,diagnosis\n1e300,benign\n", ["column 1, row 1 ", "single precision"]),
        ("age,diagnosis\n1,benign\n2\n", ["row 2 ", "1 cells", "2 columns"]),
        (
            "age,diagnosis\n1,benign\n2,Malignant\n",
            ["column 'diagnosis', row 2 ", "not one of the classes 'benign', 'malignant'"],
        ),
        ("age,diagnosis\n1,\n", ["column 'diagnosis', row 1 ", "missing"]),
        (b"age,diagnosis\n1,b\xe9nin\n", ["column 'diagnosis', row 1 ", "not one of the classes"]),
        ("\u00e2ge,diagnosis\n1,benign\n".encode("latin1"), ["not UTF-8"]),
    ],
)
def test_a_bad_csv_is_refused_with_its_place_and_without_its_cells(tmp_path, content, parts):
    sentence = refusal(text(tmp_path / "a.csv", content)).replace(
        str(tmp_path), ""
    )  # whose digits are no cell
    for part in ["a.csv", *parts]:
        assert part in sentence
    cells = set(
        re.split(r"[,;\n]", content if isinstance(content, str) else content.decode("latin1"))
    )
    for cell in cells - {"age", "bp", "diagnosis", *CLASSES, "1", "2", ""}:
        assert cell not in sentence


def test_different_columns_are_refused_with_what_is_missing_and_extra(tmp_path):
    sentence = refusal(
        write(tmp_path / "a.csv"), write(tmp_path / "b.csv", FRAME.rename(columns={"bp": "pulse"}))
    )
    assert "b.csv lacks column 2 of " in sentence
    assert "and also has column 2" in sentence
    assert "bp" not in sentence
    assert "pulse" not in sentence
    sentence = refusal(
        write(tmp_path / "a.npz"), write(tmp_path / "b.npz", FRAME.rename(columns={"bp": "pulse"}))
    )
    assert "and also has column 'pulse'" in sentence


@pytest.mark.parametrize(
    ("label", "classes", "first"),
    [
        ("1", None, "Ms Jones,47.25,1"),
        ("98765.5", (), "Ms Jones,47.25,98765.5"),
        ("benign", CLASSES, "Ms Jones,47.25,benign"),
        ("diagnosis", CLASSES, "47.25,NA,diagnosis"),
    ],
)
def test_a_first_line_that_is_most_likely_a_record_is_refused_and_not_quoted(
    tmp_path, label, classes, first
):
    names = first.split(",")
    frame = pd.DataFrame(
        [[1.5, 2.5, "2" if classes == () else (classes or ("0", "1"))[k]] for k in (0, 1)],
        columns=names,
    )
    sentence = refusal(
        text(tmp_path / "a.csv", frame.to_csv(index=False)), label=label, classes=classes
    )
    assert "a.csv seems to have no header" in sentence
    assert not any(cell in sentence for cell in ("Jones", "47.25", "98765", "benign"))
    assert load_silos([write(tmp_path / "a.npz", frame)], label, classes=classes).features == tuple(
        names[:2]
    )


def test_a_parquet_file_may_have_names_that_count_but_not_a_record_for_names(tmp_path):
    counted = pd.DataFrame([[1.5, 2.5, "0"], [2.5, 1.5, "1"]], columns=["0", "1", "2"])
    assert load_silos([write(tmp_path / "a.parquet", counted)], "2", classes=None).features == (
        "0",
        "1",
    )
    sentence = refusal(
        write(tmp_path / "b.parquet", counted.rename(columns={"0": "47.25", "1": "98765"})),
        label="2",
        classes=None,
    )
    assert "b.parquet seems to have no header" in sentence
    assert "98765" not in sentence


@pytest.mark.parametrize("suffix", ["parquet", "npz"])
@pytest.mark.parametrize(
    ("ages", "parts"),
    [
        (["1", "x", "3"], ["'age', row 2 ", "not a finite number"]),
        ([1.0, 2.0, np.nan], ["'age', row 3 ", "missing"]),
        (np.array(["2020-01-01"] * 3, "datetime64[s]"), ["'age', row 1 ", "not a finite number"]),
    ],
)
def test_a_cell_that_is_no_number_is_named_in_every_format(tmp_path, suffix, ages, parts):
    path, frame = tmp_path / f"a.{suffix}", FRAME.assign(age=ages)
    if suffix == "npz":
        np.savez(path, age=np.asarray(ages), diagnosis=np.array(FRAME["diagnosis"].tolist()))
    sentence = refusal(path if suffix == "npz" else write(path, frame))
    for part in parts:
        assert part in sentence
    assert "'x'" not in sentence
    assert "2020" not in sentence


def test_undeclared_classes_are_not_read_off_the_data(tmp_path):
    sentence = refusal(write(tmp_path / "a.csv"), classes=None)
    assert "benign" not in sentence
    assert "--classes" in sentence
    assert "0 or 1" in refusal(
        write(tmp_path / "b.csv", pd.DataFrame({"a": [1, 2, 3], "t": [0, 1, 2]})),
        label="t",
        classes=None,
    )
    assert "two or more different classes" in refusal(
        tmp_path / "a.csv", classes=["benign", "benign"]
    )


def test_a_regression_target_must_be_a_number(tmp_path):
    assert "column 'diagnosis', row 1 " in refusal(write(tmp_path / "a.csv"), classes=())


def test_files_that_are_not_there_or_not_data_are_refused(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    assert "does not exist" in refusal(tmp_path / "no.csv")
    assert "folder, not a file" in refusal(tmp_path / "folder.csv")
    assert "suffix '.xlsx'" in refusal(text(tmp_path / "a.xlsx", "x"))
    assert "no files are given" in refusal()
    whole = write(tmp_path / "a.parquet").read_bytes()
    assert "a.parquet" in refusal(text(tmp_path / "a.parquet", whole[:-20]))
    whole = write(tmp_path / "a.npz").read_bytes()
    for damaged in (whole[:-40], whole.replace(b"NUMPY", b"NUMPX"), b"", b"text"):
        assert "a.npz" in refusal(text(tmp_path / "a.npz", damaged))


def test_an_npz_that_needs_pickle_is_never_loaded(tmp_path):
    np.savez(
        tmp_path / "a.npz", age=np.array([1, "x"], object), diagnosis=np.array(["benign", "benign"])
    )
    assert "pickled objects are never loaded" in refusal(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("notes.txt", "hello")
    assert "b.npz" in refusal(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", age=np.zeros((2, 2)), diagnosis=np.array(["benign", "benign"]))
    assert "array 'age' has shape (2, 2)" in refusal(tmp_path / "c.npz")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_missing_cell_leaves_the_other_rows_bit_for_bit(tmp_path, suffix):
    """Integers that one rounding to single precision takes elsewhere than two, and decimals that
    are hard to round.
    """
    large, small = (
        [2**60 + 2**36 + 1, 2**60 - 2**35 - 1, 2**53 + 1],
        [8.54e-305, 1.2345678901234567, 0.1],
    )
    found = []
    for holes in (False, True):
        frame = pd.DataFrame(
            {
                "a": pd.array([*large, None if holes else 5], "Int64"),
                "b": [*small, None if holes else 5.0],
                "y": [0, 1, 0, 1],
            }
        )
        path = write(tmp_path / f"a.{suffix}", frame)
        if suffix == "csv" and holes:
            path.write_text(
                path.read_text().replace(",,", ", n/a ,")
            )  # arrow takes this for text, and so the column
        found.append(load_silos([path], "y", classes=None, holes=True).records_raw[0][0][:3])
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))
