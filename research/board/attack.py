"""Let `silodp audit certify` attack a contestant of the leaderboard.

The attacker sees predictions, and so the released model, but no messages. So an attack that finds
nothing proves nothing, and least of all for a contestant whose messages show more than its model.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy import special

from research.board.contestant import Case, Contestant
from silodp.core.problem.schema import Schema

ROWS = 40
"""Rows of the other silo."""


def released_by(
    contestant: Contestant, epsilon: float, *, delta: float = 1e-5, own: bool = True
) -> Callable[[np.ndarray, np.ndarray, int], np.ndarray]:
    """Return a function of a table, labels and a seed, as `silodp audit certify` calls it.

    The table becomes one of two silos of a case with two classes; the other silo never changes. The
    function returns the logits that the contestant predicts in both silos.

    Args:
        contestant: the contestant to attack.
        epsilon: the budget of the case: what `certify --epsilon` gets.
        delta: likewise.
        own: whether predictions in the attacked silo count. A personal model that never leaves its
            silo protects the other silos' view alone.
    """

    def release(x: np.ndarray, y: np.ndarray, seed: int) -> np.ndarray:
        features = x.shape[1]
        random = np.random.default_rng(39)
        other = random.uniform(-1, 1, (ROWS, features))
        probes = np.vstack([np.zeros(features), np.eye(features), -np.eye(features)])
        train = {
            "attacked": _frame(x, y),
            "other": _frame(other, random.integers(0, 2, ROWS)),
        }
        test = {name: _frame(probes, None) for name in train}
        case = Case("attack", _schema(features), train, test, epsilon, delta, seed)
        predictions = contestant.predict(case).predictions
        seen = ["attacked", "other"] if own else ["other"]
        risks = np.concatenate([predictions[name] for name in seen])
        return special.logit(np.clip(risks, 1e-9, 1 - 1e-9))

    return release


def _schema(features: int) -> Schema:
    columns = {f"x{j}": {"type": "number", "range": [-1, 1]} for j in range(features)}
    label = {"column": "y", "task": "binary", "classes": ["0", "1"]}
    return Schema.of({"columns": columns, "label": label})


def _frame(x: np.ndarray, y: np.ndarray | None) -> pd.DataFrame:
    frame = pd.DataFrame(x, columns=[f"x{j}" for j in range(x.shape[1])])
    if y is None:
        return frame
    return frame.assign(y=np.where(np.asarray(y) > 0.5, "1", "0"))
