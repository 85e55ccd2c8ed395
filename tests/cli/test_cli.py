"""Each command as its users type it; each mistake gets one sentence and exit code 2."""

import csv
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from silodp.core.figures import rounded_up
from silodp.core.privacy.accounting import gdp_epsilon
from silodp.server.algorithms import ALGORITHMS


@pytest.fixture
def hospitals(tmp_path):
    """Two small CSV files with columns in different order."""
    random = np.random.default_rng(0)
    for name, order in (("a", ["age", "dose", "outcome"]), ("b", ["outcome", "dose", "age"])):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, order)
            writer.writeheader()
            for _ in range(60):
                age, dose = random.normal(50, 12), random.normal(3, 1)
                writer.writerow(
                    {
                        "age": round(age, 2),
                        "dose": round(dose, 3),
                        "outcome": int(age / 12 + dose > 7),
                    }
                )
    return tmp_path


def refused(result, *words):
    code, out, err = result
    assert code == 2, (code, out, err)
    assert err.startswith("silodp: ")
    assert err.count("\n") == 1, "one sentence, no traceback"
    assert "Traceback" not in err
    for word in words:
        assert word in err, err


def test_plan_gives_the_golden_noise(silodp):
    code, out, _ = silodp(
        "plan",
        "--algorithm",
        "mb-sgd",
        "--records",
        1234,
        "--rounds",
        50,
        "--epsilon",
        3,
        "--clip",
        1,
        "--json",
    )
    answer = json.loads(out)
    assert code == 0
    assert answer["releases"][0]["noise_std"] * 1234 == pytest.approx(22.21, rel=1e-2)
    assert set(answer) >= {"releases", "epsilon", "delta", "mu", "spent_epsilon"}
    assert set(answer["releases"][0]) == {
        "kind",
        "count",
        "sensitivity",
        "noise_std",
        "noise_multiplier",
    }


def test_plan_of_spider_spends_its_budget_and_never_more(silodp):
    _, out, _ = silodp(
        "plan",
        "--algorithm",
        "spider",
        "--records",
        1234,
        "--rounds",
        50,
        "--phase",
        5,
        "--epsilon",
        3,
        "--json",
    )
    spent = json.loads(out)["spent_epsilon"]
    assert 3 * 0.999 <= spent <= 3


def test_plan_in_paper_mode_says_what_is_really_spent(silodp):
    words = (
        "plan",
        "--algorithm",
        "mb-sgd",
        "--records",
        1234,
        "--rounds",
        50,
        "--epsilon",
        18,
        "--noise",
        "paper",
        "--json",
    )
    assert json.loads(silodp(*words)[1])["spent_epsilon"] > 20


def test_the_mu_of_a_plan_is_what_its_noise_spends_and_not_what_the_budget_would_allow(silodp):
    words = ("plan", "--noise", "paper", "--epsilon", 18)
    told = json.loads(silodp(*words, "--json")[1])
    assert told["mu"] == pytest.approx(
        math.sqrt(sum(r["count"] / r["noise_multiplier"] ** 2 for r in told["releases"]))
    )
    assert gdp_epsilon(told["mu"], told["delta"]) == pytest.approx(told["spent_epsilon"])
    assert told["spent_epsilon"] > 18
    assert told["converted"]["zcdp_rho"] == pytest.approx(told["mu"] ** 2 / 2)
    assert "mu = 3.249." in silodp(*words)[1]


def test_what_is_spent_is_never_shown_smaller_than_it_is(silodp, hospitals):
    words = ("plan", "--algorithm", "mb-sgd", "--records", 1234, "--rounds", 50, "--epsilon")
    assert "Spends epsilon 1.235 in all" in silodp(*words, 1.23454)[1]
    assert "Spends epsilon 3 in all" in silodp(*words, 3)[1]
    shuffled = (
        *words[:5],
        "--silos",
        5,
        "--rounds",
        5,
        "--dimension",
        20,
        "--trust",
        "shuffle",
        "--epsilon",
        1,
    )
    told, text = (
        json.loads(silodp(*shuffled, "--json")[1])["epsilon"],
        " ".join(silodp(*shuffled)[1].split()),
    )
    shown = re.search(
        (
            r"Spends epsilon ([\d.]+) at delta \S+ against the server, and ([\d.]+) against "
            r"the shuffler"
        ),
        text,
    )
    assert (shown[1], shown[2]) == (rounded_up(told["server"], 4), rounded_up(told["shuffler"], 4))
    own = (
        "--silo",
        "a.csv",
        "--label",
        "outcome",
        "--algorithm",
        "mb-sgd",
        "--model",
        "logistic",
        "--rounds",
        1,
    )
    trained = silodp("train", *own, "--epsilon", 1.23454)[1]
    assert "1.235 │" in trained


def test_plan_prints_tables_and_theory_for_people(silodp):
    code, out, _ = silodp(
        "plan",
        "--records",
        500,
        "--records",
        2000,
        "--lipschitz",
        1,
        "--smoothness",
        1,
        "--gap",
        1,
        "--dimension",
        10,
    )
    assert code == 0
    assert "500 records" in out
    assert "2000 records" in out
    assert "upper_bound" in out


def test_an_unknown_data_set_gets_the_list_of_those_there_are(silodp):
    refused(silodp("train", "--data", "help"), "wbcd, digits")


def test_train_on_a_built_in_set_writes_model_transcript_and_spend(silodp, tmp_path):
    from safetensors.torch import load_file

    code, out, _ = silodp(
        "train",
        "--data",
        "wbcd",
        "--rounds",
        6,
        "--phase",
        3,
        "--epsilon",
        4,
        "--seed",
        1,
        "--out",
        "run",
        "--json",
    )
    summary = json.loads(out)
    assert code == 0
    assert all(0.99 * 4 < s["spent_epsilon"] <= 4 for s in summary["silos"])
    assert load_file("run/model.safetensors")["0.weight"].shape == (8, 30)
    transcript = [
        json.loads(line) for line in (tmp_path / "run/transcript.jsonl").read_text().splitlines()
    ]
    assert [r["kind"] for r in transcript] == ["anchor", "refine", "refine"] * 2
    assert len(load_file("run/transcript.safetensors")) == 6
    assert json.loads((tmp_path / "run/summary.json").read_text())["silos"] == summary["silos"]


def test_train_on_files_with_a_budget_for_each_silo_and_private_scaling(silodp, hospitals):
    code, out, _ = silodp(
        "train",
        "--silo",
        "a.csv",
        "--silo",
        "b.csv",
        "--label",
        "outcome",
        "--epsilon",
        3,
        "--epsilon",
        "b=1.5",
        "--rounds",
        5,
        "--algorithm",
        "mb-sgd",
        "--model",
        "logistic",
        "--out",
        "run",
        "--json",
    )
    assert code == 0
    silos = {s["name"]: s for s in json.loads(out)["silos"]}
    assert silos["a"]["epsilon"] == 3
    assert silos["b"]["epsilon"] == 1.5
    assert all(0.99 * s["epsilon"] < s["spent_epsilon"] <= s["epsilon"] for s in silos.values()), (
        "scaling is part of the budget"
    )
    kinds = [
        json.loads(line)["kind"]
        for line in (hospitals / "run/transcript.jsonl").read_text().splitlines()
    ]
    assert kinds == ["ranges", "moments"] + ["minibatch"] * 5


def test_train_with_public_ranges_spends_nothing_on_scaling(silodp, hospitals):
    (hospitals / "ranges.toml").write_text("age = [0, 110]\ndose = [0, 10]\n")
    words = (
        "train",
        "--silo",
        "a.csv",
        "--silo",
        "b.csv",
        "--label",
        "outcome",
        "--rounds",
        4,
        "--phase",
        2,
        "--scale",
        "ranges.toml",
    )
    assert silodp(*words, "--out", "run")[0] == 0
    kinds = [
        json.loads(line)["kind"]
        for line in (hospitals / "run/transcript.jsonl").read_text().splitlines()
    ]
    assert kinds == ["anchor", "refine"] * 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_trains(silodp, algorithm):
    words = (
        "train",
        "--data",
        "digits",
        "--algorithm",
        algorithm,
        "--rounds",
        10,
        "--epsilon",
        8,
        "--out",
        "run",
        "--json",
    )
    assert silodp(*words, *(("--model", "logistic") if algorithm == "one-shot" else ()))[0] == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_is_planned_to_spend_its_budget(silodp, algorithm):
    code, out, err = silodp(
        "plan",
        "--algorithm",
        algorithm,
        "--records",
        500,
        "--records",
        700,
        "--rounds",
        10,
        "--epsilon",
        3,
        "--json",
    )
    assert code == 0, err
    assert all(s["spent_epsilon"] == pytest.approx(3, rel=1e-6) for s in json.loads(out)["silos"])


@pytest.mark.parametrize(
    "words",
    [
        ("--sampling", "poisson:0.2"),
        ("--sampling", "without-replacement:0.2"),
        ("--sampling", "disjoint"),
        ("--participation", "balanced:3"),
        ("--participation", "random:3"),
        ("--user-level",),
    ],
)
def test_every_sampling_and_participation_trains_within_budget(silodp, words):
    code, out, err = silodp(
        "train",
        "--data",
        "digits",
        "--algorithm",
        "mb-sgd",
        "--rounds",
        6,
        "--out",
        "run",
        "--json",
        *words,
    )
    assert code == 0, err
    assert all(s["spent_epsilon"] <= s["epsilon"] for s in json.loads(out)["silos"])


def test_a_wrong_label_column_is_named(silodp, hospitals):
    refused(
        silodp("train", "--silo", "a.csv", "--silo", "b.csv", "--label", "outcom"),
        "'outcom'",
        "header",
    )


def test_silos_with_different_columns_are_named(silodp, hospitals):
    (hospitals / "b.csv").write_text("age,weight,outcome\n1,2,0\n")
    refused(
        silodp("train", "--silo", "a.csv", "--silo", "b.csv", "--label", "outcome"),
        "lacks column 2 of a.csv and also has column 2",
    )


def test_a_cell_that_is_no_number_is_named(silodp, hospitals):
    (hospitals / "b.csv").write_text("age,dose,outcome\n1,2,0\n1,high,0\n")
    result = silodp("train", "--silo", "a.csv", "--silo", "b.csv", "--label", "outcome")
    refused(result, "column 2", "row 2", "b.csv")
    assert "high" not in result[2]


def test_an_empty_silo_is_named(silodp, hospitals):
    (hospitals / "b.csv").write_text("age,dose,outcome\n")
    refused(silodp("train", "--silo", "a.csv", "--silo", "b.csv", "--label", "outcome"), "b.csv")


def test_epsilon_zero_is_refused(silodp):
    refused(silodp("plan", "--epsilon", 0), "epsilon")
    refused(silodp("train", "--data", "wbcd", "--epsilon", 0), "epsilon")


def test_a_negative_clip_is_refused(silodp):
    refused(silodp("plan", "--clip", -1), "clip", "-1")
    refused(silodp("train", "--data", "wbcd", "--clip", -1), "clip", "-1")


def test_a_phase_longer_than_the_rounds_is_refused(silodp):
    refused(silodp("train", "--data", "wbcd", "--rounds", 5, "--phase", 6), "phase", "5")
    refused(silodp("plan", "--rounds", 5, "--phase", 6), "phase", "5")


def test_a_batch_norm_model_is_refused(silodp, tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef net(features, outputs):\n"
        "    return nn.Sequential(nn.Linear(features, 4), nn.BatchNorm1d(4), nn.Linear(4, "
        "outputs))\n"
    )
    refused(silodp("train", "--data", "wbcd", "--model", "net.py:net"), "BatchNorm1d", "GroupNorm")


def test_a_users_own_model_trains(silodp, tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef net(features, outputs):\n"
        "    return nn.Sequential(nn.Linear(features, 4), nn.LayerNorm(4), nn.Tanh(), "
        "nn.Linear(4, outputs))\n"
    )
    assert (
        silodp(
            "train",
            "--data",
            "wbcd",
            "--model",
            "net.py:net",
            "--rounds",
            4,
            "--phase",
            2,
            "--out",
            "run",
            "--json",
        )[0]
        == 0
    )


def test_an_output_folder_that_cannot_be_written_is_refused(silodp, tmp_path):
    (tmp_path / "file").write_text("")
    refused(
        silodp("train", "--data", "wbcd", "--algorithm", "mb-sgd", "--out", "file/run"), "file/run"
    )


def unasked(*_, **__):
    raise AssertionError("what takes long was begun for a run that cannot be kept")


def test_an_output_folder_that_cannot_be_written_is_refused_before_anything_takes_long(
    silodp, tmp_path, monkeypatch
):
    monkeypatch.setattr("silodp.simulation.training.advised", unasked)
    (tmp_path / "file").write_text("")
    refused(silodp("train", "--data", "wbcd", "--out", "file/run"), "file/run", "--out")
    monkeypatch.setattr("silodp.audit.report.audit", unasked)
    refused(silodp("audit", "--out", "file/run"), "file/run", "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "looking leaves nothing behind"


@pytest.mark.parametrize("how", [(), ("--peers",)])
def test_so_is_that_of_a_run_over_silos(silodp, hospitals, monkeypatch, how):
    monkeypatch.setattr("silodp.server.run.advised", unasked)
    monkeypatch.setenv("SILODP_STATE", str(hospitals / "state"))
    made = (
        "--data",
        "a.csv",
        "--label",
        "outcome",
        "--epsilon",
        3,
        "--model",
        "logistic",
        "--asker",
        "ab" * 32,
    )
    assert silodp("silo", "init", "f/silos/a", *made)[0] == 0
    (hospitals / "f/asker.key").write_text("cd" * 32)
    policies = {"a": str(hospitals / "f/silos/a/policy.toml")}
    (hospitals / "f/federation.json").write_text(
        json.dumps({"version": 1, "engine": "direct", "silos": policies, "registry": ""})
    )
    refused(
        silodp("federation", "run", "--folder", "f", "--out", "a.csv/run", *how),
        "a.csv/run",
        "--out",
    )


def test_an_unknown_data_set_is_refused_with_the_names_of_the_built_in_ones(silodp):
    refused(silodp("train", "--data", "mnist"), "mnist", "wbcd, digits")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--algorithm", "lamb"), "spider"),
        (("--model", "resnet"), "mlp"),
        (("--prox", "l7:1"), "l1"),
        (("--sampling", "half"), "poisson"),
        (("--participation", "most"), "balanced"),
        (("--epsilon", "x"), "epsilon"),
        (("--epsilon", "nobody=1"), "nobody"),
        (("--delta", "2"), "delta"),
        (("--rule", "moments"), "renyi"),
        (("--output", "best"), "last"),
        (("--slope", "-1"), "slope"),
    ],
)
def test_an_unknown_word_gets_the_words_that_would_do(silodp, words, says):
    refused(silodp("train", "--data", "wbcd", "--rounds", 4, "--phase", 2, *words), says)


def test_import_is_light():
    """`import silodp`, and a command's help, take a fraction of a second because they do not load
    torch.
    """
    code = "import silodp, silodp.cli.app, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def test_training_without_noise_is_refused(silodp):
    refused(silodp("train", "--data", "wbcd", "--epsilon", "inf"), "inf")
    refused(silodp("plan", "--epsilon", "inf"), "inf")


def test_a_small_epsilon_trains_on_poisson_batches(silodp):
    words = (
        "train",
        "--data",
        "digits",
        "--algorithm",
        "mb-sgd",
        "--rounds",
        4,
        "--epsilon",
        0.05,
        "--sampling",
        "poisson:0.1",
        "--out",
        "run",
    )
    assert silodp(*words)[0] == 0


def test_conversions_that_need_gaussian_releases_are_left_out_for_sampled_batches(silodp):
    words = ("plan", "--algorithm", "mb-sgd", "--records", 100, "--rounds", 4, "--json")
    assert json.loads(silodp(*words)[1])["converted"]["zcdp_rho"] > 0
    assert (
        json.loads(silodp(*words, "--sampling", "poisson:0.1")[1])["converted"]["zcdp_rho"] is None
    )


def test_a_default_delta_that_promises_little_is_said_once_and_beside_the_answer(silodp, tmp_path):
    for name, n in (("tiny", 25), ("large", 60)):
        (tmp_path / f"{name}.csv").write_text(
            "x,label\n" + "".join(f"{k % 7},{k % 2}\n" for k in range(n))
        )
    own = ("--silo", "tiny.csv", "--silo", "large.csv")
    train = (
        "train",
        *own,
        "--algorithm",
        "mb-sgd",
        "--model",
        "logistic",
        "--rounds",
        1,
        "--scale",
        "none",
        "--json",
    )
    tune = ("tune", *own, "--rounds", 1, "--phase", 1, "--candidates", 1, "--json")
    for words in (
        train,
        tune,
        ("stats", "profile", *own, "--json"),
        ("plan", "--records", 25, "--records", 60, "--rounds", 5, "--json"),
    ):
        code, out, err = silodp(*words)
        assert (code, err.count("\n")) == (0, 1), err
        assert "delta" in err
        assert ("25 records 0.0016" if words[0] == "plan" else "tiny 0.0016") in err
        assert "large" not in err.replace("a large default", "")
        json.loads(out)
    assert silodp(*train, "--delta", "1e-6")[::2] == (0, "")
    assert silodp(*train, "--delta", "tiny=1e-6")[::2] == (0, "")


def test_a_similar_command_is_suggested_once(silodp):
    _, _, err = silodp("trian")
    assert err.count("Did you mean") == 1
