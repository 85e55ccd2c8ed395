"""A courier's way to the gate daemon of its silo: one frame out, one frame back, over a Unix
socket. It uses the standard library only.

On the socket a frame follows its length, 4 bytes, big-endian. Nothing here reads a frame. Queries
are signed by the server and replies by the silo, and neither trusts the courier.
"""

from __future__ import annotations

import contextlib
import io
import socket
import time
from pathlib import Path
from typing import Any

CODES = {
    "unreachable": "No gate listens at the socket, or this user may not open it.",
    "timeout": (
        "The gate did not reply in time; the same query may be asked again, and costs nothing "
        "if it was answered."
    ),
    "closed": "The gate hung up before its reply was whole; the same query may be asked again.",
    "size": "The frame, or the reply, is longer than what is carried.",
}
"""Every code for a gate that cannot be reached. The gate's own refusals come as replies."""


class Unreached(Exception):
    """No reply came, for the reason that `code` names. The exception has no other text."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Socket:
    """The gate that listens at `path`. Each question has a connection of its own, so a restart of
    the gate changes nothing.
    """

    def __init__(self, path: str | Path, *, limit: int = 2**30) -> None:
        """Store the arguments. `limit` is the greatest length of a frame or reply, in bytes."""
        self.path = str(path)
        self.limit = limit

    def ask(self, frame: bytes, timeout: float) -> bytes:
        """Return the gate's reply to the frame. Raise Unreached if none came within `timeout`
        seconds in all.
        """
        if len(frame) > min(self.limit, 2**32 - 1):
            raise Unreached("size")
        deadline = time.monotonic() + timeout
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            try:
                _connect(line, self.path, deadline)
                # A gate may refuse before it has read the whole frame. Its reply has the reason.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    for piece in (len(frame).to_bytes(4, "big"), frame):
                        line.settimeout(_left(deadline))
                        line.sendall(piece)
                incoming = Incoming(line)
                size = int.from_bytes(incoming.read(4, deadline), "big")
                if size > self.limit:
                    raise Unreached("size")
                return incoming.read(size, deadline)
            except TimeoutError:
                raise Unreached("timeout") from None
            except OSError:
                raise Unreached("closed") from None


class Incoming:
    """The bytes that come over a line. Each byte is written once, at its final place. Memory grows
    with the bytes that have come, not with the announced length.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line = _Line(line)
        self._reader = io.BufferedReader(self._line)

    def read(self, size: int, deadline: float) -> bytes:
        """Return exactly this number of bytes. Raise OSError if they do not come in time."""
        self._line.deadline = deadline
        content = self._reader.read(size)
        if len(content) < size:
            raise ConnectionResetError
        return content


class _Line(io.RawIOBase):
    """The line as a raw stream for the reader: each read returns the bytes that are there, until
    the deadline.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self.deadline = 0.0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read the bytes that are there into the buffer, and return their number."""
        self._line.settimeout(_left(self.deadline))
        return self._line.recv_into(buffer)


def _connect(line: socket.socket, path: str, deadline: float) -> None:
    """Connect to the gate. Raise Unreached if nothing listens, and TimeoutError after the
    deadline.
    """
    while True:
        line.settimeout(_left(deadline))
        try:
            return line.connect(path)
        except BlockingIOError:
            # The gate's queue is full, so the system refuses to queue this connection.
            time.sleep(0.01)
        except TimeoutError:
            raise
        except (OSError, ValueError):
            raise Unreached("unreachable") from None


def _left(deadline: float) -> float:
    """Return the seconds until the deadline. Raise TimeoutError after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
