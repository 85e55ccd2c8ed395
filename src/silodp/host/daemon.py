"""Run a daemon: check its files, then serve frames until a signal, and log it.

The gate and the shuffler each pass their own door.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from silodp.core.errors import BadInput
from silodp.host import metrics
from silodp.host.listener import Server
from silodp.host.log import Log
from silodp.host.ownership import entrust, exposed, group_of
from silodp.host.portable import tell_systemd
from silodp.host.tables import Site


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
