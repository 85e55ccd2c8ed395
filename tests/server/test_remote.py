"""The channel over a network: what counts as an answer, who is waited for, and that killing anything costs no silo a second time."""

import hashlib
import multiprocessing
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load_file

from gates import ASKER, LIMIT, Clock, three_gates, wbcd
from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.protocol.codec import Answer, Refusal, decode_query, encode_reply
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.server.algorithms.local_sgd import local_sgd
from silodp.server.algorithms.prox_svrg import prox_svrg
from silodp.server.algorithms.scaffold import scaffold
from silodp.server.algorithms.spider import prox_spider
from silodp.server.federation import Absent, Everyone, Federation, StopRun
from silodp.server.journal import Journal
from silodp.server.order import Order
from silodp.server.remote import Card, Remote, Timeouts
from silodp.server.run import Conduct, agree, plan_order
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate
from silodp.silo.ledger.memory import MemoryLedger
from silodp.testing.federation import check_federation, check_replay, simulated_federation
from silodp.wire.hub import Direct
from silodp.wire.socket import Unreached

pytestmark = pytest.mark.xdist_group("remote")  # one set of daemons for all
QUICK = Timeouts(deadline=LIMIT, limit=LIMIT, retry=30.0)
BRIEF = Timeouts(deadline=0.4, limit=0.4, retry=0.2)


# --- silos in this process, whose replies the tests can spoil ------------------------------------------------------------------------


class Silo:
    """A test's own silo: the real gate around a simulated answerer, which may be asked without noise; and the tricks of its courier."""

    def __init__(self, index: int, problem, records: Records) -> None:
        self.key = Ed25519PrivateKey.from_private_bytes(bytes([50 + index]) * 32)
        self.name, counts = f"silo-{index}", records.counts
        ledger = MemoryLedger(GDP(), Budget(np.inf, 1e-6), counts)
        self._gate = Gate(Simulated(problem, records, [0]), ledger, dim=problem.dim, counts=counts)
        self.card = Card(
            self.name,
            self.key.public_key().public_bytes_raw().hex(),
            counts[0],
            3.0,
            1e-6,
            "gdp",
            "x",
            "zero",
            (),
            (),
            problem.dim,
            "0" * 64,
        )
        self.frames: list[bytes] = []
        self.replies: list[bytes] = []
        self.trick = lambda silo, frame, reply: reply

    def handle(self, frame: bytes) -> bytes | None:
        self.frames.append(frame)
        envelope, _, digest = decode_query(frame, limit=2**20)
        release = self._gate.answer(envelope.query, [0])
        answer = Answer(self.name, envelope.query_id, digest, release.value[0], release.event, len(self.frames), "0" * 64)
        reply = self.trick(self, frame, answer)
        if isinstance(reply, Refusal) and not reply.digest:
            reply = Refusal(reply.code, hashlib.sha256(frame).hexdigest())
        raw = encode_reply(reply, self.key) if isinstance(reply, Answer | Refusal) else reply
        if raw is not None:
            self.replies.append(raw)
        return raw


class Local:
    """A carrier to silos in this process."""

    def __init__(self, silos) -> None:
        self.silos = {silo.name: silo for silo in silos}
        self.down: set[str] = set()

    def exchange(self, frames, timeout):
        replies = {name: self.silos[name].handle(frame) for name, frame in frames.items() if name not in self.down}
        return {name: reply for name, reply in replies.items() if reply is not None}

    def names(self):
        return [name for name in self.silos if name not in self.down]


def connect(problem, records, **settings) -> tuple[Remote, list[Silo], Local]:
    silos = [Silo(i, problem, records.select([i])) for i in range(len(records))]
    carrier = Local(silos)
    settings = {"run": "run", "key": ASKER, "timeouts": QUICK} | settings
    return Remote([silo.card for silo in silos], carrier, **settings), silos, carrier


def test_the_remote_channel_passes_the_conformance_suite():
    check_federation(lambda problem, records, participation: Federation(connect(problem, records)[0], participation))


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def three(clock):
    from torch import nn

    from silodp.core.problem.losses import squared_error
    from silodp.core.problem.problem import Problem

    random = np.random.default_rng(0)
    problem = Problem(nn.Linear(3, 1), squared_error)
    records = Records.of([(random.normal(i, 1, (20, 3)), random.normal(size=20)) for i in range(3)])
    return problem, records


def gradient(problem, noise=0.0) -> Query:
    return Query(Grad(torch.zeros(1, problem.dim)), Gaussian("anchor", 1.0, noise))


def test_each_silo_is_asked_with_its_own_noise_and_a_question_is_the_same_bytes_whenever_it_is_asked(three):
    problem, records = three
    frames = []
    for _ in range(2):
        channel, silos, _ = connect(problem, records)
        for _ in range(2):
            channel.ask(gradient(problem, torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)), range(3))
        frames.append([frame for silo in silos for frame in silo.frames])
    assert frames[0] == frames[1]
    envelopes = [decode_query(frame, limit=2**20)[0] for frame in frames[0]]
    assert [e.query.mechanism.noise_multiplier for e in envelopes] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert len({e.query_id for e in envelopes}) == 6
    other, silos, _ = connect(problem, records, run="other")
    other.ask(gradient(problem), [0])
    assert decode_query(silos[0].frames[0], limit=2**20)[0].query_id not in {e.query_id for e in envelopes}


def replaced(**changes):
    return lambda silo, frame, reply: replace(reply, **changes)


def bent(at):
    def trick(silo, frame, reply):
        raw = encode_reply(reply, silo.key)
        return raw[: at % len(raw)] + bytes([raw[at % len(raw)] ^ 1]) + raw[at % len(raw) + 1 :]

    return trick


THIEF = Ed25519PrivateKey.from_private_bytes(bytes([9]) * 32)
SPOILT = {
    "another silo's name": (replaced(silo="silo-2"), "forged"),
    "another question's id": (replaced(query_id="other"), "forged"),
    "another question's content": (replaced(digest="1" * 64), "forged"),
    "another's signature": (lambda silo, frame, reply: encode_reply(reply, THIEF), "forged"),
    "no signature": (lambda silo, frame, reply: encode_reply(reply), "forged"),
    "a refusal of another question": (lambda silo, frame, reply: Refusal("asker", "ab" * 32), "forged"),
    "a lasting refusal of no question": (lambda silo, frame, reply: encode_reply(Refusal("budget"), silo.key), "forged"),
    "a refusal by nobody": (lambda silo, frame, reply: encode_reply(Refusal("budget")), "forged"),
    "a bit of the value": (bent(-3), "forged"),
    "a bit of the signature": (bent(50), "forged"),
    "the last byte gone": (lambda silo, frame, reply: encode_reply(reply, silo.key)[:-1], "forged"),
    "nothing": (lambda silo, frame, reply: b"", "forged"),
    "the question itself": (lambda silo, frame, reply: frame, "forged"),
    "the reply to an earlier question": (lambda silo, frame, reply: silo.replies[0] if silo.replies else reply, "forged"),
    "endless": (lambda silo, frame, reply: bytes(2**20), "forged"),
    "not a number": (lambda silo, frame, reply: replace(reply, value=reply.value * torch.nan), "value"),
    "infinite": (lambda silo, frame, reply: replace(reply, value=reply.value.double() + torch.inf), "value"),
    "beyond all sums": (lambda silo, frame, reply: replace(reply, value=reply.value.double() + 1e60), "value"),
    "too short": (lambda silo, frame, reply: replace(reply, value=reply.value[:, :-1]), "value"),
    "empty": (lambda silo, frame, reply: replace(reply, value=reply.value[:, :0]), "value"),
    "silence": (lambda silo, frame, reply: None, "silent"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_reply_that_is_not_the_silos_own_finite_answer_to_this_question_does_not_count(three, name):
    problem, records = three
    told = []
    channel, silos, _ = connect(problem, records, timeouts=BRIEF, report=lambda t, answers: told.append(t))
    channel.ask(gradient(problem), range(3))
    trick, code = SPOILT[name]
    silos[1].trick = trick
    got = channel.ask(gradient(problem), range(3))
    assert (got.silos, tuple(got.value.shape)) == ((0, 2), (1, 2, problem.dim))
    assert told[-1].dropped == {"silo-1": code}
    silos[1].trick = lambda silo, frame, reply: reply
    assert channel.ask(gradient(problem), range(3)).silos == (0, 1, 2), "one bad reply is one reply"


def test_whoever_is_garbled_or_busy_is_sent_the_same_bytes_again(three):
    problem, records = three
    channel, silos, _ = connect(problem, records)
    tricks = iter([b"garbled", None, Refusal("busy"), Refusal("stopping")])
    silos[1].trick = lambda silo, frame, reply: next(tricks, reply)
    assert channel.ask(gradient(problem), range(3)).silos == (0, 1, 2)
    assert len(set(silos[1].frames)) == 1
    assert len(silos[1].frames) == 5
    assert len(silos[0].frames) == 1


@pytest.mark.parametrize(("code", "later"), [("budget", False), ("expired", False), ("run-limit", False), ("clip", True), ("paused", True)])
def test_a_silo_without_budget_retires_and_other_refusals_are_of_one_question(three, code, later):
    problem, records = three
    channel, silos, _ = connect(problem, records, timeouts=BRIEF)
    silos[0].trick = lambda silo, frame, reply: Refusal(code)
    assert channel.ask(gradient(problem), range(3)).silos == (1, 2)
    sent = len(silos[0].frames)
    silos[0].trick = lambda silo, frame, reply: reply
    assert channel.ask(gradient(problem), range(3)).silos == ((0, 1, 2) if later else (1, 2))
    assert (len(silos[0].frames) > sent) == later
    assert channel.retired == ({} if later else {"silo-0": code})


def test_the_run_goes_on_while_the_quorum_answers_and_ends_with_a_sentence_when_it_does_not(three, tmp_path):
    problem, records = three
    journal = Journal(tmp_path / "journal", "run", "c")
    channel, silos, carrier = connect(problem, records, quorum=2, timeouts=BRIEF, journal=journal)
    carrier.down = {"silo-0"}
    assert channel.ask(gradient(problem), range(3)).silos == (1, 2)
    carrier.down = {"silo-0", "silo-2"}
    size = (tmp_path / "journal").stat().st_size
    with pytest.raises(StopRun, match=r"1 of 3 silos answered question 2, and 2 must \(.*silo-2 silent"):
        channel.ask(gradient(problem), range(3))
    assert (tmp_path / "journal").stat().st_size == size, "what ended the run is asked again when it is resumed"
    journal.close()
    channel, silos, _ = connect(problem, records, quorum=2, timeouts=BRIEF)
    for silo in silos[:2]:
        silo.trick = lambda silo, frame, reply: Refusal("budget") if len(silo.frames) > 1 else reply
    channel.ask(gradient(problem), range(3))
    with pytest.raises(StopRun, match="silo-0 budget, silo-1 budget"):
        channel.ask(gradient(problem), range(3))
    with pytest.raises(BadInput, match="quorum is 4"):
        connect(problem, records, quorum=4)


def test_who_was_silent_is_not_waited_for_until_seen_again(three, clock):
    problem, records = three
    channel, _, carrier = connect(problem, records, timeouts=Timeouts(deadline=1.0, limit=5.0, retry=1.0))
    carrier.down = {"silo-1"}
    channel.ask(gradient(problem), range(3))
    begin = clock.now
    assert begin >= 1.0
    for _ in range(5):
        assert channel.ask(gradient(problem), range(3)).silos == (0, 2)
    assert clock.now == begin
    carrier.down = set()
    assert channel.ask(gradient(problem), range(3)).silos == (0, 1, 2)


def test_a_carrier_that_is_gone_is_waited_for_and_then_ends_the_run_in_a_sentence(three):
    problem, records = three
    channel, _, carrier = connect(problem, records, timeouts=Timeouts(deadline=1.5, limit=1.5, retry=0.5))
    honest, left = carrier.exchange, iter(range(3))

    def exchange(frames, timeout):
        if next(left, None) is None:
            return honest(frames, timeout)
        raise Unreached("unreachable")

    carrier.exchange = exchange
    assert channel.ask(gradient(problem), range(3)).silos == (0, 1, 2)
    left = iter(range(1000))
    with pytest.raises(StopRun, match=r"engine cannot be reached \(unreachable\)"):
        channel.ask(gradient(problem), range(3))

    def broken(frames, timeout):
        raise ZeroDivisionError

    carrier.exchange = broken
    with pytest.raises(ZeroDivisionError):
        channel.ask(gradient(problem), range(3))


# --- algorithms when silos drop out ---------------------------------------------------------------------------------------------------


def test_an_svrg_epoch_asks_only_those_who_gave_its_anchor(three):
    problem, records = three
    told = []
    channel, _, carrier = connect(problem, records, timeouts=BRIEF, report=lambda t, answers: told.append(t.answered))
    carrier.down = {"silo-0"}
    settings = {"rounds": 8, "inner": 4, "step": 0.1, "slope": 1.0}
    silent = {kind: Gaussian(kind, 1.0, 0.0) for kind in ("anchor", "refine")}
    run = prox_svrg(Federation(channel, Everyone(3)), problem, problem.initial([0]), **settings, **silent)
    next(run)
    carrier.down = set()
    next(run)
    carrier.down = {"silo-2"}
    next(run)
    carrier.down = set()
    list(run)
    both, one, every = ("silo-1", "silo-2"), ("silo-1",), ("silo-0", "silo-1", "silo-2")
    assert told == [both, both, one, both, every, every, every, every]


def test_scaffold_asks_silo_by_silo_and_ends_cleanly_where_one_is_absent(three):
    problem, records = three
    channel, _, carrier = connect(problem, records, timeouts=BRIEF)
    mechanism = {"rounds": 3, "local_steps": 2, "step": 0.1, "minibatch": Gaussian("minibatch", 1.0, 0.0)}
    start = problem.initial([0])
    got = list(scaffold(Federation(channel, Everyone(3)), problem, start, **mechanism))
    wanted = list(scaffold(simulated_federation(problem, records, Everyone(3)), problem, start, **mechanism))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    carrier.down = {"silo-1"}
    with pytest.raises(Absent, match="nobody answered question 10"):
        Federation(channel, Everyone(3)).each()[1].mean(gradient(problem))


def test_an_iterate_that_is_not_finite_ends_the_run(three):
    problem, records = three
    channel, silos, _ = connect(problem, records)
    with pytest.raises(StopRun, match="diverged"):
        channel.ask(Query(Grad(torch.full((1, problem.dim), torch.inf)), Gaussian("anchor", 1.0, 0.0)), range(3))
    assert silos[0].frames == []


# --- real gates -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gates():
    with three_gates(queries_per_run=16) as made:
        yield made


ORDER = Order("spider", rounds=12, phase=4, epsilon=("0.3",))


def carried_out(gates, folder, carrier=None, order=ORDER, **settings) -> tuple[Conduct, list]:
    run = Conduct(gates.cards, gates.problem, order, carrier or gates.direct(), folder, key=ASKER, **{"timeouts": QUICK} | settings)
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


def test_a_run_trains_spends_what_was_planned_and_is_replayed_without_a_network_bit_for_bit(gates, tmp_path):
    before = [gate.ledger().used() for gate in gates.gates]
    run, progress = carried_out(gates, tmp_path / "run")
    assert run.summary["ended"] == "finished"
    assert [p.iterate for p in progress] == list(range(1, 13))
    assert all(p.answered == ("silo-0", "silo-1", "silo-2") and not p.dropped and not p.replayed for p in progress)
    assert_charged_once(gates, run.run, 12)
    for gate, used, silo in zip(gates.gates, before, run.summary["silos"], strict=True):
        assert 0.29 < silo["spent_epsilon_at_most"] <= 0.3
        assert (silo["ledger"]["count"], silo["answered"]) == (gate.ledger().head()[0] - 2, 12), (
            "then the answer is stored, and the hold released"
        )
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
        ("spider", lambda *a, **k: prox_spider(*a, rounds=4, phase=2, step=0.3, slope=1.0, **k), ("anchor", "refine")),
        ("svrg", lambda *a, **k: prox_svrg(*a, rounds=4, inner=2, step=0.3, slope=1.0, **k), ("anchor", "refine")),
        ("local", lambda *a, **k: local_sgd(*a, rounds=2, local_steps=2, step=0.3, **k), ("minibatch",)),
        ("scaffold", lambda *a, **k: scaffold(*a, rounds=2, local_steps=2, step=0.3, **k), ("minibatch",)),
    ):
        channel = Remote(gates.cards, gates.direct(), run=f"replay-{name}", key=ASKER, timeouts=QUICK)
        chosen = {kind: kinds[kind] for kind in wanted}
        check_replay(run, gates.problem, gates.problem.initial([0]), chosen, channel, lambda: Everyone(3))


def _work(gates, folder) -> None:
    carried_out(gates, folder)


def test_a_server_killed_at_any_moment_goes_on_without_a_second_spend(gates, tmp_path):
    """kill -9 of the algorithm's process, again and again, until one of them comes to the end."""
    random, context = np.random.default_rng(), multiprocessing.get_context("fork")
    killed, sizes = 0, []
    for attempt in range(40):
        process = context.Process(target=_work, args=(gates, tmp_path / "run"))
        process.start()
        process.join(random.uniform(0.02, 0.25 + 0.05 * attempt))  # on a busy machine it takes longer to come to the questions
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        killed += 1
        sizes.append((tmp_path / "run/journal").stat().st_size if (tmp_path / "run/journal").exists() else 0)
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
    journal, model = (tmp_path / "run/journal").read_bytes(), load_file(tmp_path / "run/model.safetensors")
    heads = [gate.ledger().head() for gate in gates.gates]
    for cut in np.random.default_rng().integers(0, len(journal), 8):
        (tmp_path / "run/journal").write_bytes(journal[:cut])
        carried_out(gates, tmp_path / "run", order=replace(ORDER, rounds=5, phase=2))
        assert (tmp_path / "run/journal").read_bytes() == journal
        assert_same(model, tmp_path / "run")
    assert [gate.ledger().head() for gate in gates.gates] == heads


def test_a_gate_killed_in_mid_run_is_waited_for_and_no_answer_is_paid_twice(gates, tmp_path):
    run = Conduct(gates.cards, gates.problem, ORDER, gates.direct(), tmp_path / "run", key=ASKER, timeouts=QUICK)
    for progress in run:
        if progress.iterate == 4:
            gates[1].end(signal.SIGKILL)
            gates[1].launch()  # comes up while the next question is asked
        assert progress.dropped == {}
    gates[1].wait()
    assert run.summary["ended"] == "finished"
    assert_charged_once(gates, run.run, 12)


class Stopping(Direct):
    """Waits for all while they run, and a little while one does not."""

    stopped = False

    def exchange(self, frames, timeout):
        return super().exchange(frames, 0.5 if self.stopped else LIMIT)


def test_a_slow_gate_is_left_behind_at_the_deadline_and_counts_again_when_it_is_back(gates, tmp_path, clock):
    carrier, timeouts = Stopping(gates.sockets), Timeouts(deadline=0.6, limit=1e6, retry=0.3)
    run = Conduct(gates.cards, gates.problem, ORDER, carrier, tmp_path / "run", key=ASKER, timeouts=timeouts, quorum=2)
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


def test_cards_that_do_not_agree_and_orders_that_do_not_fit_are_refused_in_a_sentence(gates, tmp_path):
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
        Card.of({"name": "a", "key": "b", "records": "many"})


def test_without_noise_the_iterates_are_the_simulations():
    """By gates that draw no noise, which are in no wheel: over real sockets, with real ledgers, SPIDER goes where the simulation goes."""
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
