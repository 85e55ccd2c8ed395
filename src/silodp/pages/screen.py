"""The frame of a page of `silodp ui`: where one is, where one can go, and the part that follows
what happens.
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
"""(name, path) of what the bar at the top leads to."""


def screen(title: str, tabs: Tabs, here: str, *content: object, live: bool = False) -> str:
    """A page; with `live` it has parts that follow what happens."""
    links = [
        tag("li", tag("a", name, href=path, aria_current="page" if path == here else None))
        for name, path in tabs
    ]
    bar = tag(
        "header",
        tag("div", tag("b", "silodp"), tag("nav", tag("ul", *links), aria_label="Pages")),
        class_="bar",
    )
    skip = tag("a", "To the content", href="#main", class_="skip")
    if live:
        told = tag("p", "", id="told", class_="unseen", role="status")
    else:
        told = ""
    foot = tag(
        "footer",
        tag(
            "p",
            "This page is served by this machine for this machine, and asks nothing of any other.",
        ),
    )
    return document(
        f"{title} · silodp",
        skip,
        bar,
        told,
        tag("main", *content, id="main"),
        foot,
        script="/live.js" if live else None,
    )


def alive(path: str, content: Markup) -> Markup:
    """A part of a page that is replaced by what `path` sends whenever it changes; its `data-state`,
    if any, is read out then, and nothing else.
    """
    return tag("div", content, data_from=path, data_was=_mark(content))


async def follow(request: Request, made: Callable[[], Markup]) -> Response:
    """That part as it is now; to whoever asks for events, as the script does, it is sent again
    whenever it changes, until they look away.
    """
    first = await run_in_threadpool(made)
    if "text/event-stream" not in request.headers.get("accept", ""):
        return HTMLResponse(first)

    async def events() -> AsyncIterator[str]:
        found = first
        last = ""
        while True:
            lines = "\n".join(f"data: {line}" for line in found.replace("\r", " ").split("\n"))
            yield (
                f"id: {_mark(found)}\n{lines}\n\n" if found != last else ":\n\n"
            )  # a line that says nothing keeps the connection
            last = found
            await asyncio.sleep(1)
            found = await run_in_threadpool(made)

    return StreamingResponse(events(), media_type="text/event-stream")


def _mark(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:16]
