"""Define how much each silo counts in a mean, by public numbers that are part of a run's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from silodp.core.errors import BadInput

RULES = ("equal", "records", "precision")


@dataclass(frozen=True)
class Weights:
    """How much each silo counts: alike (`equal`, as in the paper), by `records` or by `precision`.

    With v_i the release of silo i, the mean is sum_i a_i v_i over the silos that answered, with
    sum_i a_i = 1.

    - equal: a_i = 1 / M. The target is the mean over silos, F = (1/N) sum_i F_i.
    - records: a_i in proportion to the number of records trained on. The target is the mean over
      all records.
    - precision: a_i in proportion to 1 / variance of the noise of silo i, (batch_i / noise
      multiplier_i)^2. This is the least noise that a weighted mean can have. The target is a mean
      in which large silos and generous budgets count most, and neither of the other two.

    If all N answer, the weighted mean is an unbiased estimate of its target. For M uniformly drawn
    silos the weights are renormalised over these. That is unbiased for equal weights. For others it
    is a ratio estimate, whose bias falls as 1 / M and is zero where weights are equal.

    Formal guarantees. Weights are applied to releases, after the gate, which is post-processing of
    numbers that are already private. A silo's sensitivity, noise and price do not depend on them.
    So no weight can make a release cost more or protect less.
    """

    rule: str = "equal"
    counts: tuple[int, ...] = ()
    """The number of all records of each silo. Equal weights do not need it."""
    held_out: tuple[int, ...] = ()
    """How many of these records training does not use. None by default."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", tuple(self.counts))
        object.__setattr__(self, "held_out", tuple(self.held_out) or (0,) * len(self.counts))
        if self.rule not in RULES:
            raise BadInput(
                f"weights are {self.rule!r}; choose {', '.join(RULES[:-1])} or {RULES[-1]}"
            )
        if self.rule != "equal" and not self.counts:
            raise BadInput(f"weights by {self.rule} need the number of records of each silo")
        if len(self.held_out) != len(self.counts) or not all(
            0 <= h < n for n, h in zip(self.counts, self.held_out, strict=True)
        ):
            raise BadInput(
                f"silos of {self.counts} records hold out {self.held_out}; each must keep 1 or "
                "more for training"
            )

    @property
    def trained(self) -> tuple[int, ...]:
        """Return the number of records of each silo that training uses."""
        return tuple(n - h for n, h in zip(self.counts, self.held_out, strict=True))

    def raw(self, silos: Sequence[int], precision: Tensor | None = None) -> Tensor:
        """Return a_i of these silos in their order, up to a common factor.

        The shape is (1, M) or (J, M), in float64. `precision` is 1 / variance of each silo's noise,
        up to a factor.
        """
        match self.rule:
            case "equal":
                return torch.ones(1, len(silos), dtype=torch.float64)
            case "records":
                return torch.tensor([[float(self.trained[i]) for i in silos]], dtype=torch.float64)
            case _:
                assert precision is not None
                return precision

    def shares(self, silos: Sequence[int], precision: Tensor | None = None) -> Tensor:
        """Return a_i of these silos, with sum 1."""
        raw = self.raw(silos, precision)
        return raw / raw.sum(1, keepdim=True)

    def for_totals(self) -> Weights:
        """Return these weights if a total over silos has them.

        A total is a sum over records, in which each record counts alike. Raise BadInput for other
        weights.
        """
        if not self.counts:
            raise BadInput(
                "the weights have no numbers of records; the mean of a total needs the number of "
                "records of each silo"
            )
        if self.rule != "records" and len(set(self.trained)) > 1:
            raise BadInput(
                f"weights are {self.rule}, but a total over silos of "
                f"{', '.join(map(str, self.trained))} records counts each record alike; "
                "use weights by records"
            )
        return self
