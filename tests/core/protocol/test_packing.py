"""Numbers as integers of a few bytes: what query and n decide, and no number."""

import math

import numpy as np
import pytest

from silodp.core.errors import BadInput
from silodp.core.protocol.packing import FINE, Packing


@pytest.mark.parametrize("width", [3, 4, 5, 6])
def test_integers_of_every_width_come_back_as_they_were(width):
    top = 2 ** (8 * width - 1) - 1
    whole = np.array([0, 1, -1, 255, 256, -256, top, -top, 2**23 - 1])
    packing = Packing(2.0**-20, 37.5, width)
    value = packing.unit * whole.astype(np.float64) / packing.divisor
    data = packing.packed(value)
    assert data.shape == (len(whole), width)
    np.testing.assert_array_equal(packing.unpacked(data), value)


def test_what_is_rounded_away_is_a_small_part_of_the_noise_and_the_range_holds():
    for records in (1, 30, 1000, 10**6):
        for multiplier in (0.01, 1.0, 50.0):
            step, radius = 2.0**-17, 2.0**17
            scale = 2 * multiplier * radius
            most = 2 * radius * records + 12 * scale
            packing = Packing.of(step, float(records), most, scale)
            assert packing is not None
            assert packing.unit <= scale * step / FINE * 2
            assert most * step / packing.unit < 2 ** (8 * packing.width - 1)
            value = np.array([-most, most, 0.3 * most, scale]) * step / records
            got = packing.unpacked(packing.packed(value))
            assert np.abs(got - value).max() <= packing.unit / records / 2 * (1 + 1e-9)
    assert Packing.of(1.0, 1.0, 2.0**60, 1.0) is None


def test_how_many_bytes_there_are_follows_from_no_number():
    packing = Packing(0.5, 10.0, 3)
    lengths = {packing.packed(np.full(5, v)).nbytes for v in (0.0, 1e-300, 1.0, 1e30, math.inf, -math.inf)}
    assert lengths == {15}
    assert packing.unpacked(packing.packed(np.array([1e30, -1e30]))).tolist() == [0.5 * (2**23 - 1) / 10, -0.5 * (2**23 - 1) / 10]


@pytest.mark.parametrize(
    "wrong", [(0.3, 1.0, 3), (0.0, 1.0, 3), (math.inf, 1.0, 3), (0.5, -1.0, 3), (0.5, math.nan, 3), (0.5, 1.0, 2), (0.5, 1.0, 7)]
)
def test_senseless_packings_are_refused(wrong):
    with pytest.raises(BadInput):
        Packing(*wrong)
