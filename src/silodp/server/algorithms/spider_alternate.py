"""ISRL-DP Fed-SPIDER, the paper's alternate implementation: a fresh gradient and one difference in
every round.
"""

from silodp.server.algorithms.difference import Form, ask_difference
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


def spider_alternate(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    rounds: int,
    step: Number,
    anchor: Gaussian,
    refine: Gaussian,
    slope: Number,
    form: Form = "move",
) -> Iterator[Tensor]:
    """Fed-SPIDER in two half-rounds a round: a step along a fresh gradient v, then a step along v
    plus the difference that the first step made.
    """
    for _ in range(rounds):
        v = fed.mean(Query(Grad(w), anchor))
        half = problem.prox(w - step * v, step)
        yield half
        v = v + fed.mean(ask_difference(half, w, refine, anchor, slope, form))
        w = problem.prox(half - step * v, step)
        yield w
