"""Compute all products of two of a record's features and label, which every linear model needs."""

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
from silodp.core.statistics.statistic import Rowed, Rows, one_hot

MAX_FACTORS = 2**11
"""The most factors of a query.

A query is a few numbers long. It must not make a silo allocate more memory than its answer needs.
"""
DIAGONAL = 29
CROSS = 41
"""The proportion in which squares and products of two factors are released.

It is 1 to sqrt(2), rounded down: 41^2 = 2 x 29^2 - 1.
"""


class Factored(Rowed):
    """Products of two factors: z_i^2 and (CROSS / DIAGONAL) z_i z_j for i < j, summed over terms.

    A record has `terms` vectors z_t of `size` factors, whose squares sum to at most bound^2.

    Sensitivity, a formal guarantee. Let Z = sum_t z_t z_t^T and Z' belong to two records.

    1. Z is positive semidefinite, and its trace sum_t |z_t|^2 is at most B^2. So |Z|_F <= B^2, and
       <Z, Z'> >= 0.
    2. So |Z - Z'|_F^2 = |Z|_F^2 + |Z'|_F^2 - 2 <Z, Z'> <= 2 B^4. Two orthogonal vectors reach it.
    3. The released vector v has
       |v - v'|^2 = sum_i (Z_ii - Z'_ii)^2 + (CROSS / DIAGONAL)^2 sum_{i<j} (Z_ij - Z'_ij)^2
       <= |Z - Z'|_F^2, since CROSS^2 <= 2 DIAGONAL^2.
    4. So one replaced record moves a sum by at most sqrt(2) B^2, where twice the norm would be
       2 B^2. The clip is half of that, B^2 / sqrt(2), rounded up.

    A gate verifies this bound for its integers, whatever the floats were
    (`silo.answer.integers.multiplied`).
    """

    in_totals = True
    view = "filled"
    terms = 1
    """How many vectors of factors a record has."""

    @property
    def size(self) -> int:
        """Return the number of factors."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a mean answer: one number for each pair i <= j of factors."""
        if isinstance(self.bound, Tensor) and self.bound.ndim:
            runs = len(self.bound)
        else:
            runs = 1
        return runs, self.size * (self.size + 1) // 2

    @property
    def norm(self) -> Number:
        """Return the smallest clip that a query may have.

        It satisfies 2 norm^2 >= bound^4 exactly.
        """
        if isinstance(self.bound, Tensor):
            return torch.tensor(
                [[_half(float(b))] for b in self.bound.flatten()], dtype=torch.float64
            ).reshape(self.bound.shape)
        return _half(self.bound)

    def check_reach(self, clip: float) -> None:
        """Raise Refused unless 2 clip^2 >= bound^4, by exact arithmetic."""
        if 2 * Fraction(clip) ** 2 < Fraction(float(self.bound)) ** 4:
            raise Refused("clip")

    def factors(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives each record's factors (m, terms size)."""
        raise NotImplementedError

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives each record's weighted products."""
        factors = self.factors(problem, run, dtype)
        i, j = pairs(self.size)
        weight = torch.where(i == j, 1.0, torch.tensor(CROSS / DIAGONAL, dtype=torch.float64))

        def rows(x: Tensor, y: Tensor) -> Tensor:
            """Return the weighted products (m, d) of these records."""
            z = factors(x, y).cpu().unflatten(1, (self.terms, self.size))
            return sum(z[:, t, i] * z[:, t, j] for t in range(self.terms)) * weight

        return rows

    def matrix(self, value: Tensor) -> Tensor:
        """Return the symmetric matrices (J, size, size) of mean products, from a mean answer (J,
        d).
        """
        i, j = pairs(self.size)
        full = value.new_zeros(len(value), self.size, self.size)
        products = torch.where(i == j, value, value * (DIAGONAL / CROSS))
        full[:, i, j] = products
        full[:, j, i] = products
        return full


@dataclass(frozen=True, eq=False)
class Gram(Factored):
    """z_i^2 and (CROSS / DIAGONAL) z_i z_j for i < j, of z = (1, x, y) s: the first `features`
    features, and the label.

    y is +1 or -1 for two classes and one-hot for more classes. If `classes` is 0, y is the
    label / cap, clamped to [-1, 1]. s is the largest number up to 1 with
    s^2 (2 + |x|^2) <= bound^2. It depends on the features alone, since |y| <= 1. So in a linear
    regression a record that is scaled down has a smaller weight, but the same slope. A record with
    a feature that is not finite, or too large, is zero.

    Sensitivity: |z| <= bound, so one replaced record moves a sum by at most sqrt(2) bound^2
    (`Factored` with one term).
    """

    features: int
    classes: int
    cap: float
    bound: Number
    wire: ClassVar = {"features": INTEGER, "classes": INTEGER, "cap": REAL, "bound": REAL}

    @property
    def labels(self) -> int:
        """Return how many factors encode the label."""
        if self.classes > 2:
            return self.classes
        return 1

    @property
    def size(self) -> int:
        """Return the number of factors: the constant, the features and the label."""
        return 1 + self.features + self.labels

    def _check_shapes(self, dim: int, runs: int) -> None:
        """Raise Refused for a field of another type or range.

        The fourth power of a bound stays within the range of a float.
        """
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
            raise Refused("clip")
        if not 0 < self.cap < math.inf:
            raise Refused("clip")

    def check_silo(self, features: int, held_out: int) -> None:
        """Raise Refused if the silo has fewer features than the query."""
        if self.features > features:
            raise Refused("shape")

    def factors(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives each record's z (m, size)."""
        if isinstance(self.bound, Tensor):
            bound = float(self.bound.flatten()[min(run, self.bound.numel() - 1)])
        else:
            bound = self.bound

        def factors(x: Tensor, y: Tensor) -> Tensor:
            """Return z (m, size) of these records."""
            x = x.flatten(1)[:, : self.features].double()
            square = x.square().sum(1, keepdim=True)
            share = (bound / (2 + square).sqrt()).clamp(max=1.0)
            z = torch.cat([torch.ones_like(share), x, self._label(y)], 1) * share
            return torch.where(square.isfinite(), z, 0.0)

        return factors

    def _label(self, y: Tensor) -> Tensor:
        """Return the factors (m, labels) that encode the labels.

        A label outside the classes, or not a number, is zero.
        """
        if self.classes > 2:
            return one_hot(y, self.classes)
        if self.classes == 2:
            return ((y == 1).double() - (y == 0).double())[:, None]
        return (y.double() / self.cap).nan_to_num(0.0).clamp(-1, 1)[:, None]


@functools.lru_cache(maxsize=8)
def pairs(size: int) -> tuple[Tensor, Tensor]:
    """Return the indices (i, j) of each product, i <= j, row by row."""
    i, j = torch.triu_indices(size, size)
    return i, j


def _half(bound: float) -> float:
    """Return B^2 / sqrt(2), rounded up."""
    half = bound * bound / math.sqrt(2)
    while 2 * Fraction(half) ** 2 < Fraction(bound) ** 4:
        half = math.nextafter(half, math.inf)
    return half
