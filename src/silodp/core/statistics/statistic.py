"""Define the interface of every statistic, which gate, codec and policy use for all kinds alike.

A new statistic has one of three bases. `Statistic` is for gradients, which are clipped. `Rowed` is
for vectors that are within a norm without clipping. `Cells` is for numbers in [0, 1] and blocks of
cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.fields import POINT
from silodp.core.numbers import Number
from silodp.core.problem.person import MOST, averaged
from silodp.core.problem.problem import Problem

if TYPE_CHECKING:
    from silodp.core.mechanisms import Mechanism

Rows = Callable[[Tensor, Tensor], Tensor]
"""A function that gives the vectors (m, d) of m records.

Each vector depends on that record alone: on its features (or another `view` of it) and its target.
Here a record is one row of a file. If the unit of privacy is a person, `vectors` averages over the
person's rows.
"""


class Statistic:
    """What may be averaged over a silo's records.

    A new statistic is one file in this package, and a privacy review.

    The gate calls these methods in this order. First `check` refuses what no policy could allow.
    Then the mechanism and the sampling have their own checks. `check_silo` refuses what does not
    fit this silo. After the charge the gate calls `vectors`. Each refusal code is a function of
    query and policy alone.
    """

    wire: ClassVar[dict[str, str]]
    """The kind of each field (`core.fields`). A statistic only for simulations may have none."""
    in_totals: ClassVar[bool] = False
    """Whether a query for a total over silos may use this statistic.

    Such a statistic sums clipped vectors and does not distinguish missing values.
    """
    on_held_out: ClassVar[bool] = False
    """Whether it is computed on the held-out records. Otherwise it uses the training records."""
    view: ClassVar[str] = "filled"
    """What `rows` gets of a record.

    "filled" means its features as the model trains on them. "given" has NaN where a value is
    missing. "missing" has only which values are missing.
    """

    if TYPE_CHECKING:  # each kind is a frozen dataclass, whose own file defines its fields
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __getattr__(self, name: str) -> Any: ...

    @property
    def releases(self) -> int:
        """Return how many releases one answer costs."""
        return 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a mean answer, (J, d). By default it is the shape of the points."""
        return tuple(self.points[0].shape)

    @property
    def gain(self) -> float:
        """Return the factor by which the answer's noise exceeds the noise of one release.

        It holds if everything between the releases and the answer is linear.
        """
        return 1.0

    @property
    def points(self) -> tuple[Tensor, ...]:
        """Return the points (J, d) of the model, in the order of `wire`.

        A record's vector is its gradient at the first point, less its gradient at the second.
        """
        return tuple(
            getattr(self, name) for name, kind in getattr(self, "wire", {}).items() if kind == POINT
        )

    @property
    def about_features(self) -> int | None:
        """Return the number of features that the silo must have, or None for any number."""
        return None

    @property
    def numbers(self) -> int | None:
        """Return how many numbers in [0, 1] come before the cells (`Cells`).

        Return None for a vector within a norm.
        """
        return None

    @property
    def blocks(self) -> tuple[int, ...]:
        """Return how many cells each block has (`Cells`). A vector within a norm has none."""
        return ()

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows | None:
        """Return the function that gives the records' vectors in one of the runs.

        With `dtype`, points and ranges have this type. Return None for clipped gradients at
        `points`, which an engine computes.
        """
        return None

    def factors(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows | None:
        """Return the function that gives the factors of products (`gram.Gram`).

        A gate multiplies the factors in integers. Return None if `rows` are not products.
        """
        return None

    def vectors(
        self, problem: Problem, run: int, dtype: torch.dtype | None = None, at_once: int = MOST
    ) -> Rows | None:
        """Return `rows` for the unit of privacy, a row or a person.

        A person's vector is the average over the person's rows. An average stays within every bound
        that holds for a row, so a statistic need not distinguish the two. `at_once` is how many of
        a person's rows are computed together.
        """
        rows = self.rows(problem.by_row, run, dtype)
        if rows and problem.person:
            return averaged(rows, at_once)
        return rows

    def check(self, dim: int, runs: int) -> None:
        """Raise Refused for what no policy could allow.

        This is a point of another shape, a point that is not finite, or a field without meaning.
        """
        self._check_shapes(dim, runs)
        for point in self.points:
            # 0 x inf is NaN, and so is any sum that contains it
            if not math.isfinite((point * 0).sum().item()):
                raise Refused("not-finite")

    def _check_shapes(self, dim: int, runs: int) -> None:
        """Raise Refused for points of another shape or type."""
        if any(
            p.shape != (runs, dim) or p.dtype not in (torch.float32, torch.float64)
            for p in self.points
        ):
            raise Refused("shape")

    def check_mechanism(self, mechanism: Mechanism) -> None:
        """Raise Refused for batches or a clip that this statistic cannot use.

        Clipped vectors work with all of them.
        """

    def check_silo(self, features: int, held_out: int) -> None:
        """Raise Refused if the statistic does not fit so many features and held-out records."""

    def check_reach(self, clip: float) -> None:
        """Raise Refused if two records' vectors could be further apart than 2 clip.

        The comparison is exact. Clipped vectors cannot be further apart.
        """


class Rowed(Statistic):
    """A statistic whose vectors are bounded without clipping.

    So a query's clip may not be smaller than `norm`.
    """

    view = "given"

    @property
    def norm(self) -> Number:
        """Return the smallest clip that a query may have.

        One replaced record moves a sum by at most 2 norm.
        """
        raise NotImplementedError

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives the records' vectors, as `Statistic.rows` does."""
        raise NotImplementedError

    def check_mechanism(self, mechanism: Mechanism) -> None:
        """Raise Refused for batches, and for a clip below `norm`."""
        if not mechanism.sampling.whole:
            raise Refused("batch")
        if not bool((mechanism.clips >= self.norm).all()):
            raise Refused("clip")


class Cells(Rowed):
    """A statistic whose vectors are `numbers` in [0, 1] and then blocks of cells.

    At most one cell of a block is 1 and the rest are 0. Most statistics have one block.

    Two such vectors differ by at most 1 in each number and by sqrt(2) over each block. So one
    replaced record moves a sum by at most sqrt(numbers + 2 blocks), which is less than twice a
    norm. The clip of such a statistic is half of that, so that 2 clip is exact.
    """

    view = "filled"

    @property
    def numbers(self) -> int:
        """Return how many numbers come before the cells."""
        return 0

    @property
    def cells(self) -> int:
        """Return how many cells there are."""
        return 0

    @property
    def blocks(self) -> tuple[int, ...]:
        """Return how many cells each block has: all are in one block, if there are any."""
        if self.cells:
            return (self.cells,)
        return ()

    @property
    def reach(self) -> int:
        """Return the square of the largest distance between two records' vectors."""
        return self.numbers + 2 * len(self.blocks)

    @property
    def norm(self) -> float:
        """Return the smallest clip that a query may have: half of the reach's root, rounded up."""
        half = math.sqrt(self.reach) / 2
        if 4 * Fraction(half) ** 2 >= self.reach:
            return half
        return math.nextafter(half, math.inf)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a mean answer."""
        return 1, self.numbers + self.cells

    def check_mechanism(self, mechanism: Mechanism) -> None:
        """Raise Refused for batches, for a clip below `norm` and for a clip above 2 norm.

        A cell is 1 whatever the clip is. So a larger clip would only make the lattice coarser.
        """
        super().check_mechanism(mechanism)
        if not bool((mechanism.clips <= 2 * self.norm).all()):
            raise Refused("clip")

    def check_reach(self, clip: float) -> None:
        """Raise Refused unless reach <= (2 clip)^2, by exact arithmetic."""
        if self.reach > 4 * Fraction(clip) ** 2:
            raise Refused("clip")


def one_hot(index: Tensor, size: int) -> Tensor:
    """Return (m, size) with 1 at each record's index. An index outside is in no cell."""
    return (index[:, None] == torch.arange(size, device=index.device)).double()
