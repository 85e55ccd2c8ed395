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
    """Run Fed-SPIDER with two steps in each round.

    The first step goes along a fresh gradient v. The second goes along v plus the gradient
    difference between the point after the first step and the point before it.

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem with its prox, and the starting
      points (J, d).
    - `rounds` (default 25): number of rounds. Each has two steps.
    - `step` (default 0.5): step size.
    - `anchor`: the release of a fresh gradient.
    - `refine`: the release of a gradient difference.
    - `slope` (default 1): clip of a difference, for each unit that w moves, and at most 2 L. inf
      clips at 2 L alone.
    - `form` (default "move"): how differences are clipped, as in `ask_difference`.
    """
    for _ in range(rounds):
        v = fed.mean(Query(Grad(w), anchor))
        half = problem.prox(w - step * v, step)
        yield half
        v = v + fed.mean(ask_difference(half, w, refine, anchor, slope, form))
        w = problem.prox(half - step * v, step)
        yield w
