"""SDP in simulation: the same algorithms over totals, whose estimates are unbiased with the
variance promised, within the budget.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.errors import BadInput, Refused
from silodp.core.mechanisms import Gaussian, Shuffled, shuffle
from silodp.core.mechanisms.totals import analysed
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches
from silodp.core.statistics import Grad, LocalSteps
from silodp.core.weights import Weights
from silodp.server.algorithms import find
from silodp.server.federation import Balanced, Everyone, Fixed, StopRun, Uniform
from silodp.server.plan import calibrate
from silodp.server.settings import default_shares, prepared, sampling_by_name
from silodp.server.shuffled import Kind, ShuffledFederation, calibrate_shuffled, numerical
from silodp.silo.answer.exact import Exact
from silodp.silo.data.heldout import held_out
from silodp.silo.data.records import Records
from silodp.simulation.connect import simulate
from silodp.testing.federation import simulated_federation
from silodp.wire.inprocess import Total

SDP = (
    "prox-sgd",
    "mb-sgd",
    "prox-svrg",
    "prox-pl-svrg",
    "spider",
    "spider-alternate",
    "diff2",
    "momentum",
    "adam",
    "disk",
    "accelerated",
    "localized",
)
COUNTS = (200, 200, 200, 120)
PROBLEM = Problem(nn.Sequential(nn.Linear(4, 2)), cross_entropy)
RNG = np.random.default_rng(0)
RECORDS = Records.of(
    [(RNG.normal(size=(n, 4)).astype(np.float32), RNG.integers(0, 2, n)) for n in COUNTS]
)


def planned(name: str, budgets, *, participation=None, least=4, clip=1.0):
    algorithm = find(name)
    settings = algorithm.schedule(
        {"rounds": 8, "phase": 4, "local_steps": 1, "inner": 2, "restarts": 2, "slope": 1.0}
    )
    run = prepared(algorithm, settings, 0.5)
    sampling = sampling_by_name(None, algorithm, 8)
    mechanisms = {kind: Gaussian(kind, clip, 0.0, sampling) for kind in algorithm.kinds}
    plan = calibrate_shuffled(
        run,
        mechanisms,
        budgets,
        COUNTS,
        participation or Everyone(4),
        dimension=PROBLEM.dim,
        least=least,
        shares=default_shares(algorithm, settings),
    )
    return plan, run


@pytest.mark.parametrize("name", SDP)
def test_the_same_algorithms_run_over_totals_and_spend_their_budget(name):
    budgets = [Budget(1.0, 1e-5), Budget(6.0, 1e-5)]
    plan, run = planned(name, budgets)
    fed, ledger = simulate(PROBLEM, RECORDS, plan, [3, 3])
    start = PROBLEM.initial([0]).expand(2, -1)
    *_, last = run(fed, PROBLEM, start, **plan.mechanisms)
    assert last.shape == (2, PROBLEM.dim)
    assert bool(torch.isfinite(last).all())
    spent = ledger.epsilon()
    assert np.all(spent <= [[1.0], [6.0]])
    assert np.all(spent > [[0.97], [0.97 * 6]])
    assert np.allclose(plan.spent(), spent)


def test_an_algorithm_that_asks_silos_one_by_one_has_no_totals():
    plan, _ = planned("mb-sgd", [Budget(2.0, 1e-5)])
    fed, _ = simulate(PROBLEM, RECORDS, plan, [3])
    with pytest.raises(BadInput, match="totals"):
        fed.each()
    with pytest.raises(Refused, match="statistic"):
        fed.mean(
            Query(LocalSteps(torch.zeros(1, PROBLEM.dim), 1, 0.1), plan.mechanisms["minibatch"])
        )


def test_the_estimate_is_unbiased_with_the_variance_promised():
    plan, _ = planned("mb-sgd", [Budget(2.0, 1e-5)], clip=0.5)
    mechanism = plan.mechanisms["minibatch"]
    free = Gaussian("minibatch", 0.5, 0.0)
    rounds = 600
    seeds = list(range(rounds))
    broad = calibrate_shuffled(
        lambda fed, problem, w, **m: iter([fed.mean(Query(Grad(w), m["minibatch"]))]),
        {"minibatch": free},
        [Budget(2.0, 1e-5)] * rounds,
        COUNTS,
        Everyone(4),
        dimension=PROBLEM.dim,
        least=4,
    )
    fed, _ = simulate(PROBLEM, RECORDS, broad, seeds)
    w = PROBLEM.initial([0]).expand(rounds, -1)
    found = fed.mean(Query(Grad(w), broad.mechanisms["minibatch"])).double()
    open_plan = calibrate(
        lambda fed, problem, w, **m: iter([fed.mean(Query(Grad(w), m["minibatch"]))]),
        {"minibatch": free},
        Budget(math.inf, 1e-5),
        COUNTS,
    )
    silent, _ = simulate(PROBLEM, RECORDS, open_plan, [0])
    each = torch.stack(
        [
            silent.each()[i].mean(Query(Grad(w[:1]), open_plan.mechanisms["minibatch"]))[0]
            for i in range(4)
        ]
    ).double()
    truth = (each * torch.tensor(COUNTS)[:, None]).sum(0) / sum(COUNTS)
    parameters = shuffle.Parameters(
        int(broad.mechanisms["minibatch"].levels[0]),
        int(broad.mechanisms["minibatch"].noise_bits[0]),
        mechanism.p,
    )
    std = math.sqrt(float(shuffle.variance(parameters, sum(COUNTS), 0.5)))
    bias = (found.mean(0) - truth) / (std / math.sqrt(rounds))
    assert bool((bias.abs() < 4.5).all())  # false alarms: below 1e-4
    ratio = found.var(0) / std**2
    assert bool(((ratio - 1).abs() < 6 * math.sqrt(2 / rounds)).all())


def test_the_simulated_counts_have_the_law_of_the_randomizer():
    """Mean and variance of one silo's counts, against the exact randomizer on the same record."""
    x, y = np.full((1, 4), 0.3, np.float32), np.zeros(1, int)
    records = Records.of([(np.repeat(x, 30, 0), np.repeat(y, 30))])
    plan = calibrate_shuffled(
        lambda fed, problem, w, **m: iter([fed.mean(Query(Grad(w), m["a"]))]),
        {"a": Gaussian("a", 1.0, 0.0)},
        [Budget(2.0, 1e-5)] * 400,
        (30,),
        Everyone(1),
        dimension=PROBLEM.dim,
        least=1,
    )
    fed, _ = simulate(PROBLEM, records, plan, list(range(400)))
    w = torch.zeros(400, PROBLEM.dim)
    simulated = fed.mean(Query(Grad(w), plan.mechanisms["a"])).double()
    residual = torch.tensor([-0.5, 0.5], dtype=torch.float64)
    gradient = torch.cat(
        [(residual[:, None] * torch.full((4,), 0.3, dtype=torch.float64)).flatten(), residual]
    ).numpy()
    parameters = shuffle.Parameters(
        int(plan.mechanisms["a"].levels[0]), int(plan.mechanisms["a"].noise_bits[0]), 0.5
    )
    random = np.random.default_rng(5).bytes
    exact = np.stack(
        [
            shuffle.analyze_counts(
                shuffle.randomize_counts(np.repeat(gradient[None], 30, 0), 1.0, parameters, random),
                1.0,
                30,
                parameters,
            )
            for _ in range(400)
        ]
    )
    std = exact.std()
    assert np.all(
        np.abs(simulated.mean(0).numpy() - exact.mean(0)) < 4.5 * std * math.sqrt(2 / 400)
    )
    assert abs(float(simulated.std()) / std - 1) < 0.06


def test_a_total_of_too_few_records_is_not_passed_on_and_stays_charged():
    plan, _ = planned("mb-sgd", [Budget(2.0, 1e-5)], least=4)
    fed, ledger = simulate(PROBLEM, RECORDS, plan, [0], Fixed((0, 1, 2)))
    with pytest.raises(StopRun, match="600 records were contributed where 720"):
        fed.mean(Query(Grad(PROBLEM.initial([0])), plan.mechanisms["minibatch"]))
    spent = ledger.epsilon()[0]
    assert np.all(spent[:3] > 0)
    assert spent[3] == 0


def test_noise_is_calibrated_to_the_fewest_records_that_may_be_passed_on():
    all_four, _ = planned("mb-sgd", [Budget(2.0, 1e-5)], least=4)
    any_two, _ = planned("mb-sgd", [Budget(2.0, 1e-5)], least=2)
    a, b = (p.mechanisms["minibatch"] for p in (all_four, any_two))
    assert (a.contributions, b.contributions) == (720, 120 + 200)
    assert int(b.noise_bits) * 320 == pytest.approx(
        int(a.noise_bits) * 720 * (int(b.levels) / int(a.levels)) ** 2, rel=0.1
    )
    fed, _ = simulate(PROBLEM, RECORDS, any_two, [0], Fixed((0, 1, 2)))
    assert fed.mean(Query(Grad(PROBLEM.initial([0])), b)).shape == (1, PROBLEM.dim)


@pytest.mark.parametrize("participation", [Uniform(4, 2, seed=0), Balanced(4, 2, seed=0)])
def test_silos_that_are_asked_less_often_pay_for_what_they_are_asked(participation):
    plan, run = planned("mb-sgd", [Budget(2.0, 1e-5)], participation=participation, least=2)
    fed, ledger = simulate(PROBLEM, RECORDS, plan, [0], participation)
    for _ in run(fed, PROBLEM, PROBLEM.initial([0]), **plan.mechanisms):
        pass
    assert np.all(ledger.epsilon() <= 2.0)
    assert ledger.epsilon().max() > 1.0


def test_disjoint_batches_pay_once():
    plan, _ = planned("prox-sgd", [Budget(2.0, 1e-5)])
    mechanism = plan.mechanisms["minibatch"]
    assert isinstance(mechanism.sampling, DisjointBatches)
    assert mechanism.contributions == sum(n // 8 for n in COUNTS)
    once = numerical(
        (Kind("minibatch", 1, 1 / 0.6),), mechanism.contributions, PROBLEM.dim, Budget(2.0, 1e-5)
    )["minibatch"]
    assert int(mechanism.noise_bits) <= 1.5 * once[1] * (int(mechanism.levels) / once[0]) ** 2


def test_the_analyzer_reads_the_mean_out_of_a_total_for_every_run():
    mechanism = Shuffled(
        "a",
        torch.tensor([[1.0], [2.0]]),
        torch.tensor([[10], [20]]),
        torch.tensor([[100], [50]]),
        30,
    )
    values = torch.tensor([[0.25, -0.5], [1.0, 0.0]], dtype=torch.float64)
    total = 30 * ((values / mechanism.clip + 1) * mechanism.levels / 2 + 0.5 * mechanism.noise_bits)
    assert torch.allclose(analysed(total, mechanism, 30), values)


def test_what_cannot_be_planned_is_said():
    with pytest.raises(BadInput, match="levels are needed"):
        numerical((Kind("a", 1, 1.0),), 100, 10**10, Budget(1.0, 1e-5))


def test_held_out_records_contribute_zero_and_the_mean_is_over_the_others():
    """Deployed silos' own counts of 200 and 120 records, a quarter held out: within 6 standard
    deviations of the mean of the rest.
    """
    shares, w, mechanism = (
        (0.25, 0.25),
        torch.linspace(-2, 2, PROBLEM.dim)[None],
        Shuffled("a", 1.0, 1000, 4, 320),
    )
    counts, parts = (
        (200, 120),
        [(RECORDS.x[i, :n].numpy(), RECORDS.y[i, :n].numpy()) for i, n in ((0, 200), (3, 120))],
    )
    silos = [
        Exact(PROBLEM, Records.of([p]), partition=lambda *_: None, held_out_share=s)
        for p, s in zip(parts, shares, strict=True)
    ]

    class Adding:
        def ask(self, query, asked):
            return Total(
                torch.stack([silos[i].answer(query, [0])[0] for i in asked], 1)
                .sum(1, keepdim=True)
                .double(),
                tuple(asked),
            )

    held = [int(held_out(n, 0.25).sum()) for n in counts]
    found = ShuffledFederation(Adding(), Everyone(2), Weights("records", counts, tuple(held))).mean(
        Query(Grad(w), mechanism)
    )
    trained = Records.of(
        [tuple(v[~held_out(n, 0.25)] for v in p) for p, n in zip(parts, counts, strict=True)]
    )
    each = simulated_federation(PROBLEM, trained, Everyone(2)).each()
    sizes = [n - h for n, h in zip(counts, held, strict=True)]
    truth = sum(
        each[i].mean(Query(Grad(w), Gaussian("a", 1.0, 0.0))) * n for i, n in enumerate(sizes)
    ) / sum(sizes)
    std = (
        math.sqrt(float(shuffle.variance(shuffle.Parameters(1000, 4, 0.5), sum(counts), 1.0)))
        * sum(counts)
        / sum(sizes)
    )
    assert float((found - truth).abs().max()) < 6 * std
    assert 6 * std < float(truth.abs().max()) / 5, "a mean over all would be seen"
