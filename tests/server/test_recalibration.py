"""One priced question at the end of a run makes the model's risks right, within its budget."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special
from torch import nn

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import gdp_mu
from silodp.core.problem.losses import (
    Hazard,
    Ordinal,
    Poisson,
    Weighted,
    cross_entropy,
    logistic,
    squared_error,
)
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.problem.task import Task
from silodp.core.statistics.risk_cells import scored
from silodp.runs import RunFolder
from silodp.server.advice import Facts, choose
from silodp.server.estimates import recalibration
from silodp.server.estimates.placing import spread_of
from silodp.server.estimates.recalibration import KIND, Recalibrated, check, fit, folded, question
from silodp.server.federation import StopRun
from silodp.server.order import Order
from silodp.server.plan import PlanLimits
from silodp.server.prepare import prepare
from silodp.server.shuffled import share_of
from silodp.simulation.frames import train
from silodp.simulation.planning import planned

NAMED = {"algorithm": "mb-sgd", "model": "logistic", "rounds": 5, "step": 8.0}


def frames(n=1500, seed=3):
    random = np.random.default_rng(seed)
    found = []
    for _ in range(2):
        x = random.uniform(-1, 1, (n, 3))
        y = (random.random(n) < special.expit(x @ [2.0, -1.0, 0.5] - 1)).astype(int)
        found.append(pd.DataFrame(x, columns=["a", "b", "c"]).assign(label=y))
    return found


RANGES = {name: (-1.0, 1.0) for name in "abc"}


# --- its price -----------------------------------------------------------------------------------


def test_the_plan_has_the_share_of_the_budget_and_all_of_it_is_spent():
    order = Order("mb-sgd", rounds=5, epsilon=("2",), recalibration=0.1)
    made = prepare(order, ("a", "b"), (500, 900))
    np.testing.assert_allclose(made.plan.spent(), 2.0, rtol=1e-6)
    multipliers = made.plan.mechanisms[KIND].multipliers(range(2))[0].numpy()
    whole = np.array([gdp_mu(budget) ** 2 for budget in made.budgets])
    np.testing.assert_allclose(1 / multipliers**2, 0.1 * whole, rtol=1e-6)
    assert [made.plan.count(KIND, silo) for silo in range(2)] == [1, 1]
    without = prepare(replace(order, recalibration=0.0), ("a", "b"), (500, 900))
    assert KIND not in without.plan.mechanisms


@pytest.mark.parametrize("trust", ["isrl", "masks", "shuffle", "central"])
def test_plan_run_ledger_and_summary_have_the_same_price(tmp_path, trust):
    settings = NAMED | {"epsilon": 2.0, "recalibration": 0.1, "trust": trust, "seed": 1}
    train(frames(), ranges=RANGES, out=tmp_path / "run", **settings)
    files = RunFolder(tmp_path / "run")
    summary = json.loads(files.result.read_text())
    asked = [json.loads(line) for line in files.transcript.read_text().splitlines()]
    assert [row["kind"] for row in asked] == ["minibatch"] * 5 + [KIND]
    assert asked[-1]["statistic"] == "RiskCells"
    assert summary["recalibration"]["share"] == 0.1
    assert sum(summary["recalibration"]["shares"]) == pytest.approx(1, abs=1e-3)
    assert spread_of(summary).released, "the bins of an evaluation follow from this answer"
    for silo in summary["silos"]:
        assert silo["spent_epsilon"] == pytest.approx(2.0, rel=1e-6)
    answer = planned(
        Order("mb-sgd", rounds=5, epsilon=("2",), recalibration=0.1, trust=trust), (1500, 1500)
    )
    releases = {row["kind"]: row for row in answer["releases"]}
    noise = asked[-1]["noise_multiplier"]
    planned_noise = releases[KIND].get("parameters", releases[KIND])["noise_multiplier"]
    assert planned_noise == pytest.approx(np.ravel(noise)[0], rel=1e-6)
    used = [
        row["used"]["silo-0"] for row in map(json.loads, files.progress.read_text().splitlines())
    ]
    assert used[-1] - used[-2] == pytest.approx(0.1 * used[-1], rel=1e-6)
    assert all(a < b for a, b in pairwise(used))


@pytest.mark.parametrize("trust", ["isrl", "masks", "shuffle"])
def test_a_recalibration_that_the_plan_does_not_price_is_stopped(trust):
    """The mistake: the run asks, and the dry run by which it is priced did not."""
    order = Order("mb-sgd", rounds=5, epsilon=("2",), recalibration=0.1, trust=trust)
    made = prepare(replace(order, recalibration=0.0), ("a", "b"), (500, 900))
    problem = Problem(*model_by_name("logistic", 3, 2), zero=True)
    asked = question(problem, problem.initial([0]), Gaussian(KIND, 1.0, 1.0))
    with pytest.raises(StopRun, match="more releases of kind 'recalibration' than were planned"):
        PlanLimits(made.plan)(asked, [0, 1])
    PlanLimits(prepare(order, ("a", "b"), (500, 900)).plan)(asked, [0, 1])


@pytest.mark.parametrize("trust", ["isrl", "masks", "shuffle"])
def test_the_ledger_refuses_a_recalibration_beside_the_whole_budget(tmp_path, monkeypatch, trust):
    """The mistake: training is given the whole budget, and nobody checks the question."""
    order = Order(**NAMED, epsilon=("2",), seed=1, trust=trust)
    unpriced = prepare(order, ("a", "b"), (1500, 1500))
    noise = replace(recalibration.mechanism(), noise_multiplier=5.0)
    if order.totals:
        noise = share_of(noise, 2, masked=trust == "masks")
    monkeypatch.setattr(type(unpriced), "recalibration", property(lambda made: noise))
    monkeypatch.setattr(PlanLimits, "__call__", lambda limits, query, silos: None)
    with pytest.raises(Exception, match="budget"):
        train(
            frames(), ranges=RANGES, out=tmp_path / "run", **NAMED, epsilon=2.0, seed=1, trust=trust
        )


@pytest.mark.parametrize(
    "wrong",
    [{"recalibration": 1.0}, {"recalibration": -0.1}, {"recalibration": 0.1, "noise": "paper"}],
)
def test_a_share_without_a_meaning_is_refused(wrong):
    with pytest.raises(BadInput, match="recalibration"):
        Order("mb-sgd", **wrong)


def test_the_advisor_buys_it_where_it_is_worth_its_price_and_may_be_asked():
    def share(epsilon, **more):
        task = more.pop("task", Task.plain(2))
        order = Order(epsilon=(epsilon,), trust=more.pop("trust", "isrl"))
        facts = Facts(("a", "b"), (600, 600), ("number",) * 3, task, **more)
        return choose(order, facts).order.recalibration

    assert share("3") == recalibration.SHARE
    assert share("3", trust="masks") == recalibration.SHARE
    assert share("3", trust="shuffle", statistics=("Grad", "GradDiff")) == 0.0
    assert share("0.05") == 0.0
    assert share("3", statistics=("Grad", "GradDiff")) == 0.0
    assert share("3", task=Task.plain(0)) == 0.0


@pytest.mark.parametrize("trust", ["masks", "shuffle"])
def test_the_likelihood_has_the_noise_of_the_total(trust, monkeypatch):
    """It is that of one hospital with all records: a part 1 / sqrt(2) of the noise without trust
    in anybody.
    """
    known = []
    shipped = recalibration.fit
    monkeypatch.setattr(
        recalibration, "fit", lambda *words: known.append(words[2:4]) or shipped(*words)
    )
    for one in ("central", trust, "isrl"):
        train(frames(), ranges=RANGES, **NAMED, epsilon=2.0, recalibration=0.1, trust=one, seed=1)
    (central, records), (total, in_total), (apart, _) = known
    assert total == pytest.approx(central, rel=1e-3)
    assert apart == pytest.approx(math.sqrt(2) * central, rel=1e-3)
    assert in_total == records == 3000


# --- what it finds -------------------------------------------------------------------------------


def answer_of(score, outcome, noise, loss=logistic, seed=0):
    """What all silos would answer, together."""
    edges, cap = recalibration._bins(loss)
    place = np.searchsorted(edges.numpy(), score)
    bins = len(edges) + 1
    found = np.zeros(2 + 2 * bins)
    found[0] = outcome.mean() / cap
    said = special.expit(score) if cap == 1 else np.exp(score) / cap
    found[1] = said.clip(0, 1).mean()
    np.add.at(found, 2 + place, (1 - outcome / cap) / len(score))
    np.add.at(found, 2 + bins + place, outcome / cap / len(score))
    return found + noise * np.random.default_rng(seed).standard_normal(len(found))


@pytest.mark.parametrize(("intercept", "slope"), [(0.0, 1.0), (-0.5, 0.5), (0.3, 1.6), (-1.0, 1.0)])
def test_little_noise_shows_intercept_and_slope(intercept, slope):
    random = np.random.default_rng(5)
    score = random.normal(-1.0, 1.2, 40_000)
    outcome = (random.random(len(score)) < special.expit(intercept + slope * score)).astype(float)
    found = fit(logistic, answer_of(score, outcome, 1e-4), 1e-4, len(score))
    assert found.intercept == pytest.approx(intercept, abs=0.06)
    assert found.slope == pytest.approx(slope, rel=0.06)


def test_an_answer_that_noise_drowns_changes_next_to_nothing():
    random = np.random.default_rng(6)
    score = random.normal(-1.0, 1.2, 400)
    outcome = (random.random(400) < special.expit(0.4 * score)).astype(float)
    found = [fit(logistic, answer_of(score, outcome, 0.5, seed=s), 0.5, 400) for s in range(20)]
    assert np.median([abs(np.log(f.slope)) for f in found]) < 0.25
    assert np.median([abs(f.intercept) for f in found]) < 0.3


def test_noise_in_empty_bins_does_not_pass_for_records_with_extreme_scores():
    """The mean risk of a rare outcome then was too low by a tenth of itself."""
    random = np.random.default_rng(11)
    score = random.normal(-2.5, 0.8, 4000)
    risk = special.expit(score)
    off = []
    for seed in range(20):
        outcome = (np.random.default_rng(seed).random(4000) < risk).astype(float)
        found = fit(logistic, answer_of(score, outcome, 0.006, seed=seed), 0.006, 4000)
        off.append(special.expit(found.intercept + found.slope * score).mean() / risk.mean() - 1)
    assert abs(np.mean(off)) < 0.05


@pytest.mark.parametrize("noise", [0.002, 0.005])
def test_the_mean_risk_is_right_where_records_have_one_of_two_scores(noise):
    """Scores far apart and at the edges of bins: a smooth curve over the bins' middles has neither
    their shares nor their risks. The mean risk then was too high by a third of itself.
    """
    score = np.where(np.arange(6000) % 5 == 0, -0.81, -2.79)
    risk = special.expit(0.2 + score)
    found = []
    for seed in range(10):
        outcome = (np.random.default_rng(seed).random(6000) < risk).astype(float)
        made = fit(logistic, answer_of(score, outcome, noise, seed=seed), noise, 6000)
        found.append(special.expit(made.intercept + made.slope * score).mean())
    assert np.mean(found) == pytest.approx(risk.mean(), rel=0.05)


def test_counts_have_their_rate_and_survival_its_hazard():
    random = np.random.default_rng(7)
    loss = Poisson(40.0)
    score = random.normal(0.5, 0.6, 30_000)
    counts = np.minimum(random.poisson(np.exp(0.3 + 0.8 * score)), 40).astype(float)
    found = fit(loss, answer_of(score, counts, 1e-5, loss), 1e-5, len(score))
    assert found.intercept == pytest.approx(0.3, abs=0.05)
    assert found.slope == pytest.approx(0.8, rel=0.07)
    events = fit(Hazard(4), np.array([0.3, 0.2 / 3]), 1e-5, 5000)
    assert events.intercept == pytest.approx(np.log(1.5), abs=0.02)
    assert events.slope == 1.0


# --- the model -----------------------------------------------------------------------------------

MODELS = {
    "one logit": (model_by_name("logistic", 3, 2)[0], logistic, 2),
    "two outputs": (model_by_name("mlp:4", 3, 2)[0], cross_entropy, 2),
    "weighted": (model_by_name("logistic", 3, 2)[0], Weighted(logistic, (0.2, 1.0)), 2),
    "two weighted": (model_by_name("mlp:4", 3, 2)[0], Weighted(cross_entropy, (0.2, 1.0)), 2),
    "curves": (model_by_name("additive:5", 3, 2)[0], logistic, 2),
    "counts": (model_by_name("linear", 3, Task("count", most=9.0))[0], Poisson(9.0), 9),
    "order": (model_by_name("logistic", 3, Task("ordinal", 4))[0], Ordinal(4), 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_score_of_the_folded_model_is_intercept_and_slope_of_the_score(name):
    model, loss, classes = MODELS[name]
    problem = Problem(model, loss)
    check(problem)
    random = torch.Generator().manual_seed(1)
    w = torch.randn(1, problem.dim, generator=random, dtype=torch.float64)
    x = torch.rand(50, 3, generator=random, dtype=torch.float64) * 2 - 1
    y = torch.randint(0, classes, (50,), generator=random)
    made = folded(problem, w, Recalibrated(0.7, 1.4))
    before, after = (
        scored(loss, problem.outputs(v, x)[0], y.double() if classes == 9 else y, 1.0)[0]
        for v in (w, made)
    )
    torch.testing.assert_close(after, 0.7 + 1.4 * before)


def test_a_model_that_has_no_risks_is_refused_before_anything_is_asked(tmp_path):
    with pytest.raises(BadInput, match="--no-recalibration"):
        check(Problem(nn.Linear(3, 1), squared_error))
    with pytest.raises(BadInput, match="cannot be recalibrated"):
        train(
            frames(50),
            classes=None,
            ranges=RANGES,
            out=tmp_path / "run",
            **(NAMED | {"model": "linear", "recalibration": 0.1}),
        )


def test_a_run_that_is_too_sure_of_its_risks_is_made_right(tmp_path):
    """Steps that are far too long make a model whose risks are too extreme."""
    settings = NAMED | {"rounds": 20, "step": 60.0, "epsilon": 4.0, "seed": 1}
    test = frames(seed=9)[0]
    losses = []
    for share in (0.0, 0.1):
        made = train(frames(), ranges=RANGES, recalibration=share, **settings)
        risk = made.predict(test.drop(columns="label"))["risk_1"].clip(1e-9, 1 - 1e-9)
        losses.append(float(-np.log(np.where(test.label == 1, risk, 1 - risk)).mean()))
    assert losses[1] < 0.8 * losses[0]
