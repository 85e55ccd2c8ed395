"""How excess risk grows with the noise: a strongly convex problem with an inactive clip, at fixed rounds, where noise dominates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from silodp.core.accounting import Budget, gdp_epsilon
from silodp.core.losses import squared_error
from silodp.core.problem import Problem
from silodp.core.query import DisjointBatches, FullBatch, Gaussian
from silodp.lab.evaluate import training_loss
from silodp.lab.runfolder import make_folder, write_environment
from silodp.lab.simulation import simulate
from silodp.server.algorithms import prox_pl_svrg, prox_sgd
from silodp.server.output import output
from silodp.server.plan import Plan, calibrate
from silodp.silo.records import Records

SILOS, FEATURES, ROUNDS, DELTA, CLIP = 4, 10, 20, 1e-6, 40.0
MUS = (1.0, 2.0, 4.0, 8.0)
SIZES = (1000, 2000, 4000, 8000)


def least_squares(n: int) -> tuple[Problem, Records, float]:
    """n records a silo around one linear truth with orthonormal features, so that beta = mu and the clip is never active; and F*."""
    random = np.random.default_rng(n)
    truth = np.full(FEATURES, 0.3)
    silos = []
    for _ in range(SILOS):
        x = np.linalg.qr(random.normal(size=(n, FEATURES)))[0] * math.sqrt(n)
        silos.append((x, x @ truth + 0.1 * random.normal(size=n)))
    records = Records.of(silos)
    problem = Problem(nn.Sequential(nn.Linear(FEATURES, 1, bias=False)), squared_error)
    x = records.x.double().flatten(0, 1)
    best = torch.linalg.lstsq(x, records.y.double().flatten()).solution
    return problem, records, float(training_loss(problem, best.float()[None], records))


def _prox_sgd(n: int) -> tuple[Callable, dict[str, Gaussian], dict | None]:
    return partial(prox_sgd, rounds=ROUNDS, step=0.25), {"minibatch": Gaussian("minibatch", CLIP, 0.0, DisjointBatches(ROUNDS))}, None


def _pl_svrg(n: int) -> tuple[Callable, dict[str, Gaussian], dict | None]:
    run = partial(prox_pl_svrg, restarts=2, epochs=2, inner=ROUNDS // 4, step=0.25, slope=2 * CLIP)
    return run, {kind: Gaussian(kind, CLIP, 0.0, FullBatch()) for kind in ("anchor", "refine")}, {"anchor": 0.5, "refine": 0.5}


ALGORITHMS = {"prox-sgd": _prox_sgd, "prox-pl-svrg": _pl_svrg}


def excess_risk(name: str, n: int, mu: float, repeats: int) -> Tensor:
    """(repeats,): F(w) - F* of independent private runs that start at the optimum's neighbourhood and end at the noise floor."""
    problem, records, best = least_squares(n)
    run, mechanisms, shares = ALGORITHMS[name](n)
    budget = Budget(gdp_epsilon(mu, DELTA), DELTA)
    plan: Plan = calibrate(run, mechanisms, budget, records.counts, shares=shares)
    fed, _ = simulate(problem, records, plan, range(repeats))
    w = output(run(fed, problem, torch.zeros(repeats, problem.dim), **plan.mechanisms))
    return training_loss(problem, w, records) - best


def measure(repeats: int, folder: Path) -> list[dict]:
    """Fitted log-log slopes: excess risk against 1/mu at n = 2000, and against n at mu = 2; writes rates.json."""
    make_folder(folder)
    fits = []
    for name in ALGORITHMS:
        for against, theory, points in (
            ("1/mu", 2, [(1 / mu, 2000, mu) for mu in reversed(MUS)]),
            ("n", -2, [(float(n), n, 2.0) for n in SIZES]),
        ):
            risks = [excess_risk(name, n, mu, repeats) for _, n, mu in points]
            means = [float(r.mean()) for r in risks]
            slope = float(np.polyfit(np.log([p[0] for p in points]), np.log(means), 1)[0])
            fits.append(
                {
                    "algorithm": name, "against": against, "theory": theory, "slope": slope, "x": [p[0] for p in points], "risk": means,
                    "standard_error": [float(r.std() / math.sqrt(repeats)) for r in risks],
                }
            )  # fmt: skip
    (folder / "rates.json").write_text(json.dumps(fits, indent=1) + "\n")
    write_environment(folder, noise="simulation: seeded pseudo-random float noise")
    return fits
