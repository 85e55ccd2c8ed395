"""`silodp predict` and `silodp export model`: what a trained model says of new rows, and the same
from files that need no silodp.
"""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch

from silodp.core.problem.reading import default_threshold
from silodp.core.problem.schema import Schema
from silodp.core.problem.task import Task
from silodp.host.model import open_model
from silodp.host.schema import load_schema
from silodp.silo.data.tables import read_rows, read_table

COLUMNS = """
[columns.age]
type = "number"
range = [0, 110]
missing = 50
indicator = true
[columns.sodium]
type = "number"
range = [120, 160]
[columns.sex]
type = "category"
categories = ["female", "male", "other"]
aliases = {W = "female", m = "male"}
missing = "own"
[columns.smoker]
type = "boolean"
missing = false
"""
LABELS = {
    "binary": '[label]\ncolumn = "y"\ntask = "binary"\nclasses = ["no", "yes"]\nweights = [0.25, 1]\n',  # noqa: E501
    "multiclass": (
        '[label]\ncolumn = "y"\ntask = "multiclass"\nclasses = ["a", "b", "c"]\nweights = '
        "[0.5, 1, 1]\n"
    ),
    "regression": '[label]\ncolumn = "y"\ntask = "regression"\nrange = [0, 30]\n',
    "count": '[label]\ncolumn = "y"\ntask = "count"\nmost = 40\n',
    "ordinal": '[label]\ncolumn = "y"\ntask = "ordinal"\nclasses = ["a", "b", "c"]\n',
    "survival": '[label]\ntask = "survival"\ntime = "y"\nevent = "event"\nedges = [6, 12, 24]\n',
}
VALUES = {
    "binary": ("no", "yes"),
    "count": (0, 3, 12),
    "ordinal": ("a", "b", "c"),
    "multiclass": ("a", "b", "c"),
    "regression": (3, 9, 28.5),
    "survival": (2, 9, 20, 30),
}
ROUNDS = ("--algorithm", "mb-sgd", "--rounds", 3, "--step", 1, "--seed", 1, "--epsilon", 20)


def frame(task, n=60, seed=0):
    rng = np.random.default_rng(seed)
    made = pd.DataFrame(
        {
            "age": rng.integers(0, 140, n).astype(object),
            "sodium": rng.uniform(115, 165, n).round(2),
            "sex": rng.choice(["female", "male", "unknown", "n/a", "W"], n),
            "smoker": rng.choice(["yes", "No", "1", ""], n),
            "y": rng.choice(np.array(VALUES[task], object), n),
        }
    )
    made.loc[rng.choice(n, 5, replace=False), "age"] = "NA"
    return made.assign(event=rng.choice(["0", "1"], n)) if task == "survival" else made


@pytest.fixture
def trained(silodp, tmp_path):
    """Trains briefly on two made-up files; gives the run's folder and a file without a label."""

    def make(task="binary", model="mlp:4", out="run"):
        (tmp_path / "schema.toml").write_text(COLUMNS + LABELS[task])
        for k in range(2):
            frame(task, seed=k).to_csv(tmp_path / f"s{k}.csv", index=False)
        frame(task, 30, 9).drop(columns=["y", "event"], errors="ignore").assign(
            id=range(30)
        ).to_csv(tmp_path / "new.csv", index=False)
        code, _, err = silodp(
            "train",
            "--silo",
            "s0.csv",
            "--silo",
            "s1.csv",
            "--schema",
            "schema.toml",
            "--model",
            model,
            *ROUNDS,
            "--out",
            out,
            "--json",
        )
        assert code == 0, err
        return tmp_path / out, tmp_path / "new.csv"

    return make


@pytest.mark.parametrize("task", LABELS)
def test_a_row_is_read_as_it_was_in_training(trained, task, tmp_path):
    run, _ = trained(task)
    model, schema = open_model(run), load_schema(tmp_path / "schema.toml")
    rows, _ = read_rows(tmp_path / "s0.csv", schema)
    assert torch.equal(
        model.reading.features(torch.from_numpy(rows)),
        torch.from_numpy(read_table(tmp_path / "s0.csv", schema).x),
    )


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("binary", ["risk_no", "risk_yes", "predicted"]),
        ("multiclass", ["risk_a", "risk_b", "risk_c", "predicted"]),
        ("regression", ["value"]),
        ("count", ["value"]),
        ("ordinal", ["risk_a", "risk_b", "risk_c", "predicted"]),
        ("survival", ["risk_by_6", "risk_by_12", "risk_by_24"]),
    ],
)
def test_predictions_come_in_the_rows_order_with_what_the_task_says(silodp, trained, task, names):
    run, new = trained(task)
    code, out, err = silodp("predict", run, new, "--keep", "id", "--out", "risks.csv")
    assert (code, "Wrote 30 predictions" in out, "outside its public range" in err) == (
        0,
        True,
        True,
    )
    table = pd.read_csv("risks.csv")
    assert list(table.columns) == ["id", *names]
    assert list(table["id"]) == list(range(30))
    if "risk" in names[0]:
        risks = table[[name for name in names if name.startswith("risk")]].to_numpy()
        assert ((risks >= 0) & (risks <= 1)).all()
        assert (
            np.allclose(risks.sum(1), 1, atol=1e-6)
            if task != "survival"
            else (np.diff(risks) >= 0).all()
        )


def test_predicting_whole_files_and_single_rows_is_the_same(silodp, trained, tmp_path):
    run, new = trained()
    whole = json.loads(silodp("predict", run, new, "--json")[1])["rows"]
    pd.read_csv(new, dtype=str, keep_default_na=False).iloc[[7]].to_csv(
        tmp_path / "one.csv", index=False
    )
    one = json.loads(silodp("predict", run, "one.csv", "--json")[1])["rows"]
    assert one[0]["predicted"] == whole[7]["predicted"]
    assert one[0]["risk_yes"] == pytest.approx(whole[7]["risk_yes"], abs=1e-6)


def test_public_weights_are_taken_out_of_the_risks_and_decide_the_threshold():
    weighted, plain = Task("binary", 2, (0.25, 1.0)), Task("binary", 2)
    z = torch.tensor([[1.0], [-2.0]])
    learnt = plain.read(z)[:, 1]  # weighted odds: four times those of the second class
    risks = weighted.read(z)[:, 1]
    assert torch.allclose(learnt / (1 - learnt), 4 * risks / (1 - risks))
    assert torch.equal(weighted.read(torch.cat([torch.zeros_like(z), z], 1)), weighted.read(z))
    schema = Schema.of(
        {
            "columns": {"a": {"type": "boolean"}},
            "label": {"column": "y", "task": "binary", "classes": ["n", "y"], "weights": [0.25, 1]},
        }
    )
    threshold = default_threshold(schema)
    assert threshold == 0.2
    assert torch.equal(
        risks >= threshold, z[:, 0] >= 0
    )  # what the model itself holds more likely under the weights


def test_a_threshold_moves_the_decision_and_nothing_else(silodp, trained):
    run, new = trained()
    low, high = (
        json.loads(silodp("predict", run, new, "--threshold", t, "--json")[1])["rows"]
        for t in (0, 1)
    )
    assert [row["risk_yes"] for row in low] == [row["risk_yes"] for row in high]
    assert ({row["predicted"] for row in low}, {row["predicted"] for row in high}) == (
        {"yes"},
        {"no"},
    )


@pytest.mark.parametrize("scale", ["private", "none", "ranges"])
def test_a_model_of_plain_columns_carries_its_scaling(silodp, tmp_path, scale):
    rng = np.random.default_rng(3)
    for k in range(2):
        pd.DataFrame(
            {
                "a": rng.normal(50, 9, 40),
                "b": rng.normal(0, 1, 40),
                "sick": rng.choice(["no", "yes"], 40),
            }
        ).to_csv(f"p{k}.csv", index=False)
    (tmp_path / "ranges.toml").write_text("a = [0, 100]\nb = [-3, 3]\n")
    words = (
        "--silo",
        "p0.csv",
        "--silo",
        "p1.csv",
        "--label",
        "sick",
        "--classes",
        "no,yes",
        "--model",
        "logistic",
        *ROUNDS,
    )
    assert (
        silodp(
            "train",
            *words,
            "--scale",
            "ranges.toml" if scale == "ranges" else scale,
            "--out",
            "run",
            "--json",
        )[0]
        == 0
    )
    pd.DataFrame({"b": [0.5, 99.0], "a": [61.0, 40.0]}).to_csv("new.csv", index=False)
    rows = json.loads(silodp("predict", "run", "new.csv", "--json")[1])["rows"]
    model = open_model(tmp_path / "run")
    x = np.array([[61.0, 0.5], [40.0, 99.0]])
    if scale == "ranges":
        x = (2 * (x - [0, -3]) / [100, 6] - 1).clip(-1, 1)
    x = (x - model.reading.mean.numpy()) / model.reading.scale.numpy()
    layer = model.reading.model[0]
    z = x @ layer.weight.numpy()[0] + layer.bias.numpy()[0]
    assert [row["risk_yes"] for row in rows] == pytest.approx(1 / (1 + np.exp(-z)), abs=1e-6)
    assert bool((model.reading.mean != 0).any()) == (scale == "private")


def test_exports_give_the_same_risks_and_need_no_silodp(silodp, trained, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    run, new = trained()
    said = pd.DataFrame(json.loads(silodp("predict", run, new, "--json")[1])["rows"])
    for to in ("torch", "onnx", "sklearn"):
        assert silodp("export", "model", run, "--to", to, "--out", f"out/{to}")[0] == 0
    rows, _ = read_rows(new, open_model(run).schema)
    found = runtime.InferenceSession("out/onnx.onnx").run(None, {"columns": rows})[0]
    assert abs(found - said[["risk_no", "risk_yes"]]).to_numpy().max() < 1e-5
    times, later = trained("survival", "logistic", "times")
    assert silodp("export", "model", times, "--to", "onnx", "--out", "out/times")[0] == 0
    found = runtime.InferenceSession("out/times.onnx").run(
        None, {"columns": read_rows(later, open_model(times).schema)[0]}
    )[0]
    assert (
        abs(
            found
            - pd.DataFrame(
                json.loads(silodp("predict", times, later, "--json")[1])["rows"]
            ).to_numpy()
        ).max()
        < 1e-5
    )
    np.save("rows.npy", rows)
    alone = """
import sys; sys.modules["silodp"] = None
import numpy as np, pandas as pd, torch
sys.path.insert(0, "out")
from sklearn_ import Model
module = torch.export.load("out/torch.pt2").module()
np.savez("alone.npz", torch=module(torch.from_numpy(np.load("rows.npy"))).numpy(), one=module(torch.from_numpy(np.load("rows.npy")[:1])).numpy(),
         sklearn=Model("out/sklearn.npz").predict_proba(pd.read_csv("new.csv")), said=Model("out/sklearn.npz").predict(pd.read_csv("new.csv")))
"""  # noqa: E501
    (tmp_path / "out/sklearn.py").rename(tmp_path / "out/sklearn_.py")  # not the package's own name
    subprocess.run([sys.executable, "-c", alone], check=True)
    alone = np.load("alone.npz")
    for name in ("torch", "sklearn"):
        assert abs(alone[name] - said[["risk_no", "risk_yes"]]).to_numpy().max() < 1e-5
    assert alone["one"].shape == (1, 2)
    assert list(alone["said"]) == list(said["predicted"])
    about = json.loads((tmp_path / "out/torch.json").read_text())
    assert [column["name"] for column in about["columns"]] == ["age", "sodium", "sex", "smoker"]
    assert about["threshold"] == 0.2


@pytest.mark.parametrize(
    ("task", "model"),
    [(task, None) for task in ("multiclass", "regression", "survival", "count", "ordinal")]
    + [(task, "additive:5") for task in ("binary", "ordinal")],
)
def test_the_scikit_learn_form_knows_every_task(silodp, trained, task, model, tmp_path):
    from silodp.server.export.standalone import Model

    run, new = trained(task, model) if model else trained(task)
    said = pd.DataFrame(json.loads(silodp("predict", run, new, "--json")[1])["rows"])
    assert silodp("export", "model", run, "--to", "sklearn", "--out", "alone")[0] == 0
    model = Model(tmp_path / "alone.npz")
    figures = said.drop(columns="predicted", errors="ignore").to_numpy()
    found = (
        model.predict(pd.read_csv(new))[:, None]
        if task in ("regression", "count")
        else model.predict_proba(pd.read_csv(new))
    )
    assert abs(found - figures).max() < 1e-4 * (30 if task == "regression" else 1)
    if task in ("multiclass", "ordinal", "binary"):
        assert list(model.predict(pd.read_csv(new))) == list(said["predicted"])


def test_a_model_of_ones_own_file_wants_that_very_file(silodp, trained, tmp_path):
    source = (
        "from torch import nn\ndef build(features, outputs):\n    return "
        "nn.Sequential(nn.Linear(features, 3), nn.Tanh(), nn.Linear(3, outputs))\n"
    )
    (tmp_path / "own.py").write_text(source)
    run, new = trained(model="own.py:build")
    code, _, err = silodp("predict", run, new)
    assert (code, "give your own copy of that file: --model own.py:build" in err) == (2, True)
    assert silodp("predict", run, new, "--model", "own.py:build")[0] == 0
    code, _, err = silodp("export", "model", run, "--to", "sklearn", "--model", "own.py:build")
    assert (code, "use --to torch or --to onnx" in err) == (2, True)
    (tmp_path / "own.py").write_text(source + "# changed\n")
    code, _, err = silodp("predict", run, new, "--model", "own.py:build")
    assert (code, "SHA-256 differs" in err) == (2, True)


def test_what_cannot_be_predicted_is_said_in_a_sentence(silodp, trained, tmp_path):
    run, new = trained("multiclass")
    good = pd.read_csv(new, dtype=str, keep_default_na=False)
    good.drop(columns="sodium").to_csv("lacks.csv", index=False)
    good.assign(sodium=["135"] * 29 + ["?"]).to_csv("bad.csv", index=False)
    good.iloc[:0].to_csv("empty.csv", index=False)
    (tmp_path / "old.safetensors").write_bytes(b"nothing")
    cases = [
        ((run, "lacks.csv"), "lacks 'sodium'"),
        ((run, "bad.csv"), "column 'sodium', row 30"),
        ((run, "empty.csv"), "no rows"),
        ((run, new, "--threshold", 0.5), "two classes alone"),
        ((run, new, "--keep", "name"), "no column 'name'"),
        ((run, new, "--out", new), "does not overwrite files"),
        ((tmp_path, new), "no model.safetensors"),
        (("old.safetensors", new), "no model.safetensors"),
    ]
    for words, sentence in cases:
        code, out, err = silodp("predict", *words)
        assert (code, out, sentence in err, err.count("\n")) == (2, "", True, 1), err
    assert "choose one of onnx, torch, sklearn" in silodp("export", "model", run, "--to", "pmml")[2]


def test_images_without_classes_are_predicted_by_name(silodp, tmp_path):
    from PIL import Image

    (tmp_path / "schema.toml").write_text(
        "[images]\nheight = 8\nwidth = 8\nchannels = 1\nresize = false\n[label]\ntask = "
        '"binary"\nclasses = ["dark", "light"]\n'
    )
    for silo in ("a", "b"):
        for k, name in enumerate(("dark", "light")):
            (tmp_path / silo / name).mkdir(parents=True)
            for j in range(5):
                Image.new("L", (8, 8), 40 + 150 * k + j).save(
                    tmp_path / silo / name / f"{name}{j}.png"
                )
    words = ("--silo", "a", "--silo", "b", "--schema", "schema.toml", "--model", "cnn", *ROUNDS)
    assert silodp("train", *words, "--out", "run", "--json")[0] == 0
    new = tmp_path / "a/light"
    rows = json.loads(silodp("predict", "run", new, "--json")[1])["rows"]
    assert [row["file"] for row in rows] == [f"light{j}.png" for j in range(5)]
    assert "no folder with PNG" in silodp("predict", "run", tmp_path / "a")[2]


def test_a_card_says_what_the_model_is_what_it_cost_and_how_good_it_is(silodp, trained, tmp_path):
    run, _ = trained(model="logistic")
    code, out, _ = silodp("export", "card", run, "--use", "Adults in two clinics.")
    assert (code, out.startswith("# Model card: run\n")) == (0, True)
    for said in (
        "Adults in two clinics.",
        "| predicts | y (binary): no, yes |",
        "age, sodium, sex, smoker",
        "unit: one record",
        "| s0 | 60 | 20 |",
        "measures the model on held-out records",
        "The seed was fixed (1)",
    ):
        assert said in out
    privacy = json.loads(silodp("export", "card", run, "--json")[1])["privacy"]
    assert [silo["epsilon"] for silo in privacy["silos"]] == pytest.approx([20, 20])
    assert privacy["silos"][0]["mu"] > 0
    (run / "evaluations.jsonl").write_text(
        json.dumps(
            {
                "scores": [
                    {
                        "name": "all",
                        "held_out": 9,
                        "figures": {
                            "accuracy": {
                                "value": 0.81,
                                "low": 0.71,
                                "high": 0.91,
                                "noise": 0.05,
                                "sampling": 0.05,
                                "too_noisy": False,
                            }
                        },
                    }
                ]
            }
        )
        + "\n"
    )
    assert (
        "| accuracy | 0.81 | 0.670 to 0.950 |" in silodp("export", "card", run)[1]
    )  # by noise 0.1, by sampling 0.098, by both 0.14
    assert silodp("export", "card", run, "--out", "CARD.md")[0] == 0
    assert "does not overwrite files" in silodp("export", "card", run, "--out", "CARD.md")[2]
    (run / "summary.json").unlink()
    assert "no finished training" in silodp("export", "card", run)[2]
