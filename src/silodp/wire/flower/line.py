"""The line between a courier and the hub of a Flower federation: frames out, replies back.

Flower starts a process for each message, and asks for messages every 3 seconds. So a question by
message takes 4 seconds or more. Therefore one message, the invitation, opens a line. The courier
connects to the server's only port, over TLS with the server's certificate, and shows the token of
its invitation. A token is valid once. It was sent only to the node that Flower identifies by its
key.

The courier begins with  SILODP token CR LF CR LF . A question is  number (4 bytes) | seconds (4) |
length (4) | frame, a reply  number (4) | kind (1) | length (4) | bytes , all big-endian. Kind 0 is
a gate's reply. Kind 1 is one of the fixed codes. Standard library only. Nothing here reads a frame.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable

from silodp.wire.hub import LONGEST
from silodp.wire.many import LARGEST
from silodp.wire.socket import Socket, Unreached

GREETING = re.compile(rb"SILODP ([0-9a-f]{64})\r\n\r\n")
GREETING_BYTES = len("SILODP ") + 64 + 4
QUESTION = struct.Struct(">III")
REPLY = struct.Struct(">IBI")
REPLIED = 0
REFUSED = 1
CODES = re.compile(r"[a-z]{1,20}")
WHOLE = 60.0
"""Seconds in which a message that has begun must be complete."""
PIECE = 2**18
INVITED = 60.0
"""Seconds after which an invitation without a line and without an answer is sent again."""
AGAIN = 2.0
"""Seconds before the next invitation after an answer."""


def keep_alive(line: socket.socket) -> None:
    """Have the system notice within a minute that the other end is gone."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("KEEPIDLE", 20), ("KEEPINTVL", 10), ("KEEPCNT", 4)):
        line.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)


def read(line: socket.socket, size: int, deadline: float | None) -> bytes:
    """Read exactly this number of bytes. None is read ahead, so that `select` still reports what is
    left.

    Memory grows with the bytes that have come, not with the announced length. Raise TimeoutError
    after the deadline, and ConnectionResetError at the end of the line.
    """
    content = bytearray()
    while len(content) < size:
        if deadline is None:
            left = None
        else:
            left = deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        line.settimeout(left)
        piece = line.recv(min(size - len(content), PIECE))
        if not piece:
            raise ConnectionResetError
        content += piece
    return bytes(content)


# --- at a silo -----------------------------------------------------------------------------------


def carry(line: socket.socket, token: str, gate: Socket, count: Callable[[str], None]) -> None:
    """Answer the questions of the line, one at a time, until it is closed."""
    line.sendall(f"SILODP {token}\r\n\r\n".encode())
    with contextlib.suppress(OSError):
        while True:
            # A line may be idle for days. The system's keep-alive notices a server that is gone.
            number, seconds, size = QUESTION.unpack(read(line, QUESTION.size, None))
            if size > LARGEST:
                return
            frame = read(line, size, time.monotonic() + WHOLE + seconds)
            code, reply = _ask(gate, frame, min(float(seconds), LONGEST))
            count(code or "replied")
            line.settimeout(WHOLE)
            if code:
                kind = REFUSED
            else:
                kind = REPLIED
            line.sendall(REPLY.pack(number, kind, len(reply)) + reply)


def _ask(gate: Socket, frame: bytes, seconds: float) -> tuple[str, bytes]:
    """Return ("", the gate's reply) or (code, code). No exception's text leaves the silo."""
    try:
        return "", gate.ask(frame, seconds)
    except Unreached as missed:
        return missed.code, missed.code.encode()
    except Exception:
        return "courier", b"courier"


# --- at the server -------------------------------------------------------------------------------


class _Line:
    """One courier's line, with one question at a time."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.busy = threading.Lock()
        self._number = 0

    def ask(self, frame: bytes, seconds: float) -> tuple[int, bytes]:
        """Return kind and bytes of the reply.

        Raise TimeoutError if none comes in time, and another OSError if the line cannot be used any
        longer.
        """
        deadline = time.monotonic() + seconds
        if not self.busy.acquire(timeout=max(0.0, seconds)):
            raise TimeoutError
        try:
            self._send(frame, deadline - time.monotonic())
            while True:
                number, kind, reply = self._reply(deadline)
                # A late reply to an earlier question is not used.
                if number == self._number:
                    return kind, reply
        finally:
            self.busy.release()

    def _send(self, frame: bytes, left: float) -> None:
        """Send a question. Raise ConnectionError if only a part of it could be sent."""
        self._number = (self._number + 1) % 2**32
        head = QUESTION.pack(self._number, max(1, min(int(left), 2**31)), len(frame))
        self.line.settimeout(max(1.0, left))
        try:
            self.line.sendall(head)
            self.line.sendall(frame)
        except TimeoutError:
            # The courier would take the next question for the rest of this one.
            raise ConnectionError("half a question") from None

    def _reply(self, deadline: float) -> tuple[int, int, bytes]:
        """Return number, kind and bytes of the next reply. Raise ConnectionError if it is torn or
        too long.
        """
        ready, _, _ = select.select([self.line], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        end = max(deadline, time.monotonic() + WHOLE)
        try:
            number, kind, size = REPLY.unpack(read(self.line, REPLY.size, end))
            if size > LARGEST:
                raise ConnectionError("a reply is too long")
            return number, kind, read(self.line, size, end)
        except TimeoutError:
            # The next reply would be taken for the rest of this one.
            raise ConnectionError("half a reply") from None

    def gone(self) -> bool:
        """Return whether the courier has hung up, as far as the system can tell."""
        if not self.busy.acquire(blocking=False):
            return False
        try:
            ready, _, _ = select.select([self.line], [], [], 0.0)
            return bool(ready) and not self.line.recv(1, socket.MSG_PEEK)
        except OSError:
            return True
        finally:
            self.busy.release()


class Lines:
    """The lines of all couriers, by the names under which the operator registered their nodes."""

    def __init__(self, note: Callable[[str], None] = print) -> None:
        """Start without a line. `note` gets a sentence for each silo that replied with a code."""
        self._note = note
        self._guard = threading.Lock()
        self._lines: dict[str, _Line] = {}
        self._invited: dict[str, float] = {}
        self._tokens: dict[str, str] = {}
        """The node of each token. All tokens of a node end when one of them is shown."""

    def invite(self, nodes: Iterable[str]) -> dict[str, str]:
        """Return a token for each node that has no line and no recent invitation.

        Hang up on nodes that are no longer listed.
        """
        listed = set(nodes)
        with self._guard:
            lost = [n for n, line in self._lines.items() if n not in listed or line.gone()]
            for name in lost:
                self._hang_up(name)
            for name in set(self._tokens.values()) - listed:
                self._forget_tokens(name)
            tokens = {}
            for name in listed - self._lines.keys():
                now = time.monotonic()
                if now - self._invited.get(name, now - INVITED) >= INVITED:
                    tokens[name] = secrets.token_hex(32)
                    self._tokens[tokens[name]] = name
                    self._invited[name] = now
            return tokens

    def forget(self, name: str) -> None:
        """Note that the invitation was followed to its end, or failed. Another may soon be sent."""
        with self._guard:
            self._invited[name] = time.monotonic() - INVITED + AGAIN

    def close(self) -> None:
        """Hang up on all couriers."""
        self.invite([])

    def names(self) -> list[str]:
        """Return the silos with a line."""
        with self._guard:
            return sorted(name for name, line in self._lines.items() if not line.gone())

    def ask(self, name: str, frame: bytes, seconds: float) -> bytes | None:
        """Return the reply of the silo's gate, or None."""
        with self._guard:
            line = self._lines.get(name)
        if line is None:
            return None
        try:
            kind, reply = line.ask(frame, seconds)
        except TimeoutError:
            return None
        except OSError:
            with self._guard:
                if self._lines.get(name) is line:
                    self._hang_up(name)
            return None
        if kind == REPLIED:
            return reply
        # A silo's own words do not reach the log.
        code = reply[:20].decode("ascii", "replace")
        if kind != REFUSED or not CODES.fullmatch(code):
            code = "no code"
        self._note(f"{name} replies with {code}")
        return None

    def serve(self, listener: socket.socket, stop: threading.Event) -> None:
        """Let couriers in at the listener until `stop` is set."""
        listener.settimeout(0.2)
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                line, _ = listener.accept()
                threading.Thread(target=self._greet, args=(line,), daemon=True).start()

    def _greet(self, line: socket.socket) -> None:
        """Read the greeting of a courier, and admit it or close the line."""
        name = ""
        with contextlib.suppress(OSError):
            greeting = read(line, GREETING_BYTES, time.monotonic() + WHOLE)
            if match := GREETING.fullmatch(greeting):
                name = self._let_in(match[1].decode(), line)
        if not name:
            line.close()

    def _let_in(self, token: str, line: socket.socket) -> str:
        """Store the line of the node with this token, and return the node's name, or an empty
        text.
        """
        # A token has 256 random bits, so the time of a look-up in a dictionary reveals nothing.
        with self._guard:
            name = self._tokens.get(token, "")
            if name:
                self._forget_tokens(name)
                self._hang_up(name)
                self._lines[name] = _Line(line)
        return name

    def _forget_tokens(self, name: str) -> None:
        """Forget all tokens of a node."""
        self._tokens = {token: node for token, node in self._tokens.items() if node != name}

    def _hang_up(self, name: str) -> None:
        """Close the line of a node."""
        if line := self._lines.pop(name, None):
            with contextlib.suppress(OSError):
                line.line.shutdown(socket.SHUT_RDWR)
            line.line.close()
