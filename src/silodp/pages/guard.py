"""The guard before every page of `silodp ui`. Only this machine's own browser gets in, and a page
loads nothing from elsewhere.

A site that the user visits may make the browser send requests here. Such a site cannot read a
reply: the guard refuses a Host header with another name, so pointing a name at this machine does
not help. It cannot post a form: the Origin header must be this page's own. Another account of this
machine can connect too. So the pages of a gate ask for a password, which the browser stores for
this address and port only.
"""

from __future__ import annotations

import base64
import binascii
import hmac

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from silodp.pages.markup import hashed
from silodp.pages.style import STYLE

POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {hashed(STYLE)}",
        "script-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"x-frame-options": b"DENY",
    b"cache-control": b"no-store",
    b"permissions-policy": b"camera=(), microphone=(), geolocation=()",
}


ASK = b"www-authenticate", b'Basic realm="silodp ui", charset="UTF-8"'


class Guard:
    """Pass on requests to this machine under its own name. A request that changes anything must
    come from its own pages.
    """

    def __init__(self, app: ASGIApp, *, port: int, password: str | None = None) -> None:
        """Guard the app on this port. With a password every page asks for it."""
        self._app = app
        self._password = password
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(k, v) for k, v in message["headers"] if k.lower() not in HEADERS]
                if message["status"] == 401:
                    headers.append(ASK)
                message = {**message, "headers": [*headers, *HEADERS.items()]}
            await send(message)

        app = self._app
        if refusal := self._refusal(scope):
            app = PlainTextResponse(*refusal)
        await app(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> tuple[str, int] | None:
        given = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        headers = dict(given)
        if [name for name, _ in given].count(b"host") != 1 or headers[b"host"] not in self._hosts:
            return (
                "This page answers only to this machine's own name: use 127.0.0.1 or localhost.\n",
                421,
            )
        if self._password is not None and not _has_password(
            headers.get(b"authorization"), self._password
        ):
            return "This page needs the password that `silodp ui` printed at its start.\n", 401
        if scope["method"] in ("GET", "HEAD"):
            return None
        origin = headers.get(b"origin")
        site = headers.get(b"sec-fetch-site", "same-origin")
        if origin != f"http://{headers[b'host']}" or site != "same-origin":
            return "Only this page's own form may send this request.\n", 403
        return None


def _has_password(given: str | None, password: str) -> bool:
    """Return whether the header Authorization has the password.

    The comparison takes the same time for every wrong password.
    """
    scheme, _, encoded = (given or "").partition(" ")
    try:
        plain = base64.b64decode(encoded, validate=True)
    except (ValueError, binascii.Error):
        return False
    found = plain.partition(b":")[2]
    return hmac.compare_digest(found, password.encode()) and scheme.lower() == "basic"
