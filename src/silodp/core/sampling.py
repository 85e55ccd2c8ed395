"""Define which records of a silo a statistic uses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER, NAME, REAL


class Sampling:
    """A way to draw a batch.

    It defines how large the batch is, which of a ledger's buckets pays, and what no policy could
    allow.
    """

    wire: ClassVar[dict[str, str]]
    whole: ClassVar[bool] = False
    """Whether every record is in the batch."""
    sampled: ClassVar[bool] = True
    """Whether records are drawn by secret coins in each round.

    A release is then priced by its amplification, or not at all.
    """
    bucket: str = ""
    """The part of the silo that pays: all records, or one batch of a stored partition.

    No record of a batch is in another batch of the same partition.
    """

    if TYPE_CHECKING:  # each kind is a frozen dataclass with its own fields
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __getattr__(self, name: str) -> Any: ...

    def batch(self, n: int) -> float:
        """Return the (expected) number of records in a batch of n, by which a mean is divided."""
        raise NotImplementedError

    def at(self, index: int) -> Self:
        """Return the sampling of round `index`.

        It is that batch of a partition. Other samplings draw a new batch in each round anyway.
        """
        return self

    def check(self, counts: Iterable[int]) -> None:
        """Raise Refused("batch") if the sampling makes no sense for silos of so many records."""
        self._check()
        if any(self.batch(n) < 1 for n in set(counts)):
            raise Refused("batch")

    def _check(self) -> None:
        """Raise Refused if the fields make no sense."""


@dataclass(frozen=True)
class FullBatch(Sampling):
    """Every record of the silo."""

    wire: ClassVar = {}
    whole = True
    sampled = False

    def batch(self, n: int) -> float:
        """Return n."""
        return n


@dataclass(frozen=True)
class DisjointBatches(Sampling):
    """Batch `index` of a stored random partition into `batches` parts of floor(n / batches)
    records.

    Each record is in at most one part.
    """

    batches: int
    index: int = 0
    partition: str = "run"
    wire: ClassVar = {"batches": INTEGER, "index": INTEGER, "partition": NAME}
    sampled = False

    @property
    def bucket(self) -> str:  # type: ignore[override]
        """Return the ledger's name of this batch."""
        return f"{self.partition}/{self.batches}/{self.index}"

    def batch(self, n: int) -> float:
        """Return floor(n / batches)."""
        return n // self.batches

    def at(self, index: int) -> Self:
        """Return the batch of this index."""
        return replace(self, index=index)

    def _check(self) -> None:
        """Raise Refused for an index outside the partition, or a field of another type."""
        # The ledger identifies a batch by its name, and the answerer by its value. Only for these
        # types do the two always agree.
        if not (
            type(self.batches) is type(self.index) is int
            and type(self.partition) is str
            and 0 <= self.index < self.batches
        ):
            raise Refused("batch")


class _ByRate(Sampling):
    """A sampling that draws a share of the records."""

    rate: float

    def _check(self) -> None:
        """Raise Refused unless the rate is in (0, 1]."""
        if not (0 < self.rate <= 1 and math.isfinite(self.rate)):
            raise Refused("batch")


@dataclass(frozen=True)
class Poisson(_ByRate):
    """Each record with probability `rate`, by an independent secret coin.

    The mean is divided by the expected size rate x n, which is public.
    """

    rate: float
    wire: ClassVar = {"rate": REAL}

    def batch(self, n: int) -> float:
        """Return the expected size rate x n."""
        return self.rate * n


@dataclass(frozen=True)
class WithoutReplacement(_ByRate):
    """A fresh uniformly random batch of floor(rate x n) distinct records."""

    rate: float
    wire: ClassVar = {"rate": REAL}

    def batch(self, n: int) -> float:
        """Return floor(rate x n)."""
        return math.floor(self.rate * n)


SAMPLINGS: dict[str, type[Sampling]] = {
    kind.__name__: kind for kind in (FullBatch, DisjointBatches, Poisson, WithoutReplacement)
}
