"""ISRL-DP FedProx-SPIDER (the paper's algorithm 3), with difference clipping in the place of an
unknown smoothness constant.
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


def prox_spider(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    rounds: int,
    phase: int,
    step: Number,
    anchor: Gaussian,
    refine: Gaussian,
    slope: Number,
    form: Form = "move",
) -> Iterator[Tensor]:
    """FedProx-SPIDER: a fresh anchor every `phase` rounds; between anchors the estimate h is
    carried on by noisy gradient differences, whose noise shrinks with the move of w. phase = 1 is
    MB-SGD; slope = inf clips differences at 2 L alone; form = each clips both gradients before they
    are subtracted."""
    h = prev = w
    for r in range(rounds):
        if r % phase == 0:
            h = fed.mean(Query(Grad(w), anchor))
        else:
            h = h + fed.mean(ask_difference(w, prev, refine, anchor, slope, form))
        prev = w
        w = problem.prox(w - step * h, step)
        yield w
