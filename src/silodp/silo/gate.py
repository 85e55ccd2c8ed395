"""The gate: the one way out of a silo. It checks a query, charges for it, computes, adds noise, and
makes the release.

Only this file makes a Release. Refusals are functions of query and ledger alone; after the charge a
deployed answerer yields a normal release whatever a record holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.query import Query, Release


class Ledger(Protocol):
    def charge(self, event: Event | TotalEvent, silos: Sequence[int]) -> None: ...


class Answerer(Protocol):
    """Computes a private answer from records; holds the records, the noise and nothing else."""

    @property
    def features(self) -> int: ...
    def answer(self, query: Query, silos: Sequence[int]) -> Tensor: ...


class Gate:
    """Answers queries for the silos it keeps: one in a deployment, all of them in a simulation."""

    def __init__(
        self, answerer: Answerer, ledger: Ledger, *, dim: int, counts: Sequence[int], runs: int = 1
    ) -> None:
        """`runs` is J: how many points a query has, each with noise and a charge of its own."""
        self._answerer = answerer
        self.ledger = ledger
        self._dim = dim
        self._counts = tuple(counts)
        self._runs = runs

    def answer(self, query: Query, silos: Sequence[int]) -> Release:
        """Checks, charges, then looks at records. Raises Refused with a fixed code, before any
        record is touched.
        """
        if any(type(s) is not int or not 0 <= s < len(self._counts) for s in silos) or len(
            set(silos)
        ) != len(silos):
            raise Refused(
                "shape"
            )  # a silo named twice, or by another name such as -1, would answer twice for one price
        check(
            query,
            self._dim,
            [self._counts[s] for s in silos],
            runs=self._runs,
            silos=len(self._counts),
        )
        if (
            asked := query.statistic.about_features
        ) is not None and asked != self._answerer.features:
            raise Refused(
                "shape"
            )  # the norm of a record's vector follows from the silo's own number of features
        event = query.event()
        self.ledger.charge(event, silos)
        return Release(self._answerer.answer(query, silos), tuple(silos), event)


def check(
    query: Query, dim: int, counts: Sequence[int], *, runs: int = 1, silos: int | None = None
) -> None:
    """Refuses what no policy could allow: points of another shape or not finite, senseless clips,
    noise, batches or steps.

    Hyper-parameters are one number, or exactly one per run; noise multipliers one number, or one
    per run and silo that the gate keeps: any other shape could clip records by one entry and scale
    their noise by another.
    """
    query.statistic.check(dim, runs)
    query.mechanism.check(query.statistic, runs, len(counts) if silos is None else silos)
    query.statistic.check_mechanism(query.mechanism)
    query.mechanism.sampling.check(counts)
