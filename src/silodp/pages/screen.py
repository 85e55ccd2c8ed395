"""The frame of a page of `silodp ui`: where one is, where one can go, and the part that follows what happens."""

from __future__ import annotations

from collections.abc import Sequence

from silodp.pages.markup import Markup, document, join, tag

Tabs = Sequence[tuple[str, str]]
"""(name, path) of what the bar at the top leads to."""


def screen(title: str, tabs: Tabs, here: str, *content: object, live: str | None = None) -> str:
    """A page; with `live`, a path, the content that `alive` marks is replaced by what that path gives whenever it changes."""
    links = [tag("li", tag("a", name, href=path, aria_current="page" if path == here else None)) for name, path in tabs]
    bar = tag("header", tag("div", tag("b", "silodp"), tag("nav", tag("ul", *links), aria_label="Pages")), class_="bar")
    skip = tag("a", "To the content", href="#main", class_="skip")
    foot = tag("footer", tag("p", "This page is served by this machine for this machine, and asks nothing of any other."))
    return document(f"{title} · silodp", skip, bar, tag("main", *content, id="main"), foot, script="/live.js" if live else None)


def alive(path: str, *content: object) -> Markup:
    """The part of a page that follows; one line of it is read out when the state changes, and nothing else."""
    return join([tag("p", "", id="told", class_="unseen", role="status"), tag("div", *content, id="live", data_from=path)])
