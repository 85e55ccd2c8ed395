"""A personal model: better where a silo is different, none where it is not, readable by its owner
alone, and never opened for what leaves.
"""

import json
import stat
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from silodp.cli import score
from silodp.core.errors import BadInput
from silodp.core.problem.losses import logistic
from silodp.core.problem.problem import Problem
from silodp.core.problem.reading import plain_text
from silodp.host.model import PERSONAL, about_of, contents, open_model, refuse_personal
from silodp.silo.data.heldout import held_out
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.personal import personalise
from silodp.silo.service.daemon import approved_problem
from silodp.silo.service.policy import DaemonSettings
from silodp.silo.service.provision import provision


def records(path, n, weight, seed):
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, 2))
    y = (random.random(n) < 1 / (1 + np.exp(-(x @ weight)))).astype(int)
    path.write_text(
        "a,b,label\n" + "".join(f"{a:.4f},{b:.4f},{k}\n" for (a, b), k in zip(x, y, strict=True))
    )
    return path


def shared(folder, weight=(2.0, 0.0)):
    folder.mkdir(parents=True)
    plain = plain_text(["a", "b"], ["0", "1"], "label")
    tensors = {
        "weight": torch.tensor([weight]),
        "bias": torch.zeros(1),
        "scaling.mean": torch.zeros(2),
        "scaling.scale": torch.ones(2),
    }
    return tensors, {"model": "logistic", "plain": plain}


@pytest.fixture
def clinic(tmp_path, monkeypatch):
    """A clinic where the second feature matters and the first does not: the shared model has learnt
    the reverse elsewhere.
    """
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    about = {
        "label": "label",
        "name": "clinic",
        "epsilon": 3.0,
        "model": "logistic",
        "askers": ["ab" * 32],
    }
    made = provision(
        tmp_path / "silo",
        data=records(tmp_path / "own.csv", 400, (0.0, 2.5), 1),
        classes=("0", "1"),
        **about,
    )
    place = DaemonSettings.load(made.policy)
    tensors, words = shared(tmp_path / "run")
    names = list(approved_problem(place, 2, None).shapes)
    save_file(
        dict(zip([*names, *list(tensors)[2:]], tensors.values(), strict=True)),
        tmp_path / "run/model.safetensors",
        words,
    )
    return tmp_path


def test_a_silo_that_is_different_gets_a_better_model_and_nobody_else_can_read_it(clinic, silodp):
    code, out, err = silodp("silo", "personalise", "silo/policy.toml", "run")
    assert (code, err) == (0, "")
    for said in (
        "NOT private",
        "never send",
        "Nothing was sent, and nothing is charged",
        "silodp predict",
    ):
        assert said in out
    path = clinic / "silo/personal/model.safetensors"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    records(clinic / "new.csv", 500, (0.0, 2.5), 2)
    truth = np.loadtxt(clinic / "new.csv", delimiter=",", skiprows=1)[:, 2]
    right = {}
    for name in ("run", "silo/personal"):
        code, out, err = silodp("predict", name, "new.csv", "--json")
        found = json.loads(out)
        right[name] = np.mean(
            [row["predicted"] == f"{k:.0f}" for row, k in zip(found["rows"], truth, strict=True)]
        )
        assert any("not private, so never send it" in note for note in found["notes"]) == (
            name != "run"
        )
    assert silodp("predict", "silo/personal", "new.csv", "--out", "risks.csv")[0] == 0
    assert stat.S_IMODE((clinic / "risks.csv").stat().st_mode) == 0o600
    assert right["silo/personal"] > right["run"] + 0.15
    assert not list(DurableLedger.open(clinic / "silo/ledger.db").entries()), (
        "nothing was asked of the gate"
    )


def test_what_may_leave_is_never_made_from_a_personal_model(clinic, silodp):
    silodp("silo", "personalise", "silo/policy.toml", "run")
    for words in (
        ("export", "model", "silo/personal", "--to", "torch"),
        ("silo", "personalise", "silo/policy.toml", "silo/personal"),
    ):
        code, _, err = silodp(*words)
        assert code == 2
        assert "personal model" in err
    with pytest.raises(BadInput, match="may not leave that silo"):
        open_model(clinic / "silo/personal")


def test_the_three_models_are_shown_side_by_side_and_kept_for_the_owner_alone(clinic, silodp):
    code, out, _ = silodp("silo", "personalise", "silo/policy.toml", "run")
    assert code == 0
    for word in ("alone", "together", "personal", "log loss", "AUC", "slope"):
        assert word in out
    path = clinic / "silo/personal/figures.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kept = json.loads(path.read_text())
    assert kept["private"] is False
    assert "never send" in kept["stays"]
    figures = kept["figures"]
    assert figures["personal"]["log loss"] < figures["together"]["log loss"] - 0.3
    assert figures["personal"]["log loss"] < figures["alone"]["log loss"] + 0.005
    assert sum(kept["shares"].values()) == pytest.approx(1)


def test_where_the_shared_model_is_right_the_personal_one_is_as_good(clinic, silodp):
    records(clinic / "own.csv", 60, (2.0, 0.0), 3)
    code, out, _ = silodp("silo", "personalise", "silo/policy.toml", "run", "--json")
    assert code == 0
    found = json.loads(out)
    assert (
        found["figures"]["personal"]["log loss"] < found["figures"]["together"]["log loss"] + 0.01
    )
    assert found["shares"]["alone"] < 0.1


def test_records_that_the_gate_keeps_for_testing_are_never_fitted_to(clinic):
    policy = clinic / "silo/policy.toml"
    text = policy.read_text()
    assert "\nheld_out = 0.0\n" in text
    policy.write_text(text.replace("\nheld_out = 0.0\n", "\nheld_out = 0.2\n"))
    before = np.loadtxt(clinic / "own.csv", delimiter=",", skiprows=1)
    first = personalise(policy, clinic / "run")
    model = load_file(first.path)
    assert (first.trained, first.scored) == (320, 80)
    changed = before.copy()
    kept = held_out(400, 0.2)
    changed[kept, 2] = 1 - changed[kept, 2]
    rows = "".join(f"{a:.4f},{b:.4f},{k:.0f}\n" for a, b, k in changed)
    (clinic / "own.csv").write_text("a,b,label\n" + rows)
    second = personalise(policy, clinic / "run")
    assert all(torch.equal(one, model[name]) for name, one in load_file(second.path).items())
    assert second.table != first.table


def test_an_older_folder_is_closed_to_others_and_a_link_is_not_followed(clinic):
    (clinic / "silo/personal").mkdir(mode=0o755)
    assert personalise(clinic / "silo/policy.toml", clinic / "run").path
    assert stat.S_IMODE((clinic / "silo/personal").stat().st_mode) == 0o700
    (clinic / "silo/personal/model.safetensors").unlink()
    (clinic / "silo/personal/figures.json").unlink()
    (clinic / "silo/personal").rmdir()
    (clinic / "elsewhere").mkdir()
    (clinic / "silo/personal").symlink_to(clinic / "elsewhere")
    with pytest.raises(BadInput, match="is a link"):
        personalise(clinic / "silo/policy.toml", clinic / "run")
    assert not list((clinic / "elsewhere").iterdir())


def test_another_model_and_too_few_records_are_refused_in_a_sentence(clinic, silodp):
    save_file({"other": torch.zeros(3)}, clinic / "run/model.safetensors", {"plain": "{}"})
    assert (
        "is not the model logistic that the policy approves"
        in silodp("silo", "personalise", "silo/policy.toml", "run")[2]
    )
    records(clinic / "own.csv", 19, (2.0, 0.0), 3)
    tensors, words = shared(clinic / "small")
    names = list(approved_problem(DaemonSettings.load(clinic / "silo/policy.toml"), 2, None).shapes)
    save_file(
        dict(zip([*names, *list(tensors)[2:]], tensors.values(), strict=True)),
        clinic / "small/model.safetensors",
        words,
    )
    assert (
        "the silo has 19 records to fit to; a personal model needs 20 or more"
        in silodp("silo", "personalise", "silo/policy.toml", "small")[2]
    )
    assert (
        "has no model.safetensors"
        in silodp("silo", "personalise", "silo/policy.toml", "nowhere")[2]
    )


def test_no_question_is_asked_and_no_card_is_made_with_a_personal_model(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors", {"model": "logistic"})
    refuse_personal(tmp_path, contents(tmp_path)[0])
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors", {PERSONAL: "clinic"})
    with pytest.raises(
        BadInput, match="personal model of clinic: it is not private and may not leave"
    ):
        refuse_personal(tmp_path, contents(tmp_path)[0])
    with pytest.raises(BadInput, match="personal model of clinic"):
        about_of(tmp_path)
    problem = Problem(nn.Linear(2, 1, bias=False), logistic)
    weights = {name: torch.zeros(shape) for name, shape in problem.shapes.items()}
    save_file(weights, tmp_path / "model.safetensors", {PERSONAL: "clinic"})
    card = SimpleNamespace(name="clinic", held_out=10)
    monkeypatch.setattr(score, "_read_cards", lambda *_: [card])
    monkeypatch.setattr(score, "check_study", lambda *_: None)
    monkeypatch.setattr(score, "problem_of", lambda *_: problem)
    with pytest.raises(BadInput, match="personal model of clinic"):
        score.federation_evaluate(tmp_path, run=tmp_path)
