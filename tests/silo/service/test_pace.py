"""`answer_after` of a new policy: measured on made-up records, so that it follows from the silo's
shapes and its machine alone; the clock of these tests counts answers.
"""

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from gate_process import made, write_data
from torch import nn

from silodp.cli import app as cli
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.silo.answer import slots
from silodp.silo.answer.exact import Exact
from silodp.silo.data.records import Records
from silodp.silo.service import approve, daemon, pace
from silodp.silo.service.pace import LEAST, MEASURED, MULTIPLE, slot_for
from silodp.silo.service.policy import HOUR, Policy


class Clock:
    """Stands still but while an answer is computed, which takes what its statistic says."""

    def __init__(self, monkeypatch, **seconds: float) -> None:
        self.now, self.asked, self.silos = 0.0, list[str](), list[Exact]()
        real = Exact.answer

        def answer(silo, query, silos):
            name = type(query.statistic).__name__
            self.now += seconds.get(name, 0.01)
            self.asked.append(name)
            self.silos.append(silo)
            return real(silo, query, silos)

        monkeypatch.setattr(Exact, "answer", answer)
        monkeypatch.setattr(pace, "time", self)

    def perf_counter(self) -> float:
        return self.now


def problem() -> Problem:
    return Problem(*model_by_name("logistic", 3, 2))


def slot(n: int = 60, statistics=("Grad",), steps: int = 20, of: Problem | None = None) -> float:
    of = of or problem()
    return slot_for(of, (n, 3), (n,), number=False, statistics=statistics, steps=steps)


def test_a_slot_is_twice_the_slowest_answer_and_at_least_a_second(monkeypatch):
    clock = Clock(monkeypatch, GradDiff=3.0, Score=4.0)
    assert slot() == MULTIPLE * 3.0
    assert slot(statistics=("Grad", "Score")) == MULTIPLE * 4.0
    assert set(clock.asked) == {"Grad", "GradDiff", "Score"}
    Clock(monkeypatch)
    assert slot() == LEAST == 1.0


def test_local_steps_take_as_many_answers_and_no_slot_is_above_an_hour(monkeypatch):
    Clock(monkeypatch, GradDiff=3.0)
    assert slot(statistics=("Grad", "LocalSteps"), steps=7) == MULTIPLE * 7 * 3.0
    assert slot(statistics=("Grad", "SteeredSteps"), steps=10**6) == HOUR


def test_more_records_than_are_made_up_take_time_in_proportion(monkeypatch):
    monkeypatch.setattr(pace, "MEASURED", 50)
    clock = Clock(monkeypatch, GradDiff=3.0)
    assert slot(100) == 2 * slot(50)
    assert {silo.shapes[0][0] for silo in clock.silos} == {50}
    assert MEASURED >= 10_000


CALLS: list[int] = []


class Fails(nn.Module):
    """A user's own model, which raises on a large record."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        CALLS.append(1)
        value = x
        while torch._C._functorch.is_functorch_wrapped_tensor(value):
            value = torch._C._functorch.get_unwrapped(value)
        if bool((value > 100).any()):
            raise ValueError
        return self.layer(x)


@pytest.mark.parametrize("n", [1, 2, 3, 60, 61, 150])
def test_a_slot_has_room_for_a_record_on_which_an_own_model_raises(monkeypatch, n):
    monkeypatch.setattr(slots, "CHUNK", 8 * 60)
    calls = []
    for at in (None, 0, n // 2, n - 1):
        x = np.zeros((n, 3), np.float32)
        if at is not None:
            x[at] = 1e6
        own = Problem(Fails(), cross_entropy)
        records = Records.of([(x, np.arange(n) % 2)])
        silo = Exact(own, records, partition=lambda name, batches: np.arange(n))
        CALLS.clear()
        silo.answer(Query(Grad(own.initial([0]).double()), Gaussian("a", 1.0, 1.0)), [0])
        calls.append(len(CALLS))
    assert max(calls) > calls[0]
    assert max(calls) <= silo.retries * calls[0]
    Clock(monkeypatch, GradDiff=3.0)
    assert slot(n, of=own) == pytest.approx(MULTIPLE * 3.0 * silo.retries, abs=0.1)
    assert slot(n) == MULTIPLE * 3.0, "known layers never raise"


@pytest.fixture
def tmp_path(passable):
    """Other users may pass through this folder, as through an operator's."""
    return passable


@pytest.fixture
def init(tmp_path, monkeypatch):
    """`silodp silo init` on a file, as an officer types it: the folder of the policy."""
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))

    def run(name: str, data: Path) -> Path:
        words = ["silo", "init", tmp_path / name, "--name", "clinic", "--data", data]
        words += ["--label", "outcome", "--model", "mlp:4", "--epsilon", "3", "--asker", "1" * 64]
        monkeypatch.setattr("sys.argv", ["silodp", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        return tmp_path / name

    return run


def test_a_new_policy_of_silo_init_pads_replies_and_says_why(init, tmp_path, monkeypatch):
    Clock(monkeypatch, GradDiff=0.25)
    folder = init("silo", write_data(tmp_path / "clinic.csv"))
    assert Policy.load(folder / "policy.toml").answer_after == MULTIPLE * 20 * 0.25
    before, _, _ = (folder / "policy.toml").read_text().partition("\nanswer_after = 10.0")
    assert "twice the slowest answer about made-up records" in " ".join(before.split()[-80:])


def test_the_folder_that_silo_init_makes_is_closed_and_its_gate_starts(init, tmp_path):
    folder = init("silo", write_data(tmp_path / "clinic.csv"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    stop, tell = daemon.socket.socketpair()
    with stop, tell:
        tell.sendall(b"!")
        daemon.serve(folder / "policy.toml", stop, lambda *_: None)


def test_a_folder_that_was_open_to_others_is_named_by_silo_init(init, tmp_path, capsys):
    data = write_data(tmp_path / "clinic.csv")
    (tmp_path / "silo").mkdir(mode=0o711)
    init("silo", data)
    assert f"chmod 700 {tmp_path / 'silo'}" in capsys.readouterr().out
    init("closed", write_data(tmp_path / "other.csv", seed=1))
    assert "chmod 700" not in capsys.readouterr().out


def test_what_is_measured_is_the_same_for_silos_of_other_records(init, tmp_path, monkeypatch):
    found = []
    for seed, name in enumerate(("a", "b")):
        with monkeypatch.context() as patch:
            clock = Clock(patch, GradDiff=0.5)
            folder = init(name, write_data(tmp_path / f"{name}.csv", seed=seed))
        policy = Policy.load(folder / "policy.toml")
        silo = clock.silos[0]
        found.append((policy.answer_after, clock.asked, silo._x.numpy(), silo._y.numpy()))
    (slot_a, asked_a, x_a, y_a), (slot_b, asked_b, x_b, y_b) = found
    assert (slot_a, asked_a) == (slot_b, asked_b)
    assert np.array_equal(x_a, x_b)
    assert np.array_equal(y_a, y_b)


def test_a_trial_on_one_machine_is_not_padded(tmp_path, monkeypatch):
    """`federation up` makes its silos so: one person has them all."""
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    assert Policy.load(made(tmp_path).policy).answer_after == 0.0


@pytest.mark.parametrize(
    ("before", "after"), [("0.0", 0.0), ("1.0", 20.0), ("90.0", 90.0)], ids=["off", "short", "long"]
)
def test_an_approval_lengthens_a_slot_that_a_new_model_needs_longer_and_shortens_none(
    tmp_path, monkeypatch, before, after
):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    silo = made(tmp_path)
    policy = Path(silo.policy)
    text = policy.read_text()
    assert "answer_after = 0.0" in text
    policy.write_text(text.replace("answer_after = 0.0", f"answer_after = {before}"))
    card = policy.parent / "silo.json"
    words = ["silodp", "federation", "propose", "second", "--model", "logistic"]
    monkeypatch.setattr("sys.argv", [*words, "--card", str(card), "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        cli.main()
    found = approve.compare(policy, tmp_path / "second.toml")
    Clock(monkeypatch, GradDiff=0.5)
    approve.approve(found, by="officer")
    assert Policy.load(policy).answer_after == after
    assert Policy.load(policy).study == "second"
