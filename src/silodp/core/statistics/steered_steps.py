"""Take noisy local steps with a different public pull for each silo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from silodp.core.fields import POINT
from silodp.core.statistics.local_steps import LocalSteps


@dataclass(frozen=True, eq=False)
class SteeredSteps(LocalSteps):
    """LocalSteps where each step adds `drift` to its noisy gradient.

    `drift` is a public vector for this silo, like SCAFFOLD's c - c_i.

    Sensitivity: the same as of LocalSteps, and the same cost. Only the noisy gradients depend on
    records.
    """

    drift: Tensor
    wire: ClassVar = LocalSteps.wire | {"drift": POINT}

    @property
    def pull(self) -> Tensor:
        """Return the drift."""
        return self.drift
