"""A page with the ratios of a regression, their intervals and their price."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from silodp.pages.charts import whiskers
from silodp.pages.markup import Markup, document, table, tag
from silodp.pages.paid import price


def parts(answer: Mapping[str, Any]) -> list[Markup]:
    """Draw the ratios, and list them in a table."""
    ratio = answer["ratio"]
    rows = [row for row in answer["coefficients"] if row["name"] != "constant"]
    description = (
        "A dot is the estimate, and a line its 95 % confidence interval, which includes the "
        f"privacy noise. Left of 1 the {ratio} falls with the column, right of 1 it rises."
    )
    drawn = whiskers(
        f"{ratio.capitalize()} by column",
        description,
        [(row["name"], row["coef"], (row["upper_95"] - row["lower_95"]) / 2) for row in rows],
        ratios=True,
    )
    numbers = [
        (
            row["name"],
            f"{row['exp_coef']:.3g}",
            f"{row['exp_lower_95']:.3g} to {row['exp_upper_95']:.3g}",
            "<0.0001" if row["p"] < 0.0001 else f"{row['p']:.4f}",
        )
        for row in answer["coefficients"]
    ]
    head = ("column", ratio, "95 %", "p")
    return [drawn, table("The ratios in numbers", head, numbers, numbers=(1, 2, 3))]


def page_of(answer: Mapping[str, Any]) -> str:
    """Return the whole page as text. The page loads nothing from elsewhere."""
    ratio = answer["ratio"]
    over = tag("p", f"silodp · {answer['kind']} regression by private releases", class_="over")
    title = f"{ratio.capitalize()}s over {answer['records']:,} records"
    return document(
        f"{ratio.capitalize()}s: report",
        tag(
            "main",
            tag("header", over, tag("h1", title)),
            *parts(answer),
            price(answer),
            id="main",
        ),
        policy=True,
        kind="report",
    )
