"""Which boxes count, and that nothing but a total of them comes out."""

import itertools

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from mixing import (
    DIMENSION,
    OTHER,
    ROUND,
    SEAL,
    STRANGER,
    box,
    digest,
    numbers_of,
    pool,
    request,
)
from silodp.core.errors import Refused
from silodp.core.protocol.box import _INFO, _SUITE
from silodp.core.protocol.relay import DROPPED
from silodp.host.keys import public

GOOD = [box(i) for i in range(3)]


def sum_of(*members: int) -> list[int]:
    return np.sum([numbers_of(i) for i in members], axis=0).tolist()


def declined(*boxes: bytes) -> str:
    with pytest.raises(Refused) as refusal:
        pool().total(request(*boxes))
    return refusal.value.code


def test_what_comes_out_is_the_sum_and_how_many_silos_are_in_it():
    passed = pool().total(request(*GOOD))
    assert passed.totals.tolist() == sum_of(0, 1, 2)
    assert passed.totals.shape == (DIMENSION,)
    assert (passed.round, passed.contributions, passed.dropped) == (ROUND, 3, {})


def resealed(content: bytes, was: str = ROUND, *, flip: int = 0) -> bytes:
    """A box for this round with the plain text of another, but for the bits `flip` of a number."""
    plain = bytearray(_SUITE.decrypt(content, SEAL, _INFO + bytes.fromhex(was)))
    plain[64] ^= flip
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
        box(3, demanded=0),
    ],
    "signature": [resealed(GOOD[0], flip=1)],
    "stranger": [box(STRANGER), box(Ed25519PrivateKey.generate(), demanded=1)],
    "differs": [
        box(3, numbers=numbers_of(3)[:-1]),
        box(3, numbers=np.append(numbers_of(3), 1)),
    ],
    "too-few": [box(3, demanded=5), box(3, demanded=2**52)],
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
    assert (passed.contributions, passed.dropped) == (3, {digest(odd): code})


def test_every_code_of_a_dropped_box_is_seen_here_and_is_a_sentence():
    assert set(DROPPED) == {*ODD, "duplicate"}
    assert all(text.endswith(".") for text in DROPPED.values())


def test_of_two_boxes_of_a_pseudonym_the_one_with_the_smaller_hash_counts_whatever_their_order():
    again = box(0, numbers=numbers_of(7))
    first, second = sorted([GOOD[0], again], key=digest)
    expected = sum_of(0, 1, 2) if first == GOOD[0] else sum_of(7, 1, 2)
    for boxes in itertools.permutations([*GOOD, again]):
        passed = pool().total(request(*boxes))
        assert passed.totals.tolist() == expected
        assert (passed.contributions, passed.dropped) == (3, {digest(second): "duplicate"})


def test_the_same_bytes_again_count_once_and_are_not_reported():
    passed = pool().total(request(*GOOD, GOOD[1], GOOD[1]))
    assert (passed.contributions, passed.dropped) == (3, {})
    assert passed.totals.tolist() == sum_of(0, 1, 2)


def test_a_box_that_differs_does_not_keep_the_members_good_one_out():
    passed = pool().total(request(*GOOD, *(box(0, numbers=np.arange(k)) for k in range(1, 6))))
    assert passed.totals.tolist() == sum_of(0, 1, 2)
    assert list(passed.dropped.values()) == ["differs"] * 5


# --- demands -------------------------------------------------------------------------------------


def test_below_what_the_members_demand_nothing_passes():
    assert declined(*GOOD[:2]) == "too-few"
    assert pool().total(request(*GOOD)).contributions == 3


def test_a_total_of_one_is_never_passed_on_even_if_it_demands_no_more():
    assert declined(box(0, demanded=1)) == "too-few"
    assert declined(box(0, demanded=1), *GOOD[1:2]) == "too-few"
    assert pool().total(request(box(0, demanded=1), box(1, demanded=1))).contributions == 2


def test_nobody_counts_twice_or_from_outside_towards_a_demand():
    """The server's own boxes, copies, a second box of a member and other rounds' boxes bring no
    silo.
    """
    fillers = [
        box(STRANGER),
        box(Ed25519PrivateKey.generate()),
        box(2, OTHER),
        GOOD[0],
        box(0),
    ]
    assert declined(*GOOD[:2], *fillers) == "too-few"


def test_who_demands_too_much_is_taken_out_and_the_others_demands_must_still_hold():
    chain = [box(0, demanded=1), box(1, demanded=2), box(2, demanded=4), box(3, demanded=5)]
    passed = pool().total(request(*chain))  # of 4 silos 3 goes; of 3, 2 goes; 0 and 1 are content
    assert passed.contributions == 2
    assert passed.totals.tolist() == sum_of(0, 1)
    assert passed.dropped == {digest(chain[2]): "too-few", digest(chain[3]): "too-few"}


def test_in_every_round_every_demand_holds_and_no_larger_set_would_do():
    passed_on = 0
    for wanted in itertools.product(range(1, 6), repeat=4):
        boxes = [box(i, demanded=demanded) for i, demanded in enumerate(wanted)]
        fitting = [
            members
            for k in range(2, 5)
            for members in itertools.combinations(range(4), k)
            if all(wanted[i] <= k for i in members)
        ]
        if sum(wanted) % 5:
            continue  # a fifth of them will do
        if not fitting:
            assert declined(*boxes) == "too-few"
            continue
        passed, largest = pool().total(request(*boxes)), fitting[-1]
        assert passed.totals.tolist() == sum_of(*largest)
        assert passed.contributions == len(largest)
        passed_on += 1
    assert 30 < passed_on < 120


def test_totals_are_modulo_two_to_the_64():
    huge = tuple(box(i, numbers=np.full(DIMENSION, 2**62)) for i in range(3))
    assert pool().total(request(*huge)).totals.tolist() == [3 * 2**62 - 2**64] * DIMENSION
