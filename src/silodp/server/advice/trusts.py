"""`silodp plan --advise`: the advisor's choice under each trust, what a silo gives up, and how many
records would be enough if there are too few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from scipy import special

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget, gdp_mu
from silodp.server.advice.candidates import EFFORTS, Effort
from silodp.server.advice.chooser import choose
from silodp.server.advice.facts import Facts
from silodp.server.advice.words import lines
from silodp.server.order import TRUSTS, Order, targets

T = TypeVar("T")
CLOSE = 0.02
"""Trust that buys less accuracy than this is not advised."""
GROWTH = tuple(2.0**k for k in range(1, 11))
MOST_EPSILON = 50.0
FALSE_ALARMS = 0.01


def compared(order: Order, facts: Facts, *, effort: Effort | None = None) -> dict[str, Any]:
    """Return what `silodp plan --advise --json` prints; weights by precision are for --trust isrl
    alone.
    """
    trusts: dict[str, dict[str, Any]] = {}
    for trust in TRUSTS:
        if order.weights == "precision" and trust != "isrl":
            weights = None
        else:
            weights = order.weights
        try:
            # The totals are the same, whoever adds them.
            if trust == "shuffle" and "refused" not in (masks := trusts["masks"]):
                trusts[trust] = masks | {"trust": trust, "order": masks["order"] | {"trust": trust}}
                continue
            advice = choose(replace(order.under(trust), weights=weights), facts, effort=effort)
        except BadInput as error:
            if trust == order.trust:
                raise
            trusts[trust] = {"trust": trust, "refused": str(error)}
            continue
        trusts[trust] = {"trust": trust, **advice.words(), "lines": lines(advice)}
    usable = [t for t in TRUSTS if trusts[t].get("expected", {}).get("enough")]
    best = min((trusts[t]["expected"]["error"] for t in usable), default=math.inf)
    advised = next((t for t in usable if trusts[t]["expected"]["error"] <= best + CLOSE), None)
    if not trusts["isrl"].get("expected", {"enough": True})["enough"]:
        trusts["isrl"]["needed"] = _needed(order.under("isrl"), facts, effort or EFFORTS[1])
    budgets = {
        n: budget
        for n, budget in zip(facts.counts, targets(order, facts.names, facts.counts), strict=True)
    }
    given = [{"records": n} | gives_up(budget) for n, budget in sorted(budgets.items())]
    return {"synthetic": True, "advised": advised, "trusts": trusts, "gives_up": given}


def _needed(order: Order, facts: Facts, effort: Effort) -> dict[str, Any]:
    """Return the least doubling of all silos, and that of epsilon, at which a model is expected to
    be better than guessing; None: not even the last.
    """
    epsilons = [b.epsilon for b in targets(order, facts.names, facts.counts)]
    larger = [replace(facts, counts=tuple(math.ceil(n * f) for n in facts.counts)) for f in GROWTH]
    looser = [max(epsilons) * f for f in GROWTH if max(epsilons) * f <= MOST_EPSILON]
    records = _first(larger, lambda more: choose(order, more, effort=effort).enough)
    epsilon = _first(
        looser, lambda e: choose(replace(order, epsilon=(repr(e),)), facts, effort=effort).enough
    )
    return {"records": list(records.counts) if records else None, "epsilon": epsilon}


def _first(things: Sequence[T], suffices: Callable[[T], bool]) -> T | None:
    """Return the first that suffices, by bisection."""
    low = -1
    high = len(things) - 1
    if high < 0 or not suffices(things[high]):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if suffices(things[middle]):
            high = middle
        else:
            low = middle
    return things[high]


def gives_up(budget: Budget) -> dict:
    """Return what the best attacker can learn about one record from all releases, Gaussian answers
    and totals, that fill the budget.

    "guesses_right" starts from a prior of 50 %. "belief" is the posterior that is passed with
    probability "belief_passed" at most.
    """
    mu = gdp_mu(budget)
    return {
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "false_positives": FALSE_ALARMS,
        "mu": mu,
        "true_positives": float(special.ndtr(special.ndtri(FALSE_ALARMS) + mu)),
        "guesses_right": float(special.ndtr(mu / 2)),
        "belief": 1 / (1 + math.exp(-budget.epsilon)),
        "belief_passed": float(special.ndtr(mu / 2 - budget.epsilon / mu)),
    }
