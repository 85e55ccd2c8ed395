"""The process that a daemon is: it leaves no core, stops at a signal, and tells systemd when it is
ready.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator


def leave_no_core() -> None:
    """A core file would hold what the process holds; where cores go to a program, the limit alone
    does not stop them.
    """
    if sys.platform == "win32":  # which leaves none
        return
    import resource

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
        handlers = {
            kind: signal.signal(kind, lambda *_: None) for kind in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield told
        finally:
            signal.set_wakeup_fd(before)
            for kind, handler in handlers.items():
                signal.signal(kind, handler)


@contextlib.contextmanager
def guarded() -> Iterator[socket.socket]:
    """`signalled`, in a process that leaves no core and makes files for its own user alone, as long
    as it serves.
    """
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
