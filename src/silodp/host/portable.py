"""Hide how systems differ about files, locks and the process of a daemon.

Daemons need Linux. Everything else uses this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from silodp.core.errors import BadInput

OWN = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Child processes do not get the file, and its bytes are read as they are."""
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
AT_ONCE = getattr(os, "O_NONBLOCK", 0)
FOLDER = getattr(os, "O_DIRECTORY", 0)
"""0 on Windows, where a folder cannot be opened."""
_FAR = 2**40
"""The byte that is locked on Windows, where no other process can read a locked byte. It is behind
the end of every file.
"""


def lock(file: int | IO[bytes] | IO[str], *, shared: bool = False, wait: bool = False) -> bool:
    """Return whether this process now has the file's lock. Closing the file ends the lock.

    Windows has no shared lock, so a shared lock is exclusive there.
    """
    if isinstance(file, int):
        handle = file
    else:
        handle = file.fileno()
    try:
        import fcntl
    except ImportError:
        return _windows(handle, wait)
    if shared:
        operation = fcntl.LOCK_SH
    else:
        operation = fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    try:
        fcntl.flock(handle, operation)
    except BlockingIOError:
        return False
    return True


def _windows(handle: int, wait: bool) -> bool:
    msvcrt = importlib.import_module("msvcrt")
    here = os.lseek(handle, 0, os.SEEK_CUR)
    try:
        while True:
            os.lseek(handle, _FAR, os.SEEK_SET)
            try:
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
                return True
            except OSError:
                if not wait:
                    return False
                time.sleep(0.02)
    finally:
        os.lseek(handle, here, os.SEEK_SET)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock the folder for one process at a time, and wait until it is free.

    The folder itself is locked, so that no file is added to it. On Windows a file in it is locked.
    """
    if FOLDER:
        handle = os.open(folder, os.O_RDONLY | FOLDER | OWN)
    else:
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | OWN)
    try:
        lock(handle, wait=True)
        yield
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make new, renamed and deleted names in the folder durable. Windows has no such call."""
    if FOLDER:
        handle = os.open(folder, os.O_RDONLY | FOLDER)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --- one daemon at a time -------------------------------------------------------------------------


@contextmanager
def sole(file: str, what: str = "ledger", *, patience: float = 2.0) -> Iterator[None]:
    """Lock the file for one daemon, whatever path names it. Raise BadInput if another has it.

    It waits for `patience` seconds, since `running` holds the lock for an instant.
    """
    handle = _opened(file, what)
    deadline = time.monotonic() + patience
    try:
        while not lock(handle):
            if time.monotonic() > deadline:
                raise BadInput(f"another daemon serves the {what} {file}; stop it first")
            time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def running(file: str, what: str = "ledger") -> bool:
    """Return whether a daemon serves this file now."""
    handle = _opened(file, what)
    try:
        return not lock(handle, shared=True)
    finally:
        os.close(handle)


def _opened(file: str, what: str) -> int:
    try:
        return os.open(file, os.O_RDONLY | OWN)
    except OSError:
        raise BadInput(
            f"there is no {what} at {file}; restore it (a new one is made by `init` only)"
        ) from None


# --- the process ----------------------------------------------------------------------------------


def leave_no_core() -> None:
    """Keep this process from leaving a core file, which would contain its memory.

    The limit alone does not stop cores that the system passes to a program.
    """
    if sys.platform == "win32":  # which leaves none
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE, on Linux


@contextlib.contextmanager
def signalled() -> Iterator[socket.socket]:
    """Yield a socket that can be read once SIGTERM or SIGINT has arrived."""
    readable, writable = socket.socketpair()
    writable.setblocking(False)
    with readable, writable:
        before = signal.set_wakeup_fd(writable.fileno(), warn_on_full_buffer=False)
        handlers = {
            kind: signal.signal(kind, lambda *_: None) for kind in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield readable
        finally:
            signal.set_wakeup_fd(before)
            for kind, handler in handlers.items():
                signal.signal(kind, handler)


@contextlib.contextmanager
def guarded() -> Iterator[socket.socket]:
    """Yield the socket of `signalled`, in a process that leaves no core.

    While the body runs, new files are for the process's own user alone.
    """
    leave_no_core()
    mask = os.umask(0o077)
    try:
        with signalled() as stop:
            yield stop
    finally:
        os.umask(mask)


def tell_systemd(words: str) -> None:
    """Send this state to systemd, if systemd started the process."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract socket, which has no file
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, contextlib.suppress(OSError):
        line.sendto(words.encode(), address)
