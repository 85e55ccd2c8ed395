"""What a silo gives up is what the best attacker gets."""

import numpy as np
import pytest

from silodp.core.privacy.accounting import Budget, gdp_mu
from silodp.server.advice.trusts import gives_up


def test_what_is_given_up_is_what_the_best_attacker_gets():
    found = gives_up(Budget(3.0, 1e-6))
    mu = gdp_mu(Budget(3.0, 1e-6))
    rng = np.random.default_rng(3)
    out, there = rng.standard_normal(400_000), rng.standard_normal(400_000) + mu
    assert (there > np.quantile(out, 0.99)).mean() == pytest.approx(
        found["true_positives"], abs=2e-3
    )
    assert ((there > mu / 2).mean() + (out <= mu / 2).mean()) / 2 == pytest.approx(
        found["guesses_right"], abs=2e-3
    )
    weak = gives_up(Budget(0.5, 1e-2))
    belief = 1 / (
        1
        + np.exp(-(weak["mu"] * (rng.standard_normal(400_000) + weak["mu"]) - weak["mu"] ** 2 / 2))
    )
    assert (belief > weak["belief"]).mean() == pytest.approx(weak["belief_passed"], abs=2e-3)
