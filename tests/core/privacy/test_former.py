"""What is left of a ledger of the former rule `totals` pays for answers and totals of today."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant as rdp

from silodp.core.errors import BadInput
from silodp.core.events import Event, TotalEvent
from silodp.core.privacy.accounting import Budget
from silodp.core.privacy.former import STAKE, BinomialEvent, Totals
from silodp.core.sampling import FullBatch, Poisson

N = np.asarray(100)
BUDGET = Budget(2.0, 1e-5)


def price(rule: Totals, event) -> float:
    bucket, amount = rule.price(event, N)
    assert bucket == ""
    return float(amount)


@pytest.mark.parametrize("order", [4.0, 12.0, 40.0])
def test_a_price_is_the_divergence_at_the_ledgers_order_as_a_share_of_what_it_has_room_for(order):
    """A Gaussian of multiplier z has the divergence order / (2 z^2): Mironov 2017."""
    budget = Budget(20.0, 1e-5)
    rule = Totals(budget, order)
    delta = (1 - STAKE) * budget.delta
    room = (
        budget.epsilon - math.log1p(-1 / order) + (math.log(delta) + math.log(order)) / (order - 1)
    )
    for event, z in (
        (Event(FullBatch(), 20.0, 3), 20.0),
        (TotalEvent(FullBatch(), 10.0, 3, counted=4), 20.0),
    ):
        found = price(rule, event)
        assert found == pytest.approx(3 * order / (2 * z * z) / room, rel=1e-9)
        assert found >= 3 * order / (2 * z * z) / room


@pytest.mark.parametrize("counted", [1, 2, 25])
def test_a_full_ledger_is_within_its_budget_by_another_accountant(counted):
    order = 12.0
    rule = Totals(BUDGET, order)
    z = 10.0
    times = int(1 / price(rule, TotalEvent(FullBatch(), z / math.sqrt(counted), 1, counted)))
    accountant = rdp.RdpAccountant([order], rdp.NeighborRel.REPLACE_SPECIAL)
    accountant.compose(dp_event.GaussianDpEvent(z), times)
    spent = accountant.get_epsilon((1 - STAKE) * BUDGET.delta)
    assert 0.98 * BUDGET.epsilon <= spent <= BUDGET.epsilon
    assert float(rule.capacity(np.asarray(BUDGET, dtype=object))) == 1.0


def test_nothing_of_another_budget_fits_and_nothing_former_or_sampled_has_a_price():
    rule = Totals(BUDGET, 12.0)
    assert float(rule.capacity(np.asarray(Budget(3.0, 1e-5), dtype=object))) == 0.0
    assert float(rule.epsilon({"": np.asarray(1.0)}, np.asarray(0.5))) <= BUDGET.epsilon
    assert price(Totals(Budget(1e-6, 1e-5), 2.0), Event(FullBatch(), 20.0, 1)) == math.inf
    for event in (Event(Poisson(0.5), 4.0, 1), BinomialEvent(FullBatch(), 4.0, 1)):
        with pytest.raises(BadInput, match="a ledger of the totals rule prices"):
            rule.price(event, N)
