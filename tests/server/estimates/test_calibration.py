"""Calibration from noisy counts: intervals hold as often as they say, and where noise drowns the
counts nothing is said.
"""

import itertools

import numpy as np
import pytest

from silodp.server.estimates.calibration import reliability, slope
from silodp.server.estimates.scoring import mean_recall

BINS, N = 10, 2000
EDGES = np.linspace(0, 1, BINS + 1)
MIDDLES = (EDGES[1:] + EDGES[:-1]) / 2
SHARES = np.array([30, 18, 12, 9, 8, 7, 6, 5, 3, 2]) / 100


def counted(random, chances, noise, n=N):
    """Noisy shares of n records by label and bin, drawn from SHARES and the chance of label 1 in
    each bin.
    """
    cells = np.concatenate([SHARES * (1 - chances), SHARES * chances])
    return (random.multinomial(n, cells) / n + noise * random.normal(size=2 * BINS)).reshape(
        2, BINS
    )


@pytest.mark.parametrize("noise", [0.0, 0.003, 0.01])
def test_observed_shares_lie_within_their_intervals_as_often_as_these_say(noise):
    """Some 300 draws of several stretches at 95 per cent: below 0.92 has a probability under
    1e-4.
    """
    random, chances, hits, seen = np.random.default_rng(1), MIDDLES**1.5, 0, 0
    for _ in range(300):
        for row in reliability(*counted(random, chances, noise), EDGES, noise, N):
            within = (row.risk_low - 1e-9 < MIDDLES) & (row.risk_high + 1e-9 > MIDDLES)
            truth = (SHARES * chances)[within].sum() / SHARES[within].sum()
            hits, seen = hits + (row.low <= truth <= row.high), seen + 1
    assert seen > 300
    assert hits / seen > 0.92


def test_stretches_grow_with_the_noise_and_end_where_it_drowns_them():
    random, rows = np.random.default_rng(2), []
    for noise in (0.0, 0.004, 0.02, 0.2):
        rows.append(reliability(*counted(random, MIDDLES, noise), EDGES, noise, N))
    assert [len(part) for part in rows] == sorted((len(part) for part in rows), reverse=True)
    assert len(rows[0]) == BINS
    assert 1 < len(rows[1]) < BINS
    assert not rows[3]
    for part in rows[:3]:
        assert all(a.risk_high == b.risk_low for a, b in itertools.pairwise(part))


@pytest.mark.parametrize(("chances", "truth"), [(MIDDLES, 1.0), (0.3 + 0.4 * MIDDLES, 0.4)])
def test_the_slope_is_one_where_risks_come_true_and_below_it_where_they_are_too_extreme(
    chances, truth
):
    random, noise = np.random.default_rng(3), 0.002
    found = [slope(*counted(random, chances, noise), MIDDLES, noise, N) for _ in range(300)]
    assert np.mean([f.value for f in found]) == pytest.approx(truth, abs=0.02)
    assert np.mean([f.low <= truth <= f.high for f in found]) > 0.92
    assert not any(f.too_noisy for f in found)


def test_a_slope_of_drowned_counts_is_not_said():
    random = np.random.default_rng(4)
    assert all(slope(*counted(random, MIDDLES, 0.2), MIDDLES, 0.2, N).too_noisy for _ in range(100))
    assert slope(np.full(BINS, -0.1), np.zeros(BINS), MIDDLES, 0.1, N).too_noisy


def test_the_mean_recall_of_several_classes_has_an_interval_that_holds():
    random, noise = np.random.default_rng(5), 0.004
    count, recall = np.array([0.6, 0.3, 0.1]), np.array([0.9, 0.5, 0.4])
    truth = recall.mean()
    found = [
        mean_recall(
            *(
                part + noise * random.normal(size=3)
                for part in (count * (1 - recall), count * recall)
            ),
            noise,
            N,
        )
        for _ in range(400)
    ]
    assert np.mean([f.low <= truth <= f.high for f in found]) > 0.92
    assert np.std([f.value for f in found]) == pytest.approx(
        np.median([f.noise for f in found]), rel=0.2
    )
    assert mean_recall(
        np.zeros(3), count, 0.05, N
    ).too_noisy  # a class of 10 per cent does not stand clear of it
