"""What tests of the pages share: `silodp ui` as a server of this process, one silo with a real
gate, and commands in processes that can be killed.
"""

import contextlib
import http.client
import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gates import command
from silodp.cli import app as cli
from silodp.cli.checked import ledgers
from silodp.cli.pages import _bound, config

PATIENCE = 600.0  # to end a test that hangs; nothing waits so long when all is well
TOKEN = "a-token-that-nobody-guesses"

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(
    [
        "silodp.cli.app",
        "silodp.cli.silo",
        "silodp.silo.service.daemon",
        "silodp.server.run",
    ]
)


def started(*words: object, log: Path, **environment: str) -> multiprocessing.process.BaseProcess:
    process = forked.Process(
        target=command, args=([str(word) for word in words], environment, str(log))
    )
    process.start()
    return process


def run_command(line: str, *words: object) -> None:
    """`silodp ...` in this process, which must go well; words that may hold a blank come after the
    line.
    """
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:  # noqa: PT012
        patch.setattr(sys, "argv", ["silodp", *line.split(), *map(str, words)])
        cli.main()
    assert not stop.value.code


def until(true, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextlib.contextmanager
def served(
    root: Path | None,
    policy: Path | None = None,
    token: str | None = None,
    port: int = 0,
    password: str | None = None,
) -> Iterator[int]:
    """The port of a `silodp ui`."""
    import uvicorn

    from silodp.pages.app import application
    from silodp.silo.service.page import GatePage

    listener = _bound("127.0.0.1", port)
    port, tabs = listener.getsockname()[1], [("The gate", "/silo")] if policy else []
    routes = (
        GatePage(policy, token, [("Runs", "/"), *tabs] if root else tabs).routes() if policy else []
    )
    app = application(root, port=port, tabs=tabs, routes=routes, check=ledgers, password=password)
    server = uvicorn.Server(config(uvicorn, app))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    until(lambda: server.started, "the server did not start")
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        with contextlib.suppress(OSError):
            listener.close()


def ask(
    port: int,
    path: str,
    *,
    method: str = "GET",
    body: str = "",
    host: str | None = None,
    **headers: str,
) -> tuple[int, str, dict]:
    """(status, text, headers) of one request, made by hand."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        line.putrequest(method, path, skip_host=True)
        line.putheader("Host", host or f"127.0.0.1:{port}")
        for name, value in headers.items():
            line.putheader(name.replace("_", "-"), value)
        line.putheader("Content-Length", str(len(body)))
        line.endheaders(body.encode())
        reply = line.getresponse()
        return reply.status, reply.read().decode(), {k.lower(): v for k, v in reply.getheaders()}
    finally:
        line.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
