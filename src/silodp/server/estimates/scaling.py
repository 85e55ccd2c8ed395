"""Feature scaling learnt from releases: a coarse range from a noisy histogram, then mean and
variance inside that range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from silodp.core.mechanisms import Gaussian
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
