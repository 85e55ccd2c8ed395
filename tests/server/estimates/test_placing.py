"""Bins are where the model's risks are, and the number of bins suits the noise."""

import math

import numpy as np
import pytest

from silodp.core.errors import BadInput
from silodp.server.estimates.expected import best_bins, precision, proposed
from silodp.server.estimates.placing import assumed, bins_of, expected_cells, spread_of
from silodp.server.estimates.ranking import auc
from silodp.server.estimates.scoring import asked_of

RARE = {"recalibration": {"logits": list(np.linspace(-7, -2, 26)), "shares": [1.0] * 26}}


def test_bins_of_a_rare_outcome_lie_where_its_risks_are():
    """Ten even bins of the risk put nearly all records into the first, and their AUC is lost."""
    spread = spread_of(RARE)
    assert spread.released
    bins = bins_of(spread, 10, 0.5)
    placed = expected_cells(spread, bins.edges)
    even = expected_cells(spread, [math.log(k / (10 - k)) for k in range(1, 10)])
    fine = expected_cells(spread, bins_of(spread, 400, 0.5).edges)
    truth, kept, lost = (auc(*cells, noise=0.0, n=10**6).value for cells in (fine, placed, even))
    assert truth - kept < 0.01
    assert truth - lost > 0.04
    assert all(a < b for a, b in zip(bins.edges, bins.edges[1:], strict=False))
    assert all(
        low <= mean <= high
        for low, mean, high in zip(bins.ends, bins.means, bins.ends[1:], strict=False)
    )


@pytest.mark.parametrize("threshold", [0.0005, 0.03, 0.5, 0.999])
def test_one_edge_is_the_threshold(threshold):
    bins = bins_of(spread_of(RARE), 8, threshold)
    assert bins.ends[bins.above] == pytest.approx(threshold)
    assert list(bins.edges) == sorted(set(bins.edges))
    for senseless in (0.0, 1.0, math.nan):
        with pytest.raises(BadInput, match="a risk between 0 and 1"):
            bins_of(spread_of(RARE), 8, senseless)


def test_without_a_release_the_spread_is_around_the_public_prevalence():
    assert not spread_of({}).released
    assert spread_of({}, 0.02).prevalence < 0.1 < spread_of({}, 0.4).prevalence
    assert not spread_of({"recalibration": {"intercept": 0.1}}).released


@pytest.mark.parametrize("prevalence", [0.001, 0.02, 0.08, 0.3, 0.5, 0.95])
def test_the_assumed_mean_risk_is_the_public_prevalence(prevalence):
    """The logit of a mean risk is not the mean of the logits: 8 % had become 16 %."""
    assert assumed(prevalence).prevalence == pytest.approx(prevalence, rel=1e-3)
    assert spread_of({}, prevalence).prevalence == pytest.approx(prevalence, rel=1e-3)


def test_more_noise_has_fewer_bins_and_less_precision():
    spread = assumed(0.3)
    counts = [best_bins(spread, 0.5, 1000, noise) for noise in (1e-5, 1e-3, 5e-3)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 4 * counts[-1]
    asked = asked_of(2, None, None, bins=bins_of(spread, 10, 0.5))
    widths = [precision(asked, spread, 1000, noise)["auc"] for noise in (1e-5, 2e-3, 1.0)]
    assert widths[0] < widths[1] < widths[2] == math.inf


def test_the_price_that_is_proposed_is_the_smallest_that_is_precise_enough():
    assert proposed(lambda price: {"auc": 0.2 / price}) == 2
    assert proposed(lambda price: {"auc": 0.3 + 0.01 / price}) == 0.5
    assert proposed(lambda price: {"auc": math.inf if price < 100 else 0.01}) == 8
