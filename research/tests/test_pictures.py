"""Small convolutional networks: which the kernels for a GPU know, and that they give there what the
CPU gives.
"""

import pytest
import torch
from torch import nn

from research.kernels import ENGINES, pictures
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.models import lenet
from silodp.core.problem.problem import Problem
from silodp.engine.clipping import IN_TORCH, choose, clipped_sum, task
from silodp.engine.compiled import compiled

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def small(side: int = 3, outputs: int = 4, bias: bool = True) -> nn.Module:
    width = ((28 - side + 1) // 2 - side + 1) // 2
    return nn.Sequential(
        *(
            nn.Conv2d(1, 3, side),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(3, outputs, side, bias=bias),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        ),
        *(nn.Linear(outputs * width**2, 7), nn.ReLU(), nn.Linear(7, 5)),
    )


NETWORKS = {"LeNet": (lenet(3, 10), (3, 32, 32), 10), "another": (small(), (1, 28, 28), 5)}


def asked(name):
    """Three points, four silos of 21 records: some do not take part, some are not finite, one has a
    label that no output has.
    """
    model, shape, classes = NETWORKS[name]
    problem, draw = Problem(model, cross_entropy), torch.Generator().manual_seed(0)
    x, y = (
        2 * torch.rand(4, 21, *shape, generator=draw) - 1,
        torch.randint(0, classes, (4, 21), generator=draw),
    )
    weight = (torch.rand(4, 21, generator=draw) < 0.8).float()
    x[0, 0], x[1, 1], x[3, 3], y[2, 2] = torch.nan, torch.nan, 1e20, classes + 3
    weight[0, 0], weight[1, 1], weight[3, 3], weight[2, 2] = 1, 0, 1, 1
    return problem, problem.initial([0, 1, 2]), x, y, weight, torch.tensor([[0.01], [1.0], [1e9]])


@pytest.mark.parametrize(
    ("model", "known"),
    [
        (lenet(3, 10), True),
        (small(), True),
        (small(5), True),
        (small(outputs=6), False),
        (small(bias=False), False),
        (small(7), False),
    ],
)
def test_known_are_two_stages_of_plain_convolutions(model, known):
    first = model[0]
    assert isinstance(first, nn.Conv2d)
    side = 32 if first.in_channels == 3 else 28
    problem, x, y = (
        Problem(model, cross_entropy),
        torch.zeros(1, 2, first.in_channels, side, side),
        torch.zeros(1, 2, dtype=torch.int64),
    )
    found = compiled(task(problem, problem.initial([0]), x, y, torch.ones(1, 2), 1.0))
    assert found is not None
    assert pictures.fits(found) is known


def test_on_a_cpu_others_do_the_work():
    problem, w, x, y, weight, clip = asked("LeNet")
    assert not pictures.Pictures().supports(task(problem, w, x, y, weight, clip))
    assert pictures.outputs(problem, w, x[2]) is None


@needs_gpu
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_sums_and_outputs_are_those_of_the_cpu(name, own):
    problem, w, x, y, weight, clip = asked(name)
    outputs = problem.outputs(w, x[2])
    if own:
        w = w[:, None] + 0.01 * torch.randn(
            3, 4, problem.dim, generator=torch.Generator().manual_seed(1)
        )
    here = clipped_sum(problem, w, x, y, weight, clip, engines=IN_TORCH[-1:])
    problem.model.cuda()
    there = [t.cuda() for t in (w, x, y, weight, clip)]
    assert type(choose(task(problem, *there), ENGINES)) is pictures.Pictures
    torch.testing.assert_close(
        clipped_sum(problem, *there, engines=ENGINES).cpu(), here, rtol=1e-4, atol=1e-6
    )
    assert torch.equal(
        clipped_sum(problem, *there, engines=ENGINES),
        clipped_sum(problem, *there, engines=ENGINES, memory=1),
    )
    if not own:
        found = pictures.outputs(problem, w.cuda(), x[2].cuda())
        assert found is not None
        torch.testing.assert_close(found.cpu(), outputs, rtol=1e-5, atol=1e-6)
