"""`silodp stats estimate` and `logrank`, the same over gates, and in notebooks."""

import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import silodp.stats
from doors import federation_of
from silodp.cli import score as module
from silodp.cli.app import app
from silodp.cli.federation import _statistics
from silodp.core.errors import BadInput

SCHEMA = """
[columns.age]
type = "number"
range = [20, 80]

[columns.treated]
type = "boolean"

[columns.ward]
type = "category"
categories = ["a", "b", "c"]

[label]
task = "survival"
time = "t"
event = "died"
edges = [2, 4, 6, 8, 10, 15, 20]
"""
N = 900
TRUTH = {"age": 0.03, "treated": -0.7}


def patients(seed):
    random = np.random.default_rng(seed)
    age = random.uniform(20, 80, N).round(2)
    treated = random.choice(["yes", "no"], N)
    hazard = 0.08 * np.exp(0.03 * (age - 50) - 0.7 * (treated == "yes"))
    time = random.exponential(1 / hazard)
    lost = random.uniform(5, 40, N)
    return pd.DataFrame(
        {
            "age": age,
            "treated": treated,
            "ward": random.choice(["a", "b", "c"], N),
            "t": np.minimum(time, lost).round(3),
            "died": np.where(time <= lost, "yes", "no"),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("patients")
    (folder / "schema.toml").write_text(SCHEMA)
    for seed, name in enumerate(("north", "south")):
        path = folder / f"{name}.csv"
        patients(seed).to_csv(path, index=False)
        path.chmod(0o600)
    return folder


def said(*words) -> str:
    result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    return result.stdout


def silodp_(*words) -> dict:
    return json.loads(said(*words, "--json"))


def files(folder):
    silos = ("--silo", folder / "north.csv", "--silo", folder / "south.csv")
    return ("--schema", folder / "schema.toml", *silos)


def check_ratios(answer):
    """The coefficients are those of the truth, within four standard errors."""
    rows = {row["name"]: row for row in answer["coefficients"]}
    assert list(rows) == ["age", "treated", "ward=b", "ward=c"]
    for name, truth in (TRUTH | {"ward=b": 0.0, "ward=c": 0.0}).items():
        assert abs(rows[name]["coef"] - truth) < 4 * rows[name]["se"]
        assert 0 < rows[name]["noise"] < rows[name]["se"]
    assert rows["age"]["p"] < 0.001
    assert answer["ratio"] == "hazard ratio"


@pytest.mark.parametrize("trust", ["isrl", "masks"])
def test_hazard_ratios_are_printed_with_their_price_and_drawn_on_a_page(folder, tmp_path, trust):
    asked = ("stats", "estimate", *files(folder), "--epsilon", 3, "--trust", trust, "--seed", 1)
    answer = silodp_(*asked)
    check_ratios(answer)
    assert [silo["name"] for silo in answer["silos"]] == ["north", "south"]
    assert all(2.99 < silo["spent_epsilon"] <= 3 for silo in answer["silos"])
    words = said(*asked, "--page", tmp_path / "ratios.html")
    assert "Cox regression over 1,800 records" in words
    assert "treated" in words
    assert "include the privacy noise" in words
    page = (tmp_path / "ratios.html").read_text()
    assert "Hazard ratios over 1,800 records" in page
    assert "<script" not in page


def test_a_plan_shows_price_and_precision_and_spends_nothing(folder):
    plan = silodp_("stats", "estimate", *files(folder), "--epsilon", 3, "--plan")
    assert plan["features"] == ["age", "treated", "ward=b", "ward=c"]
    assert plan["questions"] == 5
    assert [silo["epsilon"] for silo in plan["silos"]] == [3.0, 3.0]
    assert all("spent_epsilon" not in silo for silo in plan["silos"])
    assert "Nothing was asked or spent." in said(
        "stats", "estimate", *files(folder), "--epsilon", 3, "--plan"
    )


def test_two_groups_are_compared(folder):
    asked = ("stats", "logrank", *files(folder), "--by", "treated", "--epsilon", 2, "--seed", 1)
    answer = silodp_(*asked)
    no, yes = answer["groups"]
    assert no["events"] > no["expected"]
    assert yes["events"] < yes["expected"]
    assert answer["p"] < 0.001
    assert "p = <0.0001" in said(*asked)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("estimate", "--columns", "weight"), "the columns of the schema are age, treated, ward"),
        (("estimate", "--strata", "ward"), "it must be silo, or left out"),
        (("estimate", "--strata", "silo", "--trust", "masks"), "which gives totals only"),
        (("estimate", "--epsilon", 0.01), "epsilon is too small to fit 4 features on 1,800"),
        (("logrank", "--by", "ward"), "which has 3 groups"),
    ],
)
def test_what_cannot_be_estimated_is_one_sentence(folder, words, sentence):
    with pytest.raises(BadInput, match=sentence):
        said("stats", words[0], *files(folder), *words[1:])


def test_a_run_that_is_paid_for_takes_no_files(folder):
    with pytest.raises(BadInput, match="--silo is for files, but a run is given"):
        said("stats", "estimate", folder, "--silo", folder / "north.csv")


def test_notebooks_get_the_same_answer(folder):
    asked = ("stats", "estimate", *files(folder), "--epsilon", 3, "--trust", "masks", "--seed", 1)
    frames = {"north": patients(0), "south": patients(1)}
    settings = {"schema": folder / "schema.toml", "epsilon": 3, "trust": "masks", "seed": 1}
    found = silodp.stats.cox(frames, **settings)
    assert found.details["coefficients"] == silodp_(*asked)["coefficients"]
    assert list(found.spent.index) == ["north", "south"]
    assert found.table.loc["age", "exp_coef"] == pytest.approx(np.exp(0.03), abs=0.02)
    with pytest.raises(BadInput, match=r"use silodp\.stats\.cox"):
        silodp.stats.logistic(frames, **settings)
    compared = silodp.stats.logrank(frames, by="treated", **settings)
    assert compared.details["p"] < 0.001


# --- over gates ----------------------------------------------------------------------------------


@pytest.fixture
def federation(folder, tmp_path, monkeypatch):
    """A federation of two deployed silos, and their ledgers."""
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    about = {"label": "t", "epsilon": 20.0, "statistics": _statistics(0.0, True, "isrl")}
    doors, ledgers = federation_of(tmp_path, folder, ("north", "south"), **about)
    monkeypatch.setattr(module, "carrier_of", lambda *_: doors)
    return tmp_path, ledgers


def charges(ledger):
    return [entry.amount for entry in ledger.entries() if entry.act == "charge"]


def test_gates_give_hazard_ratios_and_are_charged_five_times_within_the_price(federation):
    folder, ledgers = federation
    plan = silodp_("federation", "estimate", "--folder", folder, "--epsilon", 3, "--plan")
    assert [silo["epsilon"] for silo in plan["silos"]] == [3.0, 3.0]
    assert not charges(ledgers["north"])
    asked = ("federation", "estimate", "--folder", folder, "--epsilon", 3)
    answer = silodp_(*asked)
    check_ratios(answer)
    assert [len(charges(ledger)) for ledger in ledgers.values()] == [5, 5]
    assert [silo["epsilon"] for silo in answer["silos"]] == [3.0, 3.0]
    assert silodp_(*asked) == answer, "the gates give their stored answers"
    assert [len(charges(ledger)) for ledger in ledgers.values()] == [5, 5]
    strata = silodp_(
        "federation", "estimate", "--folder", folder, "--epsilon", 5, "--strata", "silo"
    )
    assert strata["strata"] == "silo"
    assert abs(strata["coefficients"][0]["coef"] - 0.03) < 4 * strata["coefficients"][0]["se"]
    test = silodp_("federation", "logrank", "--folder", folder, "--epsilon", 2, "--by", "treated")
    assert test["p"] < 0.01
    assert len(charges(ledgers["north"])) == 11
