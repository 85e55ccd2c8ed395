"""What stands before every page of `silodp ui`: only this machine's own browser gets in, and a page
can load nothing from elsewhere.

A site that the user visits may make the browser send requests here. It can neither read a reply
(another name than this machine's in the Host header is turned away, so a name that was pointed here
does not help) nor post a form (the Origin header must be this page's own).
"""

from __future__ import annotations

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


class Guard:
    """Passes on what was asked of this machine under its own name, and from its own pages if it
    changes anything.
    """

    def __init__(self, app: ASGIApp, *, port: int) -> None:
        self._app, self._hosts = (
            app,
            {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(k, v) for k, v in message["headers"] if k.lower() not in HEADERS]
                message = {**message, "headers": [*kept, *HEADERS.items()]}
            await send(message)

        refusal = self._refusal(scope)
        await (PlainTextResponse(*refusal) if refusal else self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> tuple[str, int] | None:
        given = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        headers = dict(given)
        if [name for name, _ in given].count(b"host") != 1 or headers[b"host"] not in self._hosts:
            return (
                "This page answers to this machine's own name only: use 127.0.0.1 or localhost.\n",
                421,
            )
        if scope["method"] in ("GET", "HEAD"):
            return None
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site", "same-origin")
        if origin != f"http://{headers[b'host']}" or site != "same-origin":
            return "Only this page's own form may do that.\n", 403
        return None
