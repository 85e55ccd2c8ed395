"""Local SGD's steps in one kernel: on a GPU they end where torch's end, and their noise is as
large.
"""

import pytest
import torch
from torch import nn

from research.verdict_local import Round, _walk, _walk_on_gpu
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SILOS, RUNS, STEPS, MOST = 3, 5, 40, 4


def made(std=0.0, adam=False, hostile=False):
    """Networks of three silos and five settings, and forty steps on none to four records."""
    draw = torch.Generator().manual_seed(1)
    problem = Problem(nn.Sequential(nn.Linear(50, 64), nn.ReLU(), nn.Linear(64, 2)), cross_entropy)
    x, y = (
        torch.randn(STEPS, SILOS, MOST, 50, generator=draw),
        torch.randint(0, 2, (STEPS, SILOS, MOST), generator=draw),
    )
    there = torch.arange(MOST) < torch.randint(0, MOST + 1, (STEPS, SILOS, 1), generator=draw)
    if hostile:
        x[3, 0, 0], x[5, 1, 1, 7], x[9, 2, 0] = 1e30, 3e38, -1e25  # finite, but not their squares
    settings = (
        torch.tensor([0.1, 0.5, 1.0, 5.0, 1e4]),
        torch.tensor([0.3, 0.1, 0.05, 0.02, 0.01]) / (10 if adam else 1),
    )
    w = problem.initial([0, 1, 2]).unsqueeze(1).repeat(1, RUNS, 1)
    parts = [part.contiguous().cuda() for part in problem.split(w).values()]
    clips, paces = (v.view(1, RUNS, 1).cuda() for v in settings)
    deviation = torch.full((SILOS, RUNS, 1), std).cuda()
    random = torch.Generator("cuda").manual_seed(2)
    return (
        problem,
        parts,
        Round(x.cuda(), y.cuda(), there.cuda(), clips, paces, deviation, std > 0, adam, random),
    )


def whole(parts):
    return torch.cat([part.flatten(2) for part in parts], 2).double().cpu()


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("adam", [False, True])
def test_the_kernel_ends_where_torch_ends(adam, hostile):
    problem, parts, steps = made(adam=adam, hostile=hostile)
    start = whole(parts)
    found = whole(_walk_on_gpu([part.clone() for part in parts], steps))
    expected = whole(_walk(problem, [part.clone() for part in parts], steps))
    assert bool(torch.isfinite(found).all())
    assert float((found - expected).norm() / (expected - start).norm()) < (1e-3 if adam else 1e-5)


def test_the_kernels_noise_is_as_large_as_its_price_says():
    _, parts, steps = made(std=0.7)
    steps = steps._replace(there=torch.zeros_like(steps.there))
    start = whole(parts)
    moved = whole(_walk_on_gpu(parts, steps)) - start
    for run in range(RUNS):
        expected = float(steps.paces[0, run, 0]) * 0.7 * STEPS**0.5
        assert float(moved[:, run].std()) == pytest.approx(expected, rel=0.04), (
            "0.7 % is one standard error"
        )
    shared = moved / steps.paces.double().cpu()
    assert float((shared - shared[:, :1]).abs().max()) < 1e-3 * float(shared.abs().max()), (
        "a silo's networks share their draws"
    )
    assert abs(float((shared[0, 0] * shared[1, 0]).mean())) < 0.1 * float(shared.var()), (
        "silos do not"
    )
