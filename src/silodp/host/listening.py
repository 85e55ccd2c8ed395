"""What every daemon here is made of: a Unix socket with frames one at a time, a lock, a log, signals. Bytes in, bytes out; it reads none.

On the socket a frame is preceded by its length, 4 bytes, big-endian. Whatever a courier does with its end, frames reach `handle` one at a
time and in turn, and all that goes back is its reply or one of `LINE_CODES`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import queue
import resource
import select
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Protocol

from silodp.core.errors import BadInput
from silodp.host.ownership import group_of, users_of
from silodp.host.tables import check_text, check_texts, check_whole

LINE_CODES: dict[str, str] = {
    "size": "The frame is longer than any that makes sense here, or than the settings' maximum_frame.",
    "peer": "The process at the other end runs as a user that the settings do not list.",
    "busy": "As many frames are waiting as the settings have connections; ask again.",
    "stopping": "The daemon is being stopped; ask again when it is back.",
    "internal": "The daemon could not answer, for a reason that has to do with no record.",
}
"""What the daemon itself may reply, before a frame has reached what it is for."""
KEPT_LOGS = 5


class Site(Protocol):
    """Where a daemon listens and keeps its log, and who may knock."""

    @property
    def log_bytes(self) -> int: ...
    @property
    def socket(self) -> str: ...
    @property
    def socket_mode(self) -> str: ...
    @property
    def socket_group(self) -> str: ...
    @property
    def couriers(self) -> tuple[str, ...]: ...
    @property
    def connections(self) -> int: ...
    @property
    def timeout(self) -> float: ...
    @property
    def maximum_frame(self) -> int: ...


def check_site(kind: str, site: Site) -> None:
    """Raises BadInput, which calls the settings' file `kind`, for a value that no daemon could listen by."""
    check_text(kind, "socket_group", site.socket_group, r"[^\0\n]{0,64}", 'the name or number of a group, or ""')
    wanted = 'octal with read and write for the owner and nothing for others, such as "0660"'
    check_text(kind, "socket_mode", site.socket_mode, r"06[0-7]0", wanted)
    check_texts(kind, "couriers", site.couriers)
    for name, least, most in (("log_bytes", 1000, 2**40), ("connections", 1, 1024), ("maximum_frame", 1000, 2**32 - 1)):
        check_whole(kind, name, getattr(site, name), least, most)


# --- one daemon for one file --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sole(file: str, what: str = "ledger", *, patience: float = 2.0) -> Iterator[None]:
    """Holds the file for one daemon, by whatever path it is named; waits a little, since `running` holds it for an instant."""
    handle, deadline = _opened(file, what), time.monotonic() + patience
    try:
        while not _locked(handle, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise BadInput(f"another daemon serves the {what} {file}; stop it first")
            time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def running(file: str, what: str = "ledger") -> bool:
    """Whether a daemon serves this file now."""
    handle = _opened(file, what)
    try:
        return not _locked(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def _opened(file: str, what: str) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        raise BadInput(f"there is no {what} at {file}; restore it (a new one is made by `init` only)") from None


def _locked(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- the log ------------------------------------------------------------------------------------------------------------------------


class Log:
    """One line for each event, with the time before it. No data, no addresses."""

    def __init__(self, path: str, most: int) -> None:
        try:
            self._handler = RotatingFileHandler(path, maxBytes=most, backupCount=KEPT_LOGS, encoding="utf-8")
        except OSError as error:
            raise BadInput(f"the log {path} cannot be written: {error.strerror}") from None
        self._handler.handleError = lambda record: None

    def line(self, words: str) -> None:
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._handler.handle(logging.makeLogRecord({"msg": f"{when} {words}"}))

    def close(self) -> None:
        self._handler.close()


def tally(path: str) -> dict[str, int]:
    """How often each word stands after the time in the log, as far as it has been kept."""
    counts: dict[str, int] = {}
    for file in (f"{path}.{i}" if i else path for i in range(KEPT_LOGS, -1, -1)):
        with contextlib.suppress(FileNotFoundError), open(file, encoding="utf-8", errors="replace") as lines:
            for words in map(str.split, lines):
                if len(words) > 1:
                    counts[words[1]] = counts.get(words[1], 0) + 1
    return counts


# --- the socket ---------------------------------------------------------------------------------------------------------------------


class Server:
    """Takes frames from a Unix socket to `handle`, one at a time in the order in which they were complete, and replies back.

    A connection has at most one frame in that queue. One that keeps the daemon waiting, for a frame or for room for a reply, is closed
    after `timeout` seconds, or at once if it has been the longest to do so when the connections are all in use.

    With `after`, each frame has a slot of so many seconds for itself, which begins when it has come and the slot of the one before it is
    over, and its reply is sent at the slot's end: at a time that follows from when frames came, and not from how long any of them took.
    Every frame has one, bad ones too, for even a refusal waits for the frame before it. A reply that was not ready then is late, is sent
    when it is, and is counted in the log. A daemon that stops does not wait: what is stored is given when it is asked for again.
    """

    def __init__(
        self,
        place: Site,
        handle: Callable[[bytes], bytes],
        *,
        refuse: Callable[[str], bytes],
        limit: int,
        log: Log,
        after: float = 0.0,
    ) -> None:
        self._place, self._handle, self._log, self._after = place, handle, log, after
        self._limit = min(limit, place.maximum_frame)
        self._users, self._group = users_of(place.couriers), group_of(place.socket_group)
        self._refusals = {code: _framed(refuse(code)) for code in LINE_CODES}
        self._jobs: queue.SimpleQueue[tuple[bytes, float, queue.SimpleQueue[bytes | None]] | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._awaited: dict[socket.socket, None] = {}  # those whose peers we wait for, the longest waited for first
        self._stopping = threading.Event()

    def run(self, stop: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
        """Serves until `stop` can be read; then the answer that is being computed is finished and sent, and the socket removed."""
        worker = threading.Thread(target=self._work, daemon=True)
        try:
            with self._listening() as listener:
                worker.start()
                ready()
                while stop not in select.select([listener, stop], [], [])[0]:
                    self._admit(listener)
        finally:
            self._stop(worker)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[socket.socket]:
        path, place = Path(self._place.socket), self._place
        _remove_stale(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            mask = os.umask(0o777 & ~int(place.socket_mode, 8))  # nobody can connect before it listens
            try:
                listener.bind(str(path))
            except OSError as error:
                raise BadInput(f"the socket {path} cannot be made: {error.strerror or 'its path is too long'}") from None
            finally:
                os.umask(mask)
            mine = path.lstat().st_ino
            try:
                try:
                    os.chown(path, -1, self._group, follow_symlinks=False)  # whatever may have been put in its place
                except OSError as error:
                    raise BadInput(f"the socket {path} cannot be given to the group {place.socket_group!r}: {error.strerror}") from None
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
            full = len(self._open) >= self._place.connections
            slowest = next(iter(self._awaited), None) if full else None
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
        self._log.line(f"{code:<10}")
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
            frame, reply = self._receive(line, size), queue.SimpleQueue()
            with self._guard:
                if line not in self._open or self._stopping.is_set():
                    return
                del self._awaited[line]
                self._jobs.put((frame, time.monotonic(), reply))
            if (answer := reply.get()) is None:
                return
            with self._guard:
                self._awaited[line] = None
            line.settimeout(self._place.timeout)
            line.sendall(answer)

    def _receive(self, line: socket.socket, size: int) -> bytes:
        """Exactly so many bytes, within the timeout from now on for all of them; memory grows with what has come, not with what was announced."""
        received, deadline = bytearray(), time.monotonic() + self._place.timeout
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
        late, free = 0, 0.0
        while (job := self._jobs.get()) is not None:
            frame, came, reply = job
            due = max(came, free) + self._after
            try:
                answer = self._refusals["stopping"] if self._stopping.is_set() else _framed(self._handle(frame))
            except Exception:  # not even memory for a refusal
                answer = self._refusals["internal"]
            if self._after and (left := due - time.monotonic()) > 0:
                free, answer = due, None if self._stopping.wait(left) else answer
            elif self._after:
                free, late = time.monotonic(), late + 1
                self._log.line(f"late       {late} since the start")
            reply.put(answer)

    def _stop(self, worker: threading.Thread) -> None:
        """What is computed is finished and sent; what waits is told to come back; whoever sends nothing more is hung up on."""
        with self._guard:
            self._stopping.set()
            threads, silent = list(self._open.values()), list(self._awaited)
        for line in silent:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RD)
        self._jobs.put(None)
        deadline = time.monotonic() + self._place.timeout
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
        raise BadInput(f"{path} exists and is not a socket; move it away, or name another socket in the settings")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise BadInput(f"{path} exists and cannot be tried: {error.strerror}") from None
    raise BadInput(f"another process listens at {path}; stop it, or name another socket in the settings")


# --- the process ------------------------------------------------------------------------------------------------------------------


def leave_no_core() -> None:
    """A core file would hold what the process holds; where cores go to a program, the limit alone does not stop them."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE, on Linux


@contextlib.contextmanager
def signalled() -> Iterator[socket.socket]:
    """A socket that can be read once SIGTERM or SIGINT has come."""
    told, tell = socket.socketpair()
    tell.setblocking(False)
    with told, tell:
        before = signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
        handlers = {kind: signal.signal(kind, lambda *_: None) for kind in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield told
        finally:
            signal.set_wakeup_fd(before)
            for kind, handler in handlers.items():
                signal.signal(kind, handler)


@contextlib.contextmanager
def guarded() -> Iterator[socket.socket]:
    """`signalled`, in a process that leaves no core and makes files for its own user alone, as long as it serves."""
    leave_no_core()
    mask = os.umask(0o077)
    try:
        with signalled() as stop:
            yield stop
    finally:
        os.umask(mask)


def tell_systemd(words: str) -> None:
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, contextlib.suppress(OSError):
            line.sendto(words.encode(), "\0" + address[1:] if address[0] == "@" else address)
