"""`table1`, `stats quantiles` and `stats profile` over files with a schema, and over gates."""

import csv
import io
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
from silodp.core.statistics import Binned, Marginals
from silodp.pages import table1 as page
from silodp.server.estimates.scoring import ask_pooled
from silodp.simulation import scoring

SCHEMA = """
[columns.age]
type = "number"
range = [0, 110]

[columns.crp]
type = "number"
range = [0, 60]
missing = 5

[columns.ward]
type = "category"
categories = ["a", "b|c"]

[columns.smoker]
type = "boolean"
missing = false

[label]
column = "died"
task = "binary"
classes = ["no", "yes"]
"""
COUNTS = {"north": 700, "south": 500}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("columns")
    (folder / "schema.toml").write_text(SCHEMA)
    for seed, (name, n) in enumerate(COUNTS.items()):
        random = np.random.default_rng(seed)
        frame = pd.DataFrame(
            {
                "age": random.normal(60, 12, n).clip(0, 110).round(),
                "crp": np.where(random.random(n) < 0.2, np.nan, random.gamma(2, 6, n).round(1)),
                "ward": random.choice(["a", "b|c"], n, p=[0.6, 0.4]),
                "smoker": random.choice(["yes", "no", ""], n, p=[0.3, 0.5, 0.2]),
                "died": random.choice(["yes", "no"], n, p=[0.1, 0.9]),
            }
        )
        frame.to_csv(folder / f"{name}.csv", index=False)
        (folder / f"{name}.csv").chmod(0o600)
    return folder


def run(*words):
    return CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False).stdout


def found(*words):
    return json.loads(run(*words, "--json"))


def about(folder):
    silos = [part for name in COUNTS for part in ("--silo", folder / f"{name}.csv")]
    return ("--schema", folder / "schema.toml", *silos, "--seed", 1)


def pooled(folder):
    return pd.concat([pd.read_csv(folder / f"{name}.csv") for name in COUNTS])


def test_a_profile_has_the_columns_units_and_the_missing_shares_of_the_files(files):
    """Values that a schema fills in are missing, in simulation as at a gate."""
    answer = found("stats", "profile", *about(files), "--epsilon", 200)
    rows = {row["feature"]: row for row in answer["features"]}
    frame = pooled(files)
    for name in ("age", "crp"):
        row = rows[name]
        assert row["missing"] == pytest.approx(frame[name].isna().mean(), abs=0.01)
        assert row["missing_low"] <= row["missing"] <= row["missing_high"]
        assert row["mean"] == pytest.approx(frame[name].clip(0, 110).mean(), abs=1)
        assert row["deviation"] == pytest.approx(frame[name].std(), abs=2)
        half = row["mean_high"] - row["mean"]
        assert half >= 1.9 * frame[name].std() / np.sqrt(len(frame))
    assert (rows["crp"]["low"], rows["crp"]["high"]) == (0, 60)
    assert rows["ward=a"]["mean"] == pytest.approx((frame.ward == "a").mean(), abs=0.01)
    smokers = frame.smoker.dropna() == "yes"
    assert rows["smoker"]["mean"] == pytest.approx(smokers.mean(), abs=0.01)
    assert rows["smoker"]["missing"] == pytest.approx(frame.smoker.isna().mean(), abs=0.01)
    assert "crp" in run("stats", "profile", *about(files), "--epsilon", 200)


def test_table_1_is_printed_and_written_as_markdown_csv_and_html(files, tmp_path):
    out = [part for form in ("md", "csv", "html") for part in ("--out", tmp_path / f"t.{form}")]
    words = ("table1", *about(files), "--by", "ward", "--epsilon", 50, "--trust", "masks")
    text = run(*words, *out)
    answer = found(*words)
    frame = pooled(files)
    assert [group["name"] for group in answer["groups"]] == ["Overall", "a", "b|c"]
    assert "age, median [IQR]" in text
    assert "It cost each silo epsilon 50 at delta" in text
    markdown = (tmp_path / "t.md").read_text()
    assert r"ward: b\|c" in markdown
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len({line.replace(r"\|", "").count("|") for line in table}) == 1
    rows = list(csv.DictReader(io.StringIO((tmp_path / "t.csv").read_text())))
    (mean,) = (
        row
        for row in rows
        if (row["column"], row["group"], row["figure"]) == ("age", "Overall", "mean")
    )
    assert float(mean["low"]) < frame.age.mean() < float(mean["high"])
    (missing,) = (r for r in rows if (r["column"], r["figure"]) == ("crp", "missing share"))
    assert float(missing["value"]) == pytest.approx(frame.crp.isna().mean(), abs=0.01)
    html = (tmp_path / "t.html").read_text()
    assert html.count("<svg") == 2
    assert "b|c" in html


def test_what_noise_hides_is_marked_and_explained(files):
    text = run("table1", *about(files), "--by", "ward", "--epsilon", 0.05)
    assert "too noisy" in text
    assert "the noise hides the count" in text
    assert "nan" not in text


def test_quantiles_have_intervals_that_hold_those_of_the_files(files):
    answer = found("stats", "quantiles", *about(files), "--epsilon", 20)
    frame = pooled(files)
    assert [column["column"] for column in answer["columns"]] == ["age", "crp"]
    for column in answer["columns"]:
        for q in column["groups"][0]["quantiles"]:
            true = (
                frame[column["column"]].dropna().clip(0, 60 if column["column"] == "crp" else 110)
            )
            assert q["least"] <= true.quantile(q["level"]) <= q["most"]
    text = run("stats", "quantiles", *about(files), "--by", "died", "--columns", "age")
    assert "yes" in text
    assert "crp" not in text


def test_notebooks_get_the_same_numbers_as_the_commands(files):
    frames = {name: pd.read_csv(files / f"{name}.csv") for name in COUNTS}
    about_frames = {"schema": files / "schema.toml", "epsilon": 3.0, "seed": 1}
    table = stats.table1(frames, by="ward", **about_frames)
    command = found("table1", *about(files), "--by", "ward", "--epsilon", 3.0)
    assert table.details["columns"] == command["columns"]
    assert ("n", "") in table.table.index
    quantiles = stats.quantiles(frames, **about_frames).table
    assert quantiles.loc[("age", "Overall", 0.5), "value"] == pytest.approx(60, abs=5)
    assert "age" in stats.profile(frames, **about_frames).table.index


def test_one_seed_gives_no_two_questions_the_same_noise(files, tmp_path, monkeypatch):
    """Two answers under multiples of one noise would show the exact answer."""
    seeds = []
    shipped = scoring.connect
    monkeypatch.setattr(
        scoring,
        "connect",
        lambda *words, **more: seeds.append(words[4][0]) or shipped(*words, **more),
    )
    frames = {name: pd.read_csv(files / f"{name}.csv") for name in COUNTS}
    fewer = {name: frame[:-1] for name, frame in frames.items()}
    wider = tmp_path / "wider.toml"
    wider.write_text(SCHEMA.replace("[0, 110]", "[0, 120]"))
    usual = {"schema": files / "schema.toml", "epsilon": 1.0, "delta": 1e-5, "seed": 1}
    stats.table1(frames, **usual)
    stats.table1(frames, **usual | {"trust": "masks"})
    stats.table1(frames, **usual | {"trust": "shuffle"})
    stats.table1(frames, **usual | {"trust": "shuffle", "colluding": 1})
    stats.table1(frames, **usual | {"epsilon": 2.0})
    stats.table1(frames, **usual | {"schema": wider})
    stats.table1(frames, **usual, by="ward")
    stats.table1(fewer, **usual)
    stats.profile(frames, **usual)
    assert len(set(seeds)) == len(seeds) == 9
    stats.table1(frames, **usual)
    assert seeds[-1] == seeds[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--by", "age"), "it must be a category or boolean column"),
        (("--columns", "agee"), "choose from age, crp"),
        (("--out", "table.txt"), "must end in .md, .csv, .html"),
    ],
)
def test_bad_words_are_refused_before_anything_is_asked(files, words, sentence):
    with pytest.raises(BadInput, match=sentence):
        run("table1", *about(files), *words)
    with pytest.raises(BadInput, match="--schema"):
        run("table1", "--silo", files / "north.csv")


def test_text_that_a_spreadsheet_would_run_is_quoted():
    assert page._plain("=1+1", "@a", "level", "-b", 1.0)[:4] == ["'=1+1", "'@a", "level", "'-b"]


# --- over gates ----------------------------------------------------------------------------------


@pytest.fixture
def gates(files, tmp_path, monkeypatch):
    """A federation of two deployed gates, which allow tables of columns."""
    about = {"label": "died", "epsilon": 200.0, "statistics": ("Grad", "Marginals")}
    doors, _ = federation_of(tmp_path, files, list(COUNTS), **about)
    monkeypatch.setattr(module, "carrier_of", lambda *_: doors)
    return tmp_path


def test_gates_answer_what_the_simulation_says(gates, files):
    """Both are within five standard errors of their difference."""
    words = ("--folder", gates, "--by", "ward", "--epsilon", 8)
    deployed = found("federation", "table1", *words)
    simulated = found("table1", *about(files), "--by", "ward", "--epsilon", 8)
    apart = 5 * 2**0.5 * deployed["overall_error"]
    assert deployed["bins"] == simulated["bins"]
    assert deployed["count_error"] == pytest.approx(simulated["count_error"], rel=1e-3)
    for a, b in zip(deployed["columns"], simulated["columns"], strict=True):
        assert a["missing"]["count"] == pytest.approx(b["missing"]["count"], abs=apart)
        for own, other in zip(a["groups"], b["groups"], strict=True):
            levels = zip(own.get("levels", ()), other.get("levels", ()), strict=True)
            for one, two in levels:
                assert one["count"] == pytest.approx(two["count"], abs=apart)
    again = found("federation", "table1", *words)
    assert again["columns"] == deployed["columns"], "a stored answer, at no further price"
    quantiles = found("federation", "quantiles", "--folder", gates, "--epsilon", 5)
    assert [column["column"] for column in quantiles["columns"]] == ["age", "crp"]
    assert [silo["epsilon"] for silo in quantiles["silos"]] == [5.0, 5.0]
    cards, budgets, _ = module.cards_of(gates, 2.0)

    def ask(port, mechanism, counts):
        ask_pooled(port, Marginals.of([Binned(0, 1, (0.0,))], [(0,)]), mechanism, counts)
        raise BadInput("the noise hides it")

    with pytest.raises(BadInput, match=r"hides it; each silo has paid at most epsilon 2$"):
        module.once("useless", gates, cards, budgets, 60.0, ask)
    lines = (gates / "statistics/statistics.jsonl").read_text().splitlines()
    recorded = [json.loads(line) for line in lines]
    assert [line["command"] for line in recorded] == ["table1", "quantiles"], "each answer once"
    assert recorded[0]["asked"] == {"by": "ward"}
    assert recorded[0]["answer"]["columns"] == deployed["columns"]
    (release,) = recorded[0]["answer"]["releases"][:1]
    assert release["statistic"] == "Marginals"
    assert "privately" not in run("report", gates / "statistics")
    assert "The server and the couriers know" in (gates / "statistics/report.html").read_text()
