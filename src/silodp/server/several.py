"""Several orders within one budget: what it takes to try them all before those who see every one,
and its score.
"""

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
"""Part of an order's budget that its score takes."""


def plan_several(
    orders: Sequence[Order],
    budgets: Sequence[Budget],
    counts: Sequence[int],
    *,
    scaled: int | None,
    score: Callable[[Port, Gaussian], Any],
) -> Plan:
    """One dry run of all that is asked: `scaled` features are scaled once, then each order is run
    and scored. All orders get as much.

    The mechanisms of order i are named i/KIND, and i/score; what is left over where there is no
    order goes to the scaling.
    """
    if scaled is not None and orders:
        rest = 1 - SCALING_SHARE
    else:
        rest = 1.0
    mechanisms: dict[str, Gaussian] = {}
    shares: dict[str, float] = {}
    if scaled is not None:
        mechanisms |= {kind: Gaussian(kind, 1.0, 0.0) for kind in SCALING}
        shares |= dict.fromkeys(SCALING, (1 - rest if orders else 1.0) / 2)
    for i, order in enumerate(orders):
        own, split = asks(order)
        parts = split or dict.fromkeys(own, 1.0)
        for kind, mechanism in own.items():
            mechanisms[f"{i}/{kind}"] = replace(mechanism, kind=f"{i}/{kind}")
            shares[f"{i}/{kind}"] = (
                rest * (1 - SCORE_SHARE) / len(orders) * parts[kind] / sum(parts.values())
            )
        mechanisms[f"{i}/score"], shares[f"{i}/score"] = (
            Gaussian(f"{i}/score", 1.0, 0.0),
            rest * SCORE_SHARE / len(orders),
        )

    def everything(fed: Any, problem: Any, w: Tensor, **given: Gaussian) -> Iterator[Tensor]:
        if scaled is not None:
            learn_scaling(fed, scaled, ranges=given["ranges"], moments=given["moments"])
        for i, order in enumerate(orders):
            yield from ready(order)(fed, problem, w, **of_order(given, i))
            score(fed, given[f"{i}/score"])

    return calibrate(everything, mechanisms, list(budgets), counts, shares=shares)


def ready(order: Order) -> Run:
    """The order's algorithm, with all but its mechanisms."""
    algorithm = find(order.algorithm)
    return prepared(algorithm, algorithm.schedule(order.schedule), order.step)


def of_order(mechanisms: dict[str, Gaussian], i: int) -> dict[str, Gaussian]:
    """Those of one order's training, by the names that its algorithm knows."""
    return {
        kind.split("/")[1]: m
        for kind, m in mechanisms.items()
        if kind.startswith(f"{i}/") and not kind.endswith("/score")
    }
