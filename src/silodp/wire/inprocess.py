"""All silos in this process: a query goes to the gate as it is, and the release comes back as it
is.
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
    def answer(self, query: Query, silos: Sequence[int]) -> Release: ...


class InProcess:
    """A channel to one gate that keeps all silos."""

    def __init__(self, gate: Answers) -> None:
        self._gate = gate

    def ask(self, query: Query, silos: Sequence[int]) -> Release:
        return self._gate.answer(query, silos)


@dataclass(frozen=True, eq=False)
class Total:
    """What the server sees of several silos: `value` (J, 1, d), the sum over these silos."""

    value: Tensor
    silos: tuple[int, ...]


class ThroughShuffler:
    """The same with a shuffler, or masks, between gate and server: what comes out is the sum over
    silos, (J, 1, d), or nothing.
    """

    def __init__(self, gate: Answers, colluding: int = 0) -> None:
        """`colluding`: how many of the silos' shares of noise no price counts on."""
        self._gate = gate
        self._colluding = colluding

    def ask(self, query: Query, silos: Sequence[int]) -> Total:
        release = self._gate.answer(query, silos)
        counted = as_total(query.mechanism).counted
        if len(release.silos) - self._colluding < counted:
            raise StopRun(
                f"{len(release.silos)} silos have answered, and the price counts on the noise of "
                f"{counted} and on {self._colluding} that may collude; nothing is passed on"
            )
        return Total(release.value.sum(1, keepdim=True), release.silos)
