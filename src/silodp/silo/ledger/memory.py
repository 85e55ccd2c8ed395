"""Keep the ledger of a simulation in memory: J runs, each a world of its own, over N silos."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.privacy.accounting import Budget, Rule, budget_array
from silodp.silo.ledger.buckets import added, fits


class MemoryLedger:
    """Charges events by one rule against one budget per run and silo."""

    def __init__(self, rule: Rule, budgets: Budget | Sequence, counts: Sequence[int]) -> None:
        """Start with nothing spent. `budgets` is one Budget, one per silo, or one row of them per
        run.
        """
        self.rule = rule
        self.counts = np.asarray(counts)
        array = budget_array(budgets)
        self.budgets = np.broadcast_to(array, np.broadcast_shapes(array.shape, (1, len(counts))))
        self._capacity = rule.capacity(self.budgets)
        self._buckets: dict[str, np.ndarray] = {}

    def charge(self, event: Event | TotalEvent, silos: Sequence[int]) -> None:
        """Add the event's price to the answering silos.

        Raise Refused("budget"), and charge no silo, if a sum would pass its budget. Raise
        Refused("rule") if the rule has no price for the event.
        """
        try:
            key, price = self.rule.price(event, self.counts)
        except BadInput:
            raise Refused("rule") from None
        answering = np.zeros(self._capacity.shape, dtype=bool)
        answering[:, silos] = True
        after = added(self._buckets, {key: np.where(answering, price, 0.0)})
        if not fits(self.rule, self._capacity, after):
            raise Refused("budget")
        self._buckets = after

    def used(self) -> np.ndarray:
        """Return the share of each budget's capacity that is used up, (J, N)."""
        return np.broadcast_to(
            self.rule.total(self._buckets) / self._capacity, self._capacity.shape
        )

    def epsilon(self, delta: np.ndarray | None = None) -> np.ndarray:
        """Epsilon spent so far at each budget's own delta, or at this one, (J, N)."""
        own = np.vectorize(lambda b: b.delta, otypes=[float])(self.budgets)
        found = self.rule.epsilon(self._buckets, own if delta is None else delta)
        return np.broadcast_to(found, self._capacity.shape)
