"""One question makes a linear model: without noise the least squares of an independent solver, and
with noise one that is better than none.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LinearRegression
from torch import nn

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.losses import Weighted, logistic, squared_error
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import L1
from silodp.core.query import Query
from silodp.core.statistics import Gram
from silodp.core.weights import Weights
from silodp.server.algorithms import ALGORITHMS
from silodp.server.estimates.linear import MOST_EXCESS, _excess, _safest
from silodp.server.federation import Everyone, StopRun
from silodp.server.plan import calibrate, with_multipliers
from silodp.silo.data.records import Records
from silodp.silo.ledger.memory import MemoryLedger
from silodp.simulation.connect import connect

ONE_SHOT, FEATURES = ALGORITHMS["one-shot"], 4


def problem_of(classes, loss=None):
    model, own = model_by_name("linear" if classes == 0 else "logistic", FEATURES, classes)
    return Problem(model, loss or own)


def silos_of(classes, sizes=(300, 500), seed=3):
    """Features in [-1, 1]; labels of a linear model, or of normal classes around centres of their
    own.
    """
    random, made = np.random.default_rng(seed), []
    centres = random.normal(size=(max(classes, 1), FEATURES)) * 0.15
    for n in sizes:
        y = random.integers(0, max(classes, 1), n)
        x = (0.2 * random.normal(size=(n, FEATURES)) + centres[y]).clip(-1, 1)
        number = 0.1 + x @ [0.5, -0.3, 0.0, 0.2] + 0.05 * random.normal(size=n)
        made.append((x.astype(np.float32), y if classes else number.astype(np.float32)))
    return made


def run(problem, silos, epsilon, seeds=(0,), weights="records", trust="isrl", **settings):
    records, clip = Records.of(silos), settings.pop("clip", 1.0)
    go, mechanisms = (
        partial(ONE_SHOT.run, step=1.0, **settings),
        {"gram": Gaussian("gram", clip, 0.0)},
    )
    counts = [sum(records.counts)] if trust == "central" else records.counts
    if math.isinf(epsilon):
        plan = with_multipliers(go, mechanisms, counts, Budget(math.inf, 1e-5))
    else:
        plan = calibrate(go, mechanisms, Budget(epsilon, 1e-5), counts)
    ledger = MemoryLedger(plan.rule, [list(plan.budgets[0]) for _ in seeds], plan.counts)
    fed = connect(
        trust,
        problem,
        records,
        ledger,
        list(seeds),
        Everyone(len(records)),
        Weights(weights, records.counts),
    )
    (w,) = go(fed, problem, torch.zeros(len(seeds), problem.dim), **plan.mechanisms)
    return w, ledger


def pooled(silos):
    return tuple(np.concatenate(parts) for parts in zip(*silos, strict=True))


@pytest.mark.parametrize("trust", ["isrl", "central"])
def test_without_noise_a_number_has_the_slopes_of_scikit_learn(trust):
    silos = silos_of(0)
    w, _ = run(problem_of(0), silos, math.inf, trust=trust, clip=2.0)
    wanted = LinearRegression().fit(*pooled(silos))
    np.testing.assert_allclose(w[0], [*wanted.coef_, wanted.intercept_], atol=1e-5)


def test_a_bound_that_scales_records_down_leaves_the_slopes_of_a_linear_law():
    x, _ = pooled(silos_of(0))
    y = (0.1 + x @ [0.5, -0.3, 0.0, 0.2]).astype(np.float32)
    w, _ = run(problem_of(0), [(x, y)], math.inf, clip=0.4)
    np.testing.assert_allclose(w[0], [0.5, -0.3, 0.0, 0.2, 0.1], atol=1e-5)


def test_a_number_beyond_one_needs_a_public_cap():
    (x, y), *_ = silos_of(0)
    w, _ = run(problem_of(0), [(x, 30 * y)], math.inf, clip=2.0, cap=60.0)
    wanted = LinearRegression().fit(x, 30 * y)
    np.testing.assert_allclose(w[0], [*wanted.coef_, wanted.intercept_], atol=1e-3)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_without_noise_classes_have_the_logits_of_discriminant_analysis(classes):
    silos = silos_of(classes, (2000,))
    x, y = pooled(silos)
    problem = problem_of(classes)
    w, _ = run(problem, silos, math.inf, clip=2.0)
    wanted = LinearDiscriminantAnalysis().fit(x, y).predict_log_proba(x)
    found = problem.outputs(w.double(), torch.from_numpy(x).double())[0]
    found = torch.cat([torch.zeros_like(found), found], 1) if classes == 2 else found
    if classes == 2:
        np.testing.assert_allclose(found.softmax(1), np.exp(wanted), atol=0.002)
    assert float((found.argmax(1).numpy() == wanted.argmax(1)).mean()) > 0.95


def test_public_weights_of_classes_move_the_logit_by_their_logarithm():
    silos = silos_of(2)
    plain, _ = run(problem_of(2), silos, math.inf)
    weighted, _ = run(problem_of(2, Weighted(logistic, (0.25, 1.0))), silos, math.inf)
    torch.testing.assert_close(
        weighted - plain, torch.tensor([[0.0] * FEATURES + [math.log(4)]]), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("weights", ["equal", "records", "precision"])
@pytest.mark.parametrize("classes", [0, 2, 3])
def test_with_noise_it_is_better_than_guessing_and_spends_the_budget(classes, weights):
    silos, problem = silos_of(classes), problem_of(classes)
    w, ledger = run(problem, silos, 2.0, seeds=range(10), weights=weights)
    x, y = (torch.from_numpy(part) for part in pooled(silos_of(classes, (4000,))))
    loss, nothing = (
        problem.losses(w, x, y).mean(1),
        problem.losses(torch.zeros(1, problem.dim), x, y).mean(),
    )
    assert float((loss < nothing).double().mean()) >= 0.8
    assert float(loss.mean()) < 0.9 * float(nothing)
    np.testing.assert_allclose(ledger.epsilon(), 2.0, rtol=1e-6)


def test_a_model_that_noise_decides_is_refused_with_a_sentence():
    with pytest.raises(StopRun, match="the noise decides the answer"):
        run(problem_of(2), silos_of(2), 0.05)
    w, _ = run(problem_of(2), silos_of(2), 0.05, seeds=range(6))
    assert bool(w.isnan().any(1).double().mean() > 0.5)


def test_where_noise_hides_the_features_everybody_has_one_risk():
    random = np.random.default_rng(4)
    x = (0.2 * random.normal(size=(3000, FEATURES))).astype(np.float32)
    silo = (x, (random.random(3000) < 0.4).astype(np.int64))
    w, _ = run(problem_of(2), [silo], 0.4, seeds=range(20))
    constant = (w[:, :-1] == 0).all(1)
    assert int(constant.sum()) >= 10
    assert float(w[constant, -1].sigmoid().sub(0.4).abs().max()) < 0.1


def test_the_safest_constant_is_no_worse_than_it_is_said_to_be():
    share = torch.tensor([[0.05], [0.05], [0.5]], dtype=torch.float64)
    error = torch.tensor([[0.01], [0.001], [0.01]], dtype=torch.float64)
    risk, excess = _safest(share, error, math.inf)
    assert 0.03 < float(risk[0]) < 0.05
    assert float(risk[1]) == pytest.approx(0.05, abs=0.001)
    assert float(risk[2]) == pytest.approx(0.5)
    assert float(excess[0]) > MOST_EXCESS > float(excess[2]) > float(excess[1])
    for k, off in ((0, -3.25), (0, 3.25), (1, 3.25)):
        loss = _excess(share[k] + off * error[k], risk[k])
        assert float(loss) <= float(excess[k]) + 1e-6, (
            "the worst case is as bad as it is said to be"
        )


def test_runs_side_by_side_are_the_runs_alone():
    silos, problem = silos_of(2), problem_of(2)
    together, _ = run(problem, silos, 1.0, seeds=[4, 5], clip=torch.tensor([[1.0], [0.5]]))
    for j, (seed, clip) in enumerate([(4, 1.0), (5, 0.5)]):
        alone, _ = run(problem, silos, 1.0, seeds=[seed], clip=clip)
        torch.testing.assert_close(together[j], alone[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("weights", ["equal", "records", "precision"])
def test_the_noise_that_the_port_tells_is_the_noise_of_the_mean(weights):
    """4,000 releases of two silos: their spread is within 5 % of what is told (about 7 standard
    errors of it).
    """
    problem, records, runs = problem_of(2), Records.of(silos_of(2, (30, 90))), 4000
    ledger = MemoryLedger(
        calibrate(
            partial(ONE_SHOT.run, step=1.0),
            {"gram": Gaussian("gram", 1.0, 0.0)},
            Budget(1e7, 0.1),
            (30, 90),
        ).rule,
        [[Budget(1e7, 0.1)] * 2] * runs,
        records.counts,
    )
    fed = connect(
        "isrl",
        problem,
        records,
        ledger,
        list(range(runs)),
        Everyone(2),
        Weights(weights, records.counts),
    )
    gram = Gram(FEATURES, 2, 1.0, 1.0)
    mean, told, _ = fed.measure(Query(gram, Gaussian("a", gram.norm, torch.tensor([[0.5, 2.0]]))))
    assert float(mean.std(0).mean() / told) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (Problem(*model_by_name("mlp:3", FEATURES, 2)), "--model logistic"),
        (Problem(nn.Linear(FEATURES, 1), squared_error, L1(0.1)), "--prox"),
        (Problem(nn.Linear(FEATURES, 2), squared_error), "--model linear"),
    ],
)
def test_other_problems_are_refused_in_a_sentence(problem, said):
    with pytest.raises(BadInput, match=said):
        run(problem, silos_of(2), 1.0)
