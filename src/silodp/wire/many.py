"""A frame to each of many Unix sockets and the replies as they come, in one thread and a bounded
memory. Standard library only.

All are asked at once. A reply is given out when it is whole, and the next one when that was taken.
`ROOM` bytes of replies are held, and what one more needs to be whole, and a copy of the one that is
given out: when they are full, only the reply that lacks least is read on, and the gates wait with
the others. Each has so many seconds for that in all, by its length, and is then hung up on, so that
whoever sends slowly keeps the others no longer than that: it may be asked for again, and its gate
has it. The time for which somebody uses a reply is not the silos', and is not counted.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Iterator, Mapping

from silodp.host.frames import Frames

ROOM = LARGEST = 2**28
"""Bytes of replies that are held at once, and of one reply: a longer one, or one longer than the
question allows, is not read.
"""
TURN = 5.0
PACE = 2**24
PIECE = 2**20
"""Seconds for which the others wait for a reply, and one more for each PACE bytes of it; the most
that is read at once.
"""
AGAIN = 0.01
"""Seconds until a door with a queue is tried again."""


class _Line:
    """A connection: what is still to be sent, and what has come."""

    def __init__(self, name: str, line: socket.socket, frames: Frames) -> None:
        self.name = name
        self.line = line
        self._most = min(LARGEST, frames.most)
        self.out = [
            memoryview(piece)
            for piece in (frames.size(name).to_bytes(4, "big"), *frames.pieces(name))
            if piece
        ]
        self.came = bytearray()
        self._length = b""
        self.waited_for = 0.0

    @property
    def lacking(self) -> int:
        return int.from_bytes(self._length, "big") - len(self.came)

    @property
    def patience(self) -> float:
        """Seconds for which the others still wait for it."""
        return TURN + int.from_bytes(self._length, "big") / PACE - self.waited_for

    def send(self) -> None:
        sent = self.line.sendmsg(self.out)
        while self.out and sent >= len(self.out[0]):
            sent -= len(self.out.pop(0))
        if sent:
            self.out[0] = self.out[0][sent:]

    def read(self) -> bool:
        """Whether the reply is whole. Memory grows with what has come, not with what was
        announced.
        """
        if len(self._length) < 4:
            self._length += self._received(4 - len(self._length))
            if len(self._length) < 4:
                return False
            if self.lacking > self._most:
                raise OSError("size")
        if self.lacking:
            self.came += self._received(min(self.lacking, PIECE))
        return not self.lacking

    def _received(self, most: int) -> bytes:
        if not (piece := self.line.recv(most)):
            raise ConnectionResetError
        return piece


class Exchange:
    """One of `frames` to each of the `paths` that have one; iterates over (name, reply) until all
    have replied or so many seconds are over.
    """

    def __init__(self, paths: Mapping[str, str], frames: Frames, timeout: float) -> None:
        self._paths = paths
        self._frames = frames
        self._outside = [name for name in frames if name in paths and frames.size(name) < 2**32]
        self._open: set[_Line] = set()
        self._held = 0
        self._paused = 0.0
        self._deadline = self._now() + timeout
        self._first: tuple[_Line | None, float] = None, 0.0

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            stack.callback(lambda: [line.line.close() for line in self._open])
            while (self._outside or self._open) and (left := self._deadline - self._now()) > 0:
                if self._held < ROOM:
                    self._first = None, 0.0
                    self._connect(selector)
                    if self._open:
                        ready = [
                            key.data
                            for key, _ in selector.select(
                                min(left, AGAIN) if self._outside else left
                            )
                        ]
                    else:
                        ready = []
                else:
                    ready = self._alone(left, selector)
                for line in ready:
                    if self._step(line, selector):
                        yield from self._given(line)
                    if self._held >= ROOM:
                        break

    def _now(self) -> float:
        return time.monotonic() - self._paused

    def _connect(self, selector: selectors.BaseSelector) -> None:
        """Whoever is not there is left out. Too many open lines of our own, and a door with a
        queue, are tried again.
        """
        for name in list(self._outside):
            try:
                line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            except OSError:
                if self._open:
                    return
                raise
            try:
                line.setblocking(False)
                line.connect(self._paths[name])
            except (OSError, ValueError) as error:
                line.close()
                if isinstance(error, OSError) and error.errno == errno.EAGAIN:
                    continue
            else:
                opened = _Line(name, line, self._frames)
                self._open.add(opened)
                selector.register(line, selectors.EVENT_WRITE, opened)
            self._outside.remove(name)
        if not self._open and self._outside:
            time.sleep(AGAIN)

    def _step(self, line: _Line, selector: selectors.BaseSelector) -> bool:
        """Sends or reads what can be now; whether the reply is whole. A line that fails is let go
        of.
        """
        before = len(line.came)
        whole = False
        try:
            if line.out:
                self._send(line, selector)
            else:
                whole = line.read()
            self._held += len(line.came) - before
        except BlockingIOError:
            return False
        except OSError:
            self._drop(line, selector)
        if whole:
            self._close(line, selector)
        return whole

    def _send(self, line: _Line, selector: selectors.BaseSelector) -> None:
        try:
            line.send()
        except (
            BrokenPipeError,
            ConnectionResetError,
        ):  # refused before all was sent: the reply says why
            line.out.clear()
        if not line.out:
            selector.modify(line.line, selectors.EVENT_READ, line)

    def _close(self, line: _Line, selector: selectors.BaseSelector) -> None:
        selector.unregister(line.line)
        line.line.close()
        self._open.discard(line)

    def _drop(self, line: _Line, selector: selectors.BaseSelector) -> None:
        self._held -= len(line.came)
        self._close(line, selector)

    def _alone(self, left: float, selector: selectors.BaseSelector) -> list[_Line]:
        """The one that lacks least, as long as it may keep the others."""
        line = min((line for line in self._open if line.came), key=lambda line: line.lacking)
        now = self._now()
        if line is self._first[0]:
            line.waited_for += now - self._first[1]
        self._first = line, now
        if line.patience <= 0:
            self._drop(line, selector)
            return []
        line.line.settimeout(min(left, line.patience))
        return [line]

    def _given(self, line: _Line) -> Iterator[tuple[str, bytes]]:
        reply = bytes(line.came)
        line.came = bytearray()
        begin = time.monotonic()
        yield line.name, reply
        self._held -= len(reply)
        self._paused += time.monotonic() - begin
