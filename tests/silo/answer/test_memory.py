"""No question chooses how much memory a gate takes: what would take more than is stated is refused
before the charge, all else is made in pieces.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from silodp.core.errors import Refused
from silodp.core.lattice import lattice_step
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import logistic
from silodp.core.problem.person import Person, averaged
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import (
    Binned,
    ClassCounts,
    Gram,
    GroupClasses,
    GroupScore,
    Histogram,
    Marginals,
    Moments,
    Outcomes,
    Regression,
    RiskCells,
    ScaledGrad,
    Score,
)
from silodp.silo.answer import exact, slots
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.integers import multiplied
from silodp.silo.data.records import Records

N, PLACES, FEATURES = 3, 64, 6
SMALL = 2**10
"""Numbers in a chunk, so that a person's rows are many more."""
ASKED = [
    Gram(FEATURES, 2, 1.0, 1.0),
    Gram(FEATURES, 5, 1.0, 1.0),
    Histogram(torch.arange(50).double(), FEATURES),
    ClassCounts(700),
    Marginals.of([Binned(0, 1, tuple(map(float, range(300)))), Binned(1, 2)], [(0, 1), (0,)]),
    GroupClasses(300, 0, 2, 0),
    Regression(
        2,
        torch.ones(FEATURES),
        torch.zeros(16),
        torch.arange(16) // 8,
        torch.zeros(FEATURES),
        torch.ones(FEATURES),
        2.0,
        1.5,
    ),
    Moments(-torch.ones(FEATURES), torch.ones(FEATURES)),
    Outcomes(1),
    Score(torch.ones(1, FEATURES + 1), 100, 1.0),
    GroupScore(torch.ones(1, FEATURES + 1), 0, FEATURES, 0),
    RiskCells(torch.ones(1, FEATURES + 1), torch.arange(100).double(), 1.0),
    ScaledGrad(torch.ones(1, FEATURES + 1), torch.zeros(FEATURES), torch.ones(FEATURES), 1.0),
]


class Largest(TorchDispatchMode):
    """Notes the most numbers that any tensor has on the way."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            self.numbers = max(self.numbers, one.numel() if isinstance(one, torch.Tensor) else 0)
        return made


def answerer(places: int = PLACES, features: int = FEATURES, persons: int = N) -> Exact:
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(persons, places, features)).astype(np.float32),
        rng.integers(0, 2, (persons, places)),
    )
    y[1:, places // 2 :] = -1  # places without a row
    problem = Problem(nn.Sequential(nn.Linear(features, 1)), logistic, person=Person("p", places))
    return Exact(
        problem,
        Records.of([(x, y)]),
        partition=lambda name, batches: np.arange(persons),
        held_out_share=0.5,
    )


def query(statistic) -> Query:
    return Query(statistic, Gaussian("a", statistic.norm, 1.0))


@pytest.mark.parametrize("statistic", ASKED, ids=lambda statistic: type(statistic).__name__)
def test_what_is_made_of_a_persons_rows_is_made_in_pieces_and_is_the_same_to_the_last_integer(
    statistic, monkeypatch
):
    monkeypatch.setattr(
        exact.lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64)
    )
    asked = answerer()
    whole = asked.answer(query(statistic), [0])
    monkeypatch.setattr(slots, "CHUNK", SMALL)
    with Largest() as largest:
        pieces = asked.answer(query(statistic), [0])
    assert largest.numbers <= max(
        SMALL, statistic.shape[-1], N * PLACES * FEATURES
    )  # the last is what the records are
    if (
        statistic.factors(asked.problem, 0) or statistic.numbers == 0
    ):  # integers, and cells that are halves, quarters ...
        assert torch.equal(pieces, whole)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-5)


def test_the_widest_rows_of_the_most_places_take_a_few_chunks_and_not_gigabytes():
    asked = answerer(places=1000, persons=1)
    asked.check(query(ClassCounts(2**16)))
    with Largest() as largest:
        asked.answer(query(ClassCounts(2**16)), [0])
    assert largest.numbers <= slots.CHUNK


def test_products_of_a_persons_rows_are_the_same_in_any_pieces(monkeypatch):
    rng = np.random.default_rng(1)
    factors, real = (
        torch.from_numpy(rng.normal(size=(4 * 9, 7))),
        torch.from_numpy(rng.random((4, 9)) < 0.7),
    )
    gamma = lattice_step(1.0, 28)
    whole = multiplied(factors, 1.0, gamma, real)
    monkeypatch.setattr(slots, "CHUNK", 1)
    assert torch.equal(multiplied(factors, 1.0, gamma, real), whole)


def test_averages_over_places_are_asked_for_in_pieces():
    sizes = []
    x, y = torch.arange(14.0).reshape(2, 7, 1), torch.tensor([[1] * 7, [1] * 3 + [-1] * 4])
    rows = lambda x, y: sizes.append(len(x)) or x  # noqa: E731
    assert averaged(rows, 3)(x, y).flatten().tolist() == [3.0, 8.0]
    assert sizes == [6, 6, 2]


def test_rows_that_are_wider_than_the_stated_bound_are_refused_before_the_charge():
    asked = answerer(places=2, features=4100)
    edges = torch.arange(1023).double()
    asked.check(query(Histogram(edges[:1000], 4100)))
    with pytest.raises(Refused) as refused:
        asked.check(query(Histogram(edges, 4100)))
    assert refused.value.code == "shape"
