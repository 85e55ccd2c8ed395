"""Out through an HTTP proxy: bytes arrive as they are, the proxy is told the server's name, and a
proxy that says no carries nothing.
"""

import contextlib
import os
import socket
import threading

import pytest

from silodp.core.errors import BadInput
from silodp.wire.tunnel import tunnel

PATIENCE = 60.0


def served(handle):
    """HOST:PORT at which each connection is given to `handle`."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept():
        while True:
            line, _ = listener.accept()
            line.settimeout(PATIENCE)
            threading.Thread(target=handle, args=(line,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def echo(line):
    with line:
        while piece := line.recv(2**16):
            line.sendall(piece[::-1] if len(piece) < 100 else piece)


def proxy(asked, *, answer=b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n", to=""):
    def handle(line):
        with line, contextlib.suppress(OSError):
            said = b""
            while not said.endswith(b"\r\n\r\n"):
                said += line.recv(1)
            asked.append(said)
            line.sendall(answer)
            if b" 200 " not in answer:
                return
            host, _, port = to.rpartition(":")
            with socket.create_connection((host, int(port)), PATIENCE) as far:
                back = threading.Thread(target=copy, args=(far, line), daemon=True)
                back.start()
                copy(line, far)
                back.join(PATIENCE)

    return served(handle)


def copy(here, there):
    with contextlib.suppress(OSError):
        while piece := here.recv(2**16):
            there.sendall(piece)
        there.shutdown(socket.SHUT_WR)


def through(address, content):
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE) as line:
        line.settimeout(PATIENCE)
        with contextlib.suppress(OSError):
            line.sendall(content)
            line.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(OSError):
            while piece := line.recv(2**16):
                received += piece
        return received


def test_what_is_sent_arrives_by_the_proxy_under_the_servers_own_name():
    asked, server = [], served(echo)
    address = tunnel("fl.example.org:8002", proxy(asked, to=server))
    assert through(address, b"abc") == b"cba"
    large = os.urandom(3_000_000)
    assert len(through(address, large)) == len(large)
    assert (
        asked == [b"CONNECT fl.example.org:8002 HTTP/1.1\r\nHost: fl.example.org:8002\r\n\r\n"] * 2
    )


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 403 Forbidden\r\n\r\n",
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n",
    ],
)
def test_a_proxy_that_says_no_carries_nothing(answer, capfd):
    asked = []
    assert through(tunnel("fl.example.org:8002", proxy(asked, answer=answer)), b"abc") == b""
    assert asked


@pytest.mark.parametrize(
    "address", ["fl.example.org", "fl.example.org:80\r\nX: y", ":80", "a b:80", "http://p:80"]
)
def test_an_address_is_a_host_and_a_port(address):
    for target, by in ((address, "p:1"), ("s:1", address)):
        with pytest.raises(BadInput, match="must be HOST:PORT"):
            tunnel(target, by)
