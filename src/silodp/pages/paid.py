"""What each silo has paid for one answer, as pages show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from silodp.core.figures import rounded_up
from silodp.pages.markup import Markup, table


def price(answer: Mapping[str, Any]) -> Markup:
    """Return a table with the price of an answer for each silo."""
    paid = [
        (
            silo["name"],
            rounded_up(silo.get("spent_epsilon", silo["epsilon"])),
            rounded_up(silo["delta"]),
        )
        for silo in answer["silos"]
    ]
    return table("What each silo has spent on it", ("silo", "ε", "δ"), paid, numbers=(1, 2))
