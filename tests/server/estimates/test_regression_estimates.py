"""Regressions from noisy residuals and information: without noise they are the usual ones, with it
their intervals hold, and where the noise decides there is no answer.
"""

import math

import numpy as np
import pytest
import torch

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.problem.build import Words, build
from silodp.core.problem.schema import Schema
from silodp.core.problem.task import Task
from silodp.core.weights import Weights
from silodp.server.estimates.regression import (
    LEVELS,
    MOMENTS,
    STEPS,
    model_of,
    planned,
    regress,
)
from silodp.server.estimates.scoring import gaussian_for
from silodp.server.federation import Everyone
from silodp.silo.data.records import Records
from silodp.silo.ledger.memory import MemoryLedger
from silodp.simulation.connect import connect

N = 3000
VAST = Budget(1e5, 1e-6)
RANDOM = np.random.default_rng(0)
X = np.stack([RANDOM.uniform(-1, 1, N), RANDOM.choice([-1.0, 1.0], N)], 1).astype(np.float32)
TRUTH = np.array([0.8, -0.4])
LABELS = {
    "binary": {"column": "y", "task": "binary", "classes": ["no", "yes"]},
    "count": {"column": "y", "task": "count", "most": 12},
    "survival": {"task": "survival", "time": "t", "event": "e", "edges": [*range(1, 13)]},
}


def schema(task, **more):
    columns = {"age": {"type": "number", "range": [-1, 1]}, "sex": {"type": "boolean"}}
    return Schema.of({"columns": columns | more, "label": LABELS[task]})


def labels(task, random=RANDOM, x=X):
    """Labels of a model that is right, with log ratios TRUTH for one unit of each feature."""
    eta = x @ TRUTH
    if task == "binary":
        return (random.random(len(x)) < 1 / (1 + np.exp(-eta))).astype(np.int64)
    if task == "count":
        return random.poisson(np.exp(eta)).clip(0, 12).astype(np.float32)
    time = np.ceil(random.exponential(1 / (0.08 * np.exp(eta)))).astype(int)
    lost = random.integers(4, 16, len(x))
    codes = np.where(time <= np.minimum(lost, 12), 2 * time - 1, 2 * np.minimum(lost, 12))
    return codes.astype(np.int64)


def fitted(task, trust="isrl", budget=VAST, silos=3, strata=False, y=None, x=X, columns=(), seed=5):
    model = model_of(schema(task), columns, strata=strata)
    if y is None:
        y = labels(task, np.random.default_rng(1), x)
    records = Records.of([(x[i::silos], y[i::silos]) for i in range(silos)])
    problem = build(Words("linear", Task.plain(0)), 2, load=None)
    ledger = MemoryLedger(GDP(), [budget] * silos, records.counts)
    weights = Weights("records", records.counts)
    fed = connect(trust, problem, records, ledger, [(seed, silos)], Everyone(silos), weights)
    mechanism = gaussian_for("r", [budget] * silos, trust=trust, counted=silos)
    return regress(fed, mechanism, model, records.counts), ledger


def by_hand(task, y, x=X):
    """The same fit by Newton's method, without noise."""
    a = np.concatenate([np.ones((len(x), 1)), x], 1).astype(float)
    if task == "survival":
        bins = np.arange(12)
        event = (bins == (y // 2)[:, None]) & (y % 2 == 1)[:, None]
        lost = (bins == (y // 2)[:, None]) & (y % 2 == 0)[:, None]
        i, b = np.nonzero((bins <= (y // 2)[:, None]) | event)
        offset = np.where(lost[i, b], math.log(0.5), 0.0)  # who is lost counts half
        a = np.concatenate([np.eye(12)[b], x[i]], 1)
        y = event[i, b].astype(float)
    else:
        offset = 0.0
    theta = np.zeros(a.shape[1])
    for _ in range(30):
        eta = a @ theta + offset
        if task == "binary":
            mean = 1 / (1 + np.exp(-eta))
            gradient, weight = y - mean, mean * (1 - mean)
        elif task == "count":
            gradient, weight = y - np.exp(eta), np.exp(eta)
        else:
            h = np.exp(eta)
            p = -np.expm1(-h)
            gradient, weight = (y - p) * h / p, h * h * (1 - p) / p
        information = a.T @ (a * weight[:, None])
        theta = theta + np.linalg.solve(information, a.T @ gradient)
    return theta[-2:], np.sqrt(np.linalg.inv(information).diagonal()[-2:])


@pytest.mark.parametrize("trust", ["isrl", "masks"])
@pytest.mark.parametrize("task", LABELS)
def test_without_noise_it_is_the_usual_fit_in_the_columns_own_units(task, trust):
    y = labels(task, np.random.default_rng(1))
    found, _ = fitted(task, trust, y=y)
    value, error = by_hand(task, y)
    own = np.array([1.0, 2.0])  # yes instead of no is two units of a boolean's feature
    assert found.names[-2:] == ("age", "sex")
    np.testing.assert_allclose(found.value[-2:], own * value, atol=0.35 * float(min(own * error)))
    np.testing.assert_allclose(found.error[-2:], own * error, rtol=0.12)


@pytest.mark.parametrize("task", LABELS)
def test_it_spends_the_budget_and_not_more(task):
    budget = Budget(3.0, 1e-6)
    for trust in ("isrl", "masks"):
        _, ledger = fitted(task, trust, budget)
        spent = np.asarray(ledger.epsilon())
        assert (spent <= 3.0).all()
        assert (spent > 2.99).all()
    assert math.isclose(MOMENTS + LEVELS + sum(STEPS), 1.0)


def test_the_standard_error_includes_the_noise_and_covers_the_truth():
    """Twenty data sets: nearly all intervals hold the truth, and without the noise they would
    not.
    """
    covered = []
    narrow = []
    for seed in range(20):
        y = labels("binary", np.random.default_rng(seed))
        found, _ = fitted("binary", "isrl", Budget(1.0, 1e-6), y=y, seed=seed)
        wrong = np.abs(found.value[-2:] - np.array([1.0, 2.0]) * TRUTH)
        covered.append(wrong < 1.96 * found.error[-2:])
        sampling = np.sqrt(found.error[-2:] ** 2 - found.noise[-2:] ** 2)
        narrow.append(wrong < 1.96 * sampling)
    assert np.mean(covered) >= 0.9
    assert np.mean(narrow) <= 0.8


def test_silos_with_their_own_hazards_are_strata():
    """One silo has ten times the hazard and other ages: a common hazard over time would blame the
    ages for it.
    """
    random = np.random.default_rng(3)
    x = X.copy()
    x[0::3, 0] = random.uniform(0.2, 1, len(x[0::3]))
    y = labels("survival", random, x)
    early = random.exponential(1 / (0.5 * np.exp(x[0::3] @ TRUTH)))
    y[0::3] = np.where(early < 12, 2 * np.ceil(early).astype(int) - 1, 24)
    with_strata, _ = fitted("survival", y=y, x=x, strata=True)
    without, _ = fitted("survival", y=y, x=x)
    assert abs(with_strata.value[0] - TRUTH[0]) < 3 * with_strata.error[0]
    assert abs(without.value[0] - TRUTH[0]) > 5 * without.error[0]


def test_where_the_noise_decides_one_sentence_says_which_column_it_hides():
    with pytest.raises(BadInput, match=r"the noise hides most of (age|sex); use a larger epsilon"):
        fitted("survival", "isrl", Budget(0.05, 1e-6))


@pytest.mark.parametrize("trust", ["isrl", "masks"])
@pytest.mark.parametrize("task", ["binary", "count", "survival"])
def test_the_smallest_budgets_give_that_sentence_too(task, trust):
    for epsilon in (1e-6, 1e-3, 1e-2):
        with pytest.raises(BadInput, match="the noise hides most of"):
            fitted(task, trust, Budget(epsilon, 1e-6))


def test_a_category_has_a_reference_and_a_chosen_column_is_alone():
    stage = {"stage": {"type": "category", "categories": ["I", "II", "III"]}}
    names = [term.name for term in model_of(schema("survival", **stage)).terms]
    assert names == ["age", "sex", "stage=II", "stage=III"]
    assert [term.name for term in model_of(schema("survival"), ["sex"]).terms] == ["sex"]
    found, _ = fitted("binary", columns=["sex"])
    assert found.names == ("constant", "sex")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"columns": ["weight"]}, "the columns of the schema are age, sex"),
        ({"strata": True, "trust": "masks"}, "--strata needs the answers of each silo"),
    ],
)
def test_what_cannot_be_fitted_is_refused_before_it_is_asked(words, said):
    with pytest.raises(BadInput, match=said):
        model_of(schema("binary"), **words)


def test_a_number_has_no_ratio():
    label = {"column": "y", "task": "regression", "range": [0, 1]}
    numbers = Schema.of({"columns": {"age": {"type": "number", "range": [0, 1]}}, "label": label})
    for given in (None, numbers):
        with pytest.raises(BadInput, match="binary, count or survival"):
            model_of(given)


def test_the_plan_foretells_the_noise():
    """Of a standardised column, the noise of a fit is near the plan's."""
    budget = Budget(2.0, 1e-6)
    model = model_of(schema("binary"))
    plan = planned(gaussian_for("r", [budget] * 3), model, [1000] * 3)
    half = next(row for row in plan["precision"] if row["events"] == 0.5)
    found, _ = fitted("binary", "isrl", budget)
    deviation = torch.tensor([X[:, 0].std(), 0.5]).numpy()
    np.testing.assert_allclose(found.noise[-2:] * deviation, half["noise"], rtol=0.4)
