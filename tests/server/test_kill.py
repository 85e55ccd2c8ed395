"""kill -9 of the server at every step between a reply and the iterate made of it: nothing is paid
twice, nothing is lost, and no gate is needed for what came.
"""

import multiprocessing
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from gates import ASKER, LIMIT, PATIENCE, Clock, Whole, three_gates
from silodp.core.privacy.accounting import Budget, gdp_epsilon, gdp_mu
from silodp.core.protocol.codec import QUERY
from silodp.pages.runs import read
from silodp.server.journal import Journal
from silodp.server.order import Order
from silodp.server.remote import Timeouts, hashed_id
from silodp.server.replies import Replies
from silodp.server.run import NetworkRun

ORDER = Order("spider", rounds=4, phase=2, epsilon=("0.3",))
QUICK = Timeouts(deadline=LIMIT, limit=LIMIT, retry=30.0)
pytestmark = pytest.mark.xdist_group("killed-server")  # one set of gates for all of them
STEPS = {
    "before a reply is kept": (Replies, "keep", 5, True),
    "after a reply is kept": (Replies, "keep", 5, False),
    "before the mean": (Journal, "write", 2, True),
    "after the mean": (Journal, "write", 2, False),
    "before the iterate": (Journal, "iterate", 2, True),
    "after the iterate": (Replies, "clear", 2, True),
    "after its replies are gone": (Replies, "clear", 2, False),
}
"""Of which class, in which call of which method, and whether before it or after it."""


@pytest.fixture(scope="module")
def gates():
    with three_gates() as found:
        yield found


class Nobody:
    """A carrier that must not be needed."""

    def exchange(self, frames, timeout):
        raise AssertionError("asked")

    names = exchange


def conduct(gates, folder, carrier=None) -> NetworkRun:
    run = NetworkRun(
        gates.cards,
        gates.problem,
        ORDER,
        carrier or gates.direct(),
        folder,
        key=ASKER,
        timeouts=QUICK,
    )
    list(run)
    return run


def killed(gates, folder, kind, name, turn, first) -> None:
    """A run in this process, which kills itself."""
    honest, calls = getattr(kind, name), iter(range(1, 100))

    def dying(self, *given):
        last = next(calls) == turn
        if last and first:
            os.kill(os.getpid(), signal.SIGKILL)
        found = honest(self, *given)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(kind, name, dying)
    conduct(gates, folder)


def kill(gates, folder, step) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=killed, args=(gates, folder, *step)
    )
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL


def used(gates) -> list[float]:
    return [gate.ledger().used() for gate in gates.gates]


def check_told(gates, folder, before) -> None:
    """What is shown of the run is not less than what the ledgers have charged since."""
    for gate, silo, then, now in zip(
        gates.gates, read(folder).silos, before, used(gates), strict=True
    ):
        charged = (now - then) * gdp_mu(Budget(gate.card.epsilon, gate.card.delta)) ** 2
        assert charged > 0
        assert charged <= silo.used * gdp_mu(Budget(silo.epsilon, silo.delta)) ** 2 * (1 + 1e-9)
        assert gdp_epsilon(charged**0.5, silo.delta) <= silo.spent * (1 + 1e-9)


@pytest.mark.parametrize("step", STEPS)
def test_a_server_killed_at_any_step_needs_no_answer_again_that_it_had_and_nobody_pays_twice(
    gates, tmp_path, step
):
    before = used(gates)
    kill(gates, tmp_path / "run", STEPS[step])
    check_told(gates, tmp_path / "run", before)
    kept = Replies(tmp_path / "run/replies")
    run = NetworkRun(gates.cards, gates.problem, ORDER, Nobody(), tmp_path / "run", key=ASKER)
    journal = list(iter(run._journal.read, None))
    had = {(told.sequence, name) for told in journal for name in told.heard} | {
        (key.sequence, key.name) for key in kept._places
    }
    run._run_journal.close()
    kept.close()
    asked = {"before a reply is kept": 4, "after a reply is kept": 5}.get(step, 6)
    assert len(had) == asked
    for gate in gates.gates:
        for sequence in (0, 1):
            if (sequence, gate.card.name) in had:
                gate.ledger().purge(
                    hashed_id(f"{run.run}/{sequence}/{gate.card.name}")
                )  # as its policy may have it
    done = conduct(gates, tmp_path / "run")
    assert done.summary["ended"] == "finished"
    assert [silo["answered"] for silo in done.summary["silos"]] == [4, 4, 4]
    for gate in gates.gates:
        ids = gate.charges(run.run)
        assert len(ids) == len(set(ids)) == 4
    assert (tmp_path / "run/replies").stat().st_size == 0
    model = load_file(tmp_path / "run/model.safetensors")
    conduct(gates, tmp_path / "run", Nobody())
    again = load_file(tmp_path / "run/model.safetensors")
    assert all(torch.equal(model[name], again[name]) for name in model)


def test_what_a_stopped_run_said_is_not_shown_any_more_once_it_has_gone_on(
    gates, tmp_path, monkeypatch
):
    class Cut(Whole):
        """The network is gone after the first question."""

        queries = 0

        def exchange(self, frames, timeout):
            self.queries += any(frame[:4] == QUERY for frame in frames.values())
            return {} if self.queries > 1 else super().exchange(frames, timeout)

    before = used(gates)
    with monkeypatch.context() as patch:
        Clock(patch)
        about = {
            "key": ASKER,
            "quorum": 3,
            "timeouts": Timeouts(deadline=2.0, limit=2.5, retry=1.0),
        }
        run = NetworkRun(
            gates.cards, gates.problem, ORDER, Cut(gates.sockets), tmp_path / "run", **about
        )
        list(run)
    assert "0 of 3 silos answered question 2" in run.ended
    check_told(gates, tmp_path / "run", before)
    old = (tmp_path / "run/summary.json").read_bytes()
    kill(gates, tmp_path / "run", (Journal, "iterate", 3, False))
    check_told(gates, tmp_path / "run", before)
    (tmp_path / "run/summary.json").write_bytes(old)  # which earlier versions have left there
    check_told(gates, tmp_path / "run", before)
