"""DiSK (Zhang et al. 2024): MB-SGD whose gradients pass a Kalman filter on the server, which takes
out a part of their noise.
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


def disk(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    rounds: int,
    step: Number,
    kappa: Number,
    minibatch: Gaussian,
) -> Iterator[Tensor]:
    """DiSK: MB-SGD through a Kalman filter on the server.

    h_r = (1 - kappa) h_{r-1} + kappa g_r, with g_r asked ahead of w_r by gamma times its last move;
    kappa = 1 is MB-SGD.

    The paper's g_r weighs gradients at w_r and ahead of it and clips the two as one; at its gamma =
    (1 - kappa) / kappa the weight of the first is zero. This is that form: one Grad a round, at the
    price of MB-SGD. On a quadratic h_r has the mean grad f0(w_r).
    """
    h = prev = w
    for r in range(rounds):
        g = fed.mean(Query(Grad(w + (1 - kappa) / kappa * (w - prev)), minibatch.at(r)))
        h = g if r == 0 else (1 - kappa) * h + kappa * g
        prev = w
        w = problem.prox(w - step * h, step)
        yield w
