"""Where a study stands, and what is next: at every stage `silodp status` says it, and its commands
are ones that exist.
"""

import json
import re

import click
import pytest
import typer

from silodp.cli import app as cli
from silodp.core.privacy.accounting import Budget, gdp_epsilon, gdp_mu


@pytest.fixture
def silodp(said, monkeypatch, tmp_path):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "80")
    return said


def exists(step: str) -> bool:
    found, words = typer.main.get_command(cli.app), step.partition("silodp ")[2].split()
    while words and isinstance(found, click.Group) and words[0] in found.commands:
        found = found.commands[words.pop(0)]
    options = {option for parameter in found.params for option in parameter.opts}
    return not isinstance(found, click.Group) and all(
        word in options for word in words if word.startswith("--")
    )


def test_a_project_knows_its_runs_and_what_is_next(silodp, tmp_path):
    silodp("init", "trial", "--demo")
    told = json.loads(silodp("status", "trial", "--json"))
    assert (told["kind"], told["schema"]["label"], len(told["files"]), told["runs"]) == (
        "project",
        "readmitted",
        4,
        [],
    )
    assert told["next"][-1] == "silodp train --project trial --held-out 0.2"
    fixed = (
        "--project",
        "trial",
        "--held-out",
        0.2,
        "--algorithm",
        "mb-sgd",
        "--rounds",
        2,
        "--step",
        1,
        "--epsilon",
        1,
        "--seed",
        1,
    )
    silodp("train", *fixed, "--model", "mlp:4")
    assert (
        "silodp evaluate trial/runs/train --epsilon 1"
        in json.loads(silodp("status", "trial", "--json"))["next"]
    )
    said = " ".join(silodp("train", *fixed, "--model", "logistic").split())
    assert (
        "Together with trial/runs/train, which read some of the same files, silos have spent up to "
        "epsilon 1.4" in said
    )
    silodp("evaluate", "trial/runs/train-2", "--epsilon", 1, "--seed", 1)
    told = json.loads(silodp("status", "trial", "--json"))
    assert [(run["folder"], run["model"], run["evaluations"]) for run in told["runs"]] == [
        ("trial/runs/train", "mlp:4", 0),
        ("trial/runs/train-2", "logistic", 1),
    ]
    north = told["together"]["silos"]["north"]
    mu = gdp_mu(Budget(1.0, north["delta"]))
    assert north["epsilon"] == pytest.approx(gdp_epsilon(3**0.5 * mu, north["delta"]), rel=1e-3), (
        "two trainings and an evaluation"
    )
    assert told["next"][0].startswith("silodp predict trial/runs/train-2")
    assert all(exists(step) for step in told["next"])
    said = silodp("status", "trial")
    assert "evaluated: " in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_a_draft_is_filled_in_first_and_a_folder_without_anything_is_said_to_be_none(
    silodp, tmp_path, capsys, monkeypatch
):
    (tmp_path / "a.csv").write_text("age,outcome\n1,0\n")
    silodp(
        "init", "study", "--from", "a.csv", "--type", "age=number", "--label", "outcome", "--yes"
    )
    assert json.loads(silodp("status", "study", "--json"))["next"][0].startswith("fill in ")
    monkeypatch.setattr("sys.argv", ["silodp", "status", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert re.search(
        "is not a project, and not the folder of a federation or a silo", capsys.readouterr().err
    )


def test_a_silos_own_folder_says_what_it_approves_what_is_left_and_who_asks(silodp, tmp_path):
    data = tmp_path / "clinic.csv"
    data.write_text("a,b,label\n" + "".join(f"{k},{k % 7},{k % 2}\n" for k in range(60)))
    data.chmod(0o600)
    key = "ab" * 32
    silodp(
        "silo",
        "init",
        "gate",
        "--data",
        data,
        "--epsilon",
        3,
        "--model",
        "logistic",
        "--study",
        "first",
        "--asker",
        f"university={key}",
    )
    told = json.loads(silodp("status", "gate", "--json"))
    (own,) = told["silos"]
    assert (own["study"], own["model"], own["askers"], own["spent_epsilon"], own["left"]) == (
        "first",
        "logistic",
        ["university"],
        0.0,
        1.0,
    )
    assert [step.split()[2] for step in told["next"]] == ["attest", "serve"]
    assert all(exists(step) for step in told["next"])
    assert "approves the study first (logistic)" in " ".join(silodp("status", "gate").split())


@pytest.mark.parametrize("name", ["federation.json", "stopped.json"])
def test_a_federations_file_that_cannot_be_read_gets_a_sentence(
    silodp, tmp_path, capsys, monkeypatch, name
):
    (tmp_path / name).write_text("{half")
    monkeypatch.setattr("sys.argv", ["silodp", "status", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert re.fullmatch(rf"silodp: .*{name}.*\n", capsys.readouterr().err)
