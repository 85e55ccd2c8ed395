"""The same variance under Gaussian noise."""

import math

from research.binomial.accountant import BinomialSum
from silodp.core.privacy.accounting import gdp_epsilon


def gaussian_epsilon(release: BinomialSum, rounds: int, delta: float) -> float:
    """Exact epsilon of Gaussian noise of the release's variance on unrounded values: what the
    accountant is measured against.
    """
    return gdp_epsilon(math.sqrt(rounds / release.variance) * release.levels, delta)
