"""Frames between server and shuffler: one spelling each, and a code for any other bytes."""

import contextlib
import random
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.core.errors import BadInput, Refused
from silodp.core.protocol import frames
from silodp.core.protocol.box import box_length
from silodp.core.protocol.relay import (
    DECLINED,
    OUTCOME,
    REQUEST,
    Declined,
    Passed,
    Request,
    decode_outcome,
    decode_request,
    encode_outcome,
    encode_request,
    outcome_length,
)

KEY, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 2))
NAME, OTHER_NAME = (key.public_key().public_bytes_raw().hex() for key in (KEY, OTHER))
ROUND, LIMIT = "ab" * 32, 10**5
ASKED = Request(ROUND, 3, (b"a" * box_length(3), b"b" * box_length(3)))
TOTAL = Passed(ROUND, 2, np.array([0, -(2**61), 7]), {"02" * 32: "duplicate", "01" * 32: "too-few"})


def code(decode, frame: bytes, **options) -> str:
    with pytest.raises(Refused) as refusal:
        decode(frame, limit=LIMIT, **options)
    return refusal.value.code


def test_requests_and_outcomes_come_back_as_they_were_and_are_as_long_as_foretold():
    frame = encode_request(ASKED, KEY)
    assert decode_request(frame, limit=LIMIT) == (ASKED, NAME)
    frame = encode_outcome(TOTAL, KEY)
    back = decode_outcome(frame, limit=LIMIT, shuffler_key=NAME)
    assert isinstance(back, Passed)
    assert (back.totals.tolist(), back.totals.dtype) == ([0, -(2**61), 7], np.int64)
    assert replace(back, totals=0).__dict__ == replace(TOTAL, totals=0).__dict__  # type: ignore[arg-type]
    assert len(frame) == outcome_length(3, 2)
    for word in DECLINED:
        for digest in ("", "cd" * 32):
            back = decode_outcome(
                encode_outcome(Declined(word, digest), KEY), limit=LIMIT, shuffler_key=NAME
            )
            assert isinstance(back, Declined)
            assert (back.code, back.digest) == (word, digest)


def test_only_the_shufflers_signature_makes_an_outcome_and_no_frame_is_another_kind():
    for outcome in (TOTAL, Declined("rate")):
        assert (
            code(decode_outcome, encode_outcome(outcome, OTHER), shuffler_key=NAME) == "signature"
        )
        assert code(decode_outcome, encode_outcome(outcome, KEY), shuffler_key="") == "signature", (
            "no key is not any key"
        )
    body = encode_request(ASKED, KEY)[frames.OVERHEAD :]
    assert (
        code(decode_request, frames.sign_frame(REQUEST, frames.VERSION, body, None)) == "signature"
    )
    assert (
        code(decode_request, frames.sign_frame(OUTCOME, frames.VERSION, body, KEY)) == "malformed"
    )
    assert (
        code(decode_request, frames.sign_frame(REQUEST, frames.VERSION + 1, body, KEY)) == "version"
    )
    assert (
        code(
            decode_outcome,
            frames.sign_frame(
                OUTCOME, frames.VERSION, encode_outcome(TOTAL, KEY)[frames.OVERHEAD :], None
            ),
            shuffler_key=NAME,
        )
        == "signature"
    )
    with pytest.raises(Refused, match="size"):
        decode_request(frame := encode_request(ASKED, KEY), limit=len(frame) - 1)


def test_each_changed_bit_of_a_frame_is_refused():
    for frame, decode, options in (
        (encode_request(ASKED, KEY), decode_request, {}),
        (encode_outcome(TOTAL, KEY), decode_outcome, {"shuffler_key": NAME}),
        (encode_outcome(Declined("rate"), KEY), decode_outcome, {"shuffler_key": NAME}),
    ):
        for i in range(len(frame)):
            bad = bytearray(frame)
            bad[i] ^= 1 << i % 8
            assert code(decode, bytes(bad), **options) in ("malformed", "version", "signature")


def test_a_signed_body_is_read_in_one_spelling_or_not_at_all():
    """Bytes changed, added, cut and doubled under a good signature: what is read spells the same
    bytes again.
    """
    generator, read = random.Random(1), 0
    for frame, magic, decode, encode, options in (
        (
            encode_request(ASKED, KEY),
            REQUEST,
            lambda f, **o: decode_request(f, **o)[0],
            encode_request,
            {},
        ),
        (
            encode_outcome(TOTAL, KEY),
            OUTCOME,
            decode_outcome,
            encode_outcome,
            {"shuffler_key": NAME},
        ),
        (
            encode_outcome(Declined("rate"), KEY),
            OUTCOME,
            decode_outcome,
            encode_outcome,
            {"shuffler_key": NAME},
        ),
    ):
        body = frame[frames.OVERHEAD :]
        for _ in range(700):
            bad = bytearray(body)
            for _ in range(generator.randint(1, 3)):
                i = generator.randrange(min(len(bad), 80)) if bad else 0
                act = generator.randrange(5)
                if act == 0 and bad:
                    bad[i] = generator.choice([0, 1, 2, 255, bad[i] ^ 1 << generator.randrange(8)])
                elif act == 1:
                    bad[i : i + 8] = generator.randbytes(8)
                elif act == 2:
                    del bad[generator.randrange(len(bad) + 1) :]
                elif act == 3:
                    bad += generator.randbytes(generator.randint(1, 60))
                else:
                    bad[i:i] = bad[:i]
            sent = frames.sign_frame(magic, frames.VERSION, bytes(bad), KEY)
            with contextlib.suppress(Refused):
                assert encode(decode(sent, limit=LIMIT, **options), KEY) == sent
                read += 1
    assert read > 100  # rounds, hashes and totals may be any


@pytest.mark.parametrize("seed", range(3))
def test_junk_is_refused_with_a_code(seed):
    generator = random.Random(seed)
    for _ in range(500):
        junk = generator.randbytes(generator.randint(0, 300))
        for start in (
            b"",
            REQUEST,
            *(magic + bytes([frames.VERSION]) for magic in (REQUEST, OUTCOME)),
        ):
            assert code(decode_request, start + junk) in ("malformed", "version", "signature")
            assert code(decode_outcome, start + junk, shuffler_key=NAME) in (
                "malformed",
                "version",
                "signature",
            )


def test_what_makes_no_request_or_outcome_is_not_even_sent():
    for change in (
        {"dimension": 4},
        {"dimension": 0},
        {"boxes": ()},
        {"round": "AB" * 32},
        {"round": "x"},
    ):
        with pytest.raises(BadInput):
            encode_request(replace(ASKED, **change), KEY)
    for change in (
        {"totals": np.zeros(0)},
        {"totals": np.zeros((2, 2))},
        {"dropped": {"01" * 32: "rate"}},
    ):
        with pytest.raises(BadInput):
            encode_outcome(replace(TOTAL, **change), KEY)
    with pytest.raises(BadInput, match="rate"):
        encode_outcome(Declined("because of the count 17"), KEY)
