"""Heavy-ball momentum on the releases of MB-SGD. The server only remembers its last move, so the
momentum costs no privacy.
"""

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


def heavy_ball(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    rounds: int,
    step: Number,
    momentum: Number,
    minibatch: Gaussian,
) -> Iterator[Tensor]:
    """Run MB-SGD with momentum on the server.

    w_{r+1} = prox(w_r - step g_r + momentum (w_r - w_{r-1}), step). This is iPiano (Ochs et al.
    2014), and torch's SGD where f1 = 0.

    The last move goes through the prox, not a velocity. With a velocity, a gradient of g / (1 -
    momentum) would be weighed against a single f1.

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem with its prox, and the starting
      points (J, d).
    - `rounds` (default 25): number of rounds.
    - `step` (default 0.5): step size.
    - `momentum` (default 0.9): factor of the last move, at least 0 and less than 1.
    - `minibatch`: the release of each round, a mean gradient.
    """
    prev = w
    for r in range(rounds):
        g = fed.mean(Query(Grad(w), minibatch.at(r)))
        move = w - prev
        prev = w
        w = problem.prox(w - step * g + momentum * move, step)
        yield w
