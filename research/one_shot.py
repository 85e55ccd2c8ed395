"""Is a one-shot model ever worse than a constant? `python -m research one-shot` tries many seeds of
ten shapes of made-up records.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy import optimize, special

from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.server.estimates.linear import question, solution

SHAPES = range(10)
WORSE = 1.05
"""A model may have so many times the log loss of the best constant, and no more."""


def relative_loss(number: int, seed: int) -> float | None:
    """Return the loss of a one-shot model beside a constant's, on the shape of this number: 150 to
    3,000 records, 3 to 29 features, 3 to 50 % of the second class, little or much budget. None
    where the model is refused.
    """
    random = np.random.default_rng((3, number))
    n = int(np.exp(random.uniform(np.log(150), np.log(3000))))
    features = int(random.integers(3, 30))
    spread = float(np.exp(random.uniform(np.log(0.5), np.log(3))))
    mu = float(np.exp(random.uniform(np.log(0.2), np.log(2))))
    low = random.uniform(0, 0.6)
    random = np.random.default_rng((number, seed))
    x = (-low + (1 - low) * 0.4 * random.standard_normal((2 * n + 2000, features))).clip(-1, 1)
    line = x @ random.standard_normal(features)
    line = spread * (line - line.mean()) / line.std()
    wanted = [0.03, 0.1, 0.3, 0.5][number % 4]
    start: Any = optimize.brentq(lambda a: special.expit(a + line).mean() - wanted, -30, 30)
    y = (random.random(len(x)) < special.expit(start + line)).astype(np.int64)
    problem = Problem(*model_by_name("logistic", features, 2))
    gram = question(problem, 1.0, 1.0)
    given = torch.from_numpy(x[:n]).float(), torch.from_numpy(y[:n])
    std = torch.full((1, 1), 2 * float(gram.norm) / n / mu, dtype=torch.float64)
    value = gram.rows(problem, 0)(*given).mean(0).double()
    value = value + std[0] * torch.from_numpy(random.standard_normal(len(value)))
    w = solution(problem, gram, value[None], std, torch.tensor([[float(n)]]))
    if bool(w.isnan().any()):
        return None
    x, y = torch.from_numpy(x[n:]), torch.from_numpy(y[n:])
    share = y.double().mean()
    constant = -(share * share.log() + (1 - share) * (1 - share).log())
    return float(problem.losses(w, x, y).mean() / constant)


def measure(seeds: int, workers: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape: refusals, and the median and the largest loss of the models."""
    with ProcessPoolExecutor(workers) as pool:
        for number in SHAPES:
            losses = list(pool.map(partial(relative_loss, number), range(seeds), chunksize=50))
            made = np.array([loss for loss in losses if loss is not None])
            yield {
                "shape": number,
                "seeds": seeds,
                "refused": seeds - len(made),
                "median": float(np.median(made)) if len(made) else None,
                "largest": float(made.max()) if len(made) else None,
                "above": int((made > WORSE).sum()),
            }
