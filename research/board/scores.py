"""Score predictions for test rows: the metrics of PLAN.md, from predictions alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import special
from sklearn.metrics import r2_score, roc_auc_score

from research.board.contestant import numbers, periods
from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema

LEAST_RISK = 1e-4
LEAST_COUNT = 1e-3
SIZES = {"to_100": (0, 100), "to_500": (101, 500), "to_2000": (501, 2000), "above": (2001, 10**9)}
"""Groups of silos by their training rows, for which the loss is also given."""
NEWTON_STEPS = 50


def score(
    schema: Schema,
    predictions: Mapping[str, np.ndarray],
    test: Mapping[str, pd.DataFrame],
    sizes: Mapping[str, int],
) -> dict[str, float]:
    """Return the metrics on all test rows together, and the loss of each group of silos.

    Args:
        schema: the public schema.
        predictions: what the contestant returned.
        test: the test rows of each silo, with their labels.
        sizes: the number of training rows of each silo.

    Raises:
        BadInput: a silo's predictions are missing, of another shape or not finite.
    """
    labels = {silo: numbers(frame, schema)[1] for silo, frame in test.items()}
    bins = len(schema.label.edges)
    for silo, y in labels.items():
        shape = (len(y), bins) if bins else (len(y),)
        given = predictions.get(silo)
        if given is None or np.shape(given) != shape or not np.isfinite(given).all():
            raise BadInput(
                f"the predictions for {silo} are missing, of another shape or not finite"
            )
    each = {silo: losses(schema, predictions[silo], y) for silo, y in labels.items()}
    predicted = np.concatenate([predictions[silo] for silo in labels])
    y = np.concatenate(list(labels.values()))
    found = {"loss": _mean(list(each.values()))}
    if schema.label.task == "survival":
        rows = pd.concat([test[silo] for silo in labels])
        found |= _survival(schema, predicted, y, rows)
    else:
        found |= _figures(schema, predicted, y)
    for name, (low, high) in SIZES.items():
        own = [each[silo] for silo in labels if low <= sizes[silo] <= high]
        found[f"loss_{name}"] = _mean(own)
    return found


def losses(schema: Schema, predicted: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the loss of each row; for survival of each row and period at risk."""
    match schema.label.task:
        case "binary":
            return _log_losses(predicted, y)
        case "count":
            mean = np.clip(predicted, LEAST_COUNT, schema.task.most)
            return 2 * (special.xlogy(y, y / mean) - y + mean)
        case "survival":
            at_risk, event = periods(y, predicted.shape[1])
            return _log_losses(predicted[at_risk], event[at_risk])
        case _:
            # The label's range [-1, 1] counts as 1.
            return ((np.clip(predicted, -1, 1) - y) / 2) ** 2


def concordance(risk: np.ndarray, time: np.ndarray, event: np.ndarray) -> float:
    """Return Harrell's c: the share of usable pairs in which the row with the earlier event has the
    higher risk. A tie of risks counts one half.
    """
    good = 0.0
    pairs = 0
    for i in np.flatnonzero(event):
        later = (time > time[i]) | ((time == time[i]) & ~event)
        pairs += int(later.sum())
        good += float((risk[later] < risk[i]).sum() + 0.5 * (risk[later] == risk[i]).sum())
    if not pairs:
        return float("nan")
    return good / pairs


def slope(score: np.ndarray, y: np.ndarray, mean: Callable[[Any], Any], variance: Any) -> float:
    """Return b of the most likely a + b score, by Newton's method.

    Args:
        score: (n,) logits, or logarithms of rates.
        y: (n,) labels.
        mean: the mean of a label at a score.
        variance: the variance of a label as a function of its mean.
    """
    spread = float(score.std())
    if spread < 1e-9:
        return float("nan")
    design = np.column_stack([np.ones(len(score)), (score - score.mean()) / spread])
    w = np.zeros(2)
    for _ in range(NEWTON_STEPS):
        mu = mean(np.clip(design @ w, -30, 30))
        curvature = design.T @ (design * variance(mu)[:, None]) + 1e-9 * np.eye(2)
        step = np.clip(np.linalg.solve(curvature, design.T @ (y - mu)), -2, 2)
        w = w + step
        if np.abs(step).max() < 1e-9:
            break
    return float(w[1] / spread)


def _figures(schema: Schema, predicted: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return ranking and calibration of classes, counts or numbers."""
    task = schema.label.task
    found = {"mean": float(predicted.mean()), "observed": float(y.mean())}
    if task == "binary":
        logit = special.logit(np.clip(predicted, LEAST_RISK, 1 - LEAST_RISK))
        found["rank"] = float(roc_auc_score(y, predicted))
        found["slope"] = slope(logit, y, special.expit, lambda m: m * (1 - m))
    elif task == "count":
        rate = np.clip(predicted, LEAST_COUNT, schema.task.most)
        constant = losses(schema, np.full(len(y), y.mean()), y).mean()
        found["rank"] = float(1 - losses(schema, predicted, y).mean() / constant)
        found["slope"] = slope(np.log(rate), y, np.exp, lambda m: m)
    else:
        clipped = np.clip(predicted, -1, 1)
        found["rank"] = float(r2_score(y, clipped))
        found["slope"] = slope(clipped, y, lambda z: z, np.ones_like)
    return found


def _survival(
    schema: Schema, hazards: np.ndarray, y: np.ndarray, rows: pd.DataFrame
) -> dict[str, float]:
    """Return ranking and calibration of hazards (n, periods)."""
    time, event = schema.label.columns
    risk = 1 - np.prod(1 - np.clip(hazards, LEAST_RISK, 1 - LEAST_RISK), axis=1)
    happened = rows[event].astype(str).to_numpy() == "1"
    at_risk, ended = periods(y, hazards.shape[1])
    seen = np.clip(hazards[at_risk], LEAST_RISK, 1 - LEAST_RISK)
    found = ended[at_risk]
    return {
        "rank": concordance(risk, rows[time].to_numpy(), happened),
        "slope": slope(special.logit(seen), found, special.expit, lambda m: m * (1 - m)),
        "mean": float(seen.mean()),
        "observed": float(found.mean()),
    }


def _log_losses(risk: np.ndarray, y: np.ndarray) -> np.ndarray:
    risk = np.clip(risk, LEAST_RISK, 1 - LEAST_RISK)
    return -np.where(y > 0, np.log(risk), np.log1p(-risk))


def _mean(parts: list[np.ndarray]) -> float:
    """Return the mean over all rows of these silos, or NaN without a row."""
    joined = np.concatenate(parts) if parts else np.zeros(0)
    return float(joined.mean()) if len(joined) else float("nan")
