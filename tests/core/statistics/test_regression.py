"""A step of a regression: no record moves the sums by more than is paid for, and the sums are the
residuals and the information of the model.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.errors import Refused
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import Regression
from silodp.core.statistics.regression import COUNTS, COX, LOGISTIC
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.simulated import Simulated
from silodp.silo.gate import check
from silodp.testing import check_statistic
from silodp.testing.statistic import hostile_records

PROBLEM = Problem(nn.Linear(3, 1), squared_error)
ONE = torch.zeros(1, dtype=torch.float64)


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def step(family, length=1.5, reach=1.0, slopes=(0.4, -0.3, 0.0), **changed):
    """A step on three features that are centred and scaled."""
    levels, periods = (vector(0.2), ONE)
    if family == COX:
        levels, periods = vector(-1.0, 0.5, 0.1, 1.0), vector(0, 0, 1, 1)
    fields = {
        "slopes": vector(*slopes),
        "levels": levels,
        "periods": periods,
        "centre": vector(0.1, 0.0, -0.2),
        "scale": vector(1.0, 2.0, 0.5),
    }
    return Regression(family, **(fields | changed), length=length, reach=reach)


EVERY = [
    step(LOGISTIC),
    step(LOGISTIC, slopes=(40.0, -40.0, 0.0)),
    step(COUNTS, reach=9.0),
    step(COUNTS, reach=9.0, levels=vector(9.0)),
    step(COX),
    step(COX, reach=2.5, slopes=(3.0, 0.0, -3.0)),
    step(COX, levels=vector(-20.0, 9.0, 9.0, -3.0)),
]


class Quiet(Simulated):
    """Without noise."""

    def gaussian(self, mechanism, mean, silos):
        return mean


def worst_records():
    """Records of all sizes and labels, and the hostile ones."""
    points = [vector(*x) for x in itertools.product((-60.0, 0.1, 1.0), (0.0, 7.0), (-0.2, 90.0))]
    labels = [torch.tensor(label) for label in (0, 1, 2, 3, 7, 8, 9)]
    return [*hostile_records(3), *itertools.product(points, labels)]


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("statistic", EVERY, ids=lambda s: f"{s.family} reach {s.reach}")
def test_one_record_moves_the_sums_by_no_more_than_is_paid_for(monkeypatch, statistic, gate):
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))

    def answerer(records):
        if gate:
            return Exact(PROBLEM, records, partition=lambda *_: np.arange(5))
        return Quiet(PROBLEM, records, [0])

    check_statistic(statistic, worst_records(), answerer, dim=PROBLEM.dim)


def test_the_worst_records_found_by_search_come_close_to_the_bound_and_not_past_it():
    """Random records and steps, moved uphill: the distance of two records' vectors stays below
    twice the norm, and most of it is used.
    """
    random = torch.Generator().manual_seed(0)
    for family, most in ((LOGISTIC, 2), (COUNTS, 10), (COX, 9)):
        furthest = 0.0
        for _ in range(40):
            slopes = torch.randn(3, generator=random, dtype=torch.float64).tolist()
            reach = 1.0 if family == LOGISTIC else 4.0
            statistic = step(family, 1.2, reach, slopes)
            x = 3 * torch.randn(400, 3, generator=random, dtype=torch.float64)
            y = torch.randint(0, most, (400,), generator=random)
            rows = statistic.rows(PROBLEM, 0)(x, y)
            furthest = max(furthest, float(torch.cdist(rows, rows).max()) / (2 * statistic.norm))
        assert furthest <= 1.0
        assert furthest >= 0.6


@pytest.mark.parametrize("statistic", EVERY[:1] + EVERY[4:5])
def test_a_residual_that_is_not_bounded_by_its_weight_is_seen(monkeypatch, statistic):
    shipped = Regression.factors

    def longer(self, *words):
        factors = shipped(self, *words)
        return lambda x, y: 1.02 * factors(x, y)

    monkeypatch.setattr(Regression, "factors", longer)
    x = vector(1.0, 0.0, -0.2).repeat(200, 1) * torch.linspace(-60, 60, 200)[:, None]
    y = torch.arange(200) % 8
    rows = statistic.rows(PROBLEM, 0)(x, y)
    norms = rows.norm(dim=1).max()
    assert norms > statistic.bound**2


def test_the_sums_are_residuals_and_information_of_a_logistic_model():
    random = torch.Generator().manual_seed(1)
    x = torch.rand(20000, 3, generator=random, dtype=torch.float64)
    statistic = step(LOGISTIC, length=9.0)
    u = (x - statistic.centre) * statistic.scale
    chance = (0.2 + u @ statistic.slopes).sigmoid()
    y = (torch.rand(20000, generator=random, dtype=torch.float64) < chance).long()
    products = statistic.matrix(statistic.rows(PROBLEM, 0)(x, y).mean(0, keepdim=True))[0]
    a = torch.cat([torch.ones(20000, 1), u], 1)
    torch.testing.assert_close(
        products[:-1, -1] / statistic.balance, (a * (y - chance)[:, None]).mean(0)
    )
    information = (a * (chance * (1 - chance))[:, None]).T @ a / 20000
    torch.testing.assert_close(products[:-1, :-1], information, rtol=0.05, atol=0.01)


def test_the_sums_of_survival_times_are_zero_on_average_at_the_true_hazards():
    """And their information is the slope of the residuals, in each period."""
    random = torch.Generator().manual_seed(2)
    n = 60000
    x = 2 * torch.rand(n, 3, generator=random, dtype=torch.float64) - 1
    statistic = step(COX, length=9.0, reach=1.5)
    u = (x - statistic.centre) * statistic.scale
    hazard = (statistic.levels + (u @ statistic.slopes)[:, None]).exp()
    event = torch.rand(n, 4, generator=random, dtype=torch.float64) < -(-hazard).expm1()
    time = torch.where(event.any(1), event.int().argmax(1), 4)
    y = torch.where(time < 4, 2 * time + 1, 8)
    lost = torch.randint(1, 5, (n,), generator=random)  # at the end of a bin, before the event
    y = torch.where(lost <= time, 2 * lost - 2 + 0, y)
    y = torch.where(lost <= time, torch.where(lost == 4, 8, y), y)

    def products(levels):
        moved = step(COX, length=9.0, reach=1.5, levels=levels)
        return moved.matrix(moved.rows(PROBLEM, 0)(x, torch.where(y % 2 == 1, y, 8)).mean(0)[None])

    alive = torch.where(event.any(1), 2 * event.int().argmax(1) + 1, 8)
    y = alive
    found = products(statistic.levels)[0]
    score = found[:-1, -1] / statistic.balance
    assert float(score.abs().max()) < 5 * math.sqrt(float(found[:2, :2].diagonal().max()) / n)
    nearby = products(statistic.levels + vector(0.02, 0.02, 0, 0))[0]
    slope = (score - nearby[:-1, -1] / statistic.balance)[0] / 0.02
    torch.testing.assert_close(slope, found[0, 0], rtol=0.15, atol=0.0)


def test_an_unknown_label_or_value_counts_as_zero():
    x = vector(0.3, 0.2, 0.1).repeat(3, 1)
    x[2, 0] = math.nan
    for statistic, label in ((step(LOGISTIC), 2), (step(COX), 9), (step(COX), -1)):
        rows = statistic.rows(PROBLEM, 0)(x, torch.tensor([1, label, 1]))
        assert rows[0].any()
        assert not rows[1:].any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"family": 3},
        {"family": 1.0},
        {"slopes": vector(1.0)},
        {"slopes": vector(math.nan, 0, 0)},
        {"levels": vector()},
        {"levels": torch.zeros(600)},
        {"periods": vector(0, 2, 1, 3, 5)},
        {"periods": vector(0, 0, 2, 2)},
        {"periods": vector(0.5, 0, 1, 1)},
        {"scale": vector(-1.0, 1.0, 1.0)},
        {"scale": vector(1.0, 1.0)},
        {"centre": vector(math.inf, 1.0, 1.0)},
        {"length": 0.0},
        {"length": math.nan},
        {"reach": 0.5},
        {"reach": math.inf},
    ],
)
def test_senseless_fields_are_refused_before_anything_is_allocated(wrong):
    fields = vars(step(COX)) | wrong
    with pytest.raises(Refused):
        check(Query(Regression(**fields), Gaussian("a", 1e30, 1.0)), PROBLEM.dim, [10])


def test_a_time_after_a_hazard_without_bound_counts_for_nothing():
    """The weight of a bin follows from the hazard before it: no record counts for more than
    `reach` expected events.
    """
    statistic = step(COX, levels=vector(3.0, 3.0, 3.0, 3.0), length=9.0, reach=2.0)
    z = statistic.factors(PROBLEM, 0)(vector(0.1, 0.0, -0.2)[None], torch.tensor([8]))
    expected = 2 * float(z.reshape(2, -1)[:, :2].square().sum())
    assert 0 < expected <= 2.0
