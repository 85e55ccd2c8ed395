"""The gate: the one way out of a silo.

It checks a query, charges for it, computes, adds noise, and makes the release. Only this file makes
a Release. Refusals are functions of query and ledger alone. After the charge, a deployed answerer
yields a normal release whatever a record contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.query import Query, Release


class Ledger(Protocol):
    """A ledger that a gate charges before it looks at records."""

    def charge(self, event: Event | TotalEvent, silos: Sequence[int]) -> None:
        """Charge the event to these silos. Raise Refused, and charge none, if it does not fit."""
        ...


class Answerer(Protocol):
    """Computes a private answer from records. It has the records, the noise and nothing else."""

    @property
    def features(self) -> int:
        """Return the number of features of a record."""
        ...

    def answer(self, query: Query, silos: Sequence[int]) -> Tensor:
        """Return one private answer for each of these silos."""
        ...


class Gate:
    """Answer queries for one silo in a deployment, or for all silos in a simulation."""

    def __init__(
        self, answerer: Answerer, ledger: Ledger, *, dim: int, counts: Sequence[int], runs: int = 1
    ) -> None:
        """Store the answerer, the ledger and the public sizes.

        `runs` is J, the number of points that a query has. Each has noise and a charge of its own.
        """
        self._answerer = answerer
        self.ledger = ledger
        self._dim = dim
        self._counts = tuple(counts)
        self._runs = runs

    def answer(self, query: Query, silos: Sequence[int]) -> Release:
        """Check the query, charge for it, then let the answerer look at records. Return the
        release.

        Raise Refused with a fixed code before any record is touched.
        """
        # A silo named twice, or by another name such as -1, would answer twice for one price.
        exist = all(type(s) is int and 0 <= s < len(self._counts) for s in silos)
        if not exist or len(set(silos)) != len(silos):
            raise Refused("shape")
        check(
            query,
            self._dim,
            [self._counts[s] for s in silos],
            runs=self._runs,
            silos=len(self._counts),
        )
        # The norm of a record's vector follows from the silo's own number of features.
        features = query.statistic.about_features
        if features is not None and features != self._answerer.features:
            raise Refused("shape")
        event = query.event()
        self.ledger.charge(event, silos)
        return Release(self._answerer.answer(query, silos), tuple(silos), event)


def check(
    query: Query, dim: int, counts: Sequence[int], *, runs: int = 1, silos: int | None = None
) -> None:
    """Raise Refused for a query that no policy could allow.

    Such a query has points of another shape or that are not finite, or senseless clips, noise,
    batches or steps. Hyper-parameters are one number, or exactly one per run. Noise multipliers are
    one number, or one per run and silo of the gate. Any other shape could clip records by one entry
    and scale their noise by another.
    """
    if silos is None:
        silos = len(counts)
    query.statistic.check(dim, runs)
    query.mechanism.check(query.statistic, runs, silos)
    query.statistic.check_mechanism(query.mechanism)
    query.mechanism.sampling.check(counts)
