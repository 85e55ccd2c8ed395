"""Each record is in the bin of its score, shared between its outcome and the lack of it."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.errors import Refused
from silodp.core.problem.losses import (
    Hazard,
    Ordinal,
    Poisson,
    Weighted,
    cross_entropy,
    logistic,
    squared_error,
)
from silodp.core.problem.person import Person
from silodp.core.problem.problem import Problem
from silodp.core.statistics import RiskCells
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.simulated import Simulated
from silodp.testing import check_statistic
from silodp.testing.statistic import hostile_records

PROBLEM = Problem(nn.Linear(2, 1, bias=False), logistic)
W = torch.tensor([[0.0, 1.0]])
"""The score is the last feature."""
EDGES = torch.tensor([-1.0, 0.0, 1.0])


def vectors(problem, w, x, y, edges=EDGES, cap=1.0):
    return RiskCells(w, edges, cap).rows(problem, 0)(torch.tensor(x), torch.tensor(y))


def test_a_record_of_two_classes_is_in_the_cell_of_its_class_and_of_the_bin_of_its_logit():
    found = vectors(PROBLEM, W, [[0.0, -3.0], [0.0, 0.5], [0.0, 7.0]], [0, 1, 1])
    assert found[:, 0].tolist() == [0.0, 1.0, 1.0]
    assert found[:, 2:].argmax(1).tolist() == [0, 4 + 2, 4 + 3]
    assert found[:, 2:].sum(1).tolist() == [1.0, 1.0, 1.0]
    said = torch.tensor([-3.0, 0.5, 7.0]).double().sigmoid()
    assert torch.allclose(found[:, 1], said), "what the model predicts"


def test_weights_of_the_classes_are_no_part_of_the_score():
    weighed = Problem(nn.Linear(2, 1, bias=False), Weighted(logistic, (0.1, 1.0)))
    x, y = [[0.0, 0.5 + math.log(10)]], [1]
    assert torch.allclose(vectors(weighed, W, x, y), vectors(PROBLEM, W, [[0.0, 0.5]], y))


def test_of_several_classes_the_score_is_the_logit_of_the_chance_of_the_class_that_is_said():
    problem = Problem(nn.Linear(2, 3, bias=False), cross_entropy)
    w = torch.tensor([[0.0, 0, 0, 2.0, 0, 0]])
    x = [[0.0, 1.0], [0.0, 1.0]]
    found = vectors(problem, w, x, [1, 2])
    chance = torch.tensor([0.0, 2.0, 0.0]).softmax(0)[1].logit()
    place = int((chance > EDGES).sum())
    assert found[:, 0].tolist() == [1.0, 0.0]
    assert found[:, 2:].argmax(1).tolist() == [4 + place, place]


def test_a_count_is_shared_between_its_two_cells_and_ordered_classes_are_cut_in_the_middle():
    rates = Problem(nn.Linear(2, 1, bias=False), Poisson(8.0))
    found = vectors(rates, W, [[0.0, 0.5]], [2.0], cap=8.0)
    assert found[0, [0, 2 + 2, 2 + 4 + 2]].tolist() == [0.25, 0.75, 0.25]
    beyond = vectors(rates, W, [[0.0, 0.5]] * 2, [20.0, -3.0], cap=8.0)
    assert found[0, 1].item() == pytest.approx(math.exp(0.5) / 8)
    assert beyond[:, [0, 2 + 2, 2 + 4 + 2]].tolist() == [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    order = Problem(nn.Linear(2, 3, bias=False), Ordinal(4))
    w = torch.tensor([[0.0, 0, 0, 0.5, 0, 0]])
    assert vectors(order, w, [[0.0, 1.0]] * 2, [1, 2])[:, 0].tolist() == [0.0, 1.0]


def test_of_survival_times_there_are_the_event_and_the_hazard_of_the_periods_at_risk():
    problem = Problem(nn.Linear(2, 3, bias=False), Hazard(3))
    w = torch.zeros(1, 6)
    found = vectors(problem, w, [[0.0, 1.0]] * 3, [3, 2, 6], edges=EDGES[:0], cap=3.0)
    assert found.tolist() == [[1.0, 1 / 3], [0.0, 0.5 / 3], [0.0, 0.5]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_record_that_is_not_known_is_in_no_cell(bad):
    found = vectors(PROBLEM, W, [[0.0, bad], [0.0, 0.5]], [1, 7])
    assert found[:, 2:].sum().item() == 0
    assert torch.isfinite(found).all()
    number = Problem(nn.Linear(2, 1, bias=False), squared_error)
    assert vectors(number, W, [[0.0, 0.5]], [0.3])[:, 2:].sum().item() == 0


@pytest.mark.parametrize(
    ("edges", "cap"),
    [([0.0, 0.0], 1.0), ([1.0, 0.0], 1.0), ([math.nan], 1.0), ([0.0], 0.0), ([0.0], math.inf)],
)
def test_senseless_bins_and_caps_are_refused(edges, cap):
    with pytest.raises(Refused):
        RiskCells(W, torch.tensor(edges), cap).check(2, 1)
    RiskCells(W, EDGES, 1.0).check(2, 1)


@pytest.mark.parametrize("edges", [EDGES, EDGES[:0]])
def test_no_two_records_are_further_apart_than_is_priced(edges):
    statistic = RiskCells(W, edges, 1.0)
    assert 4 * statistic.norm**2 >= (4 if len(edges) else 2)
    kind = Hazard(1) if not len(edges) else logistic
    problem = Problem(nn.Linear(2, 1, bias=False), kind)
    random = torch.Generator().manual_seed(3)
    x = 3 * torch.randn(60, 2, generator=random)
    y = torch.randint(0, 2, (60,), generator=random)
    rows = statistic.rows(problem, 0)(x, y)
    assert float(torch.cdist(rows, rows).max()) <= 2 * statistic.norm + 1e-9


class Quiet(Simulated):
    """Without noise."""

    def gaussian(self, mechanism, mean, silos):
        return mean


class TwoBins(RiskCells):
    """A mistake: a record with the outcome is in the first bin too."""

    def rows(self, problem, run, dtype=None):
        rows = super().rows(problem, run, dtype)
        first = torch.eye(self.numbers + self.cells, dtype=torch.float64)[self.numbers]
        return lambda x, y: rows(x, y) + rows(x, y)[:, :1] * first


def whole(problem):
    """A gate's own arithmetic, without its noise."""
    return lambda records: Exact(problem, records, partition=lambda *_: np.arange(5))


def test_one_replaced_record_leaves_one_cell_and_enters_another(monkeypatch):
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))
    problem, records = Problem(nn.Linear(4, 1), logistic), hostile_records(4)
    asked = RiskCells(problem.initial([1]), EDGES, 1.0)
    for answerer in (lambda r: Quiet(problem, r, [0]), whole(problem)):
        check_statistic(asked, records, answerer, dim=problem.dim, reaches=0.99)


def test_a_record_in_two_bins_is_seen():
    problem, records = Problem(nn.Linear(4, 1), logistic), hostile_records(4)
    mistake = TwoBins(problem.initial([1]), EDGES, 1.0)
    with pytest.raises(AssertionError, match="one replaced record moves the sum by"):
        check_statistic(mistake, records, lambda r: Quiet(problem, r, [0]), dim=problem.dim)


def test_a_persons_rows_share_one_cells_weight():
    problem = Problem(nn.Linear(2, 1, bias=False), logistic, person=Person("p", 4))
    x = torch.tensor([[[0.0, 0.5], [0.0, 0.5], [0.0, -5.0], [9.0, 9.0]]])
    row = RiskCells(W, EDGES, 1.0).vectors(problem, 0)(x, torch.tensor([[1, 0, 0, -1]]))
    assert row[0, 0].item() == pytest.approx(1 / 3)
    assert row[0, 2:].sum().item() == pytest.approx(1)
