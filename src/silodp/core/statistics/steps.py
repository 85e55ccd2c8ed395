"""Noisy local steps inside a silo."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from silodp.core.numbers import Number


@dataclass(frozen=True, eq=False)
class LocalSteps:
    """`steps` noisy proximal gradient steps from w inside the silo; the answer is the silo's last point minus w.

    Each step is a clipped mean gradient with noise of its own, so the answer costs what `steps` releases of Grad cost.
    """

    w: Tensor
    steps: int
    step: Number

    @property
    def releases(self) -> int:
        return self.steps

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape)


@dataclass(frozen=True, eq=False)
class SteeredSteps(LocalSteps):
    """LocalSteps each of which adds `drift` to its noisy gradient: a public vector for the silo that is asked, as SCAFFOLD's c - c_i.

    Nothing but the noisy gradients depends on records, so the answer costs what LocalSteps cost.
    """

    drift: Tensor
