"""Heavy-ball momentum from the mean outcome, in standardised features. One question finds the mean
outcome, one the features' means and spreads, and all others are gradients in these units.
"""

import torch

from silodp.core.errors import BadInput
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
from silodp.server.estimates.scaling import Standard, features_of, standardisation
from silodp.server.estimates.scaling import question as moments
from silodp.server.estimates.shrinkage import CAUTION, NoiseInSlopes
from silodp.server.estimates.start import MEAN_SHARE, curvature, started
from silodp.server.estimates.start import question as outcomes

MeanShare = Annotated[
    float,
    Setting(least=0.001, most=0.5, help="Share of the budget for the mean outcome."),
]
Caution = Annotated[
    float,
    Setting(least=0, most=10, help="Factor of the noise by which the slopes are shortened."),
]


def scaled(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    rounds: int,
    step: Number,
    momentum: Number,
    start: Gaussian,
    spread: Gaussian,
    minibatch: Gaussian,
    mean_share: MeanShare = MEAN_SHARE,
    caution: Caution = CAUTION,
) -> Iterator[Tensor]:
    """Run MB-SGD with momentum in features that are standardised by private moments. Start at the
    mean outcome, and shorten the slopes of the result by the noise in them.

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
    - `start`: the release of the mean outcome.
    - `spread`: the release of the moments, for 15 % of the budget.
    - `minibatch`: the release of each round, a mean gradient.
    - `mean_share` (default 0.05): share of the budget for the mean outcome.
    - `caution` (default 1.25): factor of the variance that noise has in the slopes. By so much they
      are shortened. 1 is right where columns are unrelated; 0 leaves them as long as they are.
    """
    features = features_of(problem)
    asked = outcomes(problem, w)
    mean, noise, _ = fed.measure(Query(asked, start.clipped(asked.norm)))
    w = started(problem, w, mean.cpu(), _one(noise))
    asked = moments(features)
    found, noise, _ = fed.measure(Query(asked, spread.clipped(asked.norm)))
    standard = Standard.of(problem, *standardisation(found[0].cpu(), _one(noise)))
    begun = standard.inward(w)
    point = begun
    prev = begun
    in_slopes = NoiseInSlopes(curvature(problem, begun).to(begun))
    total = torch.zeros_like(begun)
    summed = 0
    for r in range(rounds):
        gradient = ScaledGrad(point, standard.shift, standard.scale, minibatch.clip)
        g, deviation, _ = fed.measure(Query(gradient, minibatch.at(r)))
        move = point - prev
        prev = point
        point = point - step * g.to(w) + momentum * move
        later = r >= rounds // 2
        in_slopes.add(deviation.to(begun), step, momentum, summed=later)
        learned = point - begun
        if later:
            total = total + learned
            summed += 1
            learned = total / summed
        kept = in_slopes.kept(standard.slopes(learned), caution)
        yield standard.outward(begun + kept * learned)


def _one(noise: Tensor) -> float:
    """Return the noise of an answer. Runs side by side share their features' scale, so it must be
    the same for all of them.
    """
    if len(noise.unique()) > 1:
        raise BadInput("scaled cannot run with several epsilons side by side; run one at a time")
    return float(noise.flatten()[0])
