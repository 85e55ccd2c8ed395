"""A courier's way to the gate daemon of its silo: one frame out, one frame back, over a Unix
socket. Standard library only.

On the socket a frame is preceded by its length, 4 bytes, big-endian. Nothing here reads a frame:
queries are signed by the server, replies by the silo, and whoever carries them is trusted by
neither.
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
"""Every code with which a gate cannot be reached; whatever the gate itself says comes as a reply.
"""


class Unreached(Exception):
    """No reply came, for the reason that `code` names; it holds no other word."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Socket:
    """The gate that listens at `path`. Each question has a connection of its own, so that a restart
    of the gate is not noticed.
    """

    def __init__(self, path: str | Path, *, limit: int = 2**30) -> None:
        """`limit` is the longest frame or reply, in bytes, that is carried."""
        self.path = str(path)
        self.limit = limit

    def ask(self, frame: bytes, timeout: float) -> bytes:
        """The gate's reply to the frame within `timeout` seconds in all; else Unreached."""
        if len(frame) > min(self.limit, 2**32 - 1):
            raise Unreached("size")
        deadline = time.monotonic() + timeout
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            try:
                _connect(line, self.path, deadline)
                with contextlib.suppress(
                    BrokenPipeError, ConnectionResetError
                ):  # refused before all was sent: the reply says why
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
    """What comes over a line. Each byte is written once, to where it stays; memory for what was
    announced is used when it has come.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line = _Line(line)
        self._whole = io.BufferedReader(self._line)

    def read(self, size: int, deadline: float) -> bytes:
        """Exactly so many bytes."""
        self._line.deadline = deadline
        if len(found := self._whole.read(size)) < size:
            raise ConnectionResetError
        return found


class _Line(io.RawIOBase):
    """For the reader: as much as there is, until the deadline."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self.deadline = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self._line.settimeout(_left(self.deadline))
        return self._line.recv_into(buffer)


def _connect(line: socket.socket, path: str, deadline: float) -> None:
    while True:
        line.settimeout(_left(deadline))
        try:
            return line.connect(path)
        except (
            BlockingIOError
        ):  # so many are at the door that the system does not even let us queue
            time.sleep(0.01)
        except TimeoutError:
            raise
        except (OSError, ValueError):
            raise Unreached("unreachable") from None


def _left(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left
