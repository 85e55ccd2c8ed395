"""One query's way through a data set's ledger: charge durably, then keep the answer, and give those
bytes to whoever asks again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence

from silodp.core.errors import Refused
from silodp.core.events import Event, TotalEvent
from silodp.silo.ledger.chain import Entry, canonical, event_of, plain
from silodp.silo.ledger.file import LedgerFile
from silodp.silo.ledger.holds import SLACK as HELD_SLACK
from silodp.silo.ledger.state import SLACK, Known


class QueryLedger:
    """One query's way through the ledger: charge, then store. It is the gate's Ledger for that
    query.

    Formal guarantees: under one charge at most one answer is ever stored, so at most one leaves,
    whoever computes it and however often.
    """

    def __init__(
        self,
        file: LedgerFile,
        generation: int,
        most_local: float,
        now: float | None,
        *,
        round: str = "",
        begun: tuple[contextlib.ExitStack, sqlite3.Connection] | None = None,
        **about: str,
    ) -> None:
        """Look for a stored answer.

        With `begun`, a transaction and what ends it, the look and the charge are made within it.
        """
        self._file = file
        self._generation = generation
        self._most_local = most_local
        self._about = about
        self._now = time.time() if now is None else now
        self._round = {"round": round} if round else {}
        if begun is None:
            with file.change() as connection:
                answer = file.answer(connection, self.known())
        else:
            answer = file.answer(begun[1], self.known())
        self._begun = begun
        self.answer: bytes | None = answer
        """The bytes that may be sent: durable, and the same for every call with this id."""

    @property
    def rounds(self) -> Mapping[str, str]:
        """The rounds of totals that were charged, each with its query id, as of this object's last
        look at the ledger.
        """
        return self._file.state.rounds

    @property
    def released(self) -> tuple[int, str]:
        """Return the count and head that leave with a release, as of the last look."""
        return self._file.state.released

    def charges(self, after: int) -> list[Entry]:
        """Return the charges in order, but for the first `after` of them, as of the last look."""
        with self._file.locked():
            queries = self._file.state.queries.values()
            return [known.charge for known in itertools.islice(queries, after, None)]

    @contextlib.contextmanager
    def _charging(self) -> Iterator[sqlite3.Connection]:
        """Go on in the transaction of the look, if it is still open, and commit it; or make one."""
        if self._begun is None:
            with self._file.change() as connection:
                yield connection
            return
        ending, connection = self._begun
        self._begun = None
        with ending:
            yield connection

    def known(self) -> Known | None:
        """What has become of this id, within a transaction; Refused if it was another query's or
        was purged.
        """
        known = self._file.state.queries.get(self._about["query_id"])
        if known and known.charge.digest != self._about["digest"]:
            raise Refused("id-reused")
        if known and known.purged:
            raise Refused("purged")
        return known

    def charge(self, event: Event | TotalEvent, silos: Sequence[int]) -> None:
        """Prices the event and writes it down, durably, or raises Refused and charges nothing
        (`ledger`: or has charged it, when unsure).

        What is charged but not answered is not charged again, if query and price are the same:
        nothing was sent.
        """
        if len(silos) != 1:
            raise Refused("shape")
        data = plain(event)
        file = self._file
        if event.total != bool(self._round):
            raise Refused("round")
        with self._charging() as connection:
            data = data | self._round
            known = self.known()
            if (
                event.total
                and file.state.rounds.get(data.get("round", ""), self._about["query_id"])
                != self._about["query_id"]
            ):
                raise Refused("round")
            answer = file.answer(connection, known)
            if answer is None:
                self._check_left()
                bucket, amount = self._price(data)
                self._check_local(None if known else data)
                if known is None:
                    if not file.state.fits({bucket: amount}):
                        raise Refused("budget")
                    ended = self._check_holds(connection, bucket, amount)
                    file.append(
                        connection,
                        "charge",
                        event=data,
                        bucket=bucket,
                        amount=amount,
                        after=ended,
                        **self._about,
                    )
                elif (known.charge.event, known.charge.bucket) != (
                    canonical(data),
                    bucket,
                ) or amount > known.charge.amount * (1 + SLACK):
                    raise Refused("id-reused")
        self.answer = answer

    def _check_left(self) -> None:
        """Once the rest was written off nothing is computed, not even what was charged: the ledger
        that was lost may have answered it.
        """
        if self._file.state.closing.written_off:
            raise Refused("budget")

    def _price(self, data: dict) -> tuple[str, float]:
        event = event_of(data)
        self._file.check_generation(self._generation)
        try:
            return self._file.state.price(event)
        except (
            Exception
        ):  # whatever a numerical library raises: what cannot be priced is not answered
            raise Refused("rule") from None

    def _check_holds(
        self, connection: sqlite3.Connection, bucket: str, amount: float
    ) -> Entry | None:
        """Refuses a charge that would take what is held for another run, whatever its own run holds
        (see `holds`).

        One that no hold covers, and that leaves no room for what its own run still reserves, ends
        that hold: the entry that says so.
        """
        state = self._file.state
        holds = self._file.state.holds
        who = (self._about["asker"], self._about["run"])
        others = holds.others(*who, self._now)
        own = holds.own(*who, self._now)
        more = {bucket: amount}
        covered = holds.covers(*who, bucket, amount, self._now)
        slack = 0.0 if covered else HELD_SLACK
        if others and not state.fits(more, others, slack=slack):
            raise Refused("taken")
        if (
            covered
            or own is None
            or state.fits(more, others, holds.reserves(own, more), slack=slack)
        ):
            return None
        return self._file.append(connection, "release", event={"why": "charge"}, **own.about)

    def _check_local(self, more: dict | None) -> None:
        """Within a transaction, so that no other process can charge between this and the charge.
        Not worked out where there is no limit.
        """
        if self._most_local == math.inf:
            return
        try:
            fits = self._file.state.local_fits(self._most_local, more)
        except Exception:  # as in `_price`
            raise Refused("rule") from None
        if not fits:
            raise Refused("local")

    def store(self, answer: bytes) -> bytes:
        """Keeps the answer durably and returns the bytes to send: this answer or, if another
        process was first, the one that it stored.
        """
        file = self._file
        with file.change() as connection:
            known = self.known()
            if known is None:
                raise Refused("ledger")  # not charged
            stored = file.answer(connection, known)
            if stored is None:
                self._check_left()
                stored = bytes(answer)
                event = {
                    "sha256": hashlib.sha256(stored).hexdigest(),
                    "bytes": len(stored),
                    "salt": secrets.token_hex(16),
                }
                # without the salt, the head in the next release would tell by trial when this entry
                # was made
                entry = file.append(connection, "answer", event=event, **self._about)
                connection.execute("INSERT INTO answers VALUES (?, ?)", (entry.sequence, stored))
        self.answer = stored
        return stored
