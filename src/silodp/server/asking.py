"""The common parts of all questions to other machines: the carrier of frames, the waiting times,
repetition of the same bytes, and the check of a refusal.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, runtime_checkable

from silodp.core.errors import BadInput, Refused
from silodp.core.protocol.codec import MAX_HEADER, OVERHEAD, REPLY, Refusal, decode_reply
from silodp.core.protocol.refusals import CODES
from silodp.server.approval import MOVED, OLDER

T = TypeVar("T")
UNBOUND = frozenset({"busy", "stopping", "internal", "size", "peer"})
"""Codes of a daemon itself, which name no question. A carrier of frames can repeat them, so none of
them lasts.
"""
WORK = 1e8
"""Parameters times records that a slow gate sums in a second."""
CARRIED = 1e6
"""Bytes that a slow line carries in a second."""
SHORTEST_PAUSE = 0.05
"""Seconds before the second sending."""


class Carrier(Protocol):
    """Takes a frame to each named silo and brings the replies that came in time. An exception with
    a `code` means that the carrier itself cannot be reached.

    A carrier of the server's operator may have an attribute `removed`: the silos of the last frames
    that the operator has removed.
    """

    def exchange(self, frames: Mapping[str, bytes], timeout: float) -> dict[str, bytes]: ...
    def names(self) -> list[str]: ...


@runtime_checkable
class Streaming(Carrier, Protocol):
    """A carrier that brings each reply as it comes, and the next one when that reply has been
    processed.
    """

    def stream(
        self, frames: Mapping[str, bytes], timeout: float
    ) -> Iterable[tuple[str, bytes]]: ...


@dataclass(frozen=True)
class Timeouts:
    """Waiting times in seconds.

    At `deadline` a round goes on without the silent silos, if enough have answered. It waits for
    enough until `limit`. A silo that has not replied within `retry` gets the same bytes again, and
    twice as long to reply: its machine may be busy.
    """

    deadline: float = 60.0
    limit: float = 300.0
    retry: float = 10.0
    learn: bool = False
    """Whether the times are an estimate, which the first answers replace."""

    @classmethod
    def estimated(cls, *, parameters: int, records: int, releases: int = 1) -> Timeouts:
        """Return the default times plus the time that a slow gate needs for answers of this size.
        Parameters and records are public.
        """
        return cls()._longer(releases * parameters * records / WORK + 12 * parameters / CARRIED)

    def after(self, took: float | None) -> Timeouts:
        """Return the times after a question of the kind took `took` seconds. Three times that is
        added to the default times, in place of the estimate.
        """
        if took is None or not self.learn:
            return self
        return Timeouts()._longer(3 * took)

    def _longer(self, seconds: float) -> Timeouts:
        """Return the default times, each with this many seconds once, three times or ten times
        added.
        """
        return Timeouts(
            self.deadline + 3 * seconds, self.limit + 10 * seconds, self.retry + seconds, learn=True
        )

    @property
    def quick(self) -> Timeouts:
        """Return the times for requests that need no record, such as a hold or a key."""
        return replace(self, retry=min(self.retry, Timeouts.retry))

    def __post_init__(self) -> None:
        if not 0 < self.retry <= self.deadline <= self.limit < math.inf:
            raise BadInput(
                f"retry {self.retry:g}, deadline {self.deadline:g} and limit "
                f"{self.limit:g} seconds must rise in this order from above 0"
            )


class Sending:
    """Sends the same bytes until they are answered. After each wait without a reply the next wait
    is twice as long.
    """

    def __init__(self, carrier: Carrier, retry: float) -> None:
        self._carrier = carrier
        self._wait = retry
        self._pause = SHORTEST_PAUSE
        self.gone = ""
        """Why the carrier itself could not be reached the last time. Empty where it could."""

    def send(self, frames: Mapping[str, bytes], left: float) -> Iterator[tuple[str, bytes]]:
        """Yield (silo, reply) as replies come. End if the carrier cannot be reached."""
        sent = time.monotonic()
        wait = min(self._wait, max(left, 1.0))
        try:
            if isinstance(self._carrier, Streaming):
                yield from self._carrier.stream(frames, wait)
            else:
                yield from self._carrier.exchange(frames, wait).items()
            self.gone = ""
        except Exception as error:  # This folder may not name the wire's own exception.
            code = getattr(error, "code", None)
            if not isinstance(code, str):
                raise
            self.gone = code
        if time.monotonic() - sent >= self._wait:
            self._wait *= 2

    @property
    def removed(self) -> frozenset[str]:
        """Return the silos of the last frames that the carrier's operator has removed."""
        return getattr(self._carrier, "removed", frozenset())

    def pause(self, left: float = math.inf, *, restart: bool = False) -> None:
        """Wait before the next sending, longer each time.

        `left` is the longest time to wait. `restart` begins with a short wait again, because the
        last sending had a result.
        """
        if restart:
            self._pause = SHORTEST_PAUSE
        time.sleep(min(self._pause, max(left, 0.0)))
        self._pause = min(2 * self._pause, 1.0)


def believed(code: str, digest: str, frame: bytes) -> bool:
    """Return whether a signed refusal is about this very frame.

    It must name the hash of the whole frame. A hash of the body alone would also fit another
    envelope around the same body.
    """
    if not digest:
        return code in UNBOUND
    return digest == hashlib.sha256(frame).hexdigest()


def opened(raw: bytes, key: str, frame: bytes, decode: Callable[..., T]) -> T | str:
    """Return a reply that the key's owner has signed, in the form that `decode` reads.

    Return the code of its refusal of this frame, or "forged" for anything else. The form is not
    that of an answer to a question.
    """
    try:
        if raw[:4] != REPLY:
            return decode(raw, silo_key=key)
        reply = decode_reply(raw, limit=OVERHEAD + 8 + MAX_HEADER, silo_key=key)
    except Refused:
        return "forged"
    if isinstance(reply, Refusal) and believed(reply.code, reply.digest, frame):
        return reply.code
    return "forged"


def why(codes: Mapping[str, str]) -> str:
    """Return the meaning of each code once, with the advice where a person must act."""
    words = CODES | {"model": MOVED, "version": OLDER}
    return "".join(
        f". ({code}): {words[code].removesuffix('.')}"
        for code in sorted({*codes.values()})
        if code in words
    )
