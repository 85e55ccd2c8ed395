"""How far one replaced record can move a sum: never further than 2 norm, and for some pair of records as far."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import Histogram, Moments
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.integers import lattice_step, levelled, quantised
from silodp.silo.data.records import Records

FEATURES = 3
PROBLEM = Problem(nn.Linear(FEATURES, 2), cross_entropy)
EDGES = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
STATISTICS = [Histogram(EDGES, FEATURES), Moments(torch.full((FEATURES,), -2.0).double(), torch.full((FEATURES,), 3.0).double())]
IDS = ["Histogram", "Moments"]


def corners():
    """Records with every combination of values at, between and beyond the ends of bins and ranges, and values that are none."""
    values = [-9.0, -2.0, -0.5, 0.5, 1.0, 3.0, 9.0, math.nan, math.inf]
    return torch.tensor(np.stack(np.meshgrid(*[values] * FEATURES), -1).reshape(-1, FEATURES))


@pytest.mark.parametrize("statistic", STATISTICS, ids=IDS)
def test_two_records_vectors_are_at_most_twice_the_norm_apart_and_some_are_as_far(statistic):
    rows = statistic.rows(PROBLEM, 0)(corners(), torch.zeros(len(corners())))
    far = float(torch.cdist(rows, rows).max())
    assert far <= 2 * statistic.norm * (1 + 1e-12)
    assert far == pytest.approx(2 * statistic.norm)


@pytest.mark.parametrize("statistic", STATISTICS, ids=IDS)
def test_the_lattices_integers_are_as_near_by_exact_arithmetic(statistic):
    rows = statistic.rows(PROBLEM, 0, torch.float64)(corners(), torch.zeros(len(corners())))
    gamma = lattice_step(statistic.norm, rows.shape[1])
    if statistic.numbers is None:
        whole = quantised(rows, statistic.norm, gamma)
    else:
        whole = levelled(rows, statistic.numbers, gamma, statistic.blocks)
        assert bool((whole * gamma == rows).all()), "a row of this form is itself on the lattice"
    norms = [sum(int(k) ** 2 for k in row) for row in whole.unique(dim=0).tolist()]
    assert max(norms) > 0
    unique = [[int(k) for k in row] for row in whole.unique(dim=0).tolist()]
    farthest = max(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) for one in unique[::7] for other in unique[::3])
    assert Fraction(farthest) * Fraction(gamma) ** 2 <= 4 * Fraction(statistic.norm) ** 2


def test_a_moments_vector_is_never_longer_than_its_norm():
    """On a fine grid of u: u^2 + (u^2 - 1)^2 <= 1, with equality at -1, 0 and 1."""
    u = torch.linspace(-1, 1, 200_001, dtype=torch.float64)
    one = Moments(torch.tensor([-1.0]).double(), torch.tensor([1.0]).double())
    norms = one.rows(PROBLEM, 0)(u[:, None], u).norm(dim=1)
    assert float(norms.max()) <= 1 + 1e-12
    assert float(norms[[0, 100_000, 200_000]].min()) == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [[1, 1, 0, 0, 0, 1], [1, 0, 0, 0.5, 0, 0], [0, -1, 0, 0, 1, 0], [2, 0, 0, 1, 0, 0]])
def test_a_row_with_two_cells_of_a_block_or_half_a_cell_is_zero(bad):
    good = [1.0, 0, 0, 0, 0, 1.0]
    whole = levelled(torch.tensor([bad, good], dtype=torch.float64), 0, 2.0**-16, 2)
    assert not whole[0].any(), "such a row could move a sum further than is paid for"
    assert whole[1].tolist() == [2**16, 0, 0, 0, 0, 2**16]


def test_one_value_in_each_block_is_no_row_of_one_block():
    assert not levelled(torch.tensor([[1.0, 0, 0, 1.0]], dtype=torch.float64), 0, 2.0**-16).any()


@pytest.mark.parametrize("statistic", STATISTICS, ids=IDS)
def test_a_deployed_gates_noise_is_of_that_sensitivity(statistic, monkeypatch):
    scales = []

    def noise(scale, size):
        scales.append(scale)
        return np.zeros(size, np.int64)

    monkeypatch.setattr(lattice, "rounded_gaussian", noise)
    x = corners()[:40].float().numpy()
    gate = Exact(PROBLEM, Records.of([(x, np.zeros(40, np.int64))]), partition=lambda name, batches: np.arange(40))
    query = Query(statistic, Gaussian("a", statistic.norm, 1.5))
    gate.check(query)
    value = gate.answer(query, [0])[0, 0]
    gamma = lattice_step(statistic.norm, statistic.shape[-1])
    reach = math.sqrt(2 * FEATURES) if statistic.numbers is not None else 2 * math.sqrt(FEATURES)
    assert scales[0] * gamma >= 1.5 * reach * (1 - 1e-15)
    assert scales[0] * gamma == pytest.approx(1.5 * reach)
    if statistic.numbers is None:
        u = np.nan_to_num(np.clip(2 * (x.astype(np.float64) + 2) / 5 - 1, -1, 1))
        np.testing.assert_allclose(value, np.concatenate([u.mean(0), (u**2).mean(0)]), atol=3e-5)
