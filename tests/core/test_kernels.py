"""On a GPU: the hand-written kernel, and clipped sums, give what the CPU gives."""

import pytest
import torch
from torch import nn

from silodp.core.clipping import clipped_sum
from silodp.core.losses import cross_entropy
from silodp.core.problem import Problem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("shared", [False, True])
def test_products_are_exact_to_the_last_digits_of_float64(shared):
    from silodp.core.kernels import products, square

    u, v = (
        torch.randn(3, 1 if shared else 4, 65, 300, device="cuda"),
        torch.randn(3, 4, 65, 300, device="cuda").transpose(2, 3).contiguous().transpose(2, 3),
    )
    for found, (a, b) in zip(products(u, v), ((u, u), (v, v), (u, v)), strict=True):
        torch.testing.assert_close(square(a), (a.double() * a.double()).sum(-2), rtol=1e-14, atol=1e-12)
        torch.testing.assert_close(found, (a.double() * b.double()).sum(-2).expand_as(found), rtol=1e-14, atol=1e-12)


@pytest.mark.parametrize("moved", [None, 1e-3])
def test_clipped_sums_are_those_of_the_cpu(moved):
    problem = Problem(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), cross_entropy)
    x, y, weight = torch.randn(4, 70, 6), torch.randint(0, 3, (4, 70)), (torch.rand(4, 70) < 0.8).float()
    x[0, 0] = torch.nan
    w, clip = torch.randn(5, problem.dim), torch.rand(5, 1)
    reference = None if moved is None else w + moved * torch.randn_like(w)
    here = clipped_sum(problem, w, x, y, weight, clip, reference=reference)
    there = clipped_sum(problem, *(t.cuda() for t in (w, x, y, weight, clip)), reference=None if reference is None else reference.cuda())
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)
