"""Synthetic records for the advisor: a few public worlds that a user's records may be like. They
use no real record.

In a world latent numbers, one for a column and correlated through a few factors, become features as
a schema makes them (numbers that fill a part of their public range, booleans, categories) or as
learnt scaling leaves them (standardised). The label is drawn from a score that is linear in the
latent numbers, and in some worlds bends. The worlds differ in how much the features tell, in how
many of them tell it, and in balance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from silodp.core.problem.task import Task

KINDS = ("number", "boolean", "category", "level", "missing", "standard")
"""Of a feature: a category column is one "category" and, for each further value, one "level";
"missing" says where a value was.
"""
FOLLOWS = ("level", "missing")
SQUARE = {
    "number": 0.2,
    "boolean": 1.0,
    "category": 0.25,
    "level": 0.25,
    "missing": 0.05,
    "standard": 1.0,
}
"""Mean square of a feature of each kind, in these worlds."""


@dataclass(frozen=True)
class World:
    """`logit`: spread of the score; `shift`: its mean, which unbalances classes; `bent`: share of
    it that is not linear in the latent numbers (`pairs`: made of products); `active`: share of the
    features that tell anything; `common`: what they have in common."""

    logit: float
    shift: float = 0.0
    bent: float = 0.0
    pairs: bool = False
    active: float = 1.0
    common: float = 0.3
    narrow: bool = False
    """Whether numbers lie in a small, low part of their public range, as they do where people wrote
    it down generously.
    """
    low: float = 0.0
    """How far below the middle of their range numbers lie on average: what is measured is seldom
    negative, and often small. What lies low has less room to vary."""
    falling: float = 0.0
    """How fast the factors behind the columns lose strength, k to the minus this: the columns of
    real tables share a few strong ones.
    """

    positive: float = 0.0
    """Share of records with the second of two classes; 0: as the shift makes it. The schema's own
    estimate goes before it.
    """


WORLDS = (
    World(2.2, 0.3, bent=0.1, active=0.6),
    World(3.0, 0.2, common=0.8, narrow=True, falling=1.0, positive=0.3),
    World(1.2, 0.0, bent=0.1, active=0.5, low=0.2, positive=0.13),
    World(1.5, -0.5, bent=0.25, pairs=True, active=0.6, common=0.5, falling=0.5, low=0.3),
    World(8.0, -0.3, common=0.9, narrow=True, falling=1.5),
    World(0.5, 0.0, active=0.6, common=0.5, falling=0.5, positive=0.1),
    World(1.2, 0.3, bent=0.1, active=0.6, low=0.4, positive=0.05),
    World(0.7, -0.3, bent=0.1, active=0.5, low=0.2, positive=0.3),
    World(1.0, 0.0, common=0.8, falling=1.0, low=0.6),
    World(2.2, 0.2, common=0.6, narrow=True, positive=0.1),
    World(0.3, 0.0, active=0.5, low=0.3),
    World(2.0, 0.0, bent=0.35, active=0.5, low=0.2),
    World(0.5, 0.0, common=0.5, falling=0.5, narrow=True, positive=0.4),
    World(0.8, 0.0, active=0.6, low=0.3, positive=0.35),
    World(0.9, 0.0, common=0.5, falling=0.5, narrow=True, positive=0.02),
    World(0.7, 0.0, active=0.7, common=0.5, low=0.4, positive=0.05),
    World(5.0, 0.0, common=0.9, falling=1.0, low=0.5),
    World(10.0, 0.0, common=0.95, narrow=True, falling=2.0),
)
"""In most medical tables the best model has an AUC of 0.6 to 0.75: the score's spread is 0.4 to 1.
Where machines sort what people can see, it is 2 and more.
"""


@dataclass(frozen=True)
class Sample:
    """Records to train on and to test on."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    task: Task


def draw(
    world: World, kinds: Sequence[str], task: Task, records: int, tested: int, seed: int
) -> Sample:
    """Records of this world; one seed is one population, and who is drawn from it."""
    random = np.random.default_rng((0xAD, seed))
    features = len(_columns(kinds))
    total = records + tested
    if world.falling:
        factors = min(12, features)
    else:
        factors = max(1, min(8, features // 4))
    load = (
        random.standard_normal((factors, features))
        * (np.arange(1, factors + 1) ** -world.falling)[:, None]
    )
    load = (
        np.abs(load) if world.narrow else load
    )  # sizes of one thing: all rise together, and the label with them
    load *= math.sqrt(world.common) / np.linalg.norm(load, axis=0)
    latent = random.standard_normal((total, factors)) @ load + math.sqrt(
        1 - world.common
    ) * random.standard_normal((total, features))
    score = np.column_stack([_score(world, latent, random) for _ in range(_scores(task))])
    x = torch.from_numpy(_features(world, kinds, latent, random).astype(np.float32))
    y = torch.from_numpy(_labels(task, world, score, random))
    return Sample(x[:records], y[:records], x[records:], y[records:], task)


def _scores(task: Task) -> int:
    if task.kind == "multiclass":
        return task.classes
    return 1


def _score(world: World, latent: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """(n,), standardised."""
    tells = random.permutation(latent.shape[1])[: max(1, math.ceil(world.active * latent.shape[1]))]
    slopes = random.standard_normal(len(tells)) + np.sign(random.standard_normal(len(tells)))
    line = latent[:, tells] @ (np.abs(slopes) if world.narrow else slopes)
    bend = np.zeros(len(latent))
    if world.bent:
        if len(tells) > 1:
            some = tells[: max(2, len(tells) // 2)]
        else:
            some = np.array([tells[0], tells[0]])
        other = np.roll(some, 1) if world.pairs else some
        bend = (latent[:, some] * latent[:, other]) @ random.choice([-1.0, 1.0], len(some))
    return math.sqrt(1 - world.bent) * _standard(line) + math.sqrt(world.bent) * _standard(bend)


def _standard(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / max(float(values.std()), 1e-12)


def _features(
    world: World, kinds: Sequence[str], latent: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """(n, features): each column's latent number as the features that the column becomes."""
    made: list[np.ndarray] = []
    for z, own in zip(latent.T, _columns(kinds), strict=True):
        middle = random.uniform(-0.45, 0.45)
        spread = math.exp(random.uniform(math.log(0.12), math.log(0.45)))
        cut = random.normal(0.0, 0.6)
        if world.narrow:
            middle = -0.6 + 0.7 * middle
            spread = 0.4 * spread
        middle = middle - world.low
        spread = spread * (1 - world.low)
        values = 1 + own.count("level")
        match own[0]:
            case "number":
                made.append(np.clip(middle + spread * z, -1, 1))
            case "boolean":
                made.append(np.where(z > cut, 1.0, -1.0))
            case "category" if values == 1:
                made.append(z > cut + 0.5)
            case "category":
                value = np.searchsorted(np.sort(random.normal(0.0, 0.8, values - 1)), z)
                made += [value == k for k in random.permutation(values)]
            case _:
                made.append(z)
        made += [
            random.random(len(z)) < random.choice([0.0, 0.01, 0.1])
            for _ in range(own.count("missing"))
        ]
    return np.column_stack(made)


def _columns(kinds: Sequence[str]) -> list[list[str]]:
    """Return the kinds of the features of each column."""
    found: list[list[str]] = []
    for kind in kinds:
        if kind in FOLLOWS and found:
            found[-1].append(kind)
        else:
            found.append([kind])
    return found


def _labels(task: Task, world: World, score: np.ndarray, random: np.random.Generator) -> np.ndarray:
    logits = world.logit * score
    # a class is weighed more because it is rarer
    if task.weights:
        rare = 1 / np.array(task.weights)
    else:
        rare = None
    if task.kind == "multiclass":
        return (
            logits + random.gumbel(size=logits.shape) + (0 if rare is None else np.log(rare))
        ).argmax(1)
    if task.kind == "binary" and rare is not None:
        noisy = logits[:, 0] + random.logistic(size=len(logits))
        return (noisy > np.quantile(noisy, rare[0] / rare.sum())).astype(np.int64)
    if task.kind == "binary" and (positive := task.positive or world.positive):
        logits = _shifted(logits[:, 0], positive)
    else:
        logits = logits[:, 0] + world.shift * world.logit
    if task.kind == "count":
        return np.minimum(
            random.poisson(np.exp(np.clip(0.3 * logits, -3, 3)) * min(2.0, task.most / 4)),
            task.most,
        ).astype(np.float32)
    if task.kind == "ordinal":
        noisy = logits + random.logistic(size=len(logits))
        return np.searchsorted(np.quantile(noisy, np.arange(1, task.classes) / task.classes), noisy)
    if task.kind == "regression":
        noisy = logits + random.standard_normal(len(logits))
        return np.clip(0.3 * _standard(noisy) + 0.3 * world.shift, -1, 1).astype(np.float32)
    if task.bins:  # survival: the higher the score, the earlier the event
        level = random.normal(-math.log(2 * task.bins), 0.7)
        rising = random.normal(0.0, 1.0) * np.linspace(-0.5, 0.5, task.bins)
        hazards = 1 / (1 + np.exp(-(logits[:, None] + level + rising)))
        ended = random.random((len(logits), task.bins)) < hazards
        first = ended.argmax(1)
        last = random.integers(task.bins // 2, task.bins + 1, len(logits))
        event = ended.any(1) & (first < last)
        return np.where(event, 2 * first + 1, 2 * last)
    return (random.random(len(logits)) < 1 / (1 + np.exp(-logits))).astype(np.int64)


def _shifted(logits: np.ndarray, positive: float) -> np.ndarray:
    """Return the logits plus the constant with which their mean risk is `positive`."""
    low = -40.0
    high = 40.0
    for _ in range(50):
        middle = (low + high) / 2
        if (1 / (1 + np.exp(-(logits + middle)))).mean() < positive:
            low = middle
        else:
            high = middle
    return logits + low
