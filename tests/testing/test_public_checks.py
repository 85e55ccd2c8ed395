"""Each check_* takes an object from outside the package, which nobody registered: a sound one
passes, a broken one is told why not.
"""

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import silodp.testing
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import Poisson
from silodp.core.statistics import Grad, Statistic
from silodp.server.federation import Federation
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.testing import (
    check_algorithm,
    check_federation,
    check_mechanism,
    check_model,
    check_prox,
    check_sampling,
    check_statistic,
)
from silodp.testing.federation import simulated_federation
from silodp.testing.statistic import hostile_records

FEATURES = 3


def test_the_checks_are_named_and_load_nothing_until_they_are_used():
    assert dir(silodp.testing) == silodp.testing.__all__
    said = subprocess.run(
        [sys.executable, "-c", "import silodp.testing, sys; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == "False"


# --- a prox --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Near:
    """f1(w) = strength / 2 ||w - 1||^2."""

    strength: float
    wrong: float = 0.0

    def value(self, w):
        return self.strength / 2 * (w - 1).square().sum(-1)

    def __call__(self, w, step):
        return (w + self.strength * step) / (1 + (self.strength + self.wrong) * step)


def test_a_prox():
    check_prox(Near(0.3), 4)
    with pytest.raises(AssertionError, match="not the minimiser"):
        check_prox(Near(0.3, wrong=0.2), 4)


# --- a model and its loss ------------------------------------------------------------------------


def quartic(output, target):
    return (output.squeeze(-1) - target) ** 4


def test_a_loss_and_an_engine():
    coins = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4, FEATURES, generator=coins), torch.randn(2, 4, generator=coins)
    problem = Problem(nn.Linear(FEATURES, 1), quartic)
    check_model(problem, x, y)

    def together(problem, w, x, y, weight, clip, *, reference=None):
        """Clips a silo's sum instead of each record."""
        from silodp.engine.clipping import clipped_sum

        total = clipped_sum(problem, w, x, y, weight, torch.inf, reference=reference)
        return total * (
            torch.as_tensor(clip).reshape(-1, 1, 1) / total.norm(dim=-1, keepdim=True)
        ).clamp(max=1).nan_to_num(0.0)

    with pytest.raises(AssertionError, match="from a loop over records"):
        check_model(problem, x, y, engine=together)


# --- a statistic ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FeatureMean(Statistic):
    """The features of each record, scaled down to norm `norm` where they are longer."""

    features: int
    norm: float

    @property
    def shape(self):
        return 1, self.features


class Means(Simulated):
    """Answers feature means, without noise."""

    limit = 1.0

    def answer(self, query, silos):
        x, clip = self.records.x.nan_to_num(0.0, 0.0, 0.0), self.limit * query.mechanism.clip
        return (x * (clip / x.norm(dim=-1, keepdim=True).clamp(min=clip))).mean(1)[None]


class Longer(Means):
    limit = 1.1


class Passing(Means):
    def answer(self, query, silos):
        return self.records.x.mean(1)[None]


def test_a_statistic():
    problem, records = Problem(nn.Linear(FEATURES, 1), squared_error), hostile_records(FEATURES)

    def ask(kind, **options):
        check_statistic(
            FeatureMean(FEATURES, 2.0),
            records,
            lambda r: kind(problem, r, [0]),
            dim=problem.dim,
            **{"reaches": 0.99} | options,
        )

    ask(Means)
    with pytest.raises(AssertionError, match="moves the sum by"):
        ask(Longer)
    with pytest.raises(AssertionError, match="not finite"):
        ask(Passing)
    with pytest.raises(AssertionError, match="no pair of records reaches"):
        ask(Means, reaches=1.01)


# --- a mechanism and a sampling ------------------------------------------------------------------


class Generous(Gaussian):
    """Counts a replaced record once, not twice."""

    def sensitivity(self, n):
        return super().sensitivity(n) / 2


def test_a_mechanism():
    class Mine(Gaussian):
        pass

    check_mechanism(Mine("mine", 1.0, 2.0))
    with pytest.raises(AssertionError, match="past the sensitivity"):
        check_mechanism(Generous("generous", 1.0, 2.0))


class Likelier(Simulated):
    """Tosses coins of another rate than is priced."""

    def answer(self, query, silos):
        sampling = Poisson(1.3 * query.mechanism.sampling.rate)
        other = replace(query, mechanism=replace(query.mechanism, sampling=sampling))
        return 1.3 * super().answer(other, silos)


def test_a_sampling():
    check_sampling(Poisson(0.3))
    with pytest.raises(AssertionError, match="of batches, not in"):
        check_sampling(Poisson(0.3), answerer=Likelier)


# --- a backend -----------------------------------------------------------------------------------


class FirstAlone(Federation):
    """Takes the first silo's answer for the mean."""

    def mean(self, query):
        return self._channel.ask(query, self._participation.draw()[:1]).value.mean(1)


def test_a_federation():
    check_federation(simulated_federation)
    with pytest.raises(AssertionError, match="differs from the reference"):
        check_federation(lambda *made: FirstAlone(simulated_federation(*made)._channel, made[2]))


# --- an algorithm --------------------------------------------------------------------------------


def averaged(fed, problem, w, *, rounds: int, step, minibatch: Gaussian):
    """Server momentum of one half, for a problem with a prox."""
    v = torch.zeros_like(w)
    for r in range(rounds):
        v = 0.5 * v + fed.mean(Query(Grad(w), minibatch.at(r)))
        w = problem.prox(w - step * v, step)
        yield w


def twice(fed, problem, w, *, rounds: int, step, minibatch: Gaussian):
    """Asks once more than it said, when the answers are real."""
    for point in averaged(fed, problem, w, rounds=rounds, step=step, minibatch=minibatch):
        if bool(point.any()):
            fed.mean(Query(Grad(point), minibatch))
        yield point


def test_an_algorithm():
    coins = torch.Generator().manual_seed(0)
    x = torch.randn(40, FEATURES, generator=coins, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    problem = Problem(nn.Linear(FEATURES, 1, bias=False), squared_error)
    records = Records.of([(x[:20].float(), y[:20].float()), (x[20:].float(), y[20:].float())])
    given = dict(optimum=0.0, step=0.1, long={"rounds": 200}, short={"rounds": 4}, iterates=4)
    check_algorithm(averaged, problem, records, **given)
    with pytest.raises(AssertionError, match="asked 8 questions, the dry run 4"):
        check_algorithm(twice, problem, records, **given)
