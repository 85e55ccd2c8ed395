"""Runs over a network with real gates: killing anything costs no silo a second time, and what is
played back is the same bit for bit.
"""

import multiprocessing
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gates import ASKER, LIMIT, Clock, Whole, three_gates, wbcd
from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.server.algorithms.local_sgd import local_sgd
from silodp.server.algorithms.prox_svrg import prox_svrg
from silodp.server.algorithms.scaffold import scaffold
from silodp.server.algorithms.spider import prox_spider
from silodp.server.federation import Everyone, Federation
from silodp.server.order import Order
from silodp.server.remote import Card, Remote, Timeouts
from silodp.server.run import NetworkRun, agree, plan_order
from silodp.silo.data.records import Records
from silodp.testing.federation import check_replay, simulated_federation

pytestmark = pytest.mark.xdist_group("remote-gates")  # one set of daemons for all
QUICK = Timeouts(deadline=LIMIT, limit=LIMIT, retry=30.0)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(scope="module")
def gates():
    with three_gates(queries_per_run=16) as made:
        yield made


ORDER = Order("spider", rounds=12, phase=4, epsilon=("0.3",))


def carried_out(gates, folder, carrier=None, order=ORDER, **settings) -> tuple[NetworkRun, list]:
    run = NetworkRun(
        gates.cards,
        gates.problem,
        order,
        carrier or gates.direct(),
        folder,
        key=ASKER,
        **{"timeouts": QUICK} | settings,
    )
    return run, list(run)


class Nobody:
    """A carrier that must not be needed."""

    def exchange(self, frames, timeout):
        raise AssertionError("asked")

    def names(self):
        raise AssertionError("asked")


def assert_charged_once(gates, run: str, questions: int) -> None:
    for gate in gates.gates:
        ids = gate.charges(run)
        assert len(ids) == len(set(ids)) == questions


def assert_same(model, folder) -> None:
    again = load_file(folder / "model.safetensors")
    assert all(torch.equal(model[name], again[name]) for name in model)


def test_a_run_trains_spends_what_was_planned_and_is_replayed_without_a_network_bit_for_bit(
    gates, tmp_path
):
    before = [gate.ledger().used() for gate in gates.gates]
    run, progress = carried_out(gates, tmp_path / "run")
    assert run.summary["ended"] == "finished"
    assert [p.iterate for p in progress] == list(range(1, 13))
    assert all(
        p.answered == ("silo-0", "silo-1", "silo-2") and not p.dropped and not p.replayed
        for p in progress
    )
    assert_charged_once(gates, run.run, 12)
    for gate, used, silo in zip(gates.gates, before, run.summary["silos"], strict=True):
        assert 0.29 < silo["spent_epsilon_at_most"] <= 0.3
        assert (silo["ledger"]["count"], silo["answered"]) == (
            gate.ledger().released()[0] - 1,
            12,
        ), "then the answer is stored"
        assert 0 < gate.ledger().used() - used < 0.1
    assert all(abs(left) < 1e-6 for left in progress[-1].left.values())
    model = load_file(tmp_path / "run/model.safetensors")
    again, progress = carried_out(gates, tmp_path / "run", Nobody())
    assert all(p.replayed for p in progress)
    assert_same(model, tmp_path / "run")
    assert again.summary == run.summary


def test_releases_played_back_give_the_same_iterates_on_every_algorithm(gates):
    kinds = {kind: Gaussian(kind, 1.0, 200.0) for kind in ("anchor", "refine", "minibatch")}
    for name, run, wanted in (
        (
            "spider",
            lambda *a, **k: prox_spider(*a, rounds=4, phase=2, step=0.3, slope=1.0, **k),
            ("anchor", "refine"),
        ),
        (
            "svrg",
            lambda *a, **k: prox_svrg(*a, rounds=4, inner=2, step=0.3, slope=1.0, **k),
            ("anchor", "refine"),
        ),
        (
            "local",
            lambda *a, **k: local_sgd(*a, rounds=2, local_steps=2, step=0.3, **k),
            ("minibatch",),
        ),
        (
            "scaffold",
            lambda *a, **k: scaffold(*a, rounds=2, local_steps=2, step=0.3, **k),
            ("minibatch",),
        ),
    ):
        channel = Remote(
            gates.cards, gates.direct(), run=f"replay-{name}", key=ASKER, timeouts=QUICK
        )
        chosen = {kind: kinds[kind] for kind in wanted}
        check_replay(
            run, gates.problem, gates.problem.initial([0]), chosen, channel, lambda: Everyone(3)
        )


def _work(gates, folder) -> None:
    carried_out(gates, folder)


def test_a_server_killed_at_any_moment_goes_on_without_a_second_spend(gates, tmp_path):
    """kill -9 of the algorithm's process, again and again, until one of them comes to the end."""
    random, context = np.random.default_rng(), multiprocessing.get_context("fork")
    killed, sizes = 0, []
    for attempt in range(40):
        process = context.Process(target=_work, args=(gates, tmp_path / "run"))
        process.start()
        process.join(
            random.uniform(0.02, 0.25 + 0.05 * attempt)
        )  # on a busy machine it takes longer to come to the questions
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        killed += 1
        sizes.append(
            (tmp_path / "run/journal").stat().st_size if (tmp_path / "run/journal").exists() else 0
        )
    run, progress = carried_out(gates, tmp_path / "run")
    assert killed > 1, "it was too quick to be killed"
    assert len(set(sizes)) > 1, sizes
    assert run.summary["ended"] == "finished"
    assert len(progress) == 12
    assert_charged_once(gates, run.run, 12)
    model = load_file(tmp_path / "run/model.safetensors")
    carried_out(gates, tmp_path / "run", Nobody())
    assert_same(model, tmp_path / "run")


def test_a_journal_that_is_cut_anywhere_leads_to_the_same_end_and_no_second_spend(gates, tmp_path):
    carried_out(gates, tmp_path / "run", order=replace(ORDER, rounds=5, phase=2))
    journal, model = (
        (tmp_path / "run/journal").read_bytes(),
        load_file(tmp_path / "run/model.safetensors"),
    )
    heads = [gate.ledger().head() for gate in gates.gates]
    for cut in np.random.default_rng().integers(0, len(journal), 8):
        (tmp_path / "run/journal").write_bytes(journal[:cut])
        carried_out(gates, tmp_path / "run", order=replace(ORDER, rounds=5, phase=2))
        assert (tmp_path / "run/journal").read_bytes() == journal
        assert_same(model, tmp_path / "run")
    assert [gate.ledger().head() for gate in gates.gates] == heads


def test_a_gate_killed_in_mid_run_is_waited_for_and_no_answer_is_paid_twice(gates, tmp_path):
    run = NetworkRun(
        gates.cards,
        gates.problem,
        ORDER,
        gates.direct(),
        tmp_path / "run",
        key=ASKER,
        timeouts=QUICK,
    )
    for progress in run:
        if progress.iterate == 4:
            gates[1].end(signal.SIGKILL)
            gates[1].launch()  # comes up while the next question is asked
        assert progress.dropped == {}
    gates[1].wait()
    assert run.summary["ended"] == "finished"
    assert_charged_once(gates, run.run, 12)


class Stopping(Whole):
    """Waits for all while they run, and a little while one does not."""

    stopped = False

    def exchange(self, frames, timeout):
        return super().exchange(frames, 0.5 if self.stopped else LIMIT)


def test_a_slow_gate_is_left_behind_at_the_deadline_and_counts_again_when_it_is_back(
    gates, tmp_path, clock
):
    carrier, timeouts = Stopping(gates.sockets), Timeouts(deadline=0.6, limit=1e6, retry=0.3)
    run = NetworkRun(
        gates.cards,
        gates.problem,
        ORDER,
        carrier,
        tmp_path / "run",
        key=ASKER,
        timeouts=timeouts,
        quorum=2,
    )
    answered = []
    for progress in run:
        answered.append(progress.answered)
        if progress.iterate == 3:
            gates[2].process.send_signal(signal.SIGSTOP)
            carrier.stopped = True
        if progress.iterate == 5:
            gates[2].process.send_signal(signal.SIGCONT)
            carrier.stopped = False
    assert all("silo-2" not in a for a in answered[3:5])
    assert answered[-1] == ("silo-0", "silo-1", "silo-2")
    silo = run.summary["silos"][2]
    assert silo["dropped"]["silent"] >= 2
    assert silo["spent_epsilon_at_most"] <= 0.3
    assert len(set(gates[2].charges(run.run))) == len(gates[2].charges(run.run)) <= 12


def test_silos_that_say_no_for_good_end_the_run_with_its_last_iterate(gates, tmp_path):
    run, progress = carried_out(gates, tmp_path / "run", order=replace(ORDER, rounds=18), quorum=2)
    assert len(progress) == 16, "the policy's queries_per_run"
    assert "run-limit" in run.summary["ended"]
    assert (tmp_path / "run/model.safetensors").exists()


def test_cards_that_do_not_agree_and_orders_that_do_not_fit_are_refused_in_a_sentence(
    gates, tmp_path
):
    card = gates.cards[1]
    for changes, wanted in (
        ({"definition": "0" * 64}, "another definition"),
        ({"features": card.features[::-1]}, "another features"),
        ({"rule": "renyi"}, "the rule renyi"),
    ):
        with pytest.raises(BadInput, match=wanted):
            agree([gates.cards[0], replace(card, **changes)], gates.problem)
    with pytest.raises(BadInput, match=r"torch version \(here"):
        agree([replace(c, definition="0" * 64) for c in gates.cards], gates.problem)
    with pytest.raises(BadInput, match="in all"):
        plan_order(replace(ORDER, epsilon=("1e3",)), gates.cards)
    with pytest.raises(BadInput, match="price under the rule gdp"):
        plan_order(replace(ORDER, algorithm="mb-sgd", sampling="poisson:0.1"), gates.cards)
    carried_out(gates, tmp_path / "run", order=replace(ORDER, rounds=4))
    with pytest.raises(BadInput, match="begun with another rounds"):
        carried_out(gates, tmp_path / "run", order=replace(ORDER, rounds=5))
    with pytest.raises(BadInput, match="the records"):
        Card.of({"name": "a", "key": "b" * 64, "records": "many"})


def test_without_noise_the_iterates_are_the_simulations():
    """By gates that draw no noise, which are in no wheel: over real sockets, with real ledgers,
    SPIDER goes where the simulation goes.
    """
    with three_gates(silent=True) as gates:
        made = plan_order(Order("spider", rounds=8, phase=3, epsilon=("3.0",)), gates.cards)
        plan, run = made.plan, made.run
        channel = Remote(gates.cards, gates.direct(), run="silent", key=ASKER, timeouts=QUICK)
        start = gates.problem.initial([0])
        got = list(run(Federation(channel, Everyone(3)), gates.problem, start, **plan.mechanisms))
        simulation = simulated_federation(gates.problem, Records.of(wbcd()), Everyone(3))
        silent = {kind: replace(m, noise_multiplier=0.0) for kind, m in plan.mechanisms.items()}
        wanted = list(run(simulation, gates.problem, start, **silent))
    assert len(got) == 8
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-5
