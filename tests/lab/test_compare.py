"""The sweep store never loses a finished unit, and a study's summary is computed from it alone."""

import json
import math

import pytest

from silodp.core.errors import BadInput
from silodp.lab import compare as lab
from silodp.lab import sweep
from silodp.lab.compare import Study, compare, improvement
from silodp.lab.sweep import Arm, Store, best_settings, pending

TINY = Study(rounds=4, trials=2, epsilons=(1.0, 6.0), hidden=3)


@pytest.fixture
def tiny(monkeypatch):
    """A study of few runs in this process."""
    grid = {"step": (0.3, 1.0), "clip": (1.0,)}
    arms = [
        Arm("spider", "spider", {"rounds": 4, "phase": 2}, {**grid, "slope": (1.0,)}),
        Arm("mb-sgd", "mb-sgd", {"rounds": 4}, grid),
        Arm("mb-sgd-paper", "mb-sgd", {"rounds": 4}, grid, "paper"),
        Arm("mb-sgd-open", "mb-sgd", {"rounds": 4}, grid, "none"),
    ]
    monkeypatch.setattr(Study, "arms", lambda self: arms)
    monkeypatch.setattr(lab, "spread", lambda work, tasks: (work(*task) for task in tasks))
    return arms


def test_a_study_ends_with_a_row_for_each_curve_and_epsilon(tiny, tmp_path):
    rows = compare(TINY, tmp_path / "run", quiet=True)
    assert {(r["curve"], r["epsilon"]) for r in rows} == {
        (c, e) for c in ("spider", "spider-diff", "mb-sgd", "mb-sgd-paper") for e in (1.0, 6.0)
    } | {("mb-sgd-open", None)}  # fmt: skip
    for r in rows:
        if r["curve"] in ("spider", "mb-sgd"):
            assert 0.999 * r["epsilon"] <= r["spent_epsilon"] <= r["epsilon"]
    assert json.loads((tmp_path / "run/config.json").read_text())["rounds"] == 4
    assert "simulation" in json.loads((tmp_path / "run/environment.json").read_text())["noise"]


def test_an_interrupted_study_goes_on_and_ends_with_the_same_rows(tiny, tmp_path, monkeypatch):
    whole = compare(TINY, tmp_path / "whole", quiet=True)
    real, calls = lab.run_arm, []

    def fails_on_the_fourth(*args, **kwargs):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(lab, "run_arm", fails_on_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        compare(TINY, tmp_path / "parts", quiet=True)
    with (tmp_path / "parts/results.csv").open("a") as file:
        file.write('"spider,phase=2,rounds=4",spider,1,1.0,4,2,,0.3,1.0,1.0,0.5,0.')  # killed in the middle of a line
    monkeypatch.setattr(lab, "run_arm", real)
    assert compare(TINY, tmp_path / "parts", quiet=True) == whole
    assert len(calls) == 4


def test_a_folder_of_another_study_is_refused_and_kept(tiny, tmp_path):
    compare(TINY, tmp_path / "run", quiet=True)
    before = (tmp_path / "run/results.csv").read_bytes()
    with pytest.raises(BadInput, match="rounds"):
        compare(Study(rounds=5, trials=2, epsilons=(1.0, 6.0), hidden=3), tmp_path / "run", quiet=True)
    assert (tmp_path / "run/results.csv").read_bytes() == before


def test_a_unit_without_its_closing_row_is_run_again(tmp_path):
    arm = Arm("mb-sgd", "mb-sgd", {"rounds": 4}, {"step": (1.0,), "clip": (1.0,)})
    store = Store(tmp_path / "results.csv")
    store.add(arm.key, 0, [{"unit": arm.key, "curve": "mb-sgd", "trial": 0, "spent_epsilon": 1.0}])
    assert pending(Store(tmp_path / "results.csv"), [arm], 2) == [(arm, 1)]
    lines = (tmp_path / "results.csv").read_text().splitlines(keepends=True)
    (tmp_path / "results.csv").write_text("".join(lines[:-1]))
    assert pending(Store(tmp_path / "results.csv"), [arm], 1) == [(arm, 0)]


def test_results_do_not_depend_on_what_else_is_in_the_batch(tiny):
    """A run's numbers are its own: alone, or among the runs of a larger grid."""
    split = lab.DATASETS["wbcd"].load(0, None)
    problem = lab.problem_for(TINY, 30, 2)
    small = Arm("spider", "spider", {"rounds": 4, "phase": 2}, {"step": (1.0,), "clip": (1.0,), "slope": (1.0,)})
    alone = next(iter(sweep.run_arm(small, problem, split, 0, (6.0,))))
    among = next(r for r in sweep.run_arm(tiny[0], problem, split, 0, (1.0, 6.0)) if r["step"] == 1.0 and r["epsilon"] == 6.0)
    assert among["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-4)


def test_the_best_setting_is_chosen_by_mean_training_loss():
    def row(step, loss):
        return {"rounds": "1", "phase": "", "steps": "", "step": step, "clip": "1", "slope": "", "train_loss": str(loss)}

    rows = [row("a", 1.0), row("a", 0.1), row("b", 0.5), row("b", 0.5), row("c", math.inf), row("c", 0.0)]
    assert {r["step"] for r in best_settings(rows)} == {"b"}


def test_improvement_is_the_mean_relative_reduction():
    rows = [
        {"curve": c, "epsilon": e, "test_error": v}
        for c, e, v in (("spider", 1, 0.1), ("mb-sgd", 1, 0.2), ("spider", 2, 0.3), ("mb-sgd", 2, 0.3))
    ]
    assert improvement(rows, "mb-sgd") == pytest.approx(25.0)
