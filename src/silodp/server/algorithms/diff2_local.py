"""DIFF2 with its local routine (Murata & Suzuki 2023, after BVR-L-SGD) and noise of each silo:
several local steps in each round.
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
    """Run DIFF2 with several local steps of each silo in a round.

    The server updates the estimate h as diff2 does. From w_r every silo takes its first step along
    h. Each later step is along h plus the silo's own noisy differences since then. w_{r+1} is the
    mean of the silos' last points. local_steps = 1 is diff2. A silo pays for each of its
    differences.

    In the paper (Alg. 4) silos take turns. In a round one silo, p_r = 1 + r % P, runs local steps,
    and its point is the next iterate. Here all silos run local steps, and the server takes their
    mean. So each silo pays in every round instead of every P-th. The mean over P silos makes up for
    this price, to first order. The paper draws b records without replacement for a local
    difference, at a price amplified by that draw. Here a local difference uses the records of
    `refine`, at the price of `refine`.

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem with its prox, and the starting
      points (J, d).
    - `rounds` (default 25): number of rounds.
    - `phase` (default 5): rounds from one fresh gradient to the next.
    - `local_steps` (default 5): steps of each silo in a round.
    - `step` (default 0.5): step size.
    - `anchor`: the release of a fresh gradient.
    - `refine`: the release of a gradient difference, global or local.
    - `slope` (default 1, finite): clip of a difference, for each unit that w moves.

    Raise Absent if no silo answers a round.
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
