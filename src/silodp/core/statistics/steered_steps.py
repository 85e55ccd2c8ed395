"""Noisy local steps with a public pull of their own for each silo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from silodp.core.fields import POINT
from silodp.core.statistics.local_steps import LocalSteps


@dataclass(frozen=True, eq=False)
class SteeredSteps(LocalSteps):
    """LocalSteps each of which adds `drift` to its noisy gradient: a public vector for the silo
    that is asked, as SCAFFOLD's c - c_i.

    Sensitivity: nothing but the noisy gradients depends on records, so it is that of LocalSteps,
    and so is the cost.
    """

    drift: Tensor
    wire: ClassVar = LocalSteps.wire | {"drift": POINT}

    @property
    def pull(self) -> Tensor:
        return self.drift
