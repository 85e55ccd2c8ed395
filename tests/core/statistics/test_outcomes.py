"""Each record's outcome as numbers in [0, 1], and the start of a training at their means."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.errors import Refused
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.build import Words, build
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
from silodp.core.statistics import Outcomes, RiskCells
from silodp.host.extension import load
from silodp.server.estimates.start import curvature, question, started
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.testing import check_statistic
from silodp.testing.statistic import hostile_records

X = torch.zeros(3, 2)


def made_for(task):
    model = "linear" if task.kind in ("count", "regression") else "logistic"
    return build(Words(model, task), 2, load=load)


def outcomes(loss, y, number=1):
    problem = Problem(nn.Linear(2, 3), loss)
    return Outcomes(number).rows(problem, 0)(torch.zeros(len(y), 2), torch.tensor(y)).tolist()


# --- what a record adds --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "y", "number", "found"),
    [
        (logistic, [0, 1], 1, [[0.0], [1.0]]),
        (Weighted(logistic, (0.1, 1.0)), [0, 1], 1, [[0.0], [1.0]]),
        (cross_entropy, [0, 1, 2], 2, [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]),
        (Ordinal(4), [0, 2, 3], 3, [[0.0] * 3, [1.0, 1.0, 0.0], [1.0] * 3]),
        (Poisson(8.0), [2.0, 8.0], 1, [[0.25], [1.0]]),
        (squared_error, [-1.0, 0.5], 1, [[0.0], [0.75]]),
    ],
)
def test_the_numbers_are_what_happened(loss, y, number, found):
    assert outcomes(loss, y, number) == found


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_a_label_that_is_none_of_the_tasks_stays_within_0_and_1(bad):
    for loss in (Poisson(8.0), squared_error):
        ((found,),) = outcomes(loss, [bad])
        assert 0 <= found <= 1
    assert outcomes(logistic, [-7]) == [[0.0]]


@pytest.mark.parametrize("number", [0, -1, 2**11, 1.0, True])
def test_a_number_of_outcomes_without_meaning_is_refused(number):
    with pytest.raises(Refused, match="shape"):
        Outcomes(number).check(3, 1)


@pytest.mark.parametrize("number", [1, 3])
def test_one_replaced_record_moves_the_sum_by_what_is_priced(number, monkeypatch):
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))
    problem = Problem(nn.Linear(4, number), Ordinal(number + 1))

    def whole(records):
        return Exact(problem, records, partition=lambda *_: np.arange(5))

    check_statistic(Outcomes(number), hostile_records(4), whole, dim=problem.dim, reaches=0.99)


class OutOfRange(Outcomes):
    """A mistake: the numbers are those of the label, not within [0, 1]."""

    def rows(self, problem, run, dtype=None):
        return lambda x, y: 2 * y.double()[:, None].clamp(0, 1)


def test_numbers_that_move_further_than_is_priced_are_seen():
    problem = Problem(nn.Linear(4, 1), logistic)

    def whole(records):
        return Exact(problem, records, partition=lambda *_: np.arange(5))

    with pytest.raises(AssertionError):
        check_statistic(OutOfRange(1), hostile_records(4), whole, dim=problem.dim)


# --- where training starts -----------------------------------------------------------------------


def answer(problem, y):
    """Return the question of a start, and the answer about these labels without noise."""
    w = problem.initial([0])
    asked = question(problem, w)
    x = torch.zeros(len(y), 2)
    return w, asked, asked.rows(problem, 0)(x, torch.tensor(y)).mean(0, keepdim=True)


def test_the_start_predicts_the_mean_outcome_of_every_kind_of_label():
    tenth = [1] + [0] * 9
    for task, y, predicted, mean in (
        (Task("binary", 2), tenth, lambda o: o.sigmoid(), 0.1),
        (Task("count", most=20.0), [3.0] * 10, lambda o: o.exp(), 3.0),
        (Task("regression"), [-0.4] * 10, lambda o: o, -0.4),
        (Task("multiclass", 3), [2] + [0] * 9, lambda o: o.softmax(-1)[..., 2], 0.1),
        (Task("ordinal", 3), [1] * 9 + [0], lambda o: o.sigmoid()[..., 0], 0.9),
    ):
        problem = made_for(task)
        w, asked, mean_outcome = answer(problem, y)
        assert isinstance(asked, Outcomes)
        begun = started(problem, w, mean_outcome, 1e-4)
        outputs = problem.outputs(begun, X)[0]
        assert predicted(outputs).flatten()[0].item() == pytest.approx(mean, abs=0.02), task.kind


def test_the_start_of_survival_expects_as_many_events_as_have_happened():
    problem = made_for(Task("survival", bins=3, periods=(1.0, 1.0, 4.0)))
    y = [1, 6, 6, 6, 6, 4, 4, 2, 6, 3]
    w, asked, found = answer(problem, y)
    assert isinstance(asked, RiskCells)
    begun = started(problem, w, found, 1e-4)
    _, _, again = answer(problem, y)
    assert torch.equal(found, again)
    events, hazard = (
        RiskCells(begun, torch.zeros(0), 1.0)
        .rows(problem, 0)(torch.zeros(len(y), 2), torch.tensor(y))
        .mean(0)
    )
    assert hazard.item() == pytest.approx(events.item(), rel=0.15)
    first, second, last = problem.outputs(w, X)[0, 0].sigmoid().tolist()
    assert first == second < last, "a longer period has a larger hazard"


def test_an_answer_that_noise_drowns_leaves_the_start_at_what_is_publicly_known():
    for positive, expected in ((0.0, 0.5), (0.1, 0.1)):
        problem = made_for(Task("binary", 2, positive=positive))
        w = problem.initial([0])
        begun = started(problem, w, torch.tensor([[3.0]]), 100.0)
        found = problem.outputs(begun, X).sigmoid().flatten()[0].item()
        assert found == pytest.approx(expected, abs=0.02)


def test_weights_of_the_classes_are_part_of_the_start():
    plain = Problem(*model_by_name("logistic", 2, Task("binary", 2)), zero=True)
    weighed = Problem(*model_by_name("logistic", 2, Task("binary", 2, (1.0, 4.0))), zero=True)
    found = [
        started(made, made.initial([0]), torch.tensor([[0.1]]), 1e-4)[0, -1].item()
        for made in (plain, weighed)
    ]
    assert found[1] - found[0] == pytest.approx(math.log(4.0), abs=1e-3)


@pytest.mark.parametrize(
    ("task", "y"),
    [
        (Task("binary", 2), [0, 0, 0, 1]),
        (Task("count", most=20.0), [3.0, 1.0, 0.0, 4.0]),
        (Task("regression"), [0.1, 0.3, -0.5, 0.0]),
        (Task("ordinal", 4), [0, 3, 1, 2]),
        (Task("survival", bins=3), [1, 3, 5, 6]),
    ],
)
def test_the_curvature_is_that_of_the_loss_at_the_start(task, y):
    """The mean second derivative by one slope, of a feature of variance 1 that says nothing."""
    problem = made_for(task)
    w, _, mean = answer(problem, y)
    w = started(problem, w, mean, 1e-4).double()
    targets = torch.tensor(y).repeat(2)
    x = torch.zeros(8, 2, dtype=torch.float64)
    x[:, 0] = torch.tensor([1.0] * 4 + [-1.0] * 4)

    def loss(slope):
        point = w.clone()
        problem.split(point)[next(iter(problem.shapes))][0, 0, 0] = slope
        return problem.record_losses(problem.outputs(point, x), targets).mean()

    step = 1e-3
    second = (loss(step) - 2 * loss(0.0) + loss(-step)) / step**2
    tolerance = 0.35 if task.kind == "survival" else 0.05  # of records at risk an estimate is used
    assert curvature(problem, w)[0].item() == pytest.approx(second.item(), rel=tolerance)
    assert Gaussian("start", question(problem, w).norm, 1.0).clip
    assert isinstance(problem.loss, Hazard) == (task.kind == "survival")
