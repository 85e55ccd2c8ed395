"""The accountant against brute force: exact hockey-stick divergences over every neighbour of small
cases, both directions, two rounds.
"""

import functools
import itertools
import math
import tracemalloc

import numpy as np
import pytest
from gaussian_noise import gaussian_epsilon
from scipy import stats

from research.binomial import accountant as bi
from research.binomial import accountant as binomial
from research.binomial.accountant import BinomialSum, divergence_per_square, epsilon, renyi
from silodp.core.errors import BadInput

# --- brute force ---------------------------------------------------------------------------------


def records(levels: int, dimension: int, steps: int) -> list[tuple[float, ...]]:
    """Every scaled record on a grid of 1/steps inside the ball that clipping leaves: diameter g,
    centre g / 2.
    """
    axis = [i / steps for i in range(levels * steps + 1)]
    centre = levels / 2
    return [
        u
        for u in itertools.product(axis, repeat=dimension)
        if sum((x - centre) ** 2 for x in u) <= centre**2 + 1e-12
    ]


def law(u: tuple[float, ...], trials: int, p: float, levels: int) -> np.ndarray:
    """Exact law of the totals of one record: u rounded at random, plus Bin(trials, p), over all
    coordinates.
    """
    noise = stats.binom.pmf(np.arange(trials + 1), trials, p)

    def one(x: float) -> np.ndarray:
        pmf, floor = np.zeros(trials + levels + 2), math.floor(x)
        pmf[floor : floor + trials + 1] += (1 - (x - floor)) * noise
        pmf[floor + 1 : floor + trials + 2] += (x - floor) * noise
        return pmf

    return functools.reduce(np.multiply.outer, map(one, u))


def delta_at(eps: float, pairs) -> float:
    """Largest exact delta(eps) over pairs of laws, each in both directions."""
    return max(
        np.maximum(p - math.exp(eps) * q, 0).sum() for pair in pairs for p, q in (pair, pair[::-1])
    )


SMALL = [
    # trials, p, levels, dimension, grid, delta
    (60, 0.5, 3, 1, 4, 1e-4),
    (60, 0.25, 3, 1, 4, 1e-3),
    (60, 0.25, 1, 1, 4, 1e-5),
    (24, 0.5, 2, 1, 4, 1e-2),
    (50, 0.5, 2, 2, 2, 1e-3),
    (60, 0.25, 2, 2, 2, 1e-3),
    (30, 0.5, 1, 2, 4, 1e-4),
    (36, 0.5, 2, 3, 2, 1e-2),
    (36, 0.25, 1, 3, 2, 1e-3),
]


@pytest.mark.parametrize(("trials", "p", "levels", "dimension", "grid", "delta"), SMALL)
def test_never_below_brute_force(trials, p, levels, dimension, grid, delta):
    """All neighbours; and not by being vacuous: at 0.4 of the bound the worst neighbours do exceed
    delta.
    """
    bound = epsilon([(BinomialSum(trials, p, levels, dimension), 1)], delta)
    laws = [law(u, trials, p, levels) for u in records(levels, dimension, grid)]
    pairs = list(itertools.combinations(laws, 2))
    assert delta_at(bound, pairs) <= delta
    assert delta_at(0.4 * bound, pairs) > delta


@pytest.mark.parametrize(
    ("trials", "p", "levels", "dimension", "grid", "delta"),
    [
        (60, 0.25, 2, 1, 2, 1e-3),
        (40, 0.5, 2, 1, 2, 1e-3),
        (60, 0.5, 1, 1, 4, 1e-5),
        (20, 0.5, 1, 2, 2, 1e-3),
    ],
)
def test_two_rounds_are_never_below_brute_force(trials, p, levels, dimension, grid, delta):
    """The record answers each round with vectors of its own, so every pair of neighbours meets
    every other (d = 2: a quarter of them).
    """
    bound = epsilon([(BinomialSum(trials, p, levels, dimension), 2)], delta)
    laws = [law(u, trials, p, levels) for u in records(levels, dimension, grid)]
    neighbours = list(itertools.permutations(laws, 2))
    if dimension > 1:
        neighbours = neighbours[::4]
    pairs = [
        (np.multiply.outer(p1, p2), np.multiply.outer(q1, q2))
        for (p1, q1), (p2, q2) in itertools.combinations_with_replacement(neighbours, 2)
    ]
    assert delta_at(bound, pairs) <= delta
    assert delta_at(0.4 * bound, pairs) > delta


def test_three_rounds_of_the_farthest_neighbours_pass_what_one_round_is_charged():
    """Where the bound is tightest, so that a round left out of the sum shows."""
    release, delta = BinomialSum(60, 0.5, 3, 1), 1e-4
    thrice = [functools.reduce(np.multiply.outer, [law((u,), 60, 0.5, 3)] * 3) for u in (0.0, 3.0)]
    assert delta_at(epsilon([(release, 3)], delta), [tuple(thrice)]) <= delta
    assert delta_at(epsilon([(release, 1)], delta), [tuple(thrice)]) > delta


def test_different_releases_compose():
    first, second, delta = BinomialSum(60, 0.25, 1, 1), BinomialSum(40, 0.5, 2, 1), 1e-3
    bound = epsilon([(first, 1), (second, 1)], delta)
    ends = [
        [law(u, r.trials, r.p, r.levels) for u in records(r.levels, 1, 2)] for r in (first, second)
    ]
    pairs = [
        (np.multiply.outer(p1, p2), np.multiply.outer(q1, q2))
        for (p1, q1), (p2, q2) in itertools.product(
            *(itertools.permutations(laws, 2) for laws in ends)
        )
    ]
    assert delta_at(bound, pairs) <= delta
    assert delta_at(0.4 * bound, pairs) > delta


# --- one coordinate ------------------------------------------------------------------------------


def exact_per_square(trials: int, p: float, k: int, order: float, tail: float) -> float:
    """D_alpha(k) / k^2 summed term by term over the accountant's own window, by scipy's logarithms
    of the mass.
    """
    low, high = bi._window(trials, p, tail)
    z = np.arange(low, high + 1)
    logs = order * stats.binom.logpmf(z, trials, p) + (1 - order) * stats.binom.logpmf(
        z + k, trials, p
    )
    top = logs.max()
    return (top + math.log(np.exp(logs - top).sum())) / (order - 1) / k**2


@pytest.mark.parametrize("order", [2, 3.7, 20])
@pytest.mark.parametrize(
    ("trials", "p", "levels"),
    [(400, 0.5, 9), (400, 0.25, 9), (40_000, 0.25, 70), (1_000_000, 0.5, 300)],
)
def test_the_divergence_is_the_worst_over_every_shift_and_both_signs(trials, p, levels, order):
    """Never below the term-by-term sum (to the accuracy of scipy's logarithms), and within 0.2 % of
    it.
    """
    found = divergence_per_square(BinomialSum(trials, p, levels, 1), order, 1e-12)
    exact = max(
        exact_per_square(trials, p, sign * k, order, 1e-12)
        for k in range(1, levels + 1, 1 + levels // 40)
        for sign in (1, -1)
    )
    exact = max(
        exact, *(exact_per_square(trials, p, sign * levels, order, 1e-12) for sign in (1, -1))
    )
    assert exact * (1 - 1e-5) <= found <= exact * 1.002


def test_the_negative_side_is_the_larger_one_below_one_half():
    plus, minus = (exact_per_square(400, 0.25, k, 8, 1e-9) for k in (5, -5))
    assert minus > 1.01 * plus
    assert divergence_per_square(BinomialSum(400, 0.25, 5, 1), 8, 1e-9) >= minus * (1 - 1e-9)


@pytest.mark.parametrize(
    ("trials", "p"), [(60, 0.5), (60, 0.25), (10_000, 0.25), (10**9, 0.5), (10**11, 0.25)]
)
@pytest.mark.parametrize("tail", [0.3, 1e-6, 1e-15])
def test_tails_have_no_more_mass_than_is_charged(trials, p, tail):
    low, high = bi._window(trials, p, tail)
    missed = stats.binom.cdf(low - 1, trials, p) + stats.binom.sf(high, trials, p)
    assert missed <= tail
    if low > 0 and high < trials and tail < 0.1:
        assert missed > tail / 200


def test_tails_of_every_coordinate_and_round_and_the_conversion_share_one_delta(monkeypatch):
    charged: dict[BinomialSum, float] = {}
    kept = []
    monkeypatch.setattr(
        bi, "renyi", lambda release, order, tail: charged.setdefault(release, tail) and 0.01
    )
    monkeypatch.setattr(bi, "renyi_conversion", lambda order, delta: kept.append(delta) or 0.0)
    rounds = {BinomialSum(10**6, 0.5, 10, 300): 20, BinomialSum(10**5, 0.5, 10, 77): 3}
    epsilon(list(rounds.items()), 1e-6)
    spent = sum(
        rounds[release] * release.dimension * tail for release, tail in charged.items()
    ) + max(kept)
    assert 0.99e-6 < spent <= 1e-6


@pytest.mark.parametrize("t", [0.0, 0.3, 0.5, 1.0, 2.5, 7.9, 40.25])
@pytest.mark.parametrize("beta", [1e-6, 1e-2, 0.3])
def test_the_lemma_on_rounding(t, beta):
    """log E exp(beta k^2) <= beta (1 + beta) (t^2 + 1/4), k the floor or ceiling of t with mean
    t.
    """
    floor, f = math.floor(t), t - math.floor(t)
    left = beta * floor**2 + math.log((1 - f) + f * math.exp(beta * (2 * floor + 1)))
    assert left <= beta * (1 + beta) * (t * t + 0.25)


# --- practical sizes -----------------------------------------------------------------------------

PRACTICAL = [
    # trials, p, levels, dimension, rounds, delta
    (30_000 * 249, 0.5, 235, 3_394, 1, 1e-9),  # g / sqrt(d) = 4.0, epsilon 1
    (30_000 * 330, 0.25, 235, 3_394, 1, 1e-9),
    (30_000 * 9_689, 0.5, 207, 3_394, 50, 1e-9),  # g / sqrt(d) = 3.6, epsilon 1
    (30_000 * 253, 0.5, 234, 3_394, 50, 1e-9),  # g / sqrt(d) = 4.0, epsilon 8
    (30_000 * 16_370, 0.5, 207, 3_394, 1, 1e-9),  # epsilon 0.1
    (1_000 * 115, 0.5, 37, 50, 1, 1e-6),  # g / sqrt(d) = 5.2
    (30_000 * 5_714, 0.5, 1_124, 100_000, 1, 1e-9),  # g / sqrt(d) = 3.6
    (500 * 114, 0.5, 70, 200, 25, 4e-6),  # g / sqrt(d) = 4.9, epsilon 18
]


@pytest.mark.parametrize(("trials", "p", "levels", "dimension", "rounds", "delta"), PRACTICAL)
def test_within_ten_per_cent_of_the_gaussian_of_equal_variance(
    trials, p, levels, dimension, rounds, delta
):
    release = BinomialSum(trials, p, levels, dimension)
    assert levels / math.sqrt(dimension) >= 3.5
    gaussian = gaussian_epsilon(release, rounds, delta)
    assert gaussian < epsilon([(release, rounds)], delta) < 1.1 * gaussian


def test_keeping_the_expectation_over_rounding_is_what_makes_it_so():
    release = BinomialSum(30_000 * 249, 0.5, 235, 3_394)
    c = divergence_per_square(release, 20, 1e-15)
    assert (
        c * (235**2 + 3_394 / 4)
        < renyi(release, 20, 1e-15)
        < 0.67 * c * (235 + math.sqrt(3_394)) ** 2
    )


def test_more_noise_fewer_rounds_and_fewer_levels_cost_less():
    def cost(trials=10**6, levels=100, rounds=4, dimension=400):
        return epsilon([(BinomialSum(trials, 0.5, levels, dimension), rounds)], 1e-8)

    assert cost(trials=2 * 10**6) < cost() < cost(rounds=5)
    assert cost(levels=90) < cost() < cost(dimension=500)
    assert epsilon([], 1e-8) == epsilon([(BinomialSum(10, 0.5, 1, 1), 0)], 1e-8) == 0


@pytest.mark.parametrize("trials", [0, 5, 12])
def test_noise_too_narrow_for_delta_has_no_epsilon(trials):
    assert epsilon([(BinomialSum(trials, 0.5, 2, 1), 1)], 1e-9) == math.inf


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((10, 0.3, 1, 1), "p is 0.3"),
        ((10, 0.5, 0, 1), "levels is 0"),
        ((10, 0.5, 1, 0), "dimension is 0"),
        ((-1, 0.5, 1, 1), "trials is -1"),
    ],
)
def test_bad_releases_are_refused(bad, message):
    with pytest.raises(BadInput, match=message):
        BinomialSum(*bad)


def test_orders_outside_the_proof_and_noise_too_wide_are_refused():
    with pytest.raises(BadInput, match="2 or more"):
        divergence_per_square(BinomialSum(1000, 0.5, 2, 1), 1.5, 1e-9)
    with pytest.raises(BadInput, match="too wide"):
        epsilon([(BinomialSum(2**42, 0.5, 2, 1), 1)], 1e-9)


# --- the work of a price -------------------------------------------------------------------------


def test_the_memory_of_a_price_does_not_grow_with_its_levels():
    tracemalloc.start()
    try:
        binomial.divergence_per_square(binomial.BinomialSum(2**26, 0.5, 2**13, 10), 8.0, 1e-12)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        binomial._cells.cache_clear()
    assert peak < 2**25, "2^13 levels times 500 nodes are 2^25 bytes"


@pytest.mark.parametrize(
    ("trials", "p", "levels"), [(2**20, 0.5, 300), (2**22, 0.25, 40), (900, 0.5, 9)]
)
def test_the_work_of_a_price_is_known_before_it_is_computed(trials, p, levels, monkeypatch):
    computed, steps = [], binomial._steps

    def counted(trials, p, z):
        computed.append(z.size)
        return steps(trials, p, z)

    monkeypatch.setattr(binomial, "_steps", counted)
    binomial._cells.cache_clear()
    release = binomial.BinomialSum(trials, p, levels, 10)
    bound = binomial.work(release, 1e-12)
    assert computed == []
    binomial.divergence_per_square(release, 8.0, 1e-12)
    assert bound / 6 < sum(computed) <= bound
