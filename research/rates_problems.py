"""The problems of the study of rates: L, beta, mu, Delta and D are known, the clip is L and so
never active, and nothing but d grows with d.

Silo i's records are (x, y) with y = x w_i + z in R^d, x^2 uniform on [1/2, 3/2], z uniform on a
sphere; the silos' w_i differ, and their mean is what is sought. Three measures are of these: "risk"
(least squares over a ball: proximal-PL, optimum known), "mapping" (Welsch's robust loss with a
non-smooth penalty: neither convex nor PL) and "near" (the same with x^2 = 1 and a start where Delta
is small, so that SPIDER's phases are long). "convex" has linear losses over a ball whose mean is as
long as the lower bound: the family that makes it one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import GroupL1, L2Ball
from silodp.core.theory.isrl import Constants
from silodp.silo.data.records import Records

DELTA = 1e-6
STEEPEST = {"risk": 1.5, "mapping": 1.5, "near": 1.0, "convex": 1.0}
"""The largest x^2; its mean is 1."""
UNLIKE = 0.1
NOISE = 0.25
RADIUS = 0.6
"""||w_i - w*||, ||z||, and the ball of the least squares."""
DISTANCE = {"risk": 0.5, "mapping": 1.5, "near": 0.3}
"""||w* - w_0||: the second start is where Welsch's loss is concave."""
LENGTH = 4.0
"""Of the linear losses' mean, in units of the lower bound."""


@dataclass(frozen=True)
class Size:
    """What a theorem's rate is about: n, N, d and epsilon."""

    n: int
    N: int
    d: int
    epsilon: float


def welsch(output: Tensor, target: Tensor) -> Tensor:
    """1 - exp(-||output - target||^2 / 2): as least squares near the target, flat far from it,
    concave in between.
    """
    return -torch.expm1(-(output - target).square().sum(-1) / 2)


def linear(output: Tensor, target: Tensor) -> Tensor:
    """-<output, target>."""
    return -(output * target).sum(-1)


def make_problem(measure: str, d: int) -> Problem:
    model = nn.Sequential(nn.Linear(1, d, bias=False))
    if measure == "risk":
        return Problem(model, squared_error, L2Ball(RADIUS))
    if measure == "convex":
        return Problem(model, linear, L2Ball(1.0))
    return Problem(model, welsch, GroupL1(0.05, ((0, d),)))


def constants(measure: str, size: Size) -> Constants:
    """L and beta hold for every record and w (in the ball, for least squares); Delta is exact
    there, and a bound on F(w_0) - F* elsewhere.

    Near the minimum that bound is beta/2 DISTANCE^2; linear losses have any beta, and L/D is what
    the steps are made for.
    """
    steep = math.sqrt(STEEPEST[measure])
    far = DISTANCE["risk"] + UNLIKE + RADIUS
    known = {
        "risk": {
            "lipschitz": 2 * steep * (steep * far + NOISE),
            "smoothness": 2 * STEEPEST[measure],
            "pl": 2.0,
            "gap": DISTANCE["risk"] ** 2,
        },
        "mapping": {
            "lipschitz": steep * math.exp(-0.5),
            "smoothness": STEEPEST[measure],
            "gap": 1.0,
        },
        "near": {
            "lipschitz": steep * math.exp(-0.5),
            "smoothness": STEEPEST[measure],
            "gap": STEEPEST[measure] / 2 * DISTANCE["near"] ** 2,
        },
        "convex": {"lipschitz": 1.0, "smoothness": 1.0, "diameter": 1.0},
    }[measure]
    return Constants(
        **known,
        records=size.n,
        silos=size.N,
        answering=size.N,
        dimension=size.d,
        epsilon=size.epsilon,
        delta=DELTA,
    )


def mean_of(size: Size) -> float:
    """||E y|| of the linear losses: the least error that the bound leaves, times LENGTH."""
    c = constants("convex", size)
    return LENGTH * min(1.0, math.sqrt(c.privacy / c.silos) + 1 / math.sqrt(c.records * c.silos))


def make_records(measure: str, size: Size, draw: int) -> Records:
    """One draw of all silos' records; w* (of linear losses E y) lies along (1, ..., 1), and silos
    come in pairs on opposite sides of it.
    """
    random = np.random.default_rng((draw, size.n, size.N, size.d))

    def on_sphere(*shape: int) -> np.ndarray:
        u = random.normal(size=(*shape, size.d))
        return u / np.linalg.norm(u, axis=-1, keepdims=True)

    aside = UNLIKE * on_sphere(size.N // 2)
    steep = STEEPEST[measure]
    if measure == "convex":
        far = mean_of(size)
    else:
        far = DISTANCE[measure]
    w = far / math.sqrt(size.d) + np.concatenate([aside, -aside])
    x = np.sqrt(random.uniform(2 - steep, steep, size=(size.N, size.n, 1)))
    y = x * w[:, None] + NOISE * on_sphere(size.N, size.n)
    names = tuple(f"silo-{i}" for i in range(size.N))
    return Records(
        torch.from_numpy(x).float(), torch.from_numpy(y).float(), (size.n,) * size.N, names
    )


def empirical_optimum(records: Records) -> tuple[Tensor, float]:
    """(w^, A) with Fhat(w) - Fhat* = A ||w - w^||^2 for least squares."""
    x = records.x.double()
    y = records.y.double()
    return (x * y).mean((0, 1)) / x.square().mean(), float(x.square().mean())
