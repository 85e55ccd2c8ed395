"""The ledger in memory: one rule, one budget per run and silo, and no sum ever past it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from silodp.core.errors import Refused
from silodp.core.events import Event
from silodp.core.privacy.accounting import GDP, Budget, Committed, Renyi, gdp_epsilon, gdp_mu
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, WithoutReplacement
from silodp.silo.ledger.memory import MemoryLedger

DELTA = 1e-5
COUNTS = (100, 50, 80)
ALL = (0, 1, 2)


def ledger(budgets=None, rule=None):
    return MemoryLedger(rule or GDP(), budgets or Budget(1.0, DELTA), COUNTS)


def test_a_new_ledger_has_spent_nothing():
    assert ledger().epsilon().tolist() == [[0.0] * 3]
    assert ledger(rule=Renyi(8.0)).epsilon().tolist() == [[0.0] * 3]


def test_releases_add_up_as_mu_squared():
    book = ledger(Budget(50.0, DELTA))
    book.charge(Event(FullBatch(), 2.0), ALL)
    book.charge(Event(FullBatch(), 4.0, count=3), ALL)
    assert book.epsilon() == pytest.approx(
        np.full((1, 3), gdp_epsilon(math.sqrt(1 / 4 + 3 / 16), DELTA))
    )


def test_a_count_of_k_costs_what_k_events_cost():
    at_once, one_by_one = ledger(Budget(9.0, DELTA)), ledger(Budget(9.0, DELTA))
    at_once.charge(Event(FullBatch(), 3.0, count=7), ALL)
    for _ in range(7):
        one_by_one.charge(Event(FullBatch(), 3.0), ALL)
    assert at_once.epsilon() == pytest.approx(one_by_one.epsilon())


def test_only_the_silos_that_answer_pay():
    book = ledger(Budget(9.0, DELTA))
    book.charge(Event(FullBatch(), 3.0), (0, 2))
    spent = book.epsilon()[0]
    assert spent[0] == spent[2] > spent[1] == 0


def test_each_silo_has_its_own_budget_and_one_that_is_spent_stops_the_query_for_all():
    book = ledger([Budget(1.0, DELTA), Budget(9.0, DELTA), Budget(9.0, DELTA)])
    noise = 1 / gdp_mu(Budget(1.0, DELTA)) * (1 + 1e-9)
    book.charge(Event(FullBatch(), noise), ALL)
    before = book.epsilon()
    with pytest.raises(Refused, match=r"^budget$"):
        book.charge(Event(FullBatch(), 1e3), ALL)
    assert (book.epsilon() == before).all()
    book.charge(Event(FullBatch(), noise), (1, 2))


def test_each_run_has_its_own_budget_and_noise():
    rows = [[Budget(e, DELTA)] * 3 for e in (1.0, 4.0)]
    noise = torch.tensor(
        [[1 / gdp_mu(b) * (1 + 1e-9) for b in row] for row in rows], dtype=torch.float64
    )
    book = ledger(rows)
    book.charge(Event(FullBatch(), noise), ALL)
    assert book.epsilon() == pytest.approx(np.array([[1.0] * 3, [4.0] * 3]))


@given(
    noises=st.lists(st.floats(0.3, 40), min_size=1, max_size=30),
    epsilon=st.floats(0.1, 10),
    rule=st.sampled_from(["gdp", "renyi"]),
    silos=st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=30, max_size=30),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_whatever_is_asked_no_silo_ever_passes_its_budget_and_a_refusal_changes_nothing(
    noises, epsilon, rule, silos
):
    budget = Budget(epsilon, DELTA)
    book = ledger(budget, GDP() if rule == "gdp" else Renyi.for_gaussian(budget))
    for noise, members in zip(noises, silos, strict=False):
        before = book.epsilon()
        try:
            book.charge(Event(FullBatch(), noise), sorted(members))
        except Refused:
            assert (book.epsilon() == before).all()
        assert (book.epsilon() <= epsilon * (1 + 1e-12)).all()


def test_an_answer_without_noise_fits_no_finite_budget_and_an_infinite_one_always():
    with pytest.raises(Refused):
        ledger(Budget(1e9, DELTA)).charge(Event(FullBatch(), 0.0), ALL)
    for rule in (GDP(), Renyi(8.0)):
        book = ledger(Budget(math.inf, DELTA), rule)
        book.charge(Event(FullBatch(), 0.0), ALL)
        assert np.isinf(book.epsilon()).all()


# --- partitions ----------------------------------------------------------------------------------


def test_disjoint_batches_cost_their_maximum():
    book = ledger(Budget(9.0, DELTA))
    for index, noise in enumerate((2.0, 1.0, 4.0)):
        book.charge(Event(DisjointBatches(3, index), noise), ALL)
    assert book.epsilon() == pytest.approx(np.full((1, 3), gdp_epsilon(1.0, DELTA)))


def test_a_batch_asked_twice_pays_twice():
    book = ledger(Budget(9.0, DELTA))
    for _ in range(2):
        book.charge(Event(DisjointBatches(3, 1), 2.0), ALL)
    assert book.epsilon() == pytest.approx(np.full((1, 3), gdp_epsilon(math.sqrt(2) / 2, DELTA)))


def test_two_partitions_and_the_whole_add_up():
    book = ledger(Budget(19.0, DELTA))
    for event in (
        Event(DisjointBatches(3, 0, "a"), 2.0),
        Event(DisjointBatches(3, 1, "b"), 2.0),
        Event(DisjointBatches(4, 2, "a"), 2.0),
    ):
        book.charge(event, ALL)
    book.charge(Event(FullBatch(), 2.0), ALL)
    assert book.epsilon() == pytest.approx(np.full((1, 3), gdp_epsilon(math.sqrt(4) / 2, DELTA)))


def test_names_of_partitions_cannot_be_made_to_collide():
    """A batch must not be booked into another partition, or into the whole, by a clever name."""
    book = ledger(Budget(19.0, DELTA))
    names = ["", "a", "a/3", "/", "a/3/0"]
    for name in names:
        book.charge(Event(DisjointBatches(3, 0, name), 3.0), ALL)
    book.charge(Event(FullBatch(), 3.0), ALL)
    assert book.epsilon() == pytest.approx(
        np.full((1, 3), gdp_epsilon(math.sqrt(len(names) + 1) / 3, DELTA))
    )


# --- other rules ---------------------------------------------------------------------------------


def test_the_gdp_rule_refuses_to_price_random_batches():
    for sampling in (Poisson(0.1), WithoutReplacement(0.1)):
        with pytest.raises(Refused, match="rule"):
            ledger().charge(Event(sampling, 3.0), ALL)


def test_the_renyi_rule_prices_any_mix_and_a_batch_costs_less_than_the_whole():
    book = ledger(Budget(9.0, DELTA), Renyi(6.0))
    spent = [0.0]
    for sampling in (Poisson(0.1), WithoutReplacement(0.1), DisjointBatches(10, 3), FullBatch()):
        book.charge(Event(sampling, 2.0), ALL)
        spent.append(float(book.epsilon()[0, 0]))
    costs = np.diff(spent)
    assert (np.diff(spent) > 0).all()
    assert (costs[1:3] < costs[3] * 1.0001).all()


def test_a_committed_schedule_is_all_that_may_be_asked():
    events = (Event(FullBatch(), 10.0, 3), Event(FullBatch(), 20.0, 2))
    book = ledger(Budget(1.0, DELTA), Committed(events))
    for _ in range(3):
        book.charge(Event(FullBatch(), 10.0), ALL)
    with pytest.raises(Refused, match="budget"):
        book.charge(Event(FullBatch(), 10.0), ALL)
    book.charge(Event(FullBatch(), 20.0, 2), ALL)
    with pytest.raises(Refused, match="rule"):
        book.charge(Event(FullBatch(), 11.0), ALL)
    assert book.epsilon() == pytest.approx(
        np.full((1, 3), gdp_epsilon(math.sqrt(3 / 100 + 2 / 400), DELTA))
    )


def test_a_schedule_that_does_not_fit_the_budget_allows_nothing_at_all():
    book = ledger(Budget(0.1, DELTA), Committed((Event(FullBatch(), 1.0, 3),)))
    with pytest.raises(Refused, match="budget"):
        book.charge(Event(FullBatch(), 1.0), ALL)
