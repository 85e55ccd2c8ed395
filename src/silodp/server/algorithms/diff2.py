"""DIFF2-GD (Murata & Suzuki 2023) with noise of each silo: SPIDER with differences clipped by the
move of w alone.
"""

import math

from silodp.server.algorithms.difference import ask_difference
from silodp.server.algorithms.language import (
    Annotated,
    Gaussian,
    Grad,
    Iterator,
    Number,
    Port,
    Problem,
    Query,
    Setting,
    Tensor,
)

FINITE = Setting(
    finite=True,
    because="diff2 has no other bound on a difference; give a finite slope, or use spider",
)


def diff2(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    rounds: int,
    phase: int,
    step: Number,
    anchor: Gaussian,
    refine: Gaussian,
    slope: Annotated[Number, FINITE],
) -> Iterator[Tensor]:
    """Run DIFF2: gradient differences are clipped by the move of w alone.

    Every `phase` rounds the server asks a gradient clipped at C_1 = anchor.clip. Between these
    rounds it asks differences clipped at C_2 ||w_r - w_{r-1}||, with C_2 = slope. This is
    FedProx-SPIDER without its cap of 2 C_1. The iterates are the same as long as slope x move stays
    below that cap.

    The paper returns a uniformly random one of x_0..x_{R-1} (Alg. 1, line 22). The output rule
    "random" returns one of w_1..w_R. The paper has f1 = 0, and a trusted server adds its noise. The
    paper's other subroutine is diff2_local.

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem with its prox, and the starting
      points (J, d).
    - `rounds` (default 25): number of rounds.
    - `phase` (default 5): rounds from one fresh gradient to the next.
    - `step` (default 0.5): step size.
    - `anchor`: the release of a fresh gradient.
    - `refine`: the release of a gradient difference.
    - `slope` (default 1, finite): clip of a difference, for each unit that w moves.
    """
    h = prev = w
    for r in range(rounds):
        if r % phase == 0:
            h = fed.mean(Query(Grad(w), anchor))
        else:
            h = h + fed.mean(ask_difference(w, prev, refine, anchor.clipped(math.inf), slope))
        prev = w
        w = problem.prox(w - step * h, step)
        yield w
