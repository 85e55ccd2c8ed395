"""Heavy-ball momentum in standardised features. One question finds the features' means and spreads,
and all others are gradients in the units that it gives.
"""

from silodp.server.algorithms.language import (
    Annotated,
    Gaussian,
    Iterator,
    Number,
    Port,
    Problem,
    Query,
    ScaledGrad,
    Setting,
    Tensor,
)
from silodp.server.estimates.scaling import Standard, features_of, question, standardisation

Share = Annotated[
    float,
    Setting(above=0, most=1, help="Factor of the slopes in the result, against their noise."),
]


def scaled(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    rounds: int,
    step: Number,
    momentum: Number,
    spread: Gaussian,
    minibatch: Gaussian,
    shrink: Share = 1.0,
) -> Iterator[Tensor]:
    """Run MB-SGD with momentum in features that are standardised by private moments.

    A schema's ranges are wide, so columns fill different parts of [-1, 1], far from its middle. A
    gradient then is long where columns are wide, and its noise follows its length. In standardised
    features the same budget finds a better model. Iterates are models of the raw features, so a
    released model shows nothing of this.

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, a problem whose model begins with a linear layer
      and without prox, and the starting points (J, d).
    - `rounds` (default 25): number of rounds.
    - `step` (default 0.5): step size, in standardised features.
    - `momentum` (default 0.9): factor of the last move, at least 0 and less than 1.
    - `spread`: the release of the moments, for 15 % of the budget.
    - `minibatch`: the release of each round, a mean gradient.
    - `shrink` (default 1): factor of the slopes in the result. Noise makes slopes too long, and
      risks too sure.
    """
    asked = question(features_of(problem))
    moments, noise, _ = fed.measure(Query(asked, spread.clipped(asked.norm)))
    found = standardisation(moments[0].cpu(), float(noise.flatten()[0]))
    standard = Standard.of(problem, *found)
    point = standard.inward(w)
    prev = point
    for r in range(rounds):
        gradient = ScaledGrad(point, standard.shift, standard.scale, minibatch.clip)
        g = fed.mean(Query(gradient, minibatch.at(r))).to(w)
        move = point - prev
        prev = point
        point = point - step * g + momentum * move
        yield standard.outward(standard.shrunk(point, shrink))
