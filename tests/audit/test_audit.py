"""The audit reaches the claims and not more, every known mistake is caught, and the pipeline as
shipped passes.

False-alarm rates, over the choice of seeds: 6e-7 for each attack row (5 standard errors), 1e-6 for
each statistical probe. Seeds are fixed; the deployed gate's noise is from the operating system, and
what is asserted of it holds with probability 1 or fails as rarely as stated.
"""

import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from mistakes import mutants
from silodp.audit import bounds, onerun, report, report_answers
from silodp.audit.pipeline import SOUND, Caught
from silodp.audit.probes_silo import DEPLOYMENT, SIMULATION
from silodp.audit.transcript import Case, attack, attack_deployed
from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget, gdp_epsilon, gdp_mu
from silodp.core.sampling import Poisson
from silodp.server.algorithms import ALGORITHMS

LONG = bool(os.environ.get("SILODP_LONG"))


# --- formulas ------------------------------------------------------------------------------------


def test_clopper_pearson_has_its_textbook_values():
    assert bounds.upper(0, 10, 0.05) == pytest.approx(1 - 0.05**0.1)  # the rule of three, exactly
    assert bounds.upper(10, 10, 0.05) == 1.0
    assert stats.binom.cdf(3, 20, bounds.upper(3, 20, 0.025)) == pytest.approx(0.025)


@pytest.mark.parametrize("mu", [0.3, 1.5])
def test_a_gaussian_fit_finds_the_separation_and_its_error(mu):
    """Over 300 repetitions the standardised error has mean 0 and variance 1, within 5 standard
    errors.
    """
    random = np.random.default_rng(1)
    fits = [
        bounds.gdp_fit(random.normal(-mu * mu / 2, mu, 400), random.normal(mu * mu / 2, mu, 300))
        for _ in range(300)
    ]
    z = np.array([(m - mu) / e for m, e in fits])
    assert abs(z.mean()) < 5 / math.sqrt(300)
    assert 0.65 < z.var() < 1.5


def test_threshold_bounds_are_below_the_truth_as_often_as_they_say():
    """At level 0.05 at most 5 % of 400 bounds may be above the truth; 40 would have probability
    4e-6.
    """
    random = np.random.default_rng(2)
    mu = 1.0
    epsilon = gdp_epsilon(mu, 0.01)
    above_mu = above_epsilon = 0
    for _ in range(400):
        first, second = random.normal(-mu / 2, 1, 200), random.normal(mu / 2, 1, 200)
        above_mu += bounds.gdp_lower(first, second, 0.05) > mu
        above_epsilon += bounds.epsilon_lower(first, second, 0.01, 0.05) > epsilon
    assert above_mu < 40
    assert above_epsilon < 40


def test_threshold_bounds_come_near_the_truth_with_many_runs():
    random = np.random.default_rng(3)
    first, second = random.normal(-0.5, 1, 10**6), random.normal(0.5, 1, 10**6)
    assert 0.99 < bounds.gdp_lower(first, second, 0.05) < 1.0
    assert (
        0.8 * gdp_epsilon(1.0, 0.05)
        < bounds.epsilon_lower(first, second, 0.05, 0.05)
        < gdp_epsilon(1.0, 0.05)
    )


def test_bounds_survive_scores_that_tell_everything_or_nothing():
    zero, far = np.zeros(50), np.full(50, 1e6)
    assert bounds.gdp_fit(zero, far)[0] == bounds.MOST
    assert bounds.gdp_fit(zero, zero)[0] == 0
    assert bounds.gdp_lower(zero, zero, 0.05) == bounds.gdp_lower(far, zero, 0.05) == 0
    assert math.isfinite(bounds.epsilon_of(bounds.MOST, 1e-5))


@pytest.mark.parametrize(
    ("m", "r", "v", "epsilon", "delta"),
    [(20, 12, 11, 0.7, 0.0), (50, 50, 40, 1.0, 1e-3), (8, 5, 0, 0.5, 0.1), (9, 9, 9, 2.0, 1e-5)],
)
def test_the_one_run_tail_is_that_of_the_paper(m, r, v, epsilon, delta):
    """Against the loop of the paper's appendix, with binomials summed term by term."""
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    pmf = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    alpha = total = 0.0
    for i in range(1, v + 1):
        total += pmf[v - i]
        alpha = max(alpha, total / i)
    wanted = min(1.0, sum(pmf[v:]) + alpha * delta * 2 * m)
    assert bounds.one_run_p_value(m, r, v, epsilon, delta) == pytest.approx(wanted, rel=1e-9)


def test_the_one_run_bound_of_a_hundred_right_guesses_is_that_of_the_binomial():
    q = 0.05 ** (1 / 100)
    assert bounds.one_run_epsilon(100, 100, 100, 0.0, 0.05) == pytest.approx(
        math.log(q / (1 - q)), rel=1e-4
    )
    assert bounds.one_run_epsilon(100, 100, 50, 1e-5, 0.05) == 0
    with pytest.raises(ValueError, match="impossible"):
        bounds.one_run_p_value(10, 11, 3, 1.0, 0.0)


# --- the transcript attack -----------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", report.CLAIMS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_attack_reaches_the_claim_of_every_algorithm_and_no_more(algorithm, epsilon):
    row = report.row_of(
        Case(algorithm, epsilon, report.SETTINGS[algorithm]), "simulated", 1500, seed=0
    )
    error = math.sqrt(2 / 1500 + row["mu"] ** 2 / 6000)
    assert abs(row["mu"] - row["claimed_mu"]) < 5 * error
    assert not row["alarm"]
    assert row["lower_bound"] < row["fit_interval"][1]
    assert row["fit_interval"][0] < row["empirical_epsilon"] < row["fit_interval"][1]
    if epsilon == 6:
        assert row["empirical_epsilon"] >= 0.8 * epsilon  # 6 standard errors away


def test_the_attack_on_secret_batches_stays_below_the_claim():
    case = Case("mb-sgd", 3.0, {"rounds": 2}, Poisson(0.5), rule="renyi")
    first, second = attack(case, 1500)
    mu, error = bounds.gdp_fit(first, second)
    assert 0.3 * gdp_mu(case.budget) < mu < gdp_mu(case.budget) + 5 * error
    assert bounds.epsilon_lower(first, second, case.delta, 1e-6) <= case.epsilon


def test_the_attack_on_the_deployed_arithmetic_reaches_the_claim_and_no_more():
    first, second = attack_deployed(Case("mb-sgd", 6.0, {"rounds": 1}), 1500)
    mu, error = bounds.gdp_fit(first, second)
    assert abs(mu - gdp_mu(Budget(6.0, 1e-5))) < 5 * error


def test_every_row_has_seeds_of_its_own_and_every_algorithm_a_row():
    rows = report.cases()
    assert {case.algorithm for case, _ in rows} == set(ALGORITHMS)
    assert {case.epsilon for case, _ in rows} == {1.0, 3.0, 6.0}
    assert all(case.gap for case, _ in rows if case.sampling is not None)
    with pytest.raises(BadInput, match="unknown"):
        report.cases(["sgd"])


# --- mutants -------------------------------------------------------------------------------------

CAUGHT_BY = {
    "per-layer clipping": "transcript attack",
    "noise for half the sensitivity": "transcript attack",
    "noise only on anchors": "transcript attack",
    "the same noise in two rounds": "noise size and correlation",
    "noise shared between silos": "noise size and correlation",
    "seed from the server": "twin silos",
    "sampling with replacement accounted as without": "batch membership",
    "ledger reset on restart": "restarts and old copies",
    "answer before charge": "charge on disk before records",
    "retry with fresh noise": "retries",
    "data-dependent clip": "noise size and correlation",
    "raw loss in the reply": "bare reply",
    "anchors and differences each given the whole exact budget": "transcript attack",
    "NaN that passes the clip": "hostile records",
    "difference norms by the cancelling formula": "hostile records",
    "float noise without lattice": "public lattice",
    "clips rows, not persons": "persons",
    "clips rows, not persons, at the gate": "persons at the gate",
}


def test_there_are_eighteen_mutants_of_a_silo():
    assert len(mutants.OF_A_SILO) == 18
    assert mutants.OF_A_SILO.keys() == CAUGHT_BY.keys()
    assert (
        len(mutants.MUTANTS)
        == 18
        + len(mutants.OF_A_SHUFFLE)
        + len(mutants.OF_MASKS)
        + len(mutants.OF_ANSWERS)
        + len(mutants.OF_PRICES)
        == 164
    )


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_every_mutant_is_caught_by_the_probe_that_is_made_for_it(name, folder):
    with pytest.raises(Caught):
        (SIMULATION | DEPLOYMENT)[CAUGHT_BY[name]](mutants.MUTANTS[name], 0, folder)


def test_what_the_examiner_reports_is_what_the_probes_say():
    found = mutants.examine("retry with fresh noise", seed=0)
    assert found == {"retries": "the same query asked again gets another answer"}


@pytest.mark.parametrize("seed", range(20 if LONG else 1))
def test_the_pipeline_as_shipped_passes_every_probe(seed):
    probes = [
        name
        for name in mutants.probes_of(None)
        if LONG or name not in mutants.ANSWERS | mutants.BATCHES | mutants.PRICES
    ]  # in test_audit_answers and test_audit_prices
    assert mutants.examine(None, seed * 10_000, probes=probes) == {}


def test_a_probe_that_alarms_on_the_shipped_pipeline_does_not_count(monkeypatch):
    monkeypatch.setattr(mutants, "spread", lambda work, tasks, **_: (work(*task) for task in tasks))
    monkeypatch.setattr(
        mutants,
        "examine",
        lambda name, seed, ignored=(), probes=None: {} if ignored else {"broken": "always"},
    )
    rows, shipped = mutants.examine_all()
    assert shipped == {"broken": "always"}
    assert not any(row["caught"] for row in rows)


def impossible(output: float, mean: float) -> bool:
    """Whether no float whatever gives `output` when it is added to `mean` in float64: such an
    output rules this mean out for certain.
    """
    near = output - mean
    return all(
        mean + noise != output
        for noise in (math.nextafter(near, -math.inf), near, math.nextafter(near, math.inf))
    )


def test_float_noise_has_outputs_that_only_one_neighbour_can_give_and_lattice_noise_has_none():
    """Mironov 2012 in float64: sums 0 and 1 under the same noise. A lattice of step 2^-16 has one
    support for both.
    """
    noise = np.random.default_rng(4).normal(0, 2, 1000)
    assert not any(impossible(0.0 + z, 0.0) for z in noise)
    assert sum(impossible(0.0 + z, 1.0) for z in noise) > 100
    whole = np.round(noise * 2**16) / 2**16
    assert not any(impossible(0.0 + z, 1.0) for z in whole)


# --- one run -------------------------------------------------------------------------------------


def few(epsilon, algorithm="mb-sgd", **more):
    settings = {
        "mb-sgd": {"rounds": 3},
        "prox-sgd": {"rounds": 3},
        "spider": {"rounds": 4, "phase": 2, "slope": 1.0},
        "local-sgd": {"rounds": 2, "local_steps": 2},
    }
    return onerun.OneRun(algorithm, settings[algorithm], epsilon, canaries=200, **more)


@pytest.fixture(scope="module")
def wbcd():
    return onerun.own_records("wbcd", None, "label")


@pytest.mark.parametrize("algorithm", ["mb-sgd", "prox-sgd", "spider", "local-sgd"])
def test_one_run_never_refutes_a_sound_claim(wbcd, algorithm):
    row = onerun.one_run(few(2.0, algorithm), *wbcd)
    assert row["empirical_epsilon"] <= 2.0
    assert not row["alarm"]


def test_one_run_shows_something_at_a_large_claim_also_through_shared_layers(wbcd):
    for model in ("logistic", "mlp:4"):
        row = onerun.one_run(few(18.0, model=model, guesses=200), *wbcd)
        assert 1.0 < row["empirical_epsilon"] <= 18.0


def test_one_run_refutes_a_claim_with_twenty_times_too_little_noise(wbcd):
    def quiet(*words, **more):
        plan = SOUND.calibrate(*words, **more)
        return replace(
            plan,
            mechanisms={
                k: replace(g, noise_multiplier=g.noise_multiplier / 20)
                for k, g in plan.mechanisms.items()
            },
        )

    class Lenient(SOUND.ledger):
        def charge(self, event, silos):
            pass

    row = onerun.one_run(
        few(1.0, guesses=100), *wbcd, pipeline=replace(SOUND, calibrate=quiet, ledger=Lenient)
    )
    assert row["empirical_epsilon"] > 1.0
    assert row["alarm"]


# --- the command ---------------------------------------------------------------------------------


def test_audit_prints_rows_and_fills_a_run_folder(silodp, tmp_path):
    code, out, _ = silodp(
        "audit", "--algorithm", "momentum", "--epsilon", 6, "--runs", 300, "--json"
    )
    (row,) = json.loads(out)["rows"]
    assert code == 0
    assert row.keys() >= {
        "algorithm",
        "claimed_epsilon",
        "empirical_epsilon",
        "confidence",
        "runs",
        "lower_bound",
    }
    assert row["runs"] == 300
    for name in (
        "audit.csv",
        "curves.csv",
        "audit.json",
        "audit.png",
        "audit.svg",
        "environment.json",
    ):
        assert (tmp_path / "runs" / "audit" / name).stat().st_size > 0
    assert (
        "momentum" in silodp("audit", "--algorithm", "momentum", "--epsilon", 6, "--runs", 300)[1]
    )


def test_an_alarm_and_a_surviving_mutant_exit_with_1(silodp, monkeypatch):
    row = report.row_of(Case("prox-sgd", 6.0, {"rounds": 2}), "simulated", 100, 0) | {"alarm": True}
    monkeypatch.setattr(report, "audit", lambda *words, **more: [row])
    monkeypatch.setattr(report_answers, "answers", lambda: ([], {}))
    assert silodp("audit")[0] == 1
    monkeypatch.setattr(report, "audit", lambda *words, **more: [row | {"alarm": False}])
    code, out, _ = silodp("audit")
    assert code == 0
    assert "This audit cannot detect:" in out
    assert "best of several runs" in out
    monkeypatch.setattr(report_answers, "answers", lambda: ([], {"a probe": "something is wrong"}))
    assert silodp("audit")[0] == 1
    answer = {
        "statistic": "Grad",
        "mechanism": "Gaussian",
        "sampling": "FullBatch",
        "noise": (1.0, 0.9, 1.1),
        "coins": None,
        "says": "half",
    }
    for alarm in (False, True):
        monkeypatch.setattr(
            report_answers, "answers", lambda alarm=alarm: ([answer | {"alarm": alarm}], {})
        )
        code, out, _ = silodp("audit")
        assert code == int(alarm)
        assert "Grad, Gaussian, FullBatch" in out
        assert ("ALARM: half" in out) == alarm


def test_the_list_of_mutants_fails_if_one_survives_or_the_shipped_pipeline_fails(
    monkeypatch, capsys
):
    from mistakes import __main__ as command

    good = {"mutant": "m", "caught": True, "caught_by": "p", "says": "s"}
    for rows, shipped, code in (
        ([good], {}, 0),
        ([good | {"caught": False}], {}, 1),
        ([good], {"p": "s"}, 1),
    ):
        monkeypatch.setattr(
            command, "examine_all", lambda seed, tick, rows=rows, shipped=shipped: (rows, shipped)
        )
        assert command.main() == code
    assert "planted mistakes were caught" in capsys.readouterr().out


def test_one_run_is_a_command_for_a_silo(silodp, tmp_path):
    words = ("audit", "--one-run", "--canaries", 60, "--rounds", 2, "--epsilon", 2)
    code, out, _ = silodp(*words, "--data", "wbcd", "--algorithm", "spider", "--json")
    assert code == 0
    assert json.loads(out)["rows"][0]["canaries"] == 60
    np.savez(
        tmp_path / "own.npz", x=np.random.default_rng(0).normal(size=(40, 3)), y=np.arange(40) % 2
    )
    assert "right guesses" in silodp(*words, "--silo", "own.npz")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--algorithm", "sgd"), "unknown"),
        (("--runs", 3), "runs is 3"),
        (("--epsilon", -1), "epsilon is -1"),
        (("--one-run",), "--data NAME or --silo FILE"),
        (("--one-run", "--data", "nothing"), "unknown"),
        (("--one-run", "--data", "wbcd", "--model", "tree"), "unknown"),
    ],
)
def test_a_mistake_gets_one_sentence_and_exit_code_2(silodp, words, said):
    code, _, err = silodp("audit", *words)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
