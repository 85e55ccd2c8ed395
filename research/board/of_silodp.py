"""silodp's own contestants: the default, personal models, one-shot, a synthetic table, and the
paper's algorithms.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from research.board.contestant import TASKS, Answer, Case, numbers
from research.board.fits import Rows, regression
from silodp.core.errors import BadInput
from silodp.core.problem.build import build
from silodp.core.problem.problem import Problem
from silodp.host import atomic
from silodp.host.extension import load
from silodp.host.model import contents
from silodp.server.folder import read_run
from silodp.server.order import Order
from silodp.silo.fits import blend
from silodp.silo.fits.rows import Rows as SiloRows
from silodp.simulation.frames import Held, by_schema, order_of
from silodp.simulation.scoring import synthetic_data
from silodp.simulation.training import train, words_of

SYNTHETIC_ROWS = 5000


@dataclass(frozen=True, eq=False)
class Fitted:
    """A finished run: its model, as one point (d,), and what it spent."""

    problem: Problem
    w: Tensor
    source: Held
    spent: float
    note: str
    """The algorithm, the model and the number of rounds."""


@dataclass
class Training:
    """Trains on cases by an open or a named order, once for each case.

    The advisor reads public facts alone: schema, sizes, budget and trust. These are the same for
    all seeds of a table. So its choice is kept in `folder`, under the hash of these facts.
    """

    folder: Path
    settings: Mapping[str, Any]
    _last: tuple[Case, Fitted] | None = field(default=None, repr=False)

    def fitted(self, case: Case) -> Fitted:
        """Return the finished run of this case."""
        if self._last is None or self._last[0] is not case:
            self._last = (case, self._train(case))
        return self._last[1]

    def order(self, case: Case, source: Held) -> Order:
        """Return the order of this case, with the advisor's choice if one is kept."""
        given = {"epsilon": case.epsilon, "delta": case.delta, "seed": case.seed}
        order = order_of(given | dict(self.settings))
        kept = self._place(case)
        if kept and kept.exists():
            order = Order.read({"order": json.loads(kept.read_text())}, kept)
            return replace(order, seed=case.seed)
        return order

    def _train(self, case: Case) -> Fitted:
        source = by_schema(case.train, case.schema)
        order = self.order(case, source)
        choices = list[Order]()
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "run"
            summary = train(
                order, source, path, on_advice=lambda advice: choices.append(advice.order)
            )
            model = read_run(path)["model"]
            _, tensors = contents(path)
        if choices:
            order = choices[0]
            kept = self._place(case)
            assert kept is not None
            kept.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(kept, json.dumps(order.words(), indent=1) + "\n", mode=0o644)
        words = words_of(replace(order, model=model), source, source.loaded.classes)
        problem = build(words, source.loaded.records.features, load=load)
        w = torch.cat([tensors[name].flatten() for name in problem.shapes]).double()
        note = f"{order.algorithm} {model}, {order.rounds} rounds"
        return Fitted(problem, w, source, largest_spend(summary), note)

    def _place(self, case: Case) -> Path | None:
        """Return the file of the advisor's choice, or None where the settings leave it nothing."""
        if "algorithm" in self.settings:
            return None
        facts = {
            "schema": case.schema.text,
            "sizes": [len(frame) for frame in case.train.values()],
            "budget": [case.epsilon, case.delta],
            "settings": dict(self.settings),
        }
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        return self.folder / f"{case.name}-{case.epsilon:g}-{key}.json"


@dataclass(frozen=True)
class Released:
    """The model that a run of silodp releases."""

    name: str
    training: Training
    trust: str = "isrl"
    tasks: frozenset[str] = frozenset(TASKS)

    def predict(self, case: Case) -> Answer:
        """Train, and predict by the released model."""
        fitted = self.training.fitted(case)
        predictions = {
            silo: as_predictions(case, fitted.problem, fitted.w, x)
            for silo, x in case.inputs().items()
        }
        return Answer(predictions, fitted.spent, fitted.note)


@dataclass(frozen=True)
class Personal:
    """The released model, personalised inside each silo. The personal model has seen the silo's
    records without noise and stays there.
    """

    name: str
    training: Training
    trust: str = "isrl"
    tasks: frozenset[str] = frozenset(TASKS)

    def predict(self, case: Case) -> Answer:
        """Train, personalise, and predict for each silo by its own model."""
        fitted = self.training.fitted(case)
        records = fitted.source.loaded.records
        start = fitted.problem.initial([0])[0]
        inputs = case.inputs()
        predictions = {}
        for i, silo in enumerate(records.names):
            n = records.counts[i]
            rows = SiloRows.of(records.x[i, :n], records.y[i, :n], fitted.problem.person)
            w = fitted.w
            if n >= blend.FEWEST:
                w = blend.personal_model(fitted.problem, w, rows, start).personal
            predictions[silo] = as_predictions(case, fitted.problem, w, inputs[silo])
        return Answer(predictions, fitted.spent, fitted.note)


@dataclass(frozen=True)
class OneShot:
    """One question, and a linear model from its answer."""

    training: dict[str, Training]
    """For each task."""
    name: str = "one-shot"
    trust: str = "isrl"
    tasks: frozenset[str] = frozenset({"binary", "number"})

    def predict(self, case: Case) -> Answer:
        """Ask, and predict by the released model."""
        return Released(self.name, self.training[case.task]).predict(case)


@dataclass(frozen=True)
class Synthetic:
    """A synthetic table, and the model of `pooled` fitted to it."""

    name: str = "synthetic"
    trust: str = "isrl"
    tasks: frozenset[str] = frozenset(TASKS)

    def predict(self, case: Case) -> Answer:
        """Release a synthetic table, and fit a model to it."""
        source = by_schema(case.train, case.schema)
        budget = {"epsilon": case.epsilon, "delta": case.delta, "seed": case.seed}
        answer = synthetic_data(order_of(budget), source, SYNTHETIC_ROWS)
        x, y = numbers(pd.DataFrame(answer["table"]), case.schema)
        model = regression(Rows(case.task, x, y, len(case.schema.label.edges)))
        predictions = {silo: model(z) for silo, z in case.inputs().items()}
        return Answer(predictions, largest_spend(answer))


def contestants(folder: Path) -> tuple[Released | Personal | OneShot | Synthetic, ...]:
    """Return silodp's contestants. The advisor's choices are kept in `folder`."""
    default = Training(folder, {"trust": "isrl"})
    one_shot = {
        "binary": Training(folder, {"algorithm": "one-shot", "model": "logistic"}),
        "number": Training(folder, {"algorithm": "one-shot", "model": "linear"}),
    }
    return (
        Released("silodp", default),
        Personal("silodp personal", default),
        Released("silodp masks", Training(folder, {"trust": "masks"}), trust="masks"),
        OneShot(one_shot),
        Synthetic(),
        Released("spider", Training(folder, {"algorithm": "spider"})),
        Released("mb-sgd", Training(folder, {"algorithm": "mb-sgd"})),
    )


# --- shared --------------------------------------------------------------------------------------


def as_predictions(case: Case, problem: Problem, w: Tensor, x: np.ndarray) -> np.ndarray:
    """Return what the model at the point w (d,) predicts for features (n, d)."""
    with torch.no_grad():
        outputs = problem.outputs(w[None].float(), torch.from_numpy(x).float())[0].double()
    if not bool(outputs.isfinite().all()):
        raise BadInput("the model gives no finite number for some rows")
    match case.task:
        case "binary" if outputs.shape[1] == 1:
            return outputs[:, 0].sigmoid().numpy()
        case "binary":
            return (outputs[:, 1] - outputs[:, 0]).sigmoid().numpy()
        case "count":
            return outputs[:, 0].clamp(max=float(np.log(case.schema.task.most))).exp().numpy()
        case "number":
            return outputs[:, 0].numpy()
        case _:
            return outputs.sigmoid().numpy()


def linear_model(case: Case) -> str:
    """Return silodp's name of a linear model for the task."""
    if case.task in ("binary", "survival"):
        return "logistic"
    return "linear"


def largest_spend(summary: Mapping[str, Any]) -> float:
    """Return the largest epsilon that a silo spent, from a summary."""
    return max(float(silo["spent_epsilon"]) for silo in summary["silos"])
