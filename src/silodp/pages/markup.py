"""HTML from plain functions. Text is escaped where it enters; what is marked up already is
`Markup`, and nothing else passes as it is.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape

from silodp.core.text import visible_lines
from silodp.pages.style import STYLE

SHORT = 40
"""Rows up to which a table may turn into a list."""


class Markup(str):
    """HTML that was made here."""

    __slots__ = ()


def text(value: object) -> Markup:
    if isinstance(value, Markup):
        return value
    return Markup(_escaped(value))


def _escaped(value: object) -> str:
    """Return the value for HTML, with controls and half characters as escapes: what reorders or
    hides text does so in a browser, too.
    """
    return escape(visible_lines(str(value)))


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """An element; an attribute's underscores are hyphens, a trailing one is dropped, None leaves it
    out.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = key.rstrip("_").replace("_", "-")
            words.append(key if value is True else f'{key}="{_escaped(value)}"')
    body = "".join(text(c) for c in content)
    return Markup(
        f"<{' '.join(words)}>"
        if name in ("meta", "input", "br", "link")
        else f"<{' '.join(words)}>{body}</{name}>"
    )


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
    """A table with a caption, a heading for each column and, in its first cell, for each row; on a
    narrow screen a short one turns into a list of its rows, each value under its own heading, and a
    long one scrolls by itself."""
    rows = list(rows)
    short = len(rows) <= SHORT
    kind = ["number" if i in numbers else None for i in range(len(head))]
    headings = tag(
        "tr", *(tag("th", name, scope="col", class_=k) for name, k in zip(head, kind, strict=True))
    )
    body = []
    for row in rows:
        named = [head[i] if short and i else None for i in range(len(row))]
        cells = [
            tag(
                "td" if i else "th",
                value,
                class_=kind[i],
                scope=None if i else "row",
                data_of=named[i],
            )
            for i, value in enumerate(row)
        ]
        body.append(tag("tr", *cells))
    said = tag("caption", caption, class_="unseen" if hide else None)
    whole = tag(
        "table",
        said,
        tag("thead", headings),
        tag("tbody", *body),
        class_="short" if short else None,
    )
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption)


def sentence(words: str) -> Markup:
    """Text in which what stands between backticks is code."""
    return join(tag("code", part) if i % 2 else part for i, part in enumerate(words.split("`")))


def facts(pairs: Iterable[tuple[str, object]]) -> Markup:
    """A list of names and values; those without a value are left out."""
    kept = [(k, v) for k, v in pairs if v not in (None, "")]
    return tag(
        "dl",
        *(
            tag("div", tag("dt", k), tag("dd", v), class_="long" if len(str(v)) > 60 else None)
            for k, v in kept
        ),
        class_="facts",
    )


def counts(pairs: Iterable[tuple[str, object]]) -> Markup:
    """The numbers that one looks for first, large."""
    return tag("dl", *(tag("div", tag("dt", k), tag("dd", v)) for k, v in pairs), class_="figures")


def figure(title: str, said: str, *content: object, class_: str | None = None) -> Markup:
    """What is drawn, under its title and a sentence that says what is seen."""
    return tag(
        "figure", tag("figcaption", tag("b", title), tag("span", said)), *content, class_=class_
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
    """The name by which a content security policy lets one inline text in."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def document(
    title: str, *body: object, policy: bool = False, script: str | None = None, kind: str = ""
) -> str:
    """A whole page with its style inside. With `policy` it forbids itself every request, as a page
    from a disk must do for itself.
    """
    forbid = f"default-src 'none'; style-src {hashed(STYLE)}; base-uri 'none'; form-action 'none'"
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=forbid) if policy else "",
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="same-origin"),
        tag("title", title),
        tag("style", Markup(STYLE)),
        tag("script", "", src=script, defer=True) if script else "",
    ]
    return (
        "<!doctype "
        f"html>\n{tag('html', tag('head', *head), tag('body', *body, class_=kind or None), lang='en')}\n"  # noqa: E501
    )
