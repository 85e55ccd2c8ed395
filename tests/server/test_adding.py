"""A mean that is added up as answers come: the same bits in whatever order they come, whether they
waited in memory or on the disk.
"""

import itertools

import numpy as np
import pytest

from silodp.server import adding
from silodp.server.adding import Mean

VALUES = np.random.default_rng(3).normal(size=(5, 7)) * 10.0 ** np.arange(-8, 12, 4)[:, None]
WEIGHTS = [3.0, 1.0, 0.1, 7.0, 2.5]


def mean(order, members, weights=WEIGHTS, read=VALUES.__getitem__) -> np.ndarray:
    adder = Mean(range(5), weights, read)
    for silo in order:
        adder.add(silo, VALUES[silo])
    return adder.of(members, [WEIGHTS[i] for i in members])


@pytest.mark.parametrize("room", [0, 2 * VALUES[0].nbytes, 2**20])
def test_the_bits_are_those_of_a_sum_in_the_silos_order_whatever_the_order_of_arrival_and_whoever_is_missing(  # noqa: E501
    monkeypatch, room
):
    monkeypatch.setattr(adding, "ROOM", room)
    for members in ([0, 1, 2, 3, 4], [0, 2, 3], [4], [1, 4]):
        total = np.zeros(7)
        for i in members:
            total = total + VALUES[i] * WEIGHTS[i]
        weight = 0.0
        for i in members:
            weight += WEIGHTS[i]
        for order in itertools.permutations(members):
            np.testing.assert_array_equal(mean(order, members), total / weight)


def test_other_orders_of_summation_would_differ_so_the_test_above_can_fail():
    sums = {tuple(sum(VALUES[list(order)])) for order in itertools.permutations(range(5))}
    assert len(sums) > 1


def test_what_there_is_no_room_for_is_read_again_and_the_rest_is_not(monkeypatch):
    seen = []
    read = lambda i: seen.append(i) or VALUES[i]  # noqa: E731
    mean([3, 1, 0, 2, 4], [0, 1, 2, 3, 4], read=read)
    assert seen == []
    monkeypatch.setattr(adding, "ROOM", VALUES[0].nbytes)
    mean([3, 1, 0, 2, 4], [0, 1, 2, 3, 4], read=read)
    assert seen == [1]


def test_weights_that_turn_out_otherwise_begin_the_sum_anew():
    """As where the one silo that adds no noise stays away, and the others' precisions count
    again.
    """
    expected = mean([0, 1, 2], [0, 1, 2])
    np.testing.assert_array_equal(
        mean([0, 1, 2], [0, 1, 2], weights=[0.0, 0.0, 0.0, 1.0, 0.0]), expected
    )
