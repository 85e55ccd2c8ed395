"""What several runs and evaluations have spent together is never said to be less than it is."""

import math

from silodp.core.privacy.accounting import gaussian_sum, gdp_epsilon


def test_parts_whose_epsilon_is_told_as_zero_count_for_what_delta_may_hide():
    delta = 1e-5
    mu = 2.4e-5
    assert gdp_epsilon(mu, delta) == 0, "so that zero is what is told of each"
    many = 10_000
    assert gaussian_sum([0.0] * many, delta) >= gdp_epsilon(mu * math.sqrt(many), delta) > 0
    assert gaussian_sum([1.0, 0.0], delta) >= 1.0
