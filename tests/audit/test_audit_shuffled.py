"""The audit of a shuffle reaches what its noise allows and not the claim, every known mistake is
caught, and the shipped parts pass.

False-alarm rates as in test_audit: 6e-7 for each attack row (5 standard errors), 1e-6 for each
statistical probe. The deployed silos' coins are the operating system's, so those rates are of every
run of this file.
"""

import math

import pytest

from mistakes import mutants
from silodp.audit import bounds, report
from silodp.audit.canary import RECORDS, canary_problem
from silodp.audit.pipeline import SOUND, Caught
from silodp.audit.probes_shuffled import SHUFFLED_DEPLOYMENT, SHUFFLED_SIMULATION
from silodp.audit.shuffled import SILOS, attack_counts, attack_totals, plan_of
from silodp.audit.transcript import Case
from silodp.core.mechanisms import shuffle
from silodp.core.privacy.accounting import gdp_epsilon
from silodp.core.privacy.totals import Schedule
from silodp.core.sampling import DisjointBatches

COUNTS = (RECORDS,) * SILOS


def separation(mechanism, records: int, *, rounding: float = 1 / 4) -> float:
    """mu of a Gaussian as wide as the coins of so many records and their rounding, for a record
    that moves by all g levels.
    """
    return mechanism.levels / math.sqrt(
        records * (mechanism.noise_bits * mechanism.p * (1 - mechanism.p) + rounding)
    )


def error_of(mu: float, runs: int) -> float:
    return math.sqrt(2 / runs + mu * mu / (4 * runs))


# --- the attack ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "epsilon"),
    [("prox-sgd", 6.0), ("prox-svrg", 6.0), ("spider", 6.0), ("spider", 1.0)],
)
def test_the_server_of_a_shuffle_learns_what_the_noise_allows_and_less_than_the_claim(
    algorithm, epsilon
):
    case = Case(algorithm, epsilon, report.SETTINGS[algorithm], gap=report.COINS)
    plan = plan_of(case, COUNTS, SOUND)
    disjoint = isinstance(case.batches, DisjointBatches)
    square = sum(
        (1 if disjoint else plan.count(kind, 0)) * separation(m, m.contributions) ** 2
        for kind, m in plan.mechanisms.items()
    )
    row = report.row_of(case, "shuffle", 1000, seed=0)
    assert abs(row["mu"] - math.sqrt(square)) < 5 * error_of(row["mu"], 1000)
    assert (
        0.75 * epsilon < gdp_epsilon(math.sqrt(square), case.delta) < epsilon
    )  # the gap is what proofs cost, and no more
    assert not row["alarm"]


def test_totals_of_deployed_silos_give_away_what_their_coins_allow_and_less_than_the_claim():
    case = Case("mb-sgd", 6.0, {"rounds": 1})
    mechanism = plan_of(case, COUNTS, SOUND).mechanisms["minibatch"]
    mu, error = bounds.gdp_fit(*attack_totals(case, 600))
    most, least = separation(mechanism, sum(COUNTS), rounding=0), separation(mechanism, sum(COUNTS))
    assert least - 5 * error < mu < most + 5 * error
    assert 0.85 * case.epsilon < gdp_epsilon(most, case.delta) < case.epsilon


def test_the_shuffler_learns_from_one_silos_counts_what_its_own_coins_allow_and_less_than_its_local_epsilon():  # noqa: E501
    case = Case("mb-sgd", 6.0, {"rounds": 1})
    coins = shuffle.numerical(RECORDS, canary_problem().dim, 6.0, case.delta)
    mu, error = bounds.gdp_fit(*attack_counts(case, 600))
    most = coins.levels / math.sqrt(RECORDS * coins.noise_bits / 4)
    assert 0.9 * most - 5 * error < mu < most + 5 * error
    assert 0.85 * case.epsilon < gdp_epsilon(most, case.delta) < case.epsilon


def test_one_silos_counts_tell_the_shuffler_more_than_the_totals_tell_the_server_as_its_ledger_says():  # noqa: E501
    case = Case("mb-sgd", 1.0, {"rounds": 1})
    mechanism = plan_of(case, COUNTS, SOUND).mechanisms["minibatch"]
    made = Schedule()
    made.add("", mechanism.event(1, canary_problem().dim), RECORDS)
    local = made.epsilon(case.delta)
    assert gdp_epsilon(separation(mechanism, sum(COUNTS)), case.delta) < case.epsilon
    assert case.epsilon < gdp_epsilon(separation(mechanism, RECORDS), case.delta) < local


def test_every_claim_has_rows_of_totals_and_of_one_silos_counts():
    rows = report.cases()
    for gate in ("shuffle", "deployed shuffle", "deployed counts"):
        assert {case.epsilon for case, found in rows if found == gate} == set(report.CLAIMS)
        assert all(case.gap for case, found in rows if found == gate)
    assert {
        report.special_of({"gate": gate, "gap": "", "sampling": "full"}) for _, gate in rows
    } == {view for view, _ in report.ATTACKS.values()}


# --- mutants -------------------------------------------------------------------------------------

CAUGHT_BY = {
    "levels over half the range": "estimate from totals",
    "coordinates clipped after rounding": "totals of deployed silos",
    "rounding to nearest": "estimate from totals",
    "noise bits for a silo": "estimate from totals",
    "the same coins in two rounds": "sealed reply",
    "box that demands nothing": "sealed reply",
    "retry with a fresh box": "sealed reply",
    "counts in the open": "sealed reply",
    "shares of rounds not added up": "shares of rounds",
    "pseudonym that counts twice": "boxes that count",
    "total of too few": "boxes that count",
    "counts passed on unsummed": "boxes that count",
    "round passed on again": "one total for a round",
    "noise's mean subtracted once": "estimate from totals",
    "sum centred once": "estimate from totals",
    "anchors noised as printed": "server's view of a shuffle",
}
PROBES = SHUFFLED_SIMULATION | SHUFFLED_DEPLOYMENT


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_every_mistake_of_a_shuffle_is_caught_by_the_probe_that_is_made_for_it(name, folder):
    with pytest.raises(Caught):
        PROBES[CAUGHT_BY[name]](mutants.OF_A_SHUFFLE[name], 0, folder)


@pytest.mark.parametrize("name", ["total of too few", "counts passed on unsummed"])
def test_the_simulated_shuffler_has_the_same_mistakes_caught(name, folder):
    with pytest.raises(Caught):
        PROBES["one total of enough records"](mutants.OF_A_SHUFFLE[name], 0, folder)


def test_there_are_sixteen_mistakes_of_a_shuffle_and_every_probe_is_needed():
    assert len(mutants.OF_A_SHUFFLE) == 16
    assert mutants.OF_A_SHUFFLE.keys() == CAUGHT_BY.keys()
    assert {*CAUGHT_BY.values(), "one total of enough records"} == set(PROBES)
