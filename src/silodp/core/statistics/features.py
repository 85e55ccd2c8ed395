"""What feature scaling asks: in which bin a value falls, and its moments."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Histogram:
    """For each feature the bin that a record falls in, one-hot over the public `edges`; each record's vector has norm sqrt(features)."""

    edges: Tensor
    features: int
    releases: int = field(default=1, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, self.features * (len(self.edges) + 1)

    @property
    def norm(self) -> float:
        """A record's largest norm: nobody clips it, so no smaller clip may be asked for."""
        return math.sqrt(self.features)


@dataclass(frozen=True, eq=False)
class Moments:
    """Each feature clamped to its public range, mapped to u in [-1, 1], and (u, u^2): each record's vector has norm <= sqrt(2 features)."""

    low: Tensor
    high: Tensor
    releases: int = field(default=1, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, 2 * len(self.low)

    @property
    def features(self) -> int:
        return len(self.low)

    @property
    def norm(self) -> float:
        return math.sqrt(2 * self.features)
