"""Prepare a daemon's process: no core file, an end at a signal, and word to systemd."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator


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
