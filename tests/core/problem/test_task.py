"""The losses of every task: what they say, that their slopes are their gradients, and that a silo's
sum is a sum over records.
"""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from silodp.core.errors import BadInput
from silodp.core.problem.losses import (
    Hazard,
    Huber,
    Ordinal,
    Poisson,
    Weighted,
    cross_entropy,
    logistic,
    predicted,
    squared_error,
)
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.problem.task import Task
from silodp.engine.clipping import clipped_sum

TASKS = {
    "weighted classes": Task("multiclass", 3, weights=(0.5, 1.0, 4.0)),
    "weighted binary": Task("binary", 2, weights=(1.0, 9.0)),
    "huber": Task("regression", huber=0.4),
    "survival": Task("survival", bins=3),
    "count": Task("count", most=4.0),
    "ordinal": Task("ordinal", 4),
}


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def targets(task: Task, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if task.kind == "regression":
        return torch.randn(*shape, generator=generator)
    if task.kind == "count":
        return torch.randint(0, 5, shape, generator=generator).float()
    return torch.randint(
        0, 2 * task.bins + 1 if task.bins else task.classes, shape, generator=generator
    )


@pytest.mark.parametrize("one_logit", [False, True])
@pytest.mark.parametrize("name", TASKS)
def test_slopes_are_the_gradients_of_the_losses(name, one_logit):
    outputs_, loss = TASKS[name].head(one_logit=one_logit)
    problem = Problem(nn.Linear(2, outputs_), loss)
    outputs, target = (
        draws(2, 3, outputs_, 25).double().requires_grad_(),
        targets(TASKS[name], 2, 25),
    )
    total = sum(loss(outputs[s, j].T, target[s]).sum() for s in range(2) for j in range(3))
    (expected,) = torch.autograd.grad(total, outputs)
    assert problem.slope is not None
    assert torch.allclose(problem.slope(outputs.detach(), target), expected)


@pytest.mark.parametrize("model", ["logistic", "mlp:4"])
@pytest.mark.parametrize("name", TASKS)
def test_the_clipped_sum_is_that_of_each_record_alone(name, model):
    """The known slope over all records at once, against torch's gradient of one record's loss,
    clipped and summed one by one.
    """
    task = TASKS[name]
    model = "linear" if task.kind in ("regression", "count") and model == "logistic" else model
    problem = Problem(*model_by_name(model, 4, task))
    x, y, w = draws(1, 6, 4).double(), targets(task, 1, 6), draws(1, problem.dim).double()
    expected = torch.zeros(problem.dim, dtype=torch.float64)
    for record, target in zip(x[0], y[0], strict=True):
        point = w[0].clone().requires_grad_()
        problem.losses(point[None], record[None], target[None]).sum().backward()
        assert point.grad is not None
        expected += point.grad * min(1, 0.3 / max(float(point.grad.norm()), 1e-12))
    assert torch.allclose(
        clipped_sum(problem, w, x, y, torch.ones(1, 6).double(), 0.3)[0, 0], expected, atol=1e-5
    )


def test_weights_multiply_the_loss_of_their_class():
    z, y = draws(6, 3), torch.tensor([0, 1, 2, 2, 1, 0])
    assert torch.allclose(
        Weighted(cross_entropy, (1.0, 2.0, 5.0))(z, y),
        torch.tensor([1.0, 2, 5, 5, 2, 1]) * cross_entropy(z, y),
    )
    assert torch.allclose(
        Weighted(logistic, (1.0, 3.0))(z[:, :1], y.clamp(max=1)),
        torch.tensor([1.0, 3, 3, 3, 3, 1]) * logistic(z[:, :1], y.clamp(max=1)),
    )
    with pytest.raises(BadInput, match="cross_entropy or logistic"):
        Weighted(squared_error, (1.0, 2.0))


def test_huber_agrees_with_torch():
    z, y = 3 * draws(50, 1), draws(50, seed=1)
    assert torch.allclose(
        Huber(0.7)(z, y), functional.huber_loss(z[:, 0], y, reduction="none", delta=0.7)
    )


def test_the_hazards_make_one_distribution_over_all_that_can_be_seen():
    """With everybody followed to the end, exp(-loss) over 'the event in bin b', b = 0..K-1, and
    'never', sums to 1.
    """
    z, hazard = draws(1, 4), Hazard(4)
    outcomes = torch.tensor([1, 3, 5, 7, 8])
    chances = torch.exp(-hazard(z.expand(5, 4), outcomes))
    assert chances.sum() == pytest.approx(1.0)
    h = z.sigmoid()[0]
    assert float(chances[1]) == pytest.approx(float((1 - h[0]) * h[1]))


@pytest.mark.parametrize(("target", "bins"), [(0, 0), (2, 1), (4, 2), (8, 4)])
def test_whoever_is_lost_counts_only_in_the_bins_survived(target, bins):
    z = draws(1, 4)
    assert float(Hazard(4)(z, torch.tensor([target]))) == pytest.approx(
        float(functional.softplus(z[0, :bins]).sum())
    )


def test_a_target_that_no_survival_label_has_is_nan_and_contributes_nothing():
    hazard = Hazard(4)
    assert hazard(draws(2, 4), torch.tensor([-1, 9])).isnan().all()
    assert (hazard.slope(draws(1, 1, 4, 2), torch.tensor([[-1, 9]])) == 0).all()


def test_poisson_agrees_with_torch_up_to_the_most_and_is_a_straight_line_beyond():
    z, y, loss = draws(50, 1).clamp(max=2), torch.arange(50.0) % 9, Poisson(8.0)
    assert torch.allclose(loss(z, y), functional.poisson_nll_loss(z[:, 0], y, reduction="none"))
    far = torch.tensor([[5.0], [6.0], [7.0]])
    assert torch.allclose(loss(far, torch.zeros(3)).diff(), torch.full((2,), 8.0))
    assert (loss.slope(1e3 * draws(1, 1, 1, 9), torch.zeros(1, 9)) <= 8).all()
    assert torch.allclose(predicted(loss, far), torch.full((3,), 8.0))


def test_ordinal_chances_are_those_of_proportional_odds_and_sum_to_one():
    loss, score, thresholds = Ordinal(4), draws(5, 1), torch.tensor([-1.0, 0.5, 2.0])
    above = (score - thresholds).sigmoid()
    chances = loss.chances(score - thresholds)
    assert torch.allclose(chances[:, 0], 1 - above[:, 0])
    assert torch.allclose(chances[:, 2], above[:, 1] - above[:, 2], atol=1e-6)
    crossed = loss.chances(10 * draws(20, 3))
    assert (crossed >= 0).all()
    assert torch.allclose(crossed.sum(1), torch.ones(20))
    assert predicted(loss, torch.tensor([[9.0, 9.0, -9.0]])).tolist() == [2]


def test_ordered_classes_have_one_score_and_thresholds_that_training_orders():
    """Classes by the thresholds -1, 0.5 and 2 of a logistic score: gradient descent finds weights
    and thresholds, with one weight a feature.
    """
    problem = Problem(*model_by_name("logistic", 3, TASKS["ordinal"]))
    assert problem.dim == 3 + 3
    x, u = draws(4000, 3), torch.rand(4000, 1, generator=torch.Generator().manual_seed(5))
    score = x @ torch.tensor([[1.5], [-1.0], [0.0]]) + (u / (1 - u)).log()
    y = (score > torch.tensor([-1.0, 0.5, 2.0])).sum(1)
    w = problem.initial([0])
    for _ in range(200):
        w = w - 1.5 * clipped_sum(problem, w, x[None], y[None], torch.ones(1, 4000), 1e9)[0] / 4000
    assert torch.allclose(w[0], torch.tensor([1.5, -1.0, 0.0, 1.0, -0.5, -2.0]), atol=0.15)


@pytest.mark.parametrize("target", [-1, 4])
def test_a_class_outside_the_order_is_nan_and_contributes_nothing(target):
    assert Ordinal(4)(draws(1, 3), torch.tensor([target])).isnan().all()
    assert (Ordinal(4).slope(draws(1, 1, 3, 1), torch.tensor([[target]])) == 0).all()


def test_every_parameter_of_a_task_is_in_the_definition():
    tasks = [
        *TASKS.values(),
        Task("binary", 2, weights=(1.0, 8.0)),
        Task("regression", huber=0.5),
        Task("survival", bins=4),
    ]
    tasks += [Task("count", most=5.0), Task("ordinal", 5)]
    tasks += [Task("multiclass", 3), Task("regression")]
    texts = [Problem(nn.Linear(3, task.head()[0]), task.head()[1]).definition() for task in tasks]
    assert all(one != other for one, other in itertools.combinations(texts, 2))
    assert " at 0x" not in "".join(texts)


def test_a_schema_is_part_of_the_definition():
    plain, one, other = (
        Problem(nn.Linear(3, 2), cross_entropy, schema=schema).definition()
        for schema in ("", "a", "b")
    )
    assert len({plain, one, other}) == 3
    assert "schema" not in plain


def test_a_cnn_takes_flattened_images_and_the_fast_path_gives_its_gradients():
    problem = Problem(*model_by_name("cnn", 3 * 8 * 8, Task("binary", 2), (3, 8, 8)))
    slow = Problem(nn.Sequential(nn.Identity(), *problem.model, Own()), problem.loss)
    x, y, w = draws(2, 5, 192), torch.randint(0, 2, (2, 5)), problem.initial([3])
    one, other = (clipped_sum(p, w, x, y, torch.ones(2, 5), 0.2) for p in (problem, slow))
    assert torch.allclose(one, other, atol=1e-5)


class Own(nn.Module):
    """A module of a type that the fast path does not know."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("name", "task", "sentence"),
    [
        ("forest", 2, "model 'forest' is unknown"),
        ("linear", Task("survival", bins=3), "model linear does not fit the label"),
        ("logistic", Task("regression"), "model logistic does not fit the label"),
        ("linear", Task("ordinal", 3), "model linear does not fit the label"),
        ("logistic", Task("count", most=9.0), "model logistic does not fit the label"),
        ("cnn", 2, "needs images of 4 x 4 pixels"),
        ("mlp:0", 2, "needs a number of hidden units"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(name, task, sentence):
    with pytest.raises(BadInput, match=sentence):
        model_by_name(name, 4, task)


def test_outputs_follow_from_the_task():
    heads = {name: TASKS[name].head()[0] for name in TASKS}
    assert heads == {
        "weighted classes": 3,
        "weighted binary": 2,
        "huber": 1,
        "survival": 3,
        "count": 1,
        "ordinal": 3,
    }
    assert Task("binary", 2).head(one_logit=True) == (1, logistic)
    score, thresholds = model_by_name("logistic", 4, TASKS["survival"])[0]  # type: ignore[misc]
    assert score.weight.shape == (1, 4), "all periods have the same ratios of hazards"
    assert thresholds.bias.shape == (3,)
