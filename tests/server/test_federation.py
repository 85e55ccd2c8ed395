"""Who takes part in a round, and what the port makes of their releases."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.server.federation import Balanced, Everyone, Federation, Fixed, Uniform
from silodp.testing.federation import check_federation, simulated_federation

FALSE_ALARM = 1e-6


def test_the_simulation_passes_the_conformance_suite():
    check_federation(simulated_federation)


class Weighted(Federation):
    """A mean that weighs silos by their size."""

    def mean(self, query):
        members = self._participation.draw()
        weight = torch.tensor([float(1 + m) for m in members])
        return (self._channel.ask(query, members).value * weight[None, :, None]).sum(
            1
        ) / weight.sum()


class Restless(Federation):
    """A cohort that is drawn anew at every question."""

    def cohort(self):
        return self


@pytest.mark.parametrize(
    ("kind", "message"), [(Weighted, "weight 1/M|differs"), (Restless, "is not that of silos")]
)
def test_the_suite_catches_a_federation_that_weighs_or_redraws(kind, message):
    def make(problem, records, participation):
        honest = simulated_federation(problem, records, participation)
        return kind(honest._channel, participation)

    with pytest.raises(AssertionError, match=message):
        check_federation(make)


class Echo:
    """A channel whose silo i answers i, in a release that is never made by a gate."""

    def __init__(self):
        self.asked = []

    def ask(self, query, silos):
        self.asked.append(tuple(silos))
        value = torch.tensor([float(s) for s in silos])[None, :, None].expand(1, -1, 2)
        return type("Answer", (), {"value": value, "silos": tuple(silos)})()


QUERY = Query(Grad(torch.zeros(1, 2)), Gaussian("check", 1.0, 1.0))


def test_a_mean_weighs_the_answering_silos_alike():
    channel = Echo()
    assert Federation(channel, Fixed((1, 4, 7))).mean(QUERY).tolist() == [[4.0, 4.0]]
    assert channel.asked == [(1, 4, 7)]


def test_a_cohort_keeps_its_silos_while_the_federation_goes_on():
    channel = Echo()
    fed = Federation(channel, Uniform(10, 3, seed=0))
    cohort = fed.cohort()
    for _ in range(4):
        cohort.mean(QUERY)
        fed.mean(QUERY)
    assert len(set(channel.asked[::2])) == 1
    assert len(set(channel.asked[1::2])) > 1
    assert cohort.cohort()._participation.draw() == channel.asked[0]


# --- participation -------------------------------------------------------------------------------


def test_everyone_takes_part_in_every_round_and_is_charged_for_it():
    assert Everyone(4).draw() == Everyone(4).rehearsal().draw() == (0, 1, 2, 3)


def assert_alike(hits, rounds, rate):
    """Each silo takes part in a share `rate` of rounds: a two-sided binomial test at a false-alarm
    rate of 1e-6 in all.
    """
    low, high = stats.binom.interval(1 - FALSE_ALARM / len(hits), rounds, rate)
    assert (low <= hits).all()
    assert (hits <= high).all()


def test_uniform_draws_m_distinct_silos_each_as_likely_as_any_other():
    who = Uniform(7, 3, seed=1)
    draws = [who.draw() for _ in range(2000)]
    assert all(len(set(d)) == 3 and set(d) <= set(range(7)) for d in draws)
    assert_alike(np.bincount(np.concatenate(draws), minlength=7), 2000, 3 / 7)
    pairs = np.zeros((7, 7))
    for d in draws:
        pairs[np.ix_(d, d)] += 1
    assert_alike(pairs[np.triu_indices(7, 1)], 2000, 3 / 7 * 2 / 6)


def test_random_m_is_uniform_between_its_ends():
    who = Uniform(7, 5, seed=2, least=2)
    sizes = np.bincount([len(who.draw()) for _ in range(2000)], minlength=6)
    assert sizes[:2].sum() == 0
    assert stats.chisquare(sizes[2:]).pvalue > FALSE_ALARM


def test_a_dry_run_charges_everyone_where_availability_is_unknown():
    assert (
        Uniform(7, 3, seed=0).rehearsal().draw()
        == Uniform(7, 3, seed=0, least=1).rehearsal().draw()
        == tuple(range(7))
    )


def test_seeds_make_participation_repeatable_and_different_ones_differ():
    for kind in (Uniform, Balanced):
        same = [
            [who.draw() for _ in range(10)]
            for who in (kind(9, 4, seed=3), kind(9, 4, seed=3), kind(9, 4, seed=4))
        ]
        assert same[0] == same[1] != same[2]


@given(
    silos=st.integers(1, 30), data=st.data(), rounds=st.integers(1, 60), seed=st.integers(0, 10**6)
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_no_balanced_silo_answers_more_often_than_its_share_at_any_time(silos, data, rounds, seed):
    answering = data.draw(st.integers(1, silos))
    who = Balanced(silos, answering, seed=seed)
    times = np.zeros(silos, int)
    for r in range(rounds):
        hand = who.draw()
        assert len(set(hand)) == len(hand) == answering
        times[list(hand)] += 1
        assert times.max() <= math.ceil((r + 1) * answering / silos)
        assert times.min() >= (r + 1) * answering // silos


def test_each_balanced_silo_is_as_likely_as_any_other():
    first = [Balanced(7, 3, seed=s).draw() for s in range(2000)]
    assert_alike(np.bincount(np.concatenate(first), minlength=7), 2000, 3 / 7)
    third = []
    for s in range(2000):
        who = Balanced(7, 3, seed=s)
        third.append([who.draw() for _ in range(3)][2])
    assert_alike(np.bincount(np.concatenate(third), minlength=7), 2000, 3 / 7)


def test_a_balanced_order_is_planned_as_it_is_drawn():
    who = Balanced(8, 3, seed=5)
    drawn = [who.draw() for _ in range(20)]
    for _ in range(2):
        plan = who.rehearsal()
        assert [plan.draw() for _ in range(20)] == drawn, (
            "a dry run starts at the first round, however often and whenever it is made"
        )


@pytest.mark.parametrize("answering", [0, -1, 8])
@pytest.mark.parametrize("kind", [Uniform, Balanced])
def test_more_silos_than_there_are_cannot_take_part_and_neither_can_none(kind, answering):
    with pytest.raises(
        BadInput, match=f"{answering} of 7 silos cannot take part; choose between 1 and 7"
    ):
        kind(7, answering, seed=0)


def test_a_least_number_above_the_most_is_refused():
    with pytest.raises(BadInput, match="cannot take part"):
        Uniform(7, 3, seed=0, least=4)
