"""Find where a function changes its sign, by Brent's method.

It gives the same bits as scipy.optimize.brentq. scipy.optimize takes a third of a second to load,
and every process that opens a ledger would pay for it.
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
    """Return the root between low and high, to this accuracy.

    Raise ValueError if the function has the same sign at both ends or is NaN somewhere. Raise
    RuntimeError if `STEPS` steps are too few.
    """
    before = float(low)
    x = float(high)
    f_before = _number(function(before))
    f = _number(function(x))
    if f_before == 0 or f == 0:
        if f_before == 0:
            return before
        return x
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
            # x is always the end with the smaller value
            before = x
            x = other
            other = before
            f_before = f
            f = f_other
            f_other = f_before
        least = (accuracy + relative * abs(x)) / 2
        half = (other - x) / 2
        if f == 0 or abs(half) < least:
            return x
        if abs(last) > least and abs(f) < abs(f_before):
            candidate = _step(x, before, other, f, f_before, f_other)
        else:
            candidate = math.inf
        if 2 * abs(candidate) < min(abs(last), 3 * abs(half) - least):
            last = step
            step = candidate
        else:  # bisect
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
    """Return a value of the function. Raise ValueError if it is NaN."""
    if math.isnan(value):
        raise ValueError("the function is NaN at some place, so it has no sign there")
    return float(value)


def _step(
    x: float, before: float, other: float, f: float, f_before: float, f_other: float
) -> float:
    """Return the next step, by a line through two points or a parabola through three.

    It is infinite if the line or parabola has no slope.
    """
    try:
        if before == other:
            return -f * (x - before) / (f - f_before)
        slope = (f_before - f) / (before - x)
        steep = (f_other - f) / (other - x)
        return -f * (f_other * steep - f_before * slope) / (steep * slope * (f_other - f_before))
    except ZeroDivisionError:
        return math.inf
