"""Prices are held against integrals that know nothing of the shipped accountants, and every
planted mistake in a price, a place or a product of layers is caught.
"""

import math

import pytest

from mistakes import mutants
from mistakes.prices import OF_PRICES
from silodp.audit import prices
from silodp.audit.pipeline import SOUND, Caught
from silodp.audit.probes_prices import PRICES
from silodp.core.privacy.accounting import gdp_delta
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, WithoutReplacement

EVENT, SPEND = "independent price of every event", "independent spend"
CAUGHT_BY = {
    "sampling without replacement priced as coins": EVENT,
    "coins priced by the clip, not the sensitivity": EVENT,
    "prices by the number of records at the ledger's creation": "price of a grown file",
    "later questions cost half": "price after a restart",
    "local steps cost one step": EVENT,
    "batches of one name share a bucket over an edit": "spend over an edit",
    "the dearest bucket is the total": SPEND,
    "a committed schedule with noise by the clip": SPEND,
    "totals that count on more shares": "independent spend of totals",
    "distance from Gaussian noise dropped": "sum that is not Gaussian",
    "chunks without a drawn record left out of products": "work of a batch",
    "chunks without a drawn record left out, record by record": "work of a batch",
    "a clip for each of two layers": "two layers",
    "persons dealt again after an edit": "places of persons",
    "persons at the places of their first rows": "places of persons",
    "a person at two places": "places of persons",
    "rows above the cap are a person of their own": "places of persons",
    "spellings of one id are two persons": "places of persons",
}


@pytest.mark.parametrize("multiplier", [0.35, 1.0, 3.0])
@pytest.mark.parametrize("sampling", [FullBatch(), DisjointBatches(3, 1)])
def test_the_divergence_of_a_whole_batch_is_that_of_two_normals(sampling, multiplier):
    for order in (2.0, 7.5):
        found = prices.least_divergence(sampling, multiplier, 24, order)
        assert found == pytest.approx(order / (2 * multiplier**2), rel=1e-9)


def test_a_batch_without_replacement_tells_more_than_coins_of_its_rate():
    """The chi-square of one record that takes the place of another: q^2 (e^(1 / z^2) - 1)."""
    z, n, order = 0.35, 100, 2.0
    found = prices.least_divergence(WithoutReplacement(0.05), z, n, order)
    assert found == pytest.approx(math.log1p(0.05**2 * math.expm1(1 / z**2)), rel=1e-9)
    assert found > 5 * prices.least_divergence(Poisson(0.05), z, n, order)


def test_delta_of_several_releases_is_that_of_their_composition_and_never_more():
    (pair,) = prices.pairs_of(FullBatch(), 2.0, 10)
    for count, epsilon in ((1, 1.0), (4, 3.0), (16, 6.0)):
        found = prices.delta_of([(prices.losses_of(pair), count)], epsilon)
        exact = gdp_delta(math.sqrt(count) / 2, epsilon)
        assert 0.99 * exact < found <= exact * (1 + 1e-9)


@pytest.mark.parametrize("probe", PRICES)
def test_the_shipped_pipeline_passes_every_probe_of_prices(probe, folder):
    PRICES[probe](SOUND, 0, folder)


def test_every_mistake_in_prices_has_its_probe():
    assert OF_PRICES.keys() == CAUGHT_BY.keys()
    assert set(CAUGHT_BY.values()) == set(PRICES)
    assert all(PRICES.items() <= mutants.probes_of(name).items() for name in OF_PRICES)


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_every_mistake_in_prices_is_caught_by_the_probe_that_is_made_for_it(name, folder):
    with pytest.raises(Caught):
        PRICES[CAUGHT_BY[name]](OF_PRICES[name], 0, folder)
