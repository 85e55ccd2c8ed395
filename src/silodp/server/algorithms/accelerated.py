"""ISRL-DP accelerated MB-SGD for convex losses (Lowy & Razaviyayn 2023): Nesterov's steps, each on
records that no other round touches.
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
    Setting,
    Tensor,
)

Strong = Annotated[
    float,
    Setting(
        least=0,
        finite=True,
        help="Of accelerated: how strongly convex the loss is known to be (mu); 0: convex.",
    ),
]


def accelerated(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    rounds: int,
    restarts: int,
    step: Number,
    minibatch: Annotated[Gaussian, DisjointBatches],
    strong: Strong = 0.0,
) -> Iterator[Tensor]:
    """Accelerated MB-SGD in one pass over disjoint batches.

    AC-SA (Ghadimi & Lan 2012) with alpha_t = 2/(t+1), eta_t = 4/(step t (t+1)) and mu = `strong`;
    the theorem takes step <= 1/(2 beta). Strongly convex losses take it in stages: `restarts` share
    `rounds`, and each starts where the average w^ag of the one before has come to. They are equally
    long and have one step, where those of multi-stage AC-SA grow longer and their steps smaller
    once noise rules.
    """
    mu = strong
    ag = w
    length = rounds // restarts
    for r in range(restarts * length):
        t = r % length + 1
        w = ag if t == 1 else w
        alpha = 2 / (t + 1)
        eta = 4 / (step * t * (t + 1))
        ahead = ((1 - alpha) * (mu + eta) * ag + alpha * ((1 - alpha) * mu + eta) * w) / (
            eta + (1 - alpha**2) * mu
        )
        g = fed.mean(Query(Grad(ahead), minibatch.at(r)))
        s = alpha / (mu + eta)
        w = problem.prox(
            (alpha * mu * ahead + ((1 - alpha) * mu + eta) * w) / (mu + eta) - s * g, s
        )
        ag = alpha * w + (1 - alpha) * ag
        yield ag
