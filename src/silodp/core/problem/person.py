"""Protect a person as one unit: all rows of one person are one record.

A record's features are then (P, k) and its targets (P,), with P = `rows` places for every person.
This cap is public, so no shape depends on how many rows a person has. A place without a row has the
target that `nowhere` gives, which no row has, and the features of the person's first row. So a loss
that is finite on the rows is finite on such a place. f0 of a person is the mean or the sum of its
rows' losses. Its gradient is clipped as one vector. For any other average over records, a person's
vector is the average over its rows (`averaged`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

COMBINE = ("mean", "sum")
ROWS = 8
"""The rows of a person that are used if the schema names no number."""
MOST = 1000
"""The largest number that a schema may name."""
BY_ROW = (
    'Privacy is per row. If a patient can have several rows, set `person = "patient_id"` in the '
    "schema."
)


@dataclass(frozen=True)
class Person:
    """Which rows belong to one person: those with the same value in `column`.

    The first `rows` of them are used, and the others are dropped.
    """

    column: str
    rows: int = ROWS
    combine: str = "mean"

    def loss(self, each: Tensor, y: Tensor) -> Tensor:
        """Return f0 of each person (...,), from the losses (..., P) at its places."""
        import torch

        real = present(y)
        total = torch.where(real, each, 0).sum(-1)
        if self.combine == "sum":
            return total
        return total / real.sum(-1).clamp(min=1)

    def said(self) -> str:
        """Return a clause about what epsilon is for."""
        return (
            f"epsilon is for a person: all rows with one {self.column} together, of which "
            f"{self.rows} at most are used"
        )


def unit(person: Person | None) -> str:
    """Return one sentence about what epsilon is for."""
    if person:
        return f"{person.said()}.".replace("epsilon", "Epsilon", 1)
    return BY_ROW


def nowhere(floating: bool) -> float:
    """Return the target at a place that has no row."""
    if floating:
        return float("nan")
    return -1


def present(y: Tensor) -> Tensor:
    """Return a bool for each target of y: whether the place has a row."""
    if y.is_floating_point():
        return ~y.isnan()
    return y >= 0


def filled(y: Tensor) -> Tensor:
    """Return the targets (..., P), with the first row's target where there is no row.

    What is computed at such a place is left out later. It must not be NaN by itself.
    """
    import torch

    return torch.where(present(y), y, y[..., :1])


def averaged(
    rows: Callable[[Tensor, Tensor], Tensor], at_once: int = MOST
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the vectors of persons from the vectors of rows, for x (m, P, ...) and y (m, P).

    A person's vector is the average over its rows. What bounds a row bounds a person:

    1. An average of vectors within a norm is within this norm.
    2. An average of vectors with entries in [0, 1] has such entries.
    3. An average of vectors whose entries sum to at most 1 has the same property.

    `at_once` places of each person are computed together.
    """
    import torch

    def of_persons(x: Tensor, y: Tensor) -> Tensor:
        """Return the average vectors of these persons."""
        real = present(y)
        total = torch.zeros(())
        parts = (part.split(at_once, 1) for part in (x, filled(y), real))
        for features, target, exists in zip(*parts, strict=True):
            each = rows(features.flatten(0, 1), target.flatten()).unflatten(0, exists.shape)
            total = torch.where(exists[..., None], each, 0).sum(1) + total
        return total / real.sum(1, keepdim=True).clamp(min=1)

    return of_persons
