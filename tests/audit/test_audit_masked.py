"""Every known mistake with masks is caught by its probe, and the shipped masker passes them all."""

import math

import numpy as np
import pytest

from mistakes import mutants
from silodp.audit import bounds, report
from silodp.audit.canary import RECORDS
from silodp.audit.masked import COHORT, COLLUDING, as_masked, attack_masked, priced
from silodp.audit.pipeline import SOUND, Caught
from silodp.audit.probes_masked import MASKED
from silodp.audit.transcript import Case
from silodp.core.privacy.accounting import gdp_epsilon

CAUGHT_BY = {
    "mask reused between queries": "masks",
    "counts without masks": "masks",
    "cohort not checked": "tables",
    "unpinned key accepted": "tables",
    "unsigned key accepted": "tables",
    "noise of absent silos counted": "tables",
    "noise of colluding silos counted": "tables",
    "own noise not checked": "tables",
    "same counts under two cohorts": "two cohorts",
    "wrap-around not checked": "tables",
    "keys that outlive a restart": "masks",
    "keys that outlive their answer": "masks",
    "attempts without end": "two cohorts",
}


def test_every_mistake_with_masks_has_the_probe_that_catches_it():
    assert mutants.OF_MASKS.keys() == CAUGHT_BY.keys()


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_planted_mistake_with_masks_is_caught(name, folder):
    with pytest.raises(Caught):
        MASKED[CAUGHT_BY[name]](mutants.MUTANTS[name], 0, folder)


@pytest.mark.parametrize(
    "probe", ["tables", "masks", "two cohorts"]
)  # the attack, below and in test_audit
def test_the_shipped_masker_is_caught_by_none(probe, folder):
    MASKED[probe](SOUND, 0, folder)


@pytest.mark.parametrize(
    "name", ["noise of absent silos counted", "noise of colluding silos counted"]
)
def test_noise_that_colluders_take_out_again_is_seen_by_what_they_learn(name, folder):
    """Not the check is looked at, but what the answers give away."""
    with pytest.raises(Caught, match="server and colluding silos tell neighbours apart"):
        MASKED["what colluding silos learn"](mutants.MUTANTS[name], 0, folder)


def test_server_and_colluding_silos_learn_what_the_others_noise_allows_and_less_than_the_claim():
    case = Case("mb-sgd", 6.0, {"rounds": 1})
    mechanism, honest = as_masked(priced(case, SOUND)), (COHORT - COLLUDING) * RECORDS
    assert mechanism.contributions == honest
    mu, error = bounds.gdp_fit(*attack_masked(case, 400))
    most = mechanism.levels / math.sqrt(honest * mechanism.noise_bits / 4)
    assert 0.97 * most - 5 * error < mu < most + 5 * error
    assert 0.85 * case.epsilon < gdp_epsilon(most, case.delta) < case.epsilon
    assert {case.epsilon for case, gate in report.cases() if gate == "deployed masks"} == set(
        report.CLAIMS
    )


def test_masked_totals_are_attacked_often_enough_to_see_a_claim_of_6_that_is_too_small_and_say_where_they_are_not(  # noqa: E501
    monkeypatch,
):
    """By normal scores as far apart as an attack on these very gates found them; at half as much
    again, as far as the plan's noise makes it.
    """
    apart = {6.0: 1.21, 9.0: 1.74, 1.0: 0.276, 1.5: 0.40}

    def scores(case, gate, runs, seed):
        drawn = np.random.default_rng(seed).normal(size=(2, runs))
        return drawn[0] - apart[case.epsilon] / 2, drawn[1] + apart[case.epsilon] / 2

    monkeypatch.setattr(report, "_scores", scores)
    for claim, runs, sees in ((6.0, 30_000, True), (1.0, 5_000, False)):
        (case,) = (case for case, gate in report.cases(None, (claim,)) if gate == "deployed masks")
        row = report.row_of(case, "deployed masks", 20_000, 0)
        assert (row["runs"], row["sees"], row["alarm"]) == (runs, sees, False)
