"""scikit-learn estimators: `silodp.Classifier(epsilon=1).fit([frame, ...])`, or `fit(X, y,
silo=...)`. They train by the code of `silodp train`.

This is a simulation: all silos are in this process. Each silo is protected in everything that it
would have released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from silodp.core.errors import BadInput
from silodp.silo.data.tables import rows_of
from silodp.silo.predict import said
from silodp.simulation.frames import (
    Held,
    Ranges,
    Trained,
    by_schema,
    by_silo,
    cells_of,
    columns_of,
    plainly,
    refuse_text,
    run,
    schema_of,
)


@dataclass(eq=False, repr=False)
class _Private(BaseEstimator):
    """The settings and the reading of rows that both estimators share. A setting of None has the
    default of an Order.
    """

    epsilon: float | Mapping[str, float] = 3.0
    _: KW_ONLY
    target: Any = None
    delta: float | Mapping[str, float] | None = None
    model: str | None = None
    algorithm: str | None = None
    rounds: int | None = None
    step: float | None = None
    clip: float | None = None
    prox: str | None = None
    weights: str | None = None
    trust: str | None = None
    settings: Mapping[str, Any] | None = None
    ranges: Ranges | Sequence[tuple[float, float]] | None = None
    schema: Any = None
    label: str = "label"
    out: str | Path | None = None
    held_out: float = 0.0
    random_state: int | None = None

    _plain_model = ""

    def _order(self) -> dict[str, Any]:
        """Return the settings of the order."""
        names = (
            "epsilon",
            "delta",
            "algorithm",
            "rounds",
            "step",
            "clip",
            "prox",
            "weights",
            "trust",
        )
        seed = self.random_state
        if isinstance(seed, np.random.RandomState):
            seed = int(seed.randint(2**31))
        settings = {name: getattr(self, name) for name in names}
        settings["model"] = self.model or self._plain_model
        settings["seed"] = seed
        return settings | dict(self.settings or {})

    def _fit(self, x: Any, y: Any, silo: Any) -> Any:
        """Train, and return the estimator. Afterwards `trained_` has the model, and `spent_` the
        spend of each silo.

        With `held_out` a share of the records is kept from training, and `compared_` has what
        alone, together and personal models have on them: on raw records, so not private.
        """
        if isinstance(x, Mapping | list | tuple):
            frames = by_silo(x)
        else:
            frames = {}
        if frames and all(isinstance(frame, pd.DataFrame) for frame in frames.values()):
            source = self._of_frames(frames, y, silo)
        else:
            source = self._of_arrays(x, y, silo)
        self.trained_: Trained = run(source, self._order(), self.out)
        self.spent_ = {
            row["name"]: (row["spent_epsilon"], row["delta"])
            for row in self.trained_.summary["silos"]
        }
        if self.held_out and not self.trained_.too_large:
            self.compared_ = self.trained_.compared
        return self

    def _of_frames(self, frames: dict[str, pd.DataFrame], y: Any, silo: Any) -> Held:
        """Return the records of one frame for each silo. Raise BadInput if y or silo is given
        too.
        """
        if y is not None or silo is not None:
            raise BadInput(
                "a frame for each silo has its label within, in the column `label`; leave "
                "out y and silo"
            )
        if self.schema is not None:
            schema = schema_of(self.schema)
            self._from_schema(schema.label.classes)
            return by_schema(frames, schema, self.held_out)
        columns = columns_of(frames, self.label)
        rows = pd.concat(list(frames.values()), ignore_index=True)
        names = np.repeat(list(frames), [len(frame) for frame in frames.values()])
        return self._of_arrays(rows[columns], rows[self.label], names)

    def _of_arrays(self, x: Any, y: Any, silo: Any) -> Held:
        """Return the records of rows with their labels, and the name of each row's silo. Raise
        BadInput if they do not fit each other.
        """
        if self.schema is not None:
            raise BadInput("a schema reads frames: give fit a list of them, one for each silo")
        if isinstance(x, pd.DataFrame):
            refuse_text("X", x)
        x, y = validate_data(self, x, y, dtype=np.float64, ensure_min_samples=2)  # type: ignore[arg-type]
        if silo is None:
            silo_of = np.zeros(len(y), int)
        else:
            silo_of = np.asarray(silo)
        if silo_of.shape != (len(y),):
            raise BadInput(
                f"silo has the shape {silo_of.shape}; it must have one name for each of the "
                f"{len(y)} rows"
            )
        silos = list(dict.fromkeys(silo_of.tolist()))
        features = [
            str(n) for n in getattr(self, "feature_names_in_", [f"x{j}" for j in range(x.shape[1])])
        ]
        ranges = self.ranges
        if ranges is not None and not isinstance(ranges, Mapping):
            ranges = dict(zip(features, map(tuple, ranges), strict=False))
        targets, classes = self._targets(y)
        names = [f"silo-{s}" if not isinstance(s, str) else s for s in silos]
        return plainly(
            [(x[silo_of == s], targets[silo_of == s]) for s in silos],
            names,
            features,
            classes,
            ranges,  # type: ignore[arg-type]
            held_out=self.held_out,
        )

    def _rows(self, x: Any) -> np.ndarray:
        """Return the features of rows to predict. Raise BadInput if a schema needs a frame."""
        check_is_fitted(self, "trained_")
        if self.schema is not None:
            if not isinstance(x, pd.DataFrame):
                raise BadInput("this model reads columns by its schema; give a pandas frame")
            return rows_of("the frame", cells_of(x), self.trained_.model.schema)
        if (
            isinstance(x, pd.DataFrame)
            and hasattr(self, "feature_names_in_")
            and self.label in x.columns
        ):
            x = x.drop(columns=self.label)
        return validate_data(self, x, dtype=np.float64, reset=False)  # type: ignore[return-value, arg-type]

    def _predicted(self, x: Any) -> np.ndarray:
        """Return the risks or numbers of these rows."""
        figures = said(self.trained_.model, self._rows(x), None, {})
        return figures.drop(columns="predicted", errors="ignore").to_numpy()

    def _targets(self, y: np.ndarray) -> tuple[np.ndarray, Sequence[Any] | None]:
        """Return the labels for training, and the classes if there are any."""
        raise NotImplementedError

    def _from_schema(self, classes: Sequence[str]) -> None:
        """Take the classes of a schema. Raise BadInput if the estimator cannot predict them."""
        raise NotImplementedError


class Classifier(ClassifierMixin, _Private):
    """A private classifier over silos.

    Arguments, beside those of an Order:

    - `ranges`: the public (low, high) of each feature. Without them the scaling is learned within
      the budget.
    - `target`: the public list of labels. Without it the labels that occur in y are treated as
      public.
    - `schema`: a path, table or Schema, for frames with texts and missing values.
    - `random_state`: fixes all noise. This is for research, because known noise protects no record.
    - `settings`: further settings of an Order.
    - `out`: the run's folder. Without it the folder is deleted with the result.
    """

    _plain_model = "logistic"

    def fit(self, X: Any, y: Any = None, silo: Any = None) -> Classifier:
        """Train, and return the estimator.

        X is a list of frames (or a mapping by silo's name), each with its label. Or X has rows,
        with y and with `silo`, the name of each row's silo.
        """
        return self._fit(X, y, silo)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities (rows, classes), in the order of `classes_`."""
        check_is_fitted(self, "trained_")
        return self._predicted(X)

    def predict(self, X: Any) -> np.ndarray:
        """Return the class of each row: the most likely one, or the one that the schema's weights
        choose.
        """
        chances = self.predict_proba(X)
        weights = self.trained_.model.schema.label.weights or (1.0,)
        return self.classes_[(chances * np.array(weights)).argmax(1)]

    def _targets(self, y: np.ndarray) -> tuple[np.ndarray, Sequence[Any]]:
        """Set `classes_`, and return the labels with the classes. Raise BadInput if there is only
        one class.
        """
        check_classification_targets(y)
        if self.target is None:
            self.classes_ = np.unique(y)
        else:
            self.classes_ = np.asarray(self.target)
        if len(self.classes_) < 2:
            raise BadInput(
                "y has one class only; a classifier needs two or more: give the public "
                "list with target="
            )
        return y, self.classes_.tolist()

    def _from_schema(self, classes: Sequence[str]) -> None:
        """Set `classes_`. Raise BadInput if the schema has no classes."""
        if not classes:
            raise BadInput(
                "the schema's label has no classes; use silodp.Regressor, or silodp.train "
                "for survival times"
            )
        self.classes_ = np.array(classes)


class Regressor(RegressorMixin, _Private):
    """A private regressor over silos.

    `target` is the public (low, high) of y. y is clipped to this range and scaled by it. Without it
    y is used unscaled, which suits only targets of about -1 to 1. The other arguments are those of
    Classifier.
    """

    _plain_model = "linear"

    def fit(self, X: Any, y: Any = None, silo: Any = None) -> Regressor:
        """Train, and return the estimator. The arguments are those of `Classifier.fit`."""
        return self._fit(X, y, silo)

    def predict(self, X: Any) -> np.ndarray:
        """Return the number (rows,) of each row, in the unit of y."""
        check_is_fitted(self, "trained_")
        numbers = self._predicted(X)[:, -1]
        # With a schema the model's own reading has the unit already.
        if self.schema is not None:
            return numbers
        low, high = self.target or (-1.0, 1.0)
        return low + (numbers + 1) / 2 * (high - low)

    def _targets(self, y: np.ndarray) -> tuple[np.ndarray, None]:
        """Return y in the range -1 to 1. Raise BadInput if the target is not a range."""
        low, high = self.target or (-1.0, 1.0)
        if not low < high:
            raise BadInput(f"target is {self.target!r}; it must be (low, high) with low < high")
        if self.target:
            y = np.clip(y, low, high)
        return 2 * (np.asarray(y, np.float64) - low) / (high - low) - 1, None

    def _from_schema(self, classes: Sequence[str]) -> None:
        """Raise BadInput if the schema has classes."""
        if classes:
            raise BadInput("the schema's label has classes; use silodp.Classifier")
