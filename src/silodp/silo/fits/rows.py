"""The rows of one silo's records, as a local fit sees them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from silodp.core.problem.person import Person, present


@dataclass(frozen=True, eq=False, repr=False)
class Rows:
    """Rows with the record, a row or a person, that each belongs to.

    A record's loss is the weighted sum of its rows' losses: the mean or the sum over a person.
    """

    x: Tensor  # (m, features), float64
    y: Tensor  # (m,)
    weight: Tensor  # (m,)
    owner: Tensor  # (m,), from 0 to records - 1
    records: int

    @classmethod
    def of(cls, x: Tensor, y: Tensor, person: Person | None) -> Rows:
        """Return the rows of records x (n, ...) and y (n,), or of persons (n, P, ...) and (n, P).

        A record with a number that is not finite is left out, as a gate counts it as zero.
        """
        finite = torch.isfinite(x.flatten(1)).all(1)
        if person is None:
            if y.is_floating_point():
                finite &= torch.isfinite(y)
            x = x[finite]
            n = len(x)
            weight = torch.ones(n, dtype=torch.float64)
            return cls(x.double(), _target(y[finite]), weight, torch.arange(n), n)
        x = x[finite]
        y = y[finite]
        there = present(y)
        owner = torch.arange(len(y))[:, None].expand(there.shape)[there]
        weight = torch.ones(len(owner), dtype=torch.float64)
        if person.combine == "mean":
            weight = weight / torch.bincount(owner, minlength=len(y))[owner]
        return cls(x[there].double(), _target(y[there]), weight, owner, len(y))

    def of_records(self, chosen: Tensor) -> Rows:
        """Return the rows of the records with these numbers, which may repeat none."""
        place = torch.full((self.records,), -1)
        place[chosen] = torch.arange(len(chosen))
        kept = place[self.owner] >= 0
        owner = place[self.owner[kept]]
        return Rows(self.x[kept], self.y[kept], self.weight[kept], owner, len(chosen))

    def by_record(self, each: Tensor) -> Tensor:
        """Return the losses (..., records) from those of the rows (..., m)."""
        total = each.new_zeros(*each.shape[:-1], self.records)
        return total.index_add(-1, self.owner, each * self.weight)

    def folds(self, count: int) -> Tensor:
        """Return the fold of each record, (records,): all rows of a person are in one.

        Records with equal first targets are dealt out evenly, so that a rare class is in each fold.
        """
        first = np.full(self.records, np.inf)
        np.minimum.at(first, self.owner.numpy(), self.y.numpy())
        random = np.random.default_rng(0).permutation(self.records)
        order = random[np.argsort(first[random], kind="stable")]
        fold = np.empty(self.records, np.int64)
        fold[order] = np.arange(self.records) % count
        return torch.from_numpy(fold)


def _target(y: Tensor) -> Tensor:
    return y.double() if y.is_floating_point() else y
