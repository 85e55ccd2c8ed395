"""ISRL-DP Local SGD (FedAvg with noisy local steps), the paper's second baseline."""

from silodp.server.algorithms.language import (
    Gaussian,
    Iterator,
    LocalSteps,
    Number,
    Port,
    Problem,
    Query,
    Tensor,
)


def local_sgd(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    rounds: int,
    local_steps: int,
    step: Number,
    minibatch: Gaussian,
) -> Iterator[Tensor]:
    """FedAvg with noisy local steps: each silo takes `local_steps` proximal steps from w_r, and
    w_{r+1} is the mean of where they end.
    """
    for r in range(rounds):
        w = w + fed.mean(Query(LocalSteps(w, local_steps, step), minibatch.at(r)))
        yield w
