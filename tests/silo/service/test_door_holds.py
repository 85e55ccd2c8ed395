"""Holds at the door: who is told what, how often anybody may ask, and what is refused before it is
priced.
"""

import itertools
import time
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from test_door import POLICY, SERVER, SILO_KEY, STRANGER, asked, code, reply, silo

from silodp.core.events import Event, TotalEvent
from silodp.core.privacy.accounting import GDP
from silodp.core.protocol import codec
from silodp.core.protocol.codec import Refusal, decode_reply
from silodp.core.protocol.quote import (
    HoldReply,
    HoldRequest,
    ReleaseRequest,
    decode_hold_reply,
    encode_hold,
)
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service.door import Door

NUMBERS = itertools.count()


def wants(
    door: Door, hold: str, *, count=1, noise=20.0, key=SERVER, run="run-1", number=None
) -> HoldReply | str:
    """The reply to a request for a hold, or the code of the refusal."""
    return told(
        door, wish(hold, (Event(FullBatch(), noise, count),), key=key, run=run, number=number)
    )


def wish(hold: str, events, *, key=SERVER, run="run-1", number=None) -> bytes:
    names = POLICY.silo, run, hold, POLICY.definition, next(NUMBERS) if number is None else number
    return encode_hold(HoldRequest(*names, tuple(("k", event) for event in events)), key)


def told(door: Door, frame: bytes) -> HoldReply | str:
    raw = door.handle(frame)
    if raw[:4] == codec.REPLY:
        got = decode_reply(raw, limit=door.limit, silo_key=SILO_KEY)
        assert isinstance(got, Refusal)
        return got.code
    return decode_hold_reply(raw, silo_key=SILO_KEY)


def test_what_is_left_is_told_only_to_those_whom_the_policy_lets_see_it(tmp_path):
    other = STRANGER.public_key().public_bytes_raw().hex()
    policy = replace(POLICY, askers=(*POLICY.askers, other), sees_left=POLICY.askers)
    door, ledger = silo(tmp_path, policy=policy)
    assert reply(door, asked("q1"))
    left = 1 - ledger.used()
    for hold, count, fits in (("a", 1, True), ("b", 10**6, False)):
        seen, unseen = (
            wants(door, hold, count=count),
            wants(door, f"{hold}2", count=count, key=STRANGER, run="run-2"),
        )
        assert isinstance(seen, HoldReply)
        assert isinstance(unseen, HoldReply)
        assert seen.code == unseen.code == ("" if fits else "budget")
        assert unseen.left is None
        assert seen.left == pytest.approx(left if fits else left - 1 / 20**2 / ledger.capacity)
    assert wants(door, "c", key=Ed25519PrivateKey.generate()) == "asker"
    assert 1 - ledger.used() == left


def test_a_hold_that_comes_after_its_release_is_not_taken(tmp_path):
    door, ledger = silo(tmp_path)
    release = ReleaseRequest(POLICY.silo, "run-1", "late", POLICY.definition, 5)
    assert (
        decode_hold_reply(door.handle(encode_hold(release, SERVER)), silo_key=SILO_KEY).code == ""
    )
    assert wants(door, "late", number=4) == "lapsed"
    assert list(ledger.entries()) == []
    assert wants(door, "next", number=6).code == ""


def test_asking_for_holds_has_the_policys_rate_also_after_a_restart(tmp_path):
    limited = replace(POLICY, queries_per_hour=3)
    door, ledger = silo(tmp_path, policy=limited)
    codes = [wants(door, f"h{i}", count=10**6 if i == 1 else 1) for i in range(5)]
    assert [got if isinstance(got, str) else got.code for got in codes] == [
        "",
        "budget",
        "",
        "rate",
        "rate",
    ]
    assert code(door, asked("q1")) == "answered", "questions are counted apart"
    again, _ = silo(tmp_path, policy=limited, ledger=DurableLedger.open(ledger.path))
    assert [
        got if isinstance(got, str) else got.code for got in (wants(again, "i"), wants(again, "j"))
    ] == ["", "rate"]


def test_the_rate_of_holds_is_each_askers_own_and_a_repeated_frame_takes_nothing_of_it(tmp_path):
    other = STRANGER.public_key().public_bytes_raw().hex()
    now = [time.time()]
    door, ledger = silo(
        tmp_path,
        policy=replace(POLICY, queries_per_hour=2, askers=(*POLICY.askers, other), hold_seconds=60),
        clock=lambda: now[0],
    )
    given, refused = (
        wish("given", (Event(FullBatch(), 20.0),)),
        wish("refused", (Event(FullBatch(), 20.0, 10**6),)),
    )
    assert [told(door, given).code for _ in range(5)] == [""] * 5
    assert [told(door, refused).code for _ in range(5)] == ["budget"] * 5
    assert wants(door, "third") == "rate"
    assert wants(door, "refused", count=10**5) == "rate", (
        "other content under the id of a refused request is another question"
    )
    assert wants(door, "first", key=STRANGER, run="run-2").code == ""
    now[0] += 3601
    assert [told(door, given) for _ in range(5)] == ["lapsed"] * 5
    assert [
        got if isinstance(got, str) else got.code
        for got in (wants(door, f"late{i}") for i in range(3))
    ] == ["", "", "rate"]
    assert [entry.act for entry in ledger.entries()] == ["hold"] * 4


def test_nothing_is_priced_for_a_hold_of_questions_that_the_policy_refuses(tmp_path, monkeypatch):
    door, ledger = silo(
        tmp_path,
        policy=replace(POLICY, samplings=("FullBatch", "DisjointBatches"), minimum_batch=10),
    )
    monkeypatch.setattr(GDP, "price", lambda *_: pytest.fail("priced"))
    for event, wanted in (
        (Event(Poisson(0.5), 20.0), "sampling"),
        (Event(FullBatch(), POLICY.minimum_noise_multiplier * 0.99), "noise"),
        (Event(FullBatch(), 0.0), "noise"),
        (Event(DisjointBatches(5, 0, "p"), 20.0), "batch"),
        (TotalEvent(FullBatch(), 20.0, 1, 4), "shuffle"),
    ):
        assert told(door, wish(f"h{wanted}", (Event(FullBatch(), 20.0), event))) == wanted
    assert list(ledger.entries()) == []
