"""Golden noise, budgets spent to the last thousandth and never passed, for every ledger rule and
sampling; the paper's own constants.
"""

import functools
import math

import numpy as np
import pytest
import torch
from dp_accounting import get_epsilon_gaussian

from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget, gdp_mu
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, WithoutReplacement
from silodp.server.algorithms import ALGORITHMS
from silodp.server.federation import Balanced, Everyone, Uniform
from silodp.server.paper import paper_multipliers
from silodp.server.plan import calibrate, dry_run, with_multipliers
from silodp.silo.ledger.memory import MemoryLedger

N = 1234
DELTA = N**-2


def planned(
    name,
    budgets,
    counts,
    *,
    sampling=FullBatch(),  # noqa: B008
    participation=None,
    shares=None,
    rule=None,
    clip=1.0,
    **settings,
):
    algorithm = ALGORITHMS[name]
    run = functools.partial(algorithm.run, step=1.0, **settings)
    mechanisms = {kind: Gaussian(kind, clip, 0.0, sampling) for kind in algorithm.kinds}
    return calibrate(run, mechanisms, budgets, counts, participation, shares=shares, rule=rule)


def multiplier(plan, kind, silo=0, run=0):
    return float(plan.mechanisms[kind].noise_multiplier[run, silo])


def charged(plan):
    """The ledger of this plan after everything in it was asked."""
    ledger = MemoryLedger(plan.rule, plan.budgets.tolist(), plan.counts)
    for a in plan.asked:
        ledger.charge(
            Event(a.event.sampling, plan.mechanisms[a.kind].noise_multiplier, a.event.count),
            a.silos,
        )
    return ledger


@pytest.mark.parametrize(
    ("epsilon", "golden"),
    [(0.75, 79.70), (1, 60.96), (1.5, 41.86), (3, 22.21), (6, 12.00), (12, 6.66), (18, 4.80)],
)
def test_minibatch_sgd_has_its_golden_noise(epsilon, golden):
    plan = planned("mb-sgd", Budget(epsilon, DELTA), [N], rounds=50)
    std = multiplier(plan, "minibatch") * float(plan.mechanisms["minibatch"].sensitivity(N))
    assert std * N == pytest.approx(golden, rel=0.01)
    assert plan.count("minibatch", 0) == 50
    assert multiplier(plan, "minibatch") == pytest.approx(
        math.sqrt(50) / gdp_mu(Budget(epsilon, DELTA)), rel=1e-6
    )


SOUND = [
    ("gdp", FullBatch(), 3.0),
    ("gdp", DisjointBatches(20), 3.0),
    ("renyi", FullBatch(), 3.0),
    ("renyi", DisjointBatches(20), 3.0),
    ("renyi", Poisson(0.1), 3.0),
    ("renyi", WithoutReplacement(0.1), 3.0),
    ("committed", FullBatch(), 3.0),
    ("committed", Poisson(0.1), 1.0),
]


@pytest.mark.parametrize(("rule", "sampling", "epsilon"), SOUND, ids=str)
def test_spider_spends_its_budget_and_never_more(rule, sampling, epsilon):
    """Phase 5: by the plan, and by a ledger that is charged for every release and then has nothing
    left for one more.
    """
    plan = planned(
        "spider",
        Budget(epsilon, DELTA),
        [N],
        sampling=sampling,
        rule=rule,
        rounds=50,
        phase=5,
        slope=1.0,
    )
    assert plan.rule.name == rule
    assert (plan.count("anchor", 0), plan.count("refine", 0)) == (10, 40)
    ledger = charged(plan)
    for spent in (float(plan.spent()[0, 0]), float(ledger.epsilon()[0, 0])):
        assert epsilon * 0.999 <= spent <= epsilon
    with pytest.raises(Refused, match="budget"):
        ledger.charge(Event(sampling, plan.mechanisms["refine"].noise_multiplier), (0,))


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [
        ("gdp", Poisson(0.1)),
        ("gdp", WithoutReplacement(0.1)),
        ("committed", DisjointBatches(20)),
        ("committed", WithoutReplacement(0.1)),
    ],
    ids=str,
)
def test_a_rule_that_has_no_price_for_a_sampling_says_so(rule, sampling):
    with pytest.raises(BadInput, match=r"use the renyi"):
        planned("mb-sgd", Budget(1.0, DELTA), [N], sampling=sampling, rule=rule, rounds=5).spent()


@pytest.mark.parametrize(
    ("sampling", "rule"),
    [
        (FullBatch(), "gdp"),
        (DisjointBatches(5), "gdp"),
        (Poisson(0.5), "committed"),
        (WithoutReplacement(0.5), "renyi"),
    ],
    ids=str,
)
def test_the_tightest_rule_that_applies_is_the_default(sampling, rule):
    assert (
        planned("mb-sgd", Budget(math.inf, DELTA), [N], sampling=sampling, rounds=5).rule.name
        == rule
    )


def test_an_unknown_rule_is_refused():
    with pytest.raises(
        BadInput, match="ledger rule 'zcdp' is unknown; choose gdp, renyi or committed"
    ):
        planned("mb-sgd", Budget(1.0, DELTA), [N], rounds=5, rule="zcdp")


def test_the_renyi_rule_asks_a_little_more_noise_and_no_rule_asks_less_than_the_exact_one():
    exact, renyi, committed = (
        multiplier(planned("mb-sgd", Budget(3.0, DELTA), [N], rounds=50, rule=rule), "minibatch")
        for rule in ("gdp", "renyi", "committed")
    )
    assert 1.0 < renyi / exact < 1.12
    assert committed == pytest.approx(exact, rel=1e-6)


def test_each_disjoint_batch_has_the_whole_budget():
    one = planned("prox-sgd", Budget(3.0, DELTA), [N], sampling=DisjointBatches(50), rounds=50)
    single = planned("mb-sgd", Budget(3.0, DELTA), [N], rounds=1)
    assert multiplier(one, "minibatch") == pytest.approx(multiplier(single, "minibatch"), rel=1e-9)
    assert one.spent()[0, 0] == pytest.approx(3.0, rel=1e-3)


def test_a_partition_gone_through_twice_costs_twice():
    def twice(fed, problem, w, *, minibatch):
        for _ in range(2):
            yield from ALGORITHMS["prox-sgd"].run(
                fed, problem, w, rounds=10, step=1.0, minibatch=minibatch
            )

    mechanisms = {"minibatch": Gaussian("minibatch", 1.0, 0.0, DisjointBatches(10))}
    plan = calibrate(twice, mechanisms, Budget(3.0, DELTA), [N])
    once = planned("prox-sgd", Budget(3.0, DELTA), [N], sampling=DisjointBatches(10), rounds=10)
    assert multiplier(plan, "minibatch") == pytest.approx(
        math.sqrt(2) * multiplier(once, "minibatch"), rel=1e-6
    )


def test_a_local_step_counts_as_a_release():
    local = planned("local-sgd", Budget(3.0, DELTA), [N], rounds=10, local_steps=5)
    assert local.count("minibatch", 0) == 50
    assert multiplier(local, "minibatch") == pytest.approx(
        multiplier(planned("mb-sgd", Budget(3.0, DELTA), [N], rounds=50), "minibatch")
    )


def test_each_silo_has_its_own_budget_and_records():
    budgets, counts = [Budget(0.75, 1e-6), Budget(3.0, DELTA), Budget(18.0, 1e-4)], [400, N, 50]
    plan = planned("spider", budgets, counts, rounds=50, phase=5, slope=1.0)
    for i, (budget, n) in enumerate(zip(budgets, counts, strict=True)):
        alone = planned("spider", budget, [n], rounds=50, phase=5, slope=1.0)
        for kind in ("anchor", "refine"):
            assert multiplier(plan, kind, i) == pytest.approx(multiplier(alone, kind), rel=1e-9)
    assert plan.spent()[0] == pytest.approx([0.75, 3.0, 18.0], rel=1e-3)
    assert (plan.spent()[0] <= [0.75, 3.0, 18.0]).all()


def test_each_run_has_its_own_budget():
    rows = [[Budget(e, DELTA), Budget(2 * e, DELTA)] for e in (1.0, 3.0, math.inf)]
    plan = planned("mb-sgd", rows, [N, 99], rounds=50)
    assert plan.mechanisms["minibatch"].noise_multiplier.shape == (3, 2)
    assert plan.spent()[:2] == pytest.approx(np.array([[1.0, 2.0], [3.0, 6.0]]), rel=1e-3)
    assert multiplier(plan, "minibatch", run=2) == 0
    assert np.isinf(plan.spent()[2]).all()


def test_the_same_budget_needs_the_same_multiplier_for_any_clip_and_any_step():
    wide = planned(
        "spider",
        Budget(3.0, DELTA),
        [N],
        rounds=20,
        phase=4,
        slope=9.0,
        clip=torch.tensor([[0.1], [10.0]]),
    )
    plain = planned("spider", Budget(3.0, DELTA), [N], rounds=20, phase=4, slope=1.0)
    for kind in ("anchor", "refine"):
        assert multiplier(wide, kind) == multiplier(plain, kind)


def test_balanced_silos_need_less_noise_than_uniform_ones():
    rounds, silos, answering = 50, 25, 12
    budgets, counts = Budget(3.0, DELTA), [N] * silos
    balanced = planned(
        "mb-sgd", budgets, counts, participation=Balanced(silos, answering, seed=0), rounds=rounds
    )
    uniform = planned(
        "mb-sgd", budgets, counts, participation=Uniform(silos, answering, seed=0), rounds=rounds
    )
    for i in range(silos):
        assert balanced.count("minibatch", i) <= math.ceil(rounds * answering / silos)
        assert uniform.count("minibatch", i) == rounds
        expected = math.sqrt(balanced.count("minibatch", i) / rounds)
        assert multiplier(balanced, "minibatch", i) / multiplier(
            uniform, "minibatch", i
        ) == pytest.approx(expected, rel=1e-6)
    assert balanced.spent()[0] == pytest.approx(np.full(silos, 3.0), rel=1e-3)


@pytest.mark.parametrize("rule", ["gdp", "renyi", "committed"])
def test_a_silo_that_will_never_be_asked_needs_no_noise_and_spends_nothing(rule):
    plan = planned(
        "mb-sgd",
        Budget(1.0, DELTA),
        [N] * 5,
        participation=Balanced(5, 1, seed=0),
        rounds=3,
        rule=rule,
    )
    idle = [i for i in range(5) if plan.count("minibatch", i) == 0]
    assert len(idle) == 2
    spent = plan.spent()[0]
    for i in range(5):
        assert spent[i] == pytest.approx(0.0 if i in idle else 1.0, rel=1e-3)


@pytest.mark.parametrize("rule", ["gdp", "renyi", "committed"])
def test_kinds_with_equal_noise_are_still_counted_apart(rule):
    """Two anchors and two differences at equal shares have equal noise; the ledger must allow all
    four and no fifth.
    """
    plan = planned("spider", Budget(1.0, DELTA), [N], rounds=4, phase=3, slope=1.0, rule=rule)
    assert multiplier(plan, "anchor") == multiplier(plan, "refine")
    ledger = charged(plan)
    assert 0.999 <= float(ledger.epsilon()[0, 0]) <= 1.0
    with pytest.raises(Refused, match="budget"):
        ledger.charge(Event(FullBatch(), plan.mechanisms["anchor"].noise_multiplier), (0,))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_budget_is_split_between_anchors_and_differences_as_asked(share):
    shares = {"anchor": share, "refine": 1 - share}
    plan = planned("spider", Budget(3.0, DELTA), [N], rounds=50, phase=5, slope=1.0, shares=shares)
    mu2 = {kind: plan.count(kind, 0) / multiplier(plan, kind) ** 2 for kind in shares}
    assert sum(mu2.values()) == pytest.approx(gdp_mu(Budget(3.0, DELTA)) ** 2, rel=1e-6)
    assert mu2["anchor"] / sum(mu2.values()) == pytest.approx(share, rel=1e-6)


@pytest.mark.parametrize("share", [0.0, -1.0, math.inf, math.nan])
def test_a_senseless_share_is_refused(share):
    with pytest.raises(
        BadInput, match=r"the budget share of anchor is .*; it must be greater than 0"
    ):
        planned(
            "spider",
            Budget(3.0, DELTA),
            [N],
            rounds=5,
            phase=2,
            slope=1.0,
            shares={"anchor": share, "refine": 1.0},
        )


def test_without_differences_all_is_spent_on_anchors():
    spider = planned(
        "spider",
        Budget(3.0, DELTA),
        [N],
        rounds=50,
        phase=1,
        slope=1.0,
        shares={"anchor": 0.3, "refine": 0.7},
    )
    plain = planned("mb-sgd", Budget(3.0, DELTA), [N], rounds=50)
    assert multiplier(spider, "anchor") == pytest.approx(multiplier(plain, "minibatch"), rel=1e-9)
    assert spider.count("refine", 0) == 0


def test_batches_without_a_record_are_refused_before_anything_is_spent():
    with pytest.raises(BadInput, match="batches of 0 records of 30"):
        planned("prox-sgd", Budget(3.0, DELTA), [N, 30], sampling=DisjointBatches(50), rounds=50)
    with pytest.raises(BadInput, match=r"batches of 0\.3 records of 30"):
        planned(
            "mb-sgd", Budget(3.0, DELTA), [N, 30], sampling=Poisson(0.01), rounds=50, rule="renyi"
        )


def test_a_dry_run_notes_every_query_in_order_and_touches_nothing():
    run = functools.partial(ALGORITHMS["prox-svrg"].run, rounds=6, inner=3, slope=1.0, step=1.0)
    mechanisms = {kind: Gaussian(kind, 1.0, 1.0) for kind in ("anchor", "refine")}
    asked = dry_run(run, mechanisms, Balanced(4, 2, seed=0))
    assert [a.kind for a in asked] == ["anchor", "refine", "refine"] * 2
    assert len({a.silos for a in asked[:3]}) == len({a.silos for a in asked[3:]}) == 1
    assert set(asked[0].silos) | set(asked[3].silos) == {0, 1, 2, 3}


def test_a_dry_run_foresees_the_balanced_order_that_is_then_drawn():
    who = Balanced(7, 3, seed=4)
    run = functools.partial(ALGORITHMS["mb-sgd"].run, rounds=12, step=1.0)
    asked = dry_run(run, {"minibatch": Gaussian("minibatch", 1.0, 1.0)}, who)
    assert [a.silos for a in asked] == [who.draw() for _ in range(12)]


# --- the paper's constants -----------------------------------------------------------------------


def paper_spend(name, claim, **settings):
    algorithm = ALGORITHMS[name]
    noise = paper_multipliers(name, Budget(claim, DELTA), settings)
    run = functools.partial(algorithm.run, step=1.0, **settings)
    mechanisms = {kind: Gaussian(kind, 1.0, noise[kind]) for kind in algorithm.kinds}
    return with_multipliers(run, mechanisms, [N], Budget(claim, DELTA)).spent().item()


@pytest.mark.parametrize(("claim", "spent"), [(1, 0.68), (6, 4.8), (12, 10.8), (18, 17.8)])
def test_the_papers_spider_constants_spend_what_the_notes_computed(claim, spent):
    """q = 2; 50 rounds, r = 0..49, reproduce the notes' numbers (51 rounds, r = 0..50 as printed,
    would spend 18.1 at a claim of 18).
    """
    assert paper_spend("spider", claim, rounds=50, phase=2, slope=math.inf) == pytest.approx(
        spent, rel=0.01
    )


@pytest.mark.parametrize(("claim", "spent"), [(6, 8.3), (18, 32.7)])
def test_the_papers_alternate_spider_overspends(claim, spent):
    assert paper_spend("spider-alternate", claim, rounds=50, slope=math.inf) == pytest.approx(
        spent, rel=0.01
    )


@pytest.mark.parametrize(("epsilon", "ratio"), [(0.75, 1.29), (18, 0.89)])
def test_the_papers_minibatch_constants_are_off_as_the_notes_computed(epsilon, ratio):
    exact = multiplier(planned("mb-sgd", Budget(epsilon, DELTA), [N], rounds=50), "minibatch")
    theirs = paper_multipliers("mb-sgd", Budget(epsilon, DELTA), {"rounds": 50})["minibatch"]
    assert theirs / exact == pytest.approx(ratio, abs=0.006)
    assert (paper_spend("mb-sgd", epsilon, rounds=50) > epsilon) == (ratio < 1)


@pytest.mark.parametrize(("epsilon", "ratio"), [(0.75, 1.79), (3, 1.60), (18, 1.23)])
def test_the_papers_anchor_constant_at_phase_one_is_too_large_as_the_notes_computed(epsilon, ratio):
    exact = multiplier(planned("mb-sgd", Budget(epsilon, DELTA), [N], rounds=50), "minibatch")
    theirs = paper_multipliers("spider", Budget(epsilon, DELTA), {"rounds": 50, "phase": 1})[
        "anchor"
    ]
    assert theirs / exact == pytest.approx(ratio, abs=0.006)


def test_the_papers_local_sgd_constant_pays_for_every_local_step():
    local = paper_multipliers("local-sgd", Budget(3.0, DELTA), {"rounds": 10, "local_steps": 5})
    assert local == pytest.approx(paper_multipliers("mb-sgd", Budget(3.0, DELTA), {"rounds": 50}))


def test_an_algorithm_without_constants_in_the_paper_is_refused():
    with pytest.raises(
        BadInput, match="no experimental noise constants for prox-svrg; use --noise exact"
    ):
        paper_multipliers("prox-svrg", Budget(3.0, DELTA), {"rounds": 50})


def test_with_given_noise_the_plan_says_what_it_really_costs():
    run = functools.partial(ALGORITHMS["mb-sgd"].run, rounds=50, step=1.0)
    plan = with_multipliers(
        run, {"minibatch": Gaussian("minibatch", 1.0, 5.0)}, [N, 10], Budget(1.0, 1e-5), Everyone(2)
    )
    assert isinstance(plan.rule, GDP)
    assert plan.spent() == pytest.approx(
        np.full((1, 2), get_epsilon_gaussian(5 / math.sqrt(50), 1e-5)), rel=1e-6
    )
    silent = with_multipliers(
        run, {"minibatch": Gaussian("minibatch", 1.0, 0.0)}, [N], Budget(1.0, 1e-5)
    )
    assert np.isinf(silent.spent()).all()
