"""Compute what a release costs by numerical integration, without the shipped accountants.

For each kind of event there are pairs of laws that an adversary really meets. The record in
question pulls by its whole clip one way in one data set and the other way in the other. All other
records have the values that reveal most. The divergence of such a pair is a lower bound on the true
price, so a charge below it is refuted. A charge above it proves nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy import special

from silodp.core.sampling import Poisson, Sampling, WithoutReplacement

STEP = 1 / 64
"""Step of the grid on which densities are integrated, in standard deviations of the noise."""
LOSS_STEP = 2e-4
"""Step of the grid of privacy losses. Losses are rounded down, so that no delta is overstated."""
LARGEST_LOSS = 60.0


@dataclass(frozen=True)
class Mixture:
    """Standard normal noise around one of two means: `far` with probability `rate`, else `near`."""

    near: float
    far: float
    rate: float

    def log_density(self, t: np.ndarray) -> np.ndarray:
        """Return the logarithm of the density at these points."""

        def part(mean: float, weight: float) -> np.ndarray:
            if weight > 0:
                log_weight = math.log(weight)
            else:
                log_weight = -math.inf
            return log_weight - (t - mean) ** 2 / 2 - math.log(2 * math.pi) / 2

        return np.logaddexp(part(self.near, 1 - self.rate), part(self.far, self.rate))


Pair = tuple[Mixture, Mixture]


def pairs_of(sampling: Sampling, noise_multiplier: float, n: int) -> list[Pair]:
    """Return pairs of laws of a sum over a batch of n records, in units of its noise.

    The noise multiplier is the standard deviation over 2 clips, the most that a replaced record can
    change.
    """
    clip = 1 / (2 * noise_multiplier)
    if not sampling.sampled:
        return [(Mixture(0.0, 0.0, 1.0), Mixture(0.0, 2 * clip, 1.0))]
    rate = sampling.batch(n) / n
    # All other records are zero: the sum is the record in question, if it was drawn.
    apart = Mixture(0.0, clip, rate), Mixture(0.0, -clip, rate)
    if isinstance(sampling, Poisson):
        return [apart]
    if isinstance(sampling, WithoutReplacement):
        # All other records pull the other way: one of them takes the place of the record.
        only = Mixture(0.0, 2 * clip, rate), Mixture(0.0, 0.0, 1.0)
        return [apart, only, (only[1], only[0])]
    raise AssertionError(f"{type(sampling).__name__} has no independent price in the audit")


def divergence(pair: Pair, order: float) -> float:
    """Return the Renyi divergence of the pair at this order, by the trapezium rule."""
    means = [mean for law in pair for mean in (law.near, law.far)]
    reach = 14.0 + 2 * order * max(abs(mean) for mean in means)
    t = np.arange(-reach, reach, STEP)
    p, q = (law.log_density(t) for law in pair)
    log_sum = special.logsumexp(order * p + (1 - order) * q) + math.log(STEP)
    return max(0.0, float(log_sum) / (order - 1))


def least_divergence(sampling: Sampling, noise_multiplier: float, n: int, order: float) -> float:
    """Return the largest divergence of all pairs: the least that an event may be charged."""
    return max(divergence(pair, order) for pair in pairs_of(sampling, noise_multiplier, n))


# --- delta of several releases -------------------------------------------------------------------


Losses = tuple[np.ndarray, np.ndarray, float]
"""Privacy losses, their probabilities under the first law, and the probability of an infinite
loss."""


def losses_of(pair: Pair) -> Losses:
    """Return the privacy losses of a pair of laws."""
    means = [mean for law in pair for mean in (law.near, law.far)]
    t = np.arange(min(means) - 12, max(means) + 12, STEP / 16)
    p, q = (law.log_density(t) for law in pair)
    weights = np.exp(p) * STEP / 16
    return p - q, weights / max(1.0, weights.sum()), 0.0


def delta_of(releases: Iterable[tuple[Losses, int]], epsilon: float) -> float:
    """Return a lower bound on the delta at this epsilon of all releases together.

    Losses are rounded down onto a grid and added by Fourier transforms. Losses beyond the grid are
    left out.
    """
    half = round(LARGEST_LOSS / LOSS_STEP)
    size = 2 * half
    spectrum = np.ones(size // 2 + 1, complex)
    finite = 1.0
    for (losses, weights, infinite), count in releases:
        at = np.floor(losses / LOSS_STEP).astype(np.int64)
        inside = (at >= -half // count) & (at < half // count)
        density = np.bincount(at[inside] % size, weights[inside], minlength=size)
        spectrum = spectrum * np.fft.rfft(density) ** count
        finite *= (1 - infinite) ** count
    total = np.fft.irfft(spectrum, size).clip(0)
    sums = np.where(np.arange(size) < half, np.arange(size), np.arange(size) - size) * LOSS_STEP
    above = sums > epsilon
    return 1 - finite + float((total[above] * -np.expm1(epsilon - sums[above])).sum())
