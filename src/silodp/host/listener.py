"""Serve a daemon's Unix socket: one frame of bytes in, one frame of bytes out.

On the socket a frame is preceded by its length, 4 bytes, big-endian. This module interprets no
frame. Whatever a courier does with its end, frames reach `handle` one at a time and in turn. Each
reply is the one of `handle` or one of `LINE_CODES`.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from silodp.core.errors import BadInput
from silodp.host.log import Log
from silodp.host.ownership import group_of, users_of
from silodp.host.tables import Site

LOOK = 0.5
"""Seconds between two checks whether the daemon should start again."""
LINE_CODES: dict[str, str] = {
    "size": (
        "The frame is longer than any that makes sense here, or than the settings' maximum_frame."
    ),
    "peer": "The process at the other end runs as a user that the settings do not list.",
    "busy": "As many frames are waiting as the settings have connections; ask again.",
    "stopping": "The daemon is being stopped; ask again when it is back.",
    "internal": "The daemon could not answer, for a reason that has to do with no record.",
}
"""The daemon's own replies to a frame that has not reached `handle`, or that `handle` failed on."""


class Server:
    """Pass frames from a Unix socket to `handle`, one at a time, and send the replies.

    Frames are handled in the order in which they were complete. A connection has at most one frame
    in that queue. A connection that keeps the daemon waiting, for a frame or for room for a reply,
    is closed after `timeout` seconds. When all connections are in use, the one that has kept the
    daemon waiting longest is closed at once.

    With `after`, each frame has a slot of that many seconds for itself. The slot begins once the
    frame has arrived and the slot of the frame before it is over. The reply is sent at the end of
    the slot. So its time follows from when frames arrived, and not from how long any of them took.

    Bad frames have a slot too, since even a refusal waits for the frame before it. A reply that is
    not ready at the end of its slot is late. It gets as many slots as it needs, is sent at the end
    of the last one, and is counted in the log. A daemon that stops does not wait: a stored answer
    is sent when the query is repeated.
    """

    def __init__(
        self,
        site: Site,
        handle: Callable[[bytes], bytes],
        *,
        refuse: Callable[[str], bytes],
        limit: int,
        log: Log,
        after: float = 0.0,
    ) -> None:
        self._site = site
        self._handle = handle
        self._log = log
        self._after = after
        self._limit = min(limit, site.maximum_frame)
        self._users = users_of(site.couriers)
        self._group = group_of(site.socket_group)
        self._refusals = {code: _framed(refuse(code)) for code in LINE_CODES}
        self._jobs: queue.SimpleQueue[
            tuple[bytes, float, queue.SimpleQueue[bytes | None]] | None
        ] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        # Connections whose peers keep the daemon waiting, in the order of how long they have. A
        # dict, since a set has no order.
        self._awaited: dict[socket.socket, None] = {}
        self._stopping = threading.Event()

    def run(
        self,
        stop: socket.socket,
        ready: Callable[[], None] = lambda: None,
        changed: Callable[[], bool] | None = None,
    ) -> bool:
        """Serve until `stop` can be read or `changed` returns True. Return True in the second case.

        Before the return, the answer that is being computed is finished and sent, and the socket is
        removed. `changed` is called every `LOOK` seconds, and at each new connection.
        """
        worker = threading.Thread(target=self._work, daemon=True)
        if changed:
            patience = LOOK
        else:
            patience = None
        try:
            with self._listening() as listener:
                worker.start()
                ready()
                while True:
                    readable, _, _ = select.select([listener, stop], [], [], patience)
                    if stop in readable:
                        return False
                    if changed and changed():
                        return True
                    if listener in readable:
                        self._admit(listener)
        finally:
            self._stop(worker)

    @property
    def waiting(self) -> int:
        """Return the number of frames that wait for their turn."""
        return self._jobs.qsize()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[socket.socket]:
        path = Path(self._site.socket)
        site = self._site
        _remove_stale(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            # The socket has its mode from its first moment on.
            mask = os.umask(0o777 & ~int(site.socket_mode, 8))
            try:
                listener.bind(str(path))
            except OSError as error:
                raise BadInput(
                    f"the socket {path} cannot be made: {error.strerror or 'its path is too long'}"
                ) from None
            finally:
                os.umask(mask)
            mine = path.lstat().st_ino
            try:
                try:
                    # A link that was put in the socket's place must not be followed.
                    os.chown(path, -1, self._group, follow_symlinks=False)
                except OSError as error:
                    raise BadInput(
                        f"the socket {path} cannot be given to the group "
                        f"{site.socket_group!r}: {error.strerror}"
                    ) from None
                listener.listen(128)  # no process can connect before this
                listener.setblocking(False)
                yield listener
            finally:
                with contextlib.suppress(OSError):
                    if path.lstat().st_ino == mine:
                        path.unlink()

    def _admit(self, listener: socket.socket) -> None:
        try:
            line, _ = listener.accept()
        except OSError:  # gone already, or no descriptors left: those that are open time out
            time.sleep(0.01)
            return
        _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if self._users and user not in self._users:
            return self._turn_away(line, "peer")
        with self._guard:
            full = len(self._open) >= self._site.connections
            if full:
                slowest = next(iter(self._awaited), None)
            else:
                slowest = None
            if slowest is not None:
                self._forget(slowest)
                with contextlib.suppress(OSError):
                    slowest.shutdown(socket.SHUT_RDWR)
        if full and slowest is None:
            return self._turn_away(line, "busy")
        thread = threading.Thread(target=self._converse, args=(line,), daemon=True)
        with self._guard:
            self._open[line] = thread
            self._awaited[line] = None
        thread.start()

    def _turn_away(self, line: socket.socket, code: str) -> None:
        self._log.line(f"{code:<10}", at_once=True)
        with line, contextlib.suppress(OSError):
            line.settimeout(0)
            line.sendall(self._refusals[code])

    def _converse(self, line: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError), line:
                self._exchange(line)
        except Exception:  # in place of a traceback on standard error
            self._log.line("internal")
        finally:
            with self._guard:
                self._forget(line)

    def _exchange(self, line: socket.socket) -> None:
        while not self._stopping.is_set():
            size = int.from_bytes(self._receive(line, 4), "big")
            if size > self._limit:
                return self._turn_away(line, "size")
            frame = self._receive(line, size)
            reply = queue.SimpleQueue()
            with self._guard:
                if line not in self._open or self._stopping.is_set():
                    return
                del self._awaited[line]
                self._jobs.put((frame, time.monotonic(), reply))
            if (answer := reply.get()) is None:
                return
            with self._guard:
                self._awaited[line] = None
            line.settimeout(self._site.timeout)
            line.sendall(answer)

    def _receive(self, line: socket.socket, size: int) -> bytes:
        """Return exactly `size` bytes. Raise TimeoutError if they take longer than the timeout in
        all.

        Memory grows with the bytes that have arrived, not with the announced size.
        """
        received = bytearray()
        deadline = time.monotonic() + self._site.timeout
        while len(received) < size:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            line.settimeout(left)
            piece = line.recv(min(size - len(received), 2**20))
            if not piece:
                raise ConnectionResetError
            received += piece
        return bytes(received)

    def _forget(self, line: socket.socket) -> None:
        self._open.pop(line, None)
        self._awaited.pop(line, None)

    def _work(self) -> None:
        late = 0
        free = 0.0
        while (job := self._jobs.get()) is not None:
            frame, came, reply = job
            due = max(came, free) + self._after
            try:
                if self._stopping.is_set():
                    answer = self._refusals["stopping"]
                else:
                    answer = _framed(self._handle(frame))
            except Exception:  # not even memory for a refusal
                answer = self._refusals["internal"]
            if self._after:
                over = max(0, math.ceil((time.monotonic() - due) / self._after))
                due += over * self._after
                if self._stopping.wait(max(0.0, due - time.monotonic())):
                    answer = None
                free = due
                if over:
                    late += 1
                    self._log.line(f"late       {late} since the start")
            self._log.sent()
            reply.put(answer)

    def _stop(self, worker: threading.Thread) -> None:
        """Finish and send the answer that is being computed, then close every connection.

        Frames that wait get the code "stopping". Connections that send nothing more are closed.
        """
        with self._guard:
            self._stopping.set()
            threads = list(self._open.values())
            silent = list(self._awaited)
        for line in silent:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RD)
        self._jobs.put(None)
        deadline = time.monotonic() + self._site.timeout
        if worker.ident:
            worker.join()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _framed(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "big") + frame


def _remove_stale(path: Path) -> None:
    """Remove the socket of a daemon that was killed. Raise BadInput for anything else there."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise BadInput(
            f"{path} exists and is not a socket; move it away, or name another socket in "
            "the settings"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise BadInput(
                f"{path} exists and a connection to it fails ({error.strerror}); move it away, "
                "or name another socket in the settings"
            ) from None
    raise BadInput(
        f"another process listens at {path}; stop it, or name another socket in the settings"
    )
