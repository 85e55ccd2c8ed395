"""ISRL-DP Noisy Prox-SGD (the paper's algorithm "LDP Prox"): a noisy minibatch gradient, then a
proximal step.
"""

from silodp.server.algorithms.language import (
    Annotated,
    DisjointBatches,
    Gaussian,
    Grad,
    Iterator,
    Number,
    Port,
    Problem,
    Query,
    Tensor,
)


def prox_sgd(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    rounds: int,
    step: Number,
    minibatch: Annotated[Gaussian, DisjointBatches],
) -> Iterator[Tensor]:
    """Run Noisy Prox-SGD on disjoint batches.

    w_{r+1} = prox(w_r - step g_r, step), where g_r is the mean gradient over the silos on batch r.
    The theorem takes disjoint batches and step 1/(2 beta).

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem with its prox, and the starting
      points (J, d).
    - `rounds` (default 25): number of rounds.
    - `step` (default 0.5): step size.
    - `minibatch`: the release of each round, a mean gradient. By default each round has a batch of
      its own.
    """
    for r in range(rounds):
        g = fed.mean(Query(Grad(w), minibatch.at(r)))
        w = problem.prox(w - step * g, step)
        yield w
