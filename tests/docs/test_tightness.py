"""Every figure of docs/tightness.md is computed anew, and its claim about sums of rounded Gaussians
is held against their exact law.
"""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from gaussian_noise import gaussian_epsilon
from silodp.core.privacy.accounting import Budget, gdp_mu
from silodp.core.privacy.binomial import BinomialSum, _least, epsilon
from silodp.server.order import Order
from silodp.server.prepare import prepare

PAGE = (Path(__file__).parents[2] / "docs/tightness.md").read_text()
SILOS, RECORDS, D, ROUNDS = 25, 1238, 3394, 50


@pytest.fixture(scope="module")
def release() -> BinomialSum:
    order = Order("mb-sgd", rounds=ROUNDS, epsilon=("0.75",), trust="masks", model="mlp:64")
    made = prepare(order, [f"silo-{i}" for i in range(SILOS)], [RECORDS] * SILOS, dimension=D)
    assert made.budgets[0].delta == 1 / RECORDS**2
    coins = made.plan.mechanisms["minibatch"]
    return BinomialSum(coins.contributions * int(coins.noise_bits), 0.5, int(coins.levels), D)


def test_the_table_is_what_the_accountants_say(release):
    g, variance, delta = release.levels, release.variance, 1 / RECORDS**2
    assert f"(std {math.sqrt(variance):,.0f} levels of {g})" in PAGE

    def spent(square: float, *, skellam: bool = False, averaged: bool = False) -> float:
        """By Renyi orders: of a shift of this squared length; `averaged` over thresholds, as in the
        docstring of `binomial`.

        Skellam: the bound of Agarwal, Kairouz and Liu 2021 for one coordinate, a k^2 / (2 V) + ((2
        a - 1) k^2 + 6 |k|) / (4 V^2), with |k| <= k^2. Discrete Gaussians: that of Kairouz, Liu and
        Steinke 2021, whose tau is below 1e-300 here.
        """

        def divergence(a: float) -> float:
            c = a / (2 * variance) + ((2 * a + 5) / (4 * variance**2) if skellam else 0.0)
            return ROUNDS * c * square * (1 + (a - 1) * c if averaged else 1.0)

        return _least(divergence, delta)

    conditional = 4 * (
        (g / 2) ** 2 + D / 4 + g / 2 + math.sqrt(D) / 2
    )  # beta = exp(-1/2), for each of the two neighbours
    found = {
        "Gaussian noise on values": gaussian_epsilon(release, ROUNDS, delta),
        "the same, by": spent(g**2),
        "discrete Gaussians of": spent(g**2 + D / 4, averaged=True),
        "Skellam noise, our": spent(g**2 + D / 4, skellam=True, averaged=True),
        "\\*\\*binomial": epsilon([(release, ROUNDS)], delta),
        "discrete Gaussians or Skellam, with the papers'": spent(conditional, skellam=True),
        "discrete Gaussians or Skellam, with plain": spent((g + math.sqrt(D)) ** 2, skellam=True),
    }
    for words, value in found.items():
        (told,) = re.findall(rf"^\| {words}.* \| \**([0-9.]+)\** \|$", PAGE, re.MULTILINE)
        assert told == f"{value:.3f}", words
    ours, exact = found["\\*\\*binomial"], found["Gaussian noise on values"]
    assert ours / found["discrete Gaussians of"] < 1.002
    assert f"takes {100 * (ours / found['the same, by'] - 1):.1f} %" in PAGE
    assert (
        f"{100 * (gdp_mu(Budget(ours, delta)) / gdp_mu(Budget(exact, delta)) - 1):.1f} % more noise"
        in PAGE
    )
    assert -2 * math.pi**2 * variance / SILOS / SILOS / math.log(10) < -100_000


@pytest.mark.parametrize(("m", "sigma"), [(2, 0.45), (3, 0.6), (4, 0.7), (3, 1.0)])
def test_a_sum_of_rounded_gaussians_is_made_from_the_gaussian_sum_up_to_the_bound(m, sigma):
    """Laws by convolution, with noise so small that the difference is seen; neighbours of any real
    sums.
    """
    z, shifts = np.arange(-40, 41), np.array([0.3, -0.45, 0.17, 0.5])[:m]
    exact = np.ones(1)
    for s in shifts:
        exact = np.convolve(exact, norm.cdf(z + 0.5, s, sigma) - norm.cdf(z - 0.5, s, sigma))
    centre = (len(exact) - 1) // 2
    nodes, weights = np.polynomial.legendre.leggauss(20)
    points, masses = np.zeros(1), np.ones(1)
    for _ in range(m - 1):  # the uniforms of T
        points, masses = (
            (points[:, None] + nodes / 2).ravel(),
            (masses[:, None] * weights / 2).ravel(),
        )
    at = shifts.sum() + points[:, None]
    made = masses @ (
        norm.cdf(z + 0.5, at, sigma * math.sqrt(m)) - norm.cdf(z - 0.5, at, sigma * math.sqrt(m))
    )
    q = 1 + 2 * sum(math.exp(-2 * math.pi**2 * sigma**2 * j * j / m) for j in range(1, 20))
    apart = np.abs(exact[centre - 40 : centre + 41] - made).max()
    assert 1e-12 < apart <= (2 * math.pi * m) ** -0.5 / sigma * (q ** (m - 1) - 1)
    assert made.sum() == pytest.approx(1.0, abs=1e-9)
