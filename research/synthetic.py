"""Synthetic tables beside direct training at the same price: `python -m research synthetic`.

A logistic model is fitted to the synthetic table, which is free once the table is released. Its
ridge is chosen on rows of the table. Both models are measured on the same records, which neither
has seen. `research/risks.py` has the tables, splits and direct trainings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from research import risks
from research.fresh_tables import FRESH
from research.risks import quality, split, trained
from silodp.core.problem.schema import Schema
from silodp.server.advice import Advice
from silodp.server.order import Order
from silodp.simulation.frames import Held, by_schema, order_of
from silodp.simulation.scoring import synthetic_data

STUDIES = risks.STUDIES | FRESH
ROWS = 5000
SMALLEST = 2200
"""Rows of a table of which 1,800 can be used and the others measured on."""
RIDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 1.0)
TABLES = (
    "world, 13 % ill",
    "world, 50 % ill",
    "breast cancer",
    "diabetes",
    "RAND, admitted",
)
Test = Sequence[tuple[torch.Tensor, torch.Tensor]]


def measure(
    names: Sequence[str], epsilon: float, seeds: Sequence[int], trust: str
) -> Iterator[dict[str, Any]]:
    """Yield a row for each table: mean log loss and AUC of both models, and how many of the
    synthetic shares are within their 95 % bound.
    """
    for name in names:
        study = STUDIES[name]()
        advice: list[Advice] = []
        rows = []
        for seed in seeds:
            source, test = split(study, seed)
            made = from_synthetic(source, study.schema, test, epsilon, seed, trust)
            order = advice[0].order if advice else order_of({"epsilon": epsilon, "trust": trust})
            problem, w = trained(replace(order, seed=seed), source, advice.append)
            x, y = _joined(test)
            with torch.no_grad():
                outputs = problem.outputs(w, x.float())[0].double().numpy()
            direct = quality(study.schema, outputs, y)
            rows.append(made | {"direct loss": direct.loss, "direct AUC": direct.auc})
        yield {"table": name} | pd.DataFrame(rows).mean().to_dict()


def from_synthetic(
    source: Held, schema: Schema, test: Test, epsilon: float, seed: int, trust: str
) -> dict[str, float]:
    """Return log loss and AUC of a logistic model that is fitted to a synthetic table."""
    order = Order(epsilon=(str(epsilon),), seed=seed, trust=trust)
    answer = synthetic_data(order, source, ROWS)
    frame = pd.DataFrame(answer["table"])
    records = by_schema({"synthetic": frame}, schema).loaded.records
    x = records.x[0].numpy()
    labels = records.y[0].numpy()
    scale = x.std(0) + 1e-9
    cut = 7 * len(x) // 10

    def held_out(ridge: float) -> float:
        """Return the log loss on synthetic rows that the model has not seen."""
        model = LogisticRegression(C=ridge, max_iter=500).fit(x[:cut] / scale, labels[:cut])
        return float(log_loss(labels[cut:], model.predict_proba(x[cut:] / scale)[:, 1]))

    best = min(RIDGES, key=held_out)
    model = LogisticRegression(C=best, max_iter=500).fit(x / scale, labels)
    xs, ys = _joined(test)
    found = quality(schema, model.decision_function(xs.numpy() / scale)[:, None], ys)
    return {
        "synthetic loss": found.loss,
        "synthetic AUC": found.auc,
        "shares within": answer["within"],
        "other pairs": answer["pairs"],
        "count error": answer["count_error"],
    }


def six_silos(epsilon: float, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield mean log losses from six silos of 300 rows under masks, and from one of 1,800 rows."""
    for name in TABLES:
        study = STUDIES[name]()
        frame = pd.concat(list(study.frames.values()))
        if len(frame) < SMALLEST:
            continue
        losses: dict[str, list[float]] = {"six": [], "one": []}
        for seed in seeds:
            order = np.random.default_rng((5, seed)).permutation(len(frame))
            test = by_schema({"test": frame.iloc[order[1800:]]}, study.schema).loaded.records
            known = [(test.x[0], test.y[0])]
            parts = {str(k): frame.iloc[order[300 * k : 300 * (k + 1)]] for k in range(6)}
            for kind, frames, trust in (
                ("six", parts, "masks"),
                ("one", {"all": frame.iloc[order[:1800]]}, "isrl"),
            ):
                source = by_schema(frames, study.schema)
                found = from_synthetic(source, study.schema, known, epsilon, seed, trust)
                losses[kind].append(found["synthetic loss"])
        yield {"table": name} | {kind: float(np.mean(own)) for kind, own in losses.items()}


def _joined(test: Test) -> tuple[torch.Tensor, np.ndarray]:
    """Return features and labels of all silos' records."""
    return torch.cat([x for x, _ in test]), torch.cat([y for _, y in test]).numpy()
