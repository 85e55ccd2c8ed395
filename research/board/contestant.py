"""What a contestant receives and what it returns. To add a method, write one class like this:

    class Mine:
        name = "my method"
        trust = "isrl"
        tasks = frozenset({"binary"})

        def predict(self, case: Case) -> Answer:
            ...

A contestant sees the labels of the training rows alone. It may use the public schema, the number of
rows of each silo, and the seed. Whatever else it learns from records must be paid for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd

from silodp.core.problem.schema import Schema
from silodp.silo.data.tables import table_of
from silodp.simulation.frames import cells_of

TASKS = ("binary", "count", "number", "survival")
TRUSTS = ("none", "isrl", "masks", "central")
"""What the promise of a contestant protects from:

- none: no promise; the contestant is not private.
- isrl: everything that leaves a silo is private. Nobody is trusted.
- masks: the total over the silos is private, and nobody can open a silo's part.
- central: the released model is private. The server sees the records.
"""

Frames = Mapping[str, pd.DataFrame]


@dataclass(frozen=True)
class Case:
    """One trial: a table, a split, a budget and a seed."""

    name: str
    """The table."""
    schema: Schema
    """The public schema. Nothing in it was derived from the records."""
    train: Frames
    """The training rows of each silo, with the columns of the schema and the label."""
    test: Frames
    """The test rows of each silo, without the label."""
    epsilon: float
    delta: float
    """The budget of each silo: (epsilon, delta)-differential privacy for each of its rows."""
    seed: int

    @property
    def task(self) -> str:
        """Return "binary", "count", "number" or "survival"."""
        if self.schema.label.task == "regression":
            return "number"
        return self.schema.label.task

    def training(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return features (n, d) and labels (n,) of the training rows of each silo.

        Features are within [-1, 1] by the public ranges; a category has one for each value.
        A label is 0 or 1, a count, a number scaled to [-1, 1] by its public range, or for survival
        2 * period + event. `periods` turns the last kind into rows at risk.
        """
        return {name: numbers(frame, self.schema) for name, frame in self.train.items()}

    def inputs(self) -> dict[str, np.ndarray]:
        """Return the features (n, d) of the test rows of each silo."""
        return {
            name: numbers(_with_placeholder(frame, self.schema), self.schema)[0]
            for name, frame in self.test.items()
        }


@dataclass(frozen=True)
class Answer:
    """What a contestant predicts, and what it spent."""

    predictions: Mapping[str, np.ndarray]
    """For the test rows of each silo, in their order:

    - binary: (n,) the risk of the second class
    - count: (n,) the expected count
    - number: (n,) the expected number, in the units of `Case.training`
    - survival: (n, periods) the hazard of each period: the risk of the event in it, for a record
      that is at risk at its start
    """
    spent: float
    """The largest epsilon that any silo spent at the case's delta; infinity without privacy."""
    note: str = ""
    """What a reader of the raw results should know, such as the settings that were chosen."""


class Contestant(Protocol):
    """A method that takes part."""

    @property
    def name(self) -> str:
        """Return the name in tables and raw results."""
        ...

    @property
    def trust(self) -> str:
        """Return one of TRUSTS."""
        ...

    @property
    def tasks(self) -> frozenset[str]:
        """Return the tasks that the method supports."""
        ...

    def predict(self, case: Case) -> Answer:
        """Train on the case within its budget, and predict its test rows.

        The same case has the same answer, up to noise that the library does not let one seed.
        Raise BadInput if the method cannot be used, for example without its library.
        """
        ...


def numbers(frame: pd.DataFrame, schema: Schema) -> tuple[np.ndarray, np.ndarray]:
    """Return features (n, d) and labels (n,) of a frame, as `Case.training` describes them."""
    table = table_of("the frame", cells_of(frame), schema)
    return table.x.astype(np.float64), np.asarray(table.y, np.float64)


def periods(labels: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for survival labels (n,) two arrays (n, bins): whether a record is at risk in a
    period, and whether it has its event there.
    """
    last = labels.astype(int) // 2
    event = labels.astype(int) % 2 == 1
    number = np.arange(bins)
    ended = (number == last[:, None]) & event[:, None]
    return (number < last[:, None]) | ended, ended.astype(int)


def _with_placeholder(frame: pd.DataFrame, schema: Schema) -> pd.DataFrame:
    """Return the frame with a label that the schema allows. It is not used."""
    label = schema.label
    match label.task:
        case "binary":
            return frame.assign(**{label.columns[0]: label.classes[0]})
        case "survival":
            time, event = label.columns
            return frame.assign(**{time: label.edges[0], event: "0"})
        case _:
            return frame.assign(**{label.columns[0]: label.range[0]})
