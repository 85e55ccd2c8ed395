"""A personal model for every task and model: near the shared one where that is right, far from it
where it is not.
"""

import numpy as np
import pytest
import torch

from silodp.core.problem.build import Words, build
from silodp.core.problem.person import Person
from silodp.core.problem.task import Task
from silodp.silo.fits.blend import personal_model
from silodp.silo.fits.compare import compare
from silodp.silo.fits.figures import Scale
from silodp.silo.fits.head import likelihood, outputs_at
from silodp.silo.fits.rows import Rows

FEATURES = 4


def draw(n, seed=0, weight=(2.0, -1.0, 0.0, 0.0), shift=-0.5):
    random = np.random.default_rng(seed)
    x = torch.from_numpy(random.uniform(-1, 1, (n, FEATURES)))
    z = x @ torch.tensor(weight, dtype=torch.float64) + shift
    return x, z, random


def binary(n, seed=0, **settings):
    x, z, random = draw(n, seed, **settings)
    y = torch.from_numpy((random.random(n) < torch.sigmoid(z).numpy()).astype(np.int64))
    return Rows.of(x, y, None)


def logistic(weight, shift):
    problem = build(Words("logistic", Task("binary", 2)), FEATURES, load=None)
    return problem, torch.tensor([*weight, shift], dtype=torch.float64)


def loss_of(problem, w, rows):
    outputs = outputs_at(problem, w[None], rows.x)[0]
    return float(rows.by_record(likelihood(problem)(outputs, rows.y)).mean())


TASKS = {
    "two classes": Task("binary", 2),
    "weighted classes": Task("binary", 2, (0.2, 1.0)),
    "classes": Task("multiclass", 3),
    "ordered classes": Task("ordinal", 3),
    "survival times": Task("survival", bins=3),
    "counts": Task("count", most=20.0),
    "numbers": Task("regression"),
    "robust numbers": Task("regression", huber=0.2),
}


def targets(task, z, random):
    noisy = z.numpy() + 0.3 * random.normal(size=len(z))
    if task.kind == "regression":
        return torch.from_numpy(noisy / 4)
    if task.kind == "count":
        return torch.from_numpy(random.poisson(np.exp(noisy)).clip(0, 20).astype(float))
    if task.kind == "survival":
        last = np.clip(np.round(1.5 - noisy), 0, 3).astype(np.int64)
        event = (random.random(len(z)) < 0.7) & (last < 3)
        return torch.from_numpy(2 * last + event)
    if task.classes == 2:
        return torch.from_numpy((noisy > 0).astype(np.int64))
    return torch.from_numpy(np.digitize(noisy, [-1.0, 0.5]).astype(np.int64))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
@pytest.mark.parametrize("model", ["linear", "additive:4", "mlp:3"])
def test_every_task_and_model_is_fitted_to_a_silo_that_the_shared_model_does_not_fit(model, task):
    if model == "linear" and task.kind not in ("count", "regression"):
        model = "logistic"
    x, z, random = draw(90)
    rows = Rows.of(x, targets(task, z, random), None)
    problem = build(Words(model, task), FEATURES, load=None)
    shared = 0.3 * problem.initial([1])[0].double() + 0.1
    found = personal_model(problem, shared, rows, problem.initial([0])[0])
    assert sum(found.shares.values()) == pytest.approx(1)
    before = loss_of(problem, shared, rows)
    for point in (found.personal, found.alone):
        assert bool(torch.isfinite(point).all())
        assert loss_of(problem, point, rows) < before


def test_a_small_silo_keeps_a_shared_model_that_is_right():
    problem, shared = logistic((2.0, -1.0, 0.0, 0.0), -0.5)
    test = binary(4000, seed=99)
    right = loss_of(problem, shared, test)
    personal = []
    alone = []
    for seed in range(20):
        found = personal_model(problem, shared, binary(40, seed), shared)
        personal.append(loss_of(problem, found.personal, test))
        alone.append(loss_of(problem, found.alone, test))
    assert np.mean(personal) < right + 0.01
    assert np.mean(personal) < np.mean(alone) - 0.03


def test_a_useless_shared_model_costs_a_silo_next_to_nothing():
    problem, shared = logistic((-9.0, 4.0, 9.0, -9.0), 5.0)
    test = binary(4000, seed=99)
    excess = []
    for seed in range(20):
        found = personal_model(problem, shared, binary(100, seed), shared)
        alone = loss_of(problem, found.alone, test)
        excess.append(loss_of(problem, found.personal, test) - alone)
    assert np.mean(excess) < 0.01


def test_risks_that_are_too_extreme_are_recalibrated():
    problem, shared = logistic((8.0, -4.0, 0.0, 0.0), 3.0)
    test = binary(4000, seed=99)
    best = loss_of(problem, shared / 4 - torch.tensor([0.0, 0, 0, 0, 1.25]), test)
    found = [personal_model(problem, shared, binary(60, seed), shared) for seed in range(10)]
    losses = [loss_of(problem, one.personal, test) for one in found]
    assert loss_of(problem, shared, test) > best + 0.4
    alone = [loss_of(problem, one.alone, test) for one in found]
    assert np.mean(losses) < np.mean(alone) - 0.01


def test_a_personal_model_gives_the_classes_own_risks_whatever_their_weights_are():
    rows = binary(3000, shift=-2.0)
    share = float(rows.y.double().mean())
    for weights in ((), (0.1, 1.0)):
        task = Task("binary", 2, weights)
        problem = build(Words("logistic", task), FEATURES, load=None)
        found = personal_model(problem, torch.zeros(FEATURES + 1).double(), rows, torch.zeros(5))
        risks = task.read(outputs_at(problem, found.personal[None], rows.x)[0])[:, 1]
        assert float(risks.mean()) == pytest.approx(share, abs=0.01)


def test_figures_of_cross_validation_are_of_records_that_no_fit_has_seen():
    """Labels are drawn without a look at the features: nothing can be learnt, so no honest loss is
    below that of the share of the classes.
    """
    random = np.random.default_rng(5)
    x = torch.from_numpy(random.uniform(-1, 1, (60, 12)))
    rows = Rows.of(x, torch.from_numpy(random.permutation(np.arange(60) % 2)), None)
    task = Task("binary", 2)
    problem = build(Words("logistic", task), 12, load=None)
    shared = torch.from_numpy(random.normal(size=13))
    found = compare(problem, shared, rows, None, shared)
    table = found.table(problem, Scale(task))
    assert table["alone"]["log loss"] > 0.69
    assert table["personal"]["log loss"] > 0.69


def test_all_rows_of_a_person_are_in_one_fold_and_weigh_as_one_record():
    x = torch.rand(50, 3, 2, dtype=torch.float64)
    y = torch.randint(0, 2, (50, 3))
    y[:, 2] = -1
    rows = Rows.of(x, y, Person("patient", 3, "mean"))
    assert len(rows.y) == 100
    assert rows.records == 50
    assert torch.allclose(
        rows.by_record(torch.ones(100, dtype=torch.float64)), torch.ones(50).double()
    )
    fold = rows.folds(5)
    for k in range(5):
        train = rows.of_records(torch.nonzero(fold != k)[:, 0])
        out = rows.x[fold[rows.owner] == k]
        assert not any(bool((row == train.x).all(1).any()) for row in out)


def test_a_record_with_a_number_that_is_not_finite_is_left_out():
    x = torch.rand(30, 2)
    x[3, 1] = torch.nan
    assert Rows.of(x, torch.zeros(30).long(), None).records == 29
