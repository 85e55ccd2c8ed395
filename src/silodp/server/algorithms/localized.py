"""ISRL-DP localized accelerated MB-SGD for convex losses of unlike silos (Gao, Lowy, Zhou & Wright
2024): stages that are held ever closer.
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
    """Localized accelerated MB-SGD, by default on all records in every round.

    Stage i minimises F(w) + lambda_i/2 ||w - w_{i-1}||^2, lambda_i = pull x growth^(i-1), by
    accelerated steps from w_{i-1}, over half as many rounds as the stage before. The theorem has
    growth 8 for M <= n^4 (from memory, as lambda is). The pull is public: it costs nothing, and
    needs no ball about w_{i-1}.

    Rounds on disjoint batches would each have the whole budget, but a noise of variance
    R_i^2/(epsilon n_i)^2 in stage i, against R_i/(epsilon n_i)^2 where its n_i records are asked in
    each of its R_i rounds. The rate is that of the second.
    """
    later = [rounds >> i for i in range(2, stages + 1)]
    r = 0
    for length in (rounds - sum(later), *later):
        start = ag = w
        for t in range(1, length + 1):
            alpha = 2 / (t + 1)
            s = step * t / 2
            g = fed.mean(Query(Grad((1 - alpha) * ag + alpha * w), minibatch.at(r)))
            held = 1 + s * pull
            w = problem.prox((w - s * g + s * pull * start) / held, s / held)
            ag = alpha * w + (1 - alpha) * ag
            r = r + 1
            yield ag
        w = ag
        pull = growth * pull
