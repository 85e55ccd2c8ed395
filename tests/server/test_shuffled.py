"""Totals in simulation: the same algorithms, whose estimates are unbiased with the variance
promised, within the budget.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from silodp.cli.score import _counting
from silodp.core.errors import BadInput, Refused
from silodp.core.mechanisms import Gaussian, Shuffled
from silodp.core.privacy.accounting import Budget, gdp_mu
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches
from silodp.core.statistics import Grad, LocalSteps
from silodp.core.weights import Weights
from silodp.server.algorithms import find
from silodp.server.federation import Balanced, Everyone, Fixed, StopRun, Uniform
from silodp.server.order import Order
from silodp.server.plan import calibrate
from silodp.server.prepare import prepare
from silodp.server.settings import default_shares, prepared, sampling_by_name
from silodp.server.shuffled import ShuffledFederation, in_totals
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.silo.data.heldout import held_out
from silodp.silo.data.records import Records
from silodp.silo.service.policy import Shuffling
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


def planned(name: str, budgets, *, participation=None, counted=4, clip=1.0):
    algorithm = find(name)
    settings = algorithm.schedule(
        {"rounds": 8, "phase": 4, "local_steps": 1, "inner": 2, "restarts": 2, "slope": 1.0}
    )
    run = prepared(algorithm, settings, 0.5)
    sampling = sampling_by_name(None, algorithm, 8)
    mechanisms = {kind: Gaussian(kind, clip, 0.0, sampling) for kind in algorithm.kinds}
    plan = calibrate(
        run,
        mechanisms,
        [[budget] * 4 for budget in budgets],
        COUNTS,
        participation or Everyone(4),
        shares=default_shares(algorithm, settings),
        rule="gdp",
    )
    return in_totals(plan, counted, masked=False), run


def asking_once(fed, problem, w, **mechanisms):
    (mechanism,) = mechanisms.values()
    yield fed.mean(Query(Grad(w), mechanism))


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
    assert np.all(spent > [[0.999999], [0.999999 * 6]])
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


def test_the_estimate_is_unbiased_with_the_noise_of_exact_gaussian_noise():
    rounds = 600
    free = {"minibatch": Gaussian("minibatch", 0.5, 0.0)}
    budget = Budget(2.0, 1e-5)
    plan = calibrate(asking_once, free, [[budget] * 4] * rounds, COUNTS, rule="gdp")
    fed, _ = simulate(PROBLEM, RECORDS, in_totals(plan, 4, masked=True), list(range(rounds)))
    w = PROBLEM.initial([0]).expand(rounds, -1)
    mechanism = in_totals(plan, 4, masked=True).mechanisms["minibatch"]
    found, noise, records = fed.measure(Query(Grad(w), mechanism))
    silent, _ = simulate(
        PROBLEM, RECORDS, calibrate(asking_once, free, Budget(math.inf, 1e-5), COUNTS), [0]
    )
    each = silent.each()
    query = Query(Grad(w[:1]), free["minibatch"])
    truth = sum(each[i].mean(query)[0].double() * n for i, n in enumerate(COUNTS)) / sum(COUNTS)
    std = 2 * 0.5 / gdp_mu(budget) / sum(COUNTS)
    bias = (found.mean(0) - truth) / (std / math.sqrt(rounds))
    assert bool((bias.abs() < 4.5).all())  # false alarms: below 1e-4
    ratio = found.var(0) / std**2
    assert bool(((ratio - 1).abs() < 6 * math.sqrt(2 / rounds)).all())
    assert torch.allclose(noise, torch.tensor(std, dtype=torch.float64), rtol=1e-3)
    assert bool((records == sum(COUNTS)).all())


def test_a_total_of_too_few_silos_is_not_passed_on_and_stays_charged():
    plan, _ = planned("mb-sgd", [Budget(2.0, 1e-5)])
    fed, ledger = simulate(PROBLEM, RECORDS, plan, [0], Fixed((0, 1, 2)))
    with pytest.raises(StopRun, match="3 silos have answered, and the price counts on the noise"):
        fed.mean(Query(Grad(PROBLEM.initial([0])), plan.mechanisms["minibatch"]))
    spent = ledger.epsilon()[0]
    assert np.all(spent[:3] > 0)
    assert spent[3] == 0


@pytest.mark.parametrize("counted", [4, 3, 2])
def test_the_noise_of_a_total_is_that_of_central_dp_times_the_root_of_silos_over_counted_ones(
    counted,
):
    budget = Budget(2.0, 1e-5)
    plan, _ = planned("mb-sgd", [budget], counted=counted)
    central = math.sqrt(8) / gdp_mu(budget)
    noise = float(plan.mechanisms["minibatch"].noise_multiplier) * math.sqrt(4)
    assert noise / central == pytest.approx(math.sqrt(4 / counted), rel=1e-6)


def test_every_silo_adds_one_share_whatever_its_records():
    plan, _ = planned("mb-sgd", [Budget(2.0, 1e-5), Budget(1.0, 1e-5)])
    assert plan.mechanisms["minibatch"].noise_multiplier.shape == (2, 1)


@pytest.mark.parametrize("participation", [Uniform(4, 2, seed=0), Balanced(4, 2, seed=0)])
def test_silos_that_are_asked_less_often_pay_for_what_they_are_asked(participation):
    plan, run = planned("mb-sgd", [Budget(2.0, 1e-5)], participation=participation, counted=2)
    fed, ledger = simulate(PROBLEM, RECORDS, plan, [0], participation)
    for _ in run(fed, PROBLEM, PROBLEM.initial([0]), **plan.mechanisms):
        pass
    assert np.all(ledger.epsilon() <= 2.0)
    assert ledger.epsilon().max() > 1.0


def test_disjoint_batches_pay_once():
    plan, _ = planned("prox-sgd", [Budget(2.0, 1e-5)])
    mechanism = plan.mechanisms["minibatch"]
    assert isinstance(mechanism.sampling, DisjointBatches)
    share = 1 / gdp_mu(Budget(2.0, 1e-5)) / math.sqrt(4)
    assert float(mechanism.noise_multiplier) == pytest.approx(share, rel=1e-6)


def test_a_shuffle_counts_on_the_noise_of_all_but_those_that_may_collude():
    names = ("a", "b", "c", "d")
    cards = [SimpleNamespace(colluding=1) for _ in names]
    gate = Shuffling("a" * 64, "p.key", 4, 1)
    for quorum, counted in ((None, 3), (3, 2)):
        order = Order("mb-sgd", trust="shuffle", colluding=1, least=quorum, epsilon=("2",))
        mechanism = prepare(order, names, COUNTS).plan.mechanisms["minibatch"]
        assert mechanism.counted == counted == _counting(cards, "shuffle", quorum)["counted"]
        gate.check(mechanism)
    with pytest.raises(Refused):
        gate.check(replace(mechanism, counted=4))
    with pytest.raises(BadInput, match="no honest silo"):
        prepare(replace(order, least=None, colluding=3), names, COUNTS)
    with pytest.raises(BadInput, match="--colluding belongs to --trust masks or shuffle"):
        Order("mb-sgd", colluding=1)


def test_questions_that_are_asked_again_are_paid_for():
    plan, _ = planned("mb-sgd", [Budget(2.0, 1e-5)])
    algorithm = find("mb-sgd")
    run = prepared(algorithm, algorithm.schedule({"rounds": 8}), 0.5)
    gaussian = calibrate(
        run, {"minibatch": Gaussian("minibatch", 1.0, 0.0)}, Budget(2.0, 1e-5), COUNTS, rule="gdp"
    )
    dearer = in_totals(gaussian, 4, masked=True, drops=0.5)
    assert len(dearer.asked) == 12
    ratio = float(dearer.mechanisms["minibatch"].noise_multiplier) / float(
        plan.mechanisms["minibatch"].noise_multiplier
    )
    assert ratio == pytest.approx(math.sqrt(12 / 8), rel=1e-6)
    assert np.all(dearer.spent() <= 2.0)
    assert np.all(dearer.spent() > 1.9999)


def test_held_out_records_contribute_zero_and_the_mean_is_over_the_others(monkeypatch):
    """Deployed silos' own numbers of 200 and 120 records, a quarter held out, without noise."""
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))
    w, mechanism = torch.linspace(-2, 2, PROBLEM.dim)[None], Shuffled("a", 1.0, 1.0, counted=2)
    counts = (200, 120)
    parts = [(RECORDS.x[i, :n].numpy(), RECORDS.y[i, :n].numpy()) for i, n in ((0, 200), (3, 120))]
    silos = [
        Exact(PROBLEM, Records.of([part]), partition=lambda *_: None, held_out_share=0.25)
        for part in parts
    ]

    class Adding:
        def ask(self, query, asked):
            answers = torch.stack([silos[i].answer(query, [0])[0] for i in asked], 1)
            return Total(answers.sum(1, keepdim=True), tuple(asked))

    held = [int(held_out(n, 0.25).sum()) for n in counts]
    weights = Weights("records", counts, tuple(held))
    found = ShuffledFederation(Adding(), Everyone(2), weights).mean(Query(Grad(w), mechanism))
    trained = Records.of(
        [tuple(v[~held_out(n, 0.25)] for v in p) for p, n in zip(parts, counts, strict=True)]
    )
    each = simulated_federation(PROBLEM, trained, Everyone(2)).each()
    sizes = [n - h for n, h in zip(counts, held, strict=True)]
    query = Query(Grad(w), Gaussian("a", 1.0, 0.0))
    truth = sum(each[i].mean(query) * n for i, n in enumerate(sizes)) / sum(sizes)
    assert float((found - truth).abs().max()) < 1e-4
    assert float(truth.abs().max()) > 1e-2
