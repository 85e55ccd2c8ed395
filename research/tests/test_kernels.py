"""On a GPU: the hand-written kernel, and clipped sums, give what the CPU gives."""

import copy

import pytest
import torch
from torch import nn

from research.kernels import ENGINES
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.engine.clipping import clipped_sum

kernels = pytest.importorskip(
    "research.kernels.kernels", exc_type=ImportError
)  # Triton is there where there is a GPU

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings(
        "ignore:Attempting to run cuBLAS"
    ),  # torch's own thread, at its first product
]


@pytest.fixture(autouse=True)
def seeded():
    """A unit whose input is 0 to all digits may be on here and off there; with these numbers none
    is.
    """
    torch.manual_seed(0)


@pytest.mark.parametrize("shared", [False, True])
def test_squares_are_exact_to_the_last_digits_of_float64(shared):
    u = torch.randn(3, 1 if shared else 4, 65, 300, device="cuda")
    for a in (u, u.transpose(2, 3).contiguous().transpose(2, 3)):
        torch.testing.assert_close(
            kernels.square(a), (a.double() * a.double()).sum(-2), rtol=1e-14, atol=1e-12
        )


@pytest.mark.parametrize("moved", [None, 1e-3])
def test_clipped_sums_are_those_of_the_cpu(moved):
    problem = Problem(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), cross_entropy)
    x, y, weight = (
        torch.randn(4, 70, 6),
        torch.randint(0, 3, (4, 70)),
        (torch.rand(4, 70) < 0.8).float(),
    )
    x[0, 0] = torch.nan
    w, clip = torch.randn(5, problem.dim), torch.rand(5, 1)
    reference = None if moved is None else w + moved * torch.randn_like(w)
    here = clipped_sum(problem, w, x, y, weight, clip, reference=reference)
    there = clipped_sum(
        problem,
        *(t.cuda() for t in (w, x, y, weight, clip)),
        reference=None if reference is None else reference.cuda(),
    )
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)


CONVOLUTIONS = {
    "the paper's first": nn.Conv2d(3, 6, 5),
    "the paper's second": nn.Conv2d(6, 16, 5),
    "strides that leave rows over": nn.Conv2d(3, 4, (3, 2), stride=(2, 3), padding=(1, 2)),
    "dilation and groups": nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2),
    "one place a patch": nn.Conv2d(40, 70, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("moved", [None, 1e-2])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_clipped_sums_of_convolutions_are_those_of_the_cpu_whatever_cudnn_may_round(
    name, moved, dtype
):
    layer = CONVOLUTIONS[name]
    model = nn.Sequential(
        nn.Conv2d(2, layer.in_channels, 3),
        nn.ReLU(),
        layer,
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    x, y, weight = (
        torch.randn(2, 20, 2, 14, 13, dtype=dtype),
        torch.randint(0, 3, (2, 20)),
        (torch.rand(2, 20) < 0.8).to(dtype),
    )
    model(x[0].float())
    problem = Problem(copy.deepcopy(model).to(dtype), cross_entropy)
    w = problem.initial(range(2)).to(dtype)
    reference = None if moved is None else w + moved * torch.randn_like(w)
    here = clipped_sum(problem, w, x, y, weight, 0.5, reference=reference)
    there = clipped_sum(
        problem,
        *(t.cuda() for t in (w, x, y, weight)),
        0.5,
        reference=None if reference is None else reference.cuda(),
    )
    assert float((there.cpu() - here).norm() / here.norm()) < (
        1e-5 if dtype == torch.float32 else 1e-12
    ) * (1 if moved is None else 20)


@pytest.mark.parametrize(("most", "memory"), [(512, 2**31), (30, 40_000)])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("moved", [None, 1e-2])
@pytest.mark.parametrize("sizes", [(6, 16, 3), (50, 64, 2), (63, 5, 16), (63, 100, 10)])
def test_a_small_network_s_sums_are_those_of_the_cpu_in_however_many_parts(
    sizes, moved, own, most, memory, monkeypatch
):
    monkeypatch.setattr(kernels, "MOST", most)
    inputs, hidden, outputs = sizes
    problem = Problem(
        nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)),
        cross_entropy,
    )
    x, y, weight = (
        torch.randn(3, 70, inputs),
        torch.randint(0, outputs, (3, 70)),
        (torch.rand(3, 70) < 0.8).float(),
    )
    x[weight == 0], y[0, 3] = torch.nan, outputs
    w, clip = (
        torch.randn(4, *((3,) if own else ()), problem.dim),
        torch.tensor([[0.1], [1.0], [5.0], [1e4]]),
    )
    points = [w] if moved is None else [w, w + moved * torch.randn_like(w)]
    here = clipped_sum(problem, w, x, y, weight, clip, reference=points[1] if moved else None)
    places = torch.tensor([0, *problem.sizes]).cumsum(0).tolist()[:4]
    there = kernels.network_sums(
        *([p.cuda() for p in points], *(t.cuda() for t in (x, y, weight, clip.double()))),
        sizes,
        places,
        memory,
    )
    assert float((there.cpu() - here).norm() / here.norm()) < (
        1e-6 if moved is None else 5e-5
    )  # differences of 1e-2 have lost two digits
    whole = clipped_sum(
        problem,
        *(t.cuda() for t in (w, x, y, weight, clip)),
        reference=points[1].cuda() if moved else None,
        memory=memory,
        engines=ENGINES,
    )
    assert torch.equal(whole, there)


@pytest.mark.parametrize("moved", [None, 1e-2])
def test_unsound_records_and_runs_give_a_small_network_nothing(moved):
    problem = Problem(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), cross_entropy)
    x, y, weight, w = (
        torch.randn(2, 40, 6),
        torch.randint(0, 3, (2, 40)),
        torch.ones(2, 40),
        torch.randn(4, problem.dim),
    )
    x[0, 3], x[1, 7, 2], x[1, 8, 1] = torch.nan, torch.inf, 1e16
    w[1], w[2, -1], clip = torch.nan, torch.inf, torch.tensor([[1.0], [1.0], [1.0], [0.0]])
    reference = None if moved is None else w + moved * torch.randn_like(w)
    here = clipped_sum(problem, w, x, y, weight, clip, reference=reference)
    there = clipped_sum(
        problem,
        *(t.cuda() for t in (w, x, y, weight, clip)),
        reference=None if moved is None else reference.cuda(),
        engines=ENGINES,
    )
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)
    assert here[0].any()
    assert not there[1:].any()
    w = w[:1].cuda().requires_grad_()
    unmoved = clipped_sum(
        problem, w, *(t.cuda() for t in (x, y, weight)), 1.0, reference=w, engines=ENGINES
    )
    assert not unmoved.any()
    assert not unmoved.requires_grad
