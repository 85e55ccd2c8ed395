"""Feature scaling learnt from two releases of each silo."""

import ast
import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.errors import Refused
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.problem.losses import logistic
from silodp.core.problem.problem import Problem
from silodp.core.statistics import Histogram, Moments
from silodp.server.estimates import scaling
from silodp.server.estimates.scaling import EDGES, learn_scaling
from silodp.server.federation import Everyone, Federation
from silodp.server.plan import calibrate
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate
from silodp.silo.ledger.memory import MemoryLedger
from silodp.testing.federation import Recording, Replaying
from silodp.wire.inprocess import InProcess

MEAN = np.array([0.0, 10.0, -300.0, 0.02, 5e4])
STD = np.array([1.0, 2.0, 50.0, 0.01, 1e4])


def channel_to(silos, *, budget=math.inf, seed=0):
    records = Records.of([(x, np.zeros(len(x), np.int64)) for x in silos])
    problem = Problem(nn.Linear(records.x.shape[2], 1), logistic)
    ledger = MemoryLedger(GDP(), Budget(budget, 1e-6), records.counts)
    gate = Gate(Simulated(problem, records, [seed]), ledger, dim=problem.dim, counts=records.counts)
    return Recording(InProcess(gate)), ledger


def mechanisms(noise_multiplier):
    return {kind: Gaussian(kind, 1.0, noise_multiplier) for kind in ("ranges", "moments")}


def learnt(silos, noise_multiplier, seed=0):
    channel, _ = channel_to(silos, seed=seed)
    mean, scale = learn_scaling(
        Federation(channel, Everyone(len(silos))), silos[0].shape[1], **mechanisms(noise_multiplier)
    )
    return mean.numpy(), scale.numpy()


def drawn(*counts, seed=0):
    random = np.random.default_rng(seed)
    return [random.normal(MEAN, STD, (n, len(MEAN))) for n in counts]


@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0])
def test_at_a_generous_budget_it_recovers_mean_and_scale_of_each_feature(noise_multiplier):
    mean, scale = learnt(drawn(2000, 1200), noise_multiplier)
    assert (np.abs(mean - MEAN) < 0.15 * STD).all()
    assert (np.abs(scale / STD - 1) < 0.2).all()


def test_the_size_of_a_silo_does_not_weigh():
    random = np.random.default_rng(3)
    silos = [random.normal(2.0, 1, (3000, 1)), random.normal(6.0, 1, (600, 1))]
    mean, scale = learnt(silos, 0.0)
    assert mean == pytest.approx([4.0], abs=0.2)
    assert scale == pytest.approx([math.sqrt(5)], rel=0.1)


def test_outliers_are_clamped_and_holes_ignored():
    silos = drawn(2000, 2000)
    silos[0][:20] = 1e30
    silos[1][:20] = np.nan
    silos[1][20:40] = -np.inf
    mean, scale = learnt(silos, 0.0)
    assert (np.abs(mean - MEAN) < 0.3 * STD).all()
    assert (np.abs(scale / STD - 1) < 0.35).all()


@pytest.mark.parametrize("seed", range(5))
def test_under_noise_that_hides_everything_the_scaling_is_still_usable(seed):
    mean, scale = learnt(drawn(50, 30), 1e4, seed)
    assert np.isfinite(mean).all()
    assert np.isfinite(scale).all()
    assert (scale > 0).all()


def test_a_constant_feature_has_a_positive_scale():
    mean, scale = learnt([np.full((100, 1), 3.0)] * 2, 0.0)
    assert mean == pytest.approx([3.0])
    assert scale[0] > 0


def test_it_asks_for_one_histogram_and_one_pair_of_moments_with_noise_for_their_norms():
    channel, ledger = channel_to(drawn(200, 300), budget=2.0)
    features = len(MEAN)

    def run(fed, problem, w, **both):
        learn_scaling(fed, features, **both)
        yield w

    plan = calibrate(run, mechanisms(0.0), Budget(2.0, 1e-6), (200, 300))
    learn_scaling(Federation(channel, Everyone(2)), features, **plan.mechanisms)
    (first, everyone, _), (second, again, _) = channel.log
    assert isinstance(first.statistic, Histogram)
    assert isinstance(second.statistic, Moments)
    assert everyone == again == (0, 1)
    assert (first.mechanism.kind, second.mechanism.kind) == ("ranges", "moments")
    assert first.mechanism.clip == pytest.approx(math.sqrt(features))
    assert second.mechanism.clip == pytest.approx(math.sqrt(2 * features))
    assert ((ledger.epsilon() > 2.0 * 0.999) & (ledger.epsilon() <= 2.0)).all()
    with pytest.raises(Refused, match="budget"):
        learn_scaling(Federation(channel, Everyone(2)), features, **plan.mechanisms)


def test_all_that_the_server_learns_it_learns_from_releases():
    """The recorded releases alone, without a silo behind them, give the same scaling; and silos
    behind other releases another one.
    """
    silos = drawn(300, 200)
    channel, _ = channel_to(silos)
    first = learn_scaling(Federation(channel, Everyone(2)), len(MEAN), **mechanisms(1.0))
    replaying = Replaying(channel.log)
    second = learn_scaling(Federation(replaying, Everyone(2)), len(MEAN), **mechanisms(1.0))
    replaying.finish()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_servers_side_names_no_record():
    """It imports core and the port, nothing that could hold data (import-linter keeps silo out of
    all of server).
    """
    tree = ast.parse(inspect.getsource(scaling))
    modules = {
        n.module
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and n.module.startswith("silodp")
    }
    assert all(m.startswith("silodp.core.") or m == "silodp.server.federation" for m in modules), (
        modules
    )


def test_bins_are_public_powers_of_two():
    assert (EDGES.diff() > 0).all()
    assert (EDGES.abs().log2() == EDGES.abs().log2().round()).all()
