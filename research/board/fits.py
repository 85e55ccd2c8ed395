"""Models without privacy: a regression and boosting for every task, by scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge

from research.board.contestant import periods

Predict = Callable[[np.ndarray], np.ndarray]
Fit = Callable[["Rows"], Predict]


@dataclass(frozen=True)
class Rows:
    """Rows to fit a model to."""

    task: str
    x: np.ndarray
    y: np.ndarray
    bins: int = 0
    """Periods of a survival label."""

    @property
    def one_value(self) -> bool:
        """Return whether there is nothing to learn, since all labels are one value."""
        if self.task == "survival":
            return not bool((self.y.astype(int) % 2).any())
        return len(np.unique(self.y)) < 2


def constant(rows: Rows) -> Predict:
    """Return a model that predicts the mean label, or the share with an event in each period."""
    if rows.task == "survival":
        at_risk, event = periods(rows.y, rows.bins)
        hazards = (event.sum(0) + 0.5) / (at_risk.sum(0) + 1.0)
        return lambda x: np.tile(hazards, (len(x), 1))
    if rows.task == "binary":
        mean = (rows.y.sum() + 0.5) / (len(rows.y) + 1.0)
    else:
        mean = rows.y.mean()
    return lambda x: np.full(len(x), mean)


def regression(rows: Rows) -> Predict:
    """Return a regression with a penalty of 1 on standardised features."""
    if rows.one_value:
        return constant(rows)
    mean = rows.x.mean(0)
    spread = np.where(rows.x.std(0) > 1e-9, rows.x.std(0), 1.0)
    x = (rows.x - mean) / spread
    n = len(x)
    match rows.task:
        case "binary":
            classes = LogisticRegression(max_iter=1000).fit(x, rows.y)
            return lambda z: classes.predict_proba((z - mean) / spread)[:, 1]
        case "count":
            # This class divides the likelihood by n, and the others do not.
            counts = PoissonRegressor(alpha=1 / n, max_iter=1000).fit(x, rows.y)
            return lambda z: counts.predict((z - mean) / spread)
        case "number":
            line = Ridge(alpha=1.0).fit(x, rows.y)
            return lambda z: line.predict((z - mean) / spread)
        case _:
            return _hazards(
                Rows(rows.task, x, rows.y, rows.bins),
                LogisticRegression(max_iter=1000),
                lambda z: (z - mean) / spread,
            )


def boosting(rows: Rows) -> Predict:
    """Return gradient boosting as scikit-learn has it by default."""
    if rows.one_value:
        return constant(rows)
    match rows.task:
        case "binary":
            classes = HistGradientBoostingClassifier(random_state=0).fit(rows.x, rows.y)
            return lambda z: classes.predict_proba(z)[:, 1]
        case "count":
            counts = HistGradientBoostingRegressor(loss="poisson", random_state=0)
            return counts.fit(rows.x, rows.y).predict
        case "number":
            return HistGradientBoostingRegressor(random_state=0).fit(rows.x, rows.y).predict
        case _:
            return _hazards(rows, HistGradientBoostingClassifier(random_state=0), lambda z: z)


def _hazards(rows: Rows, model: Any, scaled: Predict) -> Predict:
    """Return a model of classes, fitted to each row and period at risk; the period is a feature for
    each value.
    """
    at_risk, event = periods(rows.y, rows.bins)
    who, period = np.nonzero(at_risk)
    dummies = np.eye(rows.bins)
    model.fit(np.column_stack([dummies[period], rows.x[who]]), event[at_risk])

    def predict(x: np.ndarray) -> np.ndarray:
        x = scaled(x)
        each = [
            model.predict_proba(np.column_stack([np.tile(one, (len(x), 1)), x]))[:, 1]
            for one in dummies
        ]
        return np.column_stack(each)

    return predict
