"""Feature scaling learnt from releases: a coarse range from a noisy histogram, then mean and
variance inside that range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import Zero
from silodp.core.query import Query
from silodp.core.statistics import Histogram, Moments
from silodp.server.federation import Port

EDGES = torch.tensor(
    [-(2.0**k) for k in range(20, -11, -1)] + [2.0**k for k in range(-10, 21)], dtype=torch.float64
)
"""Public bins: powers of two of either sign from 2^-10 to 2^20."""


def learn_scaling(
    fed: Port, features: int, *, ranges: Gaussian, moments: Gaussian
) -> tuple[Tensor, Tensor]:
    """(mean, scale) of each feature, from two releases of every silo, each a mean with the weights
    of `fed`: equal ones by default, so that a silo's size does not weigh.

    A bin counts as occupied when its noisy share stands clear of the noise that the least of its
    neighbours shows (5 per cent of the records, at least); outliers beyond the occupied range are
    clamped to it.
    """
    bins = len(EDGES) + 1
    histogram = Histogram(EDGES, features)
    shares = (
        fed.mean(Query(histogram, ranges.clipped(histogram.norm)))[0]
        .reshape(features, bins)
        .double()
    )
    low, high = occupied(shares)
    inside = Moments(low, high)
    u = fed.mean(Query(inside, moments.clipped(inside.norm)))[0].double()
    mean = u[:features].clamp(-1, 1)
    square = u[features:].clamp(0, 1)
    half = (high - low) / 2
    spread = (square - mean.square()).clamp_min(1e-3).sqrt()
    return low + half * (mean + 1), half * spread


def occupied(shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outer edges of the smallest run of bins with every bin above the threshold."""
    outer = torch.cat([EDGES[:1] * 2, EDGES, EDGES[-1:] * 2])
    noise = shares.abs().median(1, keepdim=True).values * 1.4826
    clear = shares > torch.maximum(4 * noise, torch.tensor(0.05))
    clear[torch.arange(len(shares)), shares.argmax(1)] = True
    first = clear.int().argmax(1)
    last = clear.shape[1] - 1 - clear.flip(1).int().argmax(1)
    return outer[first], outer[last + 1]


# --- features within [-1, 1] ----------------------------------------------------------------------

USUAL_SPREAD = 0.3
"""Standard deviation of a column that fills a part of its public range [-1, 1]; 0.7 is the spread
of its logarithm from column to column.
"""
SPREADS = torch.logspace(-1.6, 0.1, 40, dtype=torch.float64)


def question(features: int) -> Moments:
    """Return the question whose answer `standardisation` takes."""
    ones = torch.ones(features, dtype=torch.float64)
    return Moments(-ones, ones)


def standardisation(answer: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """Return (mean, scale) of each feature within [-1, 1], from its noisy moments (2 features,).

    In each number is noise of this standard deviation. Where noise hides the columns' own means,
    they are drawn towards the mean of all columns, and that towards 0. Where it hides a spread, the
    spread is drawn towards the usual one.
    """
    answer = answer.double()
    features = len(answer) // 2
    mean, square = answer.split(features)
    level = mean.mean() / (1 + noise**2 / features / 0.16)
    own = float((mean - level).square().mean()) - noise**2
    if features < 3:
        own = 0.1
    centre = level + (mean - level) * max(own, 0.0) / (max(own, 0.0) + noise**2 + 1e-12)
    variance = square - 2 * mean * centre + centre.square()
    error = noise * (1 + 4 * centre.square()).sqrt() + 1e-3
    likely = ((variance[:, None] - SPREADS.square()) / error[:, None]).square()
    usual = ((SPREADS / USUAL_SPREAD).log() / 0.7).square()
    weight = (-(likely + usual) / 2).softmax(1)
    # Peers must ask the same questions, though their processors may round otherwise.
    return centre.round(decimals=6), (weight @ SPREADS.log()).exp().round(decimals=6)


@dataclass(frozen=True)
class Standard:
    """The change of a model's first layer when its features are shifted and scaled."""

    problem: Problem
    weight: str
    bias: str | None
    shift: Tensor
    scale: Tensor

    @classmethod
    def of(cls, problem: Problem, shift: Tensor, scale: Tensor) -> Standard:
        """Return the change. The shift goes into the layer's bias, or into the thresholds after it.
        Without either there is no place for it, and it is 0.
        """
        name, first = _first(problem)
        weight = f"{name}.weight".lstrip(".")
        if first.bias is not None:
            return cls(problem, weight, f"{name}.bias".lstrip("."), shift, scale)
        if thresholds_of(problem):
            return cls(problem, weight, list(problem.shapes)[-1], shift, scale)
        return cls(problem, weight, None, 0 * shift, scale)

    def inward(self, w: Tensor) -> Tensor:
        """Return the points (J, d) that compute from scaled features what w computes from raw
        ones.
        """
        made = w.clone()
        parts = self.problem.split(made)
        if self.bias:
            parts[self.bias].add_(parts[self.weight] @ self.shift.to(w))
        parts[self.weight].mul_(self.scale.to(w))
        return made

    def outward(self, w: Tensor) -> Tensor:
        """Return the points (J, d) that compute from raw features what w computes from scaled
        ones.
        """
        made = w.clone()
        parts = self.problem.split(made)
        parts[self.weight].div_(self.scale.to(w))
        if self.bias:
            parts[self.bias].sub_(parts[self.weight] @ self.shift.to(w))
        return made

    def slopes(self, w: Tensor) -> Tensor:
        """Return the slopes (J, k) of the first layer of the points (J, d)."""
        return self.problem.split(w)[self.weight].flatten(1)


def thresholds_of(problem: Problem) -> bool:
    """Return whether the model is one score, and one threshold more or less for each output."""
    layers = [m for m in problem.model.modules() if not list(m.children())]
    if len(layers) != 2 or len(problem.shapes) != 2:
        return False
    score, thresholds = layers
    return type(score) is nn.Linear and type(thresholds) is nn.Linear and score.out_features == 1


def features_of(problem: Problem) -> int:
    """Return how many features the model's first layer takes. Raise BadInput if it is not linear,
    or if the problem has a prox.
    """
    if isinstance(problem, Problem) and not isinstance(problem.prox, Zero):
        raise BadInput("the algorithm scaled has no prox in its units; leave --prox out")
    return _first(problem)[1].in_features


def _first(problem: Problem) -> tuple[str, nn.Linear]:
    """Return the first layer and its name."""
    layers = [(name, m) for name, m in problem.model.named_modules() if not list(m.children())]
    name, first = layers[0]
    plain = isinstance(problem.model, nn.Sequential | nn.Linear)
    if not plain or type(first) is not nn.Linear:
        raise BadInput(
            "the algorithm scaled needs a model that begins with a linear layer; use --model "
            "logistic, linear or mlp:16, or --algorithm momentum"
        )
    return name, first
