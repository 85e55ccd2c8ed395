"""A model trained by silodp, as a scikit-learn estimator. It needs numpy and scikit-learn alone.
Its numbers are in the .npz file beside this file.

    from pathlib import Path
    from model import Model
    model = Model(Path("model.npz"))
    model.predict_proba(frame)  # a pandas frame with the columns of model.json

With two classes the risk of the second class is column 1. The model is fitted: fit() only reads the
file. Another training would have another price.
"""

import json
from pathlib import Path

import numpy as np
from sklearn.base import BaseEstimator

MISSING = {"", "na", "n/a", "#n/a", "nan", "<na>", "none", "null"}
TRUE = (
    "true",
    "t",
    "yes",
    "y",
    "1",
    "1.0",
    "ja",
    "j",
    "wahr",
    "oui",
    "vrai",
    "si",
    "sí",
    "sì",
    "sim",
)
FALSE = ("false", "f", "no", "n", "0", "0.0", "nein", "falsch", "non", "faux", "nee", "não", "nej")
WORDS: dict[str, float] = {word: 1.0 for word in TRUE} | {word: 0.0 for word in FALSE}


class Model(BaseEstimator):
    """The estimator. `file` is the .npz file, by default the one with the name of this file."""

    def __init__(self, file=None):
        self.file = file

    def fit(self, X=None, y=None):
        """Read the file, and return the estimator. Nothing is learned."""
        self._read()
        return self

    def __sklearn_is_fitted__(self):
        return True

    @property
    def classes_(self):
        """Return the names of the classes."""
        return np.array(self._read()[0]["classes"])

    def predict_proba(self, X):
        """Return the probability of each class (rows, classes).

        For survival times, return the risk by the end of each bin. Raise AttributeError if the
        model predicts a number.
        """
        about = self._read()[0]
        if about["task"] in ("regression", "count"):
            raise AttributeError("this model predicts a number; use predict")
        return self._risks(X)

    def predict(self, X):
        """Return the class by the public threshold, or the number.

        For survival times, return the risk by the end of the last bin.
        """
        about = self._read()[0]
        risks = self._risks(X)
        if not about["classes"]:
            return risks[:, -1]
        if about["threshold"] is not None:
            return self.classes_[(risks[:, 1] >= about["threshold"]).astype(int)]
        return self.classes_[(risks * np.array(about["weights"] or [1.0])).argmax(1)]

    def transform(self, X):
        """Return the features that the model reads, scaled."""
        about, numbers = self._read()
        x = np.column_stack(
            [
                part
                for column in about["columns"]
                for part in _features(column, X[column["name"]], about.get("missing_codes", []))
            ]
        )
        return (x.astype(np.float32) - numbers["scaling.mean"]) / numbers["scaling.scale"]

    def _risks(self, X):
        """Return the result of the model's layers in the form of the task: risks or numbers."""
        about, numbers = self._read()
        z = self.transform(X)
        k = 0
        for step in about["steps"]:
            if step == "linear":
                z = z @ numbers[f"weight{k}"].T + numbers[f"bias{k}"]
                k = k + 1
            elif step == "relu":
                z = np.maximum(z, 0)
            else:
                z = _shapes(z, numbers["mix"], numbers["curved"], about["reach"])
        z = z.astype(np.float64)
        if about["task"] == "survival":
            return 1 - np.cumprod(1 - 1 / (1 + np.exp(-z)), axis=1)
        if about["task"] == "count":
            return np.minimum(np.exp(z), about["label_range"][1])
        if about["task"] == "ordinal":
            above = np.minimum.accumulate(1 / (1 + np.exp(-z)), axis=1)
            return -np.diff(np.column_stack([np.ones(len(z)), above, np.zeros(len(z))]), axis=1)
        if not about["classes"]:
            low, high = about["label_range"]
            return low + (z + 1) / 2 * (high - low)
        if z.shape[1] == 1:
            z = np.column_stack([np.zeros(len(z)), z])
        z = z - np.log(about["weights"] or [1.0])
        e = np.exp(z - z.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    def _read(self):
        """Return the description and the numbers of the .npz file, which is read once."""
        if not hasattr(self, "_kept"):
            with np.load(
                self.file or Path(__file__).with_suffix(".npz"), allow_pickle=False
            ) as archive:
                numbers = {name: archive[name] for name in archive.files}
            self._kept = json.loads(str(numbers.pop("about"))), numbers
        return self._kept


def _shapes(x, mix, curved, reach):
    """Return the coordinates of an additive model's curves, and the other features after them."""
    at = (np.clip(x[:, curved], -reach, reach) / reach + 1) * ((len(mix) - 1) / 2)
    hats = np.maximum(1 - abs(at[:, :, None] - np.arange(len(mix))), 0)
    others = [j for j in range(x.shape[1]) if j not in set(curved)]
    return np.column_stack([(hats @ mix).reshape(len(x), -1), x[:, others]]).astype(np.float32)


def _features(column, cells, codes):
    """Return the features of one column, each (rows,).

    Raise ValueError for a missing or unknown value that the model has no rule for.
    """
    texts = [str(cell).strip() for cell in cells]
    gone = np.array(
        [
            text.lower() in MISSING or text in codes or text.removesuffix(".0") in codes
            for text in texts
        ]
    )
    filled = column.get("missing")
    if gone.any() and filled is None:
        raise ValueError(
            f"column {column['name']!r}, row {int(gone.argmax()) + 1}: a value is missing"
        )
    if column["type"] == "category":
        places = {name: k for k, name in enumerate(column["categories"])}
        aliases = column.get("aliases", {})
        places |= {spelling: places[name] for spelling, name in aliases.items()}
        indices = np.array(
            [
                places.get(t, places.get(t.removesuffix(".0"), places.get("other", -1)))
                for t in texts
            ]
        )
        parts = [
            np.where(gone, False, indices == k).astype(float)
            for k in range(len(column["categories"]))
        ]
        bad = ~gone & (indices < 0)
        indicator = filled is not None
    else:
        if column["type"] == "boolean":
            number = WORDS.get
        else:
            number = float
        values = np.full(len(texts), np.nan)
        for k, text in enumerate(texts):
            if not gone[k]:
                values[k] = number(text.lower())
        bad = ~gone & ~np.isfinite(values)
        indicator = column["indicator"]
        values = np.where(gone, float(filled or 0), values)
        limits = column.get("range")
        if limits is None and column["type"] == "boolean":
            limits = (0, 1)
        if limits is not None:
            low, high = limits
            values = (2 * (np.clip(values, low, high) - low) / (high - low) - 1).clip(-1, 1)
        parts = [values]
    if bad.any():
        raise ValueError(
            f"column {column['name']!r}, row {int(bad.argmax()) + 1}: the model has no such value"
        )
    if indicator:
        return [*parts, gone.astype(float)]
    return parts
