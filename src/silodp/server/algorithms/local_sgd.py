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
    """Run FedAvg with noisy local steps.

    Each silo takes `local_steps` proximal steps from w_r. w_{r+1} is the mean of the silos' last
    points. A silo pays for each local step.

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem, and the starting points (J, d).
      Silos apply the prox themselves.
    - `rounds` (default 25): number of rounds.
    - `local_steps` (default 5): noisy steps of each silo in a round.
    - `step` (default 0.5): step size of a local step.
    - `minibatch`: the release of each local step, a mean gradient.
    """
    for r in range(rounds):
        w = w + fed.mean(Query(LocalSteps(w, local_steps, step), minibatch.at(r)))
        yield w
