"""On a GPU: the hand-written kernel, and clipped sums, give what the CPU gives."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

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


CONVOLUTIONS = {
    "the paper's first": nn.Conv2d(3, 6, 5),
    "the paper's second": nn.Conv2d(6, 16, 5),
    "strides that leave rows over": nn.Conv2d(3, 4, (3, 2), stride=(2, 3), padding=(1, 2)),
    "dilation and groups": nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2),
    "one place a patch": nn.Conv2d(40, 70, 1),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_by_a_convolution_s_weight_are_those_of_each_record_alone(name):
    from silodp.core.kernels import conv_gradients

    layer, a = CONVOLUTIONS[name], torch.randn(3, CONVOLUTIONS[name].in_channels, 14, 13)
    slopes = torch.randn_like(layer(a))
    expected = []
    for record, slope in zip(a.double(), slopes.double(), strict=True):
        twin = copy.deepcopy(layer).double()
        twin(record[None]).backward(slope[None])
        expected.append(twin.weight.grad)
    padded = functional.pad(a, layer._reversed_padding_repeated_twice).cuda()
    found = conv_gradients(padded, slopes.cuda(), layer.weight.shape, layer.stride, layer.dilation)
    torch.testing.assert_close(found.cpu().double(), torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("moved", [None, 1e-2])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_clipped_sums_of_convolutions_are_those_of_the_cpu_whatever_cudnn_may_round(name, moved, dtype):
    layer = CONVOLUTIONS[name]
    model = nn.Sequential(nn.Conv2d(2, layer.in_channels, 3), nn.ReLU(), layer, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3))
    x, y, weight = torch.randn(2, 20, 2, 14, 13, dtype=dtype), torch.randint(0, 3, (2, 20)), (torch.rand(2, 20) < 0.8).to(dtype)
    model(x[0].float())
    problem = Problem(copy.deepcopy(model).to(dtype), cross_entropy)
    w = problem.initial(range(2)).to(dtype)
    reference = None if moved is None else w + moved * torch.randn_like(w)
    here = clipped_sum(problem, w, x, y, weight, 0.5, reference=reference)
    there = clipped_sum(problem, *(t.cuda() for t in (w, x, y, weight)), 0.5, reference=None if reference is None else reference.cuda())
    assert float((there.cpu() - here).norm() / here.norm()) < (1e-5 if dtype == torch.float32 else 1e-12) * (1 if moved is None else 20)
