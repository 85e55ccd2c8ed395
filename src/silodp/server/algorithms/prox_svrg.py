"""ISRL-DP FedProx-SVRG (the paper's algorithm 1). An epoch has fixed silos, and its differences are
taken to the anchor's point.
"""

from silodp.server.algorithms.difference import ask_difference
from silodp.server.algorithms.language import (
    Gaussian,
    Grad,
    Iterator,
    Number,
    Port,
    Problem,
    Query,
    Tensor,
)


def prox_svrg(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    rounds: int,
    inner: int,
    step: Number,
    anchor: Gaussian,
    refine: Gaussian,
    slope: Number,
) -> Iterator[Tensor]:
    """Run FedProx-SVRG, in as many epochs of `inner` steps as `rounds` allows.

    Each silo draws the noise of an anchor once in an epoch. The server reuses the anchor, so it
    costs once. The first step of an epoch is at the anchor's point. The difference is zero there,
    and the server does not ask it.

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem with its prox, and the starting
      points (J, d).
    - `rounds` (default 25): number of steps. Steps that do not fill an epoch are left out.
    - `inner` (default 5): steps of an epoch.
    - `step` (default 0.5): step size.
    - `anchor`: the release of the gradient at the start of an epoch.
    - `refine`: the release of a gradient difference.
    - `slope` (default 1): clip of a difference, for each unit of distance to the anchor's point.
      inf clips at twice the anchor's clip alone.
    """
    for _ in range(rounds // inner):
        silos = fed.cohort()
        center = w
        g = silos.mean(Query(Grad(center), anchor))
        for t in range(inner):
            if t == 0:
                v = g
            else:
                v = g + silos.mean(ask_difference(w, center, refine, anchor, slope))
            w = problem.prox(w - step * v, step)
            yield w
