"""Over which records of a silo a statistic is taken."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER, NAME, REAL


class Sampling:
    """A way to draw a batch: how large it is, which of a ledger's buckets it is charged to, and
    what no policy could allow.
    """

    wire: ClassVar[dict[str, str]]
    whole: ClassVar[bool] = False
    """Whether every record is in the batch."""
    sampled: ClassVar[bool] = True
    """Whether records are drawn by secret coins, round by round: a release is then priced by its
    amplification, or not at all.
    """
    bucket: str = ""
    """The part of the silo that pays: all of it, or one batch of a stored partition, of which no
    record is in another.
    """

    if TYPE_CHECKING:  # each kind is a frozen dataclass, with fields that its own file knows
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __getattr__(self, name: str) -> Any: ...

    def batch(self, n: int) -> float:
        """The (expected) number of records of n: what a mean divides by."""
        raise NotImplementedError

    def at(self, index: int) -> Self:
        """The sampling of round `index`: that batch of a partition; others draw anew by
        themselves.
        """
        return self

    def check(self, counts: Iterable[int]) -> None:
        """Raises Refused("batch") where it makes no sense for silos of so many records."""
        self._check()
        if any(self.batch(n) < 1 for n in set(counts)):
            raise Refused("batch")

    def _check(self) -> None:
        """Raises Refused where the fields make no sense."""


@dataclass(frozen=True)
class FullBatch(Sampling):
    """Every record of the silo."""

    wire: ClassVar = {}
    whole = True
    sampled = False

    def batch(self, n: int) -> float:
        return n


@dataclass(frozen=True)
class DisjointBatches(Sampling):
    """Batch `index` of a stored random partition into `batches` parts of floor(n / batches)
    records; each record is in at most one.
    """

    batches: int
    index: int = 0
    partition: str = "run"
    wire: ClassVar = {"batches": INTEGER, "index": INTEGER, "partition": NAME}
    sampled = False

    @property
    def bucket(self) -> str:  # type: ignore[override]
        return f"{self.partition}/{self.batches}/{self.index}"

    def batch(self, n: int) -> float:
        return n // self.batches

    def at(self, index: int) -> Self:
        return replace(self, index=index)

    def _check(self) -> None:
        # the ledger knows a batch by its name and the answerer by its value: only of these types
        # are the two one
        if not (
            type(self.batches) is type(self.index) is int
            and type(self.partition) is str
            and 0 <= self.index < self.batches
        ):
            raise Refused("batch")


class _ByRate(Sampling):
    rate: float

    def _check(self) -> None:
        if not (0 < self.rate <= 1 and math.isfinite(self.rate)):
            raise Refused("batch")


@dataclass(frozen=True)
class Poisson(_ByRate):
    """Each record with probability `rate`, by a secret coin of its own; the mean divides by the
    expected size rate x n, which is public.
    """

    rate: float
    wire: ClassVar = {"rate": REAL}

    def batch(self, n: int) -> float:
        return self.rate * n


@dataclass(frozen=True)
class WithoutReplacement(_ByRate):
    """A fresh uniformly random batch of floor(rate x n) distinct records."""

    rate: float
    wire: ClassVar = {"rate": REAL}

    def batch(self, n: int) -> float:
        return math.floor(self.rate * n)


SAMPLINGS: dict[str, type[Sampling]] = {
    kind.__name__: kind for kind in (FullBatch, DisjointBatches, Poisson, WithoutReplacement)
}
