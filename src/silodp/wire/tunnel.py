"""A way out through an HTTP proxy. A port of this machine tunnels every connection (CONNECT) to the
server, and reads none of it.

The engine's own TLS goes through the tunnel. So the proxy sees the destination and the number of
bytes, and certificates are checked as without a proxy.
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
"""Most bytes of a proxy's answer."""


def tunnel(target: str, proxy: str) -> str:
    """Open a port of this machine that leads to `target` through `proxy`, and return HOST:PORT.

    The port is open for as long as the process lives. Raise BadInput unless both addresses are
    HOST:PORT.
    """
    for what, address in (("--proxy", proxy), ("the server's address", target)):
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,253}:[0-9]{1,5}", address):
            raise BadInput(f"{what} is {address!r}; it must be HOST:PORT")
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, target, proxy), daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _accept(listener: socket.socket, target: str, proxy: str) -> None:
    """Accept connections, each in a thread of its own."""
    while True:
        with contextlib.suppress(OSError):
            line, _ = listener.accept()
            threading.Thread(target=_carry, args=(line, target, proxy), daemon=True).start()


def _carry(line: socket.socket, target: str, proxy: str) -> None:
    """Connect to the target through the proxy, and copy both directions."""
    with line, contextlib.suppress(OSError):
        host, _, port = proxy.rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as far:
            far.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
            if not _opened(far):
                # Closing the line makes the engine try again.
                return
            for end in (line, far):
                end.settimeout(None)
            back = threading.Thread(target=_copy, args=(far, line), daemon=True)
            back.start()
            _copy(line, far)
            back.join()


def _opened(far: socket.socket) -> bool:
    """Return whether the proxy answered with status 200, and print its answer otherwise.

    The answer is read byte by byte, because the bytes after it belong to the server.
    """
    answer = b""
    while not answer.endswith(b"\r\n\r\n") and len(answer) < MOST:
        if not (piece := far.recv(1)):
            return False
        answer += piece
    if re.match(rb"HTTP/1\.[01] 2\d\d ", answer):
        return True
    status = answer.splitlines()[0][:80].decode("ascii", "replace")
    print("proxy:", visible(status), flush=True)
    return False


def _copy(here: socket.socket, there: socket.socket) -> None:
    """Copy bytes in one direction until the end, and pass the end on."""
    with contextlib.suppress(OSError):
        while piece := here.recv(2**16):
            there.sendall(piece)
    with contextlib.suppress(OSError):
        there.shutdown(socket.SHUT_WR)
