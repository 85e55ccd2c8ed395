"""How long a gate's slot for an answer should be: `answer_after` of a new policy.

It is measured on made-up records of the silo's shapes, number and model. So it follows from public
numbers and this machine, and from nothing that a record holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from silodp.core.mechanisms import Gaussian
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import FullBatch
from silodp.core.statistics import Grad, GradDiff, Histogram, Score, Statistic
from silodp.silo.answer.exact import Exact
from silodp.silo.data.records import Records
from silodp.silo.service.policy import HOUR

MULTIPLE = 2.0
LEAST = 1.0
"""How many times the slowest measured answer a slot is, and its fewest seconds."""
TIMES = 3
"""How often each question is asked. The first time is counted too."""
MEASURED = 2**14
"""Records that are made up, at most. The time for more of them is in proportion."""
EDGES = 64


def slot_for(
    problem: Problem,
    x: Sequence[int],
    y: Sequence[int],
    *,
    number: bool,
    statistics: Sequence[str],
    steps: int,
) -> float:
    """Return the seconds of a slot for records with features of the shape x and targets of the
    shape y, whose first axis is that of records.

    `number` says whether a target is a number and not a class. Of what the policy allows, local
    steps take the longest: `steps` releases, one after the other. More than an hour is no slot.
    """
    local = any(name in statistics for name in ("LocalSteps", "SteeredSteps"))
    longest = _slowest(problem, x, y, number, statistics) * (steps if local else 1)
    share = max(1.0, x[0] / MEASURED)
    seconds = max(LEAST, MULTIPLE * share * longest)
    return min(HOUR, math.ceil(10 * seconds) / 10)


def _slowest(
    problem: Problem, x: Sequence[int], y: Sequence[int], number: bool, statistics: Sequence[str]
) -> float:
    """Seconds of the slowest answer to a question that makes one release, with room for one record
    on which the model raises: else a late reply would tell that there is one.
    """
    n = min(x[0], MEASURED)
    features = np.random.default_rng(0).normal(size=(n, *x[1:])).astype(np.float32)
    targets = np.zeros((n, *y[1:]), np.float32 if number else np.int64)
    targets[1::2] = 1
    silo = Exact(
        problem,
        Records.of([(features, targets)]),
        partition=lambda name, batches: np.arange(n),
        held_out_share=0.5 if n > 1 else 0.0,
    )
    found = 0.0
    for statistic in _questions(problem, silo.features, statistics):
        query = Query(statistic, Gaussian("anchor", 1.0, 1.0, FullBatch()))
        for _ in range(TIMES):
            began = time.perf_counter()
            silo.answer(query, [0])
            found = max(found, time.perf_counter() - began)
    return found * silo.retries


def _questions(problem: Problem, features: int, statistics: Sequence[str]) -> list[Statistic]:
    w = problem.initial([0]).double().cpu()
    found: list[Statistic] = [Grad(w), GradDiff(w, 0.9 * w)]
    if "Score" in statistics:
        found.append(Score(w, 0, 1.0))
    if "Histogram" in statistics:
        found.append(Histogram(torch.linspace(-1, 1, EDGES).double(), features))
    return found
