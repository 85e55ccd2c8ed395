"""What a gate makes of a file in which one record cannot be read: that record alone is void, and
everybody else stays in its place.
"""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema
from silodp.silo.data.faults import Faults
from silodp.silo.data.tables import read_table

IMAGES = Schema.of(
    {
        "images": {"height": 4, "width": 4, "channels": 1, "resize": False},
        "label": {"task": "binary", "classes": ["ill", "well"]},
    }
)
PERSONS = Schema.of(
    {
        "person": "id",
        "rows_per_person": 2,
        "columns": {"a": {"type": "number", "range": [0, 10]}},
        "label": {"task": "binary", "column": "y", "classes": ["0", "1"]},
    }
)


def folder_of(tmp_path):
    for name in ("ill", "well"):
        (tmp_path / name).mkdir()
    for k in range(6):
        image = Image.fromarray(np.full((4, 4), 40 * k, np.uint8))
        image.save(tmp_path / ("ill", "well")[k % 2] / f"{k}.png")
    return tmp_path


@pytest.mark.parametrize("what", ["damaged", "size", "suffix", "class", "top"])
def test_one_image_that_cannot_be_read_is_void_in_its_place(tmp_path, what):
    folder = folder_of(tmp_path)
    good = read_table(folder, IMAGES)
    mine = folder / "ill" / "2.png"
    match what:
        case "damaged":
            mine.write_bytes(mine.read_bytes()[:20])
        case "size":
            Image.fromarray(np.zeros((5, 4), np.uint8)).save(mine)
        case "suffix":
            mine.rename(folder / "ill" / "2.gif")
        case "class":
            (folder / "unknown").mkdir()
            mine.rename(folder / "unknown" / "2.png")
        case "top":
            mine.rename(folder / "2.png")
    table = read_table(folder, IMAGES, Faults())
    others = np.arange(6) != 2
    if what == "suffix":  # a GIF that is a PNG inside can be read
        assert table.x.shape == good.x.shape
    else:
        assert table.void.tolist() == [False, False, True, False, False, False]
    assert np.array_equal(table.x[others], good.x[others])
    assert np.array_equal(table.y[others], good.y[others])


def test_a_row_that_cannot_be_read_is_left_out_of_its_person_and_of_nobody_else(tmp_path):
    file = tmp_path / "clinic.csv"
    rows = ["p,1,0", "q,2,1", "p,3,1", "p,4,0", "r,5,1", "q,6,0"]
    file.write_text("\n".join(["id,a,y", *rows]))
    good = read_table(file, PERSONS)
    file.write_text("\n".join(["id,a,y", "p,1,0", "q,2,1", "p,3,x", "p,4,0", "r,5,?", "q,6,0"]))
    table = read_table(file, PERSONS, Faults())
    assert table.void.tolist() == [False, False, True], "r has nothing but such a row"
    assert table.x[0, :, 0].tolist() == pytest.approx([-0.8, -0.2], abs=1e-6)
    assert np.array_equal(table.x[1], good.x[1])
    assert np.array_equal(table.y[1], good.y[1])


def test_a_row_with_other_cells_is_an_empty_one_whatever_the_encoding(tmp_path):
    for encoding in ("utf-8", "latin-1", "windows-1252", "utf-16"):
        table = json.loads(PERSONS.by_row.text) | {"encoding": encoding, "ignore": ["id"]}
        file, faults = tmp_path / f"{encoding}.csv", Faults()
        text = "id,a,y\nä,1,0\n\nb,2\nc,3,1\nd,4,1,5\ne,5,0\n"
        file.write_bytes(text.encode(encoding))
        found = read_table(file, Schema.of(table), faults)
        assert found.void.tolist() == [False, True, False, True, False], encoding
        assert found.x[:, 0].tolist() == pytest.approx([-0.8, 0.0, -0.4, 0.0, 0.0], abs=1e-6)


def test_a_byte_that_is_no_letter_in_the_files_encoding_stops_no_file(tmp_path):
    table = json.loads(PERSONS.by_row.text) | {"encoding": "windows-1252", "ignore": ["id"]}
    file = tmp_path / "clinic.csv"
    file.write_bytes(b"id,a,y\nx,1,0\ny,\x81,1\nz,3,1\n")
    found = read_table(file, Schema.of(table), Faults())
    assert found.missing[:, 0].tolist() == [False, True, False]


@pytest.mark.parametrize("row", [b"\xff", b"\xff,\xfe,1,2,3", b"\xe2\x80", b"a\xc3\r\nb"])
def test_a_row_with_other_cells_that_is_no_text_is_empty_and_printed_nowhere(tmp_path, capfd, row):
    schema = Schema.of(json.loads(PERSONS.by_row.text) | {"ignore": ["id"]})
    file = tmp_path / "clinic.csv"
    file.write_bytes(b"id,a,y\nx,1,0\n" + row + b"\nz,3,1\n\xff,4,1\n")
    found = read_table(file, schema, Faults())
    assert found.void.tolist() == [False, *[True] * (row.count(b"\n") + 1), False, False]
    assert found.x[:, 0].tolist()[-2:] == pytest.approx([-0.4, -0.2], abs=1e-6)
    with pytest.raises(BadInput, match="row 2"):
        read_table(file, schema)
    assert capfd.readouterr() == ("", "")


def test_codes_for_a_missing_value_name_no_person(tmp_path):
    """A server writes the codes. Were an id one of them, n would tell how many rows a person has,
    and each of these rows would be protected by itself.
    """
    file = tmp_path / "clinic.csv"
    file.write_text("\n".join(["id,a,y", "p,1,0", "q,2,1", "p,3,1", "q,4,0", "r,5,1"]))
    aimed = Schema.of(
        {
            "missing_codes": ["p"],
            "person": "id",
            "rows_per_person": 2,
            "columns": {"a": {"type": "number", "range": [0, 10]}},
            "label": {"task": "binary", "column": "y", "classes": ["0", "1"]},
        }
    )
    good, table = read_table(file, PERSONS, Faults()), read_table(file, aimed, Faults())
    assert table.raw[3] == good.raw[3] == ["p", "q", "r"]
    assert np.array_equal(table.x, good.x)
    assert np.array_equal(table.y, good.y)


TEXTS = pa.array([b"a", b"b", b"\xff", b"c"], pa.binary()).buffers()
UNREADABLE = {
    "date": pa.array([1, 2, 10**7, 3], pa.date32()),
    "time": pa.array([1, 2, 2**31 - 1, 3], pa.time32("ms")),
    "moment": pa.array([1, 2, 2**62, 3], pa.timestamp("us", tz="Europe/Berlin")),
    "early": pa.array([1, 2, -(2**62), 3], pa.timestamp("us", tz="Europe/Berlin")),
    "late": pa.array([1, 2, 10**15, 3], pa.timestamp("s", tz="UTC")),
    "text": pa.Array.from_buffers(pa.string(), 4, TEXTS),
}
TABLE = Schema.of(
    {
        "ignore": ["note"],
        "columns": {"a": {"type": "number", "range": [0, 10]}},
        "label": {"task": "binary", "column": "y", "classes": ["0", "1"]},
    }
)


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_cell_of_a_parquet_file_that_cannot_be_read_is_missing_and_no_other_is(tmp_path, what):
    """A year of five digits, a time after midnight, a byte that is no text: in any column."""
    file = tmp_path / "clinic.parquet"
    columns = {"a": [1.0, 2.0, 3.0, 4.0], "y": [0, 1, 0, 1]}
    notes = UNREADABLE[what]
    good = notes.slice(0, 2).to_pylist() + notes.slice(3).to_pylist()
    parquet.write_table(pa.table(columns | {"note": notes}), file)
    faults = Faults()
    table = read_table(file, TABLE, faults)
    assert faults.cells["note"].tolist() == [False, False, True, False]
    assert table.y.tolist() == [0, 1, 0, 1]
    assert not table.void.any()
    parquet.write_table(
        pa.table(columns | {"note": pa.array([*good[:2], None, good[2]], notes.type)}), file
    )
    plain = read_table(file, TABLE, Faults())
    assert np.array_equal(table.raw[0], plain.raw[0], equal_nan=True), "the ledger knows the others"
    assert np.array_equal(table.x, plain.x)


def test_a_text_of_an_npz_file_that_is_no_unicode_stops_no_gate(tmp_path):
    file = tmp_path / "clinic.npz"
    seen = []
    for note in ("x", "x\udcff"):
        np.savez(file, a=np.array([1.0, 2.0]), y=np.array([0, 1]), note=np.array(["u", note]))
        seen.append(read_table(file, TABLE, Faults()))
    assert np.array_equal(seen[0].x, seen[1].x)
    assert not seen[1].void.any()
