"""What the silos' features and labels are like, from priced releases: ranges, means, deviations,
missing rates and class counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from silodp.core.mechanisms import Gaussian
from silodp.core.statistics import ClassCounts, Histogram, MissingRates, Moments
from silodp.server.estimates.scaling import EDGES, occupied
from silodp.server.estimates.scoring import ask_pooled
from silodp.server.federation import Port


def profile(
    fed: Port,
    mechanism: Gaussian,
    *,
    features: Sequence[str],
    classes: Sequence[str],
    counts: Sequence[int],
) -> dict:
    """Return a row for each feature and class, over all records of the silos that answer: each
    value with its standard error by noise.

    Asks every silo `releases(classes)` times. A range is made of public bins (powers of two) that
    stand clear of the noise: values outside are clamped to it, for mean and deviation too. Missing
    values count for neither of these.
    """
    histogram = Histogram(EDGES, len(features))
    shares = ask_pooled(fed, histogram, mechanism, counts).mean
    low, high = occupied(torch.from_numpy(shares).reshape(len(features), -1))
    absent = ask_pooled(fed, MissingRates(len(features)), mechanism, counts)
    missing = absent.mean
    found = ask_pooled(fed, Moments(low, high), mechanism, counts)
    half = ((high - low) / 2).numpy()
    present = (1 - missing).clip(0.05, 1.0)
    u, square = (found.mean.reshape(2, -1) / present).clip([[-1.0], [0.0]], 1.0)
    error = np.hypot(found.noise, u * absent.noise) / present
    deviation = np.sqrt((square - u**2).clip(1e-6))
    deviation_error = np.minimum(error * np.sqrt(1 + 4 * u**2) / (2 * deviation), 1.0)
    rows = [
        {
            "feature": name,
            "low": float(low[j]),
            "high": float(high[j]),
            "mean": float(low[j] + half[j] * (u[j] + 1)),
            "mean_error": float(half[j] * error[j]),
            "deviation": float(half[j] * deviation[j]),
            "deviation_error": float(half[j] * deviation_error[j]),
            "missing": float(missing[j].clip(0, 1)),
            "missing_error": absent.noise,
        }
        for j, name in enumerate(features)
    ]
    return {
        "features": rows,
        "classes": _classes(fed, mechanism, classes, counts) if classes else [],
    }


def releases(classes: Sequence[str]) -> int:
    """Return how many releases a profile takes of each silo."""
    return 4 if classes else 3


def _classes(
    fed: Port, mechanism: Gaussian, classes: Sequence[str], counts: Sequence[int]
) -> list[dict]:
    """Noisy counts, and from them weights n / (k n_c) that make classes count alike; a class that
    noise hides is taken for one standard error.
    """
    found = ask_pooled(fed, ClassCounts(len(classes)), mechanism, counts)
    n = found.records
    weights = 1 / (len(classes) * np.maximum(found.mean, max(found.noise, 1 / n)))
    return [
        {
            "class": name,
            "count": float(n * found.mean[k]),
            "count_error": n * found.noise,
            "weight": float(weights[k]),
        }
        for k, name in enumerate(classes)
    ]
