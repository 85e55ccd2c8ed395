"""The frame of a page of `silodp ui`: where one is, where one can go, and the part that follows what happens."""

from __future__ import annotations

from collections.abc import Sequence

from silodp.pages.markup import Markup, document, tag

Tabs = Sequence[tuple[str, str]]
"""(name, path) of what the bar at the top leads to."""


def screen(title: str, tabs: Tabs, here: str, *content: object, live: bool = False) -> str:
    """A page; with `live` it has parts that follow what happens."""
    links = [tag("li", tag("a", name, href=path, aria_current="page" if path == here else None)) for name, path in tabs]
    bar = tag("header", tag("div", tag("b", "silodp"), tag("nav", tag("ul", *links), aria_label="Pages")), class_="bar")
    skip = tag("a", "To the content", href="#main", class_="skip")
    told = tag("p", "", id="told", class_="unseen", role="status") if live else ""
    foot = tag("footer", tag("p", "This page is served by this machine for this machine, and asks nothing of any other."))
    return document(f"{title} · silodp", skip, bar, told, tag("main", *content, id="main"), foot, script="/live.js" if live else None)


def alive(path: str, *content: object) -> Markup:
    """A part of a page that is replaced by what `path` gives whenever it changes; its `data-state`, if any, is read out then, and nothing else."""
    return tag("div", *content, data_from=path)
