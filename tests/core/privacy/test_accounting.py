"""Golden values, independent accountants and the filters' rules."""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting import dp_event, get_sigma_gaussian
from dp_accounting.pld import pld_privacy_accountant as pld
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from silodp.core.errors import BadInput
from silodp.core.events import Event
from silodp.core.figures import rounded_up
from silodp.core.privacy import accounting as acc
from silodp.core.privacy.accounting import (
    GDP,
    Budget,
    Committed,
    Renyi,
    budget_array,
    gdp_delta,
    gdp_epsilon,
    gdp_mu,
)
from silodp.core.privacy.sampled import pld_event, renyi
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, WithoutReplacement

ANY_N = np.asarray(1200)


@pytest.mark.parametrize(
    ("epsilon", "golden"),
    [(0.75, 79.70), (1, 60.96), (1.5, 41.86), (3, 22.21), (6, 12.00), (12, 6.66), (18, 4.80)],
)
def test_full_batch_noise_has_its_golden_value(epsilon, golden):
    """std x n / clip for 50 full-batch rounds, n = 1234, delta = 1/n^2, replace-one."""
    mu = gdp_mu(Budget(epsilon, 1234**-2))
    assert 2 * math.sqrt(50) / mu == pytest.approx(golden, abs=0.006)
    assert 2 * math.sqrt(50) * get_sigma_gaussian(epsilon, 1234**-2) == pytest.approx(
        golden, abs=0.006
    )


@given(st.floats(0.05, 20), st.floats(1e-12, 0.1))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_mu_and_epsilon_are_inverse_and_err_on_the_safe_side(epsilon, delta):
    mu = gdp_mu(Budget(epsilon, delta))
    assert gdp_delta(mu, epsilon) <= delta * (1 + 1e-9)
    back = gdp_epsilon(mu, delta)
    assert back <= epsilon * (1 + 1e-9)
    assert back == pytest.approx(epsilon, rel=1e-6)


def many_digits(mu: float, epsilon: float) -> mpmath.mpf:
    """Return delta(epsilon) of mu-GDP to fifty digits."""
    with mpmath.workdps(50):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@pytest.mark.parametrize("epsilon", [1e-9, 1e-6, 1e-4, 1e-2, 0.3, 1.0, 3.0, 50.0, 3000.0])
@pytest.mark.parametrize("delta", [1e-300, 1e-100, 1e-20, 1e-12, 1e-6, 0.01, 0.9])
def test_no_rounding_lets_a_budget_be_passed(epsilon, delta):
    """At small epsilon delta is the difference of nearly equal floats."""
    mu = gdp_mu(Budget(epsilon, delta))
    assert 0 < many_digits(mu * (1 + 5e-13), epsilon) <= delta
    if epsilon >= 0.3 and delta >= 1e-20:
        assert many_digits(mu * (1 + 1e-11), epsilon) > delta


def test_epsilon_of_gdp_agrees_with_a_privacy_loss_distribution():
    accountant = pld.PLDAccountant(pld.NeighborRel.REPLACE_ONE)
    accountant.compose(pld_event(FullBatch(), 10.0), 50)
    assert gdp_epsilon(math.sqrt(50) / 10, 1e-6) == pytest.approx(
        accountant.get_epsilon(1e-6), rel=1e-4
    )


def test_poisson_costs_what_the_design_measured():
    """epsilon = 1, delta = 1e-6, n = 1200, batch 200, 50 rounds: std .0498 clip, the same as full
    batch; the unit trap would double it.
    """
    spent = acc.composed_epsilon(((Poisson(1 / 6), 0.0498 * 200 / 2, 50),), 1e-6)
    assert spent == pytest.approx(1.0, rel=2e-3)


def test_poisson_at_rate_one_is_the_plain_gaussian_in_every_accountant():
    multiplier, order = 3.0, 8.0
    assert renyi(Poisson(1.0), multiplier, order, 100) == pytest.approx(
        order / (2 * multiplier**2), rel=1e-6
    )
    sampled = acc.composed_epsilon(((Poisson(1.0), multiplier, 7),), 1e-5)
    assert sampled == pytest.approx(gdp_epsilon(math.sqrt(7) / multiplier, 1e-5), rel=1e-3)


@pytest.mark.parametrize(
    ("rate", "multiplier", "order"),
    [(0.1, 1.0, 2.0), (0.3, 0.5, 16.0), (0.05, 0.3, 64.0), (0.5, 4.0, 3.5)],
)
def test_renyi_of_poisson_agrees_with_quadrature(rate, multiplier, order):
    s = 2 * multiplier

    def log_integrand(t):
        p = np.logaddexp(
            np.log1p(-rate) + stats.norm.logpdf(t, 0, s), np.log(rate) + stats.norm.logpdf(t, 1, s)
        )
        q = np.logaddexp(
            np.log1p(-rate) + stats.norm.logpdf(t, 0, s), np.log(rate) + stats.norm.logpdf(t, -1, s)
        )
        return order * p + (1 - order) * q

    grid = np.linspace(-20 * s, 20 * s + 2 * order, 20001)
    peak = grid[log_integrand(grid).argmax()]
    height = log_integrand(peak)
    value, _ = integrate.quad(
        lambda t: np.exp(log_integrand(t) - height),
        grid[0],
        grid[-1],
        limit=2000,
        points=[0, 1, peak],
    )
    assert renyi(Poisson(rate), multiplier, order, 100) == pytest.approx(
        (math.log(value) + height) / (order - 1), rel=1e-6
    )


def test_renyi_of_poisson_with_next_to_no_noise_costs_what_the_whole_silo_costs():
    assert renyi(Poisson(0.1), 1e-9, 64.0, 100) == pytest.approx(64 / (2 * 1e-18))


def test_renyi_of_poisson_is_at_least_that_of_the_library_with_one_record_removed():
    """Replacing a record is at least as visible as removing it at the same std / clip."""
    accountant = rdp.RdpAccountant([8.0], rdp.NeighborRel.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(2 * 1.5)))
    assert renyi(Poisson(0.1), 1.5, 8.0, 100) >= accountant.rdp[0]


def test_without_replacement_reads_the_librarys_unit_right():
    """With the whole silo as the batch, sampling without replacement is no sampling at all."""
    whole = renyi(WithoutReplacement(1.0), 2.0, 8.0, 100)
    assert whole == pytest.approx(8.0 / (2 * 2.0**2), rel=1e-6)


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("multiplier", [0.3, 0.5, 1.0])
def test_without_replacement_costs_no_less_than_what_another_record_in_the_place_shows(
    rate, multiplier
):
    """All other records pull one way, and one pulls the other way or as they do: the divergence at
    order 2 is log(1 + q^2 (e^(1 / z^2) - 1)). Coins of the same rate cost less than that.
    """
    real = math.log1p(rate**2 * math.expm1(1 / multiplier**2))
    assert renyi(WithoutReplacement(rate), multiplier, 2.0, 100) >= real * (1 - 1e-9)
    assert renyi(Poisson(rate), multiplier, 2.0, 100) < real


def test_renyi_costs_a_little_more_noise_than_gdp():
    budget = Budget(1, 1e-6)
    rule = Renyi.for_gaussian(budget)
    ratio = math.sqrt(float(rule.order) / 2 / float(rule.capacity(budget_array(budget)))) * gdp_mu(
        budget
    )
    assert 1.0 < ratio < 1.1


def charge(rule, *events):
    buckets = {}
    for event in events:
        key, price = rule.price(event, ANY_N)
        buckets[key] = buckets.get(key, 0.0) + price
    return buckets


def test_full_batches_add_up_and_a_partition_costs_its_dearest_batch():
    rule = GDP()
    full = Event(FullBatch(), 2.0)
    batches = [Event(DisjointBatches(5, i), 1.0) for i in range(5)]
    assert float(rule.total(charge(rule, full, full, *batches))) == pytest.approx(2 / 4 + 1)


def test_a_batch_asked_twice_pays_twice_and_another_partition_pays_again():
    rule = GDP()
    first = Event(DisjointBatches(5, 0), 1.0)
    assert float(rule.total(charge(rule, first, first))) == pytest.approx(2)
    assert float(
        rule.total(charge(rule, first, Event(DisjointBatches(5, 0, "other"), 1.0)))
    ) == pytest.approx(2)
    assert float(
        rule.total(charge(rule, first, Event(DisjointBatches(4, 0), 1.0)))
    ) == pytest.approx(2), "another cut of the same name"


def test_gdp_refuses_to_price_subsampled_batches():
    for sampling in (Poisson(0.5), WithoutReplacement(0.5)):
        with pytest.raises(BadInput, match="gdp"):
            GDP().price(Event(sampling, 1.0), ANY_N)


def test_renyi_filter_is_never_below_the_exact_epsilon():
    rule = Renyi(16.0)
    buckets = charge(rule, *[Event(FullBatch(), 10.0)] * 50)
    assert float(rule.epsilon(buckets, np.asarray(1e-6))) >= gdp_epsilon(math.sqrt(50) / 10, 1e-6)


def test_a_committed_schedule_is_all_that_may_be_asked():
    schedule = (Event(Poisson(0.2), 5.0, 10), Event(FullBatch(), 20.0, 2))
    rule = Committed(schedule)
    whole = charge(rule, *[Event(Poisson(0.2), 5.0)] * 10, *[Event(FullBatch(), 20.0)] * 2)
    capacity = rule.capacity(budget_array(Budget(3, 1e-6)))
    assert rule.total(whole) <= capacity
    assert rule.total(charge(rule, *[Event(Poisson(0.2), 5.0)] * 11)) > capacity
    with pytest.raises(BadInput, match="schedule"):
        rule.price(Event(Poisson(0.2), 4.9), ANY_N)
    with pytest.raises(BadInput, match="schedule"):
        rule.price(Event(Poisson(0.21), 5.0), ANY_N)


def test_a_schedule_beyond_the_budget_has_no_capacity():
    rule = Committed((Event(Poisson(0.2), 1.0, 100),))
    assert float(rule.capacity(budget_array(Budget(0.5, 1e-6)))) == 0


def test_no_noise_costs_infinity_under_every_rule():
    assert GDP().price(Event(FullBatch(), 0.0), ANY_N)[1] == math.inf
    assert Renyi(4.0).price(Event(Poisson(0.1), 0.0), ANY_N)[1] == math.inf
    assert acc.composed_epsilon(((Poisson(0.1), 0.0, 1),), 1e-5) == math.inf


@pytest.mark.parametrize(("n", "epsilon"), [(10, 1.0), (1000, 1.0), (50, 0.5), (50, 4.0)])
def test_a_user_level_target_is_met_by_group_privacy_or_the_papers_hybrid(n, epsilon):
    target = Budget(epsilon, 1e-6)
    record = acc.record_budget_for_user(target, n, gaussian=True)
    through_group = gdp_epsilon(n * gdp_mu(record), target.delta)
    paper = acc.user_level(record, n)
    assert through_group <= epsilon * (1 + 1e-6) or (
        paper.epsilon <= epsilon * (1 + 1e-9) and paper.delta <= target.delta
    )
    if epsilon <= 1:
        assert gdp_mu(record) >= gdp_mu(Budget(epsilon / n, 1e-6 / (4 * n)))


def test_the_papers_conversion_to_user_level():
    whole = acc.user_level(Budget(0.02, 1e-12), 50)
    assert whole.epsilon == pytest.approx(1.0)
    assert whole.delta == pytest.approx(50 * math.exp(49 * 0.02) * 1e-12)


@pytest.mark.parametrize("digits", [3, 4])
def test_a_spend_is_never_shown_as_less_than_it_is_and_hardly_as_more(digits):
    for value in (
        *np.random.default_rng(0).lognormal(0, 6, 2000),
        9.9999,
        1.00001,
        0.11111,
        3.0,
        3.2431684,
        1e-300,
    ):
        shown = float(rounded_up(value, digits))
        assert value * (1 - 1e-9) <= shown <= value * (1 + 10.0 ** (1 - digits))
    assert (rounded_up(0.0), rounded_up(math.inf), rounded_up(3 - 1e-12)) == ("0", "inf", "3")


def test_a_spend_with_decimals_is_never_shown_as_less_but_for_float_noise():
    for value in (*np.random.default_rng(0).lognormal(0, 3, 2000), 9.99999, 0.00001, 3.00004):
        assert value * (1 - 1e-9) <= float(rounded_up(value, 4, "f")) <= value * (1 + 1e-9) + 1e-4
    shown = [
        rounded_up(value, 4, "f")
        for value in (0.0, 2.999999997, 3.0, 3.0000000001, 3.00001, 1e-9, math.inf, math.nan)
    ]
    assert shown == ["0.0000", "3.0000", "3.0000", "3.0000", "3.0001", "0.0001", "inf", "nan"]
    assert [rounded_up(value, 4) for value in (2.999999997, 3.0000000001, math.nan)] == [
        "3",
        "3",
        "nan",
    ]


def test_senseless_budgets_are_refused_in_one_sentence():
    for epsilon in (0, -1, math.nan):
        with pytest.raises(BadInput, match="epsilon is"):
            Budget(epsilon, 1e-6)
    assert 0 < gdp_mu(Budget(1, 1e-300)) < 1
    for delta in (0, 1, -0.1, 1e-301, 1e-320):
        with pytest.raises(BadInput, match="delta is"):
            Budget(1, delta)


@pytest.mark.parametrize(
    ("n", "rate", "target"), [(20, 0.05, Budget(4, 1e-3)), (200, 0.005, Budget(4, 1e-5))]
)
def test_a_user_level_target_holds_for_poisson_batches_too(n, rate, target):
    """Every record of the silo replaced at once, +C by -C, one Poisson release: delta integrated
    directly, at the noise the target asks.

    Group privacy of mu would give these cases 1.7 and 4.6 times the delta that it claims."""
    record = acc.record_budget_for_user(target, n, gaussian=False)
    low, high = 1e-2, 1e4
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (
            (middle, high)
            if acc.composed_epsilon(((Poisson(rate), middle, 1),), record.delta) > record.epsilon
            else (low, middle)
        )
    std = 2 * high  # in units of the clip, of the sum of the batch's records
    size = np.arange(n + 1)
    weight = stats.binom.pmf(size, n, rate)
    t = np.linspace(-n - 12 * std, n + 12 * std, 200_001)
    p, q = (
        np.exp(-0.5 * ((t[:, None] - sign * size) / std) ** 2)
        @ weight
        / (std * math.sqrt(2 * math.pi))
        for sign in (1, -1)
    )
    delta = np.maximum(p - math.exp(target.epsilon) * q, 0).sum() * (t[1] - t[0])
    assert delta <= target.delta


def test_no_poisson_release_is_free_however_much_noise_it_has():
    assert renyi(Poisson(0.001), 1e5, 12.256, 100) > 0
    assert renyi(Poisson(1.0), 3.0, 8.0, 100) == 8.0 / (2 * 3.0**2), (
        "and none costs more than without sampling"
    )
