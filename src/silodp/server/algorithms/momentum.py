"""Heavy-ball momentum on the releases of MB-SGD: the server only remembers its last move, so it
costs no privacy.
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
    """MB-SGD with server momentum.

    w_{r+1} = prox(w_r - step g_r + momentum (w_r - w_{r-1}), step): iPiano (Ochs et al. 2014), and
    torch's SGD where f1 = 0.

    The last move, not a velocity, goes through the prox: with a velocity g / (1 - momentum) would
    stand against one f1.
    """
    prev = w
    for r in range(rounds):
        g = fed.mean(Query(Grad(w), minibatch.at(r)))
        prev, w = w, problem.prox(w - step * g + momentum * (w - prev), step)
        yield w
