"""What the silos' features and labels are like, from priced releases: ranges, means, deviations,
missing rates and class counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from silodp.core.mechanisms import Gaussian
from silodp.core.problem.schema import Schema
from silodp.core.quality import Z
from silodp.core.statistics import ClassCounts, Histogram, MissingRates, Moments
from silodp.server.estimates.scaling import EDGES, occupied
from silodp.server.estimates.scoring import ask_pooled
from silodp.server.federation import Port


@dataclass(frozen=True)
class Unit:
    """A feature, its public range as the silos have it, and the same range in the column's unit."""

    name: str
    range: tuple[float, float]
    shown: tuple[float, float]


def units_of(schema: Schema | None, features: Sequence[str]) -> list[Unit] | None:
    """Return the features in the units of their columns, or None if no schema has their ranges.

    A category's feature is 1 or 0, so its mean is a share. So is the mean of yes and no.
    """
    if schema is None or schema.images or tuple(schema.features) != tuple(features):
        return None
    share = (0.0, 1.0)
    units = []
    for column in schema.columns:
        first, *others = column.features
        if column.type == "number":
            units.append(Unit(first, (-1.0, 1.0), column.range))
        elif column.type == "boolean":
            units.append(Unit(first, (-1.0, 1.0), share))
        else:
            units.append(Unit(first, share, share))
        units += [Unit(name, share, share) for name in others]
    return units


def profile(
    fed: Port,
    mechanism: Gaussian,
    *,
    features: Sequence[str],
    classes: Sequence[str],
    counts: Sequence[int],
    schema: Schema | None = None,
) -> dict:
    """Return a row for each feature and class, over all records of the silos that answer.

    Each value has its standard error by noise. Mean and missing share have a 95 per cent interval,
    which includes the sampling error. Asks every silo `releases(features, classes, schema)` times.

    Ranges and units are those of the public schema. Without one, a range is made of public bins
    (powers of two) that stand clear of the noise: values outside are clamped to it, for mean and
    deviation too. Missing values count for neither of these.
    """
    units = units_of(schema, features)
    if units is None:
        histogram = Histogram(EDGES, len(features))
        shares = ask_pooled(fed, histogram, mechanism, counts).mean
        low, high = occupied(torch.from_numpy(shares).reshape(len(features), -1))
        shown = torch.stack([low, high], 1).numpy()
    else:
        low, high = torch.tensor([unit.range for unit in units], dtype=torch.float64).T
        shown = np.array([unit.shown for unit in units])
    absent = ask_pooled(fed, MissingRates(len(features)), mechanism, counts)
    found = ask_pooled(fed, Moments(low.contiguous(), high.contiguous()), mechanism, counts)
    u, square = found.mean.reshape(2, -1)
    rows = []
    for j, name in enumerate(features):
        row = scaled(u[j], square[j], absent.mean[j], found.noise, absent.noise, found.records)
        rows.append({"feature": name} | _in_unit(row, *shown[j]))
    return {
        "features": rows,
        "classes": _classes(fed, mechanism, classes, counts) if classes else [],
        "units": units is not None,
    }


def scaled(
    total: float, square: float, missing: float, noise: float, missing_noise: float, n: int
) -> dict[str, float]:
    """Return the figures of one feature that is scaled to [-1, 1].

    `total` and `square` are the noisy means of u and u^2 over all n records, where a missing value
    counts as 0. The mean of the others is total / present, with present = 1 - missing. Its noise
    follows by the delta method.
    """
    present = max(1 - missing, 0.05)
    mean = total / present
    second = min(max(square / present, 0.0), 1.0)
    error = math.hypot(noise, mean * missing_noise) / present
    inside = min(max(mean, -1.0), 1.0)
    deviation = math.sqrt(max(second - inside**2, 1e-6))
    half = Z * math.hypot(error, deviation / math.sqrt(n * present))
    share = min(max(missing, 0.0), 1.0)
    spread = math.sqrt((n * share + 0.5) / (n + 1) * (1 - (n * share + 0.5) / (n + 1)) / n)
    away = Z * math.hypot(missing_noise, spread)
    return {
        "mean": inside,
        "mean_error": error,
        "mean_low": min(max(mean - half, -1.0), inside),
        "mean_high": max(min(mean + half, 1.0), inside),
        "deviation": deviation,
        "deviation_error": min(error * math.sqrt(1 + 4 * inside**2) / (2 * deviation), 1.0),
        "missing": share,
        "missing_error": missing_noise,
        "missing_low": max(share - away, 0.0),
        "missing_high": min(share + away, 1.0),
    }


def _in_unit(row: dict[str, float], low: float, high: float) -> dict[str, float]:
    """Return the figures in the unit in which [-1, 1] is the range from low to high."""
    half = (high - low) / 2
    found = {"low": float(low), "high": float(high)}
    for name, value in row.items():
        if name in ("mean", "mean_low", "mean_high"):
            value = low + half * (value + 1)
        elif not name.startswith("missing"):
            value = half * value
        found[name] = float(value)
    return found


def releases(features: Sequence[str], classes: Sequence[str], schema: Schema | None) -> int:
    """Return how many releases a profile takes of each silo."""
    ranges = units_of(schema, features) is None
    return 2 + int(ranges) + int(bool(classes))


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
