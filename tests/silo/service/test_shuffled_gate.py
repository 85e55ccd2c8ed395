"""The gate in a shuffle: what leaves is a box for the shuffler alone, priced by all the noise and
recorded with the silo's own.
"""

import json
import random
import warnings
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import nn

from silodp.core.errors import BadInput, Refused
from silodp.core.events import TotalEvent
from silodp.core.figures import HOLDS, rounded_up
from silodp.core.mechanisms import Gaussian, Masked, Shuffled
from silodp.core.privacy.accounting import GDP, Renyi, gdp_epsilon
from silodp.core.problem.losses import cross_entropy, squared_error
from silodp.core.problem.problem import Problem
from silodp.core.protocol.box import box_length, open_box
from silodp.core.protocol.codec import (
    REPLY,
    Answer,
    Envelope,
    Refusal,
    Sealed,
    decode_query,
    decode_reply,
    encode_query,
)
from silodp.core.protocol.quote import HoldRequest, decode_hold_reply, encode_hold
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson
from silodp.core.statistics import (
    ClassCounts,
    Grad,
    GradDiff,
    Gram,
    Histogram,
    LocalSteps,
    MissingRates,
    Moments,
)
from silodp.silo.answer import exact, lattice
from silodp.silo.data.records import Records
from silodp.silo.ledger.durable import DurableLedger, Identity, QueryLedger
from silodp.silo.service.door import Door, definition_hash
from silodp.silo.service.policy import SAMPLINGS, STATISTICS, Policy, Shuffling
from silodp.silo.service.sealing import Sealer

SERVER, SILO, PSEUDONYM = (Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 2, 4))
SHUFFLER = X25519PrivateKey.from_private_bytes(bytes([5]) * 32)
N, FEATURES = 40, 3
PROBLEM = Problem(nn.Sequential(nn.Linear(FEATURES, 2)), cross_entropy)
D = PROBLEM.dim
W = torch.linspace(-1, 1, D)[None]
POLICY = Policy(
    silo="hospital-a",
    epsilon=2.0,
    delta=1e-5,
    definition=definition_hash(PROBLEM),
    statistics=STATISTICS,
    samplings=SAMPLINGS,
    clip=(1e-6, 10.0),
    minimum_noise_multiplier=1.0,
    minimum_batch=4,
    maximum_local_steps=3,
    queries_per_run=1000,
    queries_per_hour=100_000,
    expires=date(9998, 1, 1),
    askers=(SERVER.public_key().public_bytes_raw().hex(),),
)
SHUFFLING = Shuffling(SHUFFLER.public_key().public_bytes_raw().hex(), "pseudonym.key", 10, 2)

SHARE = {"noise_multiplier": 4.0, "counted": 5}


def silo(folder, *, shuffling=SHUFFLING, rule=None, data=None) -> tuple[Door, DurableLedger]:
    rng = np.random.default_rng(5)
    x, y = data or (rng.normal(size=(N, FEATURES)).astype(np.float32), rng.integers(0, 2, N))
    folder.mkdir(exist_ok=True)
    about = {
        "rule": rule or GDP(),
        "budget": POLICY.budget,
        "records": len(y),
        "identity": Identity.of(x, y),
    }
    ledger = DurableLedger.create(folder / "ledger.db", **about, registry=folder / "registry")
    trust = Sealer(shuffling, PSEUDONYM) if shuffling else None
    door = Door(
        POLICY,
        PROBLEM,
        Records.of([(x, y)]),
        ledger,
        signing_key=SILO,
        trust=trust,
        registry=folder / "registry",
    )
    return door, ledger


def asked(
    query_id: str, statistic=None, *, clip=1.0, round="0", of=POLICY.silo, **changes
) -> tuple[Envelope, bytes]:
    mechanism = Shuffled("anchor", clip, **SHARE | changes)
    envelope = Envelope(
        of,
        "run-1",
        query_id,
        POLICY.definition,
        Query(Grad(W) if statistic is None else statistic, mechanism),
        round,
    )
    return envelope, encode_query(envelope, SERVER)


def reply(door: Door, frame: bytes) -> Sealed | Refusal:
    got = decode_reply(door.handle(frame), limit=10**6)
    assert isinstance(got, Sealed | Refusal)
    return got


def code(door: Door, frame: bytes) -> str:
    got = reply(door, frame)
    return got.code if isinstance(got, Refusal) else "answered"


def noisy(door: Door, query_id: str, noise: float = 8.0) -> str:
    """What becomes of a question with Gaussian noise, whose answer goes to no shuffler."""
    query = Query(Grad(W), Gaussian("anchor", 1.0, noise))
    got = decode_reply(
        door.handle(
            encode_query(Envelope(POLICY.silo, "run-1", query_id, POLICY.definition, query), SERVER)
        ),
        limit=10**6,
    )
    assert isinstance(got, Answer | Refusal)
    return got.code if isinstance(got, Refusal) else "answered"


def test_a_question_that_was_signed_for_another_silo_does_not_use_up_the_round(tmp_path):
    door, ledger = silo(tmp_path)
    assert code(door, asked("q-of-another", of="another-silo")[1]) == "silo"
    assert ledger.head()[0] == 0
    assert code(door, asked("q-of-its-own")[1]) == "answered"


def test_the_answer_is_a_box_that_only_the_shuffler_opens_on_the_silos_condition(tmp_path):
    door, ledger = silo(tmp_path)
    envelope, frame = asked("q1")
    got = reply(door, frame)
    assert isinstance(got, Sealed)
    assert (got.silo, got.query_id, got.digest) == (
        "hospital-a",
        "q1",
        decode_query(frame, limit=10**6)[2],
    )
    assert len(got.box) == box_length(D)
    contribution, key = open_box(got.box, envelope.shuffle_round, SHUFFLER)
    assert key == PSEUDONYM.public_key().public_bytes_raw().hex()
    assert contribution.demanded == 5 + 2
    assert contribution.numbers.shape == (D,)
    entry = next(iter(ledger.entries()))
    assert json.loads(entry.event)["counted"] == 5
    assert entry.amount == pytest.approx(1 / (5 * 16), rel=1e-12)
    assert ledger.spent() == pytest.approx(gdp_epsilon((5 * 16) ** -0.5, 1e-5), rel=1e-9)
    assert ledger.local() == pytest.approx(gdp_epsilon(1 / 4, 1e-5), rel=1e-9)
    assert ledger.local() > 1.5 * ledger.spent()
    ledger.verify()


def test_no_number_is_in_the_reply_or_in_the_ledger(tmp_path):
    door, _ = silo(tmp_path)
    envelope, frame = asked("q1")
    raw = door.handle(frame)
    got = decode_reply(raw, limit=10**6)
    numbers = open_box(got.box, envelope.shuffle_round, SHUFFLER)[0].numbers
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for entry in (raw, kept):
        assert not any(
            np.asarray(part).tobytes() in entry
            for part in (numbers[:2], numbers[:2].astype(np.float64), numbers[:3].astype("i4"))
        )


def test_silos_asked_the_same_have_one_round_and_any_other_question_has_another():
    one, other = asked("q1")[0], asked("q2", of="another-silo")[0]
    assert one.shuffle_round == other.shuffle_round
    different = [
        asked("q1", round="1")[0],
        asked("q1", clip=2.0)[0],
        asked("q1", Grad(W + 1e-6))[0],
        asked("q1", noise_multiplier=4.5)[0],
        asked("q1", counted=4)[0],
        replace(one, run="run-2"),
        replace(one, model="0" * 64),
    ]
    assert len({one.shuffle_round, *(e.shuffle_round for e in different)}) == 8


def test_a_repeated_question_gets_the_same_box_and_no_second_charge(tmp_path):
    door, ledger = silo(tmp_path)
    _, frame = asked("q1")
    assert door.handle(frame) == door.handle(frame)
    assert [entry.act for entry in ledger.entries()] == ["charge", "answer"]


def test_a_round_is_answered_once_whatever_the_query_ids_and_pseudonyms(tmp_path):
    """Two boxes of one silo in one total would move it twice as far as it was priced for."""
    door, ledger = silo(tmp_path)
    assert code(door, asked("q1")[1]) == "answered"
    assert code(door, asked("q2")[1]) == "round"
    door._trust = Sealer(
        SHUFFLING,
        Ed25519PrivateKey.generate(),
    )  # a new pseudonym, with the old one still on the roster
    assert code(door, asked("q3")[1]) == "round"
    assert code(door, asked("q1")[1]) == "answered"
    assert [entry.act for entry in ledger.entries()] == ["charge", "answer"]
    assert code(door, asked("q4", round="1")[1]) == "answered"
    again = DurableLedger.open(tmp_path / "ledger.db")
    again.verify()
    ledger_of_query = again.for_query(
        query_id="q5",
        digest=b"x" * 32,
        kind="anchor",
        asker="a",
        run="r",
        generation=0,
        round=asked("q5")[0].shuffle_round,
    )
    with pytest.raises(Refused, match="round"):
        ledger_of_query.charge(asked("q5")[0].query.event(), [0])
    with pytest.raises(Refused, match="round"):
        again.for_query(
            query_id="q6", digest=b"x" * 32, kind="anchor", asker="a", run="r", generation=0
        ).charge(asked("q6")[0].query.event(), [0])


def test_what_the_shuffler_may_learn_counts_the_servers_answers_too_and_can_be_limited(tmp_path):
    door, ledger = silo(tmp_path / "a")
    assert code(door, asked("q1")[1]) == "answered"
    alone = ledger.local()
    for i in range(3):
        assert noisy(door, f"g{i}") == "answered"
    assert ledger.local() > 1.05 * alone
    strict, kept = silo(
        tmp_path / "b", shuffling=replace(SHUFFLING, maximum_local_epsilon=1.01 * alone)
    )
    assert code(strict, asked("q1")[1]) == "answered"
    assert code(strict, asked("q2", round="1")[1]) == "local"
    assert kept.local() == pytest.approx(alone)


def test_the_ledger_shows_what_server_and_shuffler_may_learn_and_when_that_holds(tmp_path, silodp):
    door, ledger = silo(tmp_path / "a")
    assert code(door, asked("q1")[1]) == "answered"
    exit_code, text, _ = silodp("ledger", "show", ledger.path, of=())
    assert exit_code == 0
    text = " ".join(text.split())
    assert (
        f"used: epsilon {rounded_up(ledger.spent(), 4)} of {POLICY.epsilon:g} against "
        "the server, which sees totals"
    ) in text
    assert (
        "Against an observer of this silo's own numbers (the shuffler itself, or under masks "
        "all other silos and the server together): epsilon "
        f"{rounded_up(ledger.local(), 4)}."
    ) in text
    assert HOLDS in text


def test_the_limit_on_what_the_shuffler_may_learn_is_a_filter(tmp_path):
    limit = gdp_epsilon(2.5**0.5 / 4, POLICY.delta)
    strict, kept = silo(tmp_path, shuffling=replace(SHUFFLING, maximum_local_epsilon=limit))
    codes = [code(strict, asked(f"q{i}", round=str(i))[1]) for i in range(4)]
    assert codes == ["answered", "answered", "local", "local"]
    assert kept.local() == pytest.approx(gdp_epsilon(2**0.5 / 4, POLICY.delta), rel=1e-9)


def test_gaussian_answers_stop_at_the_limit_of_what_the_shuffler_may_learn(tmp_path):
    """It learns them from the server: a limit that only totals had would be passed by whoever asks
    for totals first.
    """
    door, ledger = silo(tmp_path / "a")
    assert code(door, asked("q1")[1]) == "answered"
    strict, kept = silo(
        tmp_path / "b", shuffling=replace(SHUFFLING, maximum_local_epsilon=1.2 * ledger.local())
    )
    assert code(strict, asked("q1")[1]) == "answered"
    codes = [noisy(strict, f"g{i}") for i in range(12)]
    assert codes == sorted(codes)
    assert {"answered", "local"} == set(codes)
    assert kept.local() <= 1.2 * ledger.local()
    assert sum(entry.act == "charge" for entry in kept.entries()) == 1 + codes.count("answered")
    assert noisy(strict, "g0") == "answered", "what was stored may be had again"


def test_of_two_processes_that_both_find_room_for_one_answer_only_one_is_charged(tmp_path):
    door, ledger = silo(tmp_path)
    assert code(door, asked("q1")[1]) == "answered"
    about = {
        "digest": b"x" * 32,
        "kind": "anchor",
        "asker": "a",
        "run": "r",
        "generation": 0,
        "most_local": 1.01 * ledger.local(),
    }
    _, kept = silo(tmp_path / "b")
    queries = [
        DurableLedger.open(kept.path).for_query(
            query_id=name, round=asked(name, round=name)[0].shuffle_round, **about
        )
        for name in ("q1", "q2")
    ]
    queries[0].charge(asked("q1")[0].query.event(), [0])
    with pytest.raises(Refused, match="local"):
        queries[1].charge(asked("q2")[0].query.event(), [0])
    assert [entry.query_id for entry in kept.entries()] == ["q1"]


def test_a_gate_that_died_between_charge_and_answer_answers_within_the_same_limit(
    tmp_path, monkeypatch
):
    door, ledger = silo(tmp_path / "a")
    assert code(door, asked("q1")[1]) == "answered"
    strict, kept = silo(
        tmp_path / "b", shuffling=replace(SHUFFLING, maximum_local_epsilon=1.01 * ledger.local())
    )
    with monkeypatch.context() as broken:
        broken.setattr(QueryLedger, "store", lambda ledger_of_query, answer: 1 / 0)
        assert code(strict, asked("q1")[1]) == "internal"
    assert [entry.act for entry in kept.entries()] == ["charge"]
    assert code(strict, asked("q1")[1]) == "answered"
    assert kept.local() == pytest.approx(ledger.local())


def test_a_clip_of_zero_says_nothing_of_a_record_whose_gradient_is_not_finite(tmp_path):
    """The suite turns a warning into an error, which would be caught as a computation that failed:
    so what was warned of is looked at.
    """
    x = np.ones((N, FEATURES), np.float32)
    x[0] = 1e30
    steep = Problem(nn.Sequential(nn.Linear(FEATURES, 1)), squared_error)
    counts = exact.Exact(steep, Records.of([(x, np.zeros(N))]), partition=None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        counts.answer(
            Query(
                Grad(torch.full((1, steep.dim), 1e300, dtype=torch.float64)),
                Shuffled("anchor", 0.0, **SHARE),
            ),
            [0],
        )
    assert warned == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"counted": 9}, "contributions"),  # ten in all, of which two may add nothing
        ({"counted": 8}, "answered"),
        ({"counted": 0}, "noise"),
        ({"counted": -1}, "noise"),
        ({"noise_multiplier": 0.0}, "noise"),
        ({"noise_multiplier": -4.0}, "noise"),
        ({"noise_multiplier": 0.4}, "noise"),  # below the policy's least multiplier
        ({"noise_multiplier": 0.5}, "budget"),
        ({"noise_multiplier": 1e12}, "noise"),  # beyond the lattice
        ({"statistic": LocalSteps(W, 1, 0.1)}, "statistic"),
        ({"sampling": Poisson(0.5)}, "sampling"),
        ({"clip": 11.0}, "clip"),
        ({"clip": 0.0}, "answered"),
        ({"sampling": DisjointBatches(4, 1)}, "answered"),
        ({"statistic": GradDiff(W, W * 0.5)}, "answered"),
        ({"statistic": Histogram(torch.tensor([0.0]), FEATURES), "clip": 2.0}, "answered"),
        (
            {"statistic": Moments(-torch.ones(FEATURES), torch.ones(FEATURES)), "clip": 3.0},
            "answered",
        ),
        ({"statistic": ClassCounts(2), "clip": 0.7}, "clip"),  # below half of its reach
        ({"statistic": ClassCounts(2), "clip": 0.75}, "answered"),
        ({"statistic": MissingRates(FEATURES), "clip": 1.0}, "answered"),
        ({"statistic": Gram(FEATURES, 2, 1.0, 1.0), "clip": 0.75}, "answered"),
    ],
)
def test_what_is_answered_and_what_is_refused(tmp_path, changes, expected):
    door, ledger = silo(tmp_path)
    statistic = changes.pop("statistic", None)
    assert code(door, asked("q1", statistic, **changes)[1]) == expected
    assert (ledger.head()[0] > 0) == (expected == "answered")


def test_a_question_for_masked_totals_is_refused_and_not_charged(tmp_path):
    """Its cohort is no part of the shuffler's condition."""
    door, ledger = silo(tmp_path)
    query = Query(Grad(W), Masked("anchor", 1.0, **SHARE))
    envelope = Envelope(POLICY.silo, "run-1", "q1", POLICY.definition, query, "0", 0, b"cohort")
    assert code(door, encode_query(envelope, SERVER)) == "masks"
    assert ledger.head()[0] == 0


def test_hostile_numbers_get_a_code_and_never_pass_the_budget(tmp_path):
    door, ledger = silo(tmp_path)
    rng = random.Random(7)
    silos = [1, 2, 5, 8, 9, 0, -1, 2**16, 2**31, 2**52, -(2**53), 2**53]
    shares = [4.0, 4.0, 6.0, 0.5, 0.0, -1.0, 1e300, 5e-324, 1e-6, 2.0**40]
    seen = set()
    for i in range(400):
        noise = {"noise_multiplier": rng.choice(shares), "counted": rng.choice(silos)}
        clip = rng.choice([1.0, 1.0, 0.0, -1.0, 1e-7, 1e300, 5e-324])
        seen.add(code(door, asked(f"q{i}", clip=clip, round=f"{i}", **noise)[1]))
        assert ledger.spent() <= POLICY.epsilon
    assert {"answered", "noise", "clip", "contributions", "budget"} <= seen
    assert "internal" not in seen
    ledger.verify()


def test_a_silo_without_a_shuffler_or_with_another_rule_answers_nothing(tmp_path):
    assert code(silo(tmp_path / "a", shuffling=None)[0], asked("q1")[1]) == "shuffle"
    door, ledger = silo(tmp_path / "b", rule=Renyi(8.0))
    assert code(door, asked("q1")[1]) == "rule"
    assert ledger.head()[0] == 0


def test_a_gaussian_question_is_priced_in_the_same_budget(tmp_path):
    door, ledger = silo(tmp_path)
    assert noisy(door, "g", 40.0) == "answered"
    before = ledger.used()
    assert code(door, asked("q1")[1]) == "answered"
    assert ledger.used() > before > 0


def test_totals_stop_at_the_budget(tmp_path):
    door, ledger = silo(tmp_path)
    codes = [code(door, asked(f"q{i}", round=f"{i}")[1]) for i in range(200)]
    assert codes.count("answered") == codes.index("budget") > 3
    assert ledger.spent() <= POLICY.epsilon
    ledger.verify()


def test_without_noise_the_numbers_are_the_clipped_sum(tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(N, FEATURES)).astype(np.float32), rng.integers(0, 2, N)
    x[3] = np.nan  # counts as zero
    residual = torch.softmax(
        torch.from_numpy(x).double() @ W[0, :6].reshape(2, 3).T.double() + W[0, 6:].double(), 1
    ) - nn.functional.one_hot(torch.from_numpy(y), 2)
    each = torch.cat(
        [(residual[:, :, None] * torch.from_numpy(x).double()[:, None]).flatten(1), residual], 1
    ).nan_to_num(0.0)
    each[3] = 0
    clipped = each / each.norm(dim=1, keepdim=True).clamp(min=0.7) * 0.7
    answerer = exact.Exact(
        PROBLEM, Records.of([(x, y)]), partition=lambda name, batches: np.arange(N)
    )
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))
    mechanism = Shuffled("a", 0.7, 1.0, counted=2)
    value = answerer.answer(Query(Grad(W), mechanism), [0]).flatten()
    assert mechanism.shift(D) > 0
    found = mechanism.mean_in(value[None], 1)[0]
    rounded = float(mechanism.steps(D)) / 2
    assert torch.allclose(found, clipped.sum(0), atol=N * 2.0**-16 + rounded)


def test_a_record_on_which_the_model_raises_takes_no_other_with_it(tmp_path):
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(FEATURES, 2)

        def forward(self, x):
            return self.inner(x)

    answerer = exact.Exact(
        Problem(Picky(), cross_entropy),
        Records.of([(np.full((5, FEATURES), 1e30), np.zeros(5, int))]),
        partition=None,
    )
    mechanism = Shuffled("a", 1.0, 1.0, counted=2)
    numbers = answerer.answer(Query(Grad(W), mechanism), [0])
    assert numbers.dtype == torch.int64
    assert float(numbers.abs().max() * mechanism.steps(D)) < 5 + 2 * 8


def test_the_policys_table_is_read_and_what_is_wrong_with_it_is_said(tmp_path):
    path = tmp_path / "policy.toml"
    good = (
        f'[shuffle]\nshuffler = "{"a" * 64}"\npseudonym = "p.key"\nmembers = 100\ncolluding = 0\n'
    )
    path.write_text(good)
    found = Shuffling.load(path)
    assert found is not None
    assert found.pseudonym == str(tmp_path / "p.key")
    path.write_text("silo = 'x'\n")
    assert Shuffling.load(path) is None
    for old, new, word in (
        ("a" * 64, "a" * 63, "shuffler"),
        ("= 100", "= 1", "members"),
        ("colluding = 0", "colluding = -1", "colluding"),
        ("colluding = 0", "", "colluding"),
        ("colluding = 0", "colluding = 0\nextra = 1", "extra"),
    ):
        path.write_text(good.replace(old, new))
        with pytest.raises(BadInput, match=word):
            Shuffling.load(path)


@pytest.mark.parametrize(("counted", "expected"), [(8, ""), (9, "contributions")])
def test_nothing_is_reserved_for_a_total_that_counts_on_more_noise_than_any_answer_may(
    tmp_path, counted, expected
):
    """No question could use such a hold, whose price the asker would choose."""
    event = TotalEvent(FullBatch(), 4.0, 1, counted)
    request = HoldRequest(POLICY.silo, "run-1", "hold-1", POLICY.definition, 1, (("k", event),))
    raw = silo(tmp_path)[0].handle(encode_hold(request, SERVER))
    if raw[:4] == REPLY:
        got = decode_reply(raw, limit=10**6)
        assert isinstance(got, Refusal)
        found = got.code
    else:
        found = decode_hold_reply(raw, silo_key=SILO.public_key().public_bytes_raw().hex()).code
    assert found == expected
