"""A page with one survival curve, its band and its price."""

from __future__ import annotations

from typing import Any

from silodp.core.figures import rounded_up
from silodp.pages.charts import Series, chart
from silodp.pages.markup import document, table, tag


def page_of(answer: dict[str, Any]) -> str:
    """Return the whole page as text. The page loads nothing from elsewhere."""
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
    paid = [
        (
            silo["name"],
            rounded_up(silo.get("spent_epsilon", silo["epsilon"])),
            rounded_up(silo["delta"]),
        )
        for silo in answer["silos"]
    ]
    over = tag("p", "silodp · survival by one private release", class_="over")
    head = tag("header", over, tag("h1", f"Survival over {answer['records']} records"))
    price = table("What each silo has spent on it", ("silo", "ε", "δ"), paid, numbers=(1, 2))
    numbers = table(
        "The curve in numbers", (f"until {answer['time']}", "share", "95 %"), rows, numbers=(1, 2)
    )
    return document(
        "Survival: report",
        tag("main", head, drawn, numbers, price, id="main"),
        policy=True,
        kind="report",
    )
