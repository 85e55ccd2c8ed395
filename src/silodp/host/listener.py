"""A daemon's Unix socket: frames of bytes come in, one at a time, and frames of bytes go out. It
reads none of them.

On the socket a frame is preceded by its length, 4 bytes, big-endian. Whatever a courier does with
its end, frames reach `handle` one at a time and in turn, and all that goes back is its reply or one
of `LINE_CODES`.
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
from silodp.host.site import Site

LOOK = 0.5
"""Seconds between two looks at whether the daemon should begin anew."""
LINE_CODES: dict[str, str] = {
    "size": (
        "The frame is longer than any that makes sense here, or than the settings' maximum_frame."
    ),
    "peer": "The process at the other end runs as a user that the settings do not list.",
    "busy": "As many frames are waiting as the settings have connections; ask again.",
    "stopping": "The daemon is being stopped; ask again when it is back.",
    "internal": "The daemon could not answer, for a reason that has to do with no record.",
}
"""What the daemon itself may reply, before a frame has reached what it is for."""


class Server:
    """Takes frames from a Unix socket to `handle`, one at a time in the order in which they were
    complete, and replies back.

    A connection has at most one frame in that queue. One that keeps the daemon waiting, for a frame
    or for room for a reply, is closed after `timeout` seconds, or at once if it has been the
    longest to do so when the connections are all in use.

    With `after`, each frame has a slot of so many seconds for itself, which begins when it has come
    and the slot of the one before it is over, and its reply is sent at the slot's end: at a time
    that follows from when frames came, and not from how long any of them took. Every frame has one,
    bad ones too, for even a refusal waits for the frame before it. A reply that was not ready then
    is late. It gets as many slots as it needs, is sent at the end of the last of them, and is
    counted in the log. A daemon that stops does not wait: what
    is stored is given when it is asked for again.
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
        self._awaited: dict[
            socket.socket, None
        ] = {}  # those whose peers we wait for, the longest waited for first
        self._stopping = threading.Event()

    def run(
        self,
        stop: socket.socket,
        ready: Callable[[], None] = lambda: None,
        changed: Callable[[], bool] | None = None,
    ) -> bool:
        """Serves until `stop` can be read; then the answer that is being computed is finished and
        sent, and the socket removed.

        Likewise, and True, when `changed` is found: it is looked at every `LOOK` seconds, and at
        each new connection.
        """
        worker = threading.Thread(target=self._work, daemon=True)
        try:
            with self._listening() as listener:
                worker.start()
                ready()
                while stop not in (
                    found := select.select([listener, stop], [], [], LOOK if changed else None)[0]
                ):
                    if changed and changed():
                        return True
                    if listener in found:
                        self._admit(listener)
                return False
        finally:
            self._stop(worker)

    @property
    def waiting(self) -> int:
        """Frames that wait for their turn."""
        return self._jobs.qsize()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[socket.socket]:
        path = Path(self._site.socket)
        site = self._site
        _remove_stale(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            mask = os.umask(
                0o777 & ~int(site.socket_mode, 8)
            )  # nobody can connect before it listens
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
                    os.chown(
                        path, -1, self._group, follow_symlinks=False
                    )  # whatever may have been put in its place
                except OSError as error:
                    raise BadInput(
                        f"the socket {path} cannot be given to the group "
                        f"{site.socket_group!r}: {error.strerror}"
                    ) from None
                listener.listen(128)  # only now can anybody connect
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
            self._open[line], self._awaited[line] = thread, None
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
        """Exactly so many bytes, within the timeout from now on for all of them; memory grows with
        what has come, not with what was announced.
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
        """What is computed is finished and sent; what waits is told to come back; whoever sends
        nothing more is hung up on.
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
    """Removes the socket of a daemon that was killed; refuses to remove anything else."""
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
            raise BadInput(f"{path} exists and cannot be tried: {error.strerror}") from None
    raise BadInput(
        f"another process listens at {path}; stop it, or name another socket in the settings"
    )
