"""What mechanisms have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from silodp.core.numbers import Number
from silodp.core.sampling import DisjointBatches, Sampling


class Clipped:
    """What mechanisms have in common: they clip, and they take a batch."""

    clip: Number
    sampling: Sampling

    def clipped(self, clip: Number) -> Self:
        """The same mechanism at another clip: the noise follows the clip, the price stays."""
        return replace(self, clip=clip)  # type: ignore[type-var]

    def at(self, index: int) -> Self:
        """The mechanism of round `index`: takes that batch of a partition; other samplings draw anew by themselves."""
        if isinstance(self.sampling, DisjointBatches):
            return replace(self, sampling=replace(self.sampling, index=index))  # type: ignore[type-var]
        return self
