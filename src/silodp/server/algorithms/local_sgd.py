"""ISRL-DP Local SGD (FedAvg with noisy local steps), the paper's second baseline."""

from collections.abc import Iterator

from torch import Tensor

from silodp.core.mechanisms import Gaussian
from silodp.core.numbers import Number
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import LocalSteps
from silodp.server.federation import Port


def local_sgd(
    fed: Port, problem: Problem, w: Tensor, *, rounds: int, local_steps: int, step: Number, minibatch: Gaussian
) -> Iterator[Tensor]:
    """FedAvg with noisy local steps: each silo takes `local_steps` proximal steps from w_r, and w_{r+1} is the mean of where they end."""
    for r in range(rounds):
        w = w + fed.mean(Query(LocalSteps(w, local_steps, step), minibatch.at(r)))
        yield w
