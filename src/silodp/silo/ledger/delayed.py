"""The ledger as others may see it: a charge, and all that it changes, is read at the end of its
slot.

With the policy's `answer_after` a reply is sent at the end of a slot, so that its time tells
nothing of records. A page that showed earlier what is in the ledger would tell it after all. Here a
charge appears `slot` seconds after its own time, which was taken before any record was looked at.
Its answer appears then too or, where it came late, at the end of the slot in which it came. What
comes after a hidden entry is hidden with it. Nothing is ever written.
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
    """The ledger at `path`, read with a delay of so many seconds."""
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
        self._whole = LedgerFile(path, None)

    def _catch_up(self, connection: sqlite3.Connection, *, sums: bool) -> None:
        with self._whole.transaction(write=False):
            pass  # all of it is checked, anchor and witness too, before a part is shown
        self._seconds = self._slot()  # once, since a page reads its policy's file for it
        super()._catch_up(connection, sums=sums)

    def _check_seen(self, connection: sqlite3.Connection, state: LedgerState) -> int:
        return state.sequence

    def pin(self) -> None:
        """Leaves anchor and witness alone: they have seen more than is shown here."""

    def answer(self, connection: sqlite3.Connection, known: Known | None) -> bytes | None:
        """Return the stored answer, or None once it is purged: bytes go before that is shown."""
        if known:
            whole = self._whole.state.queries.get(known.charge.query_id)
        else:
            whole = None
        if whole is None or whole.purged:
            return None
        return super().answer(connection, known)

    def _shown(self, state: LedgerState, entry: Entry) -> bool:
        slot = self._seconds
        if not slot > 0 or entry.act == "partition":
            return True
        came = begin = _moment(entry)
        known = state.queries.get(entry.query_id)
        if entry.act == "answer" and known is not None:
            begin = _moment(known.charge)
        slots = max(1, math.ceil((came - begin) / slot))
        now = self._clock()
        # An entry from the future is shown: the clock was put back, and would hide all for long.
        return now >= begin + slot * slots or begin > now


def _moment(entry: Entry) -> float:
    return datetime.fromisoformat(entry.time).timestamp()
