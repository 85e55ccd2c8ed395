"""Answer requests for totals: a frame of bytes in, a frame of bytes out.

A round is passed on at most once. A reply is a total that was stored before, or one code of
`relay.DECLINED`. A declined request leaves its round open, so that more boxes may be sent. Nothing
of its counts is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.core.errors import Refused
from silodp.core.protocol.relay import DECLINED, Declined, decode_request, encode_outcome
from silodp.shuffler.pool import NoTotal, Pool
from silodp.shuffler.store import RoundStore

HOUR = 3600.0


@dataclass(frozen=True)
class RoundNote:
    """What an operator may read about one frame.

    `code` is "passed", "repeated" or the code of the refusal. `dropped` counts dropped boxes by
    reason.
    """

    code: str
    round: str = "-"
    boxes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class ShufflerDoor:
    """Answer the requests of listed askers, one at a time."""

    def __init__(
        self,
        pool: Pool,
        store: RoundStore,
        *,
        key: Ed25519PrivateKey,
        askers: Collection[str],
        rounds_per_hour: int,
        limit: int,
        clock: Callable[[], float] = time.time,
        noted: Callable[[RoundNote], None] = lambda note: None,
    ) -> None:
        self._pool = pool
        self._store = store
        self._key = key
        self._askers = frozenset(askers)
        self._most = rounds_per_hour
        self._limit = limit
        self._clock = clock
        self._noted = noted
        self._lock = threading.Lock()
        self._note = RoundNote("passed")

    def handle(self, frame: bytes) -> bytes:
        """Return a valid reply to a frame, whatever its bytes."""
        with self._lock:
            self._note = RoundNote("passed")
            try:
                reply = self._answer(frame)
            except Exception as error:
                if isinstance(error, Refused) and error.code in DECLINED:
                    code = error.code
                else:
                    code = "internal"
                self._note = replace(self._note, code=code)
                reply = encode_outcome(Declined(code, hashlib.sha256(frame).hexdigest()), self._key)
            # A log on a full disk must not stop a total that was stored.
            with contextlib.suppress(Exception):
                self._noted(self._note)
            return reply

    def _answer(self, frame: bytes) -> bytes:
        """Return the stored or the new total. Raise Refused if a check fails.

        The steps are decode, asker, stored reply, rate, add, store. Each runs only if all before it
        passed.
        """
        request, asker = decode_request(frame, limit=self._limit)
        if asker not in self._askers:
            raise Refused("asker")
        self._note = RoundNote("passed", request.round, len(request.boxes))
        if (stored := self._store.reply(request.round)) is not None:
            self._note = replace(self._note, code="repeated")
            return stored
        now = self._clock()
        if self._store.since(now - HOUR) >= self._most:
            raise Refused("rate")
        try:
            passed = self._pool.total(request)
        except NoTotal as kept:
            self._note = replace(self._note, dropped=Counter(kept.dropped.values()))
            raise
        self._note = replace(self._note, dropped=Counter(passed.dropped.values()))
        return self._store.keep(request.round, encode_outcome(passed, self._key), now)
