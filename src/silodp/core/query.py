"""The question port as data: what a server may ask, what it asks it with, and what comes back.

A query is frozen data, so it can be priced, refused, counted in a dry run, serialised and replayed
before any record is touched. Neighbours replace one record and n is public; noise multiplier means
std / sensitivity, everywhere.
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
        """What an answer costs, known before any record is looked at."""
        return self.mechanism.event(self.statistic.releases, self.statistic.shape[-1])


@dataclass(frozen=True, eq=False)
class Release:
    """What the gate lets out: `value` (J, M, d), one private vector for each run and answering
    silo. Only gate.py makes one.
    """

    value: Tensor
    silos: tuple[int, ...]
    event: Event | TotalEvent
