"""A run folder is about one run: what an earlier one left is gone before a new one says what it is, and kinds are not mixed."""

import json
import re

import pytest

from silodp.lab.runfolder import OF_TRAINING

TOLD = ("train", "--data", "wbcd", "--model", "logistic", "--algorithm", "mb-sgd", "--rounds", 2, "--held-out", 0.2, "--out", "run")


@pytest.fixture
def used(silodp, tmp_path, monkeypatch):
    """A folder that has been trained into, evaluated, reported on, and given a file by its owner."""
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    assert silodp(*TOLD, "--epsilon", 3)[0] == 0
    assert silodp("evaluate", "run", "--epsilon", 2)[0] == 0
    assert silodp("report", "run")[0] == 0
    (tmp_path / "run/notes.txt").write_text("mine")
    return tmp_path / "run"


def names(folder):
    return {path.name for path in folder.iterdir()}


def promised(folder):
    return float(re.search(r"is \(([0-9.]+), ", (folder / "report.html").read_text())[1])


def test_a_new_run_takes_everything_of_the_one_before_away_and_nothing_else(silodp, used):
    assert names(used) - {"notes.txt"} == set(OF_TRAINING) - {"spent.json.part"}, "the list must have all that is written"
    assert promised(used) > 3
    assert silodp(*TOLD, "--epsilon", 0.5)[0] == 0
    assert not names(used) & {"evaluations.jsonl", "report.html"}
    assert (used / "notes.txt").read_text() == "mine"
    assert silodp("report", "run")[0] == 0
    assert promised(used) == pytest.approx(0.5, abs=0.01)


def test_a_run_that_diverges_leaves_no_model_of_the_one_before(silodp, used):
    code, _, err = silodp(*TOLD, "--epsilon", 0.1, "--step", 1e300)
    assert code == 2
    assert "diverged" in err or "refused" in err
    assert names(used) == {"notes.txt", "progress.jsonl", "run.json"}
    code, _, err = silodp("evaluate", "run")
    assert (code, err.count("\n")) == (2, 1)


def test_a_run_that_is_refused_takes_nothing_away(silodp, used):
    before = {path.name: path.read_bytes() for path in used.iterdir()}
    for words in (("--output", "best"), ("--model", "nothing"), ("--epsilon", "-1"), ("--seed", "-1"), ("--prox", "x")):
        assert silodp(*TOLD, *words)[0] == 2
        assert {path.name: path.read_bytes() for path in used.iterdir()} == before


def test_runs_of_different_kinds_do_not_share_a_folder(silodp, tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    assert silodp(*TOLD)[0] == 0
    before = names(tmp_path / "run")
    for words in (("compare", "--quick"), ("tune", "--data", "wbcd")):
        code, _, err = silodp(*words, "--out", "run")
        assert (code, "holds a run" in err) == (2, True)
    assert names(tmp_path / "run") == before
    for name in ("config.json", "journal"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(json.dumps({}))
        code, _, err = silodp(*TOLD[:-1], name)
        assert (code, "choose another --out" in err) == (2, True)
        assert names(tmp_path / name) == {name}
