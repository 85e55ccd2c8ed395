"""ISRL-DP FedProx-SPIDER (the paper's algorithm 3). Difference clipping replaces the unknown
smoothness constant.
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
    """Run FedProx-SPIDER: fresh gradients, and noisy gradient differences between them.

    Every `phase` rounds the server asks a fresh gradient, the anchor. Between anchors it adds noisy
    differences to the estimate h. Their noise shrinks with the move of w. phase = 1 is MB-SGD.

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem with its prox, and the starting
      points (J, d).
    - `rounds` (default 25): number of rounds.
    - `phase` (default 5): rounds from one anchor to the next.
    - `step` (default 0.5): step size.
    - `anchor`: the release of a fresh gradient.
    - `refine`: the release of a gradient difference.
    - `slope` (default 1): clip of a difference, for each unit that w moves, and at most 2 L. inf
      clips at 2 L alone.
    - `form` (default "move"): how differences are clipped, as in `ask_difference`.
    """
    h = prev = w
    for r in range(rounds):
        if r % phase == 0:
            h = fed.mean(Query(Grad(w), anchor))
        else:
            h = h + fed.mean(ask_difference(w, prev, refine, anchor, slope, form))
        prev = w
        w = problem.prox(w - step * h, step)
        yield w
