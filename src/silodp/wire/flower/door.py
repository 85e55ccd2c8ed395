"""Other machines reach SuperLink's Fleet API alone; and a SuperLink of which that does not hold is
not left running.

SuperLink has no setting for it, so a private hook of Flower's is replaced. A Flower that stopped
calling the hook would let everybody in without a word. So a forbidden path is asked for, as another
machine would: of the app that Flower's own code makes, before a port is open, and of the SuperLink
that listens, over TLS, from an address that is not the server's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import ssl
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from silodp.core.errors import BadInput

FORBIDDEN, REFUSED = "/v1/control/list-nodes", 403
HERE, ELSEWHERE = (
    "127.0.0.1",
    "127.0.0.2",
)  # a machine has the whole of 127.0.0.0/8, and FleetOnly takes only the first for its own
OPEN = (
    "SuperLink lets other machines reach its control interface: this Flower does not call the "
    "filter; install flwr==1.41.0"
)
PATIENCE = 60.0


class FleetOnly:
    """Lets other machines speak to the Fleet API alone, where nodes sign: SuperLink's other APIs
    share its port, and Control asks for no credential at all, so whoever reached it could start
    runs and register nodes."""

    def __init__(self, app: Callable) -> None:
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        if (
            scope["type"] == "http"
            and scope["client"][0] not in (HERE, "::1")
            and not scope["path"].startswith("/v1/fleet/")
        ):
            await send({"type": "http.response.start", "status": REFUSED, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        elif scope["type"] != "websocket":
            await self.app(scope, receive, send)


def close_to_others() -> None:
    """Raises BadInput unless an app that Flower makes from here on refuses another machine."""
    import httpx
    from flwr.superlink import extensions, main
    from starlette.middleware import Middleware

    extensions.get_middleware = lambda: (Middleware(FleetOnly),)

    async def status() -> int:
        elsewhere = httpx.ASGITransport(
            main.create_app(), raise_app_exceptions=False, client=("192.0.2.1", 1)
        )
        async with httpx.AsyncClient(transport=elsewhere, base_url="https://superlink") as asker:
            return (await asker.post(FORBIDDEN)).status_code

    if asyncio.run(status()) != REFUSED:
        raise BadInput(OPEN)


def watch(host: str, port: int, ca: Path) -> None:
    """Ends this process, with code 2, unless the SuperLink that begins to listen in it refuses
    another machine, and says so in time.
    """

    def look() -> None:
        deadline, found = time.monotonic() + PATIENCE, 0
        while not found and time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):
                found = _status(host, port, ca)
            time.sleep(0 if found else 0.1)
        if found != REFUSED:
            print(
                OPEN
                if found
                else f"it could not be seen that SuperLink at {host}:{port} refuses other machines",
                file=sys.stderr,
                flush=True,
            )
            os._exit(2)

    threading.Thread(target=look, daemon=True).start()


def _status(host: str, port: int, ca: Path) -> int:
    trust = ssl.create_default_context(cafile=str(ca))
    trust.check_hostname = False  # the certificate's name is not the matter here
    own = host in ("0.0.0.0", "localhost", HERE)
    line = http.client.HTTPSConnection(
        HERE if own else host,
        port,
        timeout=PATIENCE,
        source_address=(ELSEWHERE, 0) if own else None,
        context=trust,
    )
    with contextlib.closing(line):
        line.request("POST", FORBIDDEN, b"")
        return line.getresponse().status
