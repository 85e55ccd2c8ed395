"""Intervals by test inversion are valid for few records, at none or all of them too."""

import numpy as np
import pytest
from scipy import stats

from silodp.server.estimates.inversion import by_variance, combined, conditional, proportion


@pytest.mark.parametrize("right", [0, 3, 7])
def test_without_noise_the_interval_of_a_share_is_within_that_of_clopper_and_pearson(right):
    """Without noise a tie counts half, so the interval is shorter than the exact one of 1934, and
    contains its inner half.
    """
    low, high = proportion(right / 7, 0.0, 7)
    exact = stats.binomtest(right, 7).proportion_ci(method="exact")
    assert exact.low <= low <= right / 7 <= high <= exact.high
    assert high - low > 0.85 * (exact.high - exact.low) - 0.05


def test_seven_of_seven_is_no_proof_of_a_perfect_model():
    low, high = proportion(1.0, 0.01 / 7, 7)
    assert high == 1.0
    assert low < 0.66


@pytest.mark.parametrize(
    ("n", "share", "noise"),
    [(7, 0.95, 0.05), (7, 0.5, 2.0), (30, 0.02, 0.3), (100, 0.02, 8.0), (1000, 0.02, 0.1)],
)
def test_a_share_is_covered_as_often_as_the_interval_states(n, share, noise):
    """800 draws at 95 per cent: fewer than 92.3 % have a probability under 1e-3."""
    random = np.random.default_rng(3)
    counts = random.binomial(n, share, 800) + noise * random.normal(size=800)
    ends = [proportion(count / n, noise / n, n) for count in counts]
    assert np.mean([low <= share <= high for low, high in ends]) > 0.923


def test_an_interval_of_a_part_is_whole_where_its_records_are_drowned():
    low, high = conditional(0.01, 0.01, 0.1, 0.1, 100)
    assert (low, high) == (0.0, 1.0)
    low, high = conditional(0.4, 0.1, 0.001, 0.001, 1000)
    assert low < 0.8 < high
    assert high - low < 0.08


def test_numbers_that_vary_less_have_a_narrower_interval():
    wide = by_variance(0.3, 0.01, 100)
    narrow = by_variance(0.3, 0.01, 100, dispersion=0.2)
    assert wide[0] < narrow[0] < 0.3 < narrow[1] < wide[1]
    assert combined(0.5, (0.25, 0.2, 0.3), (0.25, 0.25, 0.25)) == pytest.approx((0.45, 0.55))
