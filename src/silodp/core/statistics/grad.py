"""Gradients of the records, and differences of gradients at two points."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Grad:
    """grad f0(w, x) of each record. w has shape (J, d), one point per run."""

    w: Tensor
    releases: int = field(default=1, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a mean answer."""
        return tuple(self.w.shape)


@dataclass(frozen=True, eq=False)
class GradDiff:
    """grad f0(w, x) - grad f0(reference, x) of each record, clipped as one vector."""

    w: Tensor
    reference: Tensor
    releases: int = field(default=1, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape)
