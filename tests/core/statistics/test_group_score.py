"""Each held-out record is in one cell at most, by its own group and by whether the model says its
class.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.problem.losses import cross_entropy, logistic, squared_error
from silodp.core.problem.person import Person
from silodp.core.problem.problem import Problem
from silodp.core.statistics import GroupClasses, GroupScore
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.simulated import Simulated
from silodp.testing import check_statistic
from silodp.testing.statistic import hostile_records

PROBLEM = Problem(nn.Linear(4, 1, bias=False), logistic)
W = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
"""It says the second class where the last feature is above 0."""


def cells(statistic, x, y, problem=PROBLEM):
    """The number of each record's cell; None where it is in none."""
    rows = statistic.rows(problem, 0)(torch.tensor(x), torch.tensor(y))
    assert rows.shape == (len(x), statistic.shape[-1])
    assert set(rows.flatten().tolist()) <= {0.0, 1.0}
    return [int(row.argmax()) if row.sum() == 1 else None for row in rows]


def test_a_record_is_in_the_cell_of_its_group_and_of_whether_the_model_is_right():
    x = [[1.0, 0, 0, 5], [0.0, 1, 0, 5], [0.0, 0, 1, -5], [0.0, 0, 1, 5]]
    assert cells(GroupScore(W, 0, 3, 0), x, [1, 1, 0, 0]) == [
        3,
        4,
        5,
        2,
    ]  # right in 0, 1 and 2, and wrong in 2
    assert cells(GroupScore(W, 1, 2, 0), x, [1, 1, 0, 0]) == [None, 2, 3, 1]


def test_a_yes_or_no_is_told_by_its_sign():
    x = [[0.0, 1, 0, 5], [0.0, -1, 0, 5]]
    assert cells(GroupScore(W, 1, 1, 0), x, [1, 1]) == [3, 2]
    assert cells(GroupScore(W, 1, 1, 0), x, [0, 0]) == [1, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_record_whose_value_is_missing_or_not_finite_is_in_no_cell(bad):
    assert cells(GroupScore(W, 0, 3, 0), [[0.0, 0, 0, 5], [bad, 1, 0, 5]], [1, 1]) == [None, None]
    assert cells(
        GroupScore(W, 1, 1, 1),
        [[0.0, 1, 1, 5], [0.0, 1, 0, 5], [0.0, 1, bad, 5], [0.0, bad, 0, 5]],
        [1] * 4,
    ) == [
        None,
        3,
        None,
        None,
    ]


def test_what_the_model_cannot_say_is_wrong_in_its_own_group():
    assert cells(GroupScore(W, 0, 3, 0), [[0.0, 1, 0, math.nan]], [1]) == [1]


def test_of_a_number_nothing_is_right_or_wrong():
    problem = Problem(nn.Linear(4, 1, bias=False), squared_error)
    assert cells(GroupScore(W, 0, 3, 0), [[0.0, 1, 0, 5]], [1.0], problem) == [None]


def test_a_persons_rows_share_one_cells_weight():
    problem = Problem(nn.Linear(4, 1, bias=False), logistic, person=Person("p", 4))
    x = torch.tensor([[[1.0, 0, 0, 5], [0.0, 1, 0, 5], [1.0, 0, 0, -5], [9.0, 9, 9, 9]]])
    row = GroupScore(W, 0, 3, 0).vectors(problem, 0)(x, torch.tensor([[1, 1, 1, -1]]))
    assert row[0].tolist() == pytest.approx([1 / 3, 0, 0, 1 / 3, 1 / 3, 0])


class Quiet(Simulated):
    """Without noise."""

    def gaussian(self, mechanism, mean, silos):
        return mean


class TwoCells(GroupScore):
    """A mistake: a record is in the cell of its group, and in that of the first group too."""

    def rows(self, problem, run, dtype=None):
        rows = super().rows(problem, run, dtype)
        return lambda x, y: (
            rows(x, y)
            + rows(x, y).sum(1, keepdim=True) * torch.eye(self.cells, dtype=torch.float64)[0]
        )


def whole(problem):
    """A gate's own arithmetic with all records held out, and without its noise."""

    def make(records):
        made = Exact(problem, records, partition=lambda *_: np.arange(5))
        made._held[:] = True
        return made

    return make


def test_one_replaced_record_leaves_one_cell_and_enters_another(monkeypatch):
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))
    problem, records = Problem(nn.Linear(4, 3), cross_entropy), hostile_records(4)
    for asked in (
        GroupScore(problem.initial([1]), 0, 3, 0),
        GroupScore(problem.initial([1]), 1, 1, 0),
    ):
        for answerer in (lambda r: Quiet(problem, r, [0]), whole(problem)):
            check_statistic(asked, records, answerer, dim=problem.dim, reaches=0.99)


def test_a_record_in_two_cells_is_seen(monkeypatch):
    """In simulation by what it moves; a gate's integers are checked, and one that is in two cells
    counts for nothing.
    """
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))
    mistake, records = TwoCells(W, 0, 3, 0), hostile_records(4)
    with pytest.raises(AssertionError, match="one replaced record moves the sum by"):
        check_statistic(mistake, records, lambda r: Quiet(PROBLEM, r, [0]), dim=PROBLEM.dim)
    check_statistic(mistake, records, whole(PROBLEM), dim=PROBLEM.dim)


def test_a_record_is_in_the_cell_of_its_group_and_class():
    x = [[1.0, 0, 0, 5], [0.0, 1, 0, 5], [0.0, 0, 1, -5], [0.0, 0, 0, 5], [math.nan, 0, 0, 5]]
    assert cells(GroupClasses(3, 0, 3, 0), x, [0, 2, 1, 1, 1]) == [0, 5, 7, None, None]
    assert cells(GroupClasses(3, 3, 1, 0), x, [0, 2, 1, 3, -1]) == [3, 5, 1, None, None]


@pytest.mark.parametrize("gate", [False, True])
def test_one_record_moves_the_cells_of_groups_by_the_root_of_two(monkeypatch, gate):
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))

    def answerer(records):
        if gate:
            return Exact(PROBLEM, records, partition=lambda *_: np.arange(5))
        quiet = Simulated(PROBLEM, records, [0])
        quiet.gaussian = lambda mechanism, mean, silos: mean
        return quiet

    statistic = GroupClasses(2, 0, 1, 0)
    check_statistic(statistic, hostile_records(4), answerer, dim=PROBLEM.dim, reaches=0.99)
