"""Every known mistake with masks is caught by its probe, and the shipped masker passes them all."""

import pytest

from mistakes import mutants
from silodp.audit import bounds, report
from silodp.audit.masked import COHORT, COLLUDING, as_masked, attack_masked, priced
from silodp.audit.pipeline import SOUND, Caught
from silodp.audit.probes_masked import MASKED
from silodp.audit.transcript import Case
from silodp.core.privacy.accounting import gdp_mu

CAUGHT_BY = {
    "mask reused between queries": "masks",
    "numbers without masks": "masks",
    "cohort not checked": "tables",
    "unpinned key accepted": "tables",
    "unsigned key accepted": "tables",
    "noise of absent silos counted": "tables",
    "noise of colluding silos counted": "tables",
    "own records not checked": "tables",
    "same numbers under two cohorts": "two cohorts",
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


def test_server_and_colluding_silos_learn_what_the_others_noise_allows_which_is_the_claim():
    case = Case("mb-sgd", 6.0, {"rounds": 1})
    mechanism = as_masked(priced(case, SOUND))
    assert mechanism.counted == COHORT - COLLUDING
    mu, error = bounds.gdp_fit(*attack_masked(case, 1500))
    assert abs(mu - gdp_mu(case.budget)) < 5 * error
    assert {case.epsilon for case, gate in report.cases() if gate == "deployed masks"} == set(
        report.TOTAL_CLAIMS
    )
