"""Whatever is wrong with an object, its check_* says it in an AssertionError of one sentence."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import cross_entropy, squared_error
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.silo.data.records import Records
from silodp.testing import check_algorithm, check_feature_map, check_model, check_prox

COINS = torch.Generator().manual_seed(0)
X = torch.randn(2, 20, 3, generator=COINS)
RECORDS = Records.of([(x, x @ torch.tensor([1.0, -1.0, 0.5])) for x in X])


def refused(sentence, check, *given, **options):
    with pytest.raises(AssertionError, match=sentence) as said:
        check(*given, **options)
    assert "\n" not in str(said.value)


# --- an algorithm --------------------------------------------------------------------------------


def descent(fed, problem, w, *, rounds: int, step, minibatch: Gaussian):
    for r in range(rounds):
        w = problem.prox(w - step * fed.mean(Query(Grad(w), minibatch.at(r))), step)
        yield w


def yields_none(fed, problem, w, *, rounds: int, step, minibatch: Gaussian):
    for _ in descent(fed, problem, w, rounds=rounds, step=step, minibatch=minibatch):
        yield None


def yields_less(fed, problem, w, *, rounds: int, step, minibatch: Gaussian):
    for point in descent(fed, problem, w, rounds=rounds, step=step, minibatch=minibatch):
        yield point[:, :2]


def needs(fed, problem, w, *, rounds: int, keep: float, step, minibatch: Gaussian):
    yield from descent(fed, problem, w, rounds=rounds, step=step, minibatch=minibatch)


def looks_behind(fed, problem, w, *, rounds: int, step, minibatch: Gaussian):
    assert fed._channel
    yield from descent(fed, problem, w, rounds=rounds, step=step, minibatch=minibatch)


def asks_more(fed, problem, w, *, rounds: int, step, minibatch: Gaussian):
    for point in descent(fed, problem, w, rounds=rounds, step=step, minibatch=minibatch):
        if bool(point.any()):
            fed.mean(Query(Grad(point), minibatch))
        yield point


def own_noise(fed, problem, w, *, rounds: int, step, minibatch: Gaussian):
    quiet = replace(minibatch, noise_multiplier=0.0)
    yield from descent(fed, problem, w, rounds=rounds, step=step, minibatch=quiet)


def fails(fed, problem, w, *, rounds: int, step, minibatch: Gaussian):
    for r, point in enumerate(
        descent(fed, problem, w, rounds=rounds, step=step, minibatch=minibatch)
    ):
        yield point / (1 // (1 - r))


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (yields_none, "^yields_none: iterate 0 is NoneType, not a tensor$"),
        (yields_less, r"^yields_less: iterate 0 has shape \(1, 2\), not \(1, 3\)$"),
        (
            needs,
            (
                r"^needs: long=.* does not fit \(missing a required argument: 'keep'\); its "
                r"settings are rounds, keep$"
            ),
        ),
        (looks_behind, "^looks_behind: reached for fed._channel"),
        (asks_more, "^asks_more: asked 8 questions, the dry run 4"),
        (own_noise, "^own_noise: query 0 is .* but the dry run priced"),
        (fails, "^fails: raised ZeroDivisionError: .* by zero$"),
        (lambda fed, problem, w: w, "is no algorithm"),
        (3, "^3 is no algorithm"),
        ("absent", "'absent' is unknown"),
    ],
)
def test_an_algorithm(run, sentence):
    given = dict(optimum=0.0, step=0.1, long={"rounds": 200}, short={"rounds": 4}, iterates=4)
    problem = Problem(nn.Linear(3, 1, bias=False), squared_error)
    refused(sentence, check_algorithm, run, problem, RECORDS, **given)


# --- a prox --------------------------------------------------------------------------------------


class Plain:
    def value(self, w):
        return 0 * w.sum(-1)

    def __call__(self, w, step):
        return w


@dataclass(frozen=True)
class NoValue:
    def __call__(self, w, step):
        return w


@dataclass(frozen=True)
class NoCall:
    def value(self, w):
        return 0 * w.sum(-1)


@dataclass(frozen=True)
class Fails(Plain):
    def __call__(self, w, step):
        raise ValueError("no prox")


@dataclass(frozen=True)
class Nothing(Plain):
    def __call__(self, w, step):
        return None


@pytest.mark.parametrize(
    ("prox", "sentence"),
    [
        (Plain(), "^Plain does not show its numbers, .*; make it a frozen dataclass$"),
        (NoValue(), r"^NoValue has no value\(w\)"),
        (NoCall(), r"^NoCall has no __call__\(w, step\)"),
        (Fails(), "^Fails: raised ValueError: no prox$"),
        (Nothing(), "prox gives NoneType, not a tensor$"),
        (lambda w, step: w, r"^function has no value\(w\)"),
        (NoValue, "^NoValue is a class; give an object of it"),
    ],
)
def test_a_prox(prox, sentence):
    refused(sentence, check_prox, prox, 4)


# --- a model and its loss ------------------------------------------------------------------------


def plain(output, target):
    return functional.cross_entropy(output, target, reduction="none")


def centred(output, target):
    return plain(output, target) - plain(output, target).mean()


def wide(output, target):
    return output * plain(output, target)[:, None]


def nothing(output, target):
    return None


def endless(output, target):
    return plain(output, target) * torch.nan


class Mixing(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize(
    ("model", "loss", "sentence"),
    [
        (nn.Linear(3, 2), nothing, "^the loss nothing gives NoneType for one record"),
        (
            nn.Linear(3, 2),
            nn.functional.gaussian_nll_loss,
            (
                r"^the loss gaussian_nll_loss cannot be run on label . of a model with 2 "
                r"outputs \(TypeError"
            ),
        ),
        (nn.Linear(3, 2), wide, r"^the loss wide gives numbers of shape \(1, 2\) for one record"),
        (nn.Linear(3, 2), endless, "^the loss endless is not finite at the start"),
        (nn.Linear(3, 2), centred, "^the loss centred mixes records"),
        (Mixing(3, 2), plain, "^the model Mixing mixes records"),
        (nn.Linear(4, 2), plain, "^the model Linear cannot be run on records of 3 features"),
        (nn.Linear(3, 3), plain, r"^the model gives outputs of shape \(8, 3\), not \(8, 2\)$"),
        (nn.Linear(3, 2), plain, ""),
        (nn.Linear(3, 2), cross_entropy, ""),
    ],
)
def test_a_model_and_its_loss(model, loss, sentence):
    given = Problem(model, loss), X[:, :4], torch.arange(8).reshape(2, 4) % 2
    if sentence:
        refused(sentence, check_model, *given, outputs=2)
    else:
        check_model(*given, outputs=2)


# --- a map of features ---------------------------------------------------------------------------


def squares(x):
    return torch.cat([x, x.clamp(-3, 3).square()])


@pytest.mark.parametrize(
    ("function", "norm", "sentence"),
    [
        (lambda x: x + torch.randn_like(x), 9.0, "differ when they are computed again"),
        (lambda x: 1 / x, 9.0, "must be a vector of finite numbers"),
        (lambda x: x[: 2 + int(x[0] > 0)], 9.0, "cannot be computed .RuntimeError: stack expects"),
        (lambda x: x[9], 9.0, "cannot be computed .IndexError: "),
        (squares, 9.0, "^the features squares have norm .* must be at most 9$"),
        (3, 9.0, "^int is not a function"),
    ],
)
def test_a_map_of_features(function, norm, sentence):
    refused(sentence, check_feature_map, function, 3, norm=norm)


def test_a_sound_map_of_features_passes():
    check_feature_map(squares, 3)
    check_feature_map(torch.tanh, 4, norm=2.0)
