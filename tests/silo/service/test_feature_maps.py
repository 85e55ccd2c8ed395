"""A gate with a map of features: the officer approves it by its hash, and the model sees what it
makes of the silo's own records.
"""

import contextlib
import hashlib
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from gate_process import edited
from test_daemon_start import started
from torch import nn

from silodp.cli.federation_files import problem_of
from silodp.core.errors import BadInput
from silodp.core.features.feature_map import FeatureMap, feature_map
from silodp.core.problem.losses import logistic
from silodp.core.problem.person import Person
from silodp.core.problem.problem import Problem
from silodp.core.statistics import Grad
from silodp.host.cards import read_card
from silodp.host.extension import named, run, run_again
from silodp.host.portable import signalled
from silodp.server.order import Order
from silodp.server.run import agree
from silodp.silo.answer.exact import Exact
from silodp.silo.data.reading import read_records
from silodp.silo.data.records import Records
from silodp.silo.service.daemon import approved_map, approved_problem
from silodp.silo.service.elsewhere import refuse_other_elsewhere
from silodp.silo.service.policy import DaemonSettings
from silodp.silo.service.provision import provision

OWN = (
    "import torch\n\n\ndef halves(row):\n    return torch.stack([row[:32].mean(), "
    "row[32:].mean(), row.max()])\n"
)
ASKER = "a" * 64


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    path = tmp_path / "pictures.npz"
    np.savez(
        path,
        x=np.random.default_rng(0).uniform(-1, 1, (40, 64)).astype(np.float32),
        y=np.arange(40) % 2,
    )
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
    place = DaemonSettings.load(made.policy)
    own = read_records(place, None)
    seen = own.records(approved_map(place, None))
    assert seen.x.shape == (1, 40, 9)
    assert torch.equal(seen.y, own.records().y)
    assert own.known_by[0].shape[1] == 64, (
        "the ledger knows the data set by the records, whatever a model sees of them"
    )
    assert "features silodp.photo:9 sha256" in approved_problem(place, 64, None).definition()
    assert "by its definition" in started(edited(made, feature_map='"photo:8"'))
    assert "by its definition" in started(edited(made, feature_map='""'))


def test_a_map_in_a_file_is_approved_by_the_bytes_that_run(tmp_path, pictures):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    file.chmod(0o600)
    made = silo(tmp_path, pictures, f"{file}:halves")
    place = DaemonSettings.load(made.policy)
    assert place.feature_map_sha256 == hashlib.sha256(OWN.encode()).hexdigest()
    assert place.feature_map_sha256 in approved_problem(place, 64, None).definition()
    assert approved_map(place, None).of(torch.ones(2, 64)).shape == (2, 3)
    assert started(made.policy) == "started"
    file.write_text(OWN.replace("row.max()", "row.min()"))
    assert "approves a feature_map file" in started(made.policy)


def test_a_server_builds_the_same_problem_from_the_card_and_its_own_copy_of_a_file(
    tmp_path, pictures
):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    file.chmod(0o600)
    made = silo(tmp_path, pictures, f"{file}:halves")
    card = read_card(Path(made.policy).with_name("silo.json"))
    with pytest.raises(BadInput, match=r"with --feature-map FILE.py:NAME"):
        problem_of(card, Order())
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
    agree([card], problem_of(card, Order()))


class ByPlace:
    """A map whose last bits follow from where a row lies among those that are mapped with it, as
    kernels' do.
    """

    at_once = 4

    def of_each(self, x):
        return self.unchecked(x), torch.zeros(len(x), dtype=torch.bool)

    def unchecked(self, x):
        return x * (1 + 2.0**-20 * (torch.arange(len(x)) % 3)[:, None])


class Mixing(ByPlace):
    """One in which they follow from the other rows."""

    def unchecked(self, x):
        return x * (1 + 2.0**-20 * (x.nan_to_num().flip(0).sum(1, keepdim=True) > 0))


def test_a_persons_features_follow_from_its_own_rows_and_place_whatever_list_a_loader_makes():
    """One person's rows decide which number the others have in a loader's list; at the places that
    they are given, nothing may show it.
    """
    rng, n, problem = (
        np.random.default_rng(0),
        9,
        Problem(nn.Linear(5, 1), logistic, person=Person("p", 2)),
    )
    x, y = rng.normal(size=(n, 2, 5)).astype(np.float32), rng.integers(0, 2, (n, 2))
    placed = []
    for order in (np.arange(n), np.roll(np.arange(n), 1)):
        records = Records.of([(x[order], y[order])])
        asked = Exact(
            problem,
            records,
            partition=lambda name, batches, order=order: np.argsort(order),
            mapped=ByPlace(),
        )
        assert torch.equal(asked._y, torch.from_numpy(y))
        placed.append(asked._x)
    assert torch.equal(*placed)


def test_a_gate_tries_its_map_of_features_before_it_serves():
    x, y = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32), np.arange(9) % 2
    for mapped, sound in ((ByPlace(), True), (Mixing(), False)):
        asked = Exact(
            Problem(nn.Linear(5, 1), logistic),
            Records.of([(x, y)]),
            partition=lambda name, batches: np.arange(9),
            mapped=mapped,
        )
        with (
            contextlib.nullcontext()
            if sound
            else pytest.raises(BadInput, match="depends on the 3 others")
        ):
            asked.verify()


LARGEST = """import torch

largest = [torch.tensor(1e-9)]


def own(row):
    largest[0] = torch.maximum(largest[0], row.abs().max())
    return row / largest[0]
"""
COUNTS = "calls = []\n\n\ndef own(row):\n    calls.append(1)\n    return row * len(calls)\n"
FIRST = """seen = {}


def own(row):
    return row - seen.setdefault("first", row)
"""
BUFFER = """import torch

buffer = torch.zeros(3)


def own(row):
    buffer[:] = 0.9 * buffer + row
    return buffer
"""
OBJECT = """class own:
    def __init__(self):
        self.most = 1.0

    def __call__(self, row):
        self.most = max(self.most, float(row.max()))
        return row / self.most
"""
ELSEWHERE = """import torch

torch.most = getattr(torch, "most", 1.0)


def own(row):
    torch.most = max(torch.most, float(row.abs().max()))
    return row / torch.most
"""
REMEMBER = {
    "largest": LARGEST,
    "counts": COUNTS,
    "first": FIRST,
    "buffer": BUFFER,
    "object": OBJECT,
    "elsewhere": ELSEWHERE,
    "elsewhere, beyond all sizes": ELSEWHERE.replace("1.0", "1e9"),
}


def map_of(source: str):
    """The map `own` as a gate has it, of a file with this content."""
    text = "own.py:own"
    return feature_map(
        text,
        lambda text: named(run(source.encode(), "own.py"), text),
        fresh=lambda text: named(run_again(source.encode(), "own.py"), text),
    )


@pytest.mark.parametrize("name", REMEMBER)
def test_a_map_that_remembers_other_records_is_refused_before_a_gate_serves(monkeypatch, name):
    monkeypatch.setattr(torch, "most", 1.0, raising=False)
    monkeypatch.delattr(torch, "most")
    mapped = map_of(REMEMBER[name])
    with pytest.raises(BadInput, match=r"differ when|depend on the records"):
        mapped.width(3)


@pytest.mark.parametrize("name", ["largest", "counts", "first", "buffer", "object"])
def test_no_map_that_remembers_in_its_own_file_moves_a_sum_by_more_than_is_paid_for(
    monkeypatch, name
):
    """The trial is left out: each record is shown to a fresh copy of the file all the same."""
    monkeypatch.setattr(FeatureMap, "refuse_memory", lambda *_: None)
    monkeypatch.setattr(FeatureMap, "width", lambda *_: 3)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 3)).astype(np.float32), np.arange(200) % 2
    w, sums, gamma = torch.full((1, 4), 0.5, dtype=torch.float64), [], 2.0**-20
    for first in (x[0], 1e6 * x[0]):
        records = Records.of([(np.vstack([first, x[1:]]), y)])
        exact = Exact(
            Problem(nn.Linear(3, 1), logistic),
            records,
            partition=lambda *_: np.arange(200),
            mapped=map_of(REMEMBER[name]),
        )
        sums.append(exact._sum(exact._rows_of(Grad(w)), np.arange(200), 1.0, gamma, 4))
    assert np.linalg.norm(gamma * (sums[0] - sums[1])) <= 2.0


def test_a_map_that_differs_between_processes_is_refused():
    clock = "import os\n\n\ndef own(row):\n    return row * os.getpid()\n"
    with pytest.raises(BadInput, match="in a second process"):
        refuse_other_elsewhere(map_of(clock), clock.encode(), 3)
    refuse_other_elsewhere(
        map_of(OWN.replace("halves", "own")), OWN.replace("halves", "own").encode(), 64
    )


def test_a_map_that_raises_what_is_no_exception_makes_one_record_zero_and_ends_nothing():
    class Stopped(BaseException):
        pass

    def own(row):
        if row[0] > 5:
            raise Stopped
        return row * 2

    mapped = FeatureMap("own.py:own", own)
    made, failed = mapped.of_each(torch.tensor([[1.0, 1.0], [9.0, 1.0], [3.0, 1.0]]))
    assert failed.tolist() == [False, True, False]
    assert made.tolist() == [[2.0, 2.0], [0.0, 0.0], [6.0, 2.0]]


def test_a_map_that_raises_an_interrupt_on_one_record_ends_no_gate(monkeypatch):
    """A gate handles Ctrl-C itself, so that only the map can have raised it."""

    def own(row):
        if row[0] > 5:
            raise KeyboardInterrupt
        return row * 2

    mapped, x = FeatureMap("own.py:own", own), torch.tensor([[1.0, 1.0], [9.0, 1.0]])
    with signalled():
        made, failed = mapped.of_each(x)
        mapped.refuse_memory(2)
    assert failed.tolist() == [False, True]
    assert made.tolist() == [[2.0, 2.0], [0.0, 0.0]]
    # A shell without a terminal ignores the signal, and then Python handles none.
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        mapped.of_each(x)
