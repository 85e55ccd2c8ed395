"""The weighted mean of answers as they come, in the memory of a sum.

Formal guarantees: the bits follow from the answers that count and their weights alone, and not from
the order in which they came. They are added in the order of the silos' numbers, in float64 by
NumPy, whose product and sum are each rounded once (as IEEE 754 says) on every machine; then one
division, and one rounding to the model's type. Whoever comes before its turn waits: in memory while
there is room, and else on the disk, whence it is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

ROOM = 2**28
"""Bytes of answers that wait in memory for their turn."""
BLOCK = 2**15
"""Numbers that are weighed at once: their products stay in the processor's cache, and take no
memory of their own.
"""


class Mean:
    """Of silos that are expected `order`ly, with so much `weight` each; `read` gives the answer of
    one that was let go of.
    """

    def __init__(
        self, order: Sequence[int], weights: Sequence[float], read: Callable[[int], np.ndarray]
    ) -> None:
        self._weights, self._read = dict(zip(order, weights, strict=True)), read
        self._order, self._next = tuple(order), 0
        self._waiting: dict[int, np.ndarray | None] = {}
        self._room = ROOM
        self._begin()

    def _begin(self) -> None:
        self._sum: np.ndarray | None = None
        self._total = 0.0
        self._added: list[int] = []

    def add(self, silo: int, value: np.ndarray) -> None:
        """An answer has come: it is added if it is its turn, with those that waited for it."""
        held = value.nbytes <= self._room
        self._room -= value.nbytes if held else 0
        self._waiting[silo] = value if held else None
        while self._next < len(self._order) and (first := self._order[self._next]) in self._waiting:
            given = value if first == silo else None
            self._take(first, given)
            self._next += 1

    def of(self, silos: Sequence[int], weights: Sequence[float]) -> np.ndarray:
        """The mean over these, all of which have come, with these weights: as expected, or all is
        added anew.
        """
        if weights != [self._weights[i] for i in silos] or self._added != list(
            silos[: len(self._added)]
        ):
            self._begin()
            self._weights |= dict(zip(silos, weights, strict=True))
        for silo in silos[len(self._added) :]:
            self._take(silo)
        assert self._sum is not None
        return self._sum / self._total

    def _take(self, silo: int, value: np.ndarray | None = None) -> None:
        waited = self._waiting.pop(silo, None)
        self._room += waited.nbytes if waited is not None else 0
        given = next((v for v in (value, waited) if v is not None), None)
        given, weight = self._read(silo) if given is None else given, self._weights[silo]
        given = given.astype(np.float64, copy=False)
        if self._sum is None:
            self._sum = given * weight
        else:
            for start in range(0, len(given), BLOCK):
                part = slice(start, start + BLOCK)
                self._sum[part] += given[part] * weight
        self._total += weight
        self._added.append(silo)
