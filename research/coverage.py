"""How often intervals with privacy noise cover, over well-specified linear models: with the clip
inactive, and where clip or noise bite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.statistics.gram import Gram
from silodp.core.weights import Weights
from silodp.server.estimates.intervals import SOUND, coefficients, covers, heaviest, never_scaled
from silodp.server.estimates.linear import question
from silodp.server.estimates.scoring import gaussian_for
from silodp.server.order import default_delta

SPREAD = 0.15
"""Standard deviation of what the features do not explain; a label's range is [-1, 1]."""


@dataclass(frozen=True)
class Design:
    """Features, records of each silo, epsilon, the clip (2: none is scaled down), and how features
    share a common part.
    """

    features: int
    counts: tuple[int, ...]
    epsilon: float
    clip: float = 2.0
    common: float = 0.0


DESIGNS = (
    Design(2, (500,), 1.0),
    Design(2, (303, 261, 46, 130), 3.0),
    Design(5, (1000,), 3.0),
    Design(5, (3000, 2000), 1.0),
    Design(5, (3000, 2000), 3.0, common=0.6),
    Design(10, (5000,), 3.0),
    Design(5, (3000, 2000), 1.0, clip=1.0),
    Design(5, (3000, 2000), 8.0, clip=0.5),
    Design(5, (300,), 1.0),
    Design(10, (1000,), 0.5),
)


def measure(
    replications: int, designs: tuple[Design, ...] = DESIGNS, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """A row for each design: the least and the largest share of intervals, over its coefficients,
    that hold the truth.
    """
    for at, design in enumerate(designs):
        random = torch.Generator().manual_seed(seed + at)
        features = design.features
        n = sum(design.counts)
        gram = question(Problem(torch.nn.Linear(features, 1), squared_error), design.clip, 1.0)
        mechanism: Gaussian = gaussian_for(
            "gram", [Budget(design.epsilon, default_delta(k)) for k in design.counts]
        )
        noise, _ = mechanism.clipped(gram.norm).deviation(
            range(len(design.counts)), Weights("records", design.counts)
        )
        theta = torch.tensor(
            [0.1, *(0.3 * (-1) ** j / (j + 1) for j in range(features))], dtype=torch.float64
        )
        found = list[torch.Tensor]()
        chunk = max(1, 2**21 // (n * gram.size))
        for start in range(0, replications, chunk):
            found.append(
                covers(
                    _products(gram, design, theta, min(chunk, replications - start), random),
                    theta,
                    noise,
                    n,
                    random,
                    heaviest(gram),
                )
            )
        shares = torch.cat(found).double().mean(0)
        typical = coefficients(
            _products(gram, design, theta, 1, random),
            noise,
            torch.full_like(noise, n),
            heaviest(gram),
        )
        low = float(shares.min())
        high = float(shares.max())
        inactive = never_scaled(gram)
        yield {
            "features": features,
            "records": list(design.counts),
            "epsilon": design.epsilon,
            "clip": design.clip,
            "clip_inactive": inactive,
            "common": design.common,
            "replications": replications,
            "least": low,
            "largest": high,
            "mean": float(shares.mean()),
            "standard_error": math.sqrt(0.95 * 0.05 / replications),
            "half_width": 1.96 * float(typical.error[0, 1:].median()),
            "called_95": inactive and SOUND[0] <= low and high <= SOUND[1],
        }


def _products(
    gram: Gram, design: Design, theta: torch.Tensor, repeats: int, random: torch.Generator
) -> torch.Tensor:
    """(R, p, p): the noiseless mean products of so many samples, by the statistic's own factors."""
    n = sum(design.counts)
    on = {"generator": random, "dtype": torch.float64}
    x = (1 - design.common) * (2 * torch.rand(repeats, n, design.features, **on) - 1)
    x = x + design.common * (2 * torch.rand(repeats, n, 1, **on) - 1)
    y = theta[0] + x @ theta[1:] + SPREAD * torch.randn(repeats, n, **on)
    z = gram.factors(None, 0)(x.flatten(0, 1), y.flatten()).reshape(repeats, n, -1)  # type: ignore[arg-type]
    return z.mT @ z / n
