"""Training starts at the model that predicts the mean outcome for everybody."""

import math

import pytest
import torch

from silodp.core.problem.build import Words, build
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.problem.task import Task
from silodp.core.statistics import Outcomes, RiskCells
from silodp.host.extension import load
from silodp.server.estimates.start import curvature, question, started

X = torch.zeros(3, 2)


def made_for(task):
    model = "linear" if task.kind in ("count", "regression") else "logistic"
    return build(Words(model, task), 2, load=load)


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
