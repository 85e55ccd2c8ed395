"""What every statistic of numbers and cells must satisfy: one replaced record moves its sum by at most 2 clip, and by as much.

Checked by brute force, through an answerer without noise, over every pair of some records, hostile ones among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from silodp.core.mechanisms import Gaussian
from silodp.core.query import Query
from silodp.core.statistics import Cells
from silodp.silo.data.records import Records
from silodp.silo.gate import Answerer, check


def check_cells(
    statistic: Cells,
    records: Sequence[tuple[Tensor, Tensor]],
    answerer: Callable[[Records], Answerer],
    *,
    dim: int,
    others: int = 4,
    reaches: float = 0.0,
) -> None:
    """Raises AssertionError unless replacing one record by another of `records` moves the sum by at most 2 clip, and `reaches` of it.

    `answerer` answers without noise, and its mean is over all records that it is given. The rest of the silo is some of `records`
    as well: what they add must not change with the record that is replaced.
    """
    clip = statistic.norm
    query = Query(statistic, Gaussian("check", clip, 1.0))
    n = others + 1
    check(query, dim, [n])
    rest = [records[i % len(records)] for i in range(others)]
    sums = []
    for one in records:
        x, y = (torch.stack(parts) for parts in zip(one, *rest, strict=True))
        sums.append(n * answerer(Records.of([(x, y)])).answer(query, [0])[0, 0].double())
    distances = torch.cdist(torch.stack(sums), torch.stack(sums))
    assert torch.stack(sums).isfinite().all(), f"{statistic}: a record makes the sum not finite"
    farthest = float(distances.max())
    assert farthest <= 2 * clip * (1 + 1e-6), (
        f"{statistic}: one replaced record moves the sum by {farthest:.9g}, but 2 clip is {2 * clip:.9g}"
    )
    assert farthest >= reaches * 2 * clip, f"{statistic}: no pair of records reaches {reaches:g} of 2 clip, but only {farthest:.9g}"
