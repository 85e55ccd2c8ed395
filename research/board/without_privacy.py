"""Contestants that promise nothing: what privacy and separation cost is measured beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from research.board.contestant import TASKS, Answer, Case
from research.board.fits import Fit, Rows, boosting, constant, regression
from research.board.of_silodp import as_predictions, linear_model
from silodp.core.problem.build import build
from silodp.host.extension import load
from silodp.silo.fits import blend
from silodp.silo.fits.rows import Rows as SiloRows
from silodp.simulation.frames import by_schema, order_of
from silodp.simulation.training import words_of


@dataclass(frozen=True)
class Pooled:
    """All training rows in one place."""

    name: str
    fit: Fit
    trust: str = "none"
    tasks: frozenset[str] = frozenset(TASKS)

    def predict(self, case: Case) -> Answer:
        """Fit one model to all rows."""
        parts = list(case.training().values())
        x = np.concatenate([x for x, _ in parts])
        y = np.concatenate([y for _, y in parts])
        model = self.fit(Rows(case.task, x, y, len(case.schema.label.edges)))
        return Answer({silo: model(z) for silo, z in case.inputs().items()}, math.inf)


@dataclass(frozen=True)
class Alone:
    """Each silo by itself."""

    name: str
    fit: Fit
    trust: str = "none"
    tasks: frozenset[str] = frozenset(TASKS)

    def predict(self, case: Case) -> Answer:
        """Fit one model to the rows of each silo."""
        bins = len(case.schema.label.edges)
        inputs = case.inputs()
        predictions = {}
        for silo, (x, y) in case.training().items():
            predictions[silo] = self.fit(Rows(case.task, x, y, bins))(inputs[silo])
        return Answer(predictions, math.inf)


@dataclass(frozen=True)
class AloneChosen:
    """Each silo by itself, with a penalty that it chooses by cross-validation: what
    `silodp silo personalise` calls alone.
    """

    name: str = "alone"
    trust: str = "none"
    tasks: frozenset[str] = frozenset(TASKS)

    def predict(self, case: Case) -> Answer:
        """Fit one model to the rows of each silo."""
        source = by_schema(case.train, case.schema)
        records = source.loaded.records
        order = order_of({"algorithm": "mb-sgd", "model": linear_model(case)})
        words = words_of(order, source, source.loaded.classes)
        problem = build(words, records.features, load=load)
        start = problem.initial([0])[0].double()
        inputs = case.inputs()
        predictions = {}
        for i, silo in enumerate(records.names):
            n = records.counts[i]
            x = records.x[i, :n]
            y = records.y[i, :n]
            if n < blend.FEWEST:
                z = Rows(case.task, x.numpy(), y.numpy(), len(case.schema.label.edges))
                predictions[silo] = constant(z)(inputs[silo])
                continue
            rows = SiloRows.of(x, y, problem.person)
            w = blend.personal_model(problem, torch.zeros_like(start), rows, start).alone
            predictions[silo] = as_predictions(case, problem, w, inputs[silo])
        return Answer(predictions, math.inf)


CONTESTANTS = (
    Pooled("constant", constant),
    Pooled("pooled", regression),
    Pooled("pooled boosting", boosting),
    AloneChosen(),
    Alone("alone boosting", boosting),
)
