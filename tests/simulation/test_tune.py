"""Synthetic records are as hard as they say, and tuning on the silos' own records stays within its
budget whoever looks.
"""

import json
import math
import os
import tomllib

import numpy as np
import pytest
import torch

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget, gdp_epsilon, gdp_mu
from silodp.core.privacy.tuning import (
    GaussianRun,
    draw,
    repetitions_by_name,
    selected_epsilon,
)
from silodp.server.order import Order
from silodp.server.several import SCORE_SHARE
from silodp.simulation import charged as charged_search
from silodp.simulation import tune
from silodp.simulation.charged import wrong
from silodp.simulation.synthetic import TESTED, Shape, separation, signal_by_name, synthetic

RANGES = tune.Ranges(rounds=(3,), phases=(1, 3), steps=(0.3, 1.0), clips=(1.0,))


def here(work, tasks, **_):
    """All in this process."""
    return (work(*task) for task in tasks)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(tune, "spread", here)
    monkeypatch.setattr("silodp.simulation.sweep.spread", here)


# --- synthetic records and noise -----------------------------------------------------------------


@pytest.mark.parametrize(("classes", "signal"), [(2, 0.85), (2, 0.7), (5, 0.9)])
def test_the_best_possible_model_gets_the_stated_share_right(classes, signal):
    shape = Shape((20_000,), 8, classes, signal=signal)
    split = synthetic(shape, shape.records, 0)
    x, y = split.train.x[0].numpy(), split.train.y[0].numpy()
    means = np.stack([x[y == k].mean(0) for k in range(classes)])
    right = (
        ((split.test_x.numpy()[:, None] - means) ** 2).sum(-1).argmin(1) == split.test_y.numpy()
    ).mean()
    assert right == pytest.approx(
        signal, abs=4 * math.sqrt(signal * (1 - signal) / TESTED)
    )  # four standard deviations
    assert np.linalg.norm(means[0] - means[1]) == pytest.approx(
        math.sqrt(2) * separation(signal, classes), rel=0.05
    )


@pytest.mark.parametrize(
    "case",
    [
        {"records": ()},
        {"records": (10, 0)},
        {"features": 2, "classes": 4},
        {"classes": 1},
        {"signal": 0.4},
        {"signal": 1.0},
    ],
)
def test_shapes_without_a_meaning_are_refused(case):
    with pytest.raises(BadInput):
        Shape(**{"records": (10,), "features": 5} | case)


def test_a_signal_that_nobody_knows_is_refused():
    with pytest.raises(BadInput, match="soft"):
        signal_by_name("soft")


# --- tuning --------------------------------------------------------------------------------------


def charged(folder, trust="isrl", repetitions=None, **more):
    shape = Shape((300,) * 3, 4)
    records = synthetic(shape, shape.records, 0).train
    search = charged_search.ChargedSearch(
        Order(model="logistic", trust=trust), RANGES, ("a", "b", "c"), 2, 4, repetitions
    )
    return charged_search.search_charged(search, records, folder, seed=5, **more)


def test_candidates_that_the_server_sees_compose_within_the_budget(tmp_path):
    answer = charged(tmp_path / "t")
    assert [len(answer["candidates"]), len(answer["price"])] == [4, 3]
    for silo in answer["price"]:
        assert 2.999 < silo["spent_epsilon"] <= 3.0
    whole = gdp_mu(Budget(3.0, 300.0**-2))
    for mu in answer["run_mu"]:
        assert 4 * mu**2 == pytest.approx((1 - charged_search.SCALING_SHARE) * whole**2)
        assert gdp_epsilon(mu, 300.0**-2) < 1.5
    assert answer["chosen"]["score"] == min(c["score"] for c in answer["candidates"])
    assert (
        tomllib.loads((tmp_path / "t/settings.toml").read_text())["algorithm"]
        == answer["chosen"]["algorithm"]
    )
    assert (tmp_path / "t/model.safetensors").exists()
    assert not (tmp_path / "t/runs/seed").exists()


def test_a_score_is_a_release_that_is_charged(tmp_path, monkeypatch):
    """Its noise is there: the released score is not the share itself, and scatters about it as its
    mechanism says.
    """
    seen = []

    def watched(problem, records, w):
        found = wrong(problem, records, w)
        seen.append(float((found.x.sum((1, 2)) / torch.tensor(found.counts)).mean()))
        return found

    monkeypatch.setattr(charged_search, "wrong", watched)
    answer = charged(tmp_path / "t")
    gaps = [abs(a - c["score"]) for a, c in zip(seen, answer["candidates"], strict=True)]
    assert len(gaps) == 4
    share = (1 - charged_search.SCALING_SHARE) * SCORE_SHARE / 4
    std = (
        math.sqrt(2) / (gdp_mu(Budget(3.0, 300.0**-2)) * math.sqrt(share)) / 300 / math.sqrt(3)
    )  # u = 2 share - 1, of sensitivity 2 sqrt(2) / n
    assert all(1e-6 < gap < 4.5 * std for gap in gaps)
    assert max(gaps) > 0.2 * std  # all four so small: probability below 0.001


def interrupted(*args):
    raise KeyboardInterrupt


def test_an_interrupted_tuning_goes_on_and_ends_with_the_same_answer(tmp_path, monkeypatch):
    whole = charged(tmp_path / "whole")
    calls = iter((wrong, wrong, interrupted))
    with monkeypatch.context() as patch:
        patch.setattr(charged_search, "wrong", lambda *args: next(calls)(*args))
        with pytest.raises(KeyboardInterrupt):
            charged(tmp_path / "parts")
    again = charged(tmp_path / "parts")
    for key in ("candidates", "chosen", "price"):
        assert again[key] == whole[key]


def test_a_finished_tuning_is_not_paid_for_twice(tmp_path, monkeypatch):
    first = charged(tmp_path / "t", "central", "poisson:4")
    monkeypatch.setattr(charged_search, "wrong", interrupted)
    assert charged(tmp_path / "t", "central", "poisson:4") == first


@pytest.mark.parametrize("law", ["poisson:4", "geometric:3"])
def test_a_curator_shows_the_best_run_and_nothing_of_the_others(tmp_path, law):
    answer = charged(tmp_path / "t", "central", law)
    (price,) = answer["price"]
    beside = charged_search.SCALING_SHARE * gdp_mu(Budget(3.0, 300.0**-2)) ** 2
    assert price["spent_epsilon"] == selected_epsilon(
        repetitions_by_name(law), GaussianRun(answer["run_mu"][0]), 300.0**-2, beside=beside
    )
    assert 2.99 < price["spent_epsilon"] <= 3.0
    assert all("score" not in c for c in answer["candidates"])
    assert {p.name for p in (tmp_path / "t").iterdir()} == {
        "config.json",
        "environment.json",
        "model.safetensors",
        "settings.toml",
        "tune.json",
    }


def test_a_curator_that_draws_no_run_makes_none_and_gives_the_answer_that_was_fixed_before(
    tmp_path, monkeypatch
):
    """The price counts on it: with probability e^-4 nothing is run, and nothing is learned."""
    made: list[object] = []
    shipped = charged_search._Trials._carry_out

    def noted(*words, **more):
        made.append(words)
        return shipped(*words, **more)

    monkeypatch.setattr(charged_search._Trials, "_carry_out", noted)
    monkeypatch.setattr(charged_search, "draw", lambda law, uniform: draw(law, 0.0))
    answer = charged(tmp_path / "t", "central", "poisson:4")
    assert made == []
    assert answer["chosen"]["score"] is None


class Dies(Exception):
    pass


def test_a_curator_killed_before_cleaning_up_leaves_nothing_once_it_is_asked_again(
    tmp_path, monkeypatch
):
    def die(*args, **more):
        raise Dies

    folder = tmp_path / "t"
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", die)
        with pytest.raises(Dies):
            charged(folder, "central", "poisson:4")
    secret = tmp_path / ".t.secret"
    assert secret.stat().st_mode & 0o777 == 0o700
    kept = [p for p in secret.iterdir() if p.name != "config.json"]
    assert len(kept) > 1
    assert {p.stat().st_mode & 0o777 for p in kept} == {0o600}
    assert charged(folder, "central", "poisson:4")["chosen"]["score"] is not None
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "environment.json",
        "model.safetensors",
        "settings.toml",
        "tune.json",
    }
    assert not secret.exists()
    assert len({p.stat().st_mtime_ns for p in (*folder.iterdir(), folder)}) == 1, (
        "times tell how long it took, and so how many runs"
    )


@pytest.mark.parametrize("made", [False, True])
def test_a_curators_folder_is_born_when_all_runs_are_over(tmp_path, monkeypatch, made):
    """Its date of birth, which nobody can set, beside the answer's would tell how long it took."""
    folder, seen, was = tmp_path / "t", [], None
    if made:
        folder.mkdir()
        was = os.open(folder, os.O_RDONLY)  # keeps its number from being given again

    def looks(*args):
        seen.append(folder.exists() and bool(list(folder.iterdir())))
        return wrong(*args)

    monkeypatch.setattr(charged_search, "wrong", looks)
    charged(folder, "central", "poisson:4")
    assert seen
    assert not any(seen)
    if was is not None:
        assert os.fstat(was).st_ino != folder.stat().st_ino
        os.close(was)


def test_the_answer_is_whole_or_not_there_and_its_seed_goes_with_it(tmp_path, monkeypatch):
    """Killed while it writes the answer, and again right after."""

    def die(path, *args, **more):
        if path.name not in ("tune.json", "t"):
            return write(path, *args, **more)
        raise Dies

    write = tune.atomic.write
    for where in ("silodp.simulation.tune.atomic.write", "silodp.simulation.charged.clean_up"):
        with monkeypatch.context() as patch:
            patch.setattr(where, die)
            with pytest.raises(Dies):
                charged(tmp_path / "t")
        assert (tmp_path / "t/tune.json").exists() == where.endswith("clean_up")
        assert (tmp_path / "t/runs/seed").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "t/runs").stat().st_mode & 0o777 == 0o700
    charged(tmp_path / "t")
    assert not (tmp_path / "t/runs/seed").exists()


@pytest.mark.parametrize("trust", ["isrl", "central"])
def test_noise_is_not_used_again_on_other_records(tmp_path, monkeypatch, trust):
    told = (tmp_path / "t", trust, "poisson:4" if trust == "central" else None)
    with monkeypatch.context() as patch:
        patch.setattr(charged_search, "wrong", interrupted)
        with pytest.raises(KeyboardInterrupt):
            charged(*told)
    real = synthetic

    def edited(*args):
        split = real(*args)
        split.train.x[1, 7, 2] += 1e-3
        return split

    monkeypatch.setitem(globals(), "synthetic", edited)
    with pytest.raises(BadInput, match="not those with which"):
        charged(*told)


def test_random_stopping_is_refused_where_every_run_is_seen(tmp_path):
    with pytest.raises(BadInput, match="hides nothing"):
        charged(tmp_path / "t", "isrl", "poisson:4")
    with pytest.raises(BadInput, match="hides nothing"):
        charged(tmp_path / "t", "central")
    with pytest.raises(BadInput, match="shuffle"):
        charged(tmp_path / "t", "shuffle")


def test_a_run_that_diverges_is_scored_as_the_worst(tmp_path, monkeypatch):
    monkeypatch.setattr(
        charged_search, "ready", lambda order: lambda fed, problem, w, **m: iter([w * math.nan])
    )
    assert {c["score"] for c in charged(tmp_path / "t")["candidates"]} == {1.0}


def test_free_tuning_reads_no_silo_and_resumes(tmp_path, silodp, monkeypatch):
    words = (
        "tune",
        "--records",
        150,
        "--silos",
        3,
        "--features",
        4,
        "--rounds",
        3,
        "--phase",
        1,
        "--phase",
        3,
        "--step",
        0.3,
        "--step",
        1,
        "--clip",
        1,
        "--trials",
        2,
        "--out",
        tmp_path / "t",
    )
    code, out, _ = silodp(*words, "--json")
    assert code == 0
    answer = json.loads(out)
    assert len(answer["candidates"]) == 4
    assert answer["chosen"]["train_loss"] == min(c["train_loss"] for c in answer["candidates"])
    monkeypatch.setattr(tune, "run_arm", None)  # nothing is left to run
    code, out, _ = silodp(*words)
    assert code == 0
    assert "cost no privacy" in out


def test_the_command_tunes_files_of_silos_and_public_ones(tmp_path, silodp):
    shape = Shape((120,) * 2, 3)
    records = synthetic(shape, shape.records, 1).train
    for i in range(2):
        rows = "".join(
            ",".join(map(str, [*x, int(y)])) + "\n"
            for x, y in zip(records.x[i].tolist(), records.y[i], strict=True)
        )
        (tmp_path / f"{i}.csv").write_text("a,b,c,label\n" + rows)
    ranges = ("--rounds", 3, "--phase", 1, "--step", 0.3, "--step", 1, "--clip", 1)
    files = [str(tmp_path / f"{i}.csv") for i in range(2)]
    code, out, err = silodp(
        "tune",
        "--silo",
        files[0],
        "--silo",
        files[1],
        *ranges,
        "--candidates",
        2,
        "--epsilon",
        1.23454,
        "--out",
        tmp_path / "own",
    )
    assert code == 0, err
    assert "0: spent epsilon 1.235 of 1.23454" in out
    assert "all runs are charged" in out
    code, out, _ = silodp(
        "tune",
        "--public",
        files[0],
        "--public",
        files[1],
        *ranges,
        "--trials",
        1,
        "--out",
        tmp_path / "public",
    )
    assert code == 0
    assert "cost no privacy" in out
    for words, sentence in (
        (("--silo", files[0], "--data", "wbcd"), "charged"),
        (("--silo", files[0], "--repetitions", "poisson:3"), "hides nothing"),
        (("--data", "wbcd", "--repetitions", "poisson:3"), "are only for --silo"),
        (("--records", 10), "features is missing"),
        ((), "give one of"),
        (("--silo", files[0], "--candidates", 99), "between 1 and 2"),
    ):
        code, _, err = silodp("tune", *words, *ranges, "--out", tmp_path / "no")
        assert (code, err.count("\n")) == (2, 1), err
        assert sentence in err


@pytest.mark.parametrize(
    "wrong",
    [
        ("--candidates", 0),
        ("--delta", 0),
        ("--model", "resnet"),
        ("--trust", "central", "--delta", 0),
        ("--trust", "central", "--epsilon", 1e-4),
        ("--trust", "central", "--repetitions", "poisson:0"),
        ("--trust", "central", "--phase", 4, "--slope", -1),
        ("--trust", "central", "--out", "a.csv"),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_a_wrong_word_leaves_nothing_that_the_right_command_would_find(silodp, tmp_path, wrong):
    (tmp_path / "a.csv").write_text("x,label\n" + "".join(f"{k % 7},{k % 2}\n" for k in range(60)))
    code, _, err = silodp(
        "tune", "--silo", "a.csv", "--rounds", 1, "--phase", 1, "--out", "t", *wrong
    )
    assert (code, err.count("\n")) == (2, 1), err
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_a_wrong_model_or_label_leaves_no_folder_of_a_free_search(silodp, tmp_path):
    (tmp_path / "a.csv").write_text("x,label\n" + "".join(f"{k % 7},{k % 2}\n" for k in range(60)))
    for words in (("--model", "resnet"), ("--label", "y"), ("--rounds", 1, "--phase", 2)):
        assert silodp("tune", "--public", "a.csv", "--trials", 1, *words, "--out", "t")[0] == 2
        assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_a_tuning_has_an_orders_options_and_its_settings_are_those_of_the_next_run(
    silodp, tmp_path
):
    (tmp_path / "ball.py").write_text(PROX)
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text(
            "x,label\n" + "".join(f"{k % 7},{k % 2}\n" for k in range(60))
        )
    words = ("--silo", "a.csv", "--silo", "b.csv", "--scale", "none")
    order = (
        "--algorithm",
        "local-sgd",
        "--local-steps",
        2,
        "--prox",
        "ball.py:Ball:0.5",
        "--epsilon",
        2,
        "--epsilon",
        "b=1",
        "--seed",
        3,
    )
    code, out, err = silodp(
        "tune",
        *words,
        *order,
        "--candidates",
        1,
        "--rounds",
        2,
        "--step",
        0.3,
        "--clip",
        1,
        "--out",
        "t",
        "--json",
    )
    assert code == 0, err
    assert [silo["epsilon"] for silo in json.loads(out)["price"]] == [2, 1]
    found = tomllib.loads((tmp_path / "t/settings.toml").read_text())
    assert {
        name: found[name]
        for name in ("algorithm", "model", "rounds", "local_steps", "step", "clip")
    } == {
        "algorithm": "local-sgd",
        "model": "mlp:8",
        "rounds": 2,
        "local_steps": 2,
        "step": 0.3,
        "clip": 1.0,
    }
    assert "epsilon" not in found
    code, _, err = silodp(
        "train", *words, "--classes", "0,1", "--settings", "t/settings.toml", "--out", "run"
    )
    assert code == 0, err
    told = json.loads((tmp_path / "run/run.json").read_text())["order"]
    assert (told["local_steps"], told["prox"].rpartition("/")[2]) == (2, "ball.py:Ball:0.5")
    (tmp_path / "ball.py").write_text(PROX + "# another\n")
    code, _, err = silodp(
        "tune",
        *words,
        *order,
        "--candidates",
        1,
        "--rounds",
        2,
        "--step",
        0.3,
        "--clip",
        1,
        "--out",
        "t",
    )
    assert (code, "another code" in err) == (2, True), err


PROX = """
from dataclasses import dataclass


@dataclass(frozen=True)
class Ball:
    radius: float

    def value(self, w):
        return w.new_zeros(w.shape[0])

    def __call__(self, w, step):
        return w * (self.radius / w.norm(dim=-1, keepdim=True).clamp_min(self.radius))
"""
