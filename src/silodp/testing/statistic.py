"""Check that one replaced record moves a statistic's sum by what the price is for, and not more.

The check uses brute force, through an answerer without noise, over every pair of some records.
Hostile records are among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from silodp.core.mechanisms import Gaussian
from silodp.core.query import Query
from silodp.core.statistics import Statistic
from silodp.silo.data.records import Records
from silodp.silo.gate import Answerer, check

HOSTILE = (0.0, 1.0, 1e3, -1e3, 1e30, math.nan, math.inf, -math.inf)
"""The values of a hostile record, one for all features."""


def hostile_records(
    features: int, labels: Sequence[float] = (0, 1, 5, -3), *, dtype: torch.dtype = torch.float64
) -> list:
    """Return (x, y) of records from zero to NaN, each with each label. Some labels do not exist."""
    rows = [torch.full((features,), value, dtype=dtype) for value in HOSTILE] + [
        1e3 * (torch.arange(features) % 2).to(dtype)
    ]
    return [(x, torch.tensor(y)) for x in rows for y in labels]


def check_statistic(
    statistic: Statistic,
    records: Sequence[tuple[Tensor, Tensor]],
    answerer: Callable[[Records], Answerer],
    *,
    dim: int,
    clip: float | None = None,
    others: int = 4,
    reaches: float = 0.0,
) -> None:
    """Check that a statistic of yours keeps its bound.

    Raise AssertionError with one sentence if something is wrong.

    Replacing one record by another of `records` must move the sum by at most 2 clip, the distance
    that noise is added for. Some pair must reach the share `reaches` of it, because a bound far
    above all pairs wastes noise. `clip` is the smallest clip that a query may have (by default
    `statistic.norm`). `answerer` answers without noise, and its mean is over all records that it is
    given. The rest of the silo is some of `records` as well: their part must not change with the
    record that is replaced. `hostile_records` makes some records to begin with.
    """
    if clip is None:
        clip = float(statistic.norm)
    query = Query(statistic, Gaussian("check", clip, 1.0))
    n = others + 1
    check(query, dim, [n])
    releases = statistic.releases
    assert type(releases) is int, (
        f"{statistic}: counts as {releases} releases, which is not an integer"
    )
    assert releases >= 1, f"{statistic}: counts as {releases} releases, and so is free"
    rest = [records[i % len(records)] for i in range(others)]
    sums = []
    for one in records:
        x, y = (torch.stack(parts) for parts in zip(one, *rest, strict=True))
        value = answerer(Records.of([(x, y)])).answer(query, [0])
        assert value[:, 0].shape == statistic.shape, (
            f"{statistic}: an answer has shape {tuple(value[:, 0].shape)}, not {statistic.shape}"
        )
        sums.append(n * value[0, 0].double())
    assert torch.stack(sums).isfinite().all(), f"{statistic}: a record makes the sum not finite"
    farthest = float(torch.cdist(torch.stack(sums), torch.stack(sums)).max())
    assert farthest <= 2 * clip * (1 + 1e-6), (
        f"{statistic}: one replaced record moves the sum by {farthest:.9g}, but 2 clip is "
        f"{2 * clip:.9g}"
    )
    assert farthest >= reaches * 2 * clip, (
        f"{statistic}: no pair of records reaches {reaches:g} of 2 clip, but only {farthest:.9g}"
    )
