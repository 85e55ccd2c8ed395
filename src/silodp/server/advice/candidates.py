"""What the advisor tries: models, algorithms, rounds, clips and steps, by the size of the model and
by how loud the noise is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from silodp.server.advice.facts import Facts

MOMENTA = (0.0, 0.8)


@dataclass(frozen=True)
class Effort:
    """What is tried, by the size of the model: the same everywhere, whatever the machine, so that
    the choice is the same too.

    `clips` are in units of the gradient that a typical record has at the start, `lengths` are step
    x clip: the longest that all records together can move w in a round. `pool`: most records that
    are simulated; the noise is always that of the real number.
    """

    parameters: float
    worlds: tuple[int, ...] = tuple(range(13))
    pool: int = 1200
    tested: int = 1500
    rounds: tuple[int, ...] = (1, 3, 6, 12, 25, 50)
    clips: tuple[float, ...] = (0.25, 0.5, 1.0)
    lengths: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0)
    trials: int = 6
    looks: int = 2
    """Samples of a world: of all candidates at first, then of those that are looked at again."""


EFFORTS = (
    Effort(70),
    Effort(300, pool=800, tested=800, trials=3, looks=1),
    Effort(1_000, tuple(range(7)), 600, 600, trials=2, looks=1),
    Effort(12_000, (0, 1, 2), 400, 600, (3, 12, 40), (0.25, 1.0), (0.3, 1.0, 3.0, 10.0), 2, 1),
    Effort(100_000, (0, 1), 200, 400, (5, 25), (0.5,), (0.3, 1.0, 3.0, 10.0), 2, 1),
    Effort(math.inf, (1,), 64, 200, (20,), (0.5,), (0.3, 1.0, 3.0), 1, 1),
)
BENDING = 400.0
NETWORK = 3000.0
"""Records x mu from which models that bend are tried, and networks: with less, noise drowns what
they could find beside a line.
"""
ONE_SHOT = "one-shot"
WHOLE = (0.7, 1.0, 2.0)
MOST_PRODUCTS = 100
"""One question for all products of two features: its clips, and up to how many features it is
tried.
"""


@dataclass(frozen=True)
class Batch:
    """Settings of one model, algorithm and number of rounds, which are run side by side."""

    model: str
    algorithm: str
    rounds: int
    points: tuple[dict[str, float], ...]


@dataclass(frozen=True)
class Point:
    """One candidate."""

    model: str
    algorithm: str
    rounds: int
    clip: float
    step: float
    momentum: float
    output: str


def points_of(batch: Batch) -> list[Point]:
    """The last iterates' candidates, then those of the averages."""
    return [
        Point(batch.model, batch.algorithm, batch.rounds, **p, output=output)
        for output in ("last", "tail")
        for p in batch.points
    ]


def regrouped(points: Sequence[Point]) -> list[tuple[Batch, list[tuple[Point, int]]]]:
    """Batches for these candidates, and where in them each is."""
    groups: dict[tuple[str, str, int], list[Point]] = {}
    for point in points:
        groups.setdefault((point.model, point.algorithm, point.rounds), []).append(point)
    found = []
    for key, members in groups.items():
        settings = tuple({"clip": p.clip, "step": p.step, "momentum": p.momentum} for p in members)
        found.append((Batch(*key, settings), [(p, j) for j, p in enumerate(members)]))
    return found


def regrets(errors: Mapping[Point, np.ndarray]) -> dict[Point, float]:
    """How much worse each is than the best, as the root mean square over the worlds: much worse in
    one counts more than a little in all.
    """
    best = np.min(list(errors.values()), axis=0)
    return {
        point: float(np.sqrt(np.square(found - best).mean())) for point, found in errors.items()
    }


def models_for(facts: Facts, worth: float) -> list[str]:
    """Lines first; `worth` is records x mu, by which the noise of a mean falls."""
    features = len(facts.kinds)
    if facts.plain.kind in ("regression", "count"):
        found = ["linear"]
    else:
        found = ["logistic"]
    if (
        worth >= BENDING
        and features <= 60
        and "number" in facts.kinds + ("number",) * facts.kinds.count("standard")
    ):
        found.append("additive:6")
    if worth >= NETWORK and features <= 200:
        found.append("mlp:16")
    return found


def rounded(value: float) -> float:
    """Two digits: settings that a person can read and type."""
    return float(f"{value:.2g}")
