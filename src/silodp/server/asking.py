"""What all questions to other machines share: who carries frames, how long is waited, the same
bytes again, and which refusals are believed.
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
"""Codes of a daemon itself, which name no question: whoever carries frames can repeat them, so none
of them lasts.
"""
WORK, CARRIED = 1e8, 1e6
"""What a slow gate and a slow line do in a second: parameters times records that are summed, and
bytes.
"""


class Carrier(Protocol):
    """Takes a frame to each named silo and brings the replies that came in time. An exception with
    a `code` says that it is itself gone.

    One that the server's operator runs may have `removed`: whom of the last frames' silos the
    operator lets in no more.
    """

    def exchange(self, frames: Mapping[str, bytes], timeout: float) -> dict[str, bytes]: ...
    def names(self) -> list[str]: ...


@runtime_checkable
class Streaming(Carrier, Protocol):
    """One that brings each reply as it comes, and the next when that has been taken."""

    def stream(
        self, frames: Mapping[str, bytes], timeout: float
    ) -> Iterable[tuple[str, bytes]]: ...


@dataclass(frozen=True)
class Timeouts:
    """Seconds: a round goes on without whoever is silent at `deadline`, if enough have answered,
    and waits for enough until `limit`.

    Whoever has not replied to one sending within `retry` is sent the same bytes again, and has
    twice as long for them: a machine may be busy.
    """

    deadline: float = 60.0
    limit: float = 300.0
    retry: float = 10.0
    learn: bool = False
    """Whether they are a guess, which the first answers better."""

    @classmethod
    def estimated(cls, *, parameters: int, records: int, releases: int = 1) -> Timeouts:
        """For answers about so many parameters and records, which are public: what a slow gate
        takes for them comes on top of what is always waited.
        """
        return cls()._with(releases * parameters * records / WORK + 12 * parameters / CARRIED)

    def after(self, took: float | None) -> Timeouts:
        """The same once it is known how long the silos took for a question of the kind: thrice that
        is waited on top, whatever was guessed.
        """
        return self if took is None or not self.learn else Timeouts()._with(3 * took)

    def _with(self, seconds: float) -> Timeouts:
        return Timeouts(
            self.deadline + 3 * seconds, self.limit + 10 * seconds, self.retry + seconds, learn=True
        )

    @property
    def quick(self) -> Timeouts:
        """For what no record is looked at for: a hold, a key."""
        return replace(self, retry=min(self.retry, Timeouts.retry))

    def __post_init__(self) -> None:
        if not 0 < self.retry <= self.deadline <= self.limit < math.inf:
            raise BadInput(
                f"retry {self.retry:g}, deadline {self.deadline:g} and limit "
                f"{self.limit:g} seconds must rise in this order from above 0"
            )


class Sending:
    """The same bytes, sent until they are answered: each sending that was waited for in vain is
    followed by one that has twice as long.
    """

    def __init__(self, carrier: Carrier, retry: float) -> None:
        self._carrier, self._wait, self._pause = carrier, retry, 0.05
        self.gone = ""
        """Why the carrier itself could not be reached the last time; empty where it could."""

    def send(self, frames: Mapping[str, bytes], left: float) -> Iterator[tuple[str, bytes]]:
        """(silo, reply) as they come; no more of them where the carrier is gone."""
        sent, wait = time.monotonic(), min(self._wait, max(left, 1.0))
        try:
            if isinstance(self._carrier, Streaming):
                yield from self._carrier.stream(frames, wait)
            else:
                yield from self._carrier.exchange(frames, wait).items()
            self.gone = ""
        except Exception as error:  # the wire's own exception, which this folder may not name
            if not isinstance(code := getattr(error, "code", None), str):
                raise
            self.gone = code
        if time.monotonic() - sent >= self._wait:
            self._wait *= 2

    @property
    def removed(self) -> frozenset[str]:
        """Whom the carrier's operator has removed, of those last asked."""
        return getattr(self._carrier, "removed", frozenset())

    def pause(self, left: float = math.inf, *, anew: bool = False) -> None:
        """Before the next sending, longer each time; `anew` where the last one was not in vain."""
        self._pause = 0.05 if anew else self._pause
        time.sleep(min(self._pause, max(left, 0.0)))
        self._pause = min(2 * self._pause, 1.0)


def believed(code: str, digest: str, frame: bytes) -> bool:
    """Whether a signed refusal is of this very frame: it names the whole of it, or another envelope
    around the body would do.
    """
    return digest == hashlib.sha256(frame).hexdigest() or (not digest and code in UNBOUND)


def opened(raw: bytes, key: str, frame: bytes, decode: Callable[..., T]) -> T | str:
    """What whoever has the key has signed in the form that `decode` reads, which is not that of an
    answer to a question; or the code of its refusal of this frame, and "forged" for whatever else
    came."""
    try:
        if raw[:4] != REPLY:
            return decode(raw, silo_key=key)
        found = decode_reply(raw, limit=OVERHEAD + 8 + MAX_HEADER, silo_key=key)
    except Refused:
        return "forged"
    return (
        found.code
        if isinstance(found, Refusal) and believed(found.code, found.digest, frame)
        else "forged"
    )


def why(codes: Mapping[str, str]) -> str:
    """What gates mean by their refusals, each code once, and what is to be done where somebody must
    do something about it.
    """
    words = CODES | {"model": MOVED, "version": OLDER}
    return "".join(
        f". ({code}): {words[code].removesuffix('.')}"
        for code in sorted({*codes.values()})
        if code in words
    )
