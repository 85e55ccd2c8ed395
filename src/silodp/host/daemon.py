"""Run a daemon: prepare its process, check its files, then serve frames until a signal.

Its process leaves no core file, ends at a signal and reports its state to systemd. The gate and the
shuffler each pass their own door.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from silodp.core.errors import BadInput
from silodp.host import metrics
from silodp.host.listener import Server, Site
from silodp.host.log import Log
from silodp.host.ownership import entrust, exposed, group_of


def check_files(
    site: Site, *, used: Iterable[str | Path | None] = (), secret: Iterable[str | None]
) -> None:
    """Raise BadInput if another user could change a file of the daemon.

    Also raise it if the courier could open a secret file. None and "" are no files.
    """
    secret = [file for file in secret if file]
    entrust((*used, *secret, site.log, site.socket))
    for file in secret:
        if sentence := exposed(file, group_of(site.socket_group)):
            raise BadInput(sentence)


def serve(
    server: Server,
    log: Log,
    stop: socket.socket,
    *,
    role: str,
    started: str,
    ready: Callable[[], None],
    look: Callable[[], None] = lambda: None,
    changed: Callable[[], bool] | None = None,
) -> bool:
    """Serve until `stop` can be read or `changed` returns True. Return True in the second case.

    Log the start and the end, and report them to systemd and to monitoring. Call `ready` once the
    daemon listens. `look` sets the daemon's own states of `metrics.METRICS`.
    """

    def listening() -> None:
        log.line(f"started    {started}", at_once=True)
        tell_systemd("READY=1")
        ready()

    def states() -> None:
        metrics.gauge("silodp_queue", server.waiting)
        look()

    with metrics.reporting(role, states):
        again = server.run(stop, listening, changed)
    log.line("stopped", at_once=True)
    return again


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
