"""A courier's way to the gate daemon of its silo: one frame out, one frame back, over a Unix socket. Standard library only.

On the socket a frame is preceded by its length, 4 bytes, big-endian. Nothing here reads a frame: queries are signed by the server,
replies by the silo, and whoever carries them is trusted by neither.
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

CODES = {
    "unreachable": "No gate listens at the socket, or this user may not open it.",
    "timeout": "The gate did not reply in time; the same query may be asked again, and costs nothing if it was answered.",
    "closed": "The gate hung up before its reply was whole; the same query may be asked again.",
    "size": "The frame, or the reply, is longer than what is carried.",
}
"""Every code with which a gate cannot be reached; whatever the gate itself says comes as a reply."""


class Unreached(Exception):
    """No reply came, for the reason that `code` names; it holds no other word."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Socket:
    """The gate that listens at `path`. Each question has a connection of its own, so that a restart of the gate is not noticed."""

    def __init__(self, path: str | Path, *, limit: int = 2**30) -> None:
        """`limit` is the longest frame or reply, in bytes, that is carried."""
        self.path, self.limit = str(path), limit

    def ask(self, frame: bytes, timeout: float) -> bytes:
        """The gate's reply to the frame within `timeout` seconds in all; else Unreached."""
        if len(frame) > min(self.limit, 2**32 - 1):
            raise Unreached("size")
        deadline = time.monotonic() + timeout
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            try:
                _connect(line, self.path, deadline)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent: the reply says why
                    line.settimeout(_left(deadline))
                    line.sendall(len(frame).to_bytes(4, "big") + frame)
                size = int.from_bytes(_receive(line, 4, deadline), "big")
                if size > self.limit:
                    raise Unreached("size")
                return _receive(line, size, deadline)
            except TimeoutError:
                raise Unreached("timeout") from None
            except OSError:
                raise Unreached("closed") from None


def _connect(line: socket.socket, path: str, deadline: float) -> None:
    while True:
        line.settimeout(_left(deadline))
        try:
            return line.connect(path)
        except BlockingIOError:  # so many are at the door that the system does not even let us queue
            time.sleep(0.01)
        except TimeoutError:
            raise
        except (OSError, ValueError):
            raise Unreached("unreachable") from None


def _receive(line: socket.socket, size: int, deadline: float) -> bytes:
    pieces, lacking = list[bytes](), size
    while lacking > 0:
        line.settimeout(_left(deadline))
        piece = line.recv(min(lacking, 2**20))
        if not piece:
            raise ConnectionResetError
        pieces.append(piece)
        lacking -= len(piece)
    return b"".join(pieces)


def _left(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left
