"""Several orders within one budget: one plan for the training and the score of each order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.server.algorithms import find
from silodp.server.estimates.scaling import learn_scaling
from silodp.server.federation import Port
from silodp.server.order import Order
from silodp.server.plan import Plan, Run, calibrate
from silodp.server.prepare import SCALING, SCALING_SHARE, asks
from silodp.server.settings import prepared

SCORE_SHARE = 0.1
"""The part of an order's budget that its score costs."""


def plan_several(
    orders: Sequence[Order],
    budgets: Sequence[Budget],
    counts: Sequence[int],
    *,
    scaled: int | None,
    score: Callable[[Port, Gaussian], Any],
) -> Plan:
    """Return the plan of one dry run of everything: features are scaled once, then each order is
    run and scored.

    `scaled` is the number of features to scale, or None without scaling. All orders get the same
    share of `budgets`. Without an order the scaling gets the whole budget. The mechanisms of order
    i are named i/KIND and i/score.
    """
    if scaled is not None and orders:
        rest = 1 - SCALING_SHARE
    else:
        rest = 1.0
    mechanisms: dict[str, Gaussian] = {}
    shares: dict[str, float] = {}
    if scaled is not None:
        mechanisms |= {kind: Gaussian(kind, 1.0, 0.0) for kind in SCALING}
        if orders:
            scaling_share = 1 - rest
        else:
            scaling_share = 1.0
        shares |= dict.fromkeys(SCALING, scaling_share / 2)
    for i, order in enumerate(orders):
        training, split = asks(order)
        parts = split or dict.fromkeys(training, 1.0)
        for kind, mechanism in training.items():
            mechanisms[f"{i}/{kind}"] = replace(mechanism, kind=f"{i}/{kind}")
            shares[f"{i}/{kind}"] = (
                rest * (1 - SCORE_SHARE) / len(orders) * parts[kind] / sum(parts.values())
            )
        mechanisms[f"{i}/score"] = Gaussian(f"{i}/score", 1.0, 0.0)
        shares[f"{i}/score"] = rest * SCORE_SHARE / len(orders)

    def everything(fed: Any, problem: Any, w: Tensor, **given: Gaussian) -> Iterator[Tensor]:
        if scaled is not None:
            learn_scaling(fed, scaled, ranges=given["ranges"], moments=given["moments"])
        for i, order in enumerate(orders):
            yield from ready(order)(fed, problem, w, **of_order(given, i))
            score(fed, given[f"{i}/score"])

    return calibrate(everything, mechanisms, list(budgets), counts, shares=shares)


def ready(order: Order) -> Run:
    """Return the order's algorithm with all of its arguments except the mechanisms."""
    algorithm = find(order.algorithm)
    return prepared(algorithm, algorithm.schedule(order.schedule), order.step)


def of_order(mechanisms: dict[str, Gaussian], i: int) -> dict[str, Gaussian]:
    """Return the mechanisms of one order's training, by the names that its algorithm gives them."""
    return {
        kind.split("/")[1]: m
        for kind, m in mechanisms.items()
        if kind.startswith(f"{i}/") and not kind.endswith("/score")
    }
