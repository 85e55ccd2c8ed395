"""The codec: what is encoded comes back bit for bit, and of all other bytes nothing comes through
but one of four codes.
"""

import json
import os
import random
import string

import numpy as np
import pytest
import safetensors.numpy
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event
from silodp.core.mechanisms import Gaussian
from silodp.core.protocol.codec import (
    MAX_HEADER,
    OVERHEAD,
    QUERY,
    VERSION,
    Answer,
    Envelope,
    Refusal,
    decode_query,
    decode_reply,
    encode_query,
    encode_reply,
    sign_frame,
)
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, WithoutReplacement
from silodp.core.statistics import (
    ClassCounts,
    Grad,
    GradDiff,
    GroupScore,
    Histogram,
    LocalSteps,
    Marginals,
    MissingRates,
    Moments,
    RiskCells,
    Score,
    SteeredSteps,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
MODEL = "ab" * 32
LIMIT = 2**16
CODES = {"size", "malformed", "version", "signature"}
LONG = int(os.environ.get("SILODP_LONG", "5000"))

w, v, k = (
    torch.tensor([[1.0, -0.0, float("nan"), 1e-310]], dtype=torch.float64),
    torch.ones(1, 4),
    torch.tensor([0.0, 1.0, 2.0]),
)
STATISTICS = [
    Grad(w),
    Grad(v),
    GradDiff(w, v),
    LocalSteps(v, 7, 0.1),
    LocalSteps(v, -3, -1e-320),
    SteeredSteps(v, 7, 0.1, w),
    Histogram(k, 5),
    Moments(-k, k.double()),
    Score(w, 10**9, 0.1),
    Score(v, -1, -1e-320),
    ClassCounts(3),
    MissingRates(-(2**53)),
    Marginals(k, -k, k.double()),
    GroupScore(v, -1, 2**53, 7),
    RiskCells(w, k, -1e-320),
]
SAMPLINGS = [
    FullBatch(),
    DisjointBatches(5, 2, "part-1"),
    DisjointBatches(-1, 2**53),
    Poisson(1e-300),
    WithoutReplacement(0.3),
]
QUERIES = [
    Query(s, Gaussian("anchor", 0.1 + i, 1 / 3, b))
    for i, s in enumerate(STATISTICS)
    for b in SAMPLINGS
]


def envelope(query=QUERIES[0], **changes) -> Envelope:
    return Envelope(
        **{"silo": "silo-a", "run": "run.1", "query_id": "q-1", "model": MODEL, "query": query}
        | changes
    )


def same(a: object, b: object) -> bool:
    """Equal to the last bit, tensors with their types."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        return (
            a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        )
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(
            same(getattr(a, f), getattr(b, f)) for f in a.__dataclass_fields__
        )
    return a == b


def code(frame: bytes, decode=decode_query) -> str:
    with pytest.raises(Refused) as refusal:
        decode(frame, limit=LIMIT)
    assert refusal.value.code in CODES
    return refusal.value.code


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_comes_back_bit_for_bit_with_its_asker_and_a_digest_of_its_own(query):
    sent = envelope(query)
    got, asker, digest = decode_query(frame := encode_query(sent, KEY), limit=LIMIT)
    assert same(sent, got)
    assert asker == KEY.public_key().public_bytes_raw().hex()
    assert encode_query(got, KEY) == frame
    assert (
        digest != decode_query(encode_query(envelope(query, query_id="q-2"), KEY), limit=LIMIT)[2]
    )


def test_a_body_is_a_safetensors_file():
    frame = encode_query(envelope(Query(GradDiff(w, v), Gaussian("refine", 1.0, 2.0))), KEY)
    arrays = safetensors.numpy.load(frame[OVERHEAD:])
    np.testing.assert_array_equal(arrays["w"], w.numpy())
    assert arrays["reference"].dtype == np.float32


@pytest.mark.parametrize("key", [None, KEY])
def test_a_reply_comes_back_bit_for_bit_signed_or_not(key):
    for reply in (
        Answer("silo-a", "q-1", MODEL, w, Event(Poisson(0.5), 1 / 3, 4), 17, "cd" * 32),
        Refusal("budget"),
    ):
        frame = encode_reply(reply, key)
        assert same(reply, decode_reply(frame, limit=LIMIT))
        if key is None:
            with pytest.raises(Refused, match="signature"):
                decode_reply(frame, limit=LIMIT, silo_key=MODEL)
        else:
            assert same(
                reply,
                decode_reply(
                    frame, limit=LIMIT, silo_key=KEY.public_key().public_bytes_raw().hex()
                ),
            )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"run": "a b"}, "name"),
        ({"run": ""}, "name"),
        ({"silo": ""}, "name"),
        ({"query_id": "x" * 65}, "name"),
        ({"query_id": "é"}, "name"),
        ({"query_id": "a\n"}, "name"),
        ({"model": MODEL.upper()}, "hash"),
        ({"query": Query(Grad(torch.ones(2, 4)), Gaussian("a", 1.0, 1.0))}, "point"),
        ({"query": Query(Grad(torch.ones(1, 4).half()), Gaussian("a", 1.0, 1.0))}, "point"),
        ({"query": Query(Grad(v), Gaussian("a", float("nan"), 1.0))}, "finite"),
        ({"query": Query(Grad(v), Gaussian("a", 1.0, torch.ones(1, 2)))}, "one"),
        (
            {"query": Query(SteeredSteps(v, 2, 1.0, torch.ones(3, 4)), Gaussian("a", 1.0, 1.0))},
            "point",
        ),
        (
            {"query": Query(SteeredSteps(v, 2, 1.0, torch.ones(1, 2, 4)), Gaussian("a", 1.0, 1.0))},
            "point",
        ),
        ({"query": Query(LocalSteps(v, 10**300, 1.0), Gaussian("a", 1.0, 1.0))}, "integer"),
        ({"query": Query(LocalSteps(v, True, 1.0), Gaussian("a", 1.0, 1.0))}, "integer"),
    ],
)
def test_what_is_no_query_for_one_run_is_not_encoded(changes, field):
    with pytest.raises(BadInput, match=field):
        encode_query(envelope(**changes), KEY)


def test_a_signature_by_another_key_of_another_body_or_of_a_reply_is_refused():
    frame = encode_query(envelope(), KEY)
    other = encode_query(envelope(), OTHER)
    assert code(other[:5] + frame[5:37] + other[37:]) == "signature"
    assert code(frame[:5] + bytes(96) + frame[101:]) == "signature"
    assert code(frame[:-1] + b"x") == "signature"
    reply = encode_reply(Refusal("budget"), KEY)
    assert code(b"SDPQ" + reply[4:]) == "signature"
    assert code(reply) == "malformed"


def test_size_version_and_length_are_checked_first():
    frame = encode_query(envelope(), KEY)
    assert code(frame + bytes(LIMIT)) == "size"
    assert code(encode_query(envelope(version=VERSION + 1), KEY)) == "version"
    assert code(frame + b"\0") == "malformed"
    assert code(b"") == code(frame[:OVERHEAD]) == code(frame[:50]) == "malformed"


# --- well signed and wrong: what reaches the parser ----------------------------------------------


def resigned(body: bytes) -> bytes:
    return sign_frame(QUERY, VERSION, body, KEY)


def rebuilt(change, query=QUERIES[0]) -> bytes:
    """A well signed frame whose header (a dict) and fields (a dict) went through `change`."""
    body = encode_query(envelope(query), KEY)[OVERHEAD:]
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size])
    fields = json.loads(header["__metadata__"]["silodp"])
    change(header, fields)
    header["__metadata__"]["silodp"] = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return resigned(len(text).to_bytes(8, "little") + text + body[8 + size :])


CHANGES = {
    "unknown field": lambda h, f: f.update(seed=1),
    "unknown metadata": lambda h, f: h["__metadata__"].update(seed="1"),
    "unknown field of the mechanism": lambda h, f: f["mechanism"].update(noise=0),
    "missing field": lambda h, f: f.pop("run"),
    "no silo": lambda h, f: f.pop("silo"),
    "unknown statistic": lambda h, f: f["statistic"].update(name="Loss"),
    "a sampling as statistic": lambda h, f: f["statistic"].update(name="FullBatch"),
    "unknown tensor": lambda h, f: h.update(
        x={"dtype": "F64", "shape": [1, 0], "data_offsets": [32, 32]}
    ),
    "integer tensor": lambda h, f: h["w"].update(dtype="I64"),
    "half tensor": lambda h, f: h["w"].update(dtype="F16"),
    "wrong shape": lambda h, f: h["w"].update(shape=[2, 2]),
    "negative shape": lambda h, f: h["w"].update(shape=[-1, -4]),
    "huge shape": lambda h, f: h["w"].update(shape=[1, 2**53]),
    "shape of floats": lambda h, f: h["w"].update(shape=[1.0, 4.0]),
    "other offsets": lambda h, f: h["w"].update(data_offsets=[0, 24]),
    "clip as a number": lambda h, f: f["mechanism"].update(clip=1.0),
    "clip not canonical": lambda h, f: f["mechanism"].update(clip="0x1p0"),
    "clip NaN": lambda h, f: f["mechanism"].update(clip="nan"),
    "noise infinite": lambda h, f: f["mechanism"].update(noise_multiplier="inf"),
    "noise beyond floats": lambda h, f: f["mechanism"].update(noise_multiplier="0x1p9999"),
    "noise NaN in JSON": lambda h, f: f["mechanism"].update(noise_multiplier=float("nan")),
    "odd id": lambda h, f: f.update(query="../etc/passwd"),
    "id that is a list": lambda h, f: f.update(query=["a"]),
    "deep nesting": lambda h, f: f.update(run=json.loads("[" * 500 + "]" * 500)),
    "long header": lambda h, f: f.update(run="a" * MAX_HEADER),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_well_signed_query_of_any_other_form_is_malformed(change):
    assert code(rebuilt(change)) == "malformed"


def test_the_same_content_in_another_spelling_is_malformed():
    body = encode_query(envelope(), KEY)[OVERHEAD:]
    size = int.from_bytes(body[:8], "little")
    header, data = body[8 : 8 + size], body[8 + size :]
    decode_query(rebuilt(lambda h, f: None), limit=LIMIT)
    twice = header.rstrip().replace(b"{", b'{"w":1,', 1)
    for text in (
        header + b" " * 8,
        twice + b" " * (-len(twice) % 8),
        header.replace(b":", b": ", 1),
        b"[" * 8000,
        b"\xff" * 64,
        b"1" * 5000,
    ):
        assert code(resigned(len(text).to_bytes(8, "little") + text + data)) == "malformed"
    assert (
        code(resigned(body + b"\0"))
        == code(resigned(body[:-1]))
        == code(resigned(b""))
        == code(resigned(b"\xff" * 8))
        == "malformed"
    )


def test_mutated_bodies_and_frames_raise_nothing_but_the_four_codes():
    rng = random.Random(1)
    frames, outcomes = [encode_query(envelope(q), KEY) for q in QUERIES], set()
    alphabet = (string.digits + '{}[],:"-+.eExnN \\').encode()
    for _ in range(LONG):
        frame = rng.choice(frames)
        body = bytearray(frame[OVERHEAD:])
        for _ in range(rng.randint(1, 4)):
            at = (
                rng.randrange(len(body)) if rng.random() < 0.3 else rng.randrange(8, len(body) - 40)
            )
            match rng.randrange(4):
                case 0:
                    body[at] ^= 1 << rng.randrange(8)
                case 1:
                    body[at] = rng.choice(alphabet)
                case 2:
                    del body[at : at + rng.randint(1, 9)]
                case _:
                    body[at:at] = bytes(rng.choices(alphabet, k=rng.randint(1, 9)))
        try:
            got, _, _ = decode_query(resigned(bytes(body)), limit=LIMIT)
        except Refused as refusal:
            outcomes.add(refusal.code)
        else:
            # a flipped bit of a tensor or of an id is another valid query, and must then be
            # canonical
            assert encode_query(got, KEY)[OVERHEAD:] == bytes(body)
        flipped = bytearray(frame)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        assert code(bytes(flipped))
    assert outcomes == {"malformed"}


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=300), st.sampled_from([b"", b"SDPQ\1", b"SDPR\1"]))
def test_any_bytes_raise_nothing_but_the_four_codes(data, start):
    assert code(start + data)
    assert code(start + data, decode_reply)
    assert code(resigned(data)) == "malformed"
