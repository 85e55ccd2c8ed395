"""Synthetic records of a stated difficulty, for `silodp tune`.

They come from a mixture with one Gaussian for each class. The best possible model is right for a
stated share of the records. Real records differ from these, and differ between silos.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import integrate, special

from silodp.core.errors import BadInput
from silodp.core.privacy.root import root
from silodp.silo.data.datasets import Split
from silodp.silo.data.records import Records

SIGNALS = {"easy": 0.95, "typical": 0.85, "hard": 0.70}
"""The best possible model's accuracy, by name."""
TESTED = 4000
"""Number of test records."""


@dataclass(frozen=True)
class Shape:
    """The size and difficulty of a data set, all known before any record is read."""

    records: tuple[int, ...]
    features: int
    classes: int = 2
    signal: float = SIGNALS["typical"]

    def __post_init__(self) -> None:
        """Raise BadInput if no mixture has this shape."""
        if not self.records or min(self.records) < 1:
            raise BadInput(f"records are {self.records}; every silo needs 1 record or more")
        if self.classes < 2 or self.features < self.classes - 1:
            raise BadInput(
                f"there are {self.features} features and {self.classes} classes; synthetic "
                "data need 2 classes or more, "
                "and a feature for each class but one"
            )
        if not 1 / self.classes < self.signal < 1:
            raise BadInput(
                f"signal is {self.signal:g}; it must lie between 1/{self.classes}, which "
                "is guessing, and 1"
            )


def signal_by_name(text: str) -> float:
    """Return the best model's accuracy for a name or a number. Raise BadInput for any other
    text.
    """
    try:
        if text in SIGNALS:
            return SIGNALS[text]
        return float(text)
    except ValueError:
        raise BadInput(
            f"signal {text!r} is unknown; use {', '.join(SIGNALS)}, or the accuracy of the "
            "best model, such as 0.9"
        ) from None


@functools.lru_cache(maxsize=64)
def separation(accuracy: float, classes: int) -> float:
    """Return the s at which the best model has this accuracy.

    The means are s e_k under unit noise. The accuracy is the mean of Phi(z + s)^(classes - 1).
    """

    def right(s: float) -> float:
        density = lambda z: (  # noqa: E731
            math.exp(-z * z / 2) / math.sqrt(2 * math.pi) * special.ndtr(z + s) ** (classes - 1)
        )
        return integrate.quad(density, -9, 9)[0]

    return root(lambda s: right(s) - accuracy, 0.0, 30.0, 1e-9)


def synthetic(shape: Shape, counts: Sequence[int], trial: int) -> Split:
    """Return silos of these sizes, and test records, from one mixture with balanced classes. All
    silos draw from the same mixture.
    """
    rng = np.random.default_rng((0xAD, trial))
    corners, lengths, _ = np.linalg.svd(np.eye(shape.classes) - 1 / shape.classes)
    axes = np.linalg.qr(rng.standard_normal((shape.features, shape.classes - 1)))[0].T
    means = separation(shape.signal, shape.classes) * (corners * lengths)[:, :-1] @ axes

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(shape.classes, size=n)
        return (means[y] + rng.standard_normal((n, shape.features))).astype(np.float32), y

    train = Records.of([draw(n) for n in counts])
    x, y = draw(TESTED)
    return Split(train, torch.from_numpy(x), torch.from_numpy(y), shape.classes)
