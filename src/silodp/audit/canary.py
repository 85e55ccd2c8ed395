"""The hardest neighbours: two data sets whose one differing record fills every clip, of gradients
and of differences, in opposite ways.

A record with a constant gradient has no gradient difference, so the canary is a steep quadratic.
f0(w, y) = y/2 ||W + b - FAR||^2 with y = +STEEP in one data set and -STEEP in the other: wherever w
goes (short of FAR) gradients are longer than the clip and opposite, and so are differences between
any two points. The model has two tensors, so that clipping them apart would show.

Where products of features are asked for, opposite records are alike; there the farthest apart are
records of which each has one feature alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from silodp.core.problem.losses import squared_error
from silodp.core.problem.person import Person
from silodp.core.problem.problem import Problem
from silodp.silo.data.records import Records

STEEP = 300.0
FAR = -5.0
OUTPUTS = 4
ROWS = 20
RECORDS = 24
"""In each silo. Nothing depends on it: noise follows the sensitivity, 2 clip / n."""


def tilted(output: Tensor, target: Tensor) -> Tensor:
    """target / 2 x ||output - FAR||^2, concave where target < 0."""
    return target / 2 * (output - FAR).square().sum(-1)


def canary_problem() -> Problem:
    return Problem(nn.Linear(1, OUTPUTS), tilted)


def neighbours(*, quiet: bool = False, silos: int = 2) -> tuple[Records, Records]:
    """Two federations that differ in record 0 of silo 0. The others pull too, unless `quiet`: then
    their gradients are zero.
    """
    curvature = torch.linspace(-0.4, 0.5, silos * RECORDS).reshape(silos, RECORDS) * (
        0.0 if quiet else 1.0
    )
    worlds = []
    for sign in (-1.0, 1.0):
        y = curvature.clone()
        y[0, 0] = sign * STEEP
        worlds.append(
            Records(
                torch.ones(silos, RECORDS, 1),
                y,
                (RECORDS,) * silos,
                tuple(f"silo-{i}" for i in range(silos)),
            )
        )
    return worlds[0], worlds[1]


def of_products() -> tuple[Problem, tuple[Records, Records]]:
    """A linear problem of two features, and two silos whose first record has one of them, or the
    other, far beyond any bound.
    """
    worlds = []
    for feature in range(2):
        x = torch.linspace(-1, 1, 4 * RECORDS).reshape(2, RECORDS, 2)
        x[0, 0] = 1e4 * torch.eye(2)[feature]
        worlds.append(Records(x, torch.zeros(2, RECORDS), (RECORDS,) * 2, ("silo-0", "silo-1")))
    return Problem(nn.Linear(2, 1), squared_error), (worlds[0], worlds[1])


# --- persons: one with 20 rows that all pull the same way, and one whose number of rows changes --


def person_problem() -> Problem:
    return Problem(nn.Linear(1, OUTPUTS), tilted, person=Person("person", ROWS))


def persons(first: int = ROWS, *, quiet: bool = False) -> tuple[Records, Records]:
    """Two silos that differ in person 0: `first` rows that pull one way, or ROWS that pull the
    other. The others have a row each, which pulls at nothing if `quiet`."""
    worlds = []
    for sign, rows in ((-1.0, first), (1.0, ROWS)):
        y = torch.full((1, RECORDS, ROWS), math.nan)
        y[0, :, 0] = torch.linspace(-0.4, 0.5, RECORDS) * (0.0 if quiet else 1.0)
        y[0, 0, :rows] = sign * STEEP
        worlds.append(Records(torch.ones(1, RECORDS, ROWS, 1), y, (RECORDS,), ("silo",)))
    return worlds[0], worlds[1]
