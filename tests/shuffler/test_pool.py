"""Which boxes count, and that nothing but a total of them comes out."""

import itertools
import random

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from mixing import (
    BITS,
    DIMENSION,
    LARGEST,
    OTHER,
    ROUND,
    SEAL,
    STRANGER,
    box,
    counts_of,
    digest,
    pool,
    request,
)
from silodp.core.errors import Refused
from silodp.core.protocol.box import _INFO, _SUITE
from silodp.core.protocol.relay import DROPPED, Request
from silodp.host.keys import public

GOOD = [box(i) for i in range(3)]


def sum_of(*members: int) -> list[int]:
    return np.sum([counts_of(i) for i in members], axis=0).tolist()


def declined(*boxes: bytes) -> str:
    with pytest.raises(Refused) as refusal:
        pool().total(request(*boxes))
    return refusal.value.code


def test_what_comes_out_is_the_sum_and_how_many_silos_and_records_are_in_it():
    passed = pool().total(request(*GOOD))
    assert passed.totals.tolist() == sum_of(0, 1, 2)
    assert passed.totals.shape == (DIMENSION,)
    assert (passed.round, passed.contributions, passed.records, passed.dropped) == (
        ROUND,
        3,
        300,
        {},
    )


def resealed(content: bytes, was: str = ROUND, *, flip: int = 0) -> bytes:
    """A box for this round with the plain text of another, but for the bits `flip` of one count."""
    plain = bytearray(_SUITE.decrypt(content, SEAL, _INFO + bytes.fromhex(was)))
    plain[80] ^= flip
    return _SUITE.encrypt(bytes(plain), SEAL.public_key(), _INFO + bytes.fromhex(ROUND))


ODD = {
    "malformed": [
        GOOD[0][:-1] + bytes([GOOD[0][-1] ^ 1]),
        GOOD[0][:31]
        + bytes([GOOD[0][31] ^ 128])
        + GOOD[0][32:],  # a bit that X25519 itself does not look at
        bytes(len(GOOD[0])),
        box(3, OTHER),  # another round's
        resealed(box(3, OTHER), OTHER),
        box(3, key=public(X25519PrivateKey.generate())),
        box(3, counts=np.full(DIMENSION, 100 * BITS + 1)),
        box(3, counts=np.full(DIMENSION, -1)),
    ],
    "signature": [resealed(GOOD[0], flip=1)],
    "stranger": [box(STRANGER), box(Ed25519PrivateKey.generate(), records=LARGEST, demanded=1)],
    "records": [box(3, records=LARGEST + 1)],
    "differs": [
        box(3, bits=BITS + 1),
        box(3, bits=BITS - 1),
        box(3, counts=counts_of(3)[:-1]),
        box(3, counts=np.append(counts_of(3), 1)),
    ],
    "too-few": [box(3, demanded=401), box(3, demanded=2**52)],
}
"""Boxes that are left out, by the code."""


@pytest.mark.parametrize(
    ("code", "odd"),
    [(code, odd) for code, boxes in ODD.items() for odd in boxes],
    ids=lambda v: v if v in ODD else "",
)
def test_a_box_that_does_not_count_is_dropped_with_its_code_and_the_rest_passes(code, odd):
    passed = pool().total(request(odd, *GOOD))
    assert passed.totals.tolist() == sum_of(0, 1, 2)
    assert (passed.contributions, passed.records, passed.dropped) == (3, 300, {digest(odd): code})


def test_every_code_of_a_dropped_box_is_seen_here_and_is_a_sentence():
    assert set(DROPPED) == {*ODD, "duplicate"}
    assert all(text.endswith(".") for text in DROPPED.values())


def test_of_two_boxes_of_a_pseudonym_the_one_with_the_smaller_hash_counts_whatever_their_order():
    again = box(0, counts=counts_of(7))
    first, second = sorted([GOOD[0], again], key=digest)
    expected = sum_of(0, 1, 2) if first == GOOD[0] else sum_of(7, 1, 2)
    for boxes in itertools.permutations([*GOOD, again]):
        passed = pool().total(request(*boxes))
        assert passed.totals.tolist() == expected
        assert (passed.contributions, passed.records, passed.dropped) == (
            3,
            300,
            {digest(second): "duplicate"},
        )


def test_the_same_bytes_again_count_once_and_are_not_reported():
    passed = pool().total(request(*GOOD, GOOD[1], GOOD[1]))
    assert (passed.contributions, passed.records, passed.dropped) == (3, 300, {})
    assert passed.totals.tolist() == sum_of(0, 1, 2)


def test_a_box_that_differs_does_not_keep_the_members_good_one_out():
    passed = pool().total(request(*GOOD, *(box(0, bits=BITS + k) for k in range(1, 6))))
    assert passed.totals.tolist() == sum_of(0, 1, 2)
    assert list(passed.dropped.values()) == ["differs"] * 5


# --- demands -------------------------------------------------------------------------------------


def test_below_what_the_members_demand_nothing_passes():
    assert declined(*GOOD[:2]) == "too-few"
    assert declined(*GOOD[:2], box(2, records=99)) == "too-few"
    assert pool().total(request(*GOOD)).records == 300


def test_a_total_of_one_is_never_passed_on_even_if_it_demands_no_more():
    assert declined(box(0, demanded=1)) == "too-few"
    assert declined(box(0, demanded=1), *GOOD[1:2]) == "too-few"
    assert pool().total(request(box(0, demanded=1), box(1, demanded=1))).contributions == 2


def test_nobodys_records_count_twice_or_from_outside_towards_a_demand():
    """The server's own boxes, copies, a second box of a member and other rounds' boxes bring no
    record.
    """
    fillers = [
        box(STRANGER, records=LARGEST),
        box(Ed25519PrivateKey.generate(), records=LARGEST),
        box(2, OTHER),
        GOOD[0],
        box(0),
    ]
    assert declined(*GOOD[:2], *fillers) == "too-few"


def test_who_demands_too_much_is_taken_out_and_the_others_demands_must_still_hold():
    chain = [box(0, demanded=100), box(1, demanded=200), box(2, demanded=350), box(3, demanded=500)]
    passed = pool().total(
        request(*chain)
    )  # 400 records: 3 goes; 300: 2 goes; 200: 0 and 1 are content
    assert (passed.contributions, passed.records) == (2, 200)
    assert passed.totals.tolist() == sum_of(0, 1)
    assert passed.dropped == {digest(chain[2]): "too-few", digest(chain[3]): "too-few"}


def test_on_random_rounds_every_demand_holds_and_no_larger_set_would_do():
    generator = random.Random(5)
    passed_on = 0
    for _ in range(60):
        sizes = [(generator.randint(1, 50), generator.randint(1, 160)) for _ in range(4)]
        boxes = [
            box(i, records=n, demanded=wanted, counts=counts_of(i) % BITS)
            for i, (n, wanted) in enumerate(sizes)
        ]
        generator.shuffle(boxes)
        fitting = [
            members
            for k in range(2, 5)
            for members in itertools.combinations(range(4), k)
            if all(sizes[i][1] <= sum(sizes[j][0] for j in members) for i in members)
        ]
        if not fitting:
            assert declined(*boxes) == "too-few"
            continue
        passed, largest = pool().total(request(*boxes)), fitting[-1]
        assert (
            passed.totals.tolist()
            == np.sum([counts_of(i) % BITS for i in largest], axis=0).tolist()
        )
        assert (passed.contributions, passed.records) == (
            len(largest),
            sum(sizes[i][0] for i in largest),
        )
        passed_on += 1
    assert 10 < passed_on < 55


def test_a_total_that_would_not_fit_is_refused():
    huge = tuple(
        box(i, bits=2**52, records=300, counts=np.full(DIMENSION, 2**50)) for i in range(4)
    )
    with pytest.raises(Refused, match="range"):
        pool().total(Request(ROUND, DIMENSION, 2**52, huge))
