"""The rule of shuffled totals: what it lets pass is within the accountant's bound, and a share of
the budget means the same in any mix.
"""

import math

import numpy as np
import pytest

from research.binomial.accountant import BinomialSum, epsilon, renyi
from research.binomial.mechanism import BinomialEvent as TotalEvent
from research.binomial.rule import STAKE, Schedule, Totals, total_share
from silodp.core.errors import BadInput
from silodp.core.events import Event
from silodp.core.privacy.accounting import GDP, Budget, Renyi, renyi_conversion
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson

BUDGET = Budget(2.0, 1e-6)
N = np.asarray(100)


def totals(
    noise_bits: int,
    levels: int = 60,
    *,
    contributions: int = 1000,
    dimension: int = 50,
    count: int = 1,
    sampling=None,
) -> TotalEvent:
    return TotalEvent(
        sampling or FullBatch(), levels, noise_bits, 0.5, contributions, dimension, count
    )


@pytest.mark.parametrize(
    ("noise_bits", "levels"), [(400, 60), (2000, 60), (2000, 5), (30_000, 200)]
)
@pytest.mark.parametrize("budget", [BUDGET, Budget(0.3, 1e-9), Budget(12.0, 1e-4)])
def test_a_share_pays_for_divergence_and_tails_at_once(noise_bits, levels, budget):
    rule = Totals.for_budget(budget)
    share = total_share(0.5, 1000, 50, budget, rule.order, levels, noise_bits)
    room = budget.epsilon - renyi_conversion(rule.order, (1 - STAKE) * budget.delta)
    tail = share * STAKE * budget.delta / 50
    # the divergence at the tail that the share buys is within the share; a larger tail only lowers
    # it
    assert renyi(BinomialSum(1000 * noise_bits, 0.5, levels, 50), rule.order, tail) <= share * room


def test_as_many_totals_as_the_rule_lets_pass_are_within_the_budget_by_the_accountants_own_word():
    rule = Totals.for_budget(BUDGET)
    buckets, price = {}, rule.price(totals(5000), N)[1]
    rounds = math.floor(1 / float(price))
    assert rounds > 3
    buckets[""] = rounds * price
    assert rule.total(buckets) <= rule.capacity(np.asarray(BUDGET, dtype=object)) == 1
    spent = float(rule.epsilon(buckets, np.asarray(BUDGET.delta)))
    own = epsilon([(BinomialSum(5_000_000, 0.5, 60, 50), rounds)], BUDGET.delta)
    assert own <= spent * (1 + 1e-9)
    assert spent <= BUDGET.epsilon
    assert own > 0.9 * spent  # and little is lost to the fixed order


def test_shares_of_different_releases_add_up_to_no_less_than_the_accountant_finds():
    rule = Totals.for_budget(BUDGET)
    mix = [(totals(20_000), 3), (totals(9000, levels=30), 5), (totals(50_000, levels=100), 2)]
    share = sum(n * float(rule.price(event, N)[1]) for event, n in mix)
    assert share < 1
    releases = [(BinomialSum(1000 * e.noise_bits, 0.5, e.levels, 50), n) for e, n in mix]
    assert epsilon(releases, BUDGET.delta) <= float(
        rule.epsilon({"": np.asarray(share)}, np.asarray(0.0))
    )


def test_the_price_counts_on_the_planned_contributions_and_not_on_more():
    rule = Totals.for_budget(BUDGET)
    price = [float(rule.price(totals(5000, contributions=m), N)[1]) for m in (500, 1000, 2000)]
    assert price[0] > 1.9 * price[1] > 3.6 * price[2]


def test_batches_of_one_partition_cost_the_largest_of_them():
    rule = Totals.for_budget(BUDGET)
    buckets = dict(
        rule.price(totals(bits, sampling=DisjointBatches(3, i)), N)
        for i, bits in enumerate((5000, 3000, 9000))
    )
    assert len(buckets) == 3
    assert float(rule.total(buckets)) == float(rule.price(totals(3000), N)[1])


def test_gaussian_releases_are_priced_beside_totals_at_the_same_order():
    rule = Totals.for_budget(BUDGET)
    _, price = rule.price(Event(FullBatch(), 20.0), N)
    rounds = 1 / float(price)
    assert rounds * rule.order / (2 * 20.0**2) + renyi_conversion(
        rule.order, (1 - STAKE) * 1e-6
    ) == pytest.approx(2.0)
    assert math.isinf(float(rule.price(Event(FullBatch(), 0.0), N)[1]))


def test_too_little_noise_costs_more_than_any_budget():
    assert float(Totals.for_budget(BUDGET).price(totals(1, contributions=2), N)[1]) > 1


def test_what_a_rule_cannot_price_is_refused_in_a_sentence():
    for rule in (GDP(), Renyi(8.0)):
        with pytest.raises(BadInput, match="totals"):
            rule.price(totals(5000), N)
    with pytest.raises(BadInput, match="Poisson"):
        Totals.for_budget(BUDGET).price(totals(5000, sampling=Poisson(0.1)), N)
    with pytest.raises(BadInput, match="order"):
        Totals(BUDGET, 1.5)


def test_a_ledger_of_another_budget_has_no_room():
    rule = Totals.for_budget(BUDGET)
    assert float(rule.capacity(np.asarray(Budget(3.0, 1e-6), dtype=object))) == 0


def test_the_silos_own_noise_protects_it_less_than_that_of_all():
    event = totals(20_000)
    alone, together = scheduled((event, 250)), scheduled((event, None))
    assert 1.8 * together < alone < math.inf
    assert scheduled((event, 1000)) == together
    assert scheduled((event, None), (event, None)) > 1.3 * together


def scheduled(*releases: tuple[Event | TotalEvent, int | None], delta: float = 1e-6) -> float:
    made = Schedule()
    for event, own in releases:
        made.add(event.sampling.bucket, event, own)
    return made.epsilon(delta)


def test_a_schedules_price_is_the_accountants_own_whatever_the_order_of_its_releases_and_whatever_budget_a_ledger_has():  # noqa: E501
    mix = [
        (totals(20_000, count=3), None),
        (totals(9000, levels=30), None),
        (Event(FullBatch(), 8.0, 2), None),
    ]
    releases = [
        (BinomialSum(1000 * 20_000, 0.5, 60, 50), 3),
        (BinomialSum(1000 * 9000, 0.5, 30, 50), 1),
    ]
    found = scheduled(*mix)
    assert found == pytest.approx(epsilon(releases, 1e-6, rho=2 / (2 * 8.0**2)), rel=1e-9)
    assert found == scheduled(*reversed(mix)) == scheduled(*[(totals(20_000), None)] * 3, *mix[1:])
    for budget in (
        BUDGET,
        Budget(10.0, 1e-6),
    ):  # each ledger's own order bounds it from above, a large budget's by far
        rule = Totals.for_budget(budget)
        share = sum(float(rule.price(event, N)[1]) for event, _ in mix)
        assert found <= float(rule.epsilon({"": np.asarray(share)}, np.asarray(0.0)))
    assert scheduled() == 0
    assert scheduled((Event(FullBatch(), 0.0), None)) == math.inf


def test_of_a_partition_a_schedule_counts_each_kind_as_often_as_its_fullest_batch():
    batches = [
        (totals(5000, count=1 + (i == 1), sampling=DisjointBatches(3, i)), None) for i in range(3)
    ]
    assert scheduled(*batches) == scheduled((totals(5000, count=2), None))
    assert scheduled(*batches, (totals(5000), None)) == scheduled((totals(5000, count=3), None))
