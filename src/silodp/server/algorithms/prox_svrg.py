"""ISRL-DP FedProx-SVRG (the paper's algorithm 1), with the cohort of an epoch fixed and differences
taken to the anchor's own point.
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
    """FedProx-SVRG: as many epochs of `inner` steps as `rounds` holds. The anchor's noise is drawn
    once an epoch and reused, so it costs once; the first inner step stands at the anchor's point,
    where the difference is zero and need not be asked."""
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
