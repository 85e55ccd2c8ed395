"""The SDP prescriptions against the paper's formulas written out again, the composition theorem,
and the accountant for binomial noise.
"""

import json
import math
from dataclasses import replace

import pytest

from research.binomial import accountant as binomial
from research.binomial import protocol as shuffle
from research.binomial.theory import ShufflePrescription, call, lower_bound, per_call, prescribe
from silodp.core.errors import BadInput
from silodp.core.theory.isrl import Constants

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
VAST = replace(BASE, records=10**9)  # where the proven parameters leave SPIDER a phase above 1
LN = math.log(1e9)


def failing(plan: ShufflePrescription) -> list[str]:
    return [sentence for sentence, holds in plan.conditions if not holds]


def composed(epsilon: float, calls: int, slack: float) -> float:
    """Epsilon of so many adaptive calls at (epsilon, .), by advanced composition with delta' =
    slack, or plainly.
    """
    advanced = math.sqrt(2 * calls * math.log(1 / slack)) * epsilon + calls * epsilon * math.expm1(
        epsilon
    )
    return min(calls * epsilon, advanced)


@pytest.mark.parametrize("epsilon", [1e-6, 0.3, 1.0, 14.0])
@pytest.mark.parametrize("delta", [0.4, 1e-9])
@pytest.mark.parametrize("calls", [1, 7, 300, 10**7])
def test_calls_compose_to_the_budget_and_no_more(epsilon, delta, calls):
    each, rest = per_call(epsilon, delta, calls)
    slack = delta - calls * rest
    assert -1e-15 <= slack <= delta
    spent = calls * each if slack < 1e-14 else composed(each, calls, slack * (1 + 1e-12))
    assert 0.99 * epsilon <= spent <= epsilon * (1 + 1e-9)
    assert each >= 0.99 * epsilon / calls


def test_prox_sgd_follows_the_theorem_without_amplification():
    c = replace(BASE, silos=800)
    plan = prescribe("prox-sgd", c)
    rounds = math.ceil(
        2 * 6 * math.log(0.5 * 4 / 4 * min(400 * 20_000, (20_000 * 400) ** 2 / (50 * LN)))
    )
    assert (plan.rounds, plan.batch) == (rounds, 20_000 // rounds)
    assert plan.step == pytest.approx(1 / 6)  # not 1/3, as printed
    made = plan.calls["Z"]
    assert (made.count, made.contributions, made.clip, made.epsilon, made.delta) == (
        rounds,
        400 * plan.batch,
        2.0,
        1.0,
        1e-9,
    )
    assert plan.printed == {
        "step": pytest.approx(1 / 3),
        "epsilon": pytest.approx(1.0),
        "M": pytest.approx(400),
    }
    private = 36 * 50 * math.log(50e9) ** 2 / (20_000 * 400) ** 2
    assert plan.upper_bound == pytest.approx(4 / 0.5 * (private + 6 / (400 * 20_000)))
    assert failing(plan)[0].startswith("M = N")
    assert prescribe("prox-sgd", BASE).applies


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_silos_that_do_not_take_part_amplify_nothing(algorithm):
    """The same M among ever more silos: the same calls, and no better bound."""
    few, many = (
        prescribe(algorithm, replace(BASE, silos=silos, answering=100)) for silos in (101, 10_000)
    )
    assert few.calls == many.calls
    assert many.upper_bound >= few.upper_bound
    assert max(made.epsilon for made in many.calls.values()) <= 1


def test_noise_is_that_of_the_protocol_with_range_two_clips():
    made = call(count=1, contributions=500, dimension=3, clip=2.0, epsilon=1.0, delta=1e-6)
    parameters = shuffle.proven(500, 3, 1.0, 1e-6)
    assert (made.levels, made.noise_bits, made.p) == (
        parameters.levels,
        parameters.noise_bits,
        parameters.p,
    )
    spread = 500 / 4 + 500 * made.noise_bits * 0.25 * 0.75
    assert made.noise_std == pytest.approx(
        4.0 / made.levels * math.sqrt(spread) / 500
    )  # range 2 clip = 4, mean over 500 contributions
    assert made.noise_std == pytest.approx(math.sqrt(180_000) * 2 * math.log(40e6) / 500, rel=1e-3)


@pytest.mark.parametrize("epsilon", [2.0, 15.0, 40.0])
def test_a_call_is_private_by_the_accountant(epsilon):
    made = call(count=1, contributions=120, dimension=2, clip=1.0, epsilon=epsilon, delta=1e-3)
    release = binomial.BinomialSum(made.contributions * made.noise_bits, made.p, made.levels, 2)
    assert binomial.epsilon([(release, 1)], made.delta) <= made.epsilon == min(epsilon, 15.0)


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 14.0])
@pytest.mark.parametrize("algorithm", ["prox-svrg", "prox-pl-svrg"])
def test_svrg_calls_compose_to_the_budget(algorithm, epsilon):
    c = replace(BASE, epsilon=epsilon)
    plan = prescribe(algorithm, c)
    assert plan.applies
    anchors, steps = plan.calls["Z_1"], plan.calls["Z_2"]
    assert (anchors.count, steps.count) == (
        plan.restarts * plan.epochs,
        plan.restarts * plan.rounds,
    )
    assert (anchors.contributions, steps.contributions) == (400 * 20_000, 400 * plan.batch)
    assert (anchors.clip, steps.clip) == (2.0, 4.0)
    rate = plan.batch / c.records
    within = math.log1p(
        rate * math.expm1(steps.epsilon)
    )  # sampling without replacement; the anchors get none of it
    spent, slack = 0.0, 0.0
    for each, rest, calls in (
        (anchors.epsilon, anchors.delta, anchors.count),
        (within, rate * steps.delta, steps.count),
    ):
        left = c.delta / 2 - calls * rest
        assert left >= -1e-20
        slack += left
        spent += calls * each if left < 1e-14 else composed(each, calls, left * (1 + 1e-9))
    assert spent <= epsilon * (1 + 1e-9)
    assert spent >= 0.9 * epsilon


def test_svrg_as_printed_passes_its_budget():
    plan = prescribe("prox-pl-svrg", BASE)
    restart = plan.printed["epsilon_restart"]
    assert restart == pytest.approx(1 / (2 * math.sqrt(2 * plan.restarts)))
    assert composed(restart, plan.restarts, 1e-9 / 2) > 1.9
    assert plan.restarts * plan.epochs == plan.calls["Z_1"].count
    assert prescribe("prox-svrg", BASE).printed["R"] == 72


def test_svrg_follows_the_theorem():
    plan = prescribe("prox-pl-svrg", BASE)
    assert plan.restarts == math.ceil(math.log2(4 * 0.5 * (20_000 * 400) ** 2 / (6 * 50 * 4)))
    assert plan.rounds == plan.epochs * plan.inner_steps >= 48 * 6
    assert plan.batch >= (20_000**2 / 400) ** (1 / 3)
    assert plan.step == pytest.approx(min(1, plan.batch**1.5 * 20 / 20_000) / 24)
    private = 4 * 50 * LN / (0.5 * (20_000 * 400) ** 2)
    assert plan.upper_bound == pytest.approx(6 * private)
    absent = prescribe("prox-pl-svrg", replace(BASE, answering=100))
    assert absent.upper_bound == pytest.approx(16 * 6 * private + 300 / (100 * 399) * 4 / 0.5)
    single = prescribe("prox-svrg", BASE)
    assert (single.restarts, single.upper_bound) == (
        1,
        pytest.approx(24 * 6 * 4 / single.rounds + single.rounds * private),
    )


@pytest.mark.parametrize("answering", [400, 100])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 18.0])
def test_spider_spends_half_on_anchors_and_half_on_differences_and_keeps_the_phase_condition(
    answering, epsilon
):
    plan = prescribe("spider", replace(VAST, answering=answering, epsilon=epsilon))
    assert plan.phase > 1
    anchors = len(range(0, plan.rounds, plan.phase))
    for name, count in (
        ("Z_1", anchors),
        ("Z_2", plan.rounds - anchors),
        ("Z_2_hat", plan.rounds - anchors),
    ):
        made = plan.calls[name]
        assert made.count == count
        assert (made.epsilon, made.delta) == per_call(epsilon / 2, 0.5e-9, count)
    assert plan.noise["Z_2_hat"] / plan.noise["Z_2"] == pytest.approx(4 / 3)
    sampling = 4 * 9.0 / (answering * 10**9) if answering < 400 else 0.0
    tau_2 = sampling + 50 * plan.noise["Z_2"] ** 2
    assert 0.7 < plan.phase * plan.step**2 * tau_2 <= 1
    assert plan.phase < plan.printed["q"]


def test_spider_follows_the_theorem():
    plan = prescribe("spider", VAST)
    cube = math.log(50 * 10**9 * 400 / 1e-9) ** 3
    scale = 10**9 * 400 / math.sqrt(50 * cube)
    assert plan.rounds == math.ceil(scale * math.sqrt(12 * plan.phase) / 2)
    assert plan.printed["q"] == math.floor(scale * 2 / math.sqrt(12) / 2)
    assert (plan.batch, plan.step) == (10**9, pytest.approx(1 / 6))
    first = (math.sqrt(2 * 3 * 4 * 50 * cube) / (10**9 * 400)) ** (4 / 3)
    second = 50 * 4 * math.log(plan.rounds * 50 / plan.phase / 1e-9) ** 3 / (10**9 * 400) ** 2
    assert plan.upper_bound == pytest.approx(first + second)
    absent = prescribe("spider", replace(VAST, answering=100))
    cube = math.log(50 * 10**9 * 100 / 1e-9) ** 3
    assert absent.upper_bound > 4 / (100 * 10**9) + 2 * math.sqrt(12 * 50 * cube) / (
        10**13.5 * 100**1.5
    )


def test_spider_anchors_as_printed_pass_the_budget():
    plan = prescribe("spider", BASE)
    anchors = plan.calls["Z_1"]
    assert anchors.count > 1000
    assert (
        composed(plan.printed["epsilon_anchor"], anchors.count, 1e-9 / 2) > 10
    )  # max(1, sqrt(q/R)) is 1


def test_spider_answers_with_the_start_where_nothing_can_be_learnt():
    plan = prescribe("spider", replace(BASE, lipschitz=1e-7))
    assert (plan.output, plan.rounds, plan.noise, plan.calls) == ("w_0", 1, {}, {})
    assert failing(plan) == ["X >= 1 (else the answer is w_0)"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_more_silos_help_as_the_square(algorithm):
    """Privacy falls with N^2 (N^(4/3) for SPIDER's first term), where under ISRL-DP it falls with
    N.
    """
    gaps = {"prox-svrg": 1e-4, "spider": 1e14}  # so that the term with N stands out
    wide = replace(BASE, dimension=10**12, gap=gaps.get(algorithm, 4.0))
    many = replace(wide, silos=4000, answering=4000)
    ratio = prescribe(algorithm, wide).upper_bound / prescribe(algorithm, many).upper_bound
    assert ratio == pytest.approx(10 ** (4 / 3) if algorithm == "spider" else 100, rel=0.25)


def test_lower_bounds_are_those_of_central_dp_and_below_the_upper_ones():
    privacy = 50 * LN / (20_000 * 400) ** 2
    assert lower_bound(BASE, "smooth-convex").value == pytest.approx(4 * privacy)
    assert lower_bound(BASE, "strongly-convex-erm").value == pytest.approx(8 * privacy)
    assert lower_bound(BASE, "strongly-convex-so").value == pytest.approx(
        8 * (privacy + 1 / (400 * 20_000))
    )
    for name, kind in (
        ("spider", "smooth-convex"),
        ("prox-sgd", "strongly-convex-so"),
        ("prox-pl-svrg", "strongly-convex-erm"),
    ):
        assert prescribe(name, BASE).upper_bound >= lower_bound(BASE, kind).value
    assert not lower_bound(replace(BASE, epsilon=2.0), "smooth-convex").applies
    with pytest.raises(BadInput, match="kind must be one of smooth-convex"):
        lower_bound(BASE, "convex")


@pytest.mark.parametrize(
    ("algorithm", "change", "sentence"),
    [
        ("prox-sgd", {"records": 50}, "n >= R, so that K = floor(n/R) >= 1"),
        ("prox-sgd", {"epsilon": 16.0}, "epsilon <= min(8 ln(1/delta), 15)"),
        ("prox-svrg", {"epsilon": 16.0}, "epsilon <= min(2 ln(2/delta), 15)"),
        ("prox-svrg", {"pl": 4.0}, "mu <= beta"),
        ("spider", {"epsilon": 21.0}, "epsilon <= ln(1/delta)"),
    ],
)
def test_a_condition_that_fails_is_flagged_and_no_call_passes_fifteen(algorithm, change, sentence):
    assert sentence not in failing(prescribe(algorithm, BASE))
    plan = prescribe(algorithm, replace(BASE, **change))
    assert sentence in failing(plan)
    assert all(made.epsilon <= 15 for made in plan.calls.values())


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
        {"delta": 1e-250},
        {"epsilon": 1e20},
    ],
)
def test_counts_are_whole_and_positive_and_json_is_plain(algorithm, change):
    plan = prescribe(algorithm, replace(BASE, **change))
    assert plan.rounds >= 1
    assert all(
        math.isfinite(v) and v > 0
        for v in (plan.step, plan.upper_bound, plan.log_factor, *plan.noise.values())
    )
    text = json.loads(json.dumps(plan.as_dict(), allow_nan=False))
    assert set(text["calls"]) == set(plan.noise)
    assert "printed condition M >=" in text["notes"][-1]


def test_what_is_missing_or_unknown_is_named():
    with pytest.raises(
        BadInput, match=r"pl \(mu, the proximal-PL constant\) is missing: SDP Prox-SGD needs it"
    ):
        prescribe("prox-sgd", replace(BASE, pl=None))
    with pytest.raises(BadInput, match="algorithm must be one of prox-sgd"):
        prescribe("sgd", BASE)
