"""Noisy local steps inside a silo."""

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
    """`steps` noisy proximal gradient steps from w inside the silo; the answer is the silo's last
    point minus w.

    Each step is a clipped mean gradient with noise of its own, so the answer costs what `steps`
    releases of Grad cost.

    Sensitivity: that of `Grad`, 2 C, at each step: its point follows from w, public numbers and the
    noisy gradients before it, and a release may be asked for at a point that earlier releases
    determine (adaptive composition: mu^2 adds up). The last point is post-processing of them.
    """

    w: Tensor
    steps: int
    step: Number
    wire: ClassVar = {"w": POINT, "steps": INTEGER, "step": REAL}

    @property
    def releases(self) -> int:
        return self.steps

    @property
    def gain(self) -> float:
        return float(torch.as_tensor(self.step).max()) * math.sqrt(self.steps)

    @property
    def pull(self) -> Tensor | float:
        """What each step adds to its noisy gradient: public."""
        return 0.0

    def check(self, dim: int, runs: int) -> None:
        super().check(dim, runs)
        step = torch.as_tensor(self.step)
        positive = step.shape in ((), (runs, 1)) and bool(((step > 0) & torch.isfinite(step)).all())
        if type(self.steps) is not int or self.steps < 1 or not positive:
            raise Refused("steps")
