"""Over which records of a silo a statistic is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class FullBatch:
    """Every record of the silo."""

    def batch(self, n: int) -> float:
        return n


@dataclass(frozen=True)
class DisjointBatches:
    """Batch `index` of a stored random partition into `batches` parts of floor(n / batches) records; each record is in at most one."""

    batches: int
    index: int = 0
    partition: str = "run"

    def batch(self, n: int) -> float:
        return n // self.batches


@dataclass(frozen=True)
class Poisson:
    """Each record with probability `rate`, by a secret coin of its own; the mean divides by the expected size rate x n, which is public."""

    rate: float

    def batch(self, n: int) -> float:
        return self.rate * n


@dataclass(frozen=True)
class WithoutReplacement:
    """A fresh uniformly random batch of floor(rate x n) distinct records."""

    rate: float

    def batch(self, n: int) -> float:
        return math.floor(self.rate * n)


Sampling = FullBatch | DisjointBatches | Poisson | WithoutReplacement
