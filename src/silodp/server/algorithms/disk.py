"""DiSK (Zhang et al. 2024): MB-SGD with a Kalman filter on the server, which removes a part of the
gradients' noise.
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
    """Run MB-SGD with a Kalman filter on the server (DiSK).

    The filtered gradient is h_r = (1 - kappa) h_{r-1} + kappa g_r. The server asks g_r at a point
    ahead of w_r by gamma times the last move of w. kappa = 1 is MB-SGD.

    The paper's g_r is a weighted sum of gradients at w_r and ahead of it, clipped as one vector. At
    the paper's gamma = (1 - kappa) / kappa the weight of the first gradient is zero. This function
    has that form: one Grad in each round, at the price of MB-SGD. On a quadratic h_r has the mean
    grad f0(w_r).

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem with its prox, and the starting
      points (J, d).
    - `rounds` (default 25): number of rounds.
    - `step` (default 0.5): step size.
    - `kappa` (default 0.7): gain of the filter, above 0 and at most 1. It is the weight of a new
      gradient.
    - `minibatch`: the release of each round, a mean gradient.
    """
    h = prev = w
    for r in range(rounds):
        g = fed.mean(Query(Grad(w + (1 - kappa) / kappa * (w - prev)), minibatch.at(r)))
        if r == 0:
            h = g
        else:
            h = (1 - kappa) * h + kappa * g
        prev = w
        w = problem.prox(w - step * h, step)
        yield w
