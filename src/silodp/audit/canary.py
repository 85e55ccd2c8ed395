"""The hardest neighbours: two data sets with one differing record, which uses the whole clip of
gradients and of differences, in opposite directions.

A record with a constant gradient has no gradient difference, so the canary is a steep quadratic.
f0(w, y) = y/2 ||W + b - FAR||^2 with y = +STEEP in one data set and -STEEP in the other. At every w
(short of FAR) the gradients are longer than the clip and opposite, and so are the differences
between any two points. The model has two tensors, so the audit would notice if they were clipped
one by one.

For products of features opposite records are alike. There the canaries are two records with one
different feature each, which are the farthest apart.
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
"""Records in each silo. No result depends on their number, because noise follows the sensitivity,
2 clip / n.
"""


def tilted(output: Tensor, target: Tensor) -> Tensor:
    """Return target / 2 x ||output - FAR||^2, which is concave for target < 0."""
    return target / 2 * (output - FAR).square().sum(-1)


def canary_problem() -> Problem:
    """Return the problem of the canary."""
    return Problem(nn.Linear(1, OUTPUTS), tilted)


def neighbours(*, quiet: bool = False, silos: int = 2) -> tuple[Records, Records]:
    """Return two federations that differ in record 0 of silo 0. The gradients of the other records
    are zero if `quiet`.
    """
    curvature = torch.linspace(-0.4, 0.5, silos * RECORDS).reshape(silos, RECORDS)
    if quiet:
        curvature = torch.zeros_like(curvature)
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
    """Return a linear problem of two features, and two neighbours whose differing record has one
    feature or the other, far beyond any bound.
    """
    worlds = []
    for feature in range(2):
        x = torch.linspace(-1, 1, 4 * RECORDS).reshape(2, RECORDS, 2)
        x[0, 0] = 1e4 * torch.eye(2)[feature]
        worlds.append(Records(x, torch.zeros(2, RECORDS), (RECORDS,) * 2, ("silo-0", "silo-1")))
    return Problem(nn.Linear(2, 1), squared_error), (worlds[0], worlds[1])


# --- persons: one with 20 rows that all pull the same way, and one whose number of rows changes --


def person_problem() -> Problem:
    """Return the problem of the canary, with persons of up to ROWS rows."""
    return Problem(nn.Linear(1, OUTPUTS), tilted, person=Person("person", ROWS))


def persons(first: int = ROWS, *, quiet: bool = False) -> tuple[Records, Records]:
    """Return two silos that differ in person 0: `first` rows in one direction, or ROWS rows in the
    other. The others have a row each, with a gradient of zero if `quiet`.
    """
    worlds = []
    for sign, rows in ((-1.0, first), (1.0, ROWS)):
        y = torch.full((1, RECORDS, ROWS), math.nan)
        if quiet:
            y[0, :, 0] = 0.0
        else:
            y[0, :, 0] = torch.linspace(-0.4, 0.5, RECORDS)
        y[0, 0, :rows] = sign * STEEP
        worlds.append(Records(torch.ones(1, RECORDS, ROWS, 1), y, (RECORDS,), ("silo",)))
    return worlds[0], worlds[1]
