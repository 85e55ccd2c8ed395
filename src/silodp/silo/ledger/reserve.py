"""Take and release holds in a data set's ledger.

Each act is a durable entry of the chain, made in one transaction with its check. A hold is for one
asker's run. The policy limits its share, number and seconds. Whether it is granted is a function of
the request, the policy, the ledger and the time. It ends with its run, by its time, by the officer
(`silodp ledger release`), or when the number of records changes.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from silodp.core.errors import Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.privacy.accounting import Buckets, add_amounts
from silodp.silo.ledger.chain import Entry, canonical, event_of, plain
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.ledger.file import ENTRIES
from silodp.silo.ledger.holds import HELD_SLACK, Hold, Holds, remains
from silodp.silo.ledger.state import LedgerState

PASSED_MOST = 16
PASSED_BYTES = 2**13
"""Entries about holds since the last checkpoint, and their bytes, that make another one due."""


class Caps(Protocol):
    """The policy's limits of what one asker may hold."""

    @property
    def hold_share(self) -> float: ...
    @property
    def holds_per_asker(self) -> int: ...
    @property
    def hold_seconds(self) -> int: ...


@dataclass(frozen=True)
class Outcome:
    """The result of a request for a hold.

    `code` is empty if the amount is held. `needed` and `left` are shares of the ledger's capacity.
    """

    code: str
    needed: float
    left: float
    seconds: int = 0


@dataclass(frozen=True)
class Open:
    """An open hold as the officer sees it, with the share of the capacity that it reserves."""

    hold: Hold
    share: float
    seconds: float


def take(
    ledger: DurableLedger,
    *,
    hold: str,
    digest: str,
    asker: str,
    run: str,
    number: int,
    events: Sequence[Event | TotalEvent],
    caps: Caps,
    now: float,
    generation: int,
) -> Outcome:
    """Reserve what the run has not been charged yet of these events. Return whether it fits.

    It must fit in addition to all that is spent and held. The run's earlier hold is replaced. A
    repetition of the same request returns its first outcome. Raise Refused("lapsed") if the hold
    has ended since, or if a request of the run with a number as high was recorded before. Raise
    Refused("id-reused") for another request under its id. Raise Refused("rule") if the ledger has
    no price.
    """
    data = [plain(event) for event in events]
    file = ledger._file
    with file.change() as connection:
        state = file.state
        holds = file.state.holds
        file.check_generation(generation)
        known = holds.open.get(hold)
        if known is None and _ever_taken(connection, hold):
            raise Refused("lapsed")
        if known is not None and (known.digest, known.asker, known.run) != (digest, asker, run):
            raise Refused("id-reused")  # before anything is priced, which takes its time
        wanted = _priced(state, data)
        rest = holds.rest(asker, run, wanted)
        others = holds.others(asker, run, now)
        needed = state.share(rest)
        left = 1 - state.share(state.buckets, others)
        if known is not None:
            if known.until <= now:
                raise Refused("lapsed")
            return Outcome("", needed, left, round(known.until - now))
        if not holds.later(asker, run, number):
            raise Refused("lapsed")
        if not all(map(math.isfinite, wanted.values())):
            return Outcome("budget", math.inf, left)
        if not remains(rest, wanted):
            return Outcome("", 0.0, left, caps.hold_seconds)  # all is charged already
        mine = [known for known in holds.live(now) if known.asker == asker and known.run != run]
        count = sum(remains(holds.reserves(known), known.buckets) for known in mine)
        code = _refused(state, rest, others, add_amounts(*map(holds.reserves, mine)), count, caps)
        if not code:
            until = int(now) + caps.hold_seconds
            # Holds that have run out are ended for good. If the clock goes back, they must not be
            # open again in addition to this one.
            ends = sorted(
                known.id
                for known in holds.open.values()
                if known.until <= now or (known.asker, known.run) == (asker, run)
            )
            about = {"query_id": hold, "digest": digest, "asker": asker, "run": run, "kind": "hold"}
            file.append(
                connection,
                "hold",
                event={"events": data, "until": until, "ends": ends, "number": number},
                **about,
            )
    if code:
        return Outcome(code, needed, left)
    checkpoint(ledger, now)
    return Outcome("", needed, left, caps.hold_seconds)


def _ever_taken(connection: sqlite3.Connection, hold: str) -> bool:
    """Return whether a hold of this id was ever taken: none is taken twice."""
    rows = connection.execute(
        "SELECT 1 FROM entries WHERE query_id = ? AND query_id <> '' AND act = 'hold'", (hold,)
    )
    return rows.fetchone() is not None


def checkpoint(
    ledger: DurableLedger, now: float, *, expired: bool = False, explain: bool = False
) -> None:
    """Write a checkpoint where one is due, so that later openings pass over holds that have ended.

    It is due after `PASSED_MOST` entries or `PASSED_BYTES` bytes about holds, but not before it is
    shorter than what it passes over: so checkpoints at most double what holds add to the file. With
    `expired` it is due also where a hold has run out that nothing has ended.
    """
    file = ledger._file
    with file.change(explain=explain) as connection:
        state = file.state
        ends = [hold.id for hold in state.holds.open.values() if hold.until <= now]
        due = state.passed >= PASSED_MOST or state.passed_bytes >= PASSED_BYTES
        if due or (expired and ends):
            event = state.checkpoint(ends)
        else:
            event = None
        if event and ((expired and ends) or len(canonical(event)) <= state.passed_bytes):
            file.append(connection, "checkpoint", event=event)


def taken_since(ledger: DurableLedger, stamp: str) -> list[Entry]:
    """Return the entries of holds taken after this time stamp, in the ledger's own form."""
    file = ledger._file
    with file.explained(), file.transaction(write=False) as connection:
        rows = connection.execute(
            f"{ENTRIES} WHERE act = 'hold' AND time > ? ORDER BY sequence", (stamp,)
        )
        return [Entry.of(row) for row in rows]


def _refused(
    state: LedgerState, rest: Buckets, others: Buckets, mine: Buckets, count: int, caps: Caps
) -> str:
    """Return the code of the limit that a new hold would pass, or ""."""
    if not state.fits(rest, slack=HELD_SLACK):
        return "budget"
    if not state.fits(others, rest, slack=HELD_SLACK):
        return "taken"
    if count >= caps.holds_per_asker or not state.share(mine, rest) <= caps.hold_share:
        return "hold-limit"
    return ""


def _priced(state: LedgerState, data: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the amounts of these events by bucket. Raise Refused if one has no price."""
    try:
        priced = [state.price(event_of(event)) for event in data]
        return add_amounts(*({bucket: amount} for bucket, amount in priced))
    except Exception:
        # Whatever a numerical library raises, what cannot be priced is not held.
        raise Refused("rule") from None


def release(ledger: DurableLedger, ids: Sequence[str]) -> int:
    """End the open ones among these holds, at the officer's request. Return how many were open."""
    return sum(
        _ended(ledger, lambda holds, id=id: holds.open.get(id), {"why": "officer"}) for id in ids
    )


def taken(ledger: DurableLedger, hold: str) -> bool:
    """Return whether a hold of this id was ever taken."""
    file = ledger._file
    with file.failing_closed(), file.transaction(write=False) as connection:
        return _ever_taken(connection, hold)


def finish(ledger: DurableLedger, *, asker: str, run: str, number: int) -> bool:
    """End the run's hold, whatever its id. Return whether there was one.

    Nothing ends if a request with a number as high was recorded before.
    """

    def hold_of_run(holds: Holds) -> Hold | None:
        if not holds.later(asker, run, number):
            return None
        for hold in holds.open.values():
            if (hold.asker, hold.run) == (asker, run):
                return hold
        return None

    return _ended(ledger, hold_of_run, {"why": "run", "number": number})


def _ended(
    ledger: DurableLedger, which: Callable[[Holds], Hold | None], event: dict[str, Any]
) -> bool:
    """End the hold that `which` returns, if any. Return whether there was one."""
    file = ledger._file
    with file.change(explain=True) as connection:
        if (hold := which(file.state.holds)) is not None:
            file.append(connection, "release", event=event, **hold.about)
    if hold is not None:
        checkpoint(ledger, 0.0, explain=True)
    return hold is not None


def listed(ledger: DurableLedger, now: float | None = None) -> list[Open]:
    """Return the holds that count now, as of the file."""
    file = ledger._file
    if now is None:
        now = time.time()
    with file.explained(), file.transaction(write=False):
        state = file.state
        return [
            Open(hold, state.share(state.holds.reserves(hold)), hold.until - now)
            for hold in state.holds.live(now)
        ]
