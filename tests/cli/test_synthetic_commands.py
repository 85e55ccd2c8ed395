"""`silodp synthesise` over files with a schema, and over gates."""

import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from doors import federation_of
from silodp import stats
from silodp.cli import score as module
from silodp.cli.app import app
from silodp.core.errors import BadInput
from silodp.host.schema import load_schema
from silodp.silo.data.tables import read_table

SCHEMA = """
separator = ";"
decimal = ","
person = "id"
rows_per_person = 1

[columns.age]
type = "number"
range = [0, 110]

[columns.crp]
type = "number"
range = [0, 60]
missing = 5

[columns.ward]
type = "category"
categories = ["a", "b;c"]
missing = "own"

[columns.smoker]
type = "boolean"

[label]
column = "died"
task = "binary"
classes = ["no", "yes"]
"""
COUNTS = {"north": 400, "south": 300}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic")
    (folder / "schema.toml").write_text(SCHEMA)
    for seed, (name, n) in enumerate(COUNTS.items()):
        random = np.random.default_rng(seed)
        smoker = random.random(n) < 0.3
        frame = pd.DataFrame(
            {
                "id": [f"{name}-{k}" for k in range(n)],
                "age": random.normal(60, 12, n).clip(0, 110).round(1),
                "crp": np.where(random.random(n) < 0.2, np.nan, random.gamma(2, 6, n).round(1)),
                "ward": random.choice(["a", "b;c", ""], n, p=[0.5, 0.4, 0.1]),
                "smoker": np.where(smoker, "yes", "no"),
                "died": np.where(random.random(n) < 0.1 + 0.5 * smoker, "yes", "no"),
            }
        )
        frame.to_csv(folder / f"{name}.csv", index=False, sep=";", decimal=",")
        (folder / f"{name}.csv").chmod(0o600)
    return folder


def run(*words):
    return CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False).stdout


def about(folder):
    silos = [part for name in COUNTS for part in ("--silo", folder / f"{name}.csv")]
    return ("--schema", folder / "schema.toml", *silos, "--seed", 1)


def read(path):
    return pd.read_csv(path, sep=";", decimal=",")


def test_the_table_is_read_by_the_same_schema_and_has_the_silos_columns_and_shares(files, tmp_path):
    out = tmp_path / "made.csv"
    page = tmp_path / "made.html"
    words = ("synthesise", *about(files), "--rows", 3000, "--epsilon", 30)
    text = run(*words, "--out", out, "--page", page)
    assert "within their 95 % bound" in text
    assert "epsilon 30" in text
    made = read(out)
    frame = pd.concat([read(files / f"{name}.csv") for name in COUNTS])
    assert set(made.columns) == set(frame.columns)
    assert len(made) == made.id.nunique() == 3000
    assert len(read_table(out, load_schema(files / "schema.toml")).y) == 3000
    assert set(made.ward.dropna()) == {"a", "b;c"}
    for column in ("crp", "ward"):
        assert made[column].isna().mean() == pytest.approx(frame[column].isna().mean(), abs=0.04)
    assert made.age.mean() == pytest.approx(frame.age.mean(), abs=2)
    smokers = made[made.smoker.astype(str).str.lower() == "true"]
    assert (smokers.died == "yes").mean() == pytest.approx(0.6, abs=0.08)
    html = page.read_text()
    assert "rare subgroups" in html
    assert "mean risk" in html


def test_the_table_trains_a_model_like_any_other_file(files, tmp_path):
    run("synthesise", *about(files), "--rows", 300, "--epsilon", 3, "--out", tmp_path / "a.csv")
    out = tmp_path / "run"
    order = ("--algorithm", "mb-sgd", "--rounds", 2, "--epsilon", 3, "--out", out)
    run("train", "--schema", files / "schema.toml", "--silo", tmp_path / "a.csv", *order)
    assert (out / "model.safetensors").exists()


def test_notebooks_get_the_table_of_the_command(files, tmp_path):
    out = tmp_path / "made.csv"
    run("synthesise", *about(files), "--rows", 50, "--epsilon", 3, "--out", out)
    frames = {name: read(files / f"{name}.csv") for name in COUNTS}
    found = stats.synthesise(frames, schema=files / "schema.toml", rows=50, epsilon=3, seed=1)
    made = read(out)
    assert found.table.age.tolist() == pytest.approx(made.age.tolist())
    assert found.spent.epsilon.max() <= 3


@pytest.mark.parametrize("rows", [0, 10**6 + 1])
def test_a_number_of_rows_that_cannot_be_made_is_refused_before_anything_is_asked(files, rows):
    with pytest.raises(BadInput, match="--rows is"):
        run("synthesise", *about(files), "--rows", rows, "--out", files / "none.csv")


def test_a_file_is_not_overwritten(files):
    with pytest.raises(BadInput, match="choose another --out"):
        run("synthesise", *about(files), "--out", files / "north.csv")


def test_without_a_schema_there_are_no_columns(files):
    with pytest.raises(BadInput, match="--schema"):
        run("synthesise", "--silo", files / "north.csv", "--out", files / "none.csv")


@pytest.fixture
def gates(files, tmp_path, monkeypatch):
    """A federation of two deployed gates, which allow tables of columns."""
    about = {"label": "died", "epsilon": 200.0, "statistics": ("Grad", "Marginals")}
    doors, _ = federation_of(tmp_path, files, list(COUNTS), **about)
    monkeypatch.setattr(module, "carrier_of", lambda *_: doors)
    return tmp_path


def test_gates_answer_what_the_simulation_says(gates, files, tmp_path):
    """Released shares are within five standard errors of their difference."""
    out = tmp_path / "deployed.csv"
    words = ("--epsilon", 8, "--rows", 100, "--json")
    deployed = json.loads(run("federation", "synthesise", "--folder", gates, *words, "--out", out))
    simulated = json.loads(
        run("synthesise", *about(files), *words, "--out", tmp_path / "simulated.csv")
    )
    assert deployed["tables"] == simulated["tables"]
    assert deployed["count_error"] == pytest.approx(simulated["count_error"], rel=1e-3)
    for a, b in zip(deployed["columns"], simulated["columns"], strict=True):
        for one, two in zip(a["cells"], b["cells"], strict=True):
            apart = 5 * 2**0.5 * a["error"]
            assert one["released"] == pytest.approx(two["released"], abs=apart)
    assert [silo["epsilon"] for silo in deployed["silos"]] == [8.0, 8.0]
    first = out.read_text()
    out.unlink()
    run("federation", "synthesise", "--folder", gates, *words, "--out", out)
    assert out.read_text() == first, "a stored answer, at no further price, and the same table"
