"""A gate with a map of features: the officer approves it by its hash, and the model sees what it makes of the silo's own records."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gate_process import edited
from test_daemon_start import started

from silodp.cli.federation_files import problem_of
from silodp.core.errors import BadInput
from silodp.host.cards import read_card
from silodp.server.order import Order
from silodp.server.run import agree
from silodp.silo.service.daemon import approved_map, approved_problem, read_records
from silodp.silo.service.policy import Place
from silodp.silo.service.provision import provision

OWN = "import torch\n\n\ndef halves(row):\n    return torch.stack([row[:32].mean(), row[32:].mean(), row.max()])\n"
ASKER = "a" * 64


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    path = tmp_path / "pictures.npz"
    np.savez(path, x=np.random.default_rng(0).uniform(-1, 1, (40, 64)).astype(np.float32), y=np.arange(40) % 2)
    path.chmod(0o600)
    return path


def silo(tmp_path, pictures, feature_map):
    return provision(
        tmp_path / "gate",
        data=pictures,
        label="label",
        name="clinic",
        epsilon=1.0,
        model="logistic",
        feature_map=feature_map,
        askers=[ASKER],
    )


def test_a_gate_sees_of_its_records_what_a_shipped_map_makes_of_them(tmp_path, pictures):
    made = silo(tmp_path, pictures, "photo:9")
    assert (made.parameters, len(made.features), made.feature_map) == (10, 64, "photo:9")
    assert started(made.policy) == "started"
    place = Place.load(made.policy)
    own = read_records(place, None)
    seen = own.records(approved_map(place, None))
    assert seen.x.shape == (1, 40, 9)
    assert torch.equal(seen.y, own.records().y)
    assert own.known_by[0].shape[1] == 64, "the ledger knows the data set by the records, whatever a model sees of them"
    assert "features silodp.photo:9 sha256" in approved_problem(place, 64, None).definition()
    assert "by its definition" in started(edited(made, feature_map='"photo:8"'))
    assert "by its definition" in started(edited(made, feature_map='""'))


def test_a_map_in_a_file_is_approved_by_the_bytes_that_run(tmp_path, pictures):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    file.chmod(0o600)
    made = silo(tmp_path, pictures, f"{file}:halves")
    place = Place.load(made.policy)
    assert place.feature_map_sha256 == hashlib.sha256(OWN.encode()).hexdigest()
    assert place.feature_map_sha256 in approved_problem(place, 64, None).definition()
    assert approved_map(place, None).of(torch.ones(2, 64)).shape == (2, 3)
    assert started(made.policy) == "started"
    file.write_text(OWN.replace("row.max()", "row.min()"))
    assert "approves a feature_map file" in started(made.policy)


def test_a_server_builds_the_same_problem_from_the_card_and_its_own_copy_of_a_file(tmp_path, pictures):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    file.chmod(0o600)
    made = silo(tmp_path, pictures, f"{file}:halves")
    card = read_card(Path(made.policy).with_name("silo.json"))
    with pytest.raises(BadInput, match=r"with --feature-map FILE.py:NAME"):
        problem_of(card)
    (tmp_path / "here").mkdir()
    mine = tmp_path / "here" / "mine.py"
    mine.write_text(OWN)
    agree([card], problem_of(card, Order(feature_map=f"{mine}:halves")))
    other = tmp_path / "here" / "other.py"
    other.write_text(OWN + "# another\n")
    with pytest.raises(BadInput, match="by its definition"):
        agree([card], problem_of(card, Order(feature_map=f"{other}:halves")))


def test_a_card_of_an_older_version_has_no_map(tmp_path, pictures):
    made = silo(tmp_path, pictures, "")
    path = Path(made.policy).with_name("silo.json")
    table = json.loads(path.read_text())
    del table["feature_map"]
    path.write_text(json.dumps(table))
    card = read_card(path)
    assert card.feature_map == ""
    agree([card], problem_of(card))
