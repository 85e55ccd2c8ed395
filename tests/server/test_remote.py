"""The channel over a network: what counts as an answer, who is waited for, and what becomes of an
algorithm when silos drop out.
"""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gates import ASKER, LIMIT, Clock
from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.protocol.codec import Answer, Refusal, decode_query, encode_reply
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.core.weights import Weights
from silodp.server.algorithms.prox_svrg import prox_svrg
from silodp.server.algorithms.scaffold import scaffold
from silodp.server.federation import Absent, Everyone, Federation, StopRun
from silodp.server.journal import Journal
from silodp.server.question import Question
from silodp.server.remote import Card, Remote, Timeouts
from silodp.server.replies import Replies
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate
from silodp.silo.ledger.memory import MemoryLedger
from silodp.testing.federation import check_federation, simulated_federation
from silodp.wire.socket import Unreached

QUICK = Timeouts(deadline=LIMIT, limit=LIMIT, retry=30.0)
BRIEF = Timeouts(deadline=0.4, limit=0.4, retry=0.2)


# --- silos in this process, whose replies the tests can spoil ------------------------------------


class Silo:
    """A test's own silo: the real gate around a simulated answerer, which may be asked without
    noise; and the tricks of its courier.
    """

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
        answer = Answer(
            self.name,
            envelope.query_id,
            digest,
            release.value[0],
            release.event,
            len(self.frames),
            "0" * 64,
        )
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
        replies = {
            name: self.silos[name].handle(frame)
            for name, frame in frames.items()
            if name not in self.down
        }
        return {name: reply for name, reply in replies.items() if reply is not None}

    def names(self):
        return [name for name in self.silos if name not in self.down]


def connect(problem, records, **settings) -> tuple[Remote, list[Silo], Local]:
    silos = [Silo(i, problem, records.select([i])) for i in range(len(records))]
    carrier = Local(silos)
    settings = {"run": "run", "key": ASKER, "timeouts": QUICK} | settings
    return Remote([silo.card for silo in silos], carrier, **settings), silos, carrier


def test_the_remote_channel_passes_the_conformance_suite():
    check_federation(
        lambda problem, records, participation: Federation(
            connect(problem, records)[0], participation
        )
    )


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


def test_each_silo_is_asked_with_its_own_noise_and_a_question_is_the_same_bytes_whenever_it_is_asked(  # noqa: E501
    three,
):
    problem, records = three
    frames = []
    for _ in range(2):
        channel, silos, _ = connect(problem, records)
        for _ in range(2):
            channel.ask(
                gradient(problem, torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)), range(3)
            )
        frames.append([frame for silo in silos for frame in silo.frames])
    assert frames[0] == frames[1]
    envelopes = [decode_query(frame, limit=2**20)[0] for frame in frames[0]]
    assert [e.query.mechanism.noise_multiplier for e in envelopes] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert len({e.query_id for e in envelopes}) == 6
    other, silos, _ = connect(problem, records, run="other")
    other.ask(gradient(problem), [0])
    assert decode_query(silos[0].frames[0], limit=2**20)[0].query_id not in {
        e.query_id for e in envelopes
    }


def test_the_carrier_is_told_how_long_a_reply_can_be_and_every_answer_is_within_it(
    three, monkeypatch
):
    channel, silos, carrier = connect(*three)
    told, plain = [], carrier.exchange
    monkeypatch.setattr(
        carrier,
        "exchange",
        lambda frames, timeout: told.append(frames.most) or plain(frames, timeout),
    )
    channel.ask(gradient(three[0]), range(3))
    assert all(
        max(len(reply) for silo in silos for reply in silo.replies) <= most < 2**14 for most in told
    )
    assert told


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
    "a refusal of another question": (
        lambda silo, frame, reply: Refusal("asker", "ab" * 32),
        "forged",
    ),
    "a lasting refusal of no question": (
        lambda silo, frame, reply: encode_reply(Refusal("budget"), silo.key),
        "forged",
    ),
    "a refusal by nobody": (lambda silo, frame, reply: encode_reply(Refusal("budget")), "forged"),
    "a bit of the value": (bent(-3), "forged"),
    "a bit of the signature": (bent(50), "forged"),
    "the last byte gone": (lambda silo, frame, reply: encode_reply(reply, silo.key)[:-1], "forged"),
    "nothing": (lambda silo, frame, reply: b"", "forged"),
    "the question itself": (lambda silo, frame, reply: frame, "forged"),
    "the reply to an earlier question": (
        lambda silo, frame, reply: silo.replies[0] if silo.replies else reply,
        "forged",
    ),
    "endless": (lambda silo, frame, reply: bytes(2**20), "forged"),
    "not a number": (
        lambda silo, frame, reply: replace(reply, value=reply.value * torch.nan),
        "value",
    ),
    "infinite": (
        lambda silo, frame, reply: replace(reply, value=reply.value.double() + torch.inf),
        "value",
    ),
    "beyond all sums": (
        lambda silo, frame, reply: replace(reply, value=reply.value.double() + 1e60),
        "value",
    ),
    "too short": (lambda silo, frame, reply: replace(reply, value=reply.value[:, :-1]), "value"),
    "empty": (lambda silo, frame, reply: replace(reply, value=reply.value[:, :0]), "value"),
    "silence": (lambda silo, frame, reply: None, "silent"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_reply_that_is_not_the_silos_own_finite_answer_to_this_question_does_not_count(
    three, name
):
    problem, records = three
    told = []
    channel, silos, _ = connect(
        problem, records, timeouts=BRIEF, report=lambda t, answers: told.append(t)
    )
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


@pytest.mark.parametrize(
    ("code", "later"),
    [("budget", False), ("expired", False), ("run-limit", False), ("clip", True), ("paused", True)],
)
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


def test_gates_of_an_older_version_end_the_run_in_a_sentence(three):
    problem, records = three
    channel, silos, _ = connect(problem, records, quorum=2)
    for silo in silos[:2]:
        silo.trick = lambda silo, frame, reply: Refusal("version")
    with pytest.raises(
        StopRun,
        match=(
            r"1 of 3 silos answered question 1, and 2 must \(silo-0 version, silo-1 "
            r"version\)\. \(version\): it has an older version"
        ),
    ):
        channel.ask(gradient(problem), range(3))


def test_the_run_goes_on_while_the_quorum_answers_and_ends_with_a_sentence_when_it_does_not(
    three, tmp_path
):
    problem, records = three
    journal = Journal(tmp_path / "journal", "run", "c")
    channel, silos, carrier = connect(problem, records, quorum=2, timeouts=BRIEF, journal=journal)
    carrier.down = {"silo-0"}
    assert channel.ask(gradient(problem), range(3)).silos == (1, 2)
    carrier.down = {"silo-0", "silo-2"}
    size = (tmp_path / "journal").stat().st_size
    with pytest.raises(
        StopRun, match=r"1 of 3 silos answered question 2, and 2 must \(.*silo-2 silent"
    ):
        channel.ask(gradient(problem), range(3))
    assert (tmp_path / "journal").stat().st_size == size, (
        "what ended the run is asked again when it is resumed"
    )
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
    channel, _, carrier = connect(
        problem, records, timeouts=Timeouts(deadline=1.0, limit=5.0, retry=1.0)
    )
    carrier.down = {"silo-1"}
    channel.ask(gradient(problem), range(3))
    begin = clock.now
    assert begin >= 1.0
    for _ in range(5):
        assert channel.ask(gradient(problem), range(3)).silos == (0, 2)
    assert clock.now == begin
    carrier.down = set()
    assert channel.ask(gradient(problem), range(3)).silos == (0, 1, 2)


def test_a_silo_that_the_operator_removed_retires_at_once_and_may_have_paid_for_that_question_alone(
    three, clock
):
    problem, records = three
    told = []
    channel, silos, carrier = connect(
        problem, records, timeouts=QUICK, report=lambda report, answers: told.append(report)
    )
    carrier.down = carrier.removed = {"silo-1"}
    for _ in range(2):
        assert channel.ask(gradient(problem), range(3)).silos == (0, 2)
    assert (clock.now, silos[1].frames, channel.retired) == (0.0, [], {"silo-1": "removed"}), (
        "nobody waits for it"
    )
    assert [report.dropped for report in told] == [{"silo-1": "removed"}, {"silo-1": "retired"}]
    assert [sorted(report.maybe_charged) for report in told] == [
        ["silo-0", "silo-1", "silo-2"],
        ["silo-0", "silo-2"],
    ]


def test_a_silo_whose_ledger_knows_the_question_may_have_paid_for_it():
    codes = {"a": "purged", "b": "id-reused", "c": "statistic", "d": "round"}
    assert Question.replayed((), codes, ()).maybe_charged == {"a", "b", "d"}


def refusing(silo, code, first=1):
    """From its n-th frame on a silo refuses; what it was sent before is lost on the way back."""
    silo.trick = lambda silo, frame, reply: Refusal(code) if len(silo.frames) >= first else None


def test_a_silo_that_was_silent_and_then_refuses_for_good_may_have_been_charged(three, tmp_path):
    problem, records = three
    told, timeouts = [], Timeouts(deadline=5.0, limit=5.0, retry=1.0)
    for _ in range(2):  # also where the journal tells it
        journal = Journal(tmp_path / "journal", "run", "c")
        channel, silos, _ = connect(
            problem,
            records,
            timeouts=timeouts,
            journal=journal,
            report=lambda report, answers: told.append(report),
        )
        refusing(silos[0], "expired")
        refusing(silos[1], "expired", 2)
        channel.ask(gradient(problem), range(3))
        assert channel.charges == {"silo-1": 1, "silo-2": 1}
        journal.close()
    assert [report.maybe_charged for report in told] == [{"silo-1", "silo-2"}] * 2
    assert [report.replayed for report in told] == [False, True]


def test_what_a_killed_server_has_sent_may_be_charged_whatever_the_silo_says_when_it_is_asked_again(
    three, tmp_path
):
    problem, records = three
    told = []
    for killed in (True, False):
        journal = Journal(tmp_path / "journal", "run", "c")
        channel, silos, carrier = connect(
            problem,
            records,
            timeouts=BRIEF,
            journal=journal,
            report=lambda report, answers: told.append(report),
        )
        channel.ask(gradient(problem), range(3))
        if killed:
            carrier.exchange = lambda frames, timeout: 1 / 0  # once they are sent
            with pytest.raises(ZeroDivisionError):
                channel.ask(gradient(problem), range(3))
        else:
            refusing(silos[0], "expired")
            channel.ask(gradient(problem), range(3))
            refusing(silos[1], "expired")
            channel.ask(gradient(problem), [1, 2])
        journal.close()
    assert [sorted(report.maybe_charged) for report in told[2:]] == [
        ["silo-0", "silo-1", "silo-2"],
        ["silo-2"],
    ]


def test_of_a_question_that_stops_a_run_only_those_count_who_may_have_been_charged(three):
    problem, records = three
    channel, silos, carrier = connect(problem, records, timeouts=BRIEF, quorum=3)
    refusing(silos[0], "clip")
    carrier.down = {"silo-1"}
    with pytest.raises(StopRun):
        channel.ask(gradient(problem), range(3))
    assert channel.charges == {"silo-1": 1, "silo-2": 1}


class Streamed(Local):
    """Brings replies one by one, in an order of its own."""

    order = (2, 0, 1)

    def stream(self, frames, timeout):
        for i in self.order:
            if (name := f"silo-{i}") in frames and name not in self.down:
                yield name, self.silos[name].handle(frames[name])
                yield name, b"once more"


def test_the_mean_has_the_same_bits_in_whatever_order_replies_come_and_wherever_they_waited(
    three, monkeypatch
):
    problem, records = three
    found = []
    for order, room in (((0, 1, 2), 2**20), ((2, 0, 1), 2**20), ((2, 1, 0), 0), ((1, 2, 0), 0)):
        monkeypatch.setattr("silodp.server.adding.ROOM", room)
        channel, silos, _ = connect(problem, records)
        channel._carrier = carrier = Streamed(silos)
        carrier.order = order
        noise = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
        for rule in ("equal", "records", "precision"):
            found.append(
                Federation(channel, Everyone(3), Weights(rule, (20, 20, 20))).mean(
                    gradient(problem, noise)
                )
            )
    for i, mean in enumerate(found):
        assert torch.equal(mean, found[i % 3])
    assert not torch.equal(found[0], found[2])


def test_how_long_silos_are_waited_for_follows_from_the_models_size_and_then_from_their_answers():
    small, large = (
        Timeouts.estimated(parameters=1000, records=500),
        Timeouts.estimated(parameters=10**7, records=1000),
    )
    assert (small.retry, small.deadline) == (pytest.approx(10, abs=0.1), pytest.approx(60, abs=0.1))
    assert large.retry > 100
    assert large.deadline > 3 * large.retry - 30
    assert (large.after(None), large.quick.retry) == (large, 10.0)
    assert (large.after(4.0).retry, large.after(4.0).deadline) == (22.0, 96.0)
    assert QUICK.after(4.0) == QUICK, "what the operator says holds"


def test_a_slow_silo_is_not_sent_the_same_bytes_again_before_it_can_have_answered(three, clock):
    problem, records = three
    channel, silos, carrier = connect(
        problem, records, timeouts=Timeouts.estimated(parameters=10**7, records=1000)
    )
    waits, honest = [], carrier.exchange

    def exchange(frames, timeout):
        waits.append(timeout)
        clock.now += 20.0
        return honest(frames, timeout)

    carrier.exchange = exchange
    for _ in range(2):
        channel.ask(gradient(problem), range(3))
    assert waits == [pytest.approx(230), pytest.approx(70)]
    assert [len(silo.frames) for silo in silos] == [2, 2, 2]


def test_the_time_in_which_the_server_works_on_a_reply_is_nobodys_silence(
    three, clock, monkeypatch
):
    problem, records = three
    channel, silos, _ = connect(problem, records, timeouts=BRIEF)
    kept = Replies.keep

    def slowly(self, key, frame):
        clock.now += 100.0
        return kept(self, key, frame)

    monkeypatch.setattr(Replies, "keep", slowly)
    tricks = iter([b"garbled"])
    silos[1].trick = lambda silo, frame, reply: next(tricks, reply)
    assert channel.ask(gradient(problem), range(3)).silos == (0, 1, 2), (
        "whoever waits its turn is asked again"
    )


def test_a_carrier_that_is_gone_is_waited_for_and_then_ends_the_run_in_a_sentence(three):
    problem, records = three
    channel, _, carrier = connect(
        problem, records, timeouts=Timeouts(deadline=1.5, limit=1.5, retry=0.5)
    )
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


# --- algorithms when silos drop out --------------------------------------------------------------


def test_an_svrg_epoch_asks_only_those_who_gave_its_anchor(three):
    problem, records = three
    told = []
    channel, _, carrier = connect(
        problem, records, timeouts=BRIEF, report=lambda t, answers: told.append(t.answered)
    )
    carrier.down = {"silo-0"}
    settings = {"rounds": 8, "inner": 4, "step": 0.1, "slope": 1.0}
    silent = {kind: Gaussian(kind, 1.0, 0.0) for kind in ("anchor", "refine")}
    run = prox_svrg(
        Federation(channel, Everyone(3)), problem, problem.initial([0]), **settings, **silent
    )
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
    mechanism = {
        "rounds": 3,
        "local_steps": 2,
        "step": 0.1,
        "minibatch": Gaussian("minibatch", 1.0, 0.0),
    }
    start = problem.initial([0])
    got = list(scaffold(Federation(channel, Everyone(3)), problem, start, **mechanism))
    wanted = list(
        scaffold(simulated_federation(problem, records, Everyone(3)), problem, start, **mechanism)
    )
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    carrier.down = {"silo-1"}
    with pytest.raises(Absent, match="no silo answered question 10"):
        Federation(channel, Everyone(3)).each()[1].mean(gradient(problem))


def test_an_iterate_that_is_not_finite_ends_the_run(three):
    problem, records = three
    channel, silos, _ = connect(problem, records)
    with pytest.raises(StopRun, match="diverged"):
        channel.ask(
            Query(Grad(torch.full((1, problem.dim), torch.inf)), Gaussian("anchor", 1.0, 0.0)),
            range(3),
        )
    assert silos[0].frames == []
