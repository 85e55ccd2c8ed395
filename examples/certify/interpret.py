"""interpret 0.7.8 (Microsoft), DP-EBM: `silodp audit certify examples/certify/interpret.py:years
--epsilon 1 --records 4`, or `:classes`.

The claim: "Differentially Private Explainable Boosting ... epsilon: Total privacy budget to be
spent", with public bounds for features and target (glassbox/_ebm/_ebm.py). A record is replaced;
predictions are what is sent. `years` predicts a year between 2000 and 2026. Needs: pip install
interpret-core==0.7.8
"""

import warnings

import numpy as np
from interpret.privacy import DPExplainableBoostingClassifier, DPExplainableBoostingRegressor

warnings.simplefilter("ignore")
SETTINGS = {"epsilon": 1.0, "delta": 1e-5, "n_jobs": 1}


def years(x, y, seed):
    """Return how the predictions at the two ends of one feature differ, as a share of both."""
    feature = np.clip(x[:, :1] * (2 * y[:, None] - 1), -1, 1)
    target = 2000 + 13 * (1 + np.clip(x[:, 1], -1, 1))
    model = DPExplainableBoostingRegressor(
        feature_types=["continuous"],
        privacy_bounds=np.array([[-1, 1]]),
        privacy_target_min=2000,
        privacy_target_max=2026,
        random_state=seed % 2**31,
        **SETTINGS,
    )
    low, high = model.fit(feature, target).predict(np.array([[-1.0], [1.0]]))
    return (low - high) / (1 + abs(low) + abs(high))


def classes(x, y, seed):
    """Return the log-odds of nine rows along the first feature."""
    model = DPExplainableBoostingClassifier(
        feature_types=["continuous"] * 2,
        privacy_bounds=np.array([[-1, 1], [-1, 1]]),
        random_state=seed % 2**31,
        **SETTINGS,
    )
    model.fit(np.clip(x[:, :2], -1, 1), y.astype(int))
    return model.decision_function(np.column_stack([np.linspace(-1, 1, 9), np.zeros(9)]))
