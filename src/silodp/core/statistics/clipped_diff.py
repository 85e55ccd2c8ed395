"""Differences of two gradients that are clipped each by itself."""

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
    """clip(grad f0(w, x)) - clip(grad f0(reference, x)) of each record, each of the two gradients
    clipped to `limit` before they are subtracted.

    The difference is then at most 2 limit long, and is clipped as one vector by the mechanism like
    any other: a clip of 2 limit leaves it as it is. Sums of such differences telescope: added to a
    clipped gradient at the reference they give the one at w, which clipping the difference itself
    does not. Sensitivity: the mechanism's clip C is what counts. One replaced record moves the sum
    by at most 2 C, whatever the limit.
    """

    limit: Number
    wire: ClassVar = GradDiff.wire | {"limit": REAL}

    def check(self, dim: int, runs: int) -> None:
        super().check(dim, runs)
        limit = torch.as_tensor(self.limit)
        if limit.shape not in ((), (runs, 1)) or not bool((limit > 0).all()):
            raise Refused("clip")
