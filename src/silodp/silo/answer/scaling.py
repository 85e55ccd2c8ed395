"""Record-level feature statistics for private scaling. Each record's vector has a norm bound that no value can break."""

from __future__ import annotations

import torch
from torch import Tensor

from silodp.silo.answer.slots import Rows
from silodp.silo.data.records import Records


def histogram_sum(records: Records, edges: Tensor) -> Tensor:
    """(N, features x bins) counts: each feature of a record falls in exactly one bin (non-finite values in none), so its norm is at most
    sqrt(features)."""
    x = _own(records)
    bins = torch.bucketize(x.contiguous(), edges.to(x))
    inside = torch.isfinite(x) & records.mask.unsqueeze(-1)
    one_hot = torch.zeros(len(records), x.shape[2], len(edges) + 1, dtype=torch.float64)
    one_hot.scatter_add_(2, bins.transpose(1, 2), inside.transpose(1, 2).double())
    return one_hot.flatten(1)


def moments_sum(records: Records, low: Tensor, high: Tensor) -> Tensor:
    """(N, 2 features): sums of u and u^2, u the feature clamped to its public range and mapped to [-1, 1]; norm at most sqrt(2 features)."""
    x = _own(records).double()
    u = (2 * (x - low) / (high - low) - 1).clamp(-1, 1).nan_to_num(0.0) * records.mask.unsqueeze(-1)
    return torch.cat([u.sum(1), u.square().sum(1)], dim=1)


def histogram_rows(edges: Tensor) -> Rows:
    """The rows of `histogram_sum`: each feature one-hot over the bins, a value that is not finite in none; norm <= sqrt(features)."""

    def rows(x: Tensor, y: Tensor) -> Tensor:
        x = x.flatten(1).double().contiguous()
        hot = torch.nn.functional.one_hot(torch.bucketize(x, edges), len(edges) + 1)
        return (hot * torch.isfinite(x)[..., None]).flatten(1).double()

    return rows


def moment_rows(low: Tensor, high: Tensor) -> Rows:
    """The rows of `moments_sum`: u and u^2, u the feature clamped to its public range and mapped to [-1, 1]; norm <= sqrt(2 features)."""

    def rows(x: Tensor, y: Tensor) -> Tensor:
        u = (2 * (x.flatten(1).double() - low) / (high - low) - 1).clamp(-1, 1).nan_to_num(0.0)
        return torch.cat([u, u.square()], 1)

    return rows


def _own(records: Records) -> Tensor:
    """(N, n, features): NaN where a value is missing, though one was filled in."""
    return records.x.masked_fill(records.absent, torch.nan).flatten(2)
