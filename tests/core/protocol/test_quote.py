"""Frames about holds: canonical, signed, short, and refused in any other spelling."""

import json
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.protocol import frames
from silodp.core.protocol.quote import (
    HELD,
    HOLD,
    LIMIT,
    MOST,
    HoldReply,
    HoldRequest,
    ReleaseRequest,
    decode_hold,
    decode_hold_reply,
    encode_hold,
    encode_hold_reply,
)
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson

KEY, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 2))
PUBLIC = KEY.public_key().public_bytes_raw().hex()
EVENTS = (
    ("anchor", Event(FullBatch(), 12.5, 3)),
    ("refine", Event(DisjointBatches(4, 1, "p"), 3.25, 40)),
    ("minibatch", Event(Poisson(0.1), 0.7)),
    ("total", TotalEvent(FullBatch(), 8.5, 5, 12)),
)
REQUEST = HoldRequest("hospital-a", "run", "hold", "a" * 64, 7, EVENTS)


def test_a_request_comes_back_as_it_was_sent_with_its_asker():
    request, asker, digest = decode_hold(encode_hold(REQUEST, KEY))
    assert (request.silo, request.run, request.hold, request.model, request.number, asker) == (
        "hospital-a",
        "run",
        "hold",
        "a" * 64,
        7,
        PUBLIC,
    )
    assert [(kind, vars(event)) for kind, event in request.events] == [
        (kind, vars(event)) for kind, event in EVENTS
    ]
    assert len(digest) == 64
    release = ReleaseRequest("hospital-a", "run", "hold", "a" * 64, 8)
    assert decode_hold(encode_hold(release, KEY))[0] == release


@pytest.mark.parametrize(
    "reply",
    [
        HoldReply("a", "r", "h", "b" * 64, "", 60, 0.25, 0.5),
        HoldReply("a", "r", "h", "b" * 64, "budget"),
    ],
)
def test_a_reply_comes_back_from_its_silo_alone(reply):
    frame = encode_hold_reply(reply, KEY)
    assert decode_hold_reply(frame, silo_key=PUBLIC) == reply
    with pytest.raises(Refused, match="signature"):
        decode_hold_reply(encode_hold_reply(reply, OTHER), silo_key=PUBLIC)
    with pytest.raises(Refused, match="signature"):
        decode_hold_reply(encode_hold_reply(reply, None), silo_key=PUBLIC)


def test_other_spellings_unsigned_frames_and_other_magics_are_refused():
    body = encode_hold(REQUEST, KEY)[frames.OVERHEAD :]
    fields = json.loads(body)
    for other in (
        json.dumps(fields).encode(),
        json.dumps(fields | {"more": 1}, sort_keys=True, separators=(",", ":")).encode(),
        json.dumps(fields | {"events": []}, sort_keys=True, separators=(",", ":")).encode(),
        body.replace(b"0x1.9000000000000p+3", b"0x1.90p+3"),
        body + b" ",
        b"[" * 100_000,
        b"",
    ):
        assert other != body
        with pytest.raises(Refused, match="malformed"):
            decode_hold(frames.sign_frame(HOLD, frames.VERSION, other, KEY))
    with pytest.raises(Refused, match="signature"):
        decode_hold(frames.sign_frame(HOLD, frames.VERSION, body, None))
    with pytest.raises(Refused, match="malformed"):
        decode_hold(frames.sign_frame(HELD, frames.VERSION, body, KEY))
    with pytest.raises(Refused, match="size"):
        decode_hold(bytes(LIMIT + 1))


def test_what_would_cost_a_gate_too_much_to_price_or_to_read_is_not_sent():
    for event in (
        lambda i: Event(FullBatch(), 1.0 + i),
        lambda i: Event(Poisson(0.1 + 0.001 * i), 1.0),
        lambda i: Event(Poisson(0.1), 1.0, 1 + i),
        lambda i: Event(DisjointBatches(4, 0, f"p{i}"), 1.0),
        lambda i: Event(DisjointBatches(4, 0, "p"), 1.0 + i),
    ):
        encode_hold(replace(REQUEST, events=tuple(("k", event(i)) for i in range(MOST))), KEY)
        with pytest.raises(BadInput, match="at most 64 prices"):
            encode_hold(
                replace(REQUEST, events=tuple(("k", event(i)) for i in range(MOST + 1))), KEY
            )
    with pytest.raises(BadInput, match="use fewer batches"):
        encode_hold(
            replace(
                REQUEST,
                events=tuple(("k", Event(DisjointBatches(9999, i, "p"), 1.0)) for i in range(9999)),
            ),
            KEY,
        )
    encode_hold(
        replace(
            REQUEST,
            events=tuple(("k", Event(DisjointBatches(1500, i, "p"), 1.0)) for i in range(1500)),
        ),
        KEY,
    )


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_request_or_refused(raw):
    for frame in (raw, HOLD + raw, frames.sign_frame(HOLD, frames.VERSION, raw, KEY)):
        with pytest.raises(Refused, match=r"size|malformed|version|signature"):
            decode_hold(frame)
