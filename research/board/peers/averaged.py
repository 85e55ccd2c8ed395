"""Models of IBM's diffprivlib, one in each silo, averaged by rows.

The library's promise is epsilon-differential privacy with delta 0, for a row that is replaced, if
`data_norm` and the bounds are public. Its defaults are used (C = 1), and two settings keep the use
within the proofs (version 0.6.6):

- The constant is a column of the table, and `fit_intercept` is off. The proof of Chaudhuri,
  Monteleoni and Sarwate (2011) asks for an objective that is strongly convex in every parameter,
  and the library does not regularise its own intercept.
- Rows have length 1 at most, and bounds are -1 to 1. For other lengths and bounds the code and the
  proof differ; docs/certify.md has the details.

Two public rows of zeros, one of each class, let the library fit a silo without a positive row. They
move no gradient.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from research.board.contestant import Answer, Case
from silodp.core.errors import BadInput

Rows = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class AveragedLibrary:
    """diffprivlib's LogisticRegression or LinearRegression of each silo, averaged."""

    name: str = "diffprivlib, averaged"
    trust: str = "isrl"
    tasks: frozenset[str] = frozenset({"binary", "number"})

    def predict(self, case: Case) -> Answer:
        """Fit a model in each silo, and predict by the mean of their coefficients."""
        fit = self.logistic if case.task == "binary" else self.linear
        seeds = np.random.default_rng((case.seed, 3))
        data = case.training()
        fitted = [
            fit(with_constant(x), y, case.epsilon, int(seeds.integers(2**31)))
            for x, y in data.values()
        ]
        weights = [len(y) for _, y in data.values()]
        coefficients = np.average(fitted, axis=0, weights=weights)
        lines = {name: with_constant(x) @ coefficients for name, x in case.inputs().items()}
        if case.task == "binary":
            return Answer({name: special.expit(line) for name, line in lines.items()}, case.epsilon)
        return Answer({name: np.clip(line, -1, 1) for name, line in lines.items()}, case.epsilon)

    def logistic(self, x: np.ndarray, y: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
        """Return the coefficients of a logistic regression of rows within the cube."""
        rows = np.vstack([scaled(x), np.zeros((2, x.shape[1]))])
        model = _library().LogisticRegression(
            epsilon=epsilon, data_norm=1.0, fit_intercept=False, random_state=seed
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            model.fit(rows, np.append(y, [0, 1]))
        return model.coef_[0] / np.sqrt(x.shape[1])

    def linear(self, x: np.ndarray, y: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
        """Return the coefficients of a linear regression of rows within the cube."""
        model = _library().LinearRegression(
            epsilon=epsilon,
            bounds_X=(-1, 1),
            bounds_y=(-1, 1),
            fit_intercept=False,
            random_state=seed,
        )
        return model.fit(x, y).coef_


def with_constant(x: np.ndarray) -> np.ndarray:
    """Return the table with a column of ones."""
    return np.column_stack([x, np.ones(len(x))])


def scaled(x: np.ndarray) -> np.ndarray:
    """Return rows of a cube, scaled to length 1 at most."""
    return x / np.sqrt(x.shape[1])


def _library() -> Any:
    """Return the library's models. Raise BadInput if they cannot be loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("diffprivlib.models")
        except ImportError:
            raise BadInput(
                "diffprivlib cannot be loaded; run: "
                "pip install diffprivlib==0.6.6 scikit-learn==1.7.2"
            ) from None
