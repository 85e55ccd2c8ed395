"""DP-EBM of Microsoft's interpret, one in each silo, averaged by rows: additive models of private
boosting (Nori, Caruana, Bu, Shen and Kulkarni, ICML 2021).

The library's settings are its defaults. Its promise is for a row that is added or removed. Here a
row is replaced: the table of bins moves by the square root of 2 times as much, and a sum of
gradients within [-1, 1] by 2. The library is asked for the epsilon whose noise spends the case's
budget exactly in that unit. Bounds of features are public, and a category is a column of 0 and 1
like any other, so that no name of a category is learned from the rows.

Classes only. The regressor's residuals are not clipped, so that its price cannot be computed.
"""

from __future__ import annotations

import importlib
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, special

from research.board.contestant import Answer, Case
from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget, gdp_epsilon, gdp_mu

BINNING = 0.1
"""The library's share of epsilon for bins, by default; delta is halved."""


@dataclass(frozen=True)
class PrivateBoosting:
    """interpret's DPExplainableBoostingClassifier of each silo, averaged."""

    name: str = "DP-EBM, averaged"
    trust: str = "isrl"
    tasks: frozenset[str] = frozenset({"binary"})

    def predict(self, case: Case) -> Answer:
        """Fit a model in each silo, and predict by the mean of their log-odds."""
        asked = library_epsilon(case.epsilon, case.delta)
        seeds = np.random.default_rng((case.seed, 4))
        data = case.training()
        models = [
            fitted(x, y, asked, case.delta, int(seeds.integers(2**31))) for x, y in data.values()
        ]
        rows = np.array([len(y) for _, y in data.values()], float)
        predictions = {}
        for name, x in case.inputs().items():
            scores = [log_odds(model, x) for model in models]
            predictions[name] = special.expit(np.average(scores, axis=0, weights=rows))
        return Answer(predictions, spent(asked, case.delta), f"asked for epsilon {asked:.4g}")


def spent(asked: float, delta: float) -> float:
    """Return the epsilon that a model spends whose library was asked for so much, for a row that is
    replaced.
    """
    binning = gdp_mu(Budget(BINNING * asked, delta / 2))
    boosting = gdp_mu(Budget((1 - BINNING) * asked, delta / 2))
    return gdp_epsilon(math.sqrt(2 * binning**2 + 4 * boosting**2), delta)


def library_epsilon(epsilon: float, delta: float) -> float:
    """Return the epsilon to ask the library for, so that `epsilon` is spent."""
    root: float = optimize.brentq(  # type: ignore[assignment]
        lambda asked: spent(asked, delta) - epsilon, 1e-3 * epsilon, epsilon, xtol=1e-9 * epsilon
    )
    return root * (1 - 1e-6)


def fitted(x: np.ndarray, y: np.ndarray, asked: float, delta: float, seed: int) -> Any:
    """Return a private model of these rows."""
    columns = x.shape[1]
    model = _library().DPExplainableBoostingClassifier(
        feature_types=["continuous"] * columns,
        privacy_bounds=np.tile([-1.0, 1.0], (columns, 1)),
        epsilon=asked,
        delta=delta,
        bin_budget_frac=BINNING,
        n_jobs=1,
        random_state=seed,
    )
    # one public row of each class, in the middle, for silos that have but one
    rows = np.vstack([x, np.zeros((2, columns))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.fit(rows, np.append(y, [0, 1]).astype(int))


def log_odds(model: Any, x: np.ndarray) -> np.ndarray:
    """Return the log-odds of the second class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.decision_function(x)


def _library() -> Any:
    """Return the library's private models. Raise BadInput if they are not installed."""
    try:
        return importlib.import_module("interpret.privacy")
    except ImportError:
        raise BadInput(
            "interpret is not installed; run: pip install interpret-core==0.7.8"
        ) from None
