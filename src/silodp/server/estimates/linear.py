"""A linear model from private moments: ridge regression at the noise's scale, and for classes
logits from it. All of it is post-processing.

What is known of the noise sets everything: the penalty is the one of least estimated error, where
the estimate allows for the noise in the moments themselves (Stein's lemma), and slopes are shrunk
by as much as noise has lengthened them, so that risks are neither too sure nor too flat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from silodp.core.errors import BadInput
from silodp.core.numbers import Number
from silodp.core.problem.losses import Huber, Weighted, cross_entropy, logistic, squared_error
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import Zero
from silodp.core.statistics.gram import CROSS, DIAGONAL, Gram

REACH = 0.5
"""Of sqrt(2 + features), the longest that a record's factors can be where features lie in [-1, 1]:
the bound at a clip of 1.
"""
PENALTIES = torch.logspace(math.log10(0.7), math.log10(40), 24, dtype=torch.float64)
"""Ridge penalties that are tried, in units of the noise's largest eigenvalue; none lies much below
it, where noise would pass for a direction.
"""
CERTAIN = 0.9
"""The largest share of the classes' variance that a score is taken to explain."""
CAUTION = 2.2
"""Standard deviations of noise that are taken off what the moments say of a score."""
BOUND = 0.2
"""Logits that the noise in the features' means may move all scores by: it bounds the slopes."""
LEAST_SHARE = 0.002
DEVIATIONS = 3.25
CHANCE = 0.75
MOST_EXCESS = 0.05
"""A model is refused if the log loss of a constant may be so much above that of the best one, by
the error of the share of the classes alone: within so many standard deviations of noise and, in
part, of chance.
"""


def question(problem: Problem, clip: Number, cap: float) -> Gram:
    """Return what is asked for the problem's linear model; BadInput if it has another model, loss
    or prox.
    """
    layer = _layer(problem.model)
    loss = problem.loss
    outputs = 0 if layer is None else layer.out_features
    if isinstance(loss, Weighted):
        plain = loss.loss
    else:
        plain = loss
    number = loss is squared_error or isinstance(loss, Huber)
    if (
        layer is None
        or not (number or plain is logistic or plain is cross_entropy)
        or (number and outputs > 1)
    ):
        raise BadInput(
            "one-shot makes a linear model; use --model linear for numbers, or --model "
            "logistic for classes, and the task's own loss"
        )
    if isinstance(problem, Problem) and not isinstance(problem.prox, Zero):
        raise BadInput("one-shot chooses its own penalty; leave --prox out")
    return Gram(
        layer.in_features,
        0 if number else max(2, outputs),
        cap,
        clip * REACH * math.sqrt(2 + layer.in_features),
    )


def _layer(model: nn.Module) -> nn.Linear | None:
    if isinstance(model, nn.Sequential) and len(model) == 1:
        inner = model[0]
    else:
        inner = model
    return inner if type(inner) is nn.Linear else None


def solution(
    problem: Problem,
    gram: Gram,
    value: Tensor,
    noise: Tensor,
    records: Tensor | float = math.inf,
) -> Tensor:
    """Return (J, d): the problem's w from the mean products (J, k) of so many `records`, in each of
    which is noise of this standard deviation (J, 1). Of two classes NaN where noise decides it.
    """
    layer = _layer(problem.model)
    assert layer is not None
    moments = Moments.of(gram, value, noise, centred=layer.bias is not None)
    if gram.classes == 0:
        fitted = moments.ridge(moments.xy, torch.eye(1, dtype=torch.float64))
        scale = (fitted.along / fitted.square.clamp_min(1e-300)).clamp(0, 1).nan_to_num(1.0)
        slopes = gram.cap * scale * fitted.slopes
        offset = gram.cap * moments.y
        offset = offset - (slopes.mT @ moments.x)[..., 0]
    else:
        slopes, offset = _logits(moments, gram.classes, records)
        if isinstance(problem.loss, Weighted):
            offset = offset + torch.tensor(problem.loss.weights, dtype=torch.float64).log()
        if layer.out_features == 1:
            slopes = slopes[..., 1:] - slopes[..., :1]
            offset = offset[..., 1:] - offset[..., :1]
    if layer.bias is not None:
        parts = [slopes.mT.flatten(1), offset]
    else:
        parts = [slopes.mT.flatten(1)]
    return torch.cat(parts, 1)


@dataclass(frozen=True)
class Moments:
    """Means and centred products of features x and labels y, per unit of weight, with the deviation
    `noise` of an off-diagonal entry.
    """

    x: Tensor
    """(J, F, 1)"""
    y: Tensor
    """(J, L)"""
    xx: Tensor
    xy: Tensor
    noise: Tensor
    """(J, 1, 1)"""

    @classmethod
    def of(cls, gram: Gram, value: Tensor, noise: Tensor, *, centred: bool = True) -> Moments:
        """Means are shrunk towards the middle of the public range, and shares of classes towards
        equal ones, where noise could have made them.
        """
        full = gram.matrix(value.double())
        features = gram.features
        weight = full[:, :1, :1].clamp_min(
            1e-3 * float(torch.as_tensor(gram.bound).min()) ** 2 / (2 + features)
        )
        full = full / weight
        s = noise.double()[..., None] * DIAGONAL / CROSS / weight
        xx = full[:, 1 : features + 1, 1 : features + 1]
        xy = full[:, 1 : features + 1, features + 1 :]
        x = full[:, 1 : features + 1, :1]
        y = full[:, features + 1 :, :1]
        if not centred:
            return cls(0 * x, 0 * y[..., 0], xx, xy, s)
        equal = 1 / gram.classes if gram.classes > 2 else 0.0
        near = _shrunk(x, s)
        level = _shrunk(y, s, equal, 0.6 if gram.classes == 2 else 0.3 * (equal or 1.0))
        xx = xx - (near @ x.mT + x @ near.mT) / 2
        return cls(near, level[..., 0], xx, xy - near @ y.mT, s)

    def ridge(self, xy: Tensor, spread: Tensor) -> Fitted:
        """Slopes (J, F, L) on the columns of xy, whose noises have the covariance spread x noise^2,
        at the best of PENALTIES.

        The penalty of a feature grows with its variance, as far as the variances stand out from
        their noise. With A = (xx + P)^-1, b = A xy and a symmetric noise E in xx (off-diagonal
        variance s^2, diagonal 2 s^2), E[b' E b] = -2 s^2 (|b|^2 tr A + b' A b) and E[b' e] = s^2 tr
        A by Stein's lemma: so b' xx b and b' xy are freed of what the noise they were fitted to
        adds.
        """
        s2 = self.noise.square()
        features = self.xx.shape[-1]
        variance = self.xx.diagonal(dim1=1, dim2=2)
        mean = variance.mean(1, keepdim=True).clamp_min(1e-12)
        if features > 1:
            told = (1 - 2 * s2[..., 0] / variance.var(1, keepdim=True).clamp_min(1e-300)).clamp(
                0, 1
            )
        else:
            told = 0 * mean
        each = 1 + told * ((variance / mean).clamp(0.1, 10) - 1)
        root = each.sqrt()[..., None]
        values, vectors = torch.linalg.eigh(self.xx / root / root.mT)
        vectors = vectors / root  # A = vectors diag(1 / (values + penalty)) vectors'
        edge = 2 * math.sqrt(features) * self.noise[..., 0]
        found = []
        for penalty in PENALTIES if bool((edge > 0).any()) else PENALTIES[:1]:
            levels = values + penalty * edge
            kept = levels > 1e-10 * values.amax(1, keepdim=True).clamp_min(1e-12)
            inverse = torch.where(kept, 1 / levels, 0.0)[..., None]
            slopes = vectors @ (inverse * (vectors.mT @ xy))
            trace = (vectors.square() * inverse.mT).sum((1, 2), keepdim=True)
            turned = vectors.mT @ slopes
            again = slopes.mT @ slopes * trace + turned.mT @ (inverse * turned)
            square = slopes.mT @ self.xx @ slopes + 2 * s2 * again
            found.append(Fitted(slopes, slopes.mT @ xy - s2 * trace * spread, square))
        risk = torch.stack(
            [(f.square - 2 * f.along).diagonal(dim1=1, dim2=2).sum(1) for f in found]
        )
        best = risk.nan_to_num(math.inf).argmin(0)
        runs = torch.arange(len(self.xx))
        return Fitted(
            *(
                torch.stack([getattr(f, name) for f in found])[best, runs]
                for name in ("slopes", "along", "square")
            )
        )


@dataclass(frozen=True)
class Fitted:
    """Slopes b (J, F, L), and estimates of b' xy and b' xx b (J, L, L) without the noise."""

    slopes: Tensor
    along: Tensor
    square: Tensor


def _shrunk(
    mean: Tensor, noise: Tensor, centre: float = 0.0, spread: float | None = None
) -> Tensor:
    """Return what is to be expected of means (J, k, 1) that noise of this deviation has moved:
    drawn towards a public centre by the spread that they have about it in public experience, or
    else by the length that they have beyond what the noise explains (James and Stein).
    """
    off = mean - centre
    variance = noise.square()
    if spread is None:
        own = off.square().mean(1, keepdim=True) - variance
    else:
        own = torch.full_like(variance, spread**2)
    return centre + off * own.clamp_min(0.0) / (own.clamp_min(0.0) + variance).clamp_min(1e-300)


def _logits(moments: Moments, classes: int, records: Tensor | float) -> tuple[Tensor, Tensor]:
    """(J, F, K) and (J, K): linear discriminants of the ridge scores b_k'(x - mean), b_k = (xx +
    P)^-1 (mean of class k - mean).

    Within classes scores vary less than in all, by the share R^2 that classes explain. What noise
    may have added to the score's covariance with the class is taken off, and what it may have taken
    from its variance is put on, so that risks are rather too flat than too sure. The slopes are
    bounded at the noise's scale. NaN where the noise decides the answer.
    """
    if classes > 2:
        return _discriminants(moments, classes)
    noise = moments.noise[:, 0]
    # a share is a quotient of two noisy sums, of labels and of weights
    error = noise / 2 * (1 + 2 * moments.y.square()).sqrt()
    share, excess = _safest((1 + moments.y) / 2, error, records)
    spread = share * (1 - share)
    fitted = moments.ridge(moments.xy / 2, torch.full((1, 1), 0.25, dtype=torch.float64))
    length = fitted.slopes.norm(dim=1)
    mean = (fitted.slopes.mT @ moments.x)[..., 0]
    doubt = noise * (length * (0.25 + 2 * length.square()).sqrt() + mean.abs() / 2)
    along = fitted.along[..., 0] - CAUTION * doubt
    edge = 2 * math.sqrt(moments.xx.shape[-1]) * noise  # the noise's largest eigenvalue
    square = fitted.square[..., 0] + edge * length * (length + mean.abs())
    square = torch.maximum(square, along.square() / spread / CERTAIN).clamp_min(1e-300)
    factor = along / spread / (square - along.square() / spread)
    factor = torch.minimum(factor, BOUND / (noise * length).clamp_min(1e-300))
    factor = torch.where(along > 0, factor, 0.0)  # else one risk for everybody
    factor = torch.where(excess > MOST_EXCESS, torch.nan, factor)
    slopes = factor[..., None] * fitted.slopes
    within = (square - along.square() / spread).clamp_min(0.0).sqrt()
    centres = torch.cat([-along / (1 - share), along / share], 1)
    offset = _balanced(factor * centres, factor * within, share) - factor * mean
    nothing = torch.zeros_like(slopes)
    return torch.cat([nothing, slopes], 2), torch.cat([0 * offset, offset], 1)


def _safest(share: Tensor, error: Tensor, records: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return (J, 1) twice: the constant risk whose log loss is least above that of the true share,
    in the worst case, and how much it then is above, as a part of it.

    The true share is near the noisy one, which has this `error`. Of a rare class the constant is a
    little below the share: the rarer the class, the lower the best loss that it is compared with.
    """
    share = share.clamp(LEAST_SHARE, 1 - LEAST_SHARE)
    chance = CHANCE * share * (1 - share) / records
    reach = DEVIATIONS * (error.square() + chance).sqrt()
    least = (share - reach).clamp_min(LEAST_SHARE)
    most = (share + reach).clamp_max(1 - LEAST_SHARE)
    low = least
    high = most
    for _ in range(50):
        middle = (low + high) / 2
        too_high = _excess(least, middle) > _excess(most, middle)
        high = torch.where(too_high, middle, high)
        low = torch.where(too_high, low, middle)
    risk = (low + high) / 2
    return risk, torch.maximum(_excess(least, risk), _excess(most, risk))


def _excess(share: Tensor, risk: Tensor) -> Tensor:
    """Return by which part the log loss of a constant risk is above the best for this share."""
    best = -(share * share.log() + (1 - share) * (1 - share).log())
    return -(share * risk.log() + (1 - share) * (1 - risk).log()) / best - 1


def _balanced(centres: Tensor, within: Tensor, share: Tensor) -> Tensor:
    """Return (J, 1): the intercept with which the mean risk is the `share` (J, 1) of the second
    class, for logits that are normal in each class, about its centre (J, 2).
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(31)
    logits = centres[..., None] + within[..., None] * torch.from_numpy(nodes)
    weight = torch.from_numpy(weights / weights.sum()) * torch.stack([1 - share, share], 1)
    low = torch.full_like(share, -60.0)
    high = torch.full_like(share, 60.0)
    for _ in range(60):
        middle = (low + high) / 2
        risk = ((middle[..., None] + logits).sigmoid() * weight).sum((1, 2))[:, None]
        low = torch.where(risk < share, middle, low)
        high = torch.where(risk < share, high, middle)
    return low


def _discriminants(moments: Moments, classes: int) -> tuple[Tensor, Tensor]:
    """Return the same of several classes: (W + P)^-1 (mean of class k - mean) with W the covariance
    within them, freed of the noise of their means.
    """
    share = moments.y.clamp_min(0.3 / classes)
    share = (share / share.sum(1, keepdim=True))[:, None]
    means = moments.xy / share
    eye = torch.eye(moments.xx.shape[-1], dtype=torch.float64)
    within = (
        moments.xx
        - (means * share) @ means.mT
        + moments.noise.square() * (1 / share).sum(2, keepdim=True) * eye
    )
    penalty = (
        2 * math.sqrt(len(eye)) * moments.noise * (1 + moments.noise / share.amin(2, keepdim=True))
    )
    values, vectors = torch.linalg.eigh(within)
    levels = values.clamp_min(0.0)[..., None] + penalty
    slopes = vectors @ (vectors.mT @ means / levels.clamp_min(1e-9))
    offset = share[:, 0].log() - (means * slopes).sum(1) / 2
    return slopes, offset - (slopes.mT @ moments.x)[..., 0]
