"""One replaced record moves the sums of products by no more than is paid for, and nearly by as
much, in floats and in a gate's integers.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.errors import Refused
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import Poisson
from silodp.core.statistics import Gram
from silodp.core.statistics.gram import CROSS, DIAGONAL
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import check
from silodp.testing import check_statistic
from silodp.testing.statistic import hostile_records

PROBLEM = Problem(nn.Linear(3, 1), squared_error)


class Quiet(Simulated):
    """Without noise."""

    def gaussian(self, mechanism, mean, silos):
        return mean


def deployed(records):
    return Exact(PROBLEM, records, partition=lambda *_: np.arange(5))


@pytest.fixture
def silent(monkeypatch):
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))


def opposed(bound):
    """Records whose z are orthogonal, and as long as they may be."""
    long = 1e6 * torch.tensor(
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, -1.0]], dtype=torch.float64
    )
    return [
        *hostile_records(3),
        *((x, torch.tensor(y)) for x, y in itertools.product(long, (0, 1))),
    ]


@pytest.mark.parametrize("classes", [0, 2, 4])
@pytest.mark.parametrize("bound", [0.7, 1.0, 3.1])
@pytest.mark.parametrize("gate", [False, True])
def test_one_record_moves_the_sum_by_the_root_of_two_squares_of_the_bound_and_no_more(
    silent, classes, bound, gate
):
    gram = Gram(3, classes, 1.0, bound)
    answerer = deployed if gate else lambda records: Quiet(PROBLEM, records, [0])
    check_statistic(gram, opposed(bound), answerer, dim=PROBLEM.dim, reaches=0.999)


def test_factors_that_are_a_little_too_long_are_seen(silent, monkeypatch):
    shipped = Gram.factors

    def longer(self, *words):
        factors = shipped(self, *words)
        return lambda x, y: 1.01 * factors(x, y)

    monkeypatch.setattr(Gram, "factors", longer)
    with pytest.raises(AssertionError, match="one replaced record moves the sum by"):
        check_statistic(
            Gram(3, 2, 1.0, 1.0), opposed(1.0), lambda r: Quiet(PROBLEM, r, [0]), dim=PROBLEM.dim
        )
    check_statistic(
        Gram(3, 2, 1.0, 1.0), opposed(1.0), deployed, dim=PROBLEM.dim
    )  # the gate's integers do not care


def test_the_clip_is_half_the_distance_exactly():
    assert CROSS**2 <= 2 * DIAGONAL**2
    for bound in np.random.default_rng(0).uniform(0.1, 40, 300).tolist():
        gram = Gram(3, 2, 1.0, bound)
        assert 2 * Fraction(gram.norm) ** 2 >= Fraction(bound) ** 4
        assert 2 * Fraction(gram.norm) ** 2 <= Fraction(bound) ** 4 * (1 + Fraction(1, 2**50))
        gram.check_reach(gram.norm)
        with pytest.raises(Refused):
            gram.check_reach(gram.norm * (1 - 1e-15))


@pytest.mark.parametrize(("classes", "y"), [(0, [0.5, -3.0, 0.0]), (2, [1, 0, 7]), (3, [2, 0, 1])])
def test_the_matrix_is_the_mean_of_the_products(silent, classes, y):
    x = np.array([[0.3, -0.2, 0.9], [0.0, 0.5, 0.1], [-1.0, 1.0, 0.2]])
    gram = Gram(2, classes, 2.0, 10.0)
    label = {0: [[0.25], [-1.0], [0.0]], 2: [[1], [-1], [0]], 3: np.eye(3)[[2, 0, 1]]}[classes]
    z = np.concatenate([np.ones((3, 1)), x[:, :2], np.array(label, float)], 1)
    records = Records.of([(x, np.array(y))])
    query = Query(gram, Gaussian("a", gram.norm, 1.0))
    for answerer, near in (
        (Quiet(PROBLEM, records, [0]), 1e-7),
        (Exact(PROBLEM, records, partition=lambda *_: np.arange(3)), 1e-3),
    ):
        value = answerer.answer(query, [0])[:, 0]
        assert value.shape == gram.shape
        np.testing.assert_allclose(gram.matrix(value)[0], z.T @ z / 3, atol=near)


def test_a_long_record_has_a_smaller_weight_and_no_other_slope():
    """Of y = a + b x, whatever the bound, the weighted least squares of the products find a and
    b.
    """
    x = torch.linspace(-1, 1, 50, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.5, 0.0])
    y = 0.1 + 0.4 * x[:, 0]
    for bound in (0.5, 1.5, 9.0):
        gram = Gram(1, 0, 1.0, bound)
        z = gram.factors(PROBLEM, 0)(x, y)
        m = z.T @ z
        torch.testing.assert_close(
            torch.linalg.solve(m[:2, :2], m[:2, 2]), torch.tensor([0.1, 0.4], dtype=torch.float64)
        )
        assert float(z.norm(dim=1).max()) <= bound * (1 + 1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        (0, 2, 1.0, 1.0),
        (3, 1, 1.0, 1.0),
        (3, -1, 1.0, 1.0),
        (5000, 2, 1.0, 1.0),
        (3, 5000, 1.0, 1.0),
        (3, 2, 0.0, 1.0),
        (3, 2, math.nan, 1.0),
        (3, 2, 1.0, math.inf),
        (3, 2, 1.0, 0.0),
        (3, 2, 1.0, math.nan),
        (3, 2, 1.0, 1e200),
        (2.0, 2, 1.0, 1.0),
    ],
)
def test_senseless_fields_are_refused_before_anything_is_allocated(wrong):
    with pytest.raises(Refused):
        check(Query(Gram(*wrong), Gaussian("a", 1e30, 1.0)), PROBLEM.dim, [10])


def test_it_is_asked_of_all_records_with_room_enough_and_of_features_that_are_there():
    gram = Gram(3, 2, 1.0, 1.0)
    check(Query(gram, Gaussian("a", gram.norm, 1.0)), PROBLEM.dim, [10])
    for mechanism in (
        Gaussian("a", 0.99 * gram.norm, 1.0),
        Gaussian("a", gram.norm, 1.0, Poisson(0.5)),
    ):
        with pytest.raises(Refused):
            check(Query(gram, mechanism), PROBLEM.dim, [10])
    records = Records.of([(np.zeros((5, 3)), np.zeros(5, int))])
    with pytest.raises(Refused, match="shape"):
        deployed(records).check(Query(Gram(4, 2, 1.0, 1.0), Gaussian("a", gram.norm, 1.0)))


def test_each_run_may_have_a_bound_of_its_own():
    gram = Gram(3, 2, 1.0, torch.tensor([[0.5], [2.0]]))
    assert gram.shape == (2, 15)
    records = Records.of([(np.ones((5, 3)), np.ones(5, int))])
    value = Quiet(PROBLEM, records, [0, 1]).answer(Query(gram, Gaussian("a", gram.norm, 1.0)), [0])
    torch.testing.assert_close(
        torch.linalg.matrix_norm(gram.matrix(value[:, 0])),
        torch.tensor([0.25, 4.0], dtype=torch.float64),
    )
