"""Which operations an answer takes, on which shapes, and which lines of code follows from public
numbers alone: neighbours are compared, and nothing is timed.
"""

import gc
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import silodp
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import Huber, cross_entropy, logistic, squared_error
from silodp.core.problem.person import Person
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch
from silodp.core.statistics import (
    Binned,
    ClassCounts,
    ClippedDiff,
    Grad,
    GradDiff,
    GroupClasses,
    GroupScore,
    Histogram,
    LocalSteps,
    Marginals,
    Moments,
    Regression,
    RiskCells,
    ScaledGrad,
    Score,
    Statistic,
)
from silodp.core.statistics.gram import Gram
from silodp.core.statistics.regression import COUNTS, COX, LOGISTIC
from silodp.engine.model import MeanPool, Residual, SelfAttention
from silodp.silo.answer import exact, lattice, products, slots
from silodp.silo.answer.exact import Exact
from silodp.silo.data.records import Records

N, PLACES, FEATURES = 13, 2, 16
SOURCES = str(Path(silodp.__file__).parent)
ALIKE = "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique"
"""Operations of torch by which a program looks at numbers, or makes a shape of them."""


def own_loss(output, target):
    """A loss that the engine does not know: every record is asked by itself."""
    return (output.squeeze(-1) - target).abs().clamp(max=2.0)


class Shrunk(nn.Module):
    """A layer that the engine does not know."""

    def forward(self, x):
        return x / (1 + x.abs())


def convolutions() -> nn.Module:
    """Layers that are summed in both ways, by products and by each record's share."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 24, 2),
        nn.Flatten(),
        nn.LayerNorm(24),
        nn.Linear(24, 3),
    )


def attention() -> nn.Module:
    body = Residual(nn.LayerNorm(4), nn.Linear(4, 12), SelfAttention(2), nn.Linear(4, 4))
    return nn.Sequential(nn.Unflatten(1, (4, 4)), body, MeanPool(), nn.Linear(4, 3))


def places() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 8)), nn.Linear(8, 20), nn.Sigmoid(), nn.Flatten(), nn.Linear(40, 3)
    )


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, outputs))


KNOWN: dict[str, tuple[Callable[[], nn.Module], Callable]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(16, 1)), squared_error),
    "huber": (lambda: nn.Sequential(nn.Linear(16, 1)), Huber(1.0)),
    "logistic": (lambda: nn.Sequential(nn.Linear(16, 1)), logistic),
    "mlp": (mlp, cross_entropy),
    "places": (places, cross_entropy),
    "convolutions": (convolutions, cross_entropy),
    "attention": (attention, cross_entropy),
}
OTHER = {
    "unknown loss": (lambda: mlp(1), own_loss),
    "unknown layer": (
        lambda: nn.Sequential(nn.Linear(16, 9), Shrunk(), nn.Linear(9, 3)),
        cross_entropy,
    ),
    "persons": (mlp, cross_entropy),
}
MODELS = KNOWN | OTHER


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """One thread, as both ways of looking on see their own alone; small chunks; and no noise, whose
    draws take time by themselves."""
    monkeypatch.setattr(products, "MOST", 8)
    monkeypatch.setattr(slots, "CHUNK", 8 * 160)
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))
    with slots.pinned(1):
        yield


def problem_of(name: str) -> Problem:
    torch.manual_seed(3)
    model, loss = MODELS[name]
    return Problem(model(), loss, person=Person("p", PLACES) if name == "persons" else None)


def records(name: str, change: Callable[[np.ndarray, np.ndarray], None]) -> Records:
    rng = np.random.default_rng(7)
    axes = (N, PLACES) if name == "persons" else (N,)
    x = rng.normal(size=(*axes, FEATURES)).astype(np.float32)
    y = rng.integers(0, 2, axes)
    change(x, y)
    floating = name in ("linear", "huber", "unknown loss")
    return Records.of([(x, y.astype(np.float32) if floating else y)])


def answerer(name: str, change: Callable[[np.ndarray, np.ndarray], None]) -> Exact:
    return Exact(
        problem_of(name),
        records(name, change),
        partition=lambda partition, batches: np.arange(N),
        held_out_share=0.3,
    )


def nothing(x: np.ndarray, y: np.ndarray) -> None:
    """The records as they are: all sound."""


def value(number: float, at: object, feature: object = 3) -> Callable:
    """A record, or several, with this number among the features, or instead of all of them."""

    def change(x: np.ndarray, y: np.ndarray) -> None:
        x[at, ..., feature] = number

    return change


def label(number: int, at: object) -> Callable:
    def change(x: np.ndarray, y: np.ndarray) -> None:
        y[at] = number

    return change


NEIGHBOURS = {
    "no number in a full chunk": value(math.nan, 2),
    "no number in the last chunk": value(math.nan, N - 1),
    "infinite": value(-math.inf, 9),
    "too large": value(3e38, 9, slice(None)),
    "too small": value(1e-40, 9, slice(None)),
    "long": value(1e4, 9, slice(None)),
    "zeros": value(0.0, 9, slice(None)),
    "another label": label(1, 4),
    "an absurd label": label(-7, 4),
    "none is sound": value(math.nan, slice(None)),
}


class Operations(TorchDispatchMode):
    """Every operation of torch with the shapes and types of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append((str(func), _shapes(args), _shapes(sorted((kwargs or {}).items()))))
        return func(*args, **(kwargs or {}))


def _shapes(given: object) -> object:
    if isinstance(given, torch.Tensor):
        return tuple(given.shape), tuple(given.stride()), str(given.dtype)
    if isinstance(given, list | tuple):
        return tuple(map(_shapes, given))
    return type(given).__name__ if isinstance(given, float) else str(given)


def path_of(ask: Callable[[], object]) -> tuple[list[object], list[object]]:
    """The operations of torch, and the lines of silodp, that this takes."""
    lines: list[object] = []

    def follow(frame, event, argument):
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        lines.append((event, frame.f_code.co_filename, frame.f_lineno))
        return follow

    before = sys.gettrace()
    gc.disable()  # or the collector may close what an earlier test left open, in lines of silodp
    with Operations() as seen:
        sys.settrace(follow)
        try:
            ask()
        finally:
            sys.settrace(before)
            gc.enable()
    return seen.found, lines


def statistics_of(problem: Problem) -> list[Statistic]:
    w = problem.initial([1]).double()
    huge, low = 1e30 * w, torch.full((FEATURES,), -2.0).double()
    return [
        Grad(w),
        Grad(huge),
        GradDiff(w, 0.9 * w),
        ClippedDiff(w, 0.9 * w, 1.0),
        LocalSteps(w, 2, 0.1),
        Score(w, 3, 1.0),
        GroupScore(w, 0, 4, 0),
        ScaledGrad(w, low, -low, 1.0),
        RiskCells(w, torch.linspace(-2, 2, 5).double(), 1.0),
        RiskCells(w, torch.zeros(0).double(), 1.0),
        Histogram(torch.linspace(-2, 2, 5).double(), FEATURES),
        Moments(low, -low),
        Gram(4, 2, 1.0, 1.0),
        GroupClasses(2, 0, 4, 0),
        *regressions(FEATURES),
        ClassCounts(2),
        Marginals.of([Binned(0, 1, (0.0,)), Binned(1, 3), Binned(-1, 2)], [(0,), (1, 2)]),
    ]


def regressions(features: int) -> list[Regression]:
    """A step of each family."""
    ones = torch.ones(features).double()
    one = torch.zeros(1).double()
    point = 0.1 * ones, one, one, 0 * ones, ones, 2.0, 3.0
    times = torch.tensor([0.0, 1.0]).double()
    return [
        Regression(LOGISTIC, *point),
        Regression(COUNTS, *point),
        Regression(COX, 0.1 * ones, times, times, 0 * ones, ones, 2.0, 1.5),
    ]


def asked(silo: Exact, statistic: Statistic, sampling=FullBatch()) -> Callable:  # noqa: B008
    query = Query(statistic, Gaussian("a", 1.0, 2.0, sampling))
    return lambda: silo.answer(query, [0])


def differences(name: str, statistic: Statistic, sampling=FullBatch()) -> list[str]:  # noqa: B008
    """The neighbours for which an answer takes another path than for records that are sound."""
    first = answerer(name, nothing)
    for _ in range(3):  # torch's interpreter looks at the first calls, and arranges later ones
        asked(first, statistic, sampling)()
    plain = path_of(asked(first, statistic, sampling))
    assert len(plain[0]) > 5
    assert len(plain[1]) > 5
    return [
        neighbour
        for neighbour, change in NEIGHBOURS.items()
        if path_of(asked(answerer(name, change), statistic, sampling)) != plain
    ]


def cases() -> list:
    """Products answer gradients alone: the other statistics go record by record in any model."""
    kinds = [type(one).__name__ for one in statistics_of(problem_of("mlp"))]
    return [
        pytest.param(name, at, id=f"{name}-{kind}-{at}")
        for name in MODELS
        for at, kind in enumerate(kinds)
        if name in OTHER or at in (0, 2, 4)
    ]


def test_the_models_of_known_layers_are_summed_by_products_and_the_others_are_not():
    for name in MODELS:
        assert bool(answerer(name, nothing)._products) == (name in KNOWN), name


@pytest.mark.parametrize(("name", "at"), cases())
def test_an_answer_takes_the_same_operations_and_lines_whatever_one_record_holds(name, at):
    """Whether a record is finite, too long, zero or of another class decides no step."""
    statistic = statistics_of(problem_of(name))[at]
    assert differences(name, statistic) == []


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_some_records_takes_the_same_path_whatever_they_hold(name):
    statistic = Grad(problem_of(name).initial([1]).double())
    assert differences(name, statistic, DisjointBatches(3, 1)) == []


@pytest.mark.parametrize("name", KNOWN)
def test_products_take_the_same_path_whether_all_records_are_drawn_or_some(name):
    """Who is drawn is secret: coins decide it, and a price by sampling counts on that."""
    silo = answerer(name, nothing)
    assert silo._products
    points, found = [silo.problem.initial([1]).double()], []
    for drawn in (np.ones(N, bool), np.arange(N) % 2 == 0, np.zeros(N, bool)):
        given = points, silo._x, silo._y, drawn, 1.0, 2.0**-20, 1, silo._known
        for _ in range(3):
            silo._products.sum(*given)
        found.append(path_of(lambda given=given: silo._products.sum(*given)))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", KNOWN)
def test_products_look_at_no_number_on_the_way(name):
    """No operation reads a number out of a tensor, or makes a shape of numbers: there is nothing by
    which a program could branch."""
    silo = answerer(name, NEIGHBOURS["infinite"])
    for statistic in statistics_of(silo.problem)[:3]:
        rows = silo._rows_of(statistic)
        operations, _ = path_of(
            lambda rows=rows: silo._sum(rows, np.arange(N), 1.0, 2.0**-20, silo.problem.dim)
        )
        looked = [one for one in operations if any(word in str(one[0]) for word in ALIKE)]
        assert looked == []


def test_a_branch_on_soundness_would_be_seen(monkeypatch):
    """The mistake: records are looked at, and zeroed only where one is not sound."""
    real = exact.quantised

    def branching(rows, clip, gamma):
        sound = torch.isfinite(rows).all(1)
        return real(rows if bool(sound.all()) else rows.where(sound[:, None], 0), clip, gamma)

    monkeypatch.setattr(exact, "quantised", branching)
    statistic = Grad(problem_of("unknown loss").initial([1]).double())
    assert "infinite" in differences("unknown loss", statistic)
