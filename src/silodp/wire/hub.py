"""The meeting point of the algorithm's process and the engine: a Unix socket on the server's host
that takes a frame for each silo and returns replies.

The engine's process at the server opens the socket, and the algorithm runs in another process. So
either may be killed without the other. Standard library only.

A message is  header length (4, big-endian) | header, JSON | the frames, one after another, with the
lengths in the header. The header of a question is {"ask": "exchange", "timeout": seconds, "frames":
[[silo, bytes], ...]} or {"ask": "names"}. The header of its reply is {"frames": [[silo, bytes],
...], "removed": [silo, ...]} or {"names": [silo, ...]}.

With "stream" in a question, each reply is a message of its own, sent as it comes, and all messages
but the last have "more". The hub reads the next reply from the engine when the one before has been
taken. If the frames of a question have a long common end, the question is {"ask": "sharing", "end":
bytes, ...}. The common end then follows the frames once, and belongs to each. Nothing here reads a
frame.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
import queue
import random
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from silodp.host import metrics
from silodp.host.frames import Frames
from silodp.wire.many import Exchange
from silodp.wire.socket import Incoming, Unreached, _connect, _left

MAX_HEADER = 2**20
MAX_BYTES = 2**32
LONGEST = 3600.0
"""Most seconds that a question may keep a courier, for any timeout that the server sends."""
LONG = 2**20
"""Fewest bytes of a common end that is sent once."""
GRACE = 60.0
"""Seconds beyond the silos' time in which the hub itself must reply, and in which a message must be
complete.
"""

T = TypeVar("T")
Asked = Callable[[Mapping[str, bytes], float], Mapping[str, bytes] | Iterable[tuple[str, bytes]]]


class Hub:
    """The hub that listens at `path`. Each question has a connection of its own, so a restart of
    the engine's process changes nothing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.removed: frozenset[str] = frozenset()
        """The silos of the last exchange that the server's operator has removed. They get no more
        questions.
        """

    def exchange(self, frames: Mapping[str, bytes], timeout: float) -> dict[str, bytes]:
        """Return the replies that came within `timeout` seconds, by silo. Raise Unreached if the
        hub itself does not reply.
        """
        return dict(self.stream(frames, timeout))

    def stream(self, frames: Mapping[str, bytes], timeout: float) -> Iterator[tuple[str, bytes]]:
        """Yield (silo, reply) as replies come. Raise Unreached if the hub stops replying."""
        header, pieces = _question(Frames.of(frames))
        self.removed = frozenset()
        question = header | {"timeout": timeout, "stream": True}
        for reply_header, replies in self._ask(question, pieces, timeout + GRACE):
            removed = reply_header.get("removed", ())
            self.removed |= {name for name in frames if name in removed}
            yield from ((name, reply) for name, reply in replies.items() if name in frames)

    def names(self) -> list[str]:
        """Return the silos that are connected to the engine now."""
        ((header, _),) = self._ask({"ask": "names"}, [], GRACE)
        return [name for name in header.get("names", ()) if isinstance(name, str)]

    def _ask(
        self, header: dict[str, Any], pieces: Sequence[bytes], patience: float
    ) -> Iterator[tuple[dict, Mapping[str, bytes]]]:
        """Yield the messages of the hub's reply. Raise Unreached after `patience` seconds, without
        the time in which the caller uses a message.
        """
        deadline = time.monotonic() + patience
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            try:
                _connect(line, self.path, deadline)
                _send(line, header, pieces, deadline)
                incoming = Incoming(line)
                more = True
                while more:
                    header, frames = _read(incoming, deadline)
                    more = header.get("more")
                    begin = time.monotonic()
                    yield header, frames
                    deadline += time.monotonic() - begin
            except TimeoutError:
                raise Unreached("timeout") from None
            except _TooLong:
                raise Unreached("size") from None
            except (OSError, ValueError):
                raise Unreached("closed") from None


class Direct:
    """A carrier without an engine: the gates of this machine, by name and socket. It is for tests,
    and for peers with a relay of their own.
    """

    def __init__(self, sockets: Mapping[str, str | Path]) -> None:
        self._gates = {name: str(path) for name, path in sockets.items()}

    def exchange(self, frames: Mapping[str, bytes], timeout: float) -> dict[str, bytes]:
        """Return the replies that came within `timeout` seconds, by silo."""
        return dict(self.stream(frames, timeout))

    def stream(self, frames: Mapping[str, bytes], timeout: float) -> Iterator[tuple[str, bytes]]:
        """Yield (silo, reply) as replies come."""
        return iter(Exchange(self._gates, Frames.of(frames), timeout))

    def names(self) -> list[str]:
        """Return the silos whose gates listen now."""
        return [name for name, path in self._gates.items() if _listens(path)]


@dataclass(frozen=True)
class Later:
    """There is no result yet. The silo gets another turn after this number of seconds."""

    seconds: float


class Turns(Generic[T]):
    """The results of `ask(name, seconds left)`, each as it comes, from at most `at_once` threads
    for any number of silos. A silo with the result None is left out.

    A silo without a thread waits for a turn, in a random order, and gets the time that is then
    left. A thread whose result was not taken yet asks no other silo. So there is at most one result
    for each thread in memory. The time in which the caller uses a result does not count. A result
    that is on its way at the end of the time gets `beyond` more seconds.
    """

    def __init__(
        self,
        names: Sequence[str],
        ask: Callable[[str, float], T | Later | None],
        timeout: float,
        *,
        at_once: int,
        beyond: float = 0.0,
    ) -> None:
        self._ask = ask
        self._deadline = time.monotonic() + timeout
        self._beyond = beyond
        self._open = True
        self._due = [
            (0.0, place, name) for place, name in enumerate(random.sample(names, len(names)))
        ]
        self._threads = min(at_once, len(names))
        self._count = len(names)
        self._guard = threading.Lock()
        # With room for one result, a thread waits until its result is taken.
        self._came: queue.Queue[tuple[str, T | None]] = queue.Queue(1)

    def __iter__(self) -> Iterator[tuple[str, T]]:
        for _ in range(self._threads):
            threading.Thread(target=self._work, daemon=True).start()
        try:
            with contextlib.suppress(queue.Empty):
                for _ in range(self._count):
                    left = self._deadline + self._beyond - time.monotonic()
                    name, result = self._came.get(timeout=max(0.0, left))
                    if result is not None:
                        begin = time.monotonic()
                        yield name, result
                        self._deadline += time.monotonic() - begin
                    # This releases the memory before the next result comes.
                    del result
        finally:
            self._open = False

    def _work(self) -> None:
        """Ask silos until none is left, or until the iteration has ended."""
        while self._open:
            with self._guard:
                # Each silo that is left has a thread.
                if not self._due:
                    return
                due, place, name = heapq.heappop(self._due)
            time.sleep(max(0.0, min(due, self._deadline) - time.monotonic()))
            result = self._turn(name)
            if isinstance(result, Later):
                with self._guard:
                    heapq.heappush(self._due, (time.monotonic() + result.seconds, place, name))
            else:
                self._give(name, result)
            # This releases the memory while the thread waits for its next silo.
            del result

    def _turn(self, name: str) -> T | Later | None:
        """Return the result of a silo, or None after an error or the deadline."""
        try:
            left = self._deadline - time.monotonic()
            if left > 0:
                return self._ask(name, left)
            return None
        except Exception:  # An error of one silo, or of the engine, must not end the others.
            return None

    def _give(self, name: str, result: T | None) -> None:
        """Hand the result over, or forget it when the iteration has ended."""
        while self._open:
            with contextlib.suppress(queue.Full):
                return self._came.put((name, result), timeout=1.0)


def serve_hub(
    path: str | Path,
    exchange: Asked,
    names: Callable[[], list[str]],
    stop: threading.Event,
    removed: Callable[[], set[str]] = set,
) -> None:
    """Listen at `path`, which only this user may open, until `stop` is set.

    Questions run at the same time, each in a thread of its own. `exchange(frames, timeout)` must be
    safe for this. If it fails, the hub closes the connection, and nothing else happens. `removed`
    returns the silos that are no longer admitted. Raise FileExistsError if the path is in use.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode) or _listens(str(path)):
            raise FileExistsError(f"{path} is in use")
        os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        # The rights are set before it listens, so that no other user can have connected.
        os.chmod(path, 0o600)
        listener.listen(64)
        listener.settimeout(0.1)
        inode = os.lstat(path).st_ino
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                line, _ = listener.accept()
                threading.Thread(
                    target=_serve, args=(line, exchange, names, removed), daemon=True
                ).start()
    with contextlib.suppress(FileNotFoundError):
        # Another process may have put its own socket there.
        if os.lstat(path).st_ino == inode:
            os.unlink(path)


def _serve(
    line: socket.socket,
    exchange: Asked,
    names: Callable[[], list[str]],
    removed: Callable[[], set[str]],
) -> None:
    """Answer one question. After an error, close the connection without a reply: the next question
    has another connection.
    """
    with line, contextlib.suppress(Exception):
        header, frames = _read(Incoming(line), time.monotonic() + GRACE)
        if header["ask"] == "names":
            connected = list(names())
            metrics.gauge("silodp_connected", len(connected))
            return _send(line, {"names": connected}, [], time.monotonic() + GRACE)
        if header["ask"] not in ("exchange", "sharing"):
            raise ValueError("there are two questions")
        began = time.monotonic()
        replies = exchange(frames, float(header["timeout"]))
        if isinstance(replies, Mapping):
            replies = replies.items()
        count = 0
        kept = dict[str, bytes]()
        for name, reply in cast("Iterable[tuple[str, bytes]]", replies):
            count += 1
            if header.get("stream"):
                part = {"frames": _listed({name: reply}), "more": True}
                _send(line, part, [reply], time.monotonic() + GRACE)
            else:
                kept[name] = reply
        metrics.count("silodp_exchanges_total")
        metrics.count("silodp_replies_total", count)
        metrics.count("silodp_silent_total", len(frames) - count)
        metrics.count("silodp_exchange_seconds_total", math.ceil(time.monotonic() - began))
        last = {"frames": _listed(kept), "removed": sorted(removed() & frames.keys())}
        _send(line, last, list(kept.values()), time.monotonic() + GRACE)


# --- messages ------------------------------------------------------------------------------------


class _TooLong(ValueError):
    """A header or the sum of its frames is longer than the limit."""


def _question(frames: Frames) -> tuple[dict[str, Any], list[bytes]]:
    """Return the header of a question, and the pieces that follow it. No piece is copied."""
    if len(frames) > 1 and len(end := frames.end) >= LONG:
        heads = {name: frames.pieces(name)[0] for name in frames}
        return {"ask": "sharing", "frames": _listed(heads), "end": len(end)}, [*heads.values(), end]
    pieces = [piece for name in frames for piece in frames.pieces(name)]
    return {"ask": "exchange", "frames": [[name, frames.size(name)] for name in frames]}, pieces


def _listed(frames: Mapping[str, bytes]) -> list[tuple[str, int]]:
    """Return the name and length of each frame, for a header."""
    return [(name, len(frame)) for name, frame in frames.items()]


def _send(
    line: socket.socket, header: dict[str, Any], pieces: Sequence[bytes], deadline: float
) -> None:
    """Send a message. Raise _TooLong or OSError if it cannot be sent."""
    text = json.dumps(header).encode()
    if len(text) > MAX_HEADER or sum(map(len, pieces)) > MAX_BYTES:
        raise _TooLong
    # An empty piece is left out: to send nothing fails if the other end has hung up already.
    for piece in (len(text).to_bytes(4, "big") + text, *filter(None, pieces)):
        line.settimeout(_left(deadline))
        line.sendall(piece)


def _read(incoming: Incoming, deadline: float) -> tuple[dict, Mapping[str, bytes]]:
    """Read a message. Return its header and its frames by name. Raise ValueError or OSError if it
    is none.
    """
    size = int.from_bytes(incoming.read(4, deadline), "big")
    if size > MAX_HEADER:
        raise _TooLong
    header = json.loads(incoming.read(size, deadline))
    if not isinstance(header, dict):
        raise ValueError("a header is a table")
    sizes = [(str(name), int(length)) for name, length in header.get("frames", ())]
    end = int(header.get("end", 0))
    lengths = [end, *(length for _, length in sizes)]
    if min(lengths) < 0 or sum(lengths) > MAX_BYTES:
        raise _TooLong
    frames = {name: incoming.read(length, deadline) for name, length in sizes}
    if not end:
        return header, frames
    common = incoming.read(end, deadline)
    return header, Frames({name: (frame, common) for name, frame in frames.items()})


def _listens(path: str) -> bool:
    """Return whether a process listens at the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(1.0)
        try:
            line.connect(path)
        except (OSError, ValueError):
            return False
        return True
