"""pfl 0.6.0: `silodp audit certify examples/certify/pfl.py:laplace --epsilon 1 --unit silo`, or
`:gaussian`.

The claim: "The l1 norm is computed over all the arrays and clipped by a bound ... epsilon: gives an
upper bound on the amount of privacy loss" (privacy/laplace_mechanism.py). A client's statistics
come or go. Needs: pip install --no-deps pfl==0.6.0 multiprocess dill prv_accountant
"""

import numpy as np
from pfl.internal.ops import numpy_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.privacy import GaussianMechanism, LaplaceMechanism
from pfl.stats import MappedVectorStatistics

set_framework_module(numpy_ops)
LAPLACE = LaplaceMechanism(1.0, 1.0)
GAUSSIAN = GaussianMechanism.construct_single_iteration(1.0, 1.0, 1e-5)


def sent(mechanism, x: np.ndarray, y: np.ndarray, seed: int) -> np.ndarray:
    update = MappedVectorStatistics(
        {"w": np.repeat(10 * ((y - 0.5)[:, None] * x).mean(0), 5)}, weight=1.0
    )
    clipped, _ = mechanism.constrain_sensitivity(update, seed=seed)
    return mechanism.add_noise(clipped, 1, seed=seed)[0]["w"]


def laplace(x, y, seed):
    return sent(LAPLACE, x, y, seed)


def gaussian(x, y, seed):
    return sent(GAUSSIAN, x, y, seed)
