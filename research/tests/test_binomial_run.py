"""The paper's shuffle protocol in simulation, with its own accountant."""

import numpy as np
import torch
from torch import nn

from research.binomial.run import calibrate, connect
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.server.algorithms import find
from silodp.server.federation import Everyone
from silodp.server.settings import prepared
from silodp.silo.data.records import Records

COUNTS = (200, 200, 120)
PROBLEM = Problem(nn.Sequential(nn.Linear(4, 2)), cross_entropy)


def test_an_algorithm_runs_over_binomial_totals_and_spends_its_budget():
    random = np.random.default_rng(0)
    records = Records.of(
        [(random.normal(size=(n, 4)).astype(np.float32), random.integers(0, 2, n)) for n in COUNTS]
    )
    algorithm = find("mb-sgd")
    run = prepared(algorithm, algorithm.schedule({"rounds": 5}), 0.5)
    plan = calibrate(
        run,
        {"minibatch": Gaussian("minibatch", 1.0, 0.0)},
        [Budget(2.0, 1e-5)],
        COUNTS,
        Everyone(3),
        dimension=PROBLEM.dim,
        least=3,
    )
    fed, ledger = connect(PROBLEM, records, plan, [3])
    *_, last = run(fed, PROBLEM, PROBLEM.initial([0]), **plan.mechanisms)
    assert bool(torch.isfinite(last).all())
    spent = ledger.epsilon()
    assert np.all(spent <= 2.0)
    assert np.all(spent > 1.9)
