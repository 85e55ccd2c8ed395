"""Charge one query durably, then store its answer, and return those bytes to every repetition."""

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
    """One query's steps in the ledger: charge, then store. It is the gate's Ledger for that query.

    Formal guarantee: under one charge at most one answer is ever stored. So at most one leaves,
    whichever process computes it and however often.
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
        **names: str,
    ) -> None:
        """Look for a stored answer.

        `begun` is an open transaction and its end. Look and charge are then made within it.
        """
        self._file = file
        self._generation = generation
        self._most_local = most_local
        self._names = names
        if now is None:
            now = time.time()
        self._now = now
        self._round = {}
        if round:
            self._round["round"] = round
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
        """Return the rounds of totals that were charged, each with its query id, as of the last
        look.
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
        """Continue the transaction of the look if it is still open, or begin one. Commit it at the
        end.
        """
        if self._begun is None:
            with self._file.change() as connection:
                yield connection
            return
        ending, connection = self._begun
        self._begun = None
        with ending:
            yield connection

    def known(self) -> Known | None:
        """Return the state of this id, or None. Called within a transaction.

        Raise Refused if the id was another query's or was purged.
        """
        known = self._file.state.queries.get(self._names["query_id"])
        if known and known.charge.digest != self._names["digest"]:
            raise Refused("id-reused")
        if known and known.purged:
            raise Refused("purged")
        return known

    def charge(self, event: Event | TotalEvent, silos: Sequence[int]) -> None:
        """Price the event and record the charge durably.

        Raise Refused and charge nothing if it may not be answered. With the code `ledger` the
        charge may have been recorded. A charge without an answer is not charged again if query and
        price are the same, since nothing was sent.
        """
        if len(silos) != 1:
            raise Refused("shape")
        data = plain(event)
        file = self._file
        if event.total != bool(self._round):
            raise Refused("round")
        query_id = self._names["query_id"]
        with self._charging() as connection:
            data = data | self._round
            known = self.known()
            if event.total:
                charged_for = file.state.rounds.get(data.get("round", ""), query_id)
                if charged_for != query_id:
                    raise Refused("round")
            answer = file.answer(connection, known)
            if answer is None:
                self._check_left()
                bucket, amount = self._price(data)
                if known is None:
                    self._check_local(data)
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
                        **self._names,
                    )
                else:
                    self._check_local(None)
                    self._check_same(known, data, bucket, amount)
        self.answer = answer

    @staticmethod
    def _check_same(known: Known, data: dict, bucket: str, amount: float) -> None:
        """Raise Refused unless this is what was charged under the id, at the same price."""
        charge = known.charge
        if (charge.event, charge.bucket) != (canonical(data), bucket):
            raise Refused("id-reused")
        if amount > charge.amount * (1 + SLACK):
            raise Refused("id-reused")

    def _check_left(self) -> None:
        """Raise Refused once the rest of the budget was written off, also for what was charged
        before.

        The lost ledger may have answered it.
        """
        if self._file.state.closing.written_off:
            raise Refused("budget")

    def _price(self, data: dict) -> tuple[str, float]:
        """Return bucket and amount of the event. Raise Refused if the rule has no price."""
        event = event_of(data)
        self._file.check_generation(self._generation)
        try:
            return self._file.state.price(event)
        except Exception:
            # Whatever a numerical library raises, what cannot be priced is not answered.
            raise Refused("rule") from None

    def _check_holds(
        self, connection: sqlite3.Connection, bucket: str, amount: float
    ) -> Entry | None:
        """Raise Refused for a charge that would use what is reserved for other runs (see `holds`).

        A charge that no hold covers, and that leaves no room for what its own run still reserves,
        ends that hold. Return the entry that records this end, or None.
        """
        state = self._file.state
        holds = self._file.state.holds
        who = (self._names["asker"], self._names["run"])
        others = holds.others(*who, self._now)
        hold = holds.own(*who, self._now)
        more = {bucket: amount}
        covered = holds.covers(*who, bucket, amount, self._now)
        slack = 0.0 if covered else HELD_SLACK
        if others and not state.fits(more, others, slack=slack):
            raise Refused("taken")
        if covered or hold is None:
            return None
        if state.fits(more, others, holds.reserves(hold, more), slack=slack):
            return None
        return self._file.append(connection, "release", event={"why": "charge"}, **hold.about)

    def _check_local(self, more: dict | None) -> None:
        """Raise Refused if what parties that see the silo's own counts could learn would pass the
        limit.

        It runs within the charge's transaction, so that no other process can charge in between.
        Without a limit nothing is computed.
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
        """Store the answer durably and return the bytes to send.

        These are this answer or, if another process was first, the answer that it stored.
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
                # Without the salt, the time of this entry could be found by trial from the head in
                # the next release.
                event = {
                    "sha256": hashlib.sha256(stored).hexdigest(),
                    "bytes": len(stored),
                    "salt": secrets.token_hex(16),
                }
                entry = file.append(connection, "answer", event=event, **self._names)
                connection.execute("INSERT INTO answers VALUES (?, ?)", (entry.sequence, stored))
        self.answer = stored
        return stored
