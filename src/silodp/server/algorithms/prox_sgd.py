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
    """Noisy Prox-SGD on disjoint batches.

    w_{r+1} = prox(w_r - step g_r, step), g_r the mean over silos of batch r. The theorem takes
    disjoint batches and step 1/(2 beta).
    """
    for r in range(rounds):
        g = fed.mean(Query(Grad(w), minibatch.at(r)))
        w = problem.prox(w - step * g, step)
        yield w
