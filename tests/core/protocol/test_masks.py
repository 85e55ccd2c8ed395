"""Masks: the published bytes, worked out a second time without any library, and what answers tell
whoever lacks a member's.
"""

import hashlib
import hmac
import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from scipy.stats import chisquare

from silodp.core.errors import BadInput, Refused
from silodp.core.protocol import masks
from silodp.core.protocol.words import WORDS, fingerprint

VECTORS = json.loads((Path(__file__).parents[3] / "docs/vectors/masks.json").read_text())
ABOUT = {"definition": "ab" * 32, "run": "run-1"}


class Member:
    """A silo of a cohort with keys that follow from a number."""

    def __init__(self, number: int, records: int = 100) -> None:
        seed = hashlib.sha256(f"member {number}".encode()).digest()
        self.identity, self.key = (
            Ed25519PrivateKey.from_private_bytes(seed),
            X25519PrivateKey.from_private_bytes(seed[::-1]),
        )
        self.row = replace(
            masks.offered(self.identity, self.key, epoch=seed[:16], **ABOUT), records=records
        )

    def answer(
        self,
        counts: np.ndarray,
        rows: tuple[masks.Row, ...],
        digest: str = "cd" * 32,
        modulus: int = 32,
    ) -> bytes:
        return masks.masked(counts, self.key, self.row, rows, digest, modulus)


def cohort(size: int) -> tuple[list[Member], tuple[masks.Row, ...]]:
    members = [Member(i) for i in range(size)]
    return members, masks.read_table(masks.write_table(m.row for m in members))


# --- the published bytes, without a library ------------------------------------------------------


def x25519(scalar: bytes, point: bytes) -> bytes:
    """RFC 7748, section 5."""
    p, k = 2**255 - 19, int.from_bytes(scalar, "little")
    k = k & ~7 & (2**255 - 1) | 2**254
    x1, x2, z2, x3, z3, swap = (
        int.from_bytes(point, "little") % 2**255,
        1,
        0,
        int.from_bytes(point, "little") % 2**255,
        1,
        0,
    )
    for t in reversed(range(255)):
        bit = k >> t & 1
        if swap ^ bit:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swap = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a, b * b, d * a, c * b
        x3, z3, e = pow(da + cb, 2, p), x1 * pow(da - cb, 2, p) % p, aa - bb
        x2, z2 = aa * bb % p, e * (aa + 121665 * e) % p
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, p - 2, p) % p).to_bytes(32, "little")


def chacha20(key: bytes, blocks: int) -> bytes:
    """RFC 8439, section 2.3, with nonce 0 and counters from 0."""

    def turn(s: list[int], a: int, b: int, c: int, d: int) -> None:
        for x, y, z, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[x] = s[x] + s[y] & 0xFFFFFFFF
            s[z] ^= s[x]
            s[z] = (s[z] << by | s[z] >> 32 - by) & 0xFFFFFFFF

    out = b""
    for counter in range(blocks):
        start = [
            *struct.unpack("<4I", b"expand 32-byte k"),
            *struct.unpack("<8I", key),
            counter,
            0,
            0,
            0,
        ]
        state = start[:]
        for _ in range(10):
            for quarter in (
                (0, 4, 8, 12),
                (1, 5, 9, 13),
                (2, 6, 10, 14),
                (3, 7, 11, 15),
                (0, 5, 10, 15),
                (1, 6, 11, 12),
                (2, 7, 8, 13),
                (3, 4, 9, 14),
            ):
                turn(state, *quarter)
        out += struct.pack("<16I", *(a + b & 0xFFFFFFFF for a, b in zip(state, start, strict=True)))
    return out


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869, 32 bytes."""
    return hmac.digest(hmac.digest(salt, secret, "sha256"), info + b"\1", "sha256")


@pytest.mark.parametrize("vector", VECTORS["answers"], ids=lambda v: f"{v['modulus']}")
def test_the_published_vectors_are_those_of_the_primitives_and_of_the_code(vector):
    digest, bits = vector["digest"], vector["modulus"]
    rows = [
        {k: bytes.fromhex(v) if isinstance(v, str) else v for k, v in member.items()}
        for member in VECTORS["members"]
    ]
    made = masks.read_table(bytes.fromhex(VECTORS["table"]))
    by = {row.identity: row for row in made}
    assert sorted(by) == [row.identity for row in made]
    for member, counts, answer in zip(rows, vector["numbers"], vector["answers"], strict=True):
        words = np.array(counts, dtype=object)
        for other in rows:
            if other is member:
                continue
            low, high = sorted((member, other), key=lambda m: m["identity"])
            secret = x25519(member["private_key"], other["key"])
            key = hkdf(
                secret,
                bytes.fromhex(digest),
                b"silodp masks 1 pair"
                + low["identity"]
                + high["identity"]
                + low["key"]
                + high["key"],
            )
            vector_of_pair = np.frombuffer(chacha20(key, 2), f"<u{bits // 8}")[
                : len(counts)
            ].astype(object)
            words = words + vector_of_pair if low is member else words - vector_of_pair
        wanted = b"".join(int(word % 2**bits).to_bytes(bits // 8, "little") for word in words)
        assert answer == wanted.hex()
        own = X25519PrivateKey.from_private_bytes(member["private_key"])
        assert (
            masks.masked(np.array(counts), own, by[member["identity"]], made, digest, bits).hex()
            == answer
        )
        assert masks.is_signed(
            by[member["identity"]], definition=VECTORS["definition"], run=VECTORS["run"]
        )
    total = masks.add_masked([bytes.fromhex(a) for a in vector["answers"]], bits)
    assert total.tolist() == [sum(c) for c in zip(*vector["numbers"], strict=True)]


def test_a_fingerprint_is_16_of_256_words_and_as_published():
    assert len(WORDS) == len(set(WORDS)) == 256
    for key, words in VECTORS["fingerprints"].items():
        digest = hashlib.sha256(b"silodp identity 1" + bytes.fromhex(key)).digest()
        assert fingerprint(key) == words == " ".join(WORDS[byte] for byte in digest[:16])


# --- sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("modulus", [32, 64])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_the_masked_sum_is_the_plain_sum_bit_for_bit(size, modulus):
    members, rows = cohort(size)
    half = 2**31 // size
    counts = np.random.default_rng(size).integers(1 - half, half, (size, 100))
    answers = [m.answer(c, rows, modulus=modulus) for m, c in zip(members, counts, strict=True)]
    assert np.array_equal(masks.add_masked(answers, modulus), counts.sum(0))
    assert {len(a) for a in answers} == {100 * modulus // 8}


def test_answers_to_other_questions_and_of_other_cohorts_do_not_cancel():
    members, rows = cohort(3)
    counts = np.zeros(1000, np.int64)
    answers = [m.answer(counts, rows) for m in members]
    other = members[0].answer(counts, rows, digest="ce" * 32)
    assert (masks.add_masked([other, *answers[1:]], 32) != 0).mean() > 0.99
    smaller = masks.read_table(masks.write_table(m.row for m in members[:2]))
    assert (
        masks.add_masked([members[0].answer(counts, smaller), answers[1], answers[2]], 32) != 0
    ).mean() > 0.99
    inflated = masks.read_table(
        masks.write_table([replace(members[0].row, records=10**6), *(m.row for m in members[1:])])
    )
    with pytest.raises(Refused, match="cohort"):
        members[0].answer(counts, inflated)


@pytest.mark.parametrize(("size", "seen"), [(2, 1), (3, 1), (3, 2), (5, 4)])
def test_any_set_of_answers_that_lacks_an_honest_members_is_uniform(size, seen):
    """Chi-square of the bytes of every answer and of their sum: false alarms below 1e-4 a case,
    with keys that are fixed.
    """
    members, rows = cohort(size)
    counts = np.full(20_000, 12345)
    answers = [m.answer(counts, rows) for m in members[:seen]]
    for what in (*answers, masks.add_masked(answers, 32).astype("<i4").tobytes()):
        tally = np.bincount(np.frombuffer(what, np.uint8), minlength=256)
        assert chisquare(tally).pvalue > 1e-5
    rest = members[seen:]
    if len(rest) == 1:  # the last answer makes the sum plain
        assert set(masks.add_masked([*answers, rest[0].answer(counts, rows)], 32).tolist()) == {
            12345 * size
        }


# --- what is refused -----------------------------------------------------------------------------


def test_a_table_holds_nobody_twice_in_one_spelling_with_records_of_everybody():
    _members, rows = cohort(3)
    table = masks.write_table(rows)
    assert masks.read_table(table) == rows
    first, second = table[: masks.ROW], table[masks.ROW : 2 * masks.ROW]
    copied = replace(rows[2], key=rows[0].key)
    quiet = replace(rows[2], records=0)
    for bad in (
        b"",
        first,
        table[:-1],
        table + b"\0",
        second + first,
        first + first,
        first + second + second,
    ):
        with pytest.raises(Refused, match="cohort"):
            masks.read_table(bad)
    for row in (copied, quiet):
        with pytest.raises(Refused, match="cohort"):
            masks.read_table(masks.write_table([*rows[:2], row]))


def test_a_key_counts_only_with_its_own_identitys_signature_for_this_problem_run_and_epoch():
    row = Member(0).row
    assert masks.is_signed(row, **ABOUT)
    assert not masks.is_signed(row, **ABOUT | {"run": "run-2"})
    assert not masks.is_signed(row, **ABOUT | {"definition": "ac" * 32})
    for changed in (
        replace(row, epoch=bytes(16)),
        replace(row, key=Member(1).row.key),
        replace(row, identity=Member(1).row.identity),
        replace(row, signature=bytes(64)),
    ):
        assert not masks.is_signed(changed, **ABOUT)


@pytest.mark.parametrize(
    "point", [bytes(32), (1).to_bytes(32, "little"), (2**255 - 20).to_bytes(32, "little")]
)
def test_a_key_without_a_secret_is_refused(point):
    members, _rows = cohort(3)
    weak = masks.read_table(
        masks.write_table([*(m.row for m in members[:2]), replace(members[2].row, key=point)])
    )
    with pytest.raises(Refused, match="cohort"):
        members[0].answer(np.zeros(4, np.int64), weak)


def test_the_modulus_is_the_smallest_in_which_nothing_wraps():
    assert [masks.modulus_for(n) for n in (1, 2**31 - 1, 2**31, 2**62)] == [32, 32, 64, 64]
    with pytest.raises(BadInput, match="more than 64 bits hold"):
        masks.modulus_for(2**63)
