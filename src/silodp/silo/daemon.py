"""The gate daemon, `silodp silo serve`: the process around a door. It loads what the silo owns, listens on a Unix socket and keeps a log.

On the socket a frame is preceded by its length, 4 bytes, big-endian. Whatever a courier does with its end, frames reach the door one at
a time and in turn, and all that goes back is the door's reply or one of `LINE_CODES`. Nothing that is printed or logged holds a record.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import hashlib
import logging
import os
import pwd
import queue
import re
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

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from silodp.core.codec import Refusal, encode_reply
from silodp.core.errors import BadInput
from silodp.core.losses import Loss, cross_entropy, squared_error
from silodp.core.models import model_by_name
from silodp.core.problem import Problem
from silodp.core.prox import by_name
from silodp.silo.door import Door, Note
from silodp.silo.durable import DurableLedger
from silodp.silo.files import load_silos
from silodp.silo.pause import paused
from silodp.silo.policy import Place, Policy
from silodp.silo.records import Records

LINE_CODES: dict[str, str] = {
    "size": "The frame is longer than any query about this model, or than the policy's maximum_frame.",
    "peer": "The process at the other end runs as a user that the policy does not list.",
    "busy": "As many queries are waiting as the policy has connections; ask again.",
    "stopping": "The gate is being stopped; ask again when it is back.",
    "internal": "The gate could not answer, for a reason that has to do with no record.",
}
"""What the daemon itself may reply, before a frame has reached the door."""
KEPT_LOGS = 5


# --- what the silo owns -------------------------------------------------------------------------------------------------------------


def read_records(place: Place) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """(x (n, features), y, names of the features). What is wrong is said without a word of the file's content but a column's name."""
    try:
        loaded = load_silos([Path(place.data)], place.label, classes=place.classes)
    except BadInput as error:
        raise BadInput(_without_values(str(error), place)) from None
    except Exception:
        raise BadInput(f"the data file {place.data} cannot be read; it must be a whole CSV, Parquet or NPZ file") from None
    x, y = loaded.records_raw[0]
    if loaded.features and all(_number(name) for name in loaded.features) and Path(place.data).suffix != ".npz":
        raise BadInput(f"{place.data} seems to have no header, for its columns are named by numbers; give each column a name")
    return x.reshape(len(x), -1), y, loaded.features


def _number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _without_values(sentence: str, place: Place) -> str:
    """These sentences quote cells, and cells of a file without a header look like columns; daemons' sentences end up in journals."""
    if cell := re.search(r", column (.+), (row \d+) \(counted", sentence):
        return f"{place.data}, column {cell[1]}, {cell[2]} (counted from 1, without the header): the value is missing or is not what it must be"
    if row := re.search(r", (row \d+) \(counted", sentence):
        return f"{place.data}, {row[1]} (counted from 1, without the header): it has another number of cells than the header"
    quoting = re.compile(r"among its columns|column only|more than one column|line break within|array '|has the label column")
    if quoting.search(sentence):
        return f"{place.data} needs a header of different names, the label column {place.label!r} and at least one feature among them"
    return sentence.rstrip(".")


def approved_problem(place: Place, features: int) -> Problem:
    """The problem in the silo's own words. Whether the policy approves it is for the door to say."""
    model, loss = _model_in_file(place, features) if place.model_file else model_by_name(place.model, features, len(place.classes))
    return Problem(model, loss, by_name(place.prox))


def file_hash(path: str) -> str:
    """SHA-256 of a model's file: the definition's hash covers shapes and constants, but not what `forward` does."""
    return hashlib.sha256(_bytes(path)).hexdigest()


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None


def _model_in_file(place: Place, features: int) -> tuple[nn.Module, Loss]:
    path, _, function = place.model.rpartition(":")
    source = _bytes(path)
    if (found := hashlib.sha256(source).hexdigest()) != place.model_sha256:
        raise BadInput(f"the policy approves a model file with SHA-256 {place.model_sha256 or '(none)'}, but that of {path} is {found}")
    names: dict = {"__name__": "silodp_approved_model", "__file__": path}
    try:
        exec(compile(source, path, "exec"), names)  # the very bytes that were hashed
        model = names[function](features, max(len(place.classes), 1))
    except Exception as error:
        raise BadInput(f"{path}: {function}(features, outputs) made no model ({type(error).__name__})") from None
    if not isinstance(model, nn.Module):
        raise BadInput(f"{function} in {path} returned {type(model).__name__}; it should return a torch.nn.Module")
    return model, cross_entropy if place.classes else squared_error


def read_key(path: str) -> Ed25519PrivateKey:
    """The silo's signing key, 64 hexadecimal digits in a file."""
    try:
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(_bytes(path).decode("ascii").strip()))
    except ValueError:
        raise BadInput(f"the key file {path} must hold 64 hexadecimal digits; restore it") from None


def exposed(path: str, place: Place, *, writable: bool = False) -> str | None:
    """A sentence if the file may be read (or only: written) by everybody, or by the group that may open the socket."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    bits, mode = (0o2 if writable else 0o7), stat.S_IMODE(found.st_mode)
    if mode & bits or (found.st_gid == _group(place) and mode & bits << 3):
        verb, better = ("write", "go-w") if writable else ("open", "go-rwx")
        return f"{path} has mode {mode:04o}, so that the courier's user could {verb} it; use chmod {better}, or another group"
    return None


def _group(place: Place) -> int:
    name = place.socket_group
    try:
        return int(name) if name.isdigit() else grp.getgrnam(name).gr_gid if name else os.getegid()
    except KeyError:
        raise BadInput(f"policy: socket_group is {name!r}; it must be a group of this machine, or its number") from None


def _users(place: Place) -> set[int]:
    try:
        return {int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid for name in place.couriers}
    except KeyError:
        raise BadInput(f"policy: couriers is {list(place.couriers)}; each must be a user of this machine, or a number") from None


# --- one daemon for one ledger ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sole(ledger: str, *, patience: float = 2.0) -> Iterator[None]:
    """Holds the ledger's file for one daemon, by whatever path it is named; waits a little, since `running` holds it for an instant."""
    file, deadline = _opened(ledger), time.monotonic() + patience
    try:
        while not _locked(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise BadInput(f"another gate daemon serves the ledger {ledger}; stop it first")
            time.sleep(0.02)
        yield
    finally:
        os.close(file)


def running(ledger: str) -> bool:
    """Whether a daemon serves this ledger now."""
    file = _opened(ledger)
    try:
        return not _locked(file, fcntl.LOCK_SH)
    finally:
        os.close(file)


def _opened(ledger: str) -> int:
    try:
        return os.open(ledger, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        raise BadInput(f"there is no ledger at {ledger}; restore it (a new one is made by `silodp silo init` only)") from None


def _locked(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- the log ------------------------------------------------------------------------------------------------------------------------


class Log:
    """One line for each frame: when, what became of it, which statistic, which query, its price and what is left. No data, no addresses."""

    def __init__(self, path: str, most: int) -> None:
        try:
            self._handler = RotatingFileHandler(path, maxBytes=most, backupCount=KEPT_LOGS, encoding="utf-8")
        except OSError as error:
            raise BadInput(f"the log {path} cannot be written: {error.strerror}") from None
        self._handler.handleError = lambda record: None
        self._ledger: DurableLedger | None = None
        self._used = 0.0

    def follow(self, ledger: DurableLedger) -> None:
        """From now on prices are told: what the ledger has used up more than when it was last asked."""
        self._ledger, self._used = ledger, ledger.used()

    def note(self, note: Note) -> None:
        before = self._used
        if self._ledger is not None and note.code == "answered":
            with contextlib.suppress(BadInput):
                self._used = self._ledger.used()
        price = f"price {self._used - before:.4%} " if note.code == "answered" else ""
        self.line(f"{note.code:<10} {note.statistic:<10} {_short(note.query_id):<24} {price}left {1 - self._used:.4%}")

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


def _short(query_id: str) -> str:
    return query_id if len(query_id) <= 24 else f"{query_id[:11]}..{query_id[-11:]}"


# --- the socket ---------------------------------------------------------------------------------------------------------------------


class Server:
    """Takes frames from a Unix socket to `handle`, one at a time in the order in which they were complete, and replies back.

    A connection has at most one frame in that queue. One that keeps the daemon waiting, for a frame or for room for a reply, is closed
    after `timeout` seconds, or at once if it has been the longest to do so when the connections are all in use.
    """

    def __init__(self, place: Place, handle: Callable[[bytes], bytes], *, key: Ed25519PrivateKey | None, limit: int, log: Log) -> None:
        self._place, self._handle, self._log = place, handle, log
        self._limit = min(limit, place.maximum_frame)
        self._users, self._group = _users(place), _group(place)
        self._refusals = {code: _framed(encode_reply(Refusal(code), key)) for code in LINE_CODES}
        self._jobs: queue.SimpleQueue[tuple[bytes, queue.SimpleQueue[bytes]] | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._awaited: dict[socket.socket, None] = {}  # those whose peers we wait for, the longest waited for first
        self._stopping = False

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
        while not self._stopping:
            size = int.from_bytes(self._receive(line, 4), "big")
            if size > self._limit:
                return self._turn_away(line, "size")
            frame, reply = self._receive(line, size), queue.SimpleQueue()
            with self._guard:
                if line not in self._open or self._stopping:
                    return
                del self._awaited[line]
                self._jobs.put((frame, reply))
            answer = reply.get()
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
        while (job := self._jobs.get()) is not None:
            frame, reply = job
            try:
                answer = self._refusals["stopping"] if self._stopping else _framed(self._handle(frame))
            except Exception:  # not even memory for a refusal
                answer = self._refusals["internal"]
            reply.put(answer)

    def _stop(self, worker: threading.Thread) -> None:
        """What is computed is finished and sent; what waits is told to come back; whoever sends nothing more is hung up on."""
        with self._guard:
            self._stopping = True
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
        raise BadInput(f"{path} exists and is not a socket; move it away, or name another socket in the policy")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise BadInput(f"{path} exists and cannot be tried: {error.strerror}") from None
    raise BadInput(f"another process listens at {path}; stop it, or name another socket in the policy")


# --- all together -------------------------------------------------------------------------------------------------------------------


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


def serve(path: str | Path, stop: socket.socket, ready: Callable[[Policy, Place], None]) -> None:
    """`silodp silo serve`: returns once `stop` can be read; BadInput, without a record in it, if anything is not as the policy says."""
    policy, place = Policy.load(path), Place.load(path)
    for file, writable in ((path, True), (place.model_file, True), (place.data, False), (place.key, False), (place.ledger, False)):
        if file and (sentence := exposed(str(file), place, writable=writable)):
            raise BadInput(sentence)
    with sole(place.ledger), contextlib.closing(Log(place.log, place.log_bytes)) as log:
        x, y, _ = read_records(place)
        problem, key, ledger = approved_problem(place, x.shape[1]), read_key(place.key), DurableLedger.open(Path(place.ledger))
        door = Door(policy, problem, Records.of([(x, y)]), ledger, signing_key=key, noted=log.note)
        log.follow(ledger)

        def handle(frame: bytes) -> bytes:
            (door.pause if paused(path) else door.resume)()
            return door.handle(frame)

        server = Server(place, handle, key=key, limit=door.limit, log=log)

        def listening() -> None:
            log.line(
                f"started    {policy.silo}, {ledger.records} records, entry {ledger.head()[0]} of the ledger, left {1 - ledger.used():.4%}"
            )
            _tell_systemd("READY=1")
            ready(policy, place)

        server.run(stop, listening)
        log.line("stopped")


def _tell_systemd(words: str) -> None:
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, contextlib.suppress(OSError):
            line.sendto(words.encode(), "\0" + address[1:] if address[0] == "@" else address)
