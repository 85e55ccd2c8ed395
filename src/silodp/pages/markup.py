"""HTML from plain functions. Text is escaped where it enters. Finished HTML is `Markup`, and
nothing else passes unescaped.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape

from silodp.core.text import visible_lines
from silodp.pages.style import STYLE

SHORT = 40
"""The largest number of rows with which a table becomes a list on a narrow screen."""
OPTION = re.compile(r"--[a-z][a-z-]{0,20}")
"""A command's option, which a line must not end inside."""


class Markup(str):
    """HTML that this module made."""

    __slots__ = ()


def text(value: object) -> Markup:
    if isinstance(value, Markup):
        return value
    return Markup(_escaped(value))


def _escaped(value: object) -> str:
    """Return the value for HTML, with control characters and lone surrogates as escapes.

    Such characters could reorder or hide text in a browser too.
    """
    return escape(visible_lines(str(value)))


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """Return an element.

    An attribute's underscores become hyphens, and a trailing underscore is dropped. An attribute
    that is None or False is left out.
    """
    words = [name]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(key)
        elif value is not None and value is not False:
            words.append(f'{key}="{_escaped(value)}"')
    if name in ("meta", "input", "br", "link"):
        return Markup(f"<{' '.join(words)}>")
    body = "".join(text(c) for c in content)
    return Markup(f"<{' '.join(words)}>{body}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Markup:
    return Markup(between.join(text(part) for part in parts))


def folded(name: str, summary: str, *content: object) -> Markup:
    return tag(
        "details", tag("summary", summary, id=f"{name}-summary"), *content, id=f"{name}-details"
    )


def table(
    caption: object,
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numbers: Sequence[int] = (),
    hide: bool = False,
) -> Markup:
    """Return a table with a caption and a heading for each column. The first cell of a row is its
    heading.

    On a narrow screen a short table becomes a list of its rows, and a long table scrolls.
    """
    rows = list(rows)
    short = len(rows) <= SHORT
    kind: list[str | None] = [None] * len(head)
    for i in numbers:
        if i < len(head):
            kind[i] = "number"
    headings = tag(
        "tr", *(tag("th", name, scope="col", class_=k) for name, k in zip(head, kind, strict=True))
    )
    named: list[str | None] = [None] * len(head)
    if short:
        named = list(head)
    body = []
    for first, *rest in rows:
        cells = [tag("th", first, class_=kind[0], scope="row")]
        for i, value in enumerate(rest, 1):
            cells.append(tag("td", value, class_=kind[i], data_of=named[i]))
        body.append(tag("tr", *cells))
    unseen = "unseen" if hide else None
    whole = tag(
        "table",
        tag("caption", caption, class_=unseen),
        tag("thead", headings),
        tag("tbody", *body),
        class_="short" if short else None,
    )
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption)


def sentence(words: str) -> Markup:
    """Return text in which words between backticks are code. A line does not end inside an option
    alone, as in `--audit`.
    """
    parts: list[object] = []
    for i, part in enumerate(words.split("`")):
        if i % 2:
            part = tag("code", part, class_="option" if OPTION.fullmatch(part) else None)
        parts.append(part)
    return join(parts)


def facts(pairs: Iterable[tuple[str, object]]) -> Markup:
    """List names and values. Leave out those without a value."""
    rows = []
    for name, value in pairs:
        if value in (None, ""):
            continue
        kind = None
        if len(str(value)) > 60:
            kind = "long"
        rows.append(tag("div", tag("dt", name), tag("dd", value), class_=kind))
    return tag("dl", *rows, class_="facts")


def counts(pairs: Iterable[tuple[str, object]], *, main: bool = False) -> Markup:
    """Show numbers in large type, and the `main` ones in a row of their own."""
    kind = "figures"
    if main:
        kind = "figures main"
    return tag("dl", *(tag("div", tag("dt", k), tag("dd", v)) for k, v in pairs), class_=kind)


def figure(title: str, description: str, *content: object, class_: str | None = None) -> Markup:
    """Show a drawing under its title and a sentence that describes it."""
    return tag(
        "figure",
        tag("figcaption", tag("b", title), tag("span", description)),
        *content,
        class_=class_,
    )


def section(name: str, title: str, *content: object) -> Markup:
    return tag(
        "section",
        tag("h2", title, id=f"{name}-title"),
        *content,
        id=name,
        aria_labelledby=f"{name}-title",
    )


def hashed(source: str) -> str:
    """Return the hash by which a content security policy allows one inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def document(
    title: str, *body: object, policy: bool = False, script: str | None = None, kind: str = ""
) -> str:
    """Return a whole page with its style inside.

    With `policy` the page forbids itself every request, because no server does so for a page on a
    disk.
    """
    forbid = f"default-src 'none'; style-src {hashed(STYLE)}; base-uri 'none'; form-action 'none'"
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="same-origin"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    ]
    if policy:  # Before everything that it governs.
        head.insert(1, tag("meta", http_equiv="Content-Security-Policy", content=forbid))
    if script:
        head.append(tag("script", "", src=script, defer=True))
    page = tag("html", tag("head", *head), tag("body", *body, class_=kind or None), lang="en")
    return f"<!doctype html>\n{page}\n"
