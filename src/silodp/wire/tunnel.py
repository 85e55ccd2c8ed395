"""A way out through an HTTP proxy: a port of this machine whose every connection is tunnelled
(CONNECT) to the server. It reads none of it.

What goes through is the engine's own TLS, so that the proxy sees where it goes and how much, and
certificates are checked as without it.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading

from silodp.core.errors import BadInput
from silodp.core.text import visible

PATIENCE = 30.0
"""Seconds in which proxy and server must have answered."""
MOST = 2**14
"""Bytes of a proxy's answer."""


def tunnel(target: str, proxy: str) -> str:
    """HOST:PORT on this machine that leads to `target` through `proxy`, for as long as the process
    lives.
    """
    for what, address in (("--proxy", proxy), ("the server's address", target)):
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,253}:[0-9]{1,5}", address):
            raise BadInput(f"{what} is {address!r}; it must be HOST:PORT")
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, target, proxy), daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _accept(listener: socket.socket, target: str, proxy: str) -> None:
    while True:
        with contextlib.suppress(OSError):
            line, _ = listener.accept()
            threading.Thread(target=_carry, args=(line, target, proxy), daemon=True).start()


def _carry(line: socket.socket, target: str, proxy: str) -> None:
    with line, contextlib.suppress(OSError):
        host, _, port = proxy.rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as far:
            far.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
            if not _opened(far):
                return  # hung up on: the engine tries again
            for end in (line, far):
                end.settimeout(None)
            back = threading.Thread(target=_copy, args=(far, line), daemon=True)
            back.start()
            _copy(line, far)
            back.join()


def _opened(far: socket.socket) -> bool:
    """Whether the proxy said 200. Its answer is read byte by byte: what follows is the server's."""
    said = b""
    while not said.endswith(b"\r\n\r\n") and len(said) < MOST:
        if not (piece := far.recv(1)):
            return False
        said += piece
    if not (fine := bool(re.match(rb"HTTP/1\.[01] 2\d\d ", said))):
        print("proxy:", visible(said.splitlines()[0][:80].decode("ascii", "replace")), flush=True)
    return fine


def _copy(here: socket.socket, there: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := here.recv(2**16):
            there.sendall(piece)
    with contextlib.suppress(OSError):
        there.shutdown(socket.SHUT_WR)
