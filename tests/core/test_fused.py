"""The compiled path gives the numbers of the plain one, and leaves to it what is unsound."""

import shutil

import pytest
import torch
from torch import nn

from silodp.core.clipping import clipped_sum
from silodp.core.fused import fused
from silodp.core.layers import chain
from silodp.core.losses import Huber, cross_entropy
from silodp.core.problem import Problem

RUNS, SILOS, RECORDS, FEATURES = 2, 3, 8, 5
PROBLEM = Problem(nn.Sequential(nn.Linear(FEATURES, 70), nn.ReLU(), nn.Linear(70, 3)), cross_entropy)
CLIP = torch.tensor([[0.3], [2.0]])


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    x, y = torch.randn(SILOS, RECORDS, FEATURES), torch.randint(0, 3, (SILOS, RECORDS))
    return PROBLEM.initial([1, 2]), PROBLEM.initial([3, 4]), x, y, torch.rand(RUNS, SILOS, RECORDS).round(decimals=1)


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
@pytest.mark.filterwarnings("ignore:::torch")
@pytest.mark.parametrize("difference", [False, True])
def test_compiled_sums_are_the_plain_ones_whatever_a_record_holds(data, difference):
    w, reference, x, y, weight = data
    about = {"reference": reference if difference else None}
    assert fused(PROBLEM, chain(PROBLEM, x)) is not None
    for value, label, share in ((0.0, 0, 1.0), (1.0, 9, 1.0), (torch.nan, 0, 1.0), (torch.inf, 1, 0.0), (1e30, 2, 1.0)):
        x[1, 3], y[1, 3], weight[:, 1, 3] = value, label, share
        plain = clipped_sum(PROBLEM, w, x, y, weight, CLIP, **about)
        assert bool(torch.isfinite(plain).all())
        torch.testing.assert_close(clipped_sum(PROBLEM, w, x, y, weight, CLIP, **about, compiled=True), plain, rtol=2e-6, atol=2e-6)


def test_other_activations_and_losses_stay_with_the_plain_path():
    x = torch.zeros(SILOS, RECORDS, FEATURES)
    for model, loss in (
        (nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)), Huber(1.0)),
        (nn.Linear(FEATURES, 1), _unknown),
    ):
        problem = Problem(nn.Sequential(model), loss)
        assert fused(problem, chain(problem, x)) is None


def _unknown(output, target):
    return (output.squeeze(-1) - target).abs()
