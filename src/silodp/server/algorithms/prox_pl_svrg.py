"""ISRL-DP FedProx-PL-SVRG (the paper's algorithm 2): SVRG with restarts, for losses that satisfy the proximal-PL inequality."""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from silodp.core.problem.problem import Problem
from silodp.server.algorithms.prox_svrg import prox_svrg
from silodp.server.federation import Port


def prox_pl_svrg(fed: Port, problem: Problem, w: Tensor, *, restarts: int, seed: int = 0, **svrg) -> Iterator[Tensor]:
    """S restarts, each from a uniformly random iterate of the one before (public coins); the last yields where the run ends."""
    coins = np.random.default_rng(seed)
    for _ in range(restarts):
        chosen = int(coins.integers(svrg["epochs"] * svrg["inner"]))
        start = w
        for t, point in enumerate(prox_svrg(fed, problem, start, **svrg)):
            if t == chosen:
                w = point
            yield point
        yield w
