"""ISRL-DP MB-SGD, the paper's first baseline (Lowy & Razaviyayn 2021): Prox-SGD whose every round
asks all records or a fresh batch.
"""

from silodp.server.algorithms.language import Gaussian, Iterator, Number, Port, Problem, Tensor
from silodp.server.algorithms.prox_sgd import prox_sgd


def mb_sgd(
    fed: Port, problem: Problem, w: Tensor, *, rounds: int, step: Number, minibatch: Gaussian
) -> Iterator[Tensor]:
    """Minibatch SGD, every round on all records or a fresh batch: Prox-SGD on another sampling, and
    so at another price.
    """
    yield from prox_sgd(fed, problem, w, rounds=rounds, step=step, minibatch=minibatch)
