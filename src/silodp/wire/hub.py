"""Where the algorithm's process meets the engine: a Unix socket at the server's host that takes a
frame for each silo and gives replies.

The engine's job at the server opens it, and the algorithm runs elsewhere, so either may be killed
without the other. Standard library only. A message is  header length (4, big-endian) | header, JSON
| the frames, one after another, as long as the header says. A question's header is {"ask":
"exchange", "timeout": seconds, "frames": [[silo, bytes], ...]} or {"ask": "names"}; the reply's is
{"frames": [[silo, bytes], ...], "removed": [silo, ...]} or {"names": [silo, ...]}. With "stream" in
a question, each reply is a message of its own, as it comes, and all but the last have "more": the
hub reads on from the engine when the one before was taken. Where the frames of a question have a
long end in common, it is {"ask": "sharing", "end": bytes, ...}: that end follows the frames once,
and belongs to each. Nothing here reads a frame.
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
"""Seconds that a question may keep a courier, whatever the server says."""
LONG = 2**20
"""Bytes from which on a common end is sent once."""
GRACE = 60.0
"""Seconds beyond the silos' time in which the hub itself must reply, and in which a message must be
whole.
"""

T = TypeVar("T")
Asked = Callable[[Mapping[str, bytes], float], Mapping[str, bytes] | Iterable[tuple[str, bytes]]]


class Hub:
    """The engine's job that listens at `path`. Each question has a connection of its own, so that a
    restart of the job is not noticed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.removed: frozenset[str] = frozenset()
        """Those of the last exchange whom the server's operator has removed: they are asked nothing
        more.
        """

    def exchange(self, frames: Mapping[str, bytes], timeout: float) -> dict[str, bytes]:
        """The replies that came within `timeout` seconds, by silo; Unreached if it is the hub that
        does not reply.
        """
        return dict(self.stream(frames, timeout))

    def stream(self, frames: Mapping[str, bytes], timeout: float) -> Iterator[tuple[str, bytes]]:
        """(silo, reply), each as it comes; Unreached where the hub says nothing more."""
        header, pieces = _question(Frames.of(frames))
        self.removed = frozenset()
        for told, replies in self._ask(
            header | {"timeout": timeout, "stream": True}, pieces, timeout + GRACE
        ):
            self.removed |= {name for name in frames if name in told.get("removed", ())}
            yield from ((name, reply) for name, reply in replies.items() if name in frames)

    def names(self) -> list[str]:
        """The silos that the engine knows to be connected now."""
        ((found, _),) = self._ask({"ask": "names"}, [], GRACE)
        return [name for name in found.get("names", ()) if isinstance(name, str)]

    def _ask(
        self, header: dict[str, Any], pieces: Sequence[bytes], patience: float
    ) -> Iterator[tuple[dict, Mapping[str, bytes]]]:
        """What the hub says, within so many seconds but for those in which it is used."""
        deadline = time.monotonic() + patience
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            try:
                _connect(line, self.path, deadline)
                _send(line, header, pieces, deadline)
                incoming = Incoming(line)
                more = True
                while more:
                    found = _read(incoming, deadline)
                    more = found[0].get("more")
                    begin = time.monotonic()
                    yield found
                    deadline += time.monotonic() - begin
            except TimeoutError:
                raise Unreached("timeout") from None
            except _TooLong:
                raise Unreached("size") from None
            except (OSError, ValueError):
                raise Unreached("closed") from None


class Direct:
    """No engine: the gates of this machine, by name and socket. For tests, and for peers whose
    relay is a folder or a wire of their own.
    """

    def __init__(self, sockets: Mapping[str, str | Path]) -> None:
        self._gates = {name: str(path) for name, path in sockets.items()}

    def exchange(self, frames: Mapping[str, bytes], timeout: float) -> dict[str, bytes]:
        """The replies that came within `timeout` seconds, by silo."""
        return dict(self.stream(frames, timeout))

    def stream(self, frames: Mapping[str, bytes], timeout: float) -> Iterator[tuple[str, bytes]]:
        """(silo, reply), each as it comes."""
        return iter(Exchange(self._gates, Frames.of(frames), timeout))

    def names(self) -> list[str]:
        """The silos whose gates listen now."""
        return [name for name, path in self._gates.items() if _listens(path)]


@dataclass(frozen=True)
class Later:
    """There is nothing yet: the silo has another turn after so many seconds."""

    seconds: float


class Turns(Generic[T]):
    """What `ask(name, seconds left)` gives for each silo that it gives something for, as it comes:
    by at most `at_once` threads, however many silos there are.

    Whoever has no thread waits for a turn, in an order that is drawn anew each time, and has what
    is then left of the time. A thread whose reply was not taken yet asks nobody, so that no more
    than one reply a thread is held; and the time for which somebody uses a reply is not the silos'.
    What is on its way at the end of the time has so many seconds `beyond` it.
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
        self._came: queue.Queue[tuple[str, T | None]] = queue.Queue(1)

    def __iter__(self) -> Iterator[tuple[str, T]]:
        for _ in range(self._threads):
            threading.Thread(target=self._work, daemon=True).start()
        try:
            with contextlib.suppress(queue.Empty):
                for _ in range(self._count):
                    name, found = self._came.get(
                        timeout=max(0.0, self._deadline + self._beyond - time.monotonic())
                    )
                    if found is not None:
                        begin = time.monotonic()
                        yield name, found
                        self._deadline += time.monotonic() - begin
                    del found  # what was taken is let go of
        finally:
            self._open = False

    def _work(self) -> None:
        while self._open:
            with self._guard:
                if not self._due:  # each that is left has a thread
                    return
                due, place, name = heapq.heappop(self._due)
            time.sleep(max(0.0, min(due, self._deadline) - time.monotonic()))
            if isinstance(found := self._turn(name), Later):
                with self._guard:
                    heapq.heappush(self._due, (time.monotonic() + found.seconds, place, name))
            else:
                self._give(name, found)
            del found

    def _turn(self, name: str) -> T | Later | None:
        try:
            if (left := self._deadline - time.monotonic()) > 0:
                return self._ask(name, left)
            return None
        except Exception:  # a silo's, or the engine's
            return None

    def _give(self, name: str, found: T | None) -> None:
        while self._open:
            with contextlib.suppress(queue.Full):
                return self._came.put((name, found), timeout=1.0)


def serve_hub(
    path: str | Path,
    exchange: Asked,
    names: Callable[[], list[str]],
    stop: threading.Event,
    removed: Callable[[], set[str]] = set,
) -> None:
    """Listens at `path`, which only this user may open, until `stop` is set. An `exchange` that
    fails is hung up on, and costs nothing.

    Questions run side by side, each in a thread of its own; `exchange(frames, timeout)` must be
    safe to call so. `removed` says who is let in no more.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode) or _listens(str(path)):
            raise FileExistsError(f"{path} is in use")
        os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        os.chmod(path, 0o600)  # before it listens, so that nobody else could have come in
        listener.listen(64)
        listener.settimeout(0.1)
        own = os.lstat(path).st_ino
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                line, _ = listener.accept()
                threading.Thread(
                    target=_serve, args=(line, exchange, names, removed), daemon=True
                ).start()
    with contextlib.suppress(FileNotFoundError):
        if os.lstat(path).st_ino == own:
            os.unlink(path)


def _serve(
    line: socket.socket,
    exchange: Asked,
    names: Callable[[], list[str]],
    removed: Callable[[], set[str]],
) -> None:
    with (
        line,
        contextlib.suppress(Exception),
    ):  # whatever goes wrong is told by hanging up; the next question has another line
        header, frames = _read(Incoming(line), time.monotonic() + GRACE)
        if header["ask"] == "names":
            there = list(names())
            metrics.gauge("silodp_connected", len(there))
            return _send(line, {"names": there}, [], time.monotonic() + GRACE)
        if header["ask"] not in ("exchange", "sharing"):
            raise ValueError("there are two questions")
        began = time.monotonic()
        found = exchange(frames, float(header["timeout"]))
        count = 0
        kept = dict[str, bytes]()
        for name, reply in cast(
            "Iterable[tuple[str, bytes]]", found.items() if isinstance(found, Mapping) else found
        ):
            count += 1
            if header.get("stream"):
                _send(
                    line,
                    {"frames": _listed({name: reply}), "more": True},
                    [reply],
                    time.monotonic() + GRACE,
                )
            else:
                kept[name] = reply
        metrics.count("silodp_exchanges_total")
        metrics.count("silodp_replies_total", count)
        metrics.count("silodp_silent_total", len(frames) - count)
        metrics.count("silodp_exchange_seconds_total", math.ceil(time.monotonic() - began))
        gone = sorted(removed() & frames.keys())
        _send(
            line,
            {"frames": _listed(kept), "removed": gone},
            list(kept.values()),
            time.monotonic() + GRACE,
        )


# --- messages ------------------------------------------------------------------------------------


class _TooLong(ValueError):
    """A header or the sum of its frames is longer than what is carried."""


def _question(frames: Frames) -> tuple[dict[str, Any], list[bytes]]:
    """The header, and what follows it, of which nothing is copied."""
    if len(frames) > 1 and len(end := frames.end) >= LONG:
        heads = {name: frames.pieces(name)[0] for name in frames}
        return {"ask": "sharing", "frames": _listed(heads), "end": len(end)}, [*heads.values(), end]
    pieces = [piece for name in frames for piece in frames.pieces(name)]
    return {"ask": "exchange", "frames": [[name, frames.size(name)] for name in frames]}, pieces


def _listed(frames: Mapping[str, bytes]) -> list[tuple[str, int]]:
    """What a header says of the frames that follow it."""
    return [(name, len(frame)) for name, frame in frames.items()]


def _send(
    line: socket.socket, header: dict[str, Any], pieces: Sequence[bytes], deadline: float
) -> None:
    text = json.dumps(header).encode()
    if len(text) > MAX_HEADER or sum(map(len, pieces)) > MAX_BYTES:
        raise _TooLong
    for piece in (
        len(text).to_bytes(4, "big") + text,
        *filter(None, pieces),
    ):  # to send nothing may fail: the reply may have come
        line.settimeout(_left(deadline))
        line.sendall(piece)


def _read(incoming: Incoming, deadline: float) -> tuple[dict, Mapping[str, bytes]]:
    size = int.from_bytes(incoming.read(4, deadline), "big")
    if size > MAX_HEADER:
        raise _TooLong
    header = json.loads(incoming.read(size, deadline))
    if not isinstance(header, dict):
        raise ValueError("a header is a table")
    sizes = [(str(name), int(length)) for name, length in header.get("frames", ())]
    end = int(header.get("end", 0))
    if (
        end < 0
        or any(length < 0 for _, length in sizes)
        or end + sum(length for _, length in sizes) > MAX_BYTES
    ):
        raise _TooLong
    frames = {name: incoming.read(length, deadline) for name, length in sizes}
    if not end:
        return header, frames
    common = incoming.read(end, deadline)
    return header, Frames({name: (frame, common) for name, frame in frames.items()})


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(1.0)
        try:
            line.connect(path)
        except (OSError, ValueError):
            return False
        return True
