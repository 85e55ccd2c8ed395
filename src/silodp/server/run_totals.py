"""What a run through a shuffler asks of cards and plan: one budget for all, since each total is protected by everybody's noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.privacy.totals import Totals
from silodp.core.protocol.card import Card
from silodp.server.federation import Everyone
from silodp.server.plan import Plan, Run
from silodp.server.shuffled import calibrate_shuffled

TRUSTS = ("isrl", "shuffle")


def agree_on_rule(cards: Sequence[Card], trust: str) -> None:
    """Raises BadInput unless every silo keeps its ledger by the rule that this trust is priced by."""
    if trust not in TRUSTS:
        raise BadInput(f"trust {trust!r} is unknown over a network; choose one of {', '.join(TRUSTS)}")
    wanted = "totals" if trust == "shuffle" else "gdp"
    for card in cards:
        if card.rule != wanted:
            planned = "through a shuffler is planned for totals" if trust == "shuffle" else "without a shuffler is planned for gdp"
            raise BadInput(f"silo {card.name} keeps its ledger by the rule {card.rule}; a run {planned}, at every silo")


def least_of(order_least: int | None, participation: Everyone) -> int:
    """The fewest silos whose total is passed on: as many as are asked, unless the order says less."""
    asked = getattr(participation, "least", None) or getattr(participation, "answering", participation.silos)
    least = asked if order_least is None else order_least
    if not 2 <= least <= asked:
        raise BadInput(f"the quorum is {least}; through a shuffler it must be between 2 and {asked}, the silos that are asked in a round")
    return least


def plan_totals(
    run: Run,
    mechanisms: Mapping[str, Gaussian],
    cards: Sequence[Card],
    epsilon: float | None,
    participation: Everyone,
    least: int,
    shares: Mapping[str, float] | None,
) -> Plan:
    """Levels and noise bits with which the run spends the smallest of the silos' budgets; BadInput if another's ledger has no room for it.

    A ledger prices at an order of its own, fitted to its own budget, so that a larger budget has room is likely and not certain.
    """
    budget = Budget(epsilon or min(card.epsilon for card in cards), min(card.delta for card in cards))
    counts = [card.records for card in cards]
    plan = calibrate_shuffled(run, mechanisms, [budget], counts, participation, dimension=cards[0].parameters, least=least, shares=shares)
    for i, card in enumerate(cards):
        own, buckets = Totals.for_budget(Budget(card.epsilon, card.delta)), dict[str, np.ndarray]()
        for asked in plan.asked:
            if i in asked.silos:
                bucket, price = own.price(asked.event, np.asarray(card.records))
                buckets[bucket] = buckets.get(bucket, np.zeros(())) + price
        if buckets and not own.total(buckets).item() <= 1.0:
            raise BadInput(f"the run's totals do not fit the ledger of silo {card.name}; use a smaller epsilon than {budget.epsilon:g}")
    return plan
