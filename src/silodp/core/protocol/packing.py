"""An answer's numbers as integers of a few bytes each, on a lattice and in a range that query and n
decide: neither follows from what a record holds.

A release is (unit x integer) / divisor already. Its noise is many units wide, so the integers may
be rounded to a coarser unit, and a sum that noise of 12 standard deviations would have to take past
the range is kept within it: both are post-processing, and cost less than 2^-11 of the noise's
variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from silodp.core.errors import BadInput

LEAST = 3
"""Bytes of a number, at least."""
FINE = 64
"""Steps to a standard deviation of the noise, of which rounding the range up to powers of two may
leave a quarter.
"""
BLOCK = 2**15
"""Numbers that are unpacked at once."""


@dataclass(frozen=True)
class Packing:
    """Numbers unit x k / divisor, each k an integer of `width` bytes."""

    unit: float
    divisor: float
    width: int

    def __post_init__(self) -> None:
        sound = (
            all(math.isfinite(v) and v > 0 for v in (self.unit, self.divisor))
            and math.frexp(self.unit)[0] == 0.5
        )
        if not (sound and LEAST <= self.width <= 6):
            raise BadInput(
                "numbers are packed with a unit that is a power of two, a divisor above 0, "
                "and 3 to 6 bytes each"
            )

    @classmethod
    def of(cls, step: float, divisor: float, most: float, scale: float) -> Packing | None:
        """For sums in multiples of `step`, at most `most` steps large, with noise of `scale` steps;
        None where 6 bytes are too few.
        """
        width = LEAST
        while most * FINE > scale * 2.0 ** (8 * width - 1):
            width += 1
        if most:
            coarser = max(0, math.ceil(math.log2(most / 2.0 ** (8 * width - 1))) + 1)
        else:
            coarser = 0
        if width <= 6:
            return cls(math.ldexp(step, coarser), divisor, width)
        return None

    def packed(self, value: np.ndarray) -> np.ndarray:
        """(d, width) bytes of the numbers (d,), little-endian in two's complement."""
        top = 2.0 ** (8 * self.width - 1) - 1
        scaled = value * (self.divisor / self.unit)
        whole = np.clip(np.rint(scaled, out=scaled), -top, top, out=scaled).astype(
            f"<i{self._size}"
        )
        return np.ascontiguousarray(whole[:, None].view(np.uint8)[:, : self.width])

    def unpacked(self, data: np.ndarray) -> np.ndarray:
        """The numbers (d,) in float64."""
        spare = self._size - self.width
        found = np.empty(len(data))
        for start in range(0, len(data), BLOCK):  # in the memory of a block
            part = data[start : start + BLOCK]
            wide = (
                bytes(spare) + part.tobytes()
            )  # each integer is read with the bytes before it, which a shift takes away
            whole = (
                np.ndarray(len(part), f"<i{self._size}", wide, strides=(self.width,)) >> 8 * spare
            )
            found[start : start + BLOCK] = whole * self.unit / self.divisor
        return found

    @property
    def _size(self) -> int:
        return 8 if self.width > 4 else 4
