"""Compute gradients of the records, at one point or as a difference between two points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.fields import POINT, REAL
from silodp.core.numbers import Number
from silodp.core.statistics.statistic import Statistic


@dataclass(frozen=True, eq=False)
class Grad(Statistic):
    """grad f0(w, x) of each record. w has shape (J, d), one point per run.

    Sensitivity: the mechanism clips a record's gradient over all layers, as one vector, to its clip
    C. So replacing a record moves the sum by |g - g'| <= |g| + |g'| <= 2 C, at every w. Opposite
    gradients reach this bound.
    """

    w: Tensor
    wire: ClassVar = {"w": POINT}
    in_totals = True


@dataclass(frozen=True, eq=False)
class GradDiff(Statistic):
    """grad f0(w, x) - grad f0(reference, x) of each record, clipped as one vector.

    Sensitivity: the difference is clipped to C. So replacing a record moves the sum by at most 2 C,
    however far apart the points are. This assumes nothing about the loss. A smooth loss has short
    differences and allows a small C, which matters for accuracy alone.
    """

    w: Tensor
    reference: Tensor
    wire: ClassVar = {"w": POINT, "reference": POINT}
    in_totals = True


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
