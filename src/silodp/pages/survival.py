"""A page with one survival curve, its band and its price."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from silodp.pages.charts import Series, chart
from silodp.pages.markup import Markup, document, table, tag
from silodp.pages.paid import price


def parts(answer: Mapping[str, Any]) -> list[Markup]:
    """Draw the curve, and list it in a table."""
    shown = [row for row in answer["curve"] if row["survival"] is not None]
    points = [(0.0, 1.0), *((row["time"], row["survival"]) for row in shown)]
    band = [(1.0, 1.0), *((row["low"], row["high"]) for row in shown)]
    description = (
        "The band is a 95 % confidence interval at each time and includes the privacy "
        "noise. A person lost to follow-up within a time bin counts as half in that "
        "bin."
    )
    line = Series("share", points, 0, band=band, dots=True)
    last = max(row["time"] for row in answer["curve"])
    drawn = chart(
        "Share without the event",
        description,
        [line],
        across=answer["time"],
        up="share",
        percent=True,
        top=1.0,
        least=last,
    )
    rows = []
    for row in answer["curve"]:
        if row["survival"] is not None:
            known = (f"{row['survival']:.1%}", f"{row['low']:.1%} to {row['high']:.1%}")
        else:
            known = ("too noisy",) * 2
        rows.append((f"{row['time']:g}", *known))
    head = (f"until {answer['time']}", "share", "95 %")
    return [drawn, table("The curve in numbers", head, rows, numbers=(1, 2))]


def page_of(answer: Mapping[str, Any]) -> str:
    """Return the whole page as text. The page loads nothing from elsewhere."""
    over = tag("p", "silodp · survival by one private release", class_="over")
    head = tag("header", over, tag("h1", f"Survival over {answer['records']} records"))
    return document(
        "Survival: report",
        tag("main", head, *parts(answer), price(answer), id="main"),
        policy=True,
        kind="report",
    )
