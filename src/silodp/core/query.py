"""Define what a server may ask, and what it gets, as data.

A query is frozen data. So it can be priced, refused, counted in a dry run, serialised and replayed
before any record is read. Everywhere, neighbours replace one record, n is public, and noise
multiplier means std / sensitivity.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from silodp.core.events import Event, TotalEvent
from silodp.core.mechanisms import Mechanism
from silodp.core.statistics import Statistic


@dataclass(frozen=True, eq=False)
class Query:
    """One question to the silos: this statistic through this mechanism."""

    statistic: Statistic
    mechanism: Mechanism

    def event(self) -> Event | TotalEvent:
        """Return what an answer costs, which is known before any record is read."""
        return self.mechanism.event(self.statistic.releases, self.statistic.shape[-1])


@dataclass(frozen=True, eq=False)
class Release:
    """What the gate releases.

    `value` (J, M, d) has one private vector for each run and answering silo. Only gate.py makes a
    Release.
    """

    value: Tensor
    silos: tuple[int, ...]
    event: Event | TotalEvent
