"""scikit-learn estimators: `silodp.Classifier(epsilon=1).fit([frame, ...])`, or `fit(X, y,
silo=...)`. What trains is `silodp train`'s own code.

In simulation, as there: all silos are in this process, and each is protected in everything that
would have been said.
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
    run,
    schema_of,
)


@dataclass(eq=False, repr=False)
class _Private(BaseEstimator):
    """What both have: settings of an Order, where None is the Order's own default, and how rows
    come in.
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
        found = {name: getattr(self, name) for name in names} | {
            "model": self.model or self._plain_model,
            "seed": seed,
        }
        return found | dict(self.settings or {})

    def _fit(self, x: Any, y: Any, silo: Any) -> Any:
        """Train. Afterwards `trained_` has the model, and `spent_` what each silo has spent.

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
        if self.held_out:
            self.compared_ = self.trained_.compared
        return self

    def _of_frames(self, frames: dict[str, pd.DataFrame], y: Any, silo: Any) -> Held:
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
        whole = pd.concat(list(frames.values()), ignore_index=True)
        names = np.repeat(list(frames), [len(frame) for frame in frames.values()])
        return self._of_arrays(whole[columns], whole[self.label], names)

    def _of_arrays(self, x: Any, y: Any, silo: Any) -> Held:
        if self.schema is not None:
            raise BadInput("a schema reads frames: give fit a list of them, one for each silo")
        x, y = validate_data(self, x, y, dtype=np.float64, ensure_min_samples=2)
        if silo is None:
            who = np.zeros(len(y), int)
        else:
            who = np.asarray(silo)
        if who.shape != (len(y),):
            raise BadInput(
                f"silo has the shape {who.shape}; it must have one name for each of the "
                f"{len(y)} rows"
            )
        silos = list(dict.fromkeys(who.tolist()))
        features = [
            str(n) for n in getattr(self, "feature_names_in_", [f"x{j}" for j in range(x.shape[1])])
        ]
        ranges = self.ranges
        if ranges is not None and not isinstance(ranges, Mapping):
            ranges = dict(zip(features, map(tuple, ranges), strict=False))
        targets, classes = self._targets(y)
        names = [f"silo-{s}" if not isinstance(s, str) else s for s in silos]
        return plainly(
            [(x[who == s], targets[who == s]) for s in silos],
            names,
            features,
            classes,
            ranges,  # type: ignore[arg-type]
            held_out=self.held_out,
        )

    def _rows(self, x: Any) -> np.ndarray:
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

    def _said(self, x: Any) -> np.ndarray:
        return (
            said(self.trained_.model, self._rows(x), None, {})
            .drop(columns="predicted", errors="ignore")
            .to_numpy()
        )

    def _targets(self, y: np.ndarray) -> tuple[np.ndarray, Sequence[Any] | None]:
        raise NotImplementedError

    def _from_schema(self, classes: Sequence[str]) -> None:
        raise NotImplementedError


class Classifier(ClassifierMixin, _Private):
    """A private classifier over silos. `ranges` are public (low, high) of each feature; without
    them scaling is learnt within the budget.

    `target` is the public list of labels; without it the labels that occur in y are taken for
    public. `schema`, a path, table or Schema, reads frames with texts and missing values.
    `random_state` fixes all noise: for research, as known noise protects nobody. `settings` are
    further ones of an Order.
    """

    _plain_model = "logistic"

    def fit(self, X: Any, y: Any = None, silo: Any = None) -> Classifier:
        """X: a list of frames (or a mapping by silo's name), each with its label; or rows, with y
        and `silo`, the silo's name of each row.
        """
        return self._fit(X, y, silo)

    def predict_proba(self, X: Any) -> np.ndarray:
        """(rows, classes), in the order of `classes_`."""
        check_is_fitted(self, "trained_")
        return self._said(X)

    def predict(self, X: Any) -> np.ndarray:
        """The class of each row: the more likely one, or by the schema's weights."""
        chances = self.predict_proba(X)
        weights = self.trained_.model.schema.label.weights or (1.0,)
        return self.classes_[(chances * np.array(weights)).argmax(1)]

    def _targets(self, y: np.ndarray) -> tuple[np.ndarray, Sequence[Any]]:
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
        if not classes:
            raise BadInput(
                "the schema's label has no classes; use silodp.Regressor, or silodp.train "
                "for survival times"
            )
        self.classes_ = np.array(classes)


class Regressor(RegressorMixin, _Private):
    """A private regressor over silos. `target` is the public (low, high) of y, to which it is
    clipped and by which it is scaled.

    Without it y is taken as it is, which suits targets of about -1 to 1 alone. The rest is as for
    Classifier.
    """

    _plain_model = "linear"

    def fit(self, X: Any, y: Any = None, silo: Any = None) -> Regressor:
        """As Classifier.fit."""
        return self._fit(X, y, silo)

    def predict(self, X: Any) -> np.ndarray:
        """(rows,), in the unit of y."""
        check_is_fitted(self, "trained_")
        found = self._said(X)[:, -1]
        low, high = self.target or (-1.0, 1.0)
        if self.schema is not None:
            return found
        return low + (found + 1) / 2 * (high - low)

    def _targets(self, y: np.ndarray) -> tuple[np.ndarray, None]:
        low, high = self.target or (-1.0, 1.0)
        if not low < high:
            raise BadInput(f"target is {self.target!r}; it must be (low, high) with low < high")
        bounded = np.clip(y, low, high) if self.target else y
        return 2 * (np.asarray(bounded, np.float64) - low) / (high - low) - 1, None

    def _from_schema(self, classes: Sequence[str]) -> None:
        if classes:
            raise BadInput("the schema's label has classes; use silodp.Classifier")
