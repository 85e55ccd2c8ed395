"""A page about a synthetic table: how far it agrees with what was released, and its limits.

The page is made from the figures of `silodp synthesise --json`. No record is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from silodp.pages.markup import Markup, document, section, table, tag
from silodp.pages.paid import price

LIMITS = (
    "Do not use the table for rare subgroups. A group with fewer records than a few times the "
    "count's noise is made of noise.",
    "Do not make statements about single people. No row is a person.",
    "Do not report intervals or p-values that treat the rows as records. They leave out the "
    "privacy noise, and more rows do not add information.",
    "Do not study how two columns depend on each other if their pair was not released. Such "
    "columns are nearly independent in the table.",
    "Do not study how two columns act together on the label. In the table each has an effect of "
    "its own.",
    "Do use it for plots, code, sample sizes, tuning and first models. Confirm what matters by a "
    "question to the silos.",
)


def page_of(answer: Mapping[str, Any]) -> str:
    """Return the whole page as text."""
    over = tag("p", "silodp · a synthetic table from private answers", class_="over")
    title = tag("h1", f"{answer['rows']:,} synthetic rows for {answer['records']:,} records")
    first = tag("p", _summary(answer))
    parts = [
        tag("header", over, title, first),
        section("limits", "What it is for, and what not", _items(LIMITS)),
        section("shares", "Shares of every column", *_shares(answer)),
        section("correlations", "Correlations", _correlations(answer)),
    ]
    if answer["model"] and answer["model"]["cells"]:
        parts.append(section("model", "A model that is trained on it", *_model(answer)))
    parts.append(section("price", "Price", price(answer)))
    main = tag("main", *parts, id="main")
    return document("Synthetic table: report", main, policy=True, kind="report")


def parts_of(answer: Mapping[str, Any]) -> list[Markup]:
    """Return the summary and the shares, for a page about more than this table."""
    return [tag("p", _summary(answer)), *_shares(answer)]


def _summary(answer: Mapping[str, Any]) -> str:
    """Return the page's first sentences."""
    return (
        f"{answer['within']:.0%} of the synthetic shares are within the 95 % bound of the released "
        f"ones. {answer['tables']} tables were released: every column by the label, and "
        f"{answer['pairs']} other pairs of columns. By the privacy noise, a count has a standard "
        f"error of {answer['count_error']:.2g} records, and in a table of a pair of "
        f"{answer['pair_error']:.2g}. Everything on this page compares the rows with what was "
        "released, not with records."
    )


def _items(words: tuple[str, ...]) -> Markup:
    """Return a list of sentences."""
    return tag("ul", *(tag("li", one) for one in words))


def _shares(answer: Mapping[str, Any]) -> list[Markup]:
    """Return a table for each column. The bound is that of 95 per cent."""
    found = []
    for column in answer["columns"]:
        rows = [
            (
                cell["cell"],
                f"{cell['released']:.1%}",
                f"{cell['synthetic']:.1%}",
                f"{cell['bound']:.1%}",
            )
            for cell in column["cells"]
        ]
        head = ("value", "released", "synthetic", "95 % bound")
        found.append(table(column["column"], head, rows, numbers=(1, 2, 3)))
    return found


def _correlations(answer: Mapping[str, Any]) -> Markup:
    """Return the correlations of the released pairs."""
    rows = []
    for pair in answer["correlations"]:
        released = "too noisy"
        if pair["released"] is not None:
            released = f"{pair['released']:.2f} ± {pair['error']:.2f}"
        synthetic = "none"
        if pair["synthetic"] is not None:
            synthetic = f"{pair['synthetic']:.2f}"
        rows.append((pair["one"], pair["other"], released, synthetic))
    head = ("column", "other column", "released", "synthetic")
    return table("±: standard error by the noise", head, rows, numbers=(2, 3))


def _model(answer: Mapping[str, Any]) -> list[Markup]:
    """Return the risks of the model beside released shares."""
    model = answer["model"]
    words = (
        "A logistic model is fitted to the synthetic rows. Its mean risk of "
        f"{model['positive']!r} is beside the released share, where noise leaves one. "
        f"{model['within']:.0%} are within 95 % bounds."
    )
    rows = [
        (
            cell["column"],
            cell["cell"],
            f"{cell['released']:.1%} ± {cell['error']:.1%}",
            f"{cell['predicted']:.1%}",
        )
        for cell in model["cells"]
    ]
    head = ("column", "value", "released share", "mean risk")
    return [tag("p", words), table("Risks", head, rows, numbers=(2, 3))]
