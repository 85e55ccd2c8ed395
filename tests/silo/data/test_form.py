"""Files as hospitals export them: semicolons, decimal commas, another encoding. The schema says how
a file is written; no cell decides for another.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Form, Schema
from silodp.host.schema import load_schema
from silodp.silo.data.files import form_of, pointed, read_cells
from silodp.silo.data.tables import raw, read_table
from silodp.silo.ledger.identity import Identity

GERMAN = """separator = ";"
decimal = ","
encoding = "latin-1"
ignore = ["Fall", "Datum"]
missing_codes = ["k.A."]

[columns."Größe"]
type = "number"
range = [100, 230]
missing = 170

[columns.Raucher]
type = "boolean"
missing = false

[label]
column = "Tod"
task = "binary"
classes = ["nein", "ja"]
"""
ROWS = (
    "F1;01.08.2025;160,5;ja;nein",
    "F2;02.08.2025;k.A.;nein;ja",
    "F3;03.08.2025;1.170,0;k.A.;nein",
    "F4;04.08.2025;199;Nein;ja",
)


def german(folder: Path, rows=ROWS, name: str = "klinik.csv") -> Path:
    path = folder / name
    path.write_bytes("\n".join(["Fall;Datum;Größe;Raucher;Tod", *rows, ""]).encode("latin-1"))
    return path


@pytest.fixture
def schema(tmp_path) -> Schema:
    (tmp_path / "schema.toml").write_text(GERMAN, encoding="utf-8")
    return load_schema(tmp_path / "schema.toml")


def test_a_german_export_is_read_as_it_is(tmp_path, schema):
    table = read_table(german(tmp_path), schema)
    size = np.array([160.5, 170, 230, 199])  # filled in, and clipped
    assert table.x[:, 0] == pytest.approx(2 * (size - 100) / 130 - 1, abs=1e-6)
    assert table.x[:, 1].tolist() == [1, -1, -1, -1]
    assert table.y.tolist() == [0, 1, 0, 1]
    assert "separator" not in schema.text, "each silo's own business"
    assert schema.hash == Schema.parse(schema.text, "x").hash


def test_a_cell_is_read_by_itself_whatever_the_others_hold(tmp_path, schema):
    """Red if a file's cells were to decide together how commas are meant."""
    whole = read_table(german(tmp_path), schema)
    for k in range(len(ROWS)):
        other = list(ROWS)
        other[k] = "X;01.01.2025;100.5;ja;ja"  # a point where the others have commas
        changed = read_table(german(tmp_path, other, "other.csv"), schema)
        rest = [j for j in range(len(ROWS)) if j != k]
        np.testing.assert_array_equal(changed.x[rest], whole.x[rest])
    assert [
        pointed(t) for t in ("12,5", "1.234,5", "1.234", "01.08.2025", "1,2,3", "a,5", "12.5")
    ] == [
        "12.5",
        "1234.5",
        "1.234",
        "01.08.2025",
        "1,2,3",
        "a,5",
        "12.5",
    ]


def test_a_file_that_is_saved_in_another_form_gets_no_new_budget(tmp_path, schema):
    rng = np.random.default_rng(0)
    rows = [
        f"F{k};0{1 + k % 9}.08.2025;{v:.1f};{'ja' if k % 3 else 'nein'};{'ja' if k % 2 else 'nein'}"
        for k, v in enumerate(rng.normal(170, 9, 60))
    ]
    comma = read_cells(
        german(
            tmp_path,
            [
                row.replace(f"{row.split(';')[2]}", row.split(";")[2].replace(".", ","))
                for row in rows
            ],
        ),
        schema.form,
    )
    again = tmp_path / "again.csv"
    again.write_text(
        "\n".join(["Fall,Datum,Größe,Raucher,Tod", *(row.replace(";", ",") for row in rows), ""]),
        encoding="utf-8",
    )
    unsaid = read_cells(
        tmp_path / "klinik.csv", Form(";", ".", "latin-1")
    )  # a schema that does not say that commas are decimal
    sketch = Identity.of(*raw(comma)[:3]).sketch(b"k" * 32)
    for other in (read_cells(again), unsaid):
        assert sketch.compare(Identity.of(*raw(other)[:3])).records == 1.0


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ('separator = "x"', "separator is 'x'"),
        ('decimal = ","', "are both ','"),
        ('encoding = "klingon"', "encoding is 'klingon'"),
    ],
)
def test_a_form_that_cannot_be_is_refused(tmp_path, field, sentence):
    (tmp_path / "s.toml").write_text(field + "\n" + GERMAN.split("\n\n", 1)[1])
    with pytest.raises(BadInput, match=sentence):
        load_schema(tmp_path / "s.toml")


def test_from_a_german_export_to_risks_as_a_new_user_would(said, tmp_path, monkeypatch):
    for name in ("nord.csv", "süd.csv"):
        german(
            tmp_path,
            [
                f"F{k};01.08.2025;{150 + k % 50},5;{'ja' if k % 3 else 'nein'};{'ja' if k % 2 else 'nein'}"  # noqa: E501
                for k in range(80)
            ],
            name,
        )
    assert form_of(tmp_path / "nord.csv") == Form(";", ",", "latin-1")
    answers = iter(
        [
            "Tod",
            "binary",
            "nein|ja",
            "",
            "ignore",
            "ignore",
            "number",
            "100|230",
            "170",
            "boolean",
            "false",
            "k.A.",
            "nord.csv|süd.csv",
        ]
    )
    monkeypatch.setattr("builtins.input", lambda question: next(answers).replace("|", ","))

    said("init", "studie", "--from", "nord.csv", "--ask")
    assert load_schema("studie/schema.toml").form == Form(";", ",", "latin-1")
    assert "stop:" not in said("silo", "check", "süd.csv", "--schema", "studie/schema.toml")
    said(
        "train",
        "--project",
        "studie",
        "--algorithm",
        "mb-sgd",
        "--rounds",
        2,
        "--step",
        1,
        "--model",
        "additive:4",
        "--epsilon",
        5,
        "--seed",
        1,
    )
    rows = json.loads(said("predict", "studie/runs/train", "nord.csv", "--keep", "Fall", "--json"))[
        "rows"
    ]
    assert list(rows[0]) == ["Fall", "risk_nein", "risk_ja", "predicted"]
    said("export", "model", "studie/runs/train", "--to", "sklearn")
