"""ISRL-DP accelerated MB-SGD for convex losses (Lowy & Razaviyayn 2023): Nesterov's steps on
disjoint batches.
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
        help="Of accelerated: the strong convexity mu of the loss; 0: convex.",
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
    """Run accelerated MB-SGD in one pass over disjoint batches.

    The method is AC-SA (Ghadimi & Lan 2012) with alpha_t = 2/(t+1), eta_t = 4/(step t (t+1)) and mu
    = `strong`. The theorem takes step <= 1/(2 beta). For strongly convex losses the run has several
    stages, which share `rounds`. Each stage starts at the last average w^ag of the stage before.
    All stages have the same length and the same step. In multi-stage AC-SA stages grow longer and
    their steps become smaller once noise dominates.

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem with its prox, and the starting
      points (J, d).
    - `rounds` (default 25): number of rounds, over all stages together.
    - `restarts` (default 1): number of stages. Rounds that do not fill a stage are left out.
    - `step` (default 0.5): step size.
    - `minibatch`: the release of each round, a mean gradient. By default each round has a batch of
      its own.
    - `strong` (default 0, convex): strong convexity mu of the loss.
    """
    mu = strong
    ag = w
    length = rounds // restarts
    for r in range(restarts * length):
        t = r % length + 1
        if t == 1:
            w = ag
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
