"""All products of two of a record's features and label: what every linear model is made of."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER, REAL
from silodp.core.numbers import Number
from silodp.core.problem.problem import Problem
from silodp.core.statistics.cells import one_hot
from silodp.core.statistics.statistic import Rowed, Rows

MAX_FACTORS = 2**11
"""At most: a query is a few numbers, and must not make a silo allocate more than it may be sent."""
DIAGONAL = 29
CROSS = 41
"""Squares and products of two factors are released in this proportion, which is 1 to sqrt(2) from
below: 41^2 = 2 x 29^2 - 1.
"""


@dataclass(frozen=True, eq=False)
class Gram(Rowed):
    """z_i^2 and (CROSS / DIAGONAL) z_i z_j for i < j, of z = (1, x, y) s: the first `features`
    features, and the label.

    y is +1 or -1 for two classes, one-hot for more of them, and the label / cap within [-1, 1]
    where `classes` is 0. s is the largest number up to 1 with s^2 (2 + |x|^2) <= bound^2. It
    follows from the features alone, since |y| <= 1: to a linear regression a record that is scaled
    down has a smaller weight, and no other slope. A record with a feature that is no finite number,
    or too large, is zero.

    Sensitivity, a formal guarantee. For z, z' with |z|, |z'| <= B the matrices Z = z z' and Z' of
    two records have
    |Z - Z'|_F^2 = |z|^4 + |z'|^4 - 2 <z, z'>^2 <= 2 B^4, which two orthogonal vectors reach. The
    released vector v has
    |v - v'|^2 = sum_i (Z_ii - Z'_ii)^2 + (CROSS / DIAGONAL)^2 sum_{i<j} (Z_ij - Z'_ij)^2 <= |Z -
    Z'|_F^2, since CROSS^2 <= 2 DIAGONAL^2. So one
    replaced record moves a sum by at most sqrt(2) B^2, where twice the norm would be 2 B^2: the
    clip is half of that, B^2 / sqrt(2), rounded up. A gate has this for integers, whatever the
    floats were (`silo.answer.integers.multiplied`).
    """

    features: int
    classes: int
    cap: float
    bound: Number
    wire: ClassVar = {"features": INTEGER, "classes": INTEGER, "cap": REAL, "bound": REAL}
    in_totals = True
    view = "filled"

    @property
    def labels(self) -> int:
        """How many factors say the label."""
        return self.classes if self.classes > 2 else 1

    @property
    def size(self) -> int:
        """How many factors there are: the constant, the features, the label."""
        return 1 + self.features + self.labels

    @property
    def shape(self) -> tuple[int, ...]:
        if isinstance(self.bound, Tensor) and self.bound.ndim:
            runs = len(self.bound)
        else:
            runs = 1
        return runs, self.size * (self.size + 1) // 2

    @property
    def norm(self) -> Number:
        """The smallest clip that may be asked for: 2 norm^2 >= bound^4, exactly."""
        if isinstance(self.bound, Tensor):
            return torch.tensor(
                [[_half(float(b))] for b in self.bound.flatten()], dtype=torch.float64
            ).reshape(self.bound.shape)
        return _half(self.bound)

    def check_reach(self, clip: float) -> None:
        if 2 * Fraction(clip) ** 2 < Fraction(float(self.bound)) ** 4:
            raise Refused("clip")

    def _check_shapes(self, dim: int, runs: int) -> None:
        if (
            type(self.features) is not int
            or type(self.classes) is not int
            or self.features < 1
            or self.classes < 0
            or self.classes == 1
        ):
            raise Refused("shape")
        if self.size > MAX_FACTORS:
            raise Refused("shape")
        bound = torch.as_tensor(self.bound, dtype=torch.float64)
        if bound.shape not in ((), (runs, 1)) or not bool(
            ((bound > 2.0**-100) & (bound < 2.0**100)).all()
        ):
            raise Refused("clip")  # a fourth power of which no float runs out
        if not 0 < self.cap < math.inf:
            raise Refused("clip")

    def check_silo(self, features: int, held_out: int) -> None:
        if self.features > features:
            raise Refused("shape")

    def factors(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        if isinstance(self.bound, Tensor):
            bound = float(self.bound.flatten()[min(run, self.bound.numel() - 1)])
        else:
            bound = self.bound

        def factors(x: Tensor, y: Tensor) -> Tensor:
            x = x.flatten(1)[:, : self.features].double()
            square = x.square().sum(1, keepdim=True)
            share = (bound / (2 + square).sqrt()).clamp(max=1.0)
            z = torch.cat([torch.ones_like(share), x, self._label(y)], 1) * share
            return torch.where(square.isfinite(), z, 0.0)

        return factors

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        factors, (i, j) = self.factors(problem, run, dtype), pairs(self.size)
        weight = torch.where(i == j, 1.0, torch.tensor(CROSS / DIAGONAL, dtype=torch.float64))

        def rows(x: Tensor, y: Tensor) -> Tensor:
            z = factors(x, y).cpu()
            return z[:, i] * z[:, j] * weight

        return rows

    def matrix(self, value: Tensor) -> Tensor:
        """(J, size, size): the symmetric matrix of mean products in a mean answer (J, d)."""
        (i, j), full = pairs(self.size), value.new_zeros(len(value), self.size, self.size)
        full[:, i, j] = full[:, j, i] = torch.where(i == j, value, value * (DIAGONAL / CROSS))
        return full

    def _label(self, y: Tensor) -> Tensor:
        """A label that does not exist, or is no number, is zero."""
        if self.classes > 2:
            return one_hot(y, self.classes)
        if self.classes == 2:
            return ((y == 1).double() - (y == 0).double())[:, None]
        return (y.double() / self.cap).nan_to_num(0.0).clamp(-1, 1)[:, None]


@functools.lru_cache(maxsize=8)
def pairs(size: int) -> tuple[Tensor, Tensor]:
    """(i, j) of each product, i <= j, row by row."""
    i, j = torch.triu_indices(size, size)
    return i, j


def _half(bound: float) -> float:
    """B^2 / sqrt(2), rounded up."""
    found = bound * bound / math.sqrt(2)
    while 2 * Fraction(found) ** 2 < Fraction(bound) ** 4:
        found = math.nextafter(found, math.inf)
    return found
