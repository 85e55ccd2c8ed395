"""Exchange of frames with many Unix sockets, in one thread and a bounded memory. It uses the
standard library only.

All sockets get their frame at once. A reply is returned when it is complete, and the next one when
the caller has used it. The memory has `ROOM` bytes of replies, the missing rest of one more reply,
and a copy of the reply that is returned. If it is full, only the reply with the fewest missing
bytes is read on, and all other gates wait.

A reply that the others wait for has a limited time in all, by its length. After that its line is
closed, so that a slow sender does not block the others for longer. It may be asked again, and its
gate still stores the reply. The time in which the caller uses a reply does not count.
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
"""Most bytes of replies in memory at once, and of one reply. A reply that is longer than this, or
than the question allows, is not read.
"""
TURN = 5.0
"""Seconds for which the others wait for a reply."""
PACE = 2**24
"""Bytes of a reply for which the others wait one second more."""
PIECE = 2**20
"""Most bytes that are read at once."""
AGAIN = 0.01
"""Seconds until a gate with a full queue is tried again."""


class _Line:
    """A connection, with the bytes that are still to be sent and those that have come."""

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
        """Return the number of missing bytes of the reply."""
        return int.from_bytes(self._length, "big") - len(self.came)

    @property
    def patience(self) -> float:
        """Return the seconds for which the others still wait for this reply."""
        return TURN + int.from_bytes(self._length, "big") / PACE - self.waited_for

    def send(self) -> None:
        """Send what the socket takes now."""
        sent = self.line.sendmsg(self.out)
        while self.out and sent >= len(self.out[0]):
            sent -= len(self.out.pop(0))
        if sent:
            self.out[0] = self.out[0][sent:]

    def read(self) -> bool:
        """Read what is there, and return whether the reply is complete.

        Memory grows with the bytes that have come, not with the announced length. Raise OSError for
        a reply that is too long.
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
        """Return at most this number of bytes. Raise ConnectionResetError if the gate has hung
        up.
        """
        if not (piece := self.line.recv(most)):
            raise ConnectionResetError
        return piece


class Exchange:
    """Sends one of `frames` to each of the `paths` that has one. Iteration yields (name, reply)
    until all have replied, or until the time is over.
    """

    def __init__(self, paths: Mapping[str, str], frames: Frames, timeout: float) -> None:
        self._paths = paths
        self._frames = frames
        self._outside = [name for name in frames if name in paths and frames.size(name) < 2**32]
        self._open: set[_Line] = set()
        self._buffered = 0
        """Bytes of replies in memory."""
        self._paused = 0.0
        """Seconds in which the caller used replies."""
        self._deadline = self._now() + timeout
        self._first: tuple[_Line | None, float] = (None, 0.0)
        """The line that the others wait for, and since when."""

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            stack.callback(lambda: [line.line.close() for line in self._open])
            while (self._outside or self._open) and (left := self._deadline - self._now()) > 0:
                if self._buffered < ROOM:
                    self._first = (None, 0.0)
                    self._connect(selector)
                    ready = []
                    if self._outside:
                        left = min(left, AGAIN)
                    if self._open:
                        ready = [key.data for key, _ in selector.select(left)]
                else:
                    ready = self._alone(left, selector)
                for line in ready:
                    if self._step(line, selector):
                        yield from self._given(line)
                    if self._buffered >= ROOM:
                        break

    def _now(self) -> float:
        """Return the time without that in which the caller used replies."""
        return time.monotonic() - self._paused

    def _connect(self, selector: selectors.BaseSelector) -> None:
        """Connect to the gates that have no line yet.

        A gate that does not listen is left out. If a gate's queue is full, or this process has too
        many open lines, the gate is tried again later.
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
        """Send or read what is possible now, and return whether the reply is complete. Drop a line
        that fails.
        """
        before = len(line.came)
        complete = False
        try:
            if line.out:
                self._send(line, selector)
            else:
                complete = line.read()
            self._buffered += len(line.came) - before
        except BlockingIOError:
            return False
        except OSError:
            self._drop(line, selector)
        if complete:
            self._close(line, selector)
        return complete

    def _send(self, line: _Line, selector: selectors.BaseSelector) -> None:
        """Send what is possible now. Once the frame is sent, wait for the reply."""
        try:
            line.send()
        except (BrokenPipeError, ConnectionResetError):
            # A gate may refuse before it has read the whole frame. Its reply has the reason.
            line.out.clear()
        if not line.out:
            selector.modify(line.line, selectors.EVENT_READ, line)

    def _close(self, line: _Line, selector: selectors.BaseSelector) -> None:
        """Close a line."""
        selector.unregister(line.line)
        line.line.close()
        self._open.discard(line)

    def _drop(self, line: _Line, selector: selectors.BaseSelector) -> None:
        """Close a line, and forget the bytes that came over it."""
        self._buffered -= len(line.came)
        self._close(line, selector)

    def _alone(self, left: float, selector: selectors.BaseSelector) -> list[_Line]:
        """Return the line with the fewest missing bytes, or none if it has used up its time."""
        line = min((line for line in self._open if line.came), key=lambda line: line.lacking)
        now = self._now()
        if line is self._first[0]:
            line.waited_for += now - self._first[1]
        self._first = (line, now)
        if line.patience <= 0:
            self._drop(line, selector)
            return []
        line.line.settimeout(min(left, line.patience))
        return [line]

    def _given(self, line: _Line) -> Iterator[tuple[str, bytes]]:
        """Yield a reply, and release its memory when the caller has used it."""
        reply = bytes(line.came)
        line.came = bytearray()
        begin = time.monotonic()
        yield line.name, reply
        self._buffered -= len(reply)
        self._paused += time.monotonic() - begin
