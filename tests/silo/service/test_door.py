"""The door: frames in, frames out; what was charged is answered, what was answered is repeated, and
nothing else passes.
"""

import hashlib
import inspect
import threading
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget, Renyi
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.core.protocol import codec, frames
from silodp.core.protocol.codec import (
    Answer,
    Envelope,
    Refusal,
    decode_query,
    decode_reply,
    encode_query,
)
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, Poisson, WithoutReplacement
from silodp.core.statistics import (
    Binned,
    ClassCounts,
    ClippedDiff,
    Grad,
    GradDiff,
    Gram,
    GroupClasses,
    GroupScore,
    Histogram,
    LocalSteps,
    Marginals,
    MissingRates,
    Moments,
    Outcomes,
    Regression,
    RiskCells,
    ScaledGrad,
    Score,
    SteeredSteps,
)
from silodp.core.statistics.regression import COX
from silodp.silo.answer import exact, lattice
from silodp.silo.data.records import Records
from silodp.silo.data.tables import raw
from silodp.silo.ledger.care import look
from silodp.silo.ledger.durable import DurableLedger, Identity, QueryLedger
from silodp.silo.service import door as module
from silodp.silo.service import policy as policies
from silodp.silo.service.door import Door, definition_hash
from silodp.silo.service.policy import SAMPLINGS, STATISTICS, Policy

SERVER, SILO, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 2, 3))
SILO_KEY = SILO.public_key().public_bytes_raw().hex()
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


def table() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.normal(size=(N, FEATURES)).astype(np.float32), rng.integers(0, 2, N)


def silo(
    folder: Path, *, data=None, policy=POLICY, rule=None, clock=time.time, ledger=None, held_out=0.0
) -> tuple[Door, DurableLedger]:
    """A door with a ledger of its own in `folder`."""
    x, y = data or table()
    if ledger is None:
        folder.mkdir(exist_ok=True)
        about = {
            "rule": rule or GDP(),
            "budget": policy.budget,
            "records": len(y),
            "identity": Identity.of(x, y),
        }
        ledger = DurableLedger.create(folder / "ledger.db", **about, registry=folder / "registry")
    records = Records.of([(x, y)])
    keys = {"signing_key": SILO, "registry": folder / "registry"}
    return Door(policy, PROBLEM, records, ledger, held_out=held_out, clock=clock, **keys), ledger


def asked(
    query_id: str,
    statistic=None,
    *,
    clip=1.0,
    noise=20.0,
    key=SERVER,
    run="run-1",
    model=None,
    of=POLICY.silo,
    **sampling,
) -> bytes:
    query = Query(
        Grad(W) if statistic is None else statistic, Gaussian("anchor", clip, noise, **sampling)
    )
    return encode_query(Envelope(of, run, query_id, model or POLICY.definition, query), key)


def reply(door: Door, frame: bytes) -> Answer | Refusal:
    return decode_reply(door.handle(frame), limit=door.limit, silo_key=SILO_KEY)


def code(door: Door, frame: bytes) -> str:
    got = reply(door, frame)
    return got.code if isinstance(got, Refusal) else "answered"


STATISTICS_ASKED = {
    "Grad": Grad(W),
    "GradDiff": GradDiff(W, W * 0.5),
    "ClippedDiff": ClippedDiff(W, W * 0.5, 1.0),
    "LocalSteps": LocalSteps(W, 2, 0.1),
    "SteeredSteps": SteeredSteps(W, 2, 0.1, W.double()),
    "Histogram": Histogram(torch.tensor([-1.0, 0.0, 1.0]), FEATURES),
    "Moments": Moments(torch.full((FEATURES,), -2.0), torch.full((FEATURES,), 2.0)),
    "ScaledGrad": ScaledGrad(W, torch.zeros(FEATURES), torch.ones(FEATURES), 1.0),
    "Score": Score(W, 4, 2.0),
    "GroupScore": GroupScore(W, 0, FEATURES, 0),
    "RiskCells": RiskCells(W, torch.tensor([-1.0, 0.0, 1.0]), 1.0),
    "ClassCounts": ClassCounts(2),
    "Outcomes": Outcomes(1),
    "MissingRates": MissingRates(FEATURES),
    "Marginals": Marginals.of([Binned(0, 1, (0.0,)), Binned(-1, 2)], [(0,), (1, 0)]),
    "Gram": Gram(FEATURES, 2, 1.0, 2.0),
    "GroupClasses": GroupClasses(3, 0, FEATURES, 0),
    "Regression": Regression(
        COX,
        torch.zeros(FEATURES),
        torch.tensor([-1.0, 0.0]),
        torch.tensor([0.0, 1.0]),
        torch.zeros(FEATURES),
        torch.ones(FEATURES),
        2.0,
        1.5,
    ),
}


def test_every_statistic_is_asked_here():
    assert set(STATISTICS) == set(STATISTICS_ASKED)


@pytest.mark.parametrize("name", STATISTICS_ASKED)
def test_a_query_is_answered_charged_and_signed(tmp_path, name):
    door, ledger = silo(tmp_path, held_out=0.25)
    frame = asked("q1", STATISTICS_ASKED[name], clip=getattr(STATISTICS_ASKED[name], "norm", 3.0))
    answer = reply(door, frame)
    assert isinstance(answer, Answer)
    assert (answer.silo, answer.query_id, answer.digest) == (
        "hospital-a",
        "q1",
        decode_query(frame, limit=door.limit)[2],
    )
    assert tuple(answer.value.shape) == STATISTICS_ASKED[name].shape
    assert answer.event.count == STATISTICS_ASKED[name].releases
    entries = list(ledger.entries())
    assert [entry.act for entry in entries] == ["charge", "answer"]
    assert (answer.count, answer.head) == (1, ledger.released_heads()[1][1])
    assert entries[0].amount == pytest.approx(answer.event.count / 20.0**2)
    assert (entries[0].asker, entries[0].run, entries[0].kind) == (
        POLICY.askers[0],
        "run-1",
        "anchor",
    )
    ledger.verify()


@pytest.mark.parametrize(
    "sampling",
    [Poisson(0.5), WithoutReplacement(0.5), DisjointBatches(4, 3), DisjointBatches(5, 1, "other")],
)
def test_every_sampling_is_answered_where_the_rule_has_a_price(tmp_path, sampling):
    door, _ = silo(tmp_path / "renyi", rule=Renyi(8.0))
    assert code(door, asked("q1", sampling=sampling)) == "answered"
    door, ledger = silo(tmp_path / "gdp")
    subsampled = isinstance(sampling, Poisson | WithoutReplacement)
    assert code(door, asked("q1", sampling=sampling)) == ("rule" if subsampled else "answered")
    assert (ledger.head()[0] == 0) == subsampled


def test_without_noise_the_value_is_the_clipped_mean(tmp_path, monkeypatch):
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))
    answer = reply(silo(tmp_path)[0], asked("q1"))
    assert isinstance(answer, Answer)
    x, y = (torch.from_numpy(a) for a in table())
    residual = torch.softmax(x @ W[0, :6].reshape(2, 3).T + W[0, 6:], 1) - nn.functional.one_hot(
        y, 2
    )
    g = torch.cat([(residual[:, :, None] * x[:, None]).flatten(1), residual], 1)
    torch.testing.assert_close(
        answer.value[0],
        (g / g.norm(dim=1, keepdim=True).clamp(min=1)).mean(0).double(),
        atol=1e-5,
        rtol=0,
    )


def test_a_retry_gives_the_same_bytes_and_costs_nothing_even_after_a_restart(tmp_path):
    door, ledger = silo(tmp_path)
    first, head = door.handle(asked("q1")), ledger.head()
    assert door.handle(asked("q1")) == first
    again, ledger = silo(tmp_path, ledger=DurableLedger.open(ledger.path))
    assert again.handle(asked("q1")) == first
    assert ledger.head() == head
    assert again.handle(asked("q2")) != first


def test_an_id_with_other_content_or_of_another_asker_is_refused(tmp_path):
    both = replace(POLICY, askers=(*POLICY.askers, STRANGER.public_key().public_bytes_raw().hex()))
    door, ledger = silo(tmp_path, policy=both)
    assert code(door, asked("q1")) == "answered"
    head = ledger.head()
    for frame in (
        asked("q1", noise=21.0),
        asked("q1", run="run-2"),
        asked("q1", Grad(-W)),
        asked("q1", key=STRANGER),
    ):
        assert code(door, frame) == "id-reused"
    assert ledger.head() == head
    ledger.purge("q1")
    assert code(door, asked("q1")) == "purged"


def test_answers_are_kept_for_as_long_as_the_policy_says_and_whoever_asks_later_is_refused_and_pays_nothing(  # noqa: E501
    tmp_path,
):
    clock = [time.time()]
    door, ledger = silo(tmp_path, policy=replace(POLICY, keep_answers=2), clock=lambda: clock[0])
    first, spent = door.handle(asked("q1")), ledger.used()
    clock[0] += 86400
    assert door.handle(asked("q1")) == first
    clock[0] += 2 * 86400
    assert code(door, asked("q2")) == "answered"
    assert code(door, asked("q1")) == "purged"
    assert first not in ledger.path.read_bytes()
    assert ledger.stored("q1") is None
    assert [entry.act for entry in ledger.entries()] == [
        "charge",
        "answer",
        "purge",
        "charge",
        "answer",
    ]
    assert ledger.used() == pytest.approx(2 * spent)
    ledger.verify()
    again, ledger = silo(
        tmp_path, policy=replace(POLICY, keep_answers=2), ledger=DurableLedger.open(ledger.path)
    )
    assert code(again, asked("q1")) == "purged", "also by a clock that went back"
    assert code(again, asked("q2")) == "answered"
    assert len(list(ledger.entries())) == 5


def test_many_old_answers_are_purged_in_one_chain_and_fsck_finds_nothing_wrong(tmp_path):
    door, ledger = silo(tmp_path)
    for i in range(4):
        assert code(door, asked(f"q{i}", noise=50.0)) == "answered"
    assert ledger.purge_before("2020-01-01") == 0
    assert ledger.purge_before("9999-01-01") == 4
    assert ledger.purge_before("9999-01-01") == 0
    ledger.verify()
    assert [line for line in look(ledger.path) if not line.startswith("warning")] == [], "fsck"
    assert [code(door, asked(f"q{i}", noise=50.0)) for i in range(4)] == ["purged"] * 4


def test_what_was_charged_and_not_stored_is_computed_again_under_the_same_charge(
    tmp_path, monkeypatch
):
    door, ledger = silo(tmp_path, policy=replace(POLICY, queries_per_run=1))
    with monkeypatch.context() as crash:
        crash.setattr(
            module, "encode_reply", lambda reply, key: (_ for _ in ()).throw(KeyboardInterrupt())
        )
        with pytest.raises(KeyboardInterrupt):
            door.handle(asked("q1"))
    assert [entry.act for entry in ledger.entries()] == ["charge"]
    door, ledger = silo(
        tmp_path, policy=replace(POLICY, queries_per_run=1), ledger=DurableLedger.open(ledger.path)
    )
    assert code(door, asked("q1")) == "answered"  # the run's limit is reached, by this very query
    assert code(door, asked("q2")) == "run-limit"
    assert [entry.act for entry in ledger.entries()] == ["charge", "answer"]


def test_the_budget_ends_the_answers_and_never_the_door(tmp_path):
    door, ledger = silo(tmp_path)
    codes = [code(door, asked(f"q{i}", noise=4.0)) for i in range(12)]
    answered = codes.count("answered")
    assert codes == ["answered"] * answered + ["budget"] * (12 - answered)
    assert 0 < answered < 12
    assert ledger.spent() <= 2.0
    assert code(door, asked("q0", noise=4.0)) == "answered"


def test_rates_are_counted_from_the_ledger_and_outlive_the_process(tmp_path):
    limited = replace(POLICY, queries_per_run=2, queries_per_hour=4)
    door, ledger = silo(tmp_path, policy=limited)
    order = [
        ("a", "answered"),
        ("a", "answered"),
        ("a", "run-limit"),
        ("b", "answered"),
        ("b", "answered"),
        ("c", "rate"),
    ]
    for i, (run, wanted) in enumerate(order):
        assert code(door, asked(f"q{i}", run=run)) == wanted
    assert code(door, asked("q0", run="a")) == "answered"  # a retry is no new question
    later, _ = silo(
        tmp_path,
        policy=limited,
        ledger=DurableLedger.open(ledger.path),
        clock=lambda: time.time() + 3700,
    )
    assert code(door, asked("q9", run="c")) == "rate"
    assert code(later, asked("q8", run="a")) == "run-limit"
    assert code(later, asked("q7", run="c")) == "answered"
    assert code(door, asked("q6", run="c")) == "rate"  # it sees what the other process has answered


def test_another_askers_run_of_the_same_name_is_another_run(tmp_path):
    both = tuple(key.public_key().public_bytes_raw().hex() for key in (SERVER, STRANGER))
    door, _ = silo(tmp_path, policy=replace(POLICY, queries_per_run=1, askers=both))
    assert [
        code(door, asked(f"q{i}", key=key)) for i, key in enumerate((STRANGER, STRANGER, SERVER))
    ] == [
        "answered",
        "run-limit",
        "answered",
    ]


@pytest.mark.parametrize(
    ("frame", "wanted"),
    [
        (asked("q", key=STRANGER), "asker"),
        (asked("q", model="0" * 64), "model"),
        (asked("q", of="hospital-b"), "silo"),
        (asked("q", Grad(torch.zeros(1, D + 1))), "shape"),
        (asked("q", Grad(torch.full((1, D), torch.nan))), "not-finite"),
        (asked("q", clip=11.0), "clip"),
        (asked("q", noise=0.5), "noise"),
        (asked("q", noise=1e30), "noise"),
        (asked("q", LocalSteps(W, 10**9, 0.1)), "steps"),
        (asked("q", LocalSteps(W, 1, -0.1)), "steps"),
        (asked("q", SteeredSteps(W, 10**9, 0.1, W)), "steps"),
        (asked("q", SteeredSteps(W, 1, 0.1, torch.zeros(1, D + 1))), "shape"),
        (asked("q", SteeredSteps(W, 1, 0.1, torch.full((1, D), torch.inf))), "not-finite"),
        (asked("q", sampling=DisjointBatches(4, 4)), "batch"),
        (asked("q", Histogram(torch.zeros(2), 3)), "shape"),
        (b"", "malformed"),
        (bytes(10**6), "size"),
    ],
)
def test_a_refusal_is_a_code_and_leaves_the_ledger_as_it_was(tmp_path, frame, wanted):
    door, ledger = silo(tmp_path)
    assert code(door, frame) == wanted
    assert ledger.head()[0] == 0


def test_a_paused_door_refuses_until_it_is_resumed_and_an_expired_policy_for_good(tmp_path):
    door, ledger = silo(tmp_path)
    door.pause()
    assert code(door, asked("q1")) == "paused"
    door.resume()
    assert code(door, asked("q1")) == "answered"
    late, _ = silo(tmp_path, policy=replace(POLICY, expires=date(2020, 1, 1)), ledger=ledger)
    assert code(late, asked("q1")) == code(late, asked("q2")) == "expired"


def test_after_the_charge_a_computation_that_fails_still_gives_a_release(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("record 3 has income 51234")

    door, _ = silo(tmp_path)
    monkeypatch.setattr(exact.Exact, "_gradients", lambda self, *points: broken)
    raw = door.handle(asked("q1"))
    assert isinstance(decode_reply(raw, limit=door.limit), Answer)
    assert b"51234" not in raw


@pytest.mark.parametrize(
    "error", [OSError("disk"), MemoryError(), ValueError("x = 3.5"), RecursionError()]
)
def test_whatever_else_breaks_is_one_code(tmp_path, monkeypatch, error):
    def broken(*_):
        raise error

    door, ledger = silo(tmp_path)
    monkeypatch.setattr(lattice, "rounded_gaussian", broken)
    assert code(door, asked("q1")) == "internal"
    monkeypatch.undo()
    assert code(door, asked("q1")) == "answered"
    assert [entry.act for entry in ledger.entries()] == ["charge", "answer"]


def test_a_ledger_that_was_swapped_or_is_gone_is_one_code(tmp_path):
    door, ledger = silo(tmp_path)
    assert code(door, asked("q1")) == "answered"
    ledger.path.rename(tmp_path / "elsewhere")
    assert code(door, asked("q1")) == code(door, asked("q2")) == "ledger"
    assert not ledger.path.exists()


def test_nothing_on_a_frames_way_takes_a_seed():
    for place in (module, exact, policies, codec):
        functions = [f for _, f in inspect.getmembers(place, inspect.isfunction)]
        functions += [
            f
            for _, kind in inspect.getmembers(place, inspect.isclass)
            for _, f in inspect.getmembers(kind, inspect.isfunction)
        ]
        for function in functions:
            if function.__module__ == place.__name__:
                assert not any(
                    "seed" in name or "generator" in name
                    for name in inspect.signature(function).parameters
                ), function


def test_threads_take_turns(tmp_path):
    door, ledger = silo(tmp_path)
    replies: list[bytes] = []
    threads = [
        threading.Thread(target=lambda i=i: replies.append(door.handle(asked(f"q{i % 3}"))))
        for i in range(9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(replies)) == 3
    assert len(list(ledger.entries())) == 6


def test_a_door_needs_the_approved_problem_the_ledgers_budget_and_the_ledgers_records(tmp_path):
    _, ledger = silo(tmp_path)
    with pytest.raises(BadInput, match="definition"):
        silo(
            tmp_path,
            policy=replace(POLICY, definition=hashlib.sha256(b"other").hexdigest()),
            ledger=ledger,
        )
    with pytest.raises(BadInput, match="budget"):
        silo(tmp_path, policy=replace(POLICY, epsilon=3.0), ledger=ledger)
    with pytest.raises(BadInput, match="not the data set"):
        silo(tmp_path, data=(table()[0] + 100, table()[1]), ledger=ledger)
    assert POLICY.budget == Budget(2.0, 1e-5)


# --- whoever holds old records -------------------------------------------------------------------


def test_a_door_with_rows_that_have_moved_answers_nothing_new(tmp_path):
    """Two doors on one ledger: batches of the new rows and of the old could share a record, which
    would then pay for one of them only.
    """
    x, y = table()
    old, ledger = silo(tmp_path)
    assert code(old, asked("q1")) == "answered"
    new, _ = silo(tmp_path, data=(x[::-1].copy(), y[::-1].copy()), ledger=ledger)
    batch = {"sampling": DisjointBatches(2, 0)}
    assert code(new, asked("q2", **batch)) == "answered"
    assert code(old, asked("q3", sampling=DisjointBatches(2, 1))) == "ledger"
    assert code(old, asked("q4")) == "ledger"
    assert code(old, asked("q1")) == "answered", "what was stored may be had again"
    assert code(new, asked("q5")) == "answered"


def test_rows_that_single_precision_cannot_tell_apart_pay_for_each_batch_that_they_move_into(
    tmp_path,
):
    """Times of a second apart: the schema's features differ, though a ledger takes one row for
    another when it recognises the file.
    """
    times, ledger = 1.7e9 + 0.5 + np.arange(40), None
    for k in range(4):
        order = np.roll(np.arange(40), 10 * k)
        cells = raw({"t": times[order], "y": np.zeros(40)})
        x, y = (
            np.column_stack([(times[order] - 1.7e9) / 20 - 1] * 3).astype(np.float32),
            np.zeros(40, int),
        )
        ledger = ledger or DurableLedger.create(
            tmp_path / "ledger",
            rule=GDP(),
            budget=POLICY.budget,
            records=40,
            identity=Identity.of(*cells),
            registry=tmp_path / "registry",
        )
        door = Door(
            POLICY,
            PROBLEM,
            Records.of([(x, y)]),
            ledger,
            known_by=cells,
            registry=tmp_path / "registry",
        )
        assert isinstance(
            decode_reply(
                door.handle(asked(f"q{k}", sampling=DisjointBatches(4, k))), limit=door.limit
            ),
            Answer,
        )
    assert ledger.used() * ledger.capacity == pytest.approx(4 / 20**2), (
        "a record may have been in each of the four"
    )


def test_a_door_is_not_charged_by_another_number_of_records_than_it_draws_from(tmp_path):
    """A batch of floor(n / 10) of n records has the price of that n: a door that holds more records
    than the ledger knows pays too little.
    """
    x, y = table()
    door, ledger = silo(tmp_path, rule=Renyi(8.0))
    ledger.recognise(x[:-1], y[:-1], registry=tmp_path / "registry")
    assert code(door, asked("q1", sampling=WithoutReplacement(0.5))) == "ledger"


def test_records_that_change_and_change_back_under_a_query_do_not_give_it_two_batches(
    tmp_path, monkeypatch
):
    """The partition is drawn anew for each generation of the records: a query that was charged in
    one is not computed in the next.
    """
    x, y = table()
    door, ledger = silo(tmp_path)
    edited = x.copy()
    edited[0, 0] += 1
    charge = QueryLedger.charge

    def interrupted(ledger_of_query, event, silos):
        charge(ledger_of_query, event, silos)
        for features in (edited, x):
            ledger.recognise(features, y, registry=tmp_path / "registry")

    monkeypatch.setattr(QueryLedger, "charge", interrupted)
    assert (
        code(door, asked("q1", LocalSteps(W, 2, 0.1), sampling=DisjointBatches(2, 0))) == "ledger"
    )


def test_a_server_of_the_version_before_reads_every_reply_and_an_older_gate_refuses_without_a_charge(  # noqa: E501
    tmp_path, monkeypatch
):
    """Version 3 has packed answers: whoever asks in 2 would call one malformed."""
    door, ledger = silo(tmp_path)
    query = Query(Grad(W), Gaussian("anchor", 1.0, 20.0))
    old, new = (
        encode_query(
            Envelope(POLICY.silo, "run-1", f"q{v}", POLICY.definition, query, version=v), SERVER
        )
        for v in (2, 3)
    )
    plain, packed, refused = (
        door.handle(old),
        door.handle(new),
        door.handle(b"SDPQ" + bytes([9]) + old[5:]),
    )
    assert (plain[4], packed[4], refused[4]) == (2, 3, 2)
    assert (b'"packed"' in plain, b"packed" in packed) == (False, True)
    assert len(list(ledger.entries())) == 4
    monkeypatch.setattr(frames, "SPOKEN", (2,))  # as before
    assert isinstance(decode_reply(plain, limit=door.limit, silo_key=SILO_KEY), Answer)
    assert decode_reply(refused, limit=door.limit, silo_key=SILO_KEY) == Refusal("version")
    assert decode_reply(door.handle(new), limit=door.limit, silo_key=SILO_KEY) == Refusal("version")
    assert len(list(ledger.entries())) == 4, "nothing was charged"
