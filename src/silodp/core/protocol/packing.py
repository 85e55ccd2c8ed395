"""Pack the numbers of an answer into integers of a few bytes each.

Query and n decide the lattice and the range. Neither depends on a record's values.

A release is (unit x integer) / divisor already. Its noise is many units wide, so the integers may
be rounded to a coarser unit. A sum leaves the range only by noise of 12 standard deviations, and is
then clipped to it. Both are post-processing. Together they cost less than 2^-11 of the noise's
variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from silodp.core.errors import BadInput

LEAST = 3
"""The fewest bytes of a number."""
FINE = 64
"""Steps in one standard deviation of the noise.

Rounding the range up to powers of two may leave a quarter of them.
"""
BLOCK = 2**15
"""How many numbers are unpacked at once."""


@dataclass(frozen=True)
class Packing:
    """Numbers unit x k / divisor, where each k is an integer of `width` bytes."""

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
                f"numbers are packed with the unit {self.unit}, the divisor {self.divisor} and "
                f"{self.width} bytes each; the unit must be a power of two, the divisor above 0, "
                f"and the bytes {LEAST} to 6"
            )

    @classmethod
    def of(cls, step: float, divisor: float, most: float, scale: float) -> Packing | None:
        """Return the packing for sums in multiples of `step`.

        A sum is at most `most` steps large and has noise of `scale` steps. Return None if 6 bytes
        are too few.
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
        """Return the numbers (d,) as bytes (d, width), little-endian in two's complement."""
        top = 2.0 ** (8 * self.width - 1) - 1
        scaled = value * (self.divisor / self.unit)
        np.rint(scaled, out=scaled)
        np.clip(scaled, -top, top, out=scaled)
        integers = scaled.astype(f"<i{self._size}")
        return np.ascontiguousarray(integers[:, None].view(np.uint8)[:, : self.width])

    def unpacked(self, data: np.ndarray) -> np.ndarray:
        """Return the numbers (d,) in float64."""
        spare = self._size - self.width
        numbers = np.empty(len(data))
        for start in range(0, len(data), BLOCK):  # block by block, to bound the memory
            part = data[start : start + BLOCK]
            # Each integer is read together with the bytes before it. The shift removes these bytes
            # and extends the sign.
            wide = bytes(spare) + part.tobytes()
            shifted = np.ndarray(len(part), f"<i{self._size}", wide, strides=(self.width,))
            integers = shifted >> 8 * spare
            numbers[start : start + BLOCK] = integers * self.unit / self.divisor
        return numbers

    @property
    def _size(self) -> int:
        """Return the bytes of the smallest numpy integer with at least `width` bytes."""
        if self.width > 4:
            return 8
        return 4
