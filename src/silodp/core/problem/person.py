"""A person as the unit that is protected: all rows of one person are one record, and count together
as one.

A record's features are then (P, k) and its targets (P,), with P = `rows` places whoever the person
is: a cap that is public, so that no shape follows how many rows anybody has. A place without a row
has the target that `nowhere` gives, which no row has, and features of the person's first row, so
that a loss which is finite on the rows is finite on it too. f0 of a person is the mean or the sum
of its rows' losses; its gradient is clipped as one vector. Whatever else is averaged over records
is, of a person, the average over its rows (`averaged`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

COMBINE = ("mean", "sum")
ROWS = 8
MOST = 1000
"""The cap where the schema names none, and the largest that it may name."""
BY_ROW = (
    'Privacy is per row. If a patient can have several rows, set `person = "patient_id"` in the '
    "schema."
)


@dataclass(frozen=True)
class Person:
    """Whose rows belong together: those with the same value in `column`, the first `rows` of them,
    the others are dropped.
    """

    column: str
    rows: int = ROWS
    combine: str = "mean"

    def loss(self, each: Tensor, y: Tensor) -> Tensor:
        """(...,): f0 of each person, from the losses (..., P) of what is at its places."""
        import torch

        real = present(y)
        total = torch.where(real, each, 0).sum(-1)
        if self.combine == "sum":
            return total
        return total / real.sum(-1).clamp(min=1)

    def said(self) -> str:
        return (
            f"epsilon is for a person: all rows with one {self.column} together, of which "
            f"{self.rows} at most are used"
        )


def unit(person: Person | None) -> str:
    """One sentence: what epsilon is for."""
    if person:
        return f"{person.said()}.".replace("epsilon", "Epsilon", 1)
    return BY_ROW


def nowhere(floating: bool) -> float:
    """The target at a place that has no row."""
    return float("nan") if floating else -1


def present(y: Tensor) -> Tensor:
    """As y, bool: True at a place that has a row."""
    return y == y if y.is_floating_point() else y >= 0


def filled(y: Tensor) -> Tensor:
    """The targets (..., P) with that of the first row wherever there is none: what is computed
    there is then left out, and never NaN by itself.
    """
    import torch

    return torch.where(present(y), y, y[..., :1])


def averaged(
    rows: Callable[[Tensor, Tensor], Tensor], at_once: int = MOST
) -> Callable[[Tensor, Tensor], Tensor]:
    """Vectors of persons from those of rows: of each the average over its rows, for x (m, P, ...)
    and y (m, P).

    An average of vectors within a norm is within it, one of vectors with entries in [0, 1] has such
    entries, and one of vectors whose entries sum to 1 at most has entries that do: what bounds a
    row bounds a person. Of each person `at_once` places are asked about at a time.
    """
    import torch

    def of_persons(x: Tensor, y: Tensor) -> Tensor:
        real = present(y)
        total = torch.zeros(())
        for own, target, there in zip(
            *(part.split(at_once, 1) for part in (x, filled(y), real)), strict=True
        ):
            each = rows(own.flatten(0, 1), target.flatten()).unflatten(0, there.shape)
            total = torch.where(there[..., None], each, 0).sum(1) + total
        return total / real.sum(1, keepdim=True).clamp(min=1)

    return of_persons
