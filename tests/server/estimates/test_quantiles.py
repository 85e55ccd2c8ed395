"""Quantiles, means and shares from noisy counts: exact without noise, and intervals that cover."""

import numpy as np
import pytest

from silodp.server.estimates.columns import share_of
from silodp.server.estimates.quantiles import LEVELS, distribution, mean, quantile

ENDS = tuple(np.linspace(0, 110, 56))
AGES = np.random.default_rng(1).normal(60, 14, 200_000).clip(0, 110)


def counts_of(values):
    return np.histogram(values, ENDS)[0].astype(float)


def test_without_noise_a_quantile_is_within_its_bin_and_next_to_the_true_one():
    counts = counts_of(AGES)
    for level in LEVELS:
        found = quantile(counts, 0.0, ENDS, level)
        assert found.value == pytest.approx(np.quantile(AGES, level), abs=0.1)
        assert found.least <= found.low <= found.value <= found.high <= found.most


def test_without_noise_mean_and_deviation_are_those_of_the_values():
    found = mean(counts_of(AGES), 0.0, ENDS)
    assert found.value == pytest.approx(AGES.mean(), abs=0.02)
    assert found.deviation == pytest.approx(AGES.std(), abs=0.02)
    assert found.noise == 0.0
    assert found.sampling == pytest.approx(AGES.std() / np.sqrt(len(AGES)), rel=0.01)


def test_cumulative_shares_rise_whatever_the_noise():
    random = np.random.default_rng(0)
    for noise in (0.0, 5.0, 500.0):
        shares = distribution(counts_of(AGES[:300]) + noise * random.normal(size=55), noise)
        assert shares[0] == 0.0
        assert shares[-1] == 1.0
        assert np.all(np.diff(shares) >= 0)


def test_an_interval_inside_one_bin_is_the_whole_bin():
    """Nine of ten values are 0, so nothing is known of how values are spread within their bin."""
    counts = np.array([9000.0, 400, 300, 300])
    found = quantile(counts, 1.0, (0, 10, 20, 30, 40), 0.5)
    assert (found.low, found.high) == (0, 10)


def test_of_nothing_but_noise_the_interval_is_nearly_the_whole_range():
    noise = 50 * np.random.default_rng(3).normal(size=55)
    found = quantile(noise, 50.0, ENDS, 0.5)
    assert found.high - found.low > 55
    assert np.isfinite([found.value, mean(noise, 50.0, ENDS).value]).all()


def covered(n, noise, stated, runs=400):
    """The share of intervals that hold the true median, mean and share, at a noise that is stated
    to be `stated`.
    """
    random = np.random.default_rng(7)
    shares = np.histogram(AGES, ENDS)[0] / len(AGES)
    hits = np.zeros(3)
    for _ in range(runs):
        counts = random.multinomial(n, shares) + noise * random.normal(size=55)
        middle = quantile(counts, stated, ENDS, 0.5)
        centre = mean(counts, stated, ENDS)
        own = random.binomial(n, 0.03)
        first, second = noise * random.normal(size=2)
        share = share_of(own + first, n - own + second, stated, 2)
        hits += [
            middle.low <= np.median(AGES) <= middle.high,
            centre.low <= AGES.mean() <= centre.high,
            share["low"] <= 0.03 <= share["high"],
        ]
    return hits / runs


@pytest.mark.parametrize(("n", "noise"), [(1000, 10.0), (300, 3.0)])
def test_intervals_hold_the_truth_in_19_of_20_cases(n, noise):
    assert np.all(covered(n, noise, noise) >= 0.925)


def test_intervals_that_leave_the_privacy_noise_out_hold_it_less_often():
    assert np.all(covered(1000, 10.0, 0.0) < 0.9)
