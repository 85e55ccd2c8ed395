"""The weighted mean of answers as they come, in the memory of a sum.

Formal guarantees: the bits follow from the answers that count and from their weights alone. They do
not depend on the order in which the answers came.

1. Answers are added in the order of the silos' numbers, in float64 by NumPy.
2. NumPy rounds each product and each sum once, by IEEE 754, on every machine.
3. One division follows, and one rounding to the model's type.

An answer that comes before its turn waits in memory while there is room. Otherwise it is read from
the disk again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

ROOM = 2**28
"""Most bytes of answers that wait in memory for their turn."""
BLOCK = 2**15
"""Numbers that are weighed at once. Their products stay in the processor's cache and take no memory
of their own.
"""


class Mean:
    """Add up the answers of silos in this order, with these weights."""

    def __init__(
        self, order: Sequence[int], weights: Sequence[float], read: Callable[[int], np.ndarray]
    ) -> None:
        """Begin with no answer. `read` returns the answer of a silo from the disk."""
        self._weights = dict(zip(order, weights, strict=True))
        self._read = read
        self._order = tuple(order)
        self._next = 0
        self._waiting: dict[int, np.ndarray | None] = {}
        """Answers that came before their turn. None stands for one that is on the disk."""
        self._room = ROOM
        self._begin()

    def _begin(self) -> None:
        """Forget the sum."""
        self._sum: np.ndarray | None = None
        self._total = 0.0
        self._added: list[int] = []

    def add(self, silo: int, value: np.ndarray) -> None:
        """Add an answer if it is its turn, and the answers that waited for it."""
        if value.nbytes <= self._room:
            self._room -= value.nbytes
            self._waiting[silo] = value
        else:
            self._waiting[silo] = None
        while self._next < len(self._order):
            first = self._order[self._next]
            if first not in self._waiting:
                break
            if first == silo:
                self._take(first, value)
            else:
                self._take(first)
            self._next += 1

    def of(self, silos: Sequence[int], weights: Sequence[float]) -> np.ndarray:
        """Return the mean of these answers, all of which have come. Add them up again where weights
        or silos are not the expected ones.
        """
        same_weights = weights == [self._weights[silo] for silo in silos]
        same_silos = self._added == list(silos[: len(self._added)])
        if not (same_weights and same_silos):
            self._begin()
            self._weights |= dict(zip(silos, weights, strict=True))
        for silo in silos[len(self._added) :]:
            self._take(silo)
        assert self._sum is not None
        return self._sum / self._total

    def _take(self, silo: int, value: np.ndarray | None = None) -> None:
        """Add the answer of a silo: the one given, the one that waited, or the one on the disk."""
        waited = self._waiting.pop(silo, None)
        if waited is not None:
            self._room += waited.nbytes
        if value is None:
            if waited is None:
                value = self._read(silo)
            else:
                value = waited
        weight = self._weights[silo]
        numbers = value.astype(np.float64, copy=False)
        if self._sum is None:
            self._sum = numbers * weight
        else:
            for start in range(0, len(numbers), BLOCK):
                part = slice(start, start + BLOCK)
                self._sum[part] += numbers[part] * weight
        self._total += weight
        self._added.append(silo)
