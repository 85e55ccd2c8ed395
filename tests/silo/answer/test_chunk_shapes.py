"""No question chooses a shape: whatever is asked, a gate computes in chunks that it tried before it
served.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch._C import _functorch as functorch

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER, POINT, REAL, VECTOR
from silodp.core.mechanisms import Gaussian, Shuffled
from silodp.core.problem.losses import logistic
from silodp.core.problem.person import Person
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import (
    LABEL,
    STATISTICS,
    Binned,
    Marginals,
    Regression,
    RiskCells,
    Score,
    Statistic,
)
from silodp.core.statistics.regression import COUNTS, COX, LOGISTIC, PLAIN
from silodp.core.statistics.risk_cells import MOST_EDGES
from silodp.silo.answer import exact, slots
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.products import Products
from silodp.silo.data.records import Records

N, FEATURES, PLACES = 100, 40, 2
SMALL = 2**12
"""Numbers in a chunk, so that so few records are several: 99 and 1 of gradients, chunks of 3 and
one of 1 of scores. Measured by its own two cells for each of 40 groups, a score by groups would
have 51 and 49."""
FIELDS = {
    INTEGER: [0, 1, 40, 100],
    REAL: [1.0],
    VECTOR: [torch.arange(size).double() for size in (1, 5, FEATURES)],
}


def tables(bins: int) -> Marginals:
    """Of every feature in so many bins, and of the label by the first feature."""
    edges = tuple(np.linspace(-1, 1, bins - 1).tolist())
    columns = [*(Binned(j, 1, edges) for j in range(FEATURES)), Binned(LABEL, 2)]
    return Marginals.of(columns, [*((j,) for j in range(FEATURES)), (FEATURES, 0)])


def regression(family: int, slopes: int, levels: int) -> Regression:
    """Of the first features, with a period for each level."""
    scale = (torch.arange(FEATURES) < slopes).double()
    level = torch.zeros(levels).double()
    periods = torch.arange(levels).double()
    return Regression(
        family, torch.zeros(slopes).double(), level, periods, 0 * scale, scale, 1.0, 2.0
    )


def scores(w: torch.Tensor) -> list[Score]:
    """Without bins, with bins by label, and with bins by risk."""
    by_risk = [
        Score(w, bins, 1.0, 2, torch.linspace(-2, 2, bins - 1).double()) for bins in (2, 40, 512)
    ]
    return [Score(w, bins, 1.0, numbers) for bins in (0, 2, 40) for numbers in (1, 5)] + by_risk


def fitting(kind: type[Statistic], w: torch.Tensor) -> list[Statistic]:
    """Questions whose fields must fit together, so that no free choice of them is one."""
    if kind is Marginals:
        return [tables(bins) for bins in (2, 3, 60)]
    if kind is Regression:
        plain = [
            regression(family, slopes, 1)
            for family in (LOGISTIC, COUNTS, PLAIN)
            for slopes in (1, 5, FEATURES)
        ]
        return plain + [regression(COX, slopes, 8) for slopes in (1, FEATURES)]
    if kind is Score:
        return scores(w)
    if kind is RiskCells:
        several = (torch.linspace(-3, 3, n, dtype=torch.float64) for n in (0, 1, 40, MOST_EDGES))
        return [RiskCells(w, edges, 1.0) for edges in several]
    return []


def physical(x: torch.Tensor) -> tuple[int, ...]:
    """The shape that kernels see, whatever vmap and grad wrapped it in."""
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return tuple(x.shape)


class Watched(nn.Module):
    """Says what shapes it was asked in; being of no known kind, it is asked record by record."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(FEATURES, 1), set()

    def forward(self, x):
        self.seen.add(physical(x))
        return self.layer(x)


def answerer(model: nn.Module, person: bool) -> Exact:
    torch.manual_seed(0)
    x, y = (
        np.random.default_rng(0).normal(size=(N, PLACES, FEATURES)).astype(np.float32),
        np.arange(N * PLACES).reshape(N, PLACES) % 2,
    )
    problem = Problem(model, logistic, person=Person("p", PLACES) if person else None)
    records = Records.of([(x, y) if person else (x[:, 0], y[:, 0])])
    return Exact(problem, records, partition=lambda name, batches: np.arange(N), held_out_share=0.2)


def questions(kind: type[Statistic], asked: Exact) -> list[Statistic]:
    """One of every choice of its fields that a gate does not refuse, from the fields that it names
    itself.
    """
    choices = [
        [asked.problem.initial([1]).double()] if field == POINT else FIELDS[field]
        for field in kind.wire.values()
    ]
    candidates = fitting(kind, asked.problem.initial([1]).double())
    for values in itertools.product(*choices) if not candidates else ():
        apart = [
            v + i if isinstance(v, torch.Tensor) else v for i, v in enumerate(values)
        ]  # a range has another end than start
        candidates.append(kind(*apart))
    found = []
    for statistic in candidates:
        try:
            statistic.check(asked.problem.dim, 1)
            statistic.check_silo(asked.features, 10)
        except Refused:
            continue
        if statistic.about_features in (None, FEATURES) and statistic.releases <= 2:
            found.append(statistic)
    return found


def ask(asked: Exact, statistic: Statistic) -> None:
    """By itself, and in a total where it may be, with noise that takes no time."""
    clip = float(getattr(statistic, "norm", 1.0))
    if statistic.in_totals:
        asked.answer(Query(statistic, Shuffled("a", clip, 1.0, counted=2)), [0])
    asked.answer(Query(statistic, Gaussian("a", clip, 1.0)), [0])


@pytest.fixture
def chunks(monkeypatch):
    """The numbers of records in a chunk that were tried, and those that were computed for an
    answer.
    """
    tried, used, verify, computed = set(), set(), slots.verify, slots.computed
    monkeypatch.setattr(slots, "CHUNK", SMALL)
    monkeypatch.setattr(
        exact,
        "verify",
        lambda rows, like, sizes, dim, **more: (
            tried.update(sizes) or verify(rows, like, sizes, dim, **more)
        ),
    )
    monkeypatch.setattr(
        exact, "computed", lambda rows, x, *rest: used.add(len(x)) or computed(rows, x, *rest)
    )
    monkeypatch.setattr(
        exact.lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64)
    )
    return tried, used


@pytest.mark.parametrize("person", [False, True])
@pytest.mark.parametrize("name", sorted(STATISTICS))
def test_whatever_is_asked_the_model_and_its_records_are_in_shapes_that_were_tried(
    name, person, chunks
):
    model, (tried, used) = Watched(), chunks
    asked = answerer(model, person)
    asked.verify()
    shapes = set(model.seen)
    model.seen.clear()
    few = questions(STATISTICS[name], asked)
    assert few, "no choice of fields is a question: give this test values that are"
    for statistic in few:
        ask(asked, statistic)
    assert used
    assert used <= tried
    assert model.seen <= shapes
    assert len({math.prod(shape) for shape in model.seen}) <= 2  # a whole chunk and what is left


def test_products_are_made_in_the_chunks_that_were_tried(chunks, monkeypatch):
    seen, records = set(), Products._records
    monkeypatch.setattr(
        Products,
        "_records",
        lambda self, points, x, *rest, **more: (
            seen.add((len(points), *x.shape)) or records(self, points, x, *rest, **more)
        ),
    )
    monkeypatch.setattr("silodp.silo.answer.products.MOST", 16)
    asked = answerer(nn.Sequential(nn.Linear(FEATURES, 10), nn.Tanh(), nn.Linear(10, 1)), False)
    assert asked._products
    asked.verify()
    tried = set(seen)
    seen.clear()
    for name in ("Grad", "GradDiff", "LocalSteps", "SteeredSteps"):
        for statistic in questions(STATISTICS[name], asked):
            ask(asked, statistic)
    assert seen == {(points, rows, FEATURES) for points in (1, 2) for rows in (16, 4)} == tried
