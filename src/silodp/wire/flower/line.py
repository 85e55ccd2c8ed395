"""The line between a courier and the hub of a Flower federation: frames out, replies back.

Flower starts a process for each message and asks for messages every 3 seconds, so a question by
message takes 4 seconds or more. One message, the invitation, therefore opens a line: the courier
connects to the server's only port, over TLS with the server's certificate, and shows the token of
its invitation. A token is good once, and only the node that Flower knows by its key was sent it.

The courier begins with  SILODP token CR LF CR LF . A question is  number (4 bytes) | seconds (4) |
length (4) | frame, a reply  number (4) | kind (1) | length (4) | bytes , all big-endian. Kind 0 is
a gate's reply; kind 1 is one of the fixed codes. Standard library only; nothing here reads a frame.
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
"""Seconds in which a message that has begun must be whole."""
PIECE = 2**18
INVITED = 60.0
"""Seconds after which an invitation that was neither followed nor answered is sent again."""
AGAIN = 2.0
"""Seconds before the next one, where an answer has come."""


def keep_alive(line: socket.socket) -> None:
    """Have the system notice within a minute that the other end is gone."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("KEEPIDLE", 20), ("KEEPINTVL", 10), ("KEEPCNT", 4)):
        line.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)


def read(line: socket.socket, size: int, deadline: float | None) -> bytes:
    """Read exactly so many bytes; none is read ahead, so that `select` sees what is left.

    Memory is used for what has come, not for what was announced.
    """
    found = bytearray()
    while len(found) < size:
        if deadline is None:
            left = None
        else:
            left = deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        line.settimeout(left)
        piece = line.recv(min(size - len(found), PIECE))
        if not piece:
            raise ConnectionResetError
        found += piece
    return bytes(found)


# --- at a silo -----------------------------------------------------------------------------------


def carry(line: socket.socket, token: str, gate: Socket, count: Callable[[str], None]) -> None:
    """Answer the questions of the line, one at a time, until it is closed."""
    line.sendall(f"SILODP {token}\r\n\r\n".encode())
    with contextlib.suppress(OSError):
        while True:
            # A line may rest for days; the system's keep-alive notices a server that is gone.
            number, seconds, size = QUESTION.unpack(read(line, QUESTION.size, None))
            if size > LARGEST:
                return
            frame = read(line, size, time.monotonic() + WHOLE + seconds)
            code, reply = _ask(gate, frame, min(float(seconds), LONGEST))
            count(code or "replied")
            line.settimeout(WHOLE)
            kind = REFUSED if code else REPLIED
            line.sendall(REPLY.pack(number, kind, len(reply)) + reply)


def _ask(gate: Socket, frame: bytes, seconds: float) -> tuple[str, bytes]:
    """Return ("", the gate's reply) or (code, code): no exception's text leaves the silo."""
    try:
        return "", gate.ask(frame, seconds)
    except Unreached as missed:
        return missed.code, missed.code.encode()
    except Exception:
        return "courier", b"courier"


# --- at the server -------------------------------------------------------------------------------


class _Line:
    """One courier's line. One question at a time is on it."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.busy = threading.Lock()
        self._number = 0

    def ask(self, frame: bytes, seconds: float) -> tuple[int, bytes]:
        """Return kind and bytes of the reply; TimeoutError, or another OSError if the line is no
        longer of use.
        """
        deadline = time.monotonic() + seconds
        if not self.busy.acquire(timeout=max(0.0, seconds)):
            raise TimeoutError
        try:
            self._send(frame, deadline - time.monotonic())
            while True:
                number, kind, reply = self._reply(deadline)
                if number == self._number:  # an earlier question's reply is late, and of no use
                    return kind, reply
        finally:
            self.busy.release()

    def _send(self, frame: bytes, left: float) -> None:
        self._number = (self._number + 1) % 2**32
        head = QUESTION.pack(self._number, max(1, min(int(left), 2**31)), len(frame))
        self.line.settimeout(max(1.0, left))
        try:
            self.line.sendall(head)
            self.line.sendall(frame)
        except TimeoutError:  # half a question: the next one could not be told from its rest
            raise ConnectionError("half a question") from None

    def _reply(self, deadline: float) -> tuple[int, int, bytes]:
        ready, _, _ = select.select([self.line], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        whole = max(deadline, time.monotonic() + WHOLE)
        try:
            number, kind, size = REPLY.unpack(read(self.line, REPLY.size, whole))
            if size > LARGEST:
                raise ConnectionError("a reply is too long")
            return number, kind, read(self.line, size, whole)
        except TimeoutError:  # half a reply: what follows could not be told from its rest
            raise ConnectionError("half a reply") from None

    def gone(self) -> bool:
        """Whether the courier has hung up, as far as the system knows."""
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
        """`note` gets a sentence for each silo that replied with a code."""
        self._note = note
        self._guard = threading.Lock()
        self._lines: dict[str, _Line] = {}
        self._invited: dict[str, float] = {}
        self._tokens: dict[str, str] = {}
        """Whose each token is. All tokens of a node end when one of them is shown."""

    def invite(self, nodes: Iterable[str]) -> dict[str, str]:
        """Return a token for each node that has no line and no fresh invitation. Hang up on nodes
        that are no longer listed.
        """
        here = set(nodes)
        with self._guard:
            lost = [n for n, line in self._lines.items() if n not in here or line.gone()]
            for name in lost:
                self._hang_up(name)
            for name in set(self._tokens.values()) - here:
                self._forget_tokens(name)
            found = {}
            for name in here - self._lines.keys():
                now = time.monotonic()
                if now - self._invited.get(name, now - INVITED) >= INVITED:
                    found[name] = secrets.token_hex(32)
                    self._tokens[found[name]] = name
                    self._invited[name] = now
            return found

    def forget(self, name: str) -> None:
        """The invitation was followed to its end, or could not be: another may soon be sent."""
        with self._guard:
            self._invited[name] = time.monotonic() - INVITED + AGAIN

    def close(self) -> None:
        """Hang up on all couriers."""
        self.invite([])

    def names(self) -> list[str]:
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
        known = kind == REFUSED and CODES.fullmatch(code)
        self._note(f"{name} replies with {code if known else 'no code'}")
        return None

    def serve(self, listener: socket.socket, stop: threading.Event) -> None:
        """Let couriers in at the listener until `stop` is set."""
        listener.settimeout(0.2)
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                line, _ = listener.accept()
                threading.Thread(target=self._greet, args=(line,), daemon=True).start()

    def _greet(self, line: socket.socket) -> None:
        name = ""
        with contextlib.suppress(OSError):
            greeting = read(line, GREETING_BYTES, time.monotonic() + WHOLE)
            if found := GREETING.fullmatch(greeting):
                name = self._let_in(found[1].decode(), line)
        if not name:
            line.close()

    def _let_in(self, token: str, line: socket.socket) -> str:
        # A token has 256 random bits: to look it up in a dictionary gives nothing away.
        with self._guard:
            name = self._tokens.get(token, "")
            if name:
                self._forget_tokens(name)
                self._hang_up(name)
                self._lines[name] = _Line(line)
        return name

    def _forget_tokens(self, name: str) -> None:
        self._tokens = {token: whose for token, whose in self._tokens.items() if whose != name}

    def _hang_up(self, name: str) -> None:
        if line := self._lines.pop(name, None):
            with contextlib.suppress(OSError):
                line.line.shutdown(socket.SHUT_RDWR)
            line.line.close()
