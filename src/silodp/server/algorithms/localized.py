"""ISRL-DP localized accelerated MB-SGD for convex losses of unlike silos (Gao, Lowy, Zhou & Wright
2024). Each stage is pulled more strongly to its start than the stage before.
"""

from silodp.server.algorithms.language import (
    Annotated,
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

Stages = Annotated[
    int,
    Setting(least=1, help="Of localized: stages, each of half as many rounds as the one before."),
]
Pull = Annotated[
    float,
    Setting(
        least=0,
        finite=True,
        help="Of localized: lambda, the strength of the first stage's pull to its start.",
    ),
]
Growth = Annotated[
    float,
    Setting(
        least=1,
        finite=True,
        help="Of localized: how many times stronger the pull of the next stage is.",
    ),
]


def localized(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    rounds: int,
    step: Number,
    minibatch: Gaussian,
    stages: Stages = 3,
    pull: Pull = 0.01,
    growth: Growth = 8.0,
) -> Iterator[Tensor]:
    """Run localized accelerated MB-SGD, by default on all records in every round.

    Stage i minimises F(w) + lambda_i/2 ||w - w_{i-1}||^2 with lambda_i = pull x growth^(i-1). It
    takes accelerated steps from w_{i-1}. It has half as many rounds as the stage before. The
    theorem has growth 8 for M <= n^4 (from memory, and so is the form of lambda). The pull is
    public, so it costs nothing, and it needs no ball around w_{i-1}.

    Rounds on disjoint batches would each have the whole budget. In stage i their noise would have a
    variance of R_i^2/(epsilon n_i)^2. It is R_i/(epsilon n_i)^2 if each of the R_i rounds asks all
    n_i records of the stage. The theorem's rate is that of the second choice.

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem with its prox, and the starting
      points (J, d).
    - `rounds` (default 25): number of rounds, over all stages together.
    - `step` (default 0.5): step size.
    - `minibatch`: the release of each round, a mean gradient.
    - `stages` (default 3): number of stages.
    - `pull` (default 0.01): lambda_1, the strength of the first stage's pull to its start.
    - `growth` (default 8): factor between the pulls of one stage and the next.
    """
    later = [rounds >> i for i in range(2, stages + 1)]
    r = 0
    for length in (rounds - sum(later), *later):
        start = ag = w
        for t in range(1, length + 1):
            alpha = 2 / (t + 1)
            s = step * t / 2
            g = fed.mean(Query(Grad((1 - alpha) * ag + alpha * w), minibatch.at(r)))
            # The pull is quadratic, so one prox solves for pull and f1 together.
            curvature = 1 + s * pull
            w = problem.prox((w - s * g + s * pull * start) / curvature, s / curvature)
            ag = alpha * w + (1 - alpha) * ag
            r = r + 1
            yield ag
        w = ag
        pull = growth * pull
