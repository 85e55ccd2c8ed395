"""Where a function changes its sign, by Brent's method: scipy.optimize.brentq, bit for bit, in
every process that opens a ledger.

scipy.optimize itself takes a third of a second to load, which a gate would pay for this one search.
"""

import math
from collections.abc import Callable

STEPS = 100


def root(
    function: Callable[[float], float],
    low: float,
    high: float,
    accuracy: float,
    relative: float = 1e-13,
) -> float:
    """The place between low and high, to this accuracy; the function's signs there must differ."""
    before = float(low)
    x = float(high)
    f_before = _number(function(before))
    f = _number(function(x))
    if f_before == 0 or f == 0:
        return before if f_before == 0 else x
    if math.copysign(1, f_before) == math.copysign(1, f):
        raise ValueError(
            f"the function has no change of sign between {low:g} and {high:g}: it is "
            f"{f_before:g} and {f:g} there"
        )
    # the root is between x and other
    other = before
    f_other = f_before
    step = x - before
    last = x - before
    for _ in range(STEPS):
        if f_before != 0 and f != 0 and math.copysign(1, f_before) != math.copysign(1, f):
            other = before
            f_other = f_before
            step = last = x - before
        if abs(f_other) < abs(f):
            before, x, other = x, other, x
            f_before, f, f_other = f, f_other, f
        least = (accuracy + relative * abs(x)) / 2
        half = (other - x) / 2
        if f == 0 or abs(half) < least:
            return x
        if abs(last) > least and abs(f) < abs(f_before):
            tried = _step(x, before, other, f, f_before, f_other)
        else:
            tried = math.inf
        if 2 * abs(tried) < min(abs(last), 3 * abs(half) - least):
            last = step
            step = tried
        else:
            last = half
            step = half
        before = x
        f_before = f
        if abs(step) > least:
            x += step
        else:
            x += math.copysign(least, half)
        f = _number(function(x))
    raise RuntimeError(f"no root was found in {STEPS} steps between {low:g} and {high:g}")


def _number(value: float) -> float:
    if math.isnan(value):
        raise ValueError("the function is no number at some place, so that its sign says nothing")
    return float(value)


def _step(
    x: float, before: float, other: float, f: float, f_before: float, f_other: float
) -> float:
    """By a line through two points, or by a parabola through three; infinite where neither has a
    slope.
    """
    try:
        if before == other:
            return -f * (x - before) / (f - f_before)
        slope = (f_before - f) / (before - x)
        steep = (f_other - f) / (other - x)
        return -f * (f_other * steep - f_before * slope) / (steep * slope * (f_other - f_before))
    except ZeroDivisionError:
        return math.inf
