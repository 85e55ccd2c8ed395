"""Numbers as integers of a few bytes: what query and n decide, and no number."""

import math

import numpy as np
import pytest
import torch

from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event
from silodp.core.protocol.codec import OVERHEAD, Answer, decode_reply, encode_reply
from silodp.core.protocol.frames import VERSION, sign_frame
from silodp.core.protocol.packing import FINE, Packing
from silodp.core.sampling import FullBatch


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
    lengths = {
        packing.packed(np.full(5, v)).nbytes for v in (0.0, 1e-300, 1.0, 1e30, math.inf, -math.inf)
    }
    assert lengths == {15}
    assert packing.unpacked(packing.packed(np.array([1e30, -1e30]))).tolist() == [
        0.5 * (2**23 - 1) / 10,
        -0.5 * (2**23 - 1) / 10,
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        (0.3, 1.0, 3),
        (0.0, 1.0, 3),
        (math.inf, 1.0, 3),
        (0.5, -1.0, 3),
        (0.5, math.nan, 3),
        (0.5, 1.0, 2),
        (0.5, 1.0, 7),
    ],
)
def test_senseless_packings_are_refused(wrong):
    with pytest.raises(BadInput):
        Packing(*wrong)


def test_a_packed_reply_comes_back_on_its_lattice_and_no_other_spelling_does():
    packing = Packing(2.0**-10, 50.0, 3)
    value = torch.from_numpy(2.0**-10 * np.arange(-500, 500.0) / 50.0)[None]
    frame = encode_reply(
        Answer("silo", "q", "0" * 64, value, Event(FullBatch(), 1.0, 1), 1, "0" * 64, packing)
    )
    got = decode_reply(frame, limit=2**20)
    assert isinstance(got, Answer)
    assert torch.equal(got.value, value)
    assert len(frame) < 4 * 1000
    body = frame[OVERHEAD:]
    for old, new in (
        (b'"U8"', b'"F64"'),
        (b"[1000,3]", b"[3000,1]"),
        (b"0x1.0000000000000p-10", b"0x1.8000000000000p-10"),
    ):
        assert old in body
        changed = body.replace(old, new)
        with pytest.raises(Refused, match="malformed"):
            decode_reply(sign_frame(b"SDPR", VERSION, changed, None), limit=2**20)
