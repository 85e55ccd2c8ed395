"""What every statistic says of itself, so that neither gate nor codec nor policy need know which it
is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
"""Vectors (m, d) of m records, each from that record alone: from its features (or another `view` of
it) and its target.

What a statistic gives is of rows, one of which is a record; where a record is a person, `vectors`
has the averages over a person's rows."""


class Statistic:
    """What may be averaged over a silo's records. A new one is one file in this package, and a
    review.

    The gate asks, in this order: `check` (what no policy could allow), then the mechanism's and the
    sampling's own checks, `check_silo` (what this silo's records must be like), and after the
    charge `vectors`. The fixed refusal codes are functions of query and policy alone.
    """

    wire: ClassVar[dict[str, str]]
    """Its fields and what kind each is of (`core.fields`); one that never leaves a simulation may
    have none.
    """
    in_totals: ClassVar[bool] = False
    """Whether it may be asked for as a total over silos: its answer is one sum over records."""
    on_held_out: ClassVar[bool] = False
    """Whether it is of the held-out records; else it is of those that are trained on."""
    view: ClassVar[str] = "filled"
    """What `rows` sees of a record: its features as they are trained on ("filled"), NaN where a
    value is missing ("given"), or where they are missing ("missing")."""

    if TYPE_CHECKING:  # each kind is a frozen dataclass, with fields that its own file knows
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __getattr__(self, name: str) -> Any: ...

    @property
    def releases(self) -> int:
        """How many releases one answer costs."""
        return 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a mean answer, (J, d): that of its points, where it does not say."""
        return tuple(self.points[0].shape)

    @property
    def gain(self) -> float:
        """How much the answer's noise exceeds that of one release, if nothing in between bends
        it.
        """
        return 1.0

    @property
    def points(self) -> tuple[Tensor, ...]:
        """Its points (J, d) of the model, in the order of `wire`; the records' vectors are
        gradients at the first, less those at the second.
        """
        return tuple(
            getattr(self, name) for name, kind in getattr(self, "wire", {}).items() if kind == POINT
        )

    @property
    def about_features(self) -> int | None:
        """The number of features that it was made for, which must be the silo's; None where it does
        not say.
        """
        return None

    @property
    def numbers(self) -> int | None:
        """Of numbers in [0, 1] and cells (`cells.Cells`): how many numbers there are. None for a
        vector within a norm.
        """
        return None

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows | None:
        """The records' vectors in one of the runs, points and ranges in this dtype where it is
        given; None for clipped gradients at `points`, which are an engine's to make."""
        return None

    def factors(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows | None:
        """Of products (`gram.Gram`): the numbers that are multiplied, which a gate does in
        integers. None where `rows` are no products.
        """
        return None

    def vectors(
        self, problem: Problem, run: int, dtype: torch.dtype | None = None, at_once: int = MOST
    ) -> Rows | None:
        """`rows` of what is protected, a row or a person: no statistic need know which, since an
        average stays within every bound of a row's. Of a person's rows, so many are made at once.
        """
        rows = self.rows(problem.by_row, run, dtype)
        if rows and problem.person:
            return averaged(rows, at_once)
        return rows

    def check(self, dim: int, runs: int) -> None:
        """Raises Refused for what no policy could allow: points of another shape or not finite,
        senseless fields.
        """
        self._check_shapes(dim, runs)
        if not all(
            math.isfinite((p * 0).sum().item()) for p in self.points
        ):  # 0 x inf is NaN, as all that it is added to
            raise Refused("not-finite")

    def _check_shapes(self, dim: int, runs: int) -> None:
        if any(
            p.shape != (runs, dim) or p.dtype not in (torch.float32, torch.float64)
            for p in self.points
        ):
            raise Refused("shape")

    def check_mechanism(self, mechanism: Mechanism) -> None:
        """Raises Refused for batches or a clip that it cannot be asked with; clipped vectors go
        with all.
        """

    def check_silo(self, features: int, held_out: int) -> None:
        """Raises Refused where it makes no sense for a silo of so many features and held-out
        records.
        """

    def check_reach(self, clip: float) -> None:
        """Raises Refused where two records' vectors could be further apart than 2 clip, by exact
        arithmetic; clipped ones cannot.
        """


class Rowed(Statistic):
    """A statistic whose vectors are bounded as they are: nobody clips them, so no smaller clip than
    `norm` may be asked for.
    """

    view = "given"

    @property
    def norm(self) -> Number:
        """The smallest clip that may be asked for: 2 norm is what one replaced record can move a
        sum by.
        """
        raise NotImplementedError

    def rows(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        raise NotImplementedError

    def check_mechanism(self, mechanism: Mechanism) -> None:
        if not mechanism.sampling.whole:
            raise Refused("batch")
        if not bool((mechanism.clips >= self.norm).all()):
            raise Refused("clip")
