"""The price of choosing the best of several runs, against exact divergences of small mechanisms and
against another library.
"""

import itertools
import math

import mpmath
import numpy as np
import pytest

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import RENYI_ORDERS, Budget, gdp_mu, renyi_conversion
from silodp.core.privacy.tuning import (
    GaussianRun,
    PoissonRepetitions,
    TruncatedNegativeBinomial,
    draw,
    drawn_apart,
    repetitions_by_name,
    selected_epsilon,
    selected_mu,
)

LAWS = [
    TruncatedNegativeBinomial(eta, gamma)
    for eta, gamma in itertools.product((-0.5, 0.0, 0.5, 1.0, 2.5), (0.02, 0.3))
] + [PoissonRepetitions(mean) for mean in (1.0, 3.0, 20.0)]
ORDERS = (1.2, 1.5, 2.0, 3.0, 8.0, 30.0)


class Finite:
    """A run with finitely many outcomes, worst first, on two neighbouring data sets; its costs are
    exact.
    """

    def __init__(self, p, q):
        self.pair = np.asarray(p, float) / np.sum(p), np.asarray(q, float) / np.sum(q)

    def rdp(self, order):
        p, q = self.pair
        return max(divergence(p, q, order), divergence(q, p, order))

    def delta(self, epsilon):
        p, q = self.pair
        return max(
            np.maximum(p - math.exp(epsilon) * q, 0).sum(),
            np.maximum(q - math.exp(epsilon) * p, 0).sum(),
        )


def divergence(p, q, order):
    exponents = order * np.log(p) + (1 - order) * np.log(q)
    top = exponents.max()
    return float((top + np.log(np.exp(exponents - top).sum())) / (order - 1))


def best_of(law, p):
    """The law of the best of K draws, by summing over k; the first entry is "nothing was run"."""
    at_most = np.cumsum(p)
    total, k, seen = np.zeros(len(p)), 0, law.probability(0)
    while 1 - seen > 1e-12 and k < 3000:
        k += 1
        weight = law.probability(k)
        total += weight * np.diff(at_most**k, prepend=0.0)
        seen += weight
    return np.append(law.probability(0), total) if law.probability(0) else total


def mechanisms():
    rng = np.random.default_rng(5)
    yield Finite([0.999, 0.001], [0.9975, 0.0025])  # the best is rare: repeating makes it likely
    yield Finite([0.5, 0.5], [0.25, 0.75])
    yield Finite([0.001, 0.999], [0.003, 0.997])
    for _ in range(3):
        p = rng.dirichlet(np.ones(4))
        yield Finite(p, p * np.exp(rng.uniform(-0.7, 0.7, 4)))


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_exact_divergence_of_the_selected_run_never_passes_the_bound(law):
    nearest = math.inf
    for run in mechanisms():
        p, q = (best_of(law, side) for side in run.pair)
        for order in ORDERS:
            bound = law.rdp(run, order)
            exact = max(divergence(p, q, order), divergence(q, p, order))
            assert exact <= bound + 1e-9
            nearest = min(nearest, bound - exact)
    assert nearest < 0.6 * (
        1 + getattr(law, "eta", 0)
    )  # the bound is not idle: some mechanism comes near it


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_number_of_runs_has_the_law_and_the_mean_that_are_charged_for(law):
    weights = np.array([law.probability(k) for k in range(3000)])
    assert weights.sum() == pytest.approx(1, abs=1e-9)
    assert weights @ np.arange(3000) == pytest.approx(law.mean, rel=1e-9)
    counts = (
        np.bincount([draw(law, u) for u in np.random.default_rng(1).random(4000)], minlength=5)[:5]
        / 4000
    )
    assert np.abs(counts - weights[:5]).max() < 4 * 0.5 / math.sqrt(
        4000
    )  # four standard deviations: about 1 false alarm in 1000


def exactly(law, k):
    """P[K = k] to 60 digits."""
    if isinstance(law, PoissonRepetitions):
        return mpmath.exp(-mpmath.mpf(law.mean)) * mpmath.mpf(law.mean) ** k / mpmath.factorial(k)
    gamma, eta = mpmath.mpf(law.gamma), mpmath.mpf(law.eta)
    if k == 0:
        return mpmath.mpf(0)
    if law.eta == 0:
        return (1 - gamma) ** k / (k * mpmath.log(1 / gamma))
    return (1 - gamma) ** k / (gamma**-eta - 1) * mpmath.rf(eta, k) / mpmath.factorial(k)


@pytest.mark.parametrize(
    "law", [*LAWS, TruncatedNegativeBinomial(1.0, 0.003), PoissonRepetitions(500.0)], ids=str
)
def test_what_is_drawn_is_as_near_to_the_law_as_is_charged_for(law):
    """The law of `draw` by its steps, uniform numbers being multiples of 2^-53; the law itself to
    60 digits.
    """
    with mpmath.workdps(60):
        apart, seen, k, sums = mpmath.mpf(0), mpmath.mpf(0), 0, [0.0, law.probability(0)]
        while sums[-1] > sums[-2] or k <= law.mean:
            k += 1
            sums.append(sums[-1] + law.probability(k))
        assert draw(law, math.nextafter(1.0, 0.0)) == next(
            (i for i, s in enumerate(sums[1:]) if s > 1 - 2**-53), k
        )
        grid = [
            min(2**53, math.ceil(mpmath.mpf(s) * 2**53)) for s in sums
        ]  # how many multiples lie below
        grid[-1] = 2**53
        for i in range(k + 1):
            true = exactly(law, i)
            apart, seen = apart + abs(mpmath.mpf(grid[i + 1] - grid[i]) / 2**53 - true), seen + true
        apart = (apart + 1 - seen) / 2
        assert 0 < apart <= drawn_apart(law) < 1e-9


@pytest.mark.parametrize(
    "law", [TruncatedNegativeBinomial(1.0, 0.1), PoissonRepetitions(10.0)], ids=str
)
def test_the_distance_of_what_is_drawn_is_charged_to_delta(law):
    run, apart = GaussianRun(0.4), drawn_apart(law)

    def exact(delta):
        return min(
            law.rdp(run, order) + renyi_conversion(order, delta) for order in RENYI_ORDERS.tolist()
        )

    for delta in (1e-6, 1e-10, 20 * apart):
        epsilon = selected_epsilon(law, run, delta)
        if epsilon < math.inf:
            assert epsilon >= exact(delta - (1 + math.exp(epsilon)) * apart * (1 - 1e-9))
            assert epsilon > exact(delta)
    assert selected_epsilon(law, run, apart) == math.inf, "there is nothing to charge it to"
    with pytest.raises(BadInput, match="does not pay for choosing"):
        selected_mu(law, Budget(3.0, apart))


@pytest.mark.parametrize(
    "law",
    [
        TruncatedNegativeBinomial(0.0, 0.05),
        TruncatedNegativeBinomial(1.0, 0.1),
        PoissonRepetitions(10.0),
    ],
    ids=str,
)
def test_prices_agree_with_another_library(law):
    from dp_accounting import dp_event
    from dp_accounting.rdp import rdp_privacy_accountant as library

    mu, orders = 0.4, RENYI_ORDERS[::8].tolist()

    class Converted(GaussianRun):
        def delta(self, epsilon):
            return library.compute_delta(orders, [self.rdp(a) for a in orders], epsilon)[0]

    accountant = library.RdpAccountant(orders, library.NeighborRel.REPLACE_ONE)
    shape = math.inf if isinstance(law, PoissonRepetitions) else law.eta
    accountant.compose(
        dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(1 / mu), law.mean, shape)
    )
    theirs = accountant.get_epsilon(1e-6)
    assert selected_epsilon(law, Converted(mu), 1e-6) == pytest.approx(theirs, rel=2e-3)
    assert (
        selected_epsilon(law, GaussianRun(mu), 1e-6) <= 1.002 * theirs
    )  # a Gaussian run's delta is known exactly


def test_whoever_sees_every_run_learns_more_than_the_selection_bound_says():
    """Why the bound is not for an untrusted server: the exact divergence of all K runs passes it,
    and with many runs has no bound.
    """
    law, run, order = TruncatedNegativeBinomial(1.0, 0.01), GaussianRun(0.3), 2.0
    moments = [
        law.probability(k) * math.exp((order - 1) * k * run.rdp(order)) for k in range(1, 2000)
    ]
    assert math.log(sum(moments)) / (order - 1) > 5 * law.rdp(run, order)


@pytest.mark.parametrize(
    "law", [PoissonRepetitions(10.0), TruncatedNegativeBinomial(1.0, 0.1)], ids=str
)
def test_the_runs_of_a_selection_fill_the_budget_and_no_more(law):
    budget = Budget(3.0, 1e-6)
    for beside in (0.0, 0.1 * gdp_mu(budget) ** 2):
        mu = selected_mu(law, budget, beside=beside)
        assert selected_epsilon(law, GaussianRun(mu), budget.delta, beside=beside) <= 3.0
        assert selected_epsilon(law, GaussianRun(mu * 1.001), budget.delta, beside=beside) > 3.0
        assert mu < gdp_mu(budget)
    assert selected_mu(law, budget) > gdp_mu(budget) / math.sqrt(
        10
    )  # that is what a trusted curator buys


@pytest.mark.parametrize(
    "text",
    [
        "poisson:0.5",
        "poisson:inf",
        "geometric:1",
        "tnb:-1:0.1",
        "tnb:1:0",
        "tnb:1",
        "binomial:3",
        "poisson:x",
    ],
)
def test_a_law_that_has_no_theorem_is_refused(text):
    with pytest.raises(BadInput):
        repetitions_by_name(text)


@pytest.mark.parametrize(
    "text", ["poisson:1e9", "poisson:10001", "geometric:1e6", "tnb:5:1e-4", "tnb:-0.5:1e-9"]
)
def test_more_runs_than_anybody_can_carry_out_are_refused(text):
    with pytest.raises(BadInput, match=r"at most 10,000|at least 0\.0001"):
        repetitions_by_name(text)


def test_a_draw_is_never_cut():
    for mean, uniform in ((1e4, 1 - 1e-9), (2e6, 0.45)):
        law = TruncatedNegativeBinomial(1.0, 1 / mean)
        assert draw(law, uniform) == pytest.approx(
            math.log1p(-uniform) / math.log1p(-1 / mean), rel=1e-3
        )
    assert draw(repetitions_by_name("poisson:10000"), 0.5) == pytest.approx(10_000, abs=2)
    assert 10_000 < draw(repetitions_by_name("poisson:10000"), math.nextafter(1, 0)) < 12_000, (
        "where the sum stays below 1"
    )


@pytest.mark.parametrize(("eta", "gamma"), [(1100.0, 0.5), (5000.0, 0.9), (1e9, 1 - 1e-6)])
def test_a_law_of_large_eta_has_its_probabilities_although_gamma_to_the_eta_is_no_float(eta, gamma):
    law = TruncatedNegativeBinomial(eta, gamma)
    weights = np.array([law.probability(k) for k in range(4000)])
    assert weights.sum() == pytest.approx(1, rel=1e-4)
    assert weights @ np.arange(4000) == pytest.approx(law.mean, rel=1e-4)
    assert draw(law, 0.5) == pytest.approx(law.mean, rel=0.01)


def test_laws_are_found_by_name():
    assert repetitions_by_name("poisson:10").mean == 10
    assert repetitions_by_name("geometric:10").mean == pytest.approx(10)
    assert repetitions_by_name("tnb:0:0.1") == TruncatedNegativeBinomial(0.0, 0.1)


def test_a_budget_too_small_to_choose_at_all_is_refused():
    with pytest.raises(BadInput, match="does not pay"):
        selected_mu(TruncatedNegativeBinomial(1.0, 1e-3), Budget(0.002, 1e-6))


@pytest.mark.parametrize("mean", [1.0, 4.0])
def test_no_run_is_drawn_as_often_as_a_poisson_law_says(mean):
    law = repetitions_by_name(f"poisson:{mean}")
    none = math.exp(-mean)
    assert draw(law, 0.0) == draw(law, none * (1 - 1e-9)) == 0
    assert draw(law, none * (1 + 1e-9)) == 1
