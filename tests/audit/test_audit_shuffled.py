"""The audit of totals reaches what their noise allows, which is the claim, every known mistake is
caught, and the shipped parts pass.

False-alarm rates as in test_audit: 6e-7 for each attack row (5 standard errors), 1e-6 for each
statistical probe. The deployed silos' noise is the operating system's, so those rates are of every
run of this file.
"""

import math

import numpy as np
import pytest

from mistakes import mutants
from silodp.audit import bounds, report
from silodp.audit.canary import RECORDS
from silodp.audit.pipeline import SOUND, Caught
from silodp.audit.probes_shuffled import SHUFFLED_DEPLOYMENT, SHUFFLED_SIMULATION
from silodp.audit.shuffled import SILOS, attack_numbers, attack_totals, plan_of
from silodp.audit.transcript import Case
from silodp.core.privacy.accounting import gdp_epsilon, gdp_mu

COUNTS = (RECORDS,) * SILOS


# --- the attack ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "epsilon"),
    [("prox-sgd", 6.0), ("prox-svrg", 6.0), ("spider", 6.0), ("spider", 1.0)],
)
def test_the_server_of_a_shuffle_learns_what_the_noise_allows_which_is_the_claim(
    algorithm, epsilon
):
    case = Case(algorithm, epsilon, report.SETTINGS[algorithm])
    row = report.row_of(case, "shuffle", 1000, seed=0)
    error = math.sqrt(2 / 1000 + row["mu"] ** 2 / 4000)
    assert row["mu"] < gdp_mu(case.budget) + 5 * error
    assert row["mu"] > 0.9 * gdp_mu(case.budget) - 5 * error
    assert not row["alarm"]


def test_totals_of_deployed_silos_give_away_what_their_noise_allows_which_is_the_claim():
    case = Case("mb-sgd", 6.0, {"rounds": 1})
    mu, error = bounds.gdp_fit(*attack_totals(case, 1500))
    assert abs(mu - gdp_mu(case.budget)) < 5 * error


def test_the_shuffler_learns_from_one_silos_numbers_what_its_own_share_allows():
    case = Case("mb-sgd", 6.0, {"rounds": 1})
    mu, error = bounds.gdp_fit(*attack_numbers(case, 1500))
    assert abs(mu - gdp_mu(case.budget)) < 5 * error


def test_one_silos_numbers_tell_the_shuffler_more_than_the_totals_tell_the_server():
    case = Case("mb-sgd", 1.0, {"rounds": 1})
    event = plan_of(case, COUNTS, SOUND).mechanisms["minibatch"].event()
    assert gdp_epsilon(1 / event.multiplier, case.delta) == pytest.approx(case.epsilon, rel=1e-6)
    local = gdp_epsilon(1 / event.alone().multiplier, case.delta)
    assert local == pytest.approx(gdp_epsilon(math.sqrt(SILOS) / event.multiplier, case.delta))
    assert local > 1.7 * case.epsilon


@pytest.mark.parametrize("gate", report.TOTALS)
def test_a_row_of_totals_sees_a_claim_that_is_too_small_by_a_fifth(monkeypatch, gate):
    """By normal scores as far apart as the exact price says."""

    def scores(case, gate, runs, seed):
        drawn = np.random.default_rng(seed).normal(size=(2, runs))
        apart = gdp_mu(case.budget)
        return drawn[0] - apart / 2, drawn[1] + apart / 2

    monkeypatch.setattr(report, "_scores", scores)
    for claim, runs in ((1.0, 60_000), (3.0, 10_000), (6.0, 5_000)):
        (case, *_) = (c for c, found in report.cases() if found == gate and c.epsilon == claim)
        row = report.row_of(case, gate, runs, 0)
        assert (row["sees"], row["alarm"]) == (True, False)


def test_every_claim_has_rows_of_totals_and_of_one_silos_numbers():
    rows = report.cases()
    for gate in report.TOTALS:
        assert {case.epsilon for case, found in rows if found == gate} == set(report.TOTAL_CLAIMS)
    assert {
        report.special_of({"gate": gate, "gap": "", "sampling": "full"}) for _, gate in rows
    } == {view for view, _ in report.ATTACKS.values()}


# --- mutants -------------------------------------------------------------------------------------

CAUGHT_BY = {
    "coordinates clipped by themselves": "totals of deployed silos",
    "share left out": "estimate from totals",
    "share divided twice": "estimate from totals",
    "the same share of noise in two rounds": "sealed reply",
    "box that demands nothing": "sealed reply",
    "retry with a fresh box": "sealed reply",
    "numbers in the open": "sealed reply",
    "rounds not added up": "price of rounds",
    "pseudonym that counts twice": "boxes that count",
    "total of too few": "boxes that count",
    "numbers passed on unsummed": "boxes that count",
    "round passed on again": "one total for a round",
    "anchors noised as printed": "server's view of a shuffle",
    "share of a sum of deviations": "server's view of a shuffle",
}
PROBES = SHUFFLED_SIMULATION | SHUFFLED_DEPLOYMENT


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_every_mistake_of_a_shuffle_is_caught_by_the_probe_that_is_made_for_it(name, folder):
    with pytest.raises(Caught):
        PROBES[CAUGHT_BY[name]](mutants.OF_A_SHUFFLE[name], 0, folder)


@pytest.mark.parametrize("name", ["total of too few", "numbers passed on unsummed"])
def test_the_simulated_shuffler_has_the_same_mistakes_caught(name, folder):
    with pytest.raises(Caught):
        PROBES["one total of enough silos"](mutants.OF_A_SHUFFLE[name], 0, folder)


def test_there_are_fourteen_mistakes_of_a_shuffle_and_every_probe_is_needed():
    assert len(mutants.OF_A_SHUFFLE) == 14
    assert mutants.OF_A_SHUFFLE.keys() == CAUGHT_BY.keys()
    assert {*CAUGHT_BY.values(), "one total of enough silos"} == set(PROBES)
