"""A federation that is all synthetic: an algorithm asks it as it asks silos, and gets means over
one pool of made-up records, under the noise that the real silos' mean would have.

Means over full batches are all that the advised algorithms ask for. So N silos act as one pool, and
the noise of their weighted mean follows from their sizes and multipliers. All runs of a batch see
the same draws, scaled to each one's noise, which makes their comparison sharp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.weights import Weights
from silodp.engine.clipping import clipped_sum
from silodp.server.advice.worlds import Sample
from silodp.server.estimates.scaling import thresholds_of
from silodp.server.federation import Measured
from silodp.server.prepare import Prepared


class Pool:
    """`noise` is the std of the mean for a clip of 1, by kind of release; `seed` that of all
    draws.
    """

    def __init__(
        self, problem: Problem, sample: Sample, noise: Mapping[str, float], seed: int
    ) -> None:
        self._problem = problem
        self._sample = sample
        self._noise = noise
        self._shared = thresholds_of(problem)
        line = [type(m) for m in problem.model.modules()] == [nn.Sequential, nn.Linear]
        self._line = problem.slope and (self._shared or line) and len(problem.shapes) == 2
        self._random = np.random.default_rng((0xADF, seed % 1000))

    def mean(self, query: Query) -> Tensor:
        return self.measure(query).mean

    def measure(self, query: Query) -> Measured:
        """Return the mean, and what is known of its error."""
        statistic = query.statistic
        mechanism = query.mechanism
        x = self._sample.x
        y = self._sample.y
        weight = None
        features_of = getattr(statistic, "features_of", None)  # of gradients in scaled features
        if features_of:
            x = features_of(x).to(x)
            weight = statistic.weight_of(x)
        if features_of or statistic.rows(self._problem, 0) is None:
            (w, *rest), n = statistic.points, len(x)
            if self._line and not rest:
                clip = torch.as_tensor(mechanism.clip).to(w).reshape(-1, 1, 1)
                value = self._of_a_line(w, clip, x, weight)
            else:
                weight = torch.full((1, n), 1 / n)
                reference = rest[0] if rest else None
                value = clipped_sum(
                    self._problem, w, x[None], y[None], weight, mechanism.clip, reference=reference
                )[:, 0]
        else:
            runs = statistic.shape[0]
            if all(bool((point == point[:1]).all()) for point in statistic.points):
                runs = 1  # all ask the same
            rows = [statistic.rows(self._problem, run) for run in range(runs)]
            value = torch.stack([row(x, y).mean(0) for row in rows if row is not None])
        draws = torch.from_numpy(self._random.standard_normal((1, *value.shape[1:]))).to(value)
        std = torch.as_tensor(mechanism.clip).to(value).reshape(-1, 1) * self._noise[mechanism.kind]
        return Measured(value + draws * std, std, torch.full_like(std, len(x)))

    def _of_a_line(self, w: Tensor, clip: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
        """Return the mean of the clipped gradients of one linear layer, which are (slope x record,
        slope): many times as fast as for any model. Outputs that are one score and thresholds share
        the slope of the score.
        """
        assert self._problem.slope
        square = x.flatten(1).square().sum(1)
        parts = list(self._problem.split(w).values())
        slope = self._problem.slope(
            (parts[0] @ x.T + parts[1][:, :, None])[None], self._sample.y[None]
        )[0]  # (J, k, n)
        if weight is not None:
            slope = slope * weight
        norm = (self._by_score(slope).square().sum(1, keepdim=True) * square).sqrt()
        norm = torch.hypot(norm, slope.norm(dim=1, keepdim=True))
        slope = slope * (clip / torch.maximum(norm, clip)) / len(x)
        return torch.cat([(self._by_score(slope) @ x).flatten(1), slope.sum(2)], 1)

    def _by_score(self, slope: Tensor) -> Tensor:
        """Return the slopes (J, k, n) by the outputs as slopes by the scores that features make."""
        if self._shared:
            return slope.sum(1, keepdim=True)
        return slope


def noise_of(made: Prepared, weights: Weights) -> dict[str, float]:
    """Std of the mean over all silos for a clip of 1, by kind of release, of an order whose silos
    have Gaussian noise of their own.
    """
    counts = made.plan.counts
    found = {}
    for kind, mechanism in made.mechanisms.items():
        z = mechanism.multipliers(range(len(counts)))[0]
        std = 2 * (1 + CLIP_TOLERANCE) * z / torch.tensor(counts, dtype=torch.float64)
        if len(counts) > 1:
            found[kind] = float((std * shares_of(weights, std)).square().sum().sqrt())
        else:
            found[kind] = float(std[0])
    return found


def shares_of(weights: Weights, std: Tensor) -> Tensor:
    """(N,): how much each silo counts."""
    return weights.shares(range(len(std)), (1 / std.square())[None])[0]


def pooled(counts: tuple[int, ...], shares: Tensor) -> int:
    """Records whose plain mean is as sharp as the silos' weighted one, if all have records of one
    kind.
    """
    return max(
        2,
        math.floor(1 / float((shares.square() / torch.tensor(counts, dtype=torch.float64)).sum())),
    )
