"""The lattice of an answer: what its integers stand for. It follows from the question alone, so
that the integers of several silos add up."""

from __future__ import annotations

import math

from silodp.core.numbers import Number

GRAIN = 16
"""A record loses at most 2^-(GRAIN + 1) of its clip to the lattice: gamma <= 2^-GRAIN C / sqrt(d).
"""
STANDARD_DEVIATIONS = 12
"""Of the noise, for which a packing and a modulus have room."""
SHARE_STEPS = 64.0
"""Steps of a total in a silo's share of the noise, at least, for the root of each silo that counts.
So the last rounding adds less than a part of 10^-5 to the noise.
"""


def lattice_step(clip: float, dim: int) -> float:
    """Return gamma, a power of two from C and d alone, with 2^-(GRAIN + 3) C / sqrt(d) < gamma <=
    2^-GRAIN C / sqrt(d).

    With sqrt(d) <= 2^b it is 2^(e - 1 - b - GRAIN) for C in [2^(e-1), 2^e). So C / gamma < 2^(b +
    GRAIN + 1) <= 2^30 for d <= 2^26: a record's squares sum to less than 2^60, and 2^31 records to
    less than 2^61 per coordinate, to which noise adds less than 2^62. And C / gamma >= 2^GRAIN, so
    that a sensitivity of 2 C is 2^17 steps at least (`core.privacy.totals`).
    """
    root = (math.isqrt(dim - 1) if dim > 1 else 0) + 1
    return math.ldexp(1.0, math.frexp(clip)[1] - 1 - (root - 1).bit_length() - GRAIN)


def total_shift(multiplier: Number, clip: Number, dim: int, counted: int) -> int:
    """Return k: the numbers of a total are in steps of 2^k gamma.

    That is as coarse as the noise allows, so that a total fits in few bits. It follows from the
    question alone.
    """
    clip = float(clip) or 1.0
    scale = noise_scale(multiplier, clip, lattice_step(clip, dim))
    return max(0, math.frexp(scale / (SHARE_STEPS * math.sqrt(counted)))[1] - 1)


def noise_scale(multiplier: Number, clip: Number, gamma: float) -> float:
    """Return s = z 2 C / gamma in lattice units, rounded up: 2 C / gamma is exact, since gamma is a
    power of two.
    """
    return math.nextafter(float(multiplier) * (2 * float(clip) / gamma), math.inf)


def most(multiplier: Number, clip: Number, dim: int, records: int, silos: int = 1) -> float:
    """Return the largest size of a number in the sum over these silos and records, noise of
    STANDARD_DEVIATIONS included.
    """
    clip = float(clip) or 1.0
    gamma = lattice_step(clip, dim)
    noise = noise_scale(multiplier, clip, gamma) * math.sqrt(silos)
    return 2 * clip / gamma * records + STANDARD_DEVIATIONS * noise
