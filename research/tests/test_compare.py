"""The sweep store never loses a finished unit, and a study's summary is computed from it alone."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from research import compare as lab
from research.compare import carry_out, improvement, read_table
from research.gallery import reading, significant, write_gallery
from research.study import (
    ARMS,
    FEATURES,
    FIGURES,
    STUDIES,
    Grid,
    Study,
    reduced,
    studies_by_name,
)
from silodp.core.errors import BadInput
from silodp.server.order import Order
from silodp.simulation import sweep
from silodp.simulation.sweep import Arm, Store, best_settings, pending

GRID = Grid(
    (0.3, 1.0),
    (1.0,),
    (1, 2),
    slopes=(1.0,),
    kappas=(0.7,),
    momenta=(0.5,),
    adam_steps=(0.1,),
    shares=(0.5,),
)
TINY = Study(
    "wbcd",
    4,
    GRID,
    trials=2,
    epsilons=(1.0, 6.0),
    model="mlp:3",
    methods=("spider", "mb-sgd", "mb-sgd-paper", "mb-sgd-open"),
)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """All in this process."""
    monkeypatch.setattr(
        lab, "spread", lambda work, tasks, on_gpu=(), **_: (work(*task) for task in tasks)
    )


def run(study: Study, folder: Path, **options) -> list[dict] | None:
    return carry_out({folder: study}, **options).get(folder)


def test_a_study_ends_with_a_row_for_each_curve_and_epsilon(tmp_path):
    rows = run(TINY, tmp_path / "run")
    assert rows is not None
    assert {(r["curve"], r["epsilon"]) for r in rows} == {
        (c, e) for c in ("spider", "spider-diff", "mb-sgd", "mb-sgd-paper") for e in (1.0, 6.0)
    } | {("mb-sgd-open", None)}
    for r in rows:
        if r["curve"] in ("spider", "mb-sgd"):
            assert 0.999 * r["epsilon"] <= r["spent_epsilon"] <= r["epsilon"]
    assert json.loads((tmp_path / "run/config.json").read_text())["rounds"] == 4
    assert "simulation" in json.loads((tmp_path / "run/environment.json").read_text())["noise"]
    table = read_table(tmp_path / "run/figure.csv")
    assert [(r["curve"], r["epsilon"], len(r["errors"])) for r in table] == [
        (r["curve"], r["epsilon"], 2) for r in rows
    ]


def test_an_interrupted_study_goes_on_and_ends_with_the_same_rows(tmp_path, monkeypatch):
    whole = run(TINY, tmp_path / "whole")
    real, calls = lab.run_arm, []

    def fails_on_the_fourth(*args, **kwargs):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(lab, "run_arm", fails_on_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        run(TINY, tmp_path / "parts")
    with (tmp_path / "parts/results.csv").open("a") as file:
        file.write(
            '"spider,spider,phase=2,rounds=4",spider,1,1.0,4,2,,0.3,1.0,1.0,0.5,0.'
        )  # killed in the middle of a line
    monkeypatch.setattr(lab, "run_arm", real)
    assert run(TINY, tmp_path / "parts") == whole


def test_shards_run_each_unit_once_and_their_union_is_the_whole(tmp_path, monkeypatch):
    whole = run(TINY, tmp_path / "whole")
    real, seen = lab.run_arm, []
    monkeypatch.setattr(
        lab, "run_arm", lambda arm, *rest, **more: seen.append(arm.key) or real(arm, *rest, **more)
    )
    assert (
        run(TINY, tmp_path / "parts", shard=(1, 2)) is None
    )  # half is missing: nothing to sum up yet
    assert run(TINY, tmp_path / "parts", shard=(2, 2)) == whole
    assert len(seen) == len(TINY.arms()) * TINY.trials
    assert {p.name for p in (tmp_path / "parts").glob("*.csv")} == {
        "results-1-of-2.csv",
        "results-2-of-2.csv",
        "figure.csv",
    }


def test_a_folder_of_another_study_is_refused_and_kept(tmp_path):
    run(TINY, tmp_path / "run")
    before = (tmp_path / "run/results.csv").read_bytes()
    with pytest.raises(BadInput, match="rounds"):
        run(replace(TINY, rounds=5), tmp_path / "run")
    assert (tmp_path / "run/results.csv").read_bytes() == before


def test_a_unit_without_its_closing_row_is_run_again(tmp_path):
    study = replace(TINY, methods=("mb-sgd",))
    (arm,) = study.arms()
    Store(tmp_path).add(
        arm.key, 0, [{"unit": arm.key, "curve": "mb-sgd", "trial": 0, "spent_epsilon": 1.0}]
    )
    assert pending(Store(tmp_path), study) == [(arm, 1)]
    lines = (tmp_path / "results.csv").read_text().splitlines(keepends=True)
    (tmp_path / "results.csv").write_text("".join(lines[:-1]))
    assert pending(Store(tmp_path), study) == [(arm, 0), (arm, 1)]


def test_results_do_not_depend_on_what_else_is_in_the_batch():
    """A run's numbers are its own: alone, or among the runs of a larger grid."""
    split = lab.DATASETS["wbcd"].load(0, None)
    problem = TINY.problem((30,), 2)
    order = Order("spider", rounds=4, phase=2)
    small = Arm("spider", order, {"step": (1.0,), "clip": (1.0,), "slope": (1.0,)})
    large = Arm("spider", order, {"step": (0.3, 1.0), "clip": (1.0,), "slope": (1.0,)})
    alone = next(iter(sweep.run_arm(small, problem, split, 0, (6.0,))))
    among = next(
        r
        for r in sweep.run_arm(large, problem, split, 0, (1.0, 6.0))
        if r["step"] == 1.0 and r["epsilon"] == 6.0
    )
    assert among["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-4)


def test_the_best_setting_is_chosen_by_mean_training_loss():
    def row(step, loss):
        return {
            "unit": "u",
            "step": step,
            "clip": "1",
            "slope": "",
            "momentum": "",
            "kappa": "",
            "train_loss": str(loss),
        }

    rows = [
        row("a", 1.0),
        row("a", 0.1),
        row("b", 0.5),
        row("b", 0.5),
        row("c", math.inf),
        row("c", 0.0),
    ]
    assert {r["step"] for r in best_settings(rows)} == {"b"}


def test_improvement_is_the_mean_relative_reduction():
    rows = [
        {"curve": c, "epsilon": e, "test_error": v}
        for c, e, v in (
            ("spider", 1, 0.1),
            ("mb-sgd", 1, 0.2),
            ("spider", 2, 0.3),
            ("mb-sgd", 2, 0.3),
        )
    ]
    assert improvement(rows, "mb-sgd") == pytest.approx(25.0)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_names_each_of_its_batches_of_runs_once(name):
    for study in (STUDIES[name], reduced(STUDIES[name])):
        keys = [arm.key for arm in study.arms()]
        assert len(set(keys)) == len(keys) > 0
        assert all(q <= study.rounds for arm in study.arms() if (q := arm.settings.get("phase", 1)))


def test_every_method_runs_within_its_budget(tmp_path):
    methods = tuple(
        m for m in ARMS if not m.endswith(("-paper", "-open", "-masks"))
    )  # two silos have nobody to hide among
    rows = run(replace(TINY, methods=methods, trials=1, epsilons=(1.0,)), tmp_path / "run")
    assert rows is not None
    assert {r["curve"] for r in rows} == set(methods)
    assert all(r["spent_epsilon"] <= 1.0 for r in rows)


def test_small_batches_leave_anchors_whole_and_stay_within_the_budget(tmp_path):
    study = replace(
        TINY,
        methods=("spider-diff",),
        trials=1,
        epsilons=(6.0,),
        sampling="poisson:0.5",
        grid=replace(GRID, shares=()),
    )
    rows = run(study, tmp_path / "run")
    assert rows is not None
    assert 5.9 < rows[0]["spent_epsilon"] <= 6.0


def test_figures_are_found_by_name_data_set_or_family():
    assert list(studies_by_name("all")) == list(FIGURES)
    assert len(studies_by_name("mnist")) == 4
    assert list(studies_by_name("wbcd")) == ["wbcd"]
    assert all(name.startswith("leaderboard") for name in studies_by_name("leaderboard"))
    with pytest.raises(BadInput, match="imagenet"):
        studies_by_name("imagenet")


def test_a_reading_says_what_is_seen_under_our_protocol_and_gives_no_verdict_from_a_small_grid():
    whole = replace(TINY, trials=10, epsilons=(1.0, 2.0))

    def rows(spider, sgd):
        said = {"algorithm": "spider", "settings": {"phase": 1.0}}
        return [
            {
                "curve": c + s,
                "epsilon": e,
                "test_error": v,
                "spent_epsilon": e,
                "errors": [v, v + 0.001, v - 0.001],
                **said,
            }
            for e in (1.0, 2.0)
            for s in ("", "-paper")
            for c, v in (
                ("spider", spider),
                ("spider-diff", spider),
                ("mb-sgd", sgd),
                ("local-sgd", sgd),
            )
        ]

    assert "Under our protocol we do not see SPIDER ahead of full-batch MB-SGD." in reading(
        rows(0.2, 0.1), whole
    )
    assert "Under our protocol we see SPIDER ahead of full-batch MB-SGD." in reading(
        rows(0.1, 0.2), whole
    )
    for small in (replace(whole, dataset="cifar10"), replace(whole, trials=9)):
        assert "no ground for a verdict" in (said := reading(rows(0.1, 0.2), small))
        assert "Under our protocol" not in said
    assert (
        "50.0 % lower than MB-SGD (significantly better at 2, worse at 0 of 2 epsilons)"
        in reading(rows(0.1, 0.2), whole)
    )
    assert "at 2 of 2 epsilons it then picks phase 1" in reading(rows(0.1, 0.2), whole)
    spent = [r | {"spent_epsilon": 1.001 * r["epsilon"] ** 1.001} for r in rows(0.1, 0.2)]
    assert "SPIDER 1.01 at 1 and 2.01 at 2, MB-SGD 1.01 at 1 and 2.01 at 2." in reading(
        spent, whole
    )


def test_significance_allows_for_splits_that_overlap():
    """At equal means splits of the same records differ by chance more than independent ones: (1/T +
    1/4) in the place of 1/T.
    """
    errors = [
        0.100,
        0.106,
        0.098,
        0.110,
        0.096,
    ]  # five gaps of mean 0.002 and standard deviation 0.0058
    bar = 2.776 * 0.005831 * (1 / 5 + 1 / 4) ** 0.5

    def ahead_by(gap):
        rows = [
            {"curve": c, "epsilon": 1.0, "errors": e}
            for c, e in (("a", [x - 0.002 - gap for x in errors]), ("b", [0.1] * 5))
        ]
        return significant(rows, "a", "b")

    assert (
        ahead_by(0.99 * bar),
        ahead_by(1.01 * bar),
        ahead_by(-0.99 * bar),
        ahead_by(-1.01 * bar),
    ) == ((0, 0), (1, 0), (0, 0), (0, 1))


def test_another_draw_is_other_noise_on_the_same_split(tmp_path):
    drawn = [
        run(
            replace(TINY, trials=1, draw=draw, methods=("mb-sgd", "mb-sgd-open")),
            tmp_path / str(at),
        )
        for at, draw in enumerate((0, 1, 1))
    ]
    noisy, quiet = (
        [[r["errors"] for r in rows or [] if (r["curve"] == c)] for rows in drawn]
        for c in ("mb-sgd", "mb-sgd-open")
    )
    assert noisy[1] == noisy[2] != noisy[0]
    assert quiet[0] == quiet[1]


def test_the_gallery_is_drawn_from_its_tables_alone(tmp_path):
    run(replace(TINY, methods=lab.Study.methods), tmp_path / "run")
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/wbcd.csv").write_bytes((tmp_path / "run/figure.csv").read_bytes())
    assert write_gallery(tmp_path, tmp_path / "figures") == [
        tmp_path / "figures.md",
    ]
    assert "python -m research figures wbcd" in (page := (tmp_path / "figures.md").read_text())
    assert (
        "Tuned over 15 steps from 0.000123 to 1, clips 0.1, 1, 5, 10, and for SPIDER "
        "phases 1 to 10 in both forms."
    ) in page
    assert (tmp_path / "figures/wbcd.png").exists()


def test_a_study_on_public_features_has_the_splits_of_the_others_and_a_linear_model(tmp_path):
    study = replace(FEATURES["leaderboard-mnist-linear"], dataset="digits")
    plain, seen = (
        lab._split("digits", 0, None, "cpu", features) for features in ("", study.features)
    )
    assert torch.equal(plain.train.y, seen.train.y)
    assert torch.equal(plain.test_y, seen.test_y)
    assert seen.train.x.shape[2:] == (190,)
    assert not seen.train.x[~seen.train.mask].any(), "padding stays zero"
    problem = study.problem((190,), 2)
    assert problem.dim == 191
    assert not problem.initial([0, 1]).any(), "a convex problem starts at zero"
    assert [(arm.curve, arm.order.algorithm) for arm in study.arms()] == [("linear", "momentum")]
