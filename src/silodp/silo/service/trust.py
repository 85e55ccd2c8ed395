"""The steps of a gate, in addition to its own answer, when the answer goes into a total.

There is one object for each trust: `Masker` in `masking.py`, `Sealer` in `sealing.py`, and
`NoTotals` for a silo whose policy has neither table. The door calls the same methods of each, in
this order: `check` before the ledger is asked, `begin` before the charge, `hide` after the answer,
`forget` once the answer is stored.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import TYPE_CHECKING

import numpy as np

from silodp.core.errors import Refused
from silodp.core.events import TotalEvent
from silodp.core.protocol.codec import Envelope

if TYPE_CHECKING:
    from silodp.core.protocol.masks import Row


class Trust:
    """The part of a gate that differs by trust. By default nothing is checked or forgotten."""

    local_limit = math.inf
    """The largest epsilon against all other parties together, over all that is ever asked."""
    room = 0
    """How many bytes a query may be longer than one that is answered by itself."""

    def check(self, envelope: Envelope, records: int) -> None:
        """Refuse a query that this silo, with so many records, does not answer.

        The decision is a function of query and policy.
        """

    def check_planned(self, event: TotalEvent) -> None:
        """Refuse a hold for an event that would be refused when it is asked."""

    def begin(self, asker: str, envelope: Envelope, charged: Container[str]) -> None:
        """Refuse, before any charge, a question that cannot be hidden.

        `charged` contains the digests of this round's attempts that the ledger has charged.
        """

    def hide(self, asker: str, envelope: Envelope, numbers: np.ndarray) -> bytes:
        """Return the numbers in the form that may leave the silo."""
        raise NotImplementedError

    def forget(self, asker: str, envelope: Envelope) -> None:
        """Forget what only an answer that is now stored has needed."""

    def offer(self, asker: str, run: str) -> Row:
        """Return the silo's key for the next answer of a run. Raise `Refused` without masks."""
        raise Refused("masks")


class NoTotals(Trust):
    """A silo whose policy has no table [masks] and no table [shuffle]: it answers no totals."""

    def check(self, envelope: Envelope, records: int) -> None:
        """Refuse every total, by the code of the table that the policy lacks."""
        if envelope.query.mechanism.masked:
            raise Refused("masks")
        raise Refused("shuffle")

    def check_planned(self, event: TotalEvent) -> None:
        """Refuse to reserve budget for a total."""
        raise Refused("shuffle")


ALONE = Trust()
"""The trust of an answer that the silo gives by itself, which needs nothing more."""
