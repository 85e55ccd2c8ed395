"""Coefficients of a linear regression with intervals and p-values that include the privacy noise,
from moments that are private already.

With a = (1, x), M = mean a a', m = mean a y and A = M^-1, the estimate is A m. To first order its
error is A (u + e - E theta).

u is the sampling error. Its covariance is sigma^2 M / n if records have equal weight, and at most
that times the largest weight if long records are scaled down.

e - E theta is the noise. Its entries have variance s^2 off the diagonal and twice that on it, so
its covariance is s^2 ((1 + |theta|^2) I + theta theta').

To second order, noise in M lengthens the estimate by s^2 A (tr A + A) theta. This is subtracted,
and the residual variance is corrected in the same way. Both need the noise of A to be small:
`coverage` repeats sampling and noise around the estimate and measures how often such intervals
contain it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Column
from silodp.core.quality import Z
from silodp.core.statistics.gram import CROSS, DIAGONAL, Gram
from silodp.server.estimates.moments import Bought, bought

REPEATS = 2000
MOST = 2000
SOUND = (0.93, 0.97)
"""Measured coverage between which an interval is called 95 %."""


@dataclass(frozen=True)
class Coefficients:
    """(J, 1 + F), the constant first: estimates, their standard errors, and of these the part that
    is privacy noise.
    """

    value: Tensor
    error: Tensor
    noise: Tensor
    solvable: Tensor
    """(J,): whether the noisy products have an inverse that means anything."""

    @property
    def low(self) -> Tensor:
        return self.value - Z * self.error

    @property
    def high(self) -> Tensor:
        return self.value + Z * self.error

    @property
    def p_value(self) -> Tensor:
        """Return the p-value of no effect, by the normal law."""
        return torch.special.erfc(self.value.abs() / self.error / math.sqrt(2))


def coefficients(full: Tensor, noise: Tensor, records: Tensor, most: float = 1.0) -> Coefficients:
    """Return coefficients from mean products (J, p, p) of (1, x, y), the standard deviation (J, 1)
    of a released coordinate's noise, and the number of records (J, 1). `most` is the largest weight
    that a record can have: with weights up to it, the sampling error is at most that of as many
    equal ones.

    `most` is the largest weight that a record can have: with weights up to it, the sampling error
    is at most that of as many equal ones.
    """
    size = full.shape[-1] - 1
    s2 = (noise * DIAGONAL / CROSS).square()
    weight = full[:, 0, 0].clamp_min(1e-6)[:, None]
    m = full[:, :size, :size]
    eye = torch.eye(size, dtype=full.dtype)
    solvable = torch.linalg.eigvalsh(m)[:, 0] > 2 * s2[:, 0].sqrt()
    a = torch.linalg.inv(torch.where(solvable[:, None, None], m, eye))
    theta = (a @ full[:, :size, size:])[..., 0]
    trace = a.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)
    theta = theta - s2 * (
        trace * (a @ theta[..., None])[..., 0] + (a @ a @ theta[..., None])[..., 0]
    )
    through = (a @ theta[..., None])[..., 0]
    length = 1 + theta.square().sum(1, keepdim=True)
    residual = full[:, size, size, None] - (full[:, :size, size] * theta).sum(1, keepdim=True)
    residual = residual + s2 * (length * trace + (theta * through).sum(1, keepdim=True))
    variance = (residual / weight).clamp_min(0.0) / (1 - size / records).clamp_min(0.1)
    by_noise = s2 * (length * (a @ a).diagonal(dim1=1, dim2=2) + through.square())
    by_sample = most * variance * a.diagonal(dim1=1, dim2=2) / records
    return Coefficients(theta, (by_noise + by_sample).sqrt(), by_noise.sqrt(), solvable)


def of_bought(found: Bought) -> Coefficients:
    if found.gram.classes:
        raise BadInput(
            "intervals are for a number that is predicted by --model linear; a logistic "
            "model's have none here"
        )
    made = coefficients(
        found.gram.matrix(found.mean), found.noise, found.records, heaviest(found.gram)
    )
    if not bool(made.solvable.all()):
        raise BadInput(
            "the noise hides how the features go together, so no interval can be given; "
            "use more records, fewer columns or a larger epsilon"
        )
    return made


def coverage(found: Bought, repeats: int = REPEATS) -> Tensor:
    """(1 + F,): the share of intervals that hold the estimate when sampling and noise are repeated
    around it.

    Records are drawn as normal ones with the moments that were bought, their negative eigenvalues
    left out; of many, MOST, whose sampling error is scaled down to that of all.
    """
    made = of_bought(found)
    gram = found.gram
    random = torch.Generator().manual_seed(0)
    full = gram.matrix(found.mean)[0]
    size = gram.size - 1
    n = max(gram.size + 1, round(float(found.records)))
    weight = full[0, 0].clamp_min(1e-6)
    theta = made.value[0]
    mean = full[1:size, 0] / weight
    values, vectors = torch.linalg.eigh(full[1:size, 1:size] / weight - mean[:, None] * mean)
    spread = ((full[size, size] - full[:size, size] @ theta) / weight).clamp_min(1e-6).sqrt()
    few = min(n, MOST)
    drawn = list[Tensor]()
    chunk = max(1, 2**22 // (min(n, MOST) * gram.size))
    root = vectors * values.clamp_min(0).sqrt()
    line = torch.cat([torch.ones(1), mean, theta[:1] + theta[1:] @ mean])
    mix = torch.zeros(
        gram.size, size, dtype=torch.float64
    )  # z is `line`, and this times standard normals
    mix[1:size, : size - 1], mix[size, : size - 1], mix[size, size - 1] = (
        root,
        theta[1:] @ root,
        spread,
    )
    exact = line[:, None] * line + mix @ mix.T
    for start in range(0, repeats, chunk):
        z = (
            torch.randn(
                min(chunk, repeats - start), few, size, generator=random, dtype=torch.float64
            )
            @ mix.T
            + line
        )
        sample = exact + (z.mT @ z / few - exact) * math.sqrt(few / n)
        drawn.append(covers(weight * sample, theta, found.noise, n, random, heaviest(gram)))
    return torch.cat(drawn).double().mean(0)


def covers(
    full: Tensor, theta: Tensor, noise: Tensor, n: float, random: torch.Generator, most: float = 1.0
) -> Tensor:
    """(R, 1 + F): whether intervals from R samples' mean products (R, p, p) of n records, and fresh
    noise, hold theta. No interval is no cover.
    """
    each = torch.randn(full.shape, generator=random, dtype=torch.float64).triu()
    each = torch.where(torch.eye(full.shape[-1], dtype=torch.bool), each, each * DIAGONAL / CROSS)
    noise = noise.expand(len(full), 1)
    made = coefficients(
        full + noise[..., None] * (each + each.triu(1).mT), noise, torch.full_like(noise, n), most
    )
    return (made.low <= theta) & (theta <= made.high) & made.solvable[:, None]


def heaviest(gram: Gram) -> float:
    """Return the largest weight of a record under the bound: of one whose features are all zero."""
    return min(1.0, float(gram.bound) ** 2 / 2)


def never_scaled(gram: Gram) -> bool:
    """Return whether the bound leaves every record of features within [-1, 1] as it is."""
    return float(gram.bound) ** 2 >= (2 + gram.features) * (1 - 1e-12)


# --- `silodp stats estimate`: what the moments of a run say of each column, in the columns' and the
# label's own units ---------------------------


def estimated(folder: Path, opened: Any) -> dict[str, Any]:
    """Return a row for the constant and each feature, for --json. `opened` is the run's model with
    its schema and scaling.
    """
    found = bought(folder)
    schema = opened.schema
    names = list(schema.features)
    if len(names) != found.gram.features:
        raise BadInput(
            f"the run in {folder} was on features that a map has made, whose coefficients "
            "have no columns; leave --feature-map out"
        )
    made = of_bought(found)
    measured = coverage(found)
    low, high = schema.label.range
    unit = found.gram.cap * (high - low) / 2
    halves = [half for column in schema.columns for half in _halves(column)]
    scale = [
        unit,
        *(
            unit / (half * float(s))
            for half, s in zip(halves, opened.reading.scale.tolist(), strict=True)
        ),
    ]
    rows = []
    for j, name in enumerate(["constant", *names]):
        parts = {
            "estimate": made.value,
            "error": made.error,
            "noise": made.noise,
            "low": made.low,
            "high": made.high,
        }
        row = {key: float(part[0, j]) * scale[j] for key, part in parts.items()}
        row["estimate"] += (low + high) / 2 * (j == 0)
        row["low"], row["high"] = (
            row[key] + (low + high) / 2 * (j == 0) for key in ("low", "high")
        )
        rows.append(
            {"name": name}
            | row
            | {"p_value": float(made.p_value[0, j]), "coverage": float(measured[j])}
        )
    called = never_scaled(found.gram) and all(
        SOUND[0] <= row["coverage"] <= SOUND[1] for row in rows
    )
    return {
        "title": "Coefficients with 95 % intervals"
        if called
        else "Coefficients with intervals that are not called 95 %",
        "called_95": called,
        "never_scaled": never_scaled(found.gram),
        "records": float(found.records),
        "repeats": REPEATS,
        "coefficients": rows,
    }


def _halves(column: Column) -> list[float]:
    """Return how much of the column's own unit one unit of each of its features is."""
    low, high = column.range
    own = {
        "number": (high - low) / 2 if math.isfinite(high - low) else 1.0,
        "boolean": 0.5,
        "category": 1.0,
    }[column.type]
    return [own] * (len(column.categories) or 1) + [1.0] * (
        len(column.features) - (len(column.categories) or 1)
    )


def sentence(found: dict[str, Any]) -> str:
    """Return how the intervals are to be taken."""
    told = (
        f"Coverage is measured: of {found['repeats']:,} repeats of sampling and noise around "
        "the estimate, the share whose interval contains the estimate."
    )
    if found["called_95"]:
        return told
    if not found["never_scaled"]:
        return told + (
            " Long records were scaled down by the clip, which only makes intervals wider; "
            "train with --clip 2 to avoid this."
        )
    return told + " It is not 95 % here: the noise is large, and the columns' effects are small."
