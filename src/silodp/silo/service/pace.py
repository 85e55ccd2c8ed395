"""Measure how long a gate's slot for an answer should be: `answer_after` of a new policy.

The measurement uses invented records of the silo's shapes, number and model. So it follows from
public numbers and this machine, and not from the content of any record.
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
from silodp.core.statistics import (
    Binned,
    Grad,
    GradDiff,
    Histogram,
    Marginals,
    Score,
    Statistic,
)
from silodp.silo.answer.exact import Exact
from silodp.silo.data.records import Records
from silodp.silo.service.policy import HOUR

MULTIPLE = 2.0
"""How many times the slowest measured answer a slot is."""
LEAST = 1.0
"""The fewest seconds of a slot."""
TIMES = 3
"""How often each query is answered. The first time is counted too."""
MEASURED = 2**14
"""Most invented records. The time for more records is in proportion."""
EDGES = 64
TABLES = 16
"""The most tables of two columns that are measured, and the edges of each column."""


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

    `number` is whether a target is a number and not a class. Of what the policy allows, local
    steps take the longest: `steps` releases, one after the other. More than an hour is no slot.
    """
    longest = _slowest(problem, x, y, number, statistics)
    if "LocalSteps" in statistics or "SteeredSteps" in statistics:
        longest *= steps
    share = max(1.0, x[0] / MEASURED)
    seconds = max(LEAST, MULTIPLE * share * longest)
    return min(HOUR, math.ceil(10 * seconds) / 10)


def _slowest(
    problem: Problem, x: Sequence[int], y: Sequence[int], number: bool, statistics: Sequence[str]
) -> float:
    """Return the seconds of the slowest answer to a query that makes one release.

    They include room for one record on which the model raises. Without it, a late reply would
    reveal such a record.
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
    slowest = 0.0
    for statistic in _measured(problem, silo.features, statistics):
        query = Query(statistic, Gaussian("anchor", 1.0, 1.0, FullBatch()))
        for _ in range(TIMES):
            began = time.perf_counter()
            silo.answer(query, [0])
            slowest = max(slowest, time.perf_counter() - began)
    return slowest * silo.retries


def _measured(problem: Problem, features: int, statistics: Sequence[str]) -> list[Statistic]:
    """Return the statistics that are measured for a policy that allows these."""
    w = problem.initial([0]).double().cpu()
    measured: list[Statistic] = [Grad(w), GradDiff(w, 0.9 * w)]
    if "Score" in statistics:
        measured.append(Score(w, 0, 1.0))
    if "Histogram" in statistics:
        measured.append(Histogram(torch.linspace(-1, 1, EDGES).double(), features))
    if "Marginals" in statistics:
        edges = tuple(torch.linspace(-1, 1, TABLES).tolist())
        columns = [Binned(j, 1, edges) for j in range(min(features, TABLES))]
        pairs = [(j, (j + 1) % len(columns)) for j in range(len(columns)) if len(columns) > 1]
        measured.append(Marginals.of(columns, pairs or [(0,)]))
    return measured
