"""An algorithm in a file outside the package is audited, compared and tuned by its path alone;
worker processes load it by that text.
"""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from research.compare import carry_out
from research.study import Grid, Study
from silodp.audit import report
from silodp.core.errors import BadInput
from silodp.server.algorithms import ALGORITHMS

SOURCE = '''
import torch
from silodp import Gaussian, LocalSteps, Query

def pushed(fed, problem, w, *, rounds: int, local_steps: int, decay: float = 0.5, step, minibatch: Gaussian):
    """Server momentum on local steps."""
    v = torch.zeros_like(w)
    for r in range(rounds):
        v = decay * v + fed.mean(Query(LocalSteps(w, local_steps, step), minibatch.at(r)))
        w = problem.prox(w + v, step)
        yield w

def greedy(fed, problem, w, *, rounds: int, step, minibatch: Gaussian):
    """Asks at a tenth of the noise that was planned."""
    from dataclasses import replace
    for r in range(rounds):
        quiet = replace(minibatch, noise_multiplier=minibatch.noise_multiplier / 10)
        w = problem.prox(w - step * fed.mean(Query(LocalSteps(w, 1, step), quiet.at(r))), step)
        yield w
'''  # noqa: E501


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return "mine.py:pushed"


def test_it_is_audited_by_its_path_and_reaches_the_claim_and_no_more(mine, silodp):
    code, out, _ = silodp(
        "audit", "--algorithm", mine, "--set", "decay=0.3", "--epsilon", 6, "--runs", 1500, "--json"
    )
    (row,) = json.loads(out)["rows"]
    assert code == 0
    assert (row["algorithm"], row["alarm"]) == (mine, False)
    assert 0.8 * 6 < row["empirical_epsilon"] < 1.3 * 6
    assert report.cases([mine], given={"decay": "0.3"})[0][0].settings == {
        "rounds": 4,
        "local_steps": 2,
        "decay": 0.3,
    }


def test_one_that_asks_for_less_noise_than_was_planned_is_refused_by_the_ledger(mine, silodp):
    code, _, err = silodp("audit", "--algorithm", "mine.py:greedy", "--epsilon", 6, "--runs", 100)
    assert code != 0
    assert "budget" in err


def test_a_new_one_in_the_package_needs_no_line_in_the_audit(mine, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "pushed", replace(ALGORITHMS["local-sgd"], name="pushed"))
    assert [case.settings for case, _ in report.cases() if case.algorithm == "pushed"] == [
        {"rounds": 4, "local_steps": 2}
    ] * 2
    with pytest.raises(BadInput, match="--set is for"):
        report.cases(["mb-sgd"], given={"decay": "1"})


GRID = Grid((0.3, 1.0), (1.0,), (1, 2), slopes=(1.0,))
TINY = Study("wbcd", 3, GRID, trials=1, epsilons=(6.0,), model="mlp:3", methods=("mb-sgd",))


def test_it_is_compared_beside_the_others_in_worker_processes(mine, tmp_path):
    study = TINY.beside([mine, "mb-sgd", "momentum"], {"decay": "0.2"})
    assert study.methods == ("mb-sgd", "momentum")
    rows = carry_out({tmp_path / "c": study})[tmp_path / "c"]
    assert [row["curve"] for row in rows] == ["mb-sgd", "momentum", mine]
    with (tmp_path / "c/results.csv").open() as file:
        (unit,) = {row["unit"] for row in csv.DictReader(file) if row["curve"] == mine}
    assert unit == f"{mine},{mine},decay=0.2,rounds=3,steps=5"


def test_a_folder_is_not_continued_with_another_file_of_that_name(mine, tmp_path):
    study = TINY.beside([mine], {})
    carry_out({tmp_path / "c": study})
    (tmp_path / "mine.py").write_text(SOURCE + "\n")
    with pytest.raises(BadInput, match="another own"):
        carry_out({tmp_path / "c": TINY.beside([mine], {})})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--algorithm", "nothing.py:f"), "cannot be read"),
        (("--algorithm", "mine.py:none"), "has no"),
        (("--algorithm", "mine.py:pushed", "--set", "decay"), "NAME=VALUE"),
        (("--algorithm", "mine.py:pushed", "--set", "mass=1"), "no setting 'mass'"),
    ],
)
def test_a_mistake_gets_one_sentence(mine, silodp, research, words, said):
    for code, _, err in (silodp("audit", *words), research("compare", *words)):
        assert code == 2
        assert said in err


def test_it_is_tuned_by_its_path_freely_and_on_the_silos_own_records(mine, silodp, tmp_path):
    ranges = (
        "--rounds",
        2,
        "--phase",
        1,
        "--phase",
        2,
        "--step",
        0.3,
        "--step",
        1,
        "--clip",
        1,
        "--set",
        "decay=0.2",
    )
    words = ("tune", "--algorithm", mine, *ranges, "--json")
    code, out, _ = silodp(
        *words, "--records", 200, "--silos", 2, "--features", 3, "--trials", 1, "--out", "free"
    )
    answer = json.loads(out)
    assert code == 0
    assert {row["algorithm"] for row in answer["candidates"]} == {mine}
    assert len(answer["candidates"]) == 2  # it has no phases
    for name in ("a", "b"):
        np.savez(
            tmp_path / f"{name}.npz",
            x=np.random.default_rng(0).normal(size=(60, 3)),
            y=np.arange(60) % 2,
        )
    code, out, _ = silodp(
        *words,
        "--silo",
        "a.npz",
        "--silo",
        "b.npz",
        "--candidates",
        2,
        "--seed",
        1,
        "--out",
        "charged",
    )
    answer = json.loads(out)
    assert code == 0
    assert answer["chosen"]["decay"] == 0.2
    assert all(0.999 * 3 < silo["spent_epsilon"] <= 3 for silo in answer["price"])
    assert silodp("tune", "--records", 200, "--features", 3, "--set", "decay=0.2")[0] == 2
