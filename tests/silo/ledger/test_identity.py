"""The same people have one budget whatever becomes of their file; other people, however alike their
columns, have one of their own.
"""

import io
import itertools
import json

import numpy as np
import pandas as pd
import pytest

from gates import wbcd
from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import GDP, Budget
from silodp.silo.data import demo
from silodp.silo.data.files import read_cells
from silodp.silo.data.reading import find_schema, read_records
from silodp.silo.data.tables import raw
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.ledger.identity import Identity, Likeness
from silodp.silo.service.policy import DaemonSettings
from silodp.silo.service.provision import provision

KEY = b"k" * 32
SCHEMA = """
[columns.age]
type = "number"
range = [0, 110]
[columns.smoker]
type = "boolean"
[label]
column = "label"
task = "binary"
classes = ["benign", "malignant"]
"""


def hospital(name: str, seed: int = 0) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(demo.csv_text(name, seed)), dtype=str, keep_default_na=False)


def clinic(seed: int = 0, n: int = 400) -> pd.DataFrame:
    """One column with more than two values, and that an age."""
    draw = np.random.default_rng(seed)
    label = np.where(draw.random(n) < 0.3, "malignant", "benign")
    return pd.DataFrame(
        {"age": draw.integers(18, 95, n), "smoker": draw.integers(0, 2, n), "label": label}
    )


def survey(seed: int = 0, n: int = 2000) -> pd.DataFrame:
    """Thirty questions of five answers each, and nothing else."""
    draw, odds = (
        np.random.default_rng(seed),
        np.random.default_rng(9).dirichlet(np.ones(5), size=30),
    )
    return pd.DataFrame({f"q{j}": draw.choice(5, n, p=odds[j]) for j in range(30)})


def pictures(seed: int = 0, n: int = 200) -> pd.DataFrame:
    """Dark at the rim, and grey shapes of their own in the middle."""
    draw = np.random.default_rng(seed)
    coarse = np.kron(draw.random((n, 4, 4)), np.ones((1, 4, 4)))
    pixels = np.floor(
        255 * coarse * draw.random((n, 16, 16)) * (np.hypot(*np.mgrid[-1:1:16j, -1:1:16j]) < 0.8)
    )
    return (
        pd.DataFrame(pixels.reshape(n, 256)).add_prefix("p").assign(label=draw.integers(0, 10, n))
    )


def cells(seed: int = 0) -> pd.DataFrame:
    x, y = wbcd()[seed]
    return pd.DataFrame(x).add_prefix("f").assign(label=y)


TABLES = {
    "north": lambda seed=0: hospital("north", seed),
    "west": lambda seed=0: hospital("west", seed),
}
TABLES |= {"clinic": clinic, "survey": survey, "pictures": pictures, "cells": cells}


def rows_added(table):
    """A tenth more rows, each column drawn anew from its own values."""
    draw = np.random.default_rng(50)
    more = pd.DataFrame(
        {name: draw.choice(table[name].to_numpy(), 1 + len(table) // 10) for name in table}
    )
    return pd.concat([table, more], ignore_index=True)


def edited(table):
    """Every tenth row has another's values in the first half of its columns."""
    table, half = table.copy(), table.shape[1] // 2 + 1
    table.iloc[::10, :half] = np.roll(table.iloc[::10, :half].to_numpy(), 1, axis=0)
    return table


CHANGES = {
    "an ignored number": lambda t: t.assign(visit=np.arange(7_000_000, 7_000_000 + len(t))),
    "a random column": lambda t: t.assign(visit=np.random.default_rng(3).normal(size=len(t))),
    "a yes or no": lambda t: t.assign(
        consent=np.random.default_rng(4).choice(["yes", "no"], len(t))
    ),
    "a dropped column": lambda t: t.drop(columns=t.columns[1]),
    "more rows": rows_added,
    "fewer rows": lambda t: t.iloc[: 9 * len(t) // 10],
    "another order": lambda t: t.sample(frac=1, random_state=1)[list(t.columns[::-1])],
    "edits": edited,
    "new names": lambda t: t.rename(columns=lambda name: f"new {name}"),
    "other words for a category": lambda t: t.assign(
        **{name: t[name].astype(str) + "!" for name in [t.nunique().idxmin()]}
    ),
}
HARD = ("an ignored number", "a random column", "a dropped column", "more rows", "edits")


def identity(table: pd.DataFrame, folder, kind: str = "csv") -> Identity:
    path = folder / f"table.{kind}"
    table.to_csv(path, index=False) if kind == "csv" else table.to_parquet(path, index=False)
    return Identity.of(*raw(read_cells(path)))


def likeness(one: Identity, other: Identity) -> Likeness:
    found = one.sketch(KEY).compare(other)
    assert other.sketch(KEY).compare(one).same == found.same
    return found


# --- the same people -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_any_two_changes_together_leave_the_data_set_recognised(name, tmp_path):
    table = TABLES[name]()
    first = identity(table, tmp_path).sketch(KEY)
    for one, other in itertools.combinations(CHANGES if name in ("west", "clinic") else HARD, 2):
        changed = CHANGES[other](CHANGES[one](table))
        assert first.compare(identity(changed, tmp_path)).same, (one, other)


def test_a_column_a_row_and_a_dropped_column_in_another_kind_of_file_leave_it_recognised(tmp_path):
    for name in ("north", "west", "survey", "cells"):
        table = TABLES[name]()
        changed = table
        for change in (*HARD, "another order"):
            changed = CHANGES[change](changed)
        assert likeness(identity(table, tmp_path), identity(changed, tmp_path, "parquet")).same, (
            name
        )


def test_forty_new_columns_that_tell_more_do_not_crowd_out_the_old_ones(tmp_path):
    table = cells()
    wide = pd.DataFrame(np.random.default_rng(0).normal(size=(len(table), 40))).add_prefix("a")
    assert likeness(
        identity(table, tmp_path), identity(rows_added(pd.concat([wide, table], axis=1)), tmp_path)
    ).same


def test_a_tenth_of_the_people_among_others_are_recognised(tmp_path):
    """And so they are with a column added, where rows tell nothing."""
    table = hospital("north")
    mixed = pd.concat(
        [hospital("north", seed=1), table.sample(300, random_state=1)], ignore_index=True
    )
    for changed in (mixed, CHANGES["an ignored number"](mixed)):
        assert likeness(identity(table, tmp_path), identity(changed, tmp_path)).same


def test_a_third_of_the_people_among_others_are_recognised_by_pairs_of_columns(tmp_path):
    """A column was added, so that no row tells anything, and of one column alone too little
    stayed.
    """
    table = hospital("north")
    mixed = pd.concat([hospital("north", seed=1).iloc[1000:], table.iloc[:1000]], ignore_index=True)
    assert likeness(
        identity(table, tmp_path), identity(CHANGES["a random column"](mixed), tmp_path)
    ).same


def test_new_rows_with_an_empty_column_do_not_hide_the_old_ones(tmp_path):
    table = clinic()
    grown = CHANGES["a random column"](
        pd.concat([table, clinic(1, 150).assign(age="")], ignore_index=True)
    )
    assert likeness(identity(table, tmp_path), identity(grown, tmp_path)).same


# --- other people --------------------------------------------------------------------------------


def test_hospitals_of_the_demo_are_different_whatever_the_draw(tmp_path):
    for seed in range(3):
        found = [identity(hospital(name, seed), tmp_path) for name in demo.HOSPITALS]
        assert not any(likeness(*pair).same for pair in itertools.combinations(found, 2)), seed


def test_parts_of_one_data_set_without_a_person_in_common_are_different():
    found = [Identity.of(x, y) for x, y in wbcd()]
    assert not any(likeness(*pair).same for pair in itertools.combinations(found, 2))


@pytest.mark.parametrize("numbers", ["{:d}", "P{:05d}", "2024-{:d}-N"])
def test_record_numbers_that_two_hospitals_share_make_them_no_less_different(numbers, tmp_path):
    found = []
    for seed in (0, 1):
        table = hospital("south", seed)
        table["patient"] = [numbers.format(1000 + i) for i in range(len(table))]
        table["row"] = range(len(table))
        found.append(identity(table, tmp_path))
    assert not likeness(*found).same


def test_pictures_of_other_people_are_different(tmp_path):
    assert not likeness(identity(pictures(1), tmp_path), identity(pictures(2, 150), tmp_path)).same


def test_parts_of_people_dealt_at_random_hardly_ever_agree():
    """Coarse columns, on which everything depends on what chance is taken to give."""
    shares = []
    for seed in range(20):
        draw = np.random.default_rng(seed)
        table = np.column_stack(
            [
                draw.integers(18, 95, 900),
                draw.normal(130, 20, 900).round(),
                draw.integers(0, 4, (900, 3)),
            ]
        )
        one, other = (Identity.of(table[k], table[k, 0] % 2) for k in (slice(600), slice(600, 900)))
        shares.append(likeness(one, other).columns)
    assert shares == [0.0] * 20


# --- the same order ------------------------------------------------------------------------------

ALIKE = {
    "sex": ["F", "N"],
    "nodes": ["T", "Y", "1", "1.0"],
    "smoking": ["none", "null", ""],
    "dates": ["1/11/2021", "11/1/2021"],
    "case": ["a", "A"],
    "times": [f"{1.7e9 + i + 0.5:.1f}" for i in range(4)],
    "numbers": ["9007199254740992", "9007199254740993"],
}


@pytest.mark.parametrize("suffix", ["csv", "parquet", "npz"])
@pytest.mark.parametrize("kind", ALIKE)
def test_rows_that_recognition_takes_for_one_another_have_moved_when_they_change_places(
    tmp_path, kind, suffix
):
    """A ledger may know people through other spellings, but a stored partition is for these very
    cells in this very order.
    """

    def read(cells):
        path, values = tmp_path / f"a.{suffix}", np.array(cells * 10)
        values = values.astype(np.float64) if kind == "times" and suffix != "csv" else values
        values = values.astype(np.int64) if kind == "numbers" and suffix != "csv" else values
        if suffix == "npz":
            np.savez(path, v=values, y=np.zeros(len(values), np.int64))
        else:
            frame = pd.DataFrame({"v": values, "y": 0})
            frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(
                path, index=False
            )
        return Identity.of(*raw(read_cells(path)))

    first, moved = read(ALIKE[kind]), read(ALIKE[kind][::-1])
    assert first.sketch(KEY).compare(moved).known == 1.0
    assert first.layout_under(KEY) != moved.layout_under(KEY)
    assert first.layout_under(KEY) == read(ALIKE[kind]).layout_under(KEY), (
        "the same file has the same layout"
    )


# --- with files, gates and ledgers ---------------------------------------------------------------


def made(folder, data, name, schema=None):
    about = {
        "model": "logistic",
        "label": "label",
        "epsilon": 3.0,
        "classes": ("benign", "malignant"),
        "schema": schema,
    }
    return provision(
        folder / name,
        data=data,
        name=name,
        registry=folder / "registry",
        askers=["0" * 64],
        **about,
    )


@pytest.mark.parametrize("first", [False, True])
def test_a_file_has_one_budget_with_and_without_a_schema(first, tmp_path, silodp, monkeypatch):
    (tmp_path / "s.toml").write_text(SCHEMA)
    clinic().to_csv(tmp_path / "a.csv", index=False)
    made(tmp_path, tmp_path / "a.csv", "one", tmp_path / "s.toml" if first else None)
    with pytest.raises(BadInput, match="has 100% of its records in common"):
        made(tmp_path, tmp_path / "a.csv", "two", None if first else tmp_path / "s.toml")
    monkeypatch.setenv("SILODP_STATE", str(tmp_path))
    (tmp_path / "registry").rename(tmp_path / "ledgers")
    words = ("--label", "label", "--classes", "benign,malignant", "--epsilon", 3)
    code, _, error = silodp(
        "ledger", "create", tmp_path / "three.ledger", "--data", tmp_path / "a.csv", *words
    )
    assert (code, "has 100% of its records in common" in error) == (2, True)


def test_an_ignored_number_and_other_words_for_the_label_give_no_second_budget(tmp_path):
    (tmp_path / "s.toml").write_text('ignore = ["visit"]\n' + SCHEMA)
    clinic().to_csv(tmp_path / "a.csv", index=False)
    CHANGES["an ignored number"](clinic()).to_csv(tmp_path / "b.csv", index=False)
    (tmp_path / "t.toml").write_text(SCHEMA.replace('["benign", "malignant"]', '["0", "7"]'))
    clinic().assign(label=np.where(clinic()["label"] == "benign", 0, 7)).to_csv(
        tmp_path / "c.csv", index=False
    )
    made(tmp_path, tmp_path / "a.csv", "one")
    for data, schema in (("b.csv", "s.toml"), ("c.csv", "t.toml")):
        with pytest.raises(
            BadInput, match=r"some columns of about \d+% of its records in common"
        ) as refusal:
            made(tmp_path, tmp_path / data, "two", tmp_path / schema)
        assert "put this file in the place of that gate's data file" in str(refusal.value)
        assert "record number" not in str(refusal.value), "to add one is no way around it"


def test_next_months_export_goes_on_with_its_ledger_and_gets_no_other(tmp_path):
    """One more patient and one more column, that the schema ignores: no row and no column is what
    it was.
    """
    data, schema = tmp_path / "north.csv", tmp_path / "schema.toml"
    hospital("north").to_csv(data, index=False)
    schema.write_text(demo.SCHEMA)
    about = {
        "name": "north",
        "schema": schema,
        "model": "logistic",
        "label": "label",
        "epsilon": 3.0,
        "askers": ["0" * 64],
    }
    about["registry"] = tmp_path / "registry"
    place = DaemonSettings.load(provision(tmp_path / "gate", data=data, **about).policy)

    grown = CHANGES["an ignored number"](hospital("north"))
    grown = pd.concat([grown, grown.iloc[[0]].assign(visit=99, age="51", systolic="131")])
    grown.to_csv(data, index=False)
    schema.write_text(demo.SCHEMA.replace('["patient_id"]', '["patient_id", "visit"]'))
    with pytest.raises(BadInput, match="in common with the one whose ledger"):
        provision(tmp_path / "again", data=data, **about)
    ledger, held = (
        DurableLedger.open(tmp_path / "gate" / "ledger.db"),
        read_records(place, find_schema(place)),
    )
    ledger.recognise(*held.known_by, registry=tmp_path / "registry")
    assert ledger.records == 3001
    ledger.verify()

    later = (
        grown.iloc[200:]
        .drop(columns="age")
        .assign(stay=np.random.default_rng(0).integers(1, 9, 2801))
    )
    changed = identity(later, tmp_path)
    with pytest.raises(BadInput, match="in common with the one whose ledger"):
        DurableLedger.create(
            tmp_path / "b",
            rule=GDP(),
            budget=Budget(3.0, 1e-5),
            records=2801,
            identity=changed,
            registry=tmp_path / "registry",
        )


def test_columns_that_came_and_went_stay_known(tmp_path):
    """A ledger that was shown other columns of its people knows those who have only these."""
    first, second = (
        hospital("north"),
        pd.DataFrame(np.random.default_rng(0).normal(size=(3000, 3))).add_prefix("lab"),
    )
    sketch = identity(first, tmp_path).sketch(KEY)
    assert not sketch.compare(identity(second, tmp_path)).same
    sketch = sketch.merged(identity(pd.concat([first, second], axis=1), tmp_path).sketch(KEY))
    for table in (first, second):
        assert sketch.compare(identity(rows_added(table), tmp_path)).same


def test_a_registry_file_of_another_form_stops_new_ledgers(tmp_path):
    clinic().to_csv(tmp_path / "a.csv", index=False)
    clinic(1).to_csv(tmp_path / "b.csv", index=False)
    made(tmp_path, tmp_path / "a.csv", "one")
    file = next((tmp_path / "registry").glob("*.json"))
    held = json.loads(file.read_text())
    for other in ({"parts": held["parts"][:-8]}, {"parts": "AAAA"}):
        file.write_text(json.dumps(held | other))
        with pytest.raises(
            BadInput, match="cannot be read, so it is not known which records already have"
        ):
            made(tmp_path, tmp_path / "b.csv", "two")
    file.write_text(
        json.dumps(
            {name: value for name, value in held.items() if name != "parts"}
            | {"columns": held["rows"]}
        )
    )
    with pytest.raises(
        BadInput, match="cannot be read, so it is not known which records already have"
    ):
        made(tmp_path, tmp_path / "b.csv", "two")
