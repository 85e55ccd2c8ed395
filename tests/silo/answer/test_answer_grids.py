"""What torch's own interpreter makes of a layer's factors is what Python makes of them, to the last
bit, and a record's own.
"""

import math

import pytest
import torch

from silodp.silo.answer.grids import inputs_of, on_grids, run, scale_of, square_of, within


def factors(terms, places, seed=0):
    rng = torch.Generator().manual_seed(seed)
    made = [
        [torch.randn(40, places, width, generator=rng) for _ in range(terms)] for width in (7, 3)
    ]
    for at, bad in enumerate((math.nan, math.inf, -math.inf, 3e38, 1e-40, 0.0)):
        made[at % 2][0][at, 0, at % 3] = bad
    return made


def numbers(call, terms, places, bias):
    """Every number of a chunk, by functions that `call` has made ready."""
    inputs, slopes = factors(terms, places)
    a, aa, tops, length = call(inputs_of)(inputs, bias, 2.0**21)
    square = call(square_of)(inputs, slopes, bias, length)
    scale, sound = call(scale_of)([square, 0.5 * square], 0.9)
    v, length = call(on_grids)(a, aa, tops, slopes, scale, 2.0**22, 2.0**-20)
    return [square, scale, sound, a, v, length, call(within)([length], 1.0, 2.0**80, sound)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("terms", "places"), [(1, 1), (2, 1), (1, 4), (2, 3)])
def test_torchs_interpreter_gives_the_same_bits_as_python_in_every_call(terms, places, bias):
    plain = numbers(lambda function: function, terms, places, bias)
    for _ in range(4):  # it looks at the first calls, and may arrange the later ones otherwise
        for mine, theirs in zip(
            plain,
            numbers(lambda function: run(function, torch.zeros(1)), terms, places, bias),
            strict=True,
        ):
            assert torch.equal(mine.nan_to_num(-1.0), theirs.nan_to_num(-1.0))


def test_a_record_that_is_not_finite_has_no_integers_and_the_others_keep_theirs():
    *_, sound, a, v, _, kept = numbers(lambda function: function, 1, 1, True)
    assert 0 < int((~sound).sum()) < 6
    assert torch.isfinite(a).all()  # so that no product meets an infinity
    assert not v[~sound].any()
    assert not kept[~sound].any()
    inputs, slopes = factors(1, 1)
    inputs, slopes = ([part.nan_to_num(0.0, 0.0, 0.0)] for (part,) in (inputs, slopes))
    right, lengths, tops, length = inputs_of(inputs, True, 2.0**21)
    square = square_of(inputs, slopes, True, length)
    scale, _ = scale_of([square, 0.5 * square], 0.9)
    alone, _ = on_grids(right, lengths, tops, slopes, scale, 2.0**22, 2.0**-20)
    assert torch.equal(right[sound], a[sound])
    assert torch.equal(alone[sound], v[sound])
