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
    """Run FedProx-PL-SVRG: SVRG with restarts, which share `rounds` in whole epochs.

    Each restart draws one of its iterates uniformly at random, from public coins, and yields this
    iterate again at its end. The next restart begins there. So the random iterate of the last
    restart is the last iterate of the run.

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem with its prox, and the starting
      points (J, d).
    - `restarts` (default 1): number of runs of SVRG.
    - `rounds` (default 25): number of rounds, over all restarts together.
    - `inner` (default 5): steps of an epoch.
    - `step` (default 0.5): step size.
    - `anchor`: the release of the gradient at the start of an epoch.
    - `refine`: the release of a gradient difference.
    - `slope` (default 1): clip of a difference, for each unit of distance to the anchor's point.
    - `seed` (default 0): seed of the public coins.
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
