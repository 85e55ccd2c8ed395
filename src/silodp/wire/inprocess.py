"""The channel to silos in this process. A query goes to the gate as an object, and the release
comes back as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from silodp.core.mechanisms.totals import as_total
from silodp.core.query import Query, Release
from silodp.server.federation import StopRun


class Answers(Protocol):
    """A gate."""

    def answer(self, query: Query, silos: Sequence[int]) -> Release:
        """Return the release of these silos."""
        ...


class InProcess:
    """A channel to one gate with all silos."""

    def __init__(self, gate: Answers) -> None:
        self._gate = gate

    def ask(self, query: Query, silos: Sequence[int]) -> Release:
        """Return the release of these silos."""
        return self._gate.answer(query, silos)


@dataclass(frozen=True, eq=False)
class Total:
    """The server's view of several silos: `value` (J, 1, d), the sum over these silos."""

    value: Tensor
    silos: tuple[int, ...]


class ThroughShuffler:
    """A channel with a shuffler, or masks, between gate and server. It returns the sum over silos
    (J, 1, d), or nothing.
    """

    def __init__(self, gate: Answers, colluding: int = 0) -> None:
        """`colluding`: how many of the silos' shares of noise no price counts on."""
        self._gate = gate
        self._colluding = colluding

    def ask(self, query: Query, silos: Sequence[int]) -> Total:
        """Return the total of these silos. Raise StopRun if it includes too few records."""
        release = self._gate.answer(query, silos)
        counted = as_total(query.mechanism).counted
        if len(release.silos) - self._colluding < counted:
            raise StopRun(
                f"{len(release.silos)} silos have answered, and the price counts on the noise of "
                f"{counted} and on {self._colluding} that may collude; nothing is passed on"
            )
        return Total(release.value.sum(1, keepdim=True), release.silos)
