"""What is known before any record is read, and all that advice may follow from: sizes, columns, the
task and the budgets. n is public.
"""

from __future__ import annotations

from dataclasses import dataclass

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.schema import OWN, Schema
from silodp.core.problem.task import Task
from silodp.server.advice.worlds import KINDS


@dataclass(frozen=True)
class Facts:
    """`counts` are the records that are trained on. `kinds`: of each feature that the model sees,
    one of KINDS: as a schema makes them, within [-1, 1], or standard (about mean 0 and spread 1).
    `scaled`: so many features whose scaling is learnt first."""

    names: tuple[str, ...]
    counts: tuple[int, ...]
    kinds: tuple[str, ...]
    task: Task | Schema
    budgets: tuple[Budget, ...] | None = None
    """The silos' own, where they have some; else the order's."""
    scaled: int | None = None
    statistics: tuple[str, ...] | None = None
    """What the policy of every silo allows to be asked, by the silos' cards; None if
    unknown.
    """

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise BadInput(
                f"records are {self.counts}; every silo needs 1 record or more to train on"
            )
        if not self.kinds:
            raise BadInput("there are no features; give 1 or more")
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise BadInput(f"a feature is of kind {unknown[0]!r}; use one of {', '.join(KINDS)}")

    def allow(self, statistic: str) -> bool:
        """Return whether an algorithm that asks for this can be run."""
        return self.statistics is None or statistic in self.statistics

    @property
    def plain(self) -> Task:
        """Return the task, without the columns."""
        if isinstance(self.task, Schema):
            return self.task.task
        return self.task


def kinds_of(task: Task | Schema, features: int, otherwise: str = "standard") -> tuple[str, ...]:
    """Return the kind of each feature by the schema's columns; `otherwise` where there are none, or
    a map has made other features of them.
    """
    if not isinstance(task, Schema):
        return (otherwise,) * features
    if task.images:
        return ("number",) * features
    found: list[str] = []
    for column in task.columns:
        asked = column.indicator or column.missing == OWN
        found += [
            column.type,
            *["level"] * (len(column.features) - 1 - asked),
            *["missing"] * asked,
        ]
    if len(found) == features:
        return tuple(found)
    return ("number",) * features
