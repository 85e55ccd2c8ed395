"""Take noisy local steps inside a silo, with or without a public pull for each silo."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER, POINT, REAL
from silodp.core.numbers import Number
from silodp.core.statistics.statistic import Statistic


@dataclass(frozen=True, eq=False)
class LocalSteps(Statistic):
    """`steps` noisy proximal gradient steps from w inside the silo.

    The answer is the silo's last point minus w. Each step is a clipped mean gradient with its own
    noise. So the answer costs what `steps` releases of Grad cost.

    Sensitivity: 2 C at each step, as for `Grad`. A step's point depends on w, on public numbers and
    on the noisy gradients before it. A release may depend on earlier releases (adaptive
    composition: mu^2 adds up). The last point is post-processing of the noisy gradients.
    """

    w: Tensor
    steps: int
    step: Number
    wire: ClassVar = {"w": POINT, "steps": INTEGER, "step": REAL}

    @property
    def releases(self) -> int:
        """Return the number of steps."""
        return self.steps

    @property
    def gain(self) -> float:
        """Return step x sqrt(steps): the answer is a sum of so many steps with independent
        noise.
        """
        return float(torch.as_tensor(self.step).max()) * math.sqrt(self.steps)

    @property
    def pull(self) -> Tensor | float:
        """Return the public vector that each step adds to its noisy gradient."""
        return 0.0

    def check(self, dim: int, runs: int) -> None:
        """Raise Refused as `Statistic.check` does, and for a number or length of steps that is not
        positive.
        """
        super().check(dim, runs)
        step = torch.as_tensor(self.step)
        positive = step.shape in ((), (runs, 1)) and bool(((step > 0) & torch.isfinite(step)).all())
        if type(self.steps) is not int or self.steps < 1 or not positive:
            raise Refused("steps")


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
