"""The frame of a page of `silodp ui`: the bar of links, the content, and the part that is updated
while a run trains.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse

from silodp.pages.markup import Markup, document, tag

Tabs = Sequence[tuple[str, str]]
"""(name, path) of the links in the bar at the top."""


def screen(title: str, tabs: Tabs, here: str, *content: object, live: bool = False) -> str:
    """Return a page. With `live` some of its parts are updated."""
    links = []
    for name, path in tabs:
        current = "page" if path == here else None
        links.append(tag("li", tag("a", name, href=path, aria_current=current)))
    bar = tag(
        "header",
        tag("div", tag("b", "silodp"), tag("nav", tag("ul", *links), aria_label="Pages")),
        class_="bar",
    )
    skip = tag("a", "To the content", href="#main", class_="skip")
    news = ""
    script = None
    if live:
        news = tag("p", "", id="news", class_="unseen", role="status")
        script = "/live.js"
    foot = tag(
        "footer",
        tag(
            "p",
            "This page comes from this machine and loads nothing from any other.",
        ),
    )
    return document(
        f"{title} · silodp",
        skip,
        bar,
        news,
        tag("main", *content, id="main"),
        foot,
        script=script,
    )


def alive(path: str, content: Markup) -> Markup:
    """Return a part of a page that is replaced whenever `path` sends a change.

    A screen reader reads only its `data-state` then, if it has one.
    """
    return tag("div", content, data_from=path, data_was=_mark(content))


async def follow(request: Request, made: Callable[[], Markup]) -> Response:
    """Send the part as it is now.

    A request for events, as the script makes, gets the part again at each change until the page is
    closed.
    """
    first = await run_in_threadpool(made)
    if "text/event-stream" not in request.headers.get("accept", ""):
        return HTMLResponse(first)

    async def events() -> AsyncIterator[str]:
        found = first
        last = ""
        while True:
            lines = "\n".join(f"data: {line}" for line in found.replace("\r", " ").split("\n"))
            if found != last:
                yield f"id: {_mark(found)}\n{lines}\n\n"
            else:
                yield ":\n\n"  # An empty comment keeps the connection open.
            last = found
            await asyncio.sleep(1)
            found = await run_in_threadpool(made)

    return StreamingResponse(events(), media_type="text/event-stream")


def _mark(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:16]
