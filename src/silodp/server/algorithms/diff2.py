"""DIFF2-GD (Murata & Suzuki 2023) where each silo adds its own noise: SPIDER whose differences are
clipped by the move of w alone.
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
    """DIFF2: differences clipped by the move of w alone.

    A gradient clipped at C_1 = anchor.clip every T = `phase` rounds, and between them differences
    clipped at C_2 ||w_r - w_{r-1}||, C_2 = slope: FedProx-SPIDER without its cap of 2 C_1, the same
    iterates as long as slope x move stays below that.

    The paper hands over a uniformly random one of x_0..x_{R-1} (Alg. 1, line 22), output rule
    "random" one of w_1..w_R; it has f1 = 0, and a trusted server adds the noise. Its other
    subroutine is diff2_local.
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
