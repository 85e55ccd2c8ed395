"""Pages of a model that always says the larger class and of a useful one with a larger error: the
useful one comes first, and a reader sees why.
"""

import json
import re
import shutil

import numpy as np
import pytest
from looking import ask, served
from safetensors import safe_open
from safetensors.torch import save_file
from test_spends import plain

from silodp.pages import runs
from silodp.pages.card import card
from silodp.pages.report import report

TRAIN = (
    "--algorithm",
    "mb-sgd",
    "--model",
    "logistic",
    "--rounds",
    2,
    "--epsilon",
    3,
    "--held-out",
    0.5,
    "--seed",
    1,
)


def put(folder, weight, bias):
    """Another model of the same form in the run's folder, as if training had found it."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        about, found = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in found.items():
        if not name.startswith("scaling."):
            tensor[:] = bias if tensor.numel() == 1 and tensor.dim() == 1 else 0.0
            if tensor.dim() == 2:
                tensor[0, 0] = weight
        elif name.endswith("mean"):
            tensor[:] = 0.0
        else:
            tensor[:] = 1.0
    save_file(found, folder / "model.safetensors", about)


@pytest.fixture
def root(silodp, tmp_path):
    """runs/majority has an error of 20 per cent and looks at nothing; runs/useful has a larger
    error and finds most of both classes.
    """
    random = np.random.default_rng(3)
    for silo in "ab":
        y = (random.random(2000) < 0.2).astype(int)
        x = y * 1.6 + random.normal(size=2000)
        lines = "".join(
            f"{v:.4f},{w:.4f},{k}\n" for v, w, k in zip(x, random.normal(size=2000), y, strict=True)
        )
        (tmp_path / f"{silo}.csv").write_text(f"x,z,label\n{lines}")
    assert (
        silodp("train", "--silo", "a.csv", "--silo", "b.csv", *TRAIN, "--out", "runs/majority")[0]
        == 0
    )
    for name, weight, bias in (("useful", 1.6, -0.7), ("twin", 1.5, -0.7), ("majority", 0.0, -1.4)):
        if name != "majority":
            shutil.copytree(tmp_path / "runs/majority", tmp_path / "runs" / name)
        put(tmp_path / "runs" / name, weight, bias)
        assert silodp("evaluate", f"runs/{name}", "--epsilon", 2, "--seed", len(name))[0] == 0
    return tmp_path / "runs"


def test_the_useful_model_comes_first_and_report_page_comparison_and_card_say_why(root, silodp):
    figures = {
        name: json.loads((root / name / "evaluations.jsonl").read_text())["scores"][0]["figures"]
        for name in ("majority", "useful")
    }
    assert figures["majority"]["accuracy"]["value"] > figures["useful"]["accuracy"]["value"] + 0.02
    with served(root) as port:
        compared = plain(ask(port, "/compare?run=majority&run=useful")[1])
        tied = plain(ask(port, "/compare?run=majority&run=useful&run=twin")[1])
        pages = {
            name: [
                plain(ask(port, f"/run/{name}")[1]),
                plain(report(runs.read(root / name))),
                card(runs.read(root / name)),
            ]
            for name in figures
        }
        listed = plain(ask(port, "/")[1])
    table = compared[compared.index("Measured on held-out records") :]
    assert table.index(" 1 useful ") < table.index(" 2 majority ")
    assert re.search(
        (
            r"Ranked by AUC: how often .* Raw error does not count here: always predicting the "
            r"larger class keeps it small\."
        ),
        compared,
    )
    assert re.search(
        (
            r"majority has the smaller error \(\S+% against \S+%\), but its AUC is 0\.[45]\d "
            r"against 0\.[89]\d, no better than gues"
        ),
        compared,
    )
    assert re.search(
        r"(useful|twin) is not clearly better than (useful|twin): their 95 % intervals overlap",
        tied,
    )
    for page in pages["majority"]:
        assert "The model is not significantly better than guessing: AUC 0." in page
        assert "not significantly above the share of the larger class" in page
    for page in pages["useful"]:
        assert "The model is significantly better than guessing: AUC 0." in page
        assert "calibration in the large" in page
        assert "redicted risk" in page
    for page in pages["useful"][:2]:
        assert page.index("How good the model is") < page.index("Each silo&#x27;s budget")
    assert listed.count("AUC, held-out") == 3


def test_models_that_were_not_judged_on_the_same_records_are_not_ranked(root, silodp):
    (root / "twin/evaluations.jsonl").unlink()
    last = json.loads((root / "useful/evaluations.jsonl").read_text())
    for row in last["scores"]:
        row["held_out"] += 1
    (root / "useful/evaluations.jsonl").write_text(json.dumps(last) + "\n")
    with served(root) as port:
        others = plain(ask(port, "/compare?run=majority&run=useful")[1])
        unasked = plain(ask(port, "/compare?run=majority&run=twin")[1])
    assert "They are not ranked: they were not measured on the same records" in others
    assert "They are not ranked: twin: not evaluated on held-out records" in unasked
    assert "shows its price but not its quality" in plain(report(runs.read(root / "twin")))
