"""DIFF2 with its local routine (Murata & Suzuki 2023, after BVR-L-SGD) where each silo adds its own
noise: several steps between two global differences.
"""

import math
from contextlib import suppress

import torch

from silodp.server.algorithms.diff2 import FINITE
from silodp.server.algorithms.difference import ask_difference
from silodp.server.algorithms.language import (
    Absent,
    Annotated,
    Gaussian,
    Grad,
    Iterator,
    Number,
    Port,
    Problem,
    Query,
    Tensor,
)


def diff2_local(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    rounds: int,
    phase: int,
    local_steps: int,
    step: Number,
    anchor: Gaussian,
    refine: Gaussian,
    slope: Annotated[Number, FINITE],
) -> Iterator[Tensor]:
    """DIFF2 whose rounds are several local steps in each silo.

    The estimate h is carried on as in diff2. From w_r every silo goes along h, and from its second
    step on along h plus its own noisy differences since; w_{r+1} is the mean of where they end.
    local_steps = 1 is diff2. A silo pays for each of its differences.

    In the paper (Alg. 4) silos take turns: one a round, p_r = 1 + r % P, runs local steps and hands
    over its point. Here all do and the mean is taken: each pays in every round instead of every
    P-th, and the mean over P takes that back, to first order. Its local differences are of b
    records drawn without replacement, at a price amplified by that; here they are of the records of
    `refine`, at its price.
    """
    free = anchor.clipped(math.inf)
    h = w
    prev = w
    for r in range(rounds):
        if r % phase == 0:
            h = fed.mean(Query(Grad(w), anchor))
        else:
            h = h + fed.mean(ask_difference(w, prev, refine, free, slope))
        ends = []
        for silo in fed.each().values():
            v = h
            last = w
            point = problem.prox(w - step * h, step)
            with suppress(Absent):  # the round goes on without this one
                for _ in range(local_steps - 1):
                    v = v + silo.mean(ask_difference(point, last, refine, free, slope))
                    last = point
                    point = problem.prox(point - step * v, step)
                ends.append(point)
        if not ends:
            raise Absent("no silo has answered this round")
        prev = w
        w = torch.stack(ends).mean(0)
        yield w
