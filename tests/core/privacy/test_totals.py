"""The sum of rounded Gaussians against the Gaussian that its price counts on, by the exact law of
the sum, without the package's accountant.
"""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from silodp.core.events import Event, TotalEvent
from silodp.core.lattice import lattice_step, noise_scale
from silodp.core.mechanisms import Masked, Shuffled
from silodp.core.privacy import totals
from silodp.core.privacy.accounting import GDP, Budget, Renyi, gdp_delta
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson

N = np.asarray(100)
POINTS, WEIGHTS = np.polynomial.legendre.leggauss(24)
SHARES = (0.0, 0.3, 0.5, -0.2, 0.77)
"""What the silos' real sums leave over an integer: the law of a rounded sum depends on it."""


def rounded(scale: float, shift: float, modulus: int) -> np.ndarray:
    """P(round(shift + N(0, scale^2)) = r modulo the modulus)."""
    reach = math.ceil(40 * scale) + 2
    k = np.arange(-reach, reach + 1)
    mass = np.diff(stats.norm.cdf((np.append(k, reach + 1) - 0.5 - shift) / scale))
    return np.bincount(k % modulus, mass, minlength=modulus)


def sum_of(scales, shifts, modulus: int) -> np.ndarray:
    """The exact law of the sum of the silos' rounded numbers, by convolution."""
    law = np.zeros(modulus)
    law[0] = 1.0
    for scale, shift in zip(scales, shifts, strict=True):
        one = rounded(scale, shift, modulus)
        law = np.array([law @ np.roll(one[::-1], r + 1) for r in range(modulus)])
    return law


def once_rounded(scales, shifts, modulus: int) -> np.ndarray:
    """The law of round(S + N(0, V) + U_1 + ... + U_(m - 1)), by quadrature over the U."""
    deviation = math.sqrt(sum(scale**2 for scale in scales))
    law = np.zeros(modulus)
    for places in itertools.product(range(len(POINTS)), repeat=len(scales) - 1):
        weight = float(np.prod(WEIGHTS[list(places)] / 2))
        moved = sum(shifts) + sum(POINTS[at] / 2 for at in places)
        law += weight * rounded(deviation, moved, modulus)
    return law


def distance(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).sum() / 2)


@pytest.mark.parametrize("silos", [2, 3])
@pytest.mark.parametrize("scale", [0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("modulus", [8, 32])
def test_the_sum_of_rounded_gaussians_is_as_near_to_a_rounded_gaussian_as_is_claimed(
    silos, scale, modulus
):
    scales = [scale * (1 + 0.2 * i) for i in range(silos)]
    for shifts in (SHARES[:silos], SHARES[-silos:]):
        found = distance(sum_of(scales, shifts, modulus), once_rounded(scales, shifts, modulus))
        claimed = math.exp(totals.log_distance(scale, silos, math.log2(modulus)))
        assert found <= claimed + 1e-12


def test_the_distance_is_really_there_where_noise_is_small_and_is_gone_where_it_is_large():
    shifts = (0.5, 0.5)
    found = [
        distance(sum_of((s, s), shifts, 16), once_rounded((s, s), shifts, 16))
        for s in (0.2, 0.4, 1.2)
    ]
    assert found[0] > 0.1
    assert found[1] > 1e-3
    assert found[2] < 1e-6


def test_without_the_distance_the_claim_of_gaussian_noise_is_wrong_and_with_it_it_holds():
    """Two silos, a record that moves one sum by half a step: the exact delta of the sum."""
    scale = 0.25
    first = sum_of((scale, scale), (0.0, 0.0), 16)
    second = sum_of((scale, scale), (0.5, 0.0), 16)
    mu = 0.5 / (scale * math.sqrt(2))
    tau = math.exp(totals.log_distance(scale, 2, 4))
    worse = 0
    for epsilon in (0.5, 1.0, 2.0, 4.0, 6.0):
        for p, q in ((first, second), (second, first)):
            found = float(np.clip(p - math.exp(epsilon) * q, 0, None).sum())
            claimed = gdp_delta(mu, epsilon)
            worse += found > claimed
            assert found <= claimed + (1 + math.exp(epsilon)) * tau
    assert worse


@pytest.mark.parametrize("counted", [2, 5, 25, 1000])
def test_exact_noise_of_as_many_shares_as_are_counted_is_what_a_total_costs(counted):
    z = 8.0
    bucket, price = GDP().price(TotalEvent(FullBatch(), z, 3, counted), N)
    assert bucket == ""
    assert float(price) >= 3 / (counted * z * z)
    assert float(price) == pytest.approx(3 / (counted * z * z), rel=1e-14)
    alone = TotalEvent(FullBatch(), z, 3, counted).alone()
    assert float(GDP().price(alone, N)[1]) == 3 / z**2


def test_a_price_contains_the_distance_and_is_infinite_where_the_sum_may_be_far_from_gaussian():
    """The share in steps of the lattice over the root of the number of silos decides."""
    for counted in (2, 100, 2**20):
        prices = [
            totals.total_price(scale * math.sqrt(counted) / totals.LEAST_STEPS, counted)
            for scale in (5.0, 13.0, 14.5, 30.0)
        ]
        assert prices[0] == prices[1] == math.inf
        assert math.isfinite(prices[2])
        assert prices[2] > prices[3]


def paid_for(scale: float, silos: int) -> mpmath.mpf:
    """What the distance of one answer costs, to forty digits: by the words of the claim."""
    with mpmath.workdps(40):
        v = mpmath.mpf(scale) ** 2
        turn = 2 * mpmath.pi**2
        above_one = 2 * sum(mpmath.exp(-turn * v * j**2 / silos) for j in (1, 2, 3))
        excess = mpmath.expm1((silos - 1) * mpmath.log1p(above_one))
        bound = mpmath.sqrt(2**64) * excess / (1 - mpmath.exp(-turn * silos * v))
        return mpmath.mpf(10) ** 1610 * 2**26 * bound


@pytest.mark.parametrize("counted", [2, 25, 1000])
def test_a_price_is_finite_from_the_scale_on_at_which_it_covers_the_distance(counted):
    """Every part of the distance's price moves that scale, or the price beside it."""

    def price(scale: float) -> float:
        return totals.total_price(scale / totals.LEAST_STEPS, counted)

    low, high = 10 * math.sqrt(counted), 20 * math.sqrt(counted)
    for _ in range(60):
        middle = (low + high) / 2
        if math.isinf(price(middle)):
            low = middle
        else:
            high = middle
    plain = totals.LEAST_STEPS**2 / (counted * high**2)
    assert float(mpmath.log(paid_for(high, counted) / plain)) == pytest.approx(
        math.log(totals.PART), abs=1e-3
    )
    assert totals.PART == 1e-12  # the budget is rounded down by that part
    assert price(high) / plain - 1 >= 0.99e-12


def test_the_distance_grows_with_the_silos_and_falls_with_their_noise():
    for low, high in itertools.pairwise((2, 3, 10, 100, 10_000)):
        assert totals.log_distance(30.0, low, 64) < totals.log_distance(30.0, high, 64)
    for low, high in itertools.pairwise((0.5, 1.0, 30.0, 1e4)):
        assert totals.log_distance(low, 25, 64) > totals.log_distance(high, 25, 64)
    assert totals.log_distance(1.0, 1, 64) == -math.inf


def test_the_price_of_what_is_paid_for_is_more_delta_than_the_distance_takes():
    """At the corners of the claim in totals.py: mu^2 is raised by what a distance costs."""
    for epsilon, mu in ((0.01, 0.02), (1.0, 0.3), (30.0, 5.0), (600.0, 30.0)):
        tau = 1e-1700
        # the derivative of delta by mu^2, and the least that one unit of distance buys
        a = mu / 2 - epsilon / mu
        slope = math.exp(-a * a / 2) / math.sqrt(2 * math.pi) / (2 * mu)
        log_bought = totals.LOG_WORTH + math.log(slope)
        assert log_bought > math.log1p(math.exp(epsilon)) + 1.0
        assert tau == 0.0  # no float holds it, so that it is computed in logarithms


@pytest.mark.parametrize("dimension", [1, 2, 3, 31, 3394, 2**26])
@pytest.mark.parametrize("clip", [2.0**-30, 0.7, 1.0, 1.999, 3.14, 1e6])
def test_a_sensitivity_is_as_many_steps_of_the_lattice_as_the_price_counts_on(dimension, clip):
    assert 2 * clip / lattice_step(clip, dimension) >= totals.LEAST_STEPS


@pytest.mark.parametrize("counted", [1, 3, 25, 2**20])
@pytest.mark.parametrize("share", [1e-3, 0.1, 0.43, 8.0, 1e4])
def test_a_share_is_as_many_steps_of_a_total_as_the_price_counts_on(share, counted):
    for clip, dimension in ((1.0, 1), (0.7, 50), (3.0, 100_000)):
        mechanism = Shuffled("a", clip, share, counted=counted)
        steps = noise_scale(share, clip, float(mechanism.steps(dimension)))
        assert steps >= totals.least_scale(share, counted) * (1 - 1e-12)
        if mechanism.shift(dimension):
            assert totals.SHARE_STEPS <= steps / math.sqrt(counted) < 2 * totals.SHARE_STEPS
            added = 1 / 12 / steps**2
            assert math.sqrt(1 + added) - 1 < 1.1e-5


def test_one_ledger_adds_answers_and_totals_up_exactly():
    rule = GDP()
    buckets: dict[str, np.ndarray] = {}
    events = [
        Event(FullBatch(), 10.0, 4),
        TotalEvent(FullBatch(), 30.0, 9, 5),
        TotalEvent(DisjointBatches(2, 0), 20.0, 1, 5),
        TotalEvent(DisjointBatches(2, 1), 25.0, 1, 5),
    ]
    for event in events:
        bucket, price = rule.price(event, N)
        buckets[bucket] = buckets.get(bucket, np.zeros(())) + price
    wanted = 4 / 100 + 9 / (5 * 900) + 1 / (5 * 400)
    assert float(rule.total(buckets)) == pytest.approx(wanted, rel=1e-12)


def test_secret_batches_and_other_rules_have_no_price_for_totals():
    with pytest.raises(Exception, match="cannot price Poisson batches"):
        GDP().price(TotalEvent(Poisson(0.5), 4.0, 1, 3), N)
    with pytest.raises(Exception, match="the renyi ledger cannot price such totals"):
        Renyi(8.0).price(TotalEvent(FullBatch(), 4.0, 1, 3), N)


def test_a_budget_of_totals_is_filled_to_the_last_digits():
    """The least noise that a budget asks for is that of exact Gaussian noise."""
    budget = np.asarray(Budget(1.0, 1 / 1238**2), dtype=object)
    capacity = float(GDP().capacity(budget))
    z = math.sqrt(50 / capacity / 25)
    price = 50 * totals.total_price(z, 25)
    assert price / capacity == pytest.approx(1.0, rel=1e-12)


def test_a_share_is_not_rounded_on_its_way_to_a_gate():
    share = 0.1 + 2.0**-40
    mechanism = Masked("a", 1.0, torch.tensor([[share]], dtype=torch.float64), counted=3)
    assert mechanism.of(0).noise_multiplier == share
    assert mechanism.of(0).of(1).noise_multiplier == share
    assert mechanism.of(0).event().of(0).noise_multiplier == share
