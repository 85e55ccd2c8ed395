"""Figures of risks on raw records: each against a computation by hand."""

import numpy as np
import pytest
import torch

from silodp.core.problem.build import Words, build
from silodp.core.problem.schema import Schema
from silodp.core.problem.task import Task
from silodp.silo.fits.figures import Scale, calibration_slope, figures, scale_of
from silodp.silo.fits.rows import Rows


def rows_of(y):
    return Rows.of(torch.zeros(len(y), 1), torch.as_tensor(y), None)


def problem_of(task, model="logistic"):
    return build(Words(model, task), 1, load=None)


def test_risks_that_are_twice_too_extreme_have_a_slope_of_one_half():
    random = np.random.default_rng(0)
    z = random.normal(size=20000)
    y = (random.random(20000) < 1 / (1 + np.exp(-z))).astype(np.int64)
    problem = problem_of(Task("binary", 2))
    outputs = torch.from_numpy(2 * z)[:, None]
    assert calibration_slope(problem, outputs, rows_of(y)) == pytest.approx(0.5, abs=0.03)


def test_nothing_is_claimed_where_all_records_are_of_one_class():
    task = Task("binary", 2)
    found = figures(problem_of(task), Scale(task), torch.randn(9, 1).double(), rows_of([0] * 9))
    assert found["auc"] is None
    assert found["calibration slope"] is None


def test_numbers_are_in_the_unit_of_the_label():
    schema = Schema.of(
        {
            "columns": {"a": {"type": "number", "range": [0, 1]}},
            "label": {"task": "regression", "column": "b", "range": [100, 200]},
        }
    )
    scale = scale_of(schema, own_loss=False)
    outputs = torch.tensor([[0.0], [0.4]], dtype=torch.float64)
    problem = problem_of(schema, "linear")
    found = figures(problem, scale, outputs, rows_of(torch.tensor([0.2, 0.4])))
    assert found["squared error"] == pytest.approx(50.0)
    assert found["mean predicted"] == pytest.approx(160)
    assert found["mean observed"] == pytest.approx(165)


def test_the_deviance_of_counts_that_are_predicted_rightly_is_zero():
    task = Task("count", most=20.0)
    y = torch.tensor([0.5, 1.0, 4.0]).double()
    found = figures(problem_of(task, "linear"), Scale(task), y.log()[:, None], rows_of(y))
    assert found["deviance"] == pytest.approx(0, abs=1e-9)
    assert found["deviance explained"] == pytest.approx(1)


def test_the_c_index_counts_pairs_and_the_observed_risk_is_that_of_kaplan_and_meier():
    task = Task("survival", bins=3)
    random = np.random.default_rng(1)
    y = random.integers(0, 7, 40)
    outputs = torch.from_numpy(random.normal(size=(40, 3)))
    found = figures(problem_of(task), Scale(task), outputs, rows_of(y))
    risk = task.read(outputs)[:, -1].numpy()
    last, event = np.divmod(y, 2)
    right = pairs = 0.0
    for i in range(40):
        for j in range(40):
            if event[i] and (last[j] > last[i] or (last[j] == last[i] and not event[j])):
                pairs += 1
                right += float(risk[i] > risk[j])
    assert found["c-index"] == pytest.approx(right / pairs)
    alive = 1.0
    for b in range(3):
        fell = ((last == b) & (event == 1)).sum()
        alive *= 1 - fell / (fell + (last > b).sum())
    assert found["mean observed"] == pytest.approx(1 - alive)
