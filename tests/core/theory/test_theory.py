"""The prescriptions against the paper's formulas written out again, their own proofs' inequalities,
and exact Gaussian accounting.
"""

import json
import math
from dataclasses import replace

import pytest

from silodp.core.errors import BadInput
from silodp.core.theory.isrl import (
    Constants,
    Prescription,
    lower_bound,
    prescribe,
    prescribe_hybrid,
)

ALGORITHMS = ("prox-sgd", "prox-svrg", "prox-pl-svrg", "spider")
BASE = Constants(
    lipschitz=2.0,
    smoothness=3.0,
    pl=0.5,
    gap=4.0,
    records=20_000,
    silos=400,
    answering=400,
    dimension=50,
    epsilon=1.0,
    delta=1e-9,
)
LN = math.log(1e9)


def gaussian_delta(epsilon: float, mu: float) -> float:
    """The exact delta of a mu-GDP release (Balle and Wang 2018)."""

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    return below(-epsilon / mu + mu / 2) - math.exp(epsilon) * below(-epsilon / mu - mu / 2)


def failing(plan: Prescription) -> list[str]:
    return [sentence for sentence, holds in plan.conditions if not holds]


def test_prox_sgd_follows_the_theorem_with_the_propositions_noise():
    plan = prescribe("prox-sgd", BASE)
    rounds = math.ceil(
        2 * 6 * math.log(0.5 * 4 / 4 * min(400 * 20_000, 20_000**2 * 400 / (50 * LN)))
    )
    assert plan.rounds == rounds == 183
    assert plan.batch == 20_000 // rounds
    assert plan.step == pytest.approx(1 / 6)
    assert plan.noise["sigma"] == pytest.approx(math.sqrt(16 * 4 * LN) / plan.batch)
    assert plan.printed["sigma"] == pytest.approx(math.sqrt(8 * 4 * LN) / plan.batch)
    assert plan.upper_bound == pytest.approx(
        4 / 0.5 * (36 * 50 * LN / (20_000**2 * 400) + 6 / (400 * 20_000))
    )
    assert plan.applies


def test_svrg_follows_the_proof_and_its_restarts():
    plan = prescribe("prox-pl-svrg", BASE)
    restarts = math.ceil(math.log2(4 * 0.5 * 400 * 20_000**2 / (6 * 50 * 4)))
    batch = math.ceil(
        max(
            (20_000**2 / 400) ** (1 / 3),
            20_000 / (4 * math.sqrt(2 * restarts * 288 * math.log(2e9))),
            20_000 / 288,
        )
    )
    assert (plan.restarts, plan.batch, plan.inner_steps) == (restarts, batch, 20_000 // batch)
    assert plan.epochs is not None
    assert plan.rounds == plan.epochs * (20_000 // batch) >= 48 * 6
    assert plan.step == pytest.approx(min(1, batch**1.5 * 20 / 20_000) / 24)
    anchors, steps = restarts * plan.epochs, restarts * plan.rounds
    assert plan.noise["sigma_1"] == pytest.approx(
        math.sqrt(256 * 4 * anchors * math.log(2e9) * math.log(5e9 * anchors)) / 20_000
    )
    assert plan.noise["sigma_2"] == pytest.approx(
        math.sqrt(4096 * 4 * steps * math.log(2e9) * math.log(5e9 * steps)) / 20_000
    )
    assert plan.noise["sigma_2"] ** 2 > 4 * plan.printed["sigma_2"] ** 2
    assert plan.upper_bound == pytest.approx(6 * 4 * 50 * LN / (0.5 * 20_000**2 * 400))
    assert plan.applies


def test_one_svrg_call_halves_the_gap_up_to_noise():
    plan = prescribe("prox-svrg", BASE)
    noise = plan.rounds * 4 * 50 * LN / (0.5 * 20_000**2 * 400)
    assert plan.restarts == 1
    assert plan.upper_bound == pytest.approx(24 * 6 * 4 / plan.rounds + noise)
    assert 3 * BASE.gap / (plan.step * BASE.pl * plan.rounds) <= BASE.gap / 2
    assert (
        3 * BASE.gap / (plan.step * BASE.pl * plan.printed["R"]) > BASE.gap
    )  # R = 12 kappa, as printed, proves no progress


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 15.0])
@pytest.mark.parametrize("algorithm", ["prox-svrg", "prox-pl-svrg"])
def test_svrg_noise_passes_advanced_composition(algorithm, epsilon):
    c = replace(BASE, epsilon=epsilon)
    plan = prescribe(algorithm, c)
    assert plan.applies
    spent = 0.0
    for name, sensitivity, rate, times in (
        ("sigma_1", 4 / c.records, 1.0, plan.epochs),
        ("sigma_2", 8 / plan.batch, plan.batch / c.records, plan.rounds),
    ):
        times *= plan.restarts
        local_delta = c.delta / (4 * times)
        local = (
            sensitivity * math.sqrt(2 * math.log(1.25 / local_delta)) / plan.noise[name]
        )  # classical Gaussian mechanism
        assert local <= 1 + 1e-9
        local = math.log1p(rate * math.expm1(local))  # sampling without replacement
        spent += math.sqrt(2 * times * math.log(4 / c.delta)) * local + times * local * math.expm1(
            local
        )
    assert spent <= epsilon  # and the deltas add up to 4 times delta/4


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 12.0, 40.0])
def test_prox_sgd_noise_is_private_by_exact_accounting(epsilon):
    plan = prescribe("prox-sgd", replace(BASE, epsilon=epsilon))
    assert "epsilon <= 2 ln(1/delta), which the noise needs" not in failing(plan)
    assert (
        gaussian_delta(epsilon, 2 * BASE.lipschitz / plan.batch / plan.noise["sigma"]) <= BASE.delta
    )


def test_printed_prox_sgd_noise_breaks_its_claim_at_large_epsilon():
    plan = prescribe("prox-sgd", replace(BASE, epsilon=15.0, delta=1e-5))
    assert gaussian_delta(15.0, 2 * BASE.lipschitz / plan.batch / plan.printed["sigma"]) > 25e-5


@pytest.mark.parametrize("records", [100, 2_000, 20_000, 10**6])
@pytest.mark.parametrize("answering", [400, 100])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 18.0])
def test_spider_spends_its_zcdp_budget_exactly_and_keeps_the_phase_condition(
    records, answering, epsilon
):
    c = replace(BASE, records=records, answering=answering, epsilon=epsilon)
    plan = prescribe("spider", c)
    assert plan.output == "uniform over w_1..w_R"
    anchors = len(range(0, plan.rounds, plan.phase))
    differences = plan.rounds - anchors
    rho = anchors * (2 * 2.0 / records) ** 2 / (2 * plan.noise["sigma_1"] ** 2)
    if differences:
        slope = (2 * 3.0 / records / plan.noise["sigma_2"]) ** 2
        assert slope == pytest.approx((4 * 2.0 / records / plan.noise["sigma_2_hat"]) ** 2)
        rho += differences * slope / 2
        sampling = 4 * 9.0 / (answering * records) if answering < 400 else 0.0
        tau_2 = sampling + 50 * plan.noise["sigma_2"] ** 2 / answering
        assert plan.phase <= 1 / (plan.step**2 * tau_2)
    else:
        assert plan.phase == 1 or plan.rounds == 1
    assert rho == pytest.approx(epsilon**2 / (8 * LN))
    assert gaussian_delta(epsilon, math.sqrt(2 * rho)) <= c.delta


def test_spider_follows_the_theorem():
    plan = prescribe("spider", BASE)
    x = 20_000 * 2 * 20 / math.sqrt(50 * LN * 4 * 3)
    assert plan.phase == math.floor((x / 8) ** (2 / 3)) > 1
    assert plan.printed["q"] == math.floor(x ** (2 / 3))
    assert plan.rounds == math.ceil(
        20_000 * math.sqrt(400 * plan.phase * 4 * 3) / (2 * math.sqrt(50 * LN))
    )
    assert (plan.batch, plan.step) == (20_000, pytest.approx(1 / 6))
    assert plan.printed["sigma_1"] == pytest.approx(
        math.sqrt(16 * 4 * LN * plan.rounds / plan.phase) / 20_000
    )
    assert plan.printed["sigma_2"] == pytest.approx(math.sqrt(16 * 9 * plan.rounds * LN) / 20_000)
    assert plan.printed["sigma_2_hat"] == pytest.approx(
        math.sqrt(64 * 4 * plan.rounds * LN) / 20_000
    )
    first, second = (
        (math.sqrt(2 * 3 * 4 * 50 * LN) / (20_000 * 20)) ** (4 / 3),
        4 * 50 * LN / (20_000**2 * 400),
    )
    assert plan.upper_bound == pytest.approx(first + second)


def test_spider_with_absent_silos_adds_the_two_terms_and_says_what_it_assumes():
    plan = prescribe("spider", replace(BASE, answering=100))
    first, second = (
        (math.sqrt(2 * 3 * 4 * 50 * LN) / (20_000 * 10)) ** (4 / 3),
        4 * 50 * LN / (20_000**2 * 100),
    )
    third, fourth = 2 * math.sqrt(3 * 4 * 50 * LN) / (20_000**1.5 * 100), 4 / (100 * 20_000)
    assert plan.upper_bound == pytest.approx(first + second + third + fourth)
    assert [sentence.split(" (")[0] for sentence in failing(plan)] == ["M = N"]


def test_spider_answers_with_the_start_when_the_phase_is_below_one():
    plan = prescribe("spider", replace(BASE, lipschitz=1e-4))
    assert (plan.output, plan.rounds, plan.phase, plan.noise) == ("w_0", 1, 1, {})
    assert plan.printed == {"q": 0}
    assert failing(plan) == ["q >= 1 as printed (else the answer is w_0)"]
    assert plan.upper_bound > 1e-4**2


@pytest.mark.parametrize("factor", [2, 10])
def test_privacy_terms_scale_as_the_theorems_say(factor):
    wide = replace(BASE, dimension=10**12)  # the privacy term drowns the sampling term
    for change in ({"epsilon": 1 / factor}, {"records": BASE.records // factor}):
        worse = prescribe("prox-sgd", replace(wide, **change)).upper_bound
        assert worse / prescribe("prox-sgd", wide).upper_bound == pytest.approx(factor**2, rel=1e-4)
    flat = replace(BASE, gap=1e12)  # the 4/3 term drowns the other
    base = prescribe("spider", flat).upper_bound
    for change in ({"epsilon": 1 / factor}, {"records": BASE.records // factor}):
        assert prescribe("spider", replace(flat, **change)).upper_bound / base == pytest.approx(
            factor ** (4 / 3), rel=1e-4
        )
    fewer = replace(flat, silos=400 // factor, answering=400 // factor)
    assert prescribe("spider", fewer).upper_bound / base == pytest.approx(
        factor ** (2 / 3), rel=1e-4
    )


def test_lower_bounds_are_the_stated_expressions():
    privacy = 50 * LN / (20_000**2 * 400)
    assert lower_bound(BASE, "smooth-convex").value == pytest.approx(4 * privacy)
    assert lower_bound(replace(BASE, dimension=10**13), "smooth-convex").value == pytest.approx(4)
    assert lower_bound(BASE, "strongly-convex-erm").value == pytest.approx(8 * privacy)
    assert lower_bound(BASE, "strongly-convex-so").value == pytest.approx(
        8 * (privacy + 1 / (400 * 20_000))
    )
    assert lower_bound(replace(BASE, dimension=5), "hybrid").value == pytest.approx(
        8 * 5 * LN / 400
    )
    assert lower_bound(BASE, "smooth-convex", compositionality=2.0).value == pytest.approx(
        4 * privacy / 16
    )
    for kind in ("strongly-convex-erm", "strongly-convex-so", "hybrid"):
        assert lower_bound(replace(BASE, dimension=10**13), kind).value == pytest.approx(8)
    quiet = replace(BASE, records=100, epsilon=0.099)
    assert lower_bound(quiet, "smooth-convex", rounds=100).applies
    assert not lower_bound(
        quiet, "smooth-convex", rounds=97
    ).applies  # epsilon_r = 0.099 / sqrt(97) > 1/100
    assert not lower_bound(quiet, "smooth-convex", rounds=100, compositionality=1.1).applies
    assert not lower_bound(quiet, "smooth-convex", rounds=100, loudest=0.011).applies
    assert not lower_bound(quiet, "smooth-convex", rounds=10**8).applies  # 400 < 16 ln(28 N R)
    assert not lower_bound(
        quiet, "smooth-convex"
    ).applies  # a silo that is asked once tells all of epsilon at once
    assert lower_bound(replace(quiet, epsilon=0.0099), "smooth-convex").applies
    few = lower_bound(
        replace(BASE, silos=25, answering=12, epsilon=6.0, delta=1e-3), "smooth-convex"
    )
    assert [holds for _, holds in few.conditions] == [False] * 5


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("records", [50, 20_000])
@pytest.mark.parametrize("dimension", [1, 10**6])
def test_upper_bounds_are_above_lower_bounds(epsilon, records, dimension):
    c = replace(BASE, epsilon=epsilon, records=records, dimension=dimension)
    assert prescribe("spider", c).upper_bound >= lower_bound(c, "smooth-convex").value
    assert prescribe("prox-sgd", c).upper_bound >= lower_bound(c, "strongly-convex-so").value
    assert prescribe("prox-pl-svrg", c).upper_bound >= lower_bound(c, "strongly-convex-erm").value
    small = replace(c, epsilon=min(epsilon, 1.0))
    assert prescribe_hybrid("prox-sgd", small).upper_bound >= lower_bound(small, "hybrid").value


def test_hybrid_runs_at_epsilon_over_n_and_has_no_square_roots():
    plan = prescribe_hybrid("prox-sgd", BASE)
    log_delta_0 = math.log(4 * 20_000 / 1e-9)
    assert plan.upper_bound == pytest.approx(8 * (36 * 50 * log_delta_0 / 400 + 6 / (400 * 20_000)))
    assert plan.conditions[0] == ("user-level epsilon <= 1", True)
    assert failing(prescribe_hybrid("spider", replace(BASE, epsilon=2.0, answering=399)))[:2] == [
        "user-level epsilon <= 1",
        "M = N",
    ]


def test_svrg_pays_for_absent_silos():
    plan, whole = (
        prescribe("prox-pl-svrg", replace(BASE, answering=100)),
        prescribe("prox-pl-svrg", BASE),
    )
    assert plan.upper_bound == pytest.approx(4 * whole.upper_bound + 300 / (100 * 399) * 4 / 0.5)
    alone = replace(BASE, silos=1, answering=1)
    assert prescribe("prox-pl-svrg", alone).upper_bound == pytest.approx(400 * whole.upper_bound)


@pytest.mark.parametrize(
    ("algorithm", "change", "sentence"),
    [
        ("prox-sgd", {"records": 50}, "n >= R, so that K = floor(n/R) >= 1"),
        (
            "prox-sgd",
            {"gap": 1e-9},
            "the logarithm in R is positive (else w_0 already meets the bound, and R is set to 1)",
        ),
        ("prox-sgd", {"pl": 4.0}, "mu <= beta"),
        (
            "prox-sgd",
            {"epsilon": 14.0, "delta": 1e-2},
            "epsilon <= 2 ln(1/delta), which the noise needs",
        ),
        ("prox-sgd", {"epsilon": 16.0}, "epsilon <= min(8 ln(1/delta), 15)"),
        ("prox-svrg", {"epsilon": 16.0}, "epsilon <= min(2 ln(2/delta), 15)"),
        ("prox-svrg", {"epsilon": 900.0}, "K >= epsilon n / (4 sqrt(2 S R ln(2/delta)))"),
        (
            "prox-svrg",
            {"epsilon": 1e3},
            "epsilon <= 4 sqrt(2 S E ln(2/delta)), which the anchors' Gaussian mechanism needs",
        ),
        ("spider", {"epsilon": 42.0}, "epsilon <= 2 ln(1/delta)"),
    ],
)
def test_a_condition_that_fails_is_flagged(algorithm, change, sentence):
    assert sentence not in failing(prescribe(algorithm, BASE))
    plan = prescribe(algorithm, replace(BASE, **change))
    assert sentence in failing(plan)
    assert not plan.applies


def test_no_batch_means_no_noise():
    plan = prescribe("prox-sgd", replace(BASE, records=50))
    assert (plan.batch, plan.noise) == (0, {})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"records": 1},
        {"dimension": 10**20},
        {"gap": 1e20},
        {"gap": 1e-20},
        {"pl": 1e-20},
        {"delta": 5e-324},
    ],
)
def test_counts_are_whole_and_positive_and_json_is_plain(algorithm, change):
    c = replace(BASE, **change)
    plan = prescribe(algorithm, c)
    assert plan.rounds >= 1
    assert 0 <= plan.batch <= c.records
    assert all(
        isinstance(k, int) and k >= 1
        for k in (plan.phase, plan.epochs, plan.inner_steps, plan.restarts)
        if k is not None
    )
    assert all(
        math.isfinite(v) and v > 0
        for v in (plan.step, plan.upper_bound, plan.log_factor, *plan.noise.values())
    )
    text = json.loads(json.dumps(plan.as_dict(), allow_nan=False))
    assert text["conditions"] == [
        {"condition": sentence, "holds": holds} for sentence, holds in plan.conditions
    ]
    assert (text["algorithm"], text["applies"]) == (algorithm, plan.applies)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"lipschitz": 0.0},
            "lipschitz (L) must be a positive number from 1e-20 to 1e20, got 0.0.",
        ),
        (
            {"smoothness": math.nan},
            "smoothness (beta) must be a positive number from 1e-20 to 1e20, got nan.",
        ),
        (
            {"smoothness": None},
            "smoothness (beta) must be a positive number from 1e-20 to 1e20, got None.",
        ),
        (
            {"pl": -1},
            (
                "pl (mu, the proximal-PL constant) must be a positive number from 1e-20 to "
                "1e20, got -1."
            ),
        ),
        ({"records": 10.5}, "records (n) must be a whole number from 1 to 1e20, got 10.5."),
        ({"silos": True}, "silos (N) must be a whole number from 1 to 1e20, got True."),
        (
            {"epsilon": math.inf},
            "epsilon (of the guarantee) must be a positive number from 1e-20 to 1e20, got inf.",
        ),
        ({"answering": 401}, "answering (M) must be at most silos (N = 400), got 401."),
        ({"delta": 0.5}, "delta must lie strictly between 0 and 1/2, got 0.5."),
        ({"delta": 0}, "delta must lie strictly between 0 and 1/2, got 0."),
    ],
)
def test_constants_that_no_theorem_can_use_are_refused(change, sentence):
    with pytest.raises(BadInput) as refusal:
        replace(BASE, **change)
    assert str(refusal.value) == sentence


def test_what_is_missing_or_unknown_is_named():
    for algorithm in ("prox-sgd", "prox-svrg", "prox-pl-svrg"):
        with pytest.raises(
            BadInput,
            match=(
                r"pl \(mu, the proximal-PL constant\) is missing: .* needs it as a positive "
                r"number"
            ),
        ):
            prescribe(algorithm, replace(BASE, pl=None))
    for algorithm in ALGORITHMS:
        with pytest.raises(BadInput, match=r"gap \(Delta, a bound on F\(w_0\) - F\*\) is missing"):
            prescribe(algorithm, replace(BASE, gap=None))
    assert prescribe("spider", replace(BASE, pl=None)) == prescribe("spider", BASE)
    with pytest.raises(
        BadInput,
        match="algorithm must be one of prox-sgd, prox-svrg, prox-pl-svrg, spider, got 'sgd'",
    ):
        prescribe("sgd", BASE)
    with pytest.raises(BadInput, match="kind must be one of smooth-convex"):
        lower_bound(BASE, "convex")
    with pytest.raises(BadInput, match="pl "):
        lower_bound(replace(BASE, pl=None), "hybrid")
    with pytest.raises(
        BadInput, match=r"compositionality \(C\) must be a number from 1 to 1e20, got 0"
    ):
        lower_bound(BASE, "smooth-convex", compositionality=0)
    with pytest.raises(
        BadInput, match=r"rounds \(R\) must be a whole number from 1 to 1e20, got 0"
    ):
        lower_bound(BASE, "smooth-convex", rounds=0)
