"""Dirty files, each with the sentence that its hospital reads before any budget is spent;
docs/check.md lists them.
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema
from silodp.host.schema import load_schema
from silodp.silo.data.check import check
from silodp.silo.data.suspicious import second_unit
from silodp.silo.data.tables import read_table

ROOT = Path(__file__).parents[3]
SCHEMA = """
ignore = ["patient_id"]
[columns.age]
type = "number"
range = [0, 110]
missing = 50
[columns.weight]
type = "number"
range = [30, 250]
[columns.sex]
type = "category"
categories = ["female", "male"]
[columns.smoker]
type = "boolean"
[label]
column = "readmitted"
task = "binary"
classes = ["no", "yes"]
"""


def clean(n=200):
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "age": rng.integers(20, 95, n),
            "weight": rng.normal(80, 12, n).clip(45, 140).round(1),
            "sex": rng.choice(["female", "male"], n),
            "smoker": rng.choice(["yes", "no"], n),
            "readmitted": rng.choice(["no", "yes"], n),
        }
    )


def csv(frame, **how):
    return frame.to_csv(index=False, **how).encode()


def put(frame, column, values, at=2):
    """The frame with these values from row `at` on, as text."""
    frame = frame.astype({column: object})
    frame.iloc[at : at + len(values), frame.columns.get_loc(column)] = values
    return frame


C = clean()
DIRTY = {
    "semicolons": (
        csv(C, sep=";"),
        True,
        "the cells are separated by semicolons; save it again with commas",
    ),
    "tabs": (csv(C, sep="\t"), True, "the cells are separated by tabs; save it again with commas"),
    "another encoding": (
        csv(C.assign(sex="weiblich für sich")).decode().encode("latin-1"),
        True,
        "is not UTF-8 text; save it again as 'CSV UTF-8'",
    ),
    "UTF-16": (
        csv(C).decode().encode("utf-16"),
        True,
        (
            "is UTF-16 and not UTF-8 text; save it again as 'CSV UTF-8', or declare it in the "
            'schema: encoding = "utf-16"'
        ),
    ),
    "empty": (b"", True, "is empty; it needs a header and at least one row"),
    "header only": (csv(C.iloc[:0]), True, "has columns but no rows"),
    "no header": (
        csv(C, header=False),
        True,
        (
            "lacks 'age', 'weight', 'sex', 'smoker', 'readmitted' of the schema's columns; is the "
            "first line a header"
        ),
    ),
    "ragged": (
        csv(C) + b"50,70,male\n",
        True,
        (
            "row 201 (counted from 1, without the header): there are 3 cells, but the header names "
            "5 columns"
        ),
    ),
    "row numbers": (
        csv(C.reset_index().rename(columns={"index": ""})),
        True,
        "column 1 has no name; name it, or drop it (pandas: index=False)",
    ),
    "renamed label": (
        csv(C.rename(columns={"readmitted": "Readmited"})),
        True,
        "lacks 'readmitted' of the schema's columns; did you mean its column 'Readmited'?",
    ),
    "an id column": (
        csv(C.assign(mrn=range(200))),
        True,
        (
            "has 'mrn' in addition to the schema's columns; drop them, or list them in the "
            "schema's `ignore`"
        ),
    ),
    "question marks": (
        csv(put(C, "weight", ["?", "?"])),
        True,
        (
            "column 'weight', row 3 and 1 more: '?' seems to stand for a missing value; list it in "
            'the schema, missing_codes = ["?"]'
        ),
    ),
    "minus nine": (
        csv(put(C, "age", [-9, -9, -9])),
        True,
        "column 'age', row 3 and 2 more: '-9' seems to stand for a missing value",
    ),
    "missing": (
        csv(put(C, "weight", [None])),
        True,
        (
            "column 'weight', row 3 (counted from 1, without the header): the value is missing, "
            "which the schema does not allow"
        ),
    ),
    "dates": (
        csv(C.assign(age="1950-03-17")),
        True,
        "column 'age', row 1 and 199 more: the cells are dates; give a number in their place",
    ),
    "decimal commas": (
        csv(put(C, "weight", ["80,5"])),
        True,
        "column 'weight', row 3: the decimal sign is a comma",
    ),
    "a unit": (
        csv(put(C, "weight", ["80 kg"])),
        True,
        "column 'weight', row 3: there is a unit, or a sign, after the number",
    ),
    "a bound": (
        csv(put(C, "weight", ["<50"])),
        True,
        "column 'weight', row 3: the cell is a bound",
    ),
    "words": (
        csv(put(C, "weight", ["heavy"])),
        True,
        (
            "column 'weight', row 3 (counted from 1, without the header): the value is not a "
            "finite number"
        ),
    ),
    "other units": (
        csv(C.assign(weight=(C.weight * 1000).round())),
        True,
        (
            "column 'weight': 200 of 200 values are outside the schema's range [30, 250]; they "
            "look 1000 times too large, as g for kg"
        ),
    ),
    "pounds": (
        csv(C.assign(age=(C.age * 0 + 40), weight=(C.weight * 2.20462 + 150).round(1))),
        True,
        "values are outside the schema's range [30, 250]",
    ),
    "1e12": (
        csv(put(C, "weight", ["1e12"])),
        True,
        "column 'weight', row 3: the value is far beyond the schema's range [30, 250]",
    ),
    "capital letters": (
        csv(C.assign(sex=C.sex.str.upper())),
        True,
        "column 'sex', row 1 and 199 more: the value is a category in other capital letters",
    ),
    "another category": (
        csv(put(C, "sex", ["m"])),
        True,
        (
            "column 'sex', row 3 (counted from 1, without the header): the value is not one of "
            "'female', 'male'"
        ),
    ),
    "another coding of the label": (
        csv(C.assign(readmitted=(C.readmitted == "yes").astype(int))),
        True,
        (
            "column 'readmitted', row 1 (counted from 1, without the header): the value is not one "
            "of 'no', 'yes'"
        ),
    ),
    "one class": (
        csv(C.assign(readmitted="no")),
        False,
        "The label has one class only: there is no record of 'yes'",
    ),
    "duplicates": (csv(pd.concat([C, C.iloc[:30]])), False, "30 records are copies of others"),
    "a constant column": (
        csv(C.assign(smoker="no")),
        False,
        "Columns that are the same in every record are of no use to a model: smoker",
    ),
    "numbered": (
        csv(C.iloc[:100].assign(age=range(5, 105))),
        False,
        "Column age numbers the records",
    ),
    "sorted": (csv(C.sort_values("readmitted")), False, "The rows are sorted by the label"),
    "a sliver": (
        csv(C.assign(age=(C.age / 100).round(2))),
        False,
        (
            "column 'age': nine of ten values lie within a fiftieth of the schema's range [0, "
            "110]; are they in another unit?"
        ),
    ),
    "a narrow range": (
        csv(put(C, "weight", [20.5] * 30)),
        False,
        (
            "column 'weight': 30 of 200 values are outside the schema's range [30, 250], and will "
            "be clipped"
        ),
    ),
    "few": (csv(C.iloc[:20]), False, "There are only 20 records"),
    "a second unit": (
        csv(C.assign(weight=C.weight.where(C.index % 10 > 0, (C.weight * 10).round()))),
        False,
        "column 'weight': 20 of 200 values look 10 times too large, as mm for cm: bring them into "
        "its unit.",
    ),
    "a leak": (
        csv(C.assign(weight=(60 + 40 * (C.readmitted == "yes") + C.index % 9))),
        False,
        "column 'weight': it predicts the label almost alone. If it is written down only once "
        "the outcome is known, a model with it fails on new records",
    ),
}


@pytest.fixture
def schema(tmp_path):
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return tmp_path / "schema.toml"


@pytest.mark.parametrize("name", DIRTY)
def test_a_dirty_file_gets_the_right_sentence(silodp, schema, tmp_path, name):
    content, stops, sentence = DIRTY[name]
    (tmp_path / "clinic.csv").write_bytes(content)
    code, out, err = silodp("silo", "check", "clinic.csv", "--schema", schema)
    kind = "stop: " if stops else "warning: "
    lines = [line for line in out.splitlines() if line.startswith(kind)]
    assert any(sentence in line for line in lines), out
    assert (code, err) == (2 if stops else 0, "")
    assert "stop:" in out or not stops


def test_a_clean_file_is_said_to_be_one(silodp, schema, tmp_path):
    (tmp_path / "clinic.csv").write_bytes(csv(C.assign(patient_id=range(200))))
    code, out, _ = silodp("silo", "check", "clinic.csv", "--schema", schema)
    assert (code, out.splitlines()[0]) == (0, "clinic.csv matches the schema.")
    assert (
        silodp("silo", "check", "clinic.csv", "--schema", schema, "--json")[1]
        == '{"file": "clinic.csv", "stops": [], "warnings": []}\n'
    )


def test_rows_with_a_number_of_their_own_are_no_copies(schema, tmp_path):
    pd.concat([C, C.iloc[:30]]).assign(patient_id=range(230)).to_csv(
        tmp_path / "clinic.csv", index=False
    )
    assert check(tmp_path / "clinic.csv", load_schema(schema)) == []


def test_rows_of_one_person_are_pointed_out(schema, tmp_path):
    C.assign(patient_id=[k // 2 for k in range(200)]).to_csv(tmp_path / "clinic.csv", index=False)
    found = [finding.sentence for finding in check(tmp_path / "clinic.csv", load_schema(schema))]
    assert found == [
        "200 rows look like those of people who have several, by the column 'patient_id'."
    ]


def test_everything_that_is_wrong_is_said_at_once(schema, tmp_path):
    frame = put(put(C, "weight", ["?"]), "sex", ["m"]).rename(columns={"readmitted": "outcome"})
    frame.to_csv(tmp_path / "clinic.csv", index=False)
    said = [finding.sentence for finding in check(tmp_path / "clinic.csv", load_schema(schema))]
    assert len(said) == 3
    assert ["lacks" in said[0], "'weight'" in said[1], "'sex'" in said[2]] == [True] * 3


def test_nothing_new_is_found_once_everything_that_was_said_is_fixed(schema, tmp_path):
    frame = put(put(put(C, "weight", ["?", "80 kg", "<50"]), "age", [-9, -9, "x"]), "sex", ["m"])
    frame = put(put(frame, "readmitted", ["YES", "perhaps"]), "weight", [None], at=9)
    text = (
        frame.assign(mrn=range(200))
        .rename(columns={"smoker": "raucht"})
        .to_csv(index=False, sep=";")
    )
    (tmp_path / "clinic.csv").write_text(text.replace("raucht", "geraucht") + "1;2\n")
    said = [finding.sentence for finding in check(tmp_path / "clinic.csv", load_schema(schema))]
    for part in (
        "separated by semicolons",
        "lacks 'smoker'",
        "has 'geraucht', 'mrn' in addition",
        "'weight', row 3: '?' seems",
        "'weight', row 4: there is a unit",
        "'weight', row 5: the cell is a bound",
        "'weight', row 10 (counted from 1, without the header): the value is missing",
        "'age', row 3 and 1 more: '-9' seems",
        "'age', row 5 (counted from 1, without the header): the value is not a finite number",
        "'sex', row 3 (counted from 1, without the header): the value is not one of",
        "'readmitted', row 3: the value is a category in other capital letters",
        "'readmitted', row 4 (counted from 1, without the header): the value is not one of",
    ):
        assert sum(part in sentence for sentence in said) == 1, (part, said)


def test_every_difference_in_a_files_form_is_found_at_once(schema, tmp_path):
    text = csv(put(C, "weight", ["80,5"]).assign(größe=1), sep=";").decode()
    (tmp_path / "clinic.csv").write_text(text, encoding="latin-1")
    said = [finding.sentence for finding in check(tmp_path / "clinic.csv", load_schema(schema))]
    assert 'declare it in the schema: encoding = "latin-1"' in said[0]
    assert said[1].endswith('or declare it: separator = ";", decimal = ",".')
    assert "has 'größe' in addition" in said[2]
    assert len(said) == 3


def test_a_label_that_follows_from_a_missing_value_is_a_leak(schema, tmp_path):
    given = C.age.where(C.readmitted == "yes")
    C.assign(age=given).to_csv(tmp_path / "clinic.csv", index=False)
    said = [finding.sentence for finding in check(tmp_path / "clinic.csv", load_schema(schema))]
    leaks = [sentence for sentence in said if "predicts the label almost alone" in sentence]
    assert len(leaks) == 1
    assert "column 'age'" in leaks[0]


def test_hundreds_of_categories_and_a_column_of_others_are_pointed_out(tmp_path):
    table = _table()
    table["columns"]["sex"]["categories"] = [f"K{k}" for k in range(300)]
    table["columns"]["smoker"] = {"type": "category", "categories": ["no", "other"]}
    frame = C.assign(sex=[f"K{k}" for k in range(200)], smoker=[f"s{k % 150}" for k in range(200)])
    frame.to_csv(tmp_path / "clinic.csv", index=False)
    said = [f.sentence for f in check(tmp_path / "clinic.csv", Schema.of(table)) if not f.stops]
    assert any("'sex': its 300 categories become 300 features" in one for one in said), said
    assert any("150 different values in 200 of 200 rows" in one for one in said), said


@pytest.mark.parametrize(
    "numbers",
    [
        np.random.default_rng(0).lognormal(0, 1, 500),
        np.random.default_rng(0).integers(0, 6, 500).astype(float),
        np.random.default_rng(0).normal(80, 12, 500),
        np.repeat([1.0, 10.0], 250),
    ],
)
def test_numbers_in_one_unit_are_not_suspected(numbers):
    assert second_unit(numbers) == ""


@pytest.mark.parametrize("name", [name for name, (_, stops, _) in DIRTY.items() if not stops])
def test_what_only_warns_can_be_trained_on(schema, tmp_path, name):
    (tmp_path / "clinic.csv").write_bytes(DIRTY[name][0])
    assert len(read_table(tmp_path / "clinic.csv", load_schema(schema)).y)


def test_codes_that_the_schema_lists_are_missing_values(tmp_path):
    frame = put(put(C, "age", ["?", "-9", "-9.0", ""]), "weight", ["-9"], at=150)
    frame.to_csv(tmp_path / "clinic.csv", index=False)
    frame.replace({"age": {"?": np.nan, "": np.nan, "-9": np.nan, "-9.0": np.nan}}).astype(
        {"age": float, "weight": float}
    ).to_parquet(tmp_path / "clinic.parquet")
    listed = Schema.of(_table() | {"missing_codes": ["?", "-9"]})
    for suffix in ("csv", "parquet"):
        with pytest.raises(
            BadInput, match=r"'weight', row 151.*the value is missing"
        ):  # -9 kg is one too, and there the schema allows none
            read_table(tmp_path / f"clinic.{suffix}", listed)
    put(C, "age", ["?", "-9", "-9.0", ""]).to_csv(tmp_path / "clinic.csv", index=False)
    assert read_table(tmp_path / "clinic.csv", listed).missing[:, 0].nonzero()[0].tolist() == [
        2,
        3,
        4,
        5,
    ]
    with pytest.raises(BadInput, match="not a finite number"):
        read_table(tmp_path / "clinic.csv", Schema.of(_table()))


def test_codes_are_part_of_what_a_silo_approves_and_nothing_else_changes_without_them():
    assert Schema.of(_table() | {"missing_codes": ["?"]}).hash != Schema.of(_table()).hash
    assert "missing_codes" not in Schema.of(_table()).text
    assert Schema.parse(Schema.of(_table() | {"missing_codes": ["?"]}).text, "x").missing_codes == (
        "?",
    )


def test_the_page_lists_every_sentence():
    page = re.sub(r"\s+", " ", (ROOT / "docs/check.md").read_text().replace("`", ""))
    for name, (_, _, sentence) in DIRTY.items():
        assert name in page, name
        assert sentence.replace("`", "") in page, sentence


def _table():
    import tomllib

    return tomllib.loads(SCHEMA)
