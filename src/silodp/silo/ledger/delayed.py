"""Show the ledger as others may see it: a charge becomes visible at the end of its slot.

With the policy's `answer_after` a reply is sent at the end of a slot, so that its time reveals
nothing about records. A page that showed the ledger's entries earlier would reveal it after all.
Here a charge appears `slot` seconds after its own time, which was taken before any record was
looked at. Its answer appears at the same time or, if it was late, at the end of the slot in which
it was stored. Entries after a hidden entry are hidden too. This module writes nothing.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from silodp.silo.ledger.chain import Entry
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.ledger.file import LedgerFile
from silodp.silo.ledger.state import Known, LedgerState


def delayed(
    path: Path, slot: Callable[[], float], *, clock: Callable[[], float] = time.time
) -> DurableLedger:
    """Return the ledger at `path`, shown with a delay of `slot()` seconds."""
    DurableLedger.open(path, pin=False)
    file = _Delayed(path, slot, clock)
    file.snapshot()
    return DurableLedger(file)


class _Delayed(LedgerFile):
    from_checkpoint = False
    """A checkpoint would show the charges before it, also those whose slots have not ended."""

    def __init__(
        self, path: Path, slot: Callable[[], float], clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(path, None)
        self._slot = slot
        self._clock = clock
        self._seconds = 0.0
        self._complete = LedgerFile(path, None)

    def _catch_up(self, connection: sqlite3.Connection, *, sums: bool) -> None:
        with self._complete.transaction(write=False):
            pass  # the complete file is checked, anchor and witness too, before a part is shown
        self._seconds = self._slot()  # once, since a page reads its policy's file for it
        super()._catch_up(connection, sums=sums)

    def _check_seen(self, connection: sqlite3.Connection, state: LedgerState) -> int:
        return state.sequence

    def pin(self) -> None:
        """Leave anchor and witness alone: they have already seen more than is shown here."""

    def answer(self, connection: sqlite3.Connection, known: Known | None) -> bytes | None:
        """Return the stored answer, or None once it is purged, even while the purge is not shown
        yet.
        """
        if known is None:
            return None
        latest = self._complete.state.queries.get(known.charge.query_id)
        if latest is None or latest.purged:
            return None
        return super().answer(connection, known)

    def _shown(self, state: LedgerState, entry: Entry) -> bool:
        """Return whether the slot of the entry has ended."""
        slot = self._seconds
        if not slot > 0 or entry.act == "partition":
            return True
        written = _moment(entry)
        begin = written
        known = state.queries.get(entry.query_id)
        if entry.act == "answer" and known is not None:
            begin = _moment(known.charge)
        slots = max(1, math.ceil((written - begin) / slot))
        now = self._clock()
        # An entry from the future is shown. The clock was put back, and hiding the entry would
        # hide all later ones until that time.
        return now >= begin + slot * slots or begin > now


def _moment(entry: Entry) -> float:
    """Return the entry's time in seconds since 1970."""
    return datetime.fromisoformat(entry.time).timestamp()
