"""Each record's outcome as numbers in [0, 1]."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.errors import Refused
from silodp.core.problem.losses import (
    Ordinal,
    Poisson,
    Weighted,
    cross_entropy,
    logistic,
    squared_error,
)
from silodp.core.problem.problem import Problem
from silodp.core.statistics import Outcomes
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.testing import check_statistic
from silodp.testing.statistic import hostile_records


def outcomes(loss, y, number=1):
    problem = Problem(nn.Linear(2, 3), loss)
    return Outcomes(number).rows(problem, 0)(torch.zeros(len(y), 2), torch.tensor(y)).tolist()


@pytest.mark.parametrize(
    ("loss", "y", "number", "found"),
    [
        (logistic, [0, 1], 1, [[0.0], [1.0]]),
        (Weighted(logistic, (0.1, 1.0)), [0, 1], 1, [[0.0], [1.0]]),
        (cross_entropy, [0, 1, 2], 2, [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]),
        (Ordinal(4), [0, 2, 3], 3, [[0.0] * 3, [1.0, 1.0, 0.0], [1.0] * 3]),
        (Poisson(8.0), [2.0, 8.0], 1, [[0.25], [1.0]]),
        (squared_error, [-1.0, 0.5], 1, [[0.0], [0.75]]),
    ],
)
def test_the_numbers_are_what_happened(loss, y, number, found):
    assert outcomes(loss, y, number) == found


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_a_label_that_is_none_of_the_tasks_stays_within_0_and_1(bad):
    for loss in (Poisson(8.0), squared_error):
        ((found,),) = outcomes(loss, [bad])
        assert 0 <= found <= 1
    assert outcomes(logistic, [-7]) == [[0.0]]


@pytest.mark.parametrize("number", [0, -1, 2**11, 1.0, True])
def test_a_number_of_outcomes_without_meaning_is_refused(number):
    with pytest.raises(Refused, match="shape"):
        Outcomes(number).check(3, 1)


@pytest.mark.parametrize("number", [1, 3])
def test_one_replaced_record_moves_the_sum_by_what_is_priced(number, monkeypatch):
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))
    problem = Problem(nn.Linear(4, number), Ordinal(number + 1))

    def whole(records):
        return Exact(problem, records, partition=lambda *_: np.arange(5))

    check_statistic(Outcomes(number), hostile_records(4), whole, dim=problem.dim, reaches=0.99)


class OutOfRange(Outcomes):
    """A mistake: the numbers are those of the label, not within [0, 1]."""

    def rows(self, problem, run, dtype=None):
        return lambda x, y: 2 * y.double()[:, None].clamp(0, 1)


def test_numbers_that_move_further_than_is_priced_are_seen():
    problem = Problem(nn.Linear(4, 1), logistic)

    def whole(records):
        return Exact(problem, records, partition=lambda *_: np.arange(5))

    with pytest.raises(AssertionError):
        check_statistic(OutOfRange(1), hostile_records(4), whole, dim=problem.dim)
