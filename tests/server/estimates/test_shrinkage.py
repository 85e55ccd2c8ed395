"""Slopes are shortened by the noise that is known to be in them."""

import numpy as np
import pytest
import torch

from silodp.server.estimates.shrinkage import LEAST, NoiseInSlopes


def simulated(rounds, step, momentum, curvature, deviation, slopes=4000):
    """Return slopes that start at 0 and move by noise alone, in each round."""
    random = np.random.default_rng(1)
    now = np.zeros(slopes)
    before = np.zeros(slopes)
    found = []
    for _ in range(rounds):
        gradient = curvature * now + deviation * random.standard_normal(slopes)
        now, before = now - step * gradient + momentum * (now - before), now
        found.append(now)
    return np.array(found)


def noise_of(rounds, step, momentum, curvature, deviation, first):
    noise = NoiseInSlopes(torch.tensor([curvature], dtype=torch.float64))
    size = torch.tensor([[deviation]], dtype=torch.float64)
    for r in range(rounds):
        noise.add(size, step, momentum, summed=r >= first)
    return noise


@pytest.mark.parametrize(("step", "momentum", "curvature"), [(0.3, 0.0, 0.2), (0.5, 0.8, 0.1)])
@pytest.mark.parametrize("first", [6, 12])
def test_slopes_of_noise_alone_are_known_to_be_noise(step, momentum, curvature, first):
    """The variance that is expected is the one that a simulation shows, of the last round and of
    the mean over the later rounds.
    """
    settings = (12, step, momentum, curvature, 0.3)
    paths = simulated(*settings)
    slopes = paths[first:].mean(0) if first < 12 else paths[-1]
    kept = noise_of(*settings, first).kept(torch.from_numpy(slopes)[None], 1.0)
    assert kept.item() < 0.08
    longer = noise_of(*settings, first).kept(torch.from_numpy(slopes)[None] * 2, 1.0)
    assert longer.item() == pytest.approx(0.75, abs=0.03), "three quarters of it are not noise"


def test_caution_is_a_factor_of_the_noise_and_something_is_always_kept():
    noise = noise_of(12, 0.3, 0.8, 0.1, 0.3, 6)
    slopes = torch.full((1, 5), 0.4, dtype=torch.float64)
    lost = 1 - noise.kept(slopes, 0.1).item()
    assert 0 < lost < 0.9
    assert 1 - noise.kept(slopes, 0.05).item() == pytest.approx(lost / 2)
    assert noise.kept(slopes, 0.0).item() == 1.0
    assert noise.kept(1e-9 * slopes, 1.0).item() == LEAST


def test_each_of_several_runs_has_its_own_noise():
    """The advisor tries many settings at once."""
    noise = NoiseInSlopes(torch.tensor([0.1, 0.1, 0.4], dtype=torch.float64))
    deviation = torch.tensor([[0.2], [0.4], [0.2]], dtype=torch.float64)
    step = torch.tensor([[0.3], [0.3], [0.3]])
    for r in range(8):
        noise.add(deviation, step, torch.tensor([[0.8]] * 3), summed=r >= 4)
    found = noise.kept(torch.ones(3, 6, dtype=torch.float64), 0.1).flatten().tolist()
    alone = [
        noise_of(8, 0.3, 0.8, curvature, size, 4)
        .kept(torch.ones(1, 6, dtype=torch.float64), 0.1)
        .item()
        for curvature, size in ((0.1, 0.2), (0.1, 0.4), (0.4, 0.2))
    ]
    assert found == pytest.approx(alone, rel=1e-6)
