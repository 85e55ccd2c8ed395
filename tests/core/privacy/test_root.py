"""The search for a change of sign is scipy's, to the last bit: the noise of every plan, and what a
ledger has left, rest on it.
"""

import math

import numpy as np
import pytest
from scipy import optimize

from silodp.core.privacy.accounting import gdp_delta
from silodp.core.privacy.root import root

CASES = [
    *[(lambda e, m=m: gdp_delta(m, e) - 1e-6, 0.0, 60.0, 1e-12) for m in (0.01, 0.3, 1.0, 4.0)],
    *[(lambda m, e=e: gdp_delta(m, e) - 1e-8, 0.0, 40.0, 1e-15) for e in (0.1, 1.0, 8.0)],
    (lambda x: -1.0 if x < math.pi else 1.0, 0.0, 7.0, 1e-6),
    (lambda x: x**3 - 2 * x - 5, 2.0, 3.0, 1e-12),
    (lambda x: math.atan(x) * 1e-200, -3.0, 17.0, 1e-13),  # products of slopes vanish
    (lambda x: x, 0.0, 1.0, 1e-9),
    (lambda x: x - 1, 0.0, 1.0, 1e-9),
    (lambda x: np.float64(x) ** 5 - 0.1, -1.0, 2.0, 1e-12),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_it_asks_at_the_same_places_and_ends_at_the_same_as_scipys(case):
    function, low, high, accuracy = CASES[case]
    asked = {"mine": [], "scipys": []}

    def seen(by):
        return lambda x: (asked[by].append(x), function(x))[1]

    mine = root(seen("mine"), low, high, accuracy)
    theirs = optimize.brentq(seen("scipys"), low, high, xtol=accuracy, rtol=1e-13)
    assert (mine, asked["mine"]) == (theirs, asked["scipys"])


@pytest.mark.parametrize(
    "function",
    [lambda x: x * x + 1, lambda x: math.nan, lambda x: math.nan if 0 < x < 1 else x - 0.3],
)
def test_what_has_no_root_is_an_error(function):
    with pytest.raises(ValueError, match="sign"):
        root(function, 0.0, 1.0, 1e-9)
