"""diffprivlib 0.6.6 (IBM): `silodp audit certify examples/certify/diffprivlib.py:linear --epsilon 1
--delta 1e-9`, or `:logistic`.

The claim: "Ordinary least squares Linear Regression with differential privacy ... epsilon: Privacy
parameter", with public bounds (models/linear_regression.py), and likewise LogisticRegression with
data_norm. Delta is 0; the attack needs a tiny one. A record is replaced; the coefficients are what
is sent. `linear` has one feature between 0 and 100, of which most values are small. Needs: pip
install diffprivlib==0.6.6 scikit-learn==1.7.2
"""

import warnings

import numpy as np
from diffprivlib.models import LinearRegression, LogisticRegression

warnings.simplefilter("ignore")


def linear(x, y, seed):
    """Return the size of the coefficient. The library's defaults are used."""
    feature = np.clip(100 * x[:, :1] * y[:, None] + np.abs(x[:, 1:2]), 0, 100)
    target = np.clip(np.abs(x[:, 2]), 0, 1)
    model = LinearRegression(
        epsilon=1.0, bounds_X=(0, 100), bounds_y=(0, 1), random_state=seed % 2**31
    )
    return np.log(np.abs(model.fit(feature, target).coef_) + 1e-12)


def logistic(x, y, seed):
    """Return the coefficients of a model whose rows have length 1 at most, without intercept."""
    rows = x / np.maximum(1, np.linalg.norm(x, axis=1, keepdims=True))
    model = LogisticRegression(
        epsilon=1.0, data_norm=1.0, fit_intercept=False, random_state=seed % 2**31
    )
    return model.fit(rows, y).coef_
