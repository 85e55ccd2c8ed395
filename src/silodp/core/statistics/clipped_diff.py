"""Subtract two gradients of each record, after clipping each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from silodp.core.errors import Refused
from silodp.core.fields import REAL
from silodp.core.numbers import Number
from silodp.core.statistics.grad_diff import GradDiff


@dataclass(frozen=True, eq=False)
class ClippedDiff(GradDiff):
    """clip(grad f0(w, x)) - clip(grad f0(reference, x)) of each record.

    Each of the two gradients is clipped to `limit` before the subtraction. The difference is at
    most 2 limit long. The mechanism then clips the difference as one vector, like any other. A clip
    of 2 limit leaves it unchanged.

    Sums of such differences telescope: with a clipped gradient at the reference they add up to the
    clipped gradient at w. Clipping only the difference does not give that.

    Sensitivity: 2 C, with the mechanism's clip C. One replaced record moves the sum by at most
    that, whatever the limit is.
    """

    limit: Number
    wire: ClassVar = GradDiff.wire | {"limit": REAL}

    def check(self, dim: int, runs: int) -> None:
        """Raise Refused as `Statistic.check` does, and for a limit that is not positive."""
        super().check(dim, runs)
        limit = torch.as_tensor(self.limit)
        if limit.shape not in ((), (runs, 1)) or not bool((limit > 0).all()):
            raise Refused("clip")
