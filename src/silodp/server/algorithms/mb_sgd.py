"""ISRL-DP MB-SGD, the paper's first baseline (Lowy & Razaviyayn 2021): Prox-SGD with all records or
a fresh batch in every round.
"""

from silodp.server.algorithms.language import Gaussian, Iterator, Number, Port, Problem, Tensor
from silodp.server.algorithms.prox_sgd import prox_sgd


def mb_sgd(
    fed: Port, problem: Problem, w: Tensor, *, rounds: int, step: Number, minibatch: Gaussian
) -> Iterator[Tensor]:
    """Run minibatch SGD, with all records or a fresh batch in every round.

    This is Prox-SGD with another sampling, and so with another price.

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem with its prox, and the starting
      points (J, d).
    - `rounds` (default 25): number of rounds.
    - `step` (default 0.5): step size.
    - `minibatch`: the release of each round, a mean gradient.
    """
    yield from prox_sgd(fed, problem, w, rounds=rounds, step=step, minibatch=minibatch)
