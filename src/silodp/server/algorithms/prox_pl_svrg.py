"""ISRL-DP FedProx-PL-SVRG (the paper's algorithm 2): SVRG with restarts, for losses that satisfy
the proximal-PL inequality.
"""

import numpy as np

from silodp.server.algorithms.language import Gaussian, Iterator, Number, Port, Problem, Tensor
from silodp.server.algorithms.prox_svrg import prox_svrg


def prox_pl_svrg(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    restarts: int,
    rounds: int,
    inner: int,
    step: Number,
    anchor: Gaussian,
    refine: Gaussian,
    slope: Number,
    seed: int = 0,
) -> Iterator[Tensor]:
    """FedProx-PL-SVRG: SVRG with restarts, which share `rounds` in whole epochs.

    Each starts from a uniformly random iterate of the one before (public coins of `seed`); the last
    yields where the run ends.
    """
    coins = np.random.default_rng(seed)
    length = rounds // (restarts * inner) * inner
    for _ in range(restarts):
        chosen = int(coins.integers(length))
        start = w
        for t, point in enumerate(
            prox_svrg(
                fed,
                problem,
                start,
                rounds=length,
                inner=inner,
                step=step,
                anchor=anchor,
                refine=refine,
                slope=slope,
            )
        ):
            if t == chosen:
                w = point
            yield point
        yield w
