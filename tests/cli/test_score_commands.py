"""`silodp evaluate` and `silodp stats profile` as a user meets them, and a deployed silo scored
over its own door.
"""

import json
import math
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load_file
from typer.testing import CliRunner

from silodp.cli.app import app
from silodp.cli.pages import judge_of
from silodp.cli.score import _charged, _counting
from silodp.core import quality
from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget, gdp_epsilon, gdp_mu
from silodp.core.problem.losses import logistic
from silodp.core.protocol.card import Card
from silodp.host.keys import read_key
from silodp.pages import runs
from silodp.server import evaluation
from silodp.server.estimates.placing import assumed, bins_of
from silodp.server.estimates.scoring import asked_of, gaussian_for, score
from silodp.server.federation import Everyone, Federation
from silodp.server.remote import Remote, Timeouts
from silodp.silo.data.reading import read_records
from silodp.silo.data.records import Records
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service.daemon import approved_problem
from silodp.silo.service.door import Door
from silodp.silo.service.policy import DaemonSettings, Policy
from silodp.silo.service.provision import provision
from silodp.simulation import scoring

BRIEFLY = ("--model", "logistic", "--algorithm", "mb-sgd", "--rounds", 2, "--held-out", 0.25)


def silodp(*words) -> dict:
    result = CliRunner().invoke(app, [*map(str, words), "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def write_csv(path: Path, n: int, seed: int, holes: float = 0.0) -> Path:
    random = np.random.default_rng(seed)
    rows = ["a,b,label"]
    for _ in range(n):
        a, b = random.normal(3.0, 1.0), random.normal()
        rows.append(f"{'' if random.random() < holes else a},{b},{int(a + b > 3)}")
    path.write_text("\n".join(rows) + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module", autouse=True)
def state(tmp_path_factory):
    """This user's keys and registry, for the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SILODP_STATE", str(folder := tmp_path_factory.mktemp("state")))
        yield folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    files = [
        write_csv(folder / f"{name}.csv", 800, seed) for seed, name in enumerate(("left", "right"))
    ]
    told = (
        "--silo",
        files[0],
        "--silo",
        files[1],
        "--model",
        "logistic",
        "--rounds",
        10,
        "--seed",
        3,
        "--epsilon",
        4,
        "--held-out",
        0.25,
    )
    silodp("train", *told, "--out", folder / "run")
    return folder / "run"


def test_a_run_is_scored_on_what_it_held_out_and_the_price_is_added(trained):
    before = json.loads((trained / "summary.json").read_text())["silos"]
    first, second = (silodp("evaluate", trained, "--epsilon", 2, "--seed", seed) for seed in (1, 2))
    all_, *silos = first["scores"]
    assert (all_["held_out"], [s["held_out"] for s in silos]) == (400, [200, 200])
    for name in ("accuracy", "auc"):
        assert 0.8 < all_["figures"][name]["value"] <= 1
        assert all_["figures"][name]["noise"] < 0.1
    assert first["scores"] != second["scores"]
    assert [s["spent_epsilon"] for s in first["silos"]] == pytest.approx([2.0, 2.0])
    for was, one, two in zip(before, first["in_all"], second["in_all"], strict=True):
        mu = [
            gdp_mu(Budget(e, was["delta"]))
            for e in (was["spent_epsilon"], 2.0, one["epsilon"], two["epsilon"])
        ]
        assert mu[2] ** 2 == pytest.approx(mu[0] ** 2 + mu[1] ** 2, rel=1e-4)
        assert mu[3] ** 2 == pytest.approx(mu[0] ** 2 + 2 * mu[1] ** 2, rel=1e-4)
    assert len((trained / "evaluations.jsonl").read_text().splitlines()) == 2


def test_without_a_price_an_evaluation_prints_its_precision_and_spends_nothing(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    found = silodp("evaluate", folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    widths = [row["within"]["auc"] or 1.0 for row in found["forecast"]]
    assert widths == sorted(widths, reverse=True)
    assert found["proposed_epsilon"] in [row["epsilon"] for row in found["forecast"]]
    printed = CliRunner().invoke(app, ["evaluate", str(folder)], catch_exceptions=False).stdout
    assert "Nothing is spent." in printed
    assert "epsilon 2: AUC within 0." in printed
    scores = silodp("evaluate", folder, "--epsilon", 2, "--seed", 1)["scores"][0]
    figure = scores["figures"]["auc"]
    wide = max(figure["high"] - figure["value"], figure["value"] - figure["low"])
    expected = next(row["within"]["auc"] for row in found["forecast"] if row["epsilon"] == 2)
    assert 0 < wide < 2 * expected  # this model is nearly perfect, and an AUC ends at 1


def test_price_and_precision_are_printed_before_anything_is_spent(trained, tmp_path, monkeypatch):
    folder = shutil.copytree(trained, tmp_path / "run")
    before = (folder / "summary.json").read_bytes()
    widths = {
        row["epsilon"]: row["within"]["auc"] for row in silodp("evaluate", folder)["forecast"]
    }

    def stopped(*words, **more):
        assert (folder / "summary.json").read_bytes() == before
        raise BadInput("stopped before the question")

    monkeypatch.setattr(evaluation.Evaluation, "run", stopped)
    found = CliRunner().invoke(app, ["evaluate", str(folder), "--epsilon", "2"])
    printed = " ".join(found.stdout.split())
    assert printed == (
        f"Price: epsilon 2 at each silo. Expected precision: AUC within {widths[2]:.2f}."
    )
    silent = CliRunner().invoke(app, ["evaluate", str(folder), "--epsilon", "2", "--json"])
    assert not silent.stdout


def test_an_evaluation_adds_its_price_to_the_result_file_of_an_earlier_version(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / "summary.json").rename(folder / "spent.json")
    before = runs.read(folder)
    assert before.state == "finished"
    answer = silodp("evaluate", folder, "--epsilon", 2, "--seed", 3)
    assert not (folder / "summary.json").exists()
    silos = json.loads((folder / "spent.json").read_text())["silos"]
    assert [silo["in_all"] for silo in silos] == answer["in_all"]
    after = runs.read(folder)
    assert [silo.together[0] for silo in after.silos] == [s["in_all"]["epsilon"] for s in silos]
    for was, now in zip(before.silos, after.silos, strict=True):
        assert now.together > was.together


def test_what_an_evaluation_prints_is_never_less_than_it_cost(trained, tmp_path):
    folder, short = shutil.copytree(trained, tmp_path / "run"), 0
    for epsilon in (0.5, 0.6, 0.7):
        printed = (
            CliRunner()
            .invoke(
                app, ["evaluate", str(folder), "--epsilon", f"{epsilon}"], catch_exceptions=False
            )
            .stdout
        )
        answer = json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])
        first, _, rest = " ".join(printed.split()).partition(" Expected precision: ")
        assert first == f"Price: epsilon {epsilon:g} at each silo."
        _, _, verdict = rest.partition(". ")
        assert verdict.startswith(quality.verdict(answer["scores"][0])), (
            "the plain sentence comes first"
        )
        silos = json.loads((folder / "summary.json").read_text())["silos"]
        shown = re.findall(
            r"epsilon (\S+) for this evaluation;.* together (\S+) at delta (\S+)\.\n", printed
        )
        for silo, figures in zip(silos, shown, strict=True):
            for figure, cost in zip(figures, (epsilon, *silo["in_all"].values()), strict=True):
                assert cost * (1 - 1e-8) <= float(figure) < cost * 1.01
                short += float(f"{cost:.4g}") < cost * (1 - 1e-6)
    assert short, "of which some would be shown as less by rounding to the nearest"


def test_no_two_evaluations_share_their_noise(trained, tmp_path):
    """Neither by the seed of the run, nor by one given twice: their difference would be free of
    noise.
    """
    run = shutil.copytree(
        trained, tmp_path / "run", ignore=shutil.ignore_patterns("evaluations.jsonl")
    )
    asked = [(1e6, 5), (2, 5), (2, 5), (1, 5)]
    truth, *seeded = (
        silodp("evaluate", run, "--epsilon", e, "--seed", seed)["scores"][1]["figures"]["loss"]
        for e, seed in asked
    )
    units = sorted((figure["value"] - truth["value"]) / figure["noise"] for figure in seeded)
    assert min(np.diff(units)) > 0.05
    first, second = (silodp("evaluate", run, "--epsilon", 2)["scores"] for _ in range(2))
    assert first != second


def test_evaluations_at_the_same_time_are_all_counted(trained, tmp_path, monkeypatch):
    """Four that would all have read the price before any of them wrote it."""
    run = shutil.copytree(
        trained, tmp_path / "run", ignore=shutil.ignore_patterns("evaluations.jsonl")
    )
    spent, real = json.loads((run / "summary.json").read_text())["silos"][0], evaluation.score
    before = spent.get("in_all", {}).get("epsilon", spent["spent_epsilon"])
    monkeypatch.setattr(
        evaluation, "score", lambda *args, **more: (time.sleep(0.1), real(*args, **more))[1]
    )
    with ThreadPoolExecutor(4) as pool:
        told = {"epsilon": "2", "seed": 5}
        answers = list(pool.map(lambda _: scoring.evaluate_run(run, **told), range(4)))
    mu = [gdp_mu(Budget(e, spent["delta"])) for e in (before, 2.0)]
    after = json.loads((run / "summary.json").read_text())["silos"][0]["in_all"]["epsilon"]
    assert gdp_mu(Budget(after, spent["delta"])) ** 2 == pytest.approx(
        mu[0] ** 2 + 4 * mu[1] ** 2, rel=1e-4
    )
    assert len((run / "evaluations.jsonl").read_text().splitlines()) == 4
    assert len({json.dumps(answer["scores"]) for answer in answers}) == 4, (
        "one seed, one number of evaluations before: the same noise"
    )


@pytest.mark.parametrize(
    "edit",
    [lambda rows: rows[::-1], lambda rows: rows + rows[:40], lambda rows: [*rows[:-1], rows[0]]],
)
def test_other_records_than_those_trained_on_are_not_scored(tmp_path, edit):
    """Rows in another order, more of them, or one that has changed: held out by position, they may
    have been trained on.
    """
    path = write_csv(tmp_path / "a.csv", 200, 0)
    silodp("train", "--silo", path, *BRIEFLY, "--out", tmp_path / "run")
    silodp("evaluate", tmp_path / "run", "--epsilon", 1)
    head, *rows = path.read_text().splitlines()
    spent = (tmp_path / "run/summary.json").read_text()
    path.write_text("\n".join([head, *edit(rows)]) + "\n")
    with pytest.raises(BadInput, match="not those with which"):
        silodp("evaluate", tmp_path / "run", "--epsilon", 1)
    assert (tmp_path / "run/summary.json").read_text() == spent
    path.write_text("\n".join([head, *rows]) + "\n")
    silodp("evaluate", tmp_path / "run", "--epsilon", 1)


def test_a_folder_tells_nothing_of_records_without_a_key_that_is_not_in_it(tmp_path, state):
    """Two runs on the same records have different marks, and without the key none can be checked,
    neither by us nor by a reader.
    """
    path = write_csv(tmp_path / "a.csv", 200, 0)
    for name in ("one", "two"):
        silodp("train", "--silo", path, *BRIEFLY, "--out", tmp_path / name)
    marks = [json.loads((tmp_path / name / "records.json").read_text()) for name in ("one", "two")]
    assert len({mark["records"] for mark in marks}) == 2
    key = state / "records.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert not any(
        key.read_text().encode() in path.read_bytes() for path in (tmp_path / "one").iterdir()
    )
    key.rename(state / "away")
    with pytest.raises(BadInput, match="it cannot be checked"):
        silodp("evaluate", tmp_path / "one", "--epsilon", 1)
    (state / "away").rename(key)


def test_a_model_of_ones_own_is_evaluated_from_wherever(tmp_path, monkeypatch):
    (tmp_path / "m.py").write_text(
        "from torch import nn\ndef build(features, outputs): return nn.Linear(features, outputs)\n"
    )
    monkeypatch.chdir(tmp_path)
    told = (
        "--silo",
        write_csv(tmp_path / "a.csv", 200, 0),
        "--model",
        "m.py:build",
        "--algorithm",
        "mb-sgd",
        "--rounds",
        3,
    )
    silodp("train", *told, "--held-out", 0.25, "--out", tmp_path / "run")
    monkeypatch.chdir("/")
    assert {"loss", "accuracy", "auc"} < set(
        silodp("evaluate", tmp_path / "run", "--epsilon", 1)["scores"][0]["figures"]
    )


@pytest.mark.parametrize(
    ("label", "model", "figures"),
    [
        (
            'task = "survival"\ntime = "t"\nevent = "label"\nedges = [1, 2, 3]',
            "logistic",
            {"loss", "auc", "calibration in the large"},
        ),
        (
            'task = "count"\ncolumn = "t"\nmost = 3',
            "linear",
            {"squared error", "absolute error", "explained deviance"},
        ),
        (
            'task = "ordinal"\ncolumn = "t"\nclasses = ["0", "1", "2", "3", "4"]',
            "additive:4",
            {"loss", "accuracy", "balanced accuracy", "larger class"},
        ),
    ],
)
def test_figures_are_named_by_the_schemas_task(tmp_path, label, model, figures):
    write_csv(tmp_path / "a.csv", 100, 0)
    columns = "".join(f'[columns.{name}]\ntype = "number"\nrange = [-9, 9]\n' for name in "ab")
    ignore = "" if "event" in label else 'ignore = ["label"]\n'
    (tmp_path / "s.toml").write_text(f"{ignore}{columns}[label]\n{label}\n")
    lines = (tmp_path / "a.csv").read_text().splitlines()
    (tmp_path / "a.csv").write_text(
        "\n".join(f"{line},{k % 5 if k else 't'}" for k, line in enumerate(lines)) + "\n"
    )
    told = (
        "--schema",
        tmp_path / "s.toml",
        "--silo",
        tmp_path / "a.csv",
        "--model",
        model,
        "--algorithm",
        "mb-sgd",
        "--rounds",
        2,
    )
    silodp("train", *told, "--held-out", 0.3, "--out", tmp_path / "run")
    assert (
        set(silodp("evaluate", tmp_path / "run", "--epsilon", 1)["scores"][0]["figures"]) == figures
    )


def test_a_run_through_a_shuffler_is_scored_by_a_total_that_costs_what_was_ordered(tmp_path):
    files = [
        word for k in range(2) for word in ("--silo", write_csv(tmp_path / f"{k}.csv", 400, k))
    ]
    told = (
        "--algorithm",
        "mb-sgd",
        "--model",
        "logistic",
        "--rounds",
        2,
        "--scale",
        "none",
        "--trust",
        "shuffle",
        "--held-out",
        0.5,
    )
    silodp("train", *files, *told, "--out", tmp_path / "run")
    answer = silodp("evaluate", tmp_path / "run", "--epsilon", 2, "--seed", 1)
    assert answer["trust"] == "shuffle"
    assert [(row["name"], row["held_out"]) for row in answer["scores"]] == [("all", 400)]
    for silo, both in zip(answer["silos"], answer["in_all"], strict=True):
        assert 1.8 < silo["spent_epsilon"] <= silo["epsilon"] == 2
        assert both["epsilon"] > silo["spent_epsilon"]
    least = silodp("evaluate", tmp_path / "run", "--epsilon", 2, "--seed", 1)["scores"][0][
        "figures"
    ]["accuracy"]
    assert least["value"] != answer["scores"][0]["figures"]["accuracy"]["value"], (
        "another evaluation has noise of its own"
    )


def test_several_totals_cost_what_gaussian_answers_do(tmp_path):
    """Their noise is exactly Gaussian, also of small silos at a large epsilon."""
    files = [word for k in range(2) for word in ("--silo", write_csv(tmp_path / f"{k}.csv", 60, k))]
    told = (
        "--algorithm",
        "mb-sgd",
        "--model",
        "logistic",
        "--rounds",
        1,
        "--scale",
        "none",
        "--trust",
        "shuffle",
        "--held-out",
        0.5,
    )
    silodp("train", *files, *told, "--out", tmp_path / "run")
    for _ in range(3):
        answer = silodp("evaluate", tmp_path / "run", "--epsilon", 20)
    own = answer["evaluations"][0]
    mu = gdp_mu(Budget(20.0, own["delta"]))
    assert own["count"] == 3
    assert own["epsilon"] == pytest.approx(gdp_epsilon(mu * 3**0.5, own["delta"]), rel=1e-6)


def test_under_another_rule_epsilons_and_deltas_are_added(tmp_path):
    files = write_csv(tmp_path / "a.csv", 300, 0)
    silodp(
        "train",
        "--silo",
        files,
        "--model",
        "logistic",
        "--rounds",
        3,
        "--phase",
        3,
        "--rule",
        "renyi",
        "--held-out",
        0.2,
        "--out",
        tmp_path / "run",
    )
    spent = json.loads((tmp_path / "run/summary.json").read_text())["silos"][0]
    (both,) = silodp("evaluate", tmp_path / "run", "--epsilon", 1)["in_all"]
    assert both["epsilon"] == pytest.approx(spent["spent_epsilon"] + 1)
    assert both["delta"] == pytest.approx(2 * spent["delta"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--epsilon", "inf"), "no privacy at all"),
        (("--epsilon", "0"), "greater than 0"),
        (("--epsilon", "1e9"), "distinguish from infinite"),
        (("--seed", "-1"), "0 or more"),
        (("--bins", "1000"), "it must be from 2 to 512"),
        (("--threshold", "1"), "a risk between 0 and 1"),
        (("--cap", "nan"), "cap"),
    ],
)
def test_what_cannot_be_evaluated_is_said_in_a_sentence(trained, words, sentence):
    with pytest.raises(BadInput, match=sentence):
        silodp("evaluate", trained, *words)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("summary.json", None, "that is finished"),
        ("summary.json", "{}", "restore it"),
        ("summary.json", "x", "restore it"),
        (
            "summary.json",
            '{"rule": "gdp", "silos": [{"name": "left", "spent_epsilon": null, "delta": 1}]}',
            "restore it",
        ),
        ("model.safetensors", "x", "restore it"),
        ("run.json", "[]", "no run that"),
        ("records.json", "[]", "it cannot be checked"),
    ],
)
def test_a_folder_that_is_spoilt_is_said_in_a_sentence(trained, tmp_path, name, text, sentence):
    run = shutil.copytree(trained, tmp_path / "run")
    (run / name).unlink() if text is None else (run / name).write_text(text)
    with pytest.raises(BadInput, match=sentence):
        silodp("evaluate", run, "--epsilon", 1)


@pytest.mark.parametrize("spoilt", ["", "summary.json.part", "evaluations.jsonl"])
def test_a_folder_that_cannot_be_written_is_said_before_anything_is_asked(
    trained, folder, monkeypatch, spoilt
):
    place = shutil.copytree(trained, folder / "run")
    before = (place / "summary.json").read_bytes()
    monkeypatch.setattr(evaluation, "score", lambda *_, **__: pytest.fail("a question was asked"))
    if spoilt:
        (place / spoilt).unlink(missing_ok=True)
        (place / spoilt).mkdir()
    else:
        place.chmod(0o555)
    try:
        os.seteuid(
            65534 if os.geteuid() == 0 and not spoilt else os.geteuid()
        )  # nothing is read-only to root
        with pytest.raises(BadInput, match="cannot be written"):
            silodp("evaluate", place, "--epsilon", 1)
    finally:
        os.seteuid(os.getuid())
    assert (place / "summary.json").read_bytes() == before


def test_a_spend_that_grows_beyond_telling_is_refused_before_it_is_written(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    spent = json.loads((run / "summary.json").read_text())
    for s in spent["silos"]:
        s["in_all"] = {"epsilon": 4.99e7, "delta": s["delta"]}
    (run / "summary.json").write_text(json.dumps(spent))
    with pytest.raises(BadInput, match="smaller --epsilon"):
        silodp("evaluate", run, "--epsilon", "1e7")
    assert json.loads((run / "summary.json").read_text()) == spent


def test_a_column_that_came_later_is_said_in_a_sentence(tmp_path):
    path = write_csv(tmp_path / "a.csv", 200, 0)
    silodp("train", "--silo", path, *BRIEFLY, "--out", tmp_path / "run")
    path.write_text(
        "".join(
            f"{'c' if k == 0 else k},{line}\n"
            for k, line in enumerate(path.read_text().splitlines())
        )
    )
    with pytest.raises(BadInput, match="not those with which"):
        silodp("evaluate", tmp_path / "run", "--epsilon", 1)


def test_a_seed_below_zero_is_refused_everywhere(tmp_path):
    path = write_csv(tmp_path / "a.csv", 40, 0)
    for words in (
        ("stats", "profile", "--silo", path),
        ("tune", "--silo", path, "--out", tmp_path / "t"),
        ("tune", "--data", "wbcd"),
    ):
        with pytest.raises(BadInput, match="0 or more"):
            silodp(*words, "--seed", -1)


@pytest.mark.parametrize(
    "code",
    [
        "def f(a, b:\n",
        "raise RuntimeError('no')\n",
        "def f(a, b): return a / 0\n",
        "import not_there\n",
        "from torch import nn\ndef f(a, b): return nn.Linear(a + 1, b)\n",
    ],
)
def test_a_model_file_that_cannot_be_run_is_said_in_a_sentence(tmp_path, code):
    (tmp_path / "m.py").write_text(code)
    path = write_csv(tmp_path / "a.csv", 40, 0)
    with pytest.raises(BadInput, match="cannot be run") as said:
        silodp("train", "--silo", path, "--model", f"{tmp_path}/m.py:f", "--out", tmp_path / "run")
    assert "\n" not in str(said.value)


def test_public_ranges_that_are_no_table_are_said_in_a_sentence(tmp_path):
    (tmp_path / "r.json").write_text('["a", "b"]')
    path = write_csv(tmp_path / "a.csv", 40, 0)
    with pytest.raises(BadInput, match="not a table"):
        silodp(
            "train",
            "--silo",
            path,
            "--model",
            "logistic",
            "--scale",
            tmp_path / "r.json",
            "--out",
            tmp_path / "run",
        )


def test_a_run_that_held_nothing_out_cannot_be_evaluated(tmp_path):
    silodp("train", "--data", "wbcd", "--rounds", 1, "--phase", 1, "--out", tmp_path / "run")
    with pytest.raises(BadInput, match="held nothing out"):
        silodp("evaluate", tmp_path / "run", "--epsilon", 1)
    with pytest.raises(BadInput, match="no run of `silodp train`"):
        silodp("evaluate", tmp_path, "--epsilon", 1)


def test_training_does_not_see_what_it_holds_out(tmp_path):
    """Two files that differ in held-out rows alone train to the same bytes, with all randomness
    fixed.
    """
    from silodp.silo.data.heldout import held_out

    models = []
    for name, change in (("a", False), ("b", True)):
        path = write_csv(tmp_path / f"{name}.csv", 200, 0)
        lines = path.read_text().splitlines()
        if change:
            lines[1:] = [
                "9,9,0" if held else line
                for held, line in zip(held_out(200, 0.25), lines[1:], strict=True)
            ]
            path.write_text("\n".join(lines) + "\n")
        silodp(
            "train",
            "--silo",
            path,
            "--model",
            "logistic",
            "--rounds",
            3,
            "--phase",
            3,
            "--seed",
            1,
            "--held-out",
            0.25,
            "--out",
            tmp_path / name / "run",
        )
        models.append(load_file(tmp_path / name / "run/model.safetensors"))
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


def test_a_profile_tells_missing_rates_of_files_that_training_refuses(tmp_path):
    path = write_csv(tmp_path / "a.csv", 2000, 0, holes=0.3)
    found = silodp("stats", "profile", "--silo", path, "--epsilon", 3, "--seed", 1)
    a, b = found["features"]
    assert a["missing"] == pytest.approx(0.3, abs=0.04)
    assert abs(b["missing"]) < 5 * b["missing_error"]
    assert a["mean"] == pytest.approx(3.0, abs=0.2)
    assert sum(row["count"] for row in found["classes"]) == pytest.approx(2000, abs=100)
    assert found["silos"][0]["spent_epsilon"] == pytest.approx(3.0)
    with pytest.raises(BadInput, match="the value is missing"):
        silodp("train", "--silo", path, "--model", "logistic")
    path.write_text(path.read_text() + "oops,1,0\n")
    with pytest.raises(BadInput, match=r"column 1, row 2001 .* the value is not a finite number"):
        silodp("stats", "profile", "--silo", path)


# --- deployed ------------------------------------------------------------------------------------

ASKER = Ed25519PrivateKey.from_private_bytes(bytes([9]) * 32)


class OwnDoor:
    """A carrier to one silo's door in this process."""

    def __init__(self, name, door):
        self._name, self._door = name, door

    def exchange(self, frames, timeout):
        return {name: self._door.handle(frame) for name, frame in frames.items()}

    def names(self):
        return [self._name]


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clinic")
    data = write_csv(folder / "a.csv", 400, 5)
    asker = ASKER.public_key().public_bytes_raw().hex()
    about = {
        "label": "label",
        "name": "clinic",
        "epsilon": 8.0,
        "model": "logistic",
        "askers": [asker],
        "held_out": 0.25,
    }
    made = provision(folder / "silo", data=data, registry=folder / "registry", **about)
    policy, place = Policy.load(made.policy), DaemonSettings.load(made.policy)
    held = read_records(place, None)
    problem, ledger = (
        approved_problem(place, held.x.shape[1], None),
        DurableLedger.open(Path(place.ledger)),
    )
    about = {
        "signing_key": read_key(place.key),
        "registry": folder / "registry",
        "held_out": place.held_out,
    }
    door = Door(policy, problem, Records.of([(held.x, held.y)]), ledger, **about)
    return Card.of(json.loads((folder / "silo/silo.json").read_text())), policy, ledger, door


def test_a_deployed_silo_is_scored_on_what_it_holds_out_once_for_one_price(clinic):
    card, policy, ledger, door = clinic
    assert card.held_out == 100
    assert "Score" in policy.statistics
    w, budget, found = torch.tensor([[3.0, 3.0, -9.0]]), Budget(4.0, card.delta), []
    for _ in range(2):
        remote = Remote(
            [card], OwnDoor("clinic", door), run="score-1", key=ASKER, timeouts=Timeouts(5, 5, 5)
        )
        asked = {
            "names": ["clinic"],
            "held_out": [card.held_out],
            "asked": asked_of(2, None, logistic, bins=bins_of(assumed(0.5), 5, 0.5)),
        }
        found.append(
            score(Federation(remote, Everyone(1)), w, gaussian_for("score", [budget]), **asked)[
                0
            ].figures
        )
    assert found[0] == found[1]  # the same question is answered from the store
    assert (
        abs(found[0]["accuracy"].value - 1) < 5 * found[0]["accuracy"].noise
    )  # the label is this very model's
    charged = [entry.amount for entry in ledger.entries() if entry.act == "charge"]
    assert charged == [pytest.approx(gdp_mu(budget) ** 2)]
    assert ledger.spent() == pytest.approx(4.0, rel=1e-3)
    pytest.importorskip("starlette", reason="starlette is not installed (silodp[ui])")
    from silodp.silo.service.page import GatePage

    path = Path(ledger.path).parent / "policy.toml"
    page = " ".join(
        re.sub(r"<[^>]*>", " ", GatePage(path, None, [], judge_of(path))._now()).split()
    )
    wanted = found[0]["auc"]
    assert "Results of evaluations" in page
    assert f" {wanted.value:.2f} ({quality.interval('auc', vars(wanted))[0]:.2f}-" in page, (
        "the officer sees what the server sees"
    )
    assert judge_of(path.parent / "nothing/policy.toml") is None
    assert judge_of(path)(np.zeros(4), 1.0) is None  # of another statistic


def test_cards_and_policies_older_than_held_out_records_hold_none(clinic):
    card, *_ = clinic
    table = {name: value for name, value in vars(card).items() if name != "held_out"}
    assert Card.of(table).held_out == 0
    for bad in (-1, 400, "many", 0.5, math.inf):
        with pytest.raises(BadInput, match="held_out"):
            Card.of(table | {"held_out": bad})


@pytest.mark.parametrize("share", [1.0, -0.1, math.nan, "half"])
def test_a_senseless_share_is_refused(tmp_path, share):
    with pytest.raises(BadInput, match="held_out"):
        provision(
            tmp_path / "silo",
            data=write_csv(tmp_path / "a.csv", 20, 0),
            label="label",
            name="a",
            epsilon=1.0,
            held_out=share,
        )


def test_a_federations_totals_count_on_no_share_of_noise_of_those_who_may_collude():
    cards = [SimpleNamespace(colluding=c) for c in (0, 2, 1)]
    cards += [SimpleNamespace(colluding=0)] * 5
    assert _counting(cards, "masks", None) == {"trust": "masks", "counted": 6}
    assert _counting(cards, "masks", 5) == {"trust": "masks", "counted": 3}


def test_each_attempt_at_a_total_is_a_price_of_its_own():
    """A round that is asked three times costs each silo three answers."""
    card = SimpleNamespace(name="clinic", rule="gdp")
    budget = Budget(1.0, 1e-6)
    for times, questions in ((3, 1), (5, 2), (1, 2)):
        channels = [SimpleNamespace(charges={"clinic": times - 1})]
        channels.append(SimpleNamespace(charges={"clinic": 1}))
        (found,) = _charged([card], [budget], channels, [1 / questions] * questions)
        wanted = gdp_epsilon(gdp_mu(budget) * math.sqrt(times / questions), budget.delta)
        assert found["epsilon"] == pytest.approx(wanted, rel=1e-9)
    # Of questions that differ, the dearest may have been asked again.
    for times, part in ((1, 0.5), (2, 0.75), (3, 1.0), (5, 2.0)):
        channels = [SimpleNamespace(charges={"clinic": times})]
        (found,) = _charged([card], [budget], channels, (0.25, 0.5, 0.25))
        wanted = gdp_epsilon(gdp_mu(budget) * math.sqrt(part), budget.delta)
        assert found["epsilon"] == pytest.approx(wanted, rel=1e-9)
    nothing = [SimpleNamespace(charges={"clinic": 0})]
    assert _charged([card], [budget], nothing)[0]["epsilon"] == 0
