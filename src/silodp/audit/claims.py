"""The claims of a plan at other deltas than that of its budget: the accountant's own epsilon for
each delta, of the same releases.

An attack with thousands of runs cannot see an epsilon of 6 at a delta of 1e-5, whose events are too
rare to count. At a delta of a tenth it sees the same noise well. All claims follow from the one
price, so an attack that refutes any of them refutes the price.
"""

from __future__ import annotations

from dataclasses import replace

from silodp.core.privacy.accounting import Budget, budget_array
from silodp.server.plan import Plan

DELTAS = (1e-3, 0.01, 0.03, 0.1, 0.2, 0.35)
FACTOR = 1.5
"""A row has power if it alarms on the noise of a claim that is larger by this factor."""

Claims = list[tuple[float, float]]


def of_plan(plan: Plan, budget: Budget) -> Claims:
    """Return the (epsilon, delta) of Gaussian releases on any batches, by the plan's own rule: the
    largest over the silos.
    """
    claims = [(budget.epsilon, budget.delta)]
    for delta in DELTAS:
        budgets = [Budget(budget.epsilon, delta)] * plan.budgets.shape[-1]
        at_delta = replace(plan, budgets=budget_array(budgets)[None])
        claims.append((max(0.0, float(at_delta.spent().max())), delta))
    return claims
