"""What the advisor tries: models, algorithms, rounds, clips and steps, by the size of the model and
by how loud the noise is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from silodp.server.advice.facts import Facts
from silodp.server.estimates.shrinkage import CAUTION

MOMENTA = (0.0, 0.8)
WITH_MOMENTUM = ("momentum", "scaled")
"""The advised algorithms that have a momentum."""


@dataclass(frozen=True)
class Effort:
    """What is tried, by the size of the model: the same everywhere, whatever the machine, so that
    the choice is the same too.

    `clips` are in units of the gradient that a typical record has at the start, `lengths` are step
    x clip: the longest that all records together can move w in a round. `pool`: most records that
    are simulated; the noise is always that of the real number.
    """

    parameters: float
    worlds: tuple[int, ...] = tuple(range(18))
    pool: int = 1200
    tested: int = 1500
    rounds: tuple[int, ...] = (3, 6, 12, 25, 50)
    clips: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    lengths: tuple[float, ...] = (0.12, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    trials: int = 4


EFFORTS = (
    Effort(70),
    Effort(300, pool=800, tested=800, trials=3),
    Effort(1_000, (0, 2, 3, 5, 7, 9, 13, 14), 600, 600, trials=2),
    Effort(12_000, (0, 2, 13), 400, 600, (3, 12, 40), (0.25, 1.0), (0.5, 1.0, 2.0, 4.0), 2),
    Effort(100_000, (0, 2), 200, 400, (5, 25), (0.5,), (0.5, 1.0, 2.0, 4.0), 2),
    Effort(math.inf, (2,), 64, 200, (20,), (0.5,), (0.5, 1.0, 2.0), 1),
)
LOUD = 300.0
"""Records x mu below which noise drowns what more than 25 rounds could find."""
QUIET = 2000.0
"""Records x mu from which noise is so little that more rounds come closer to the best model."""
MORE_ROUNDS = (100, 200)
BENDING = 3000.0
"""Records x mu from which models that bend are tried: additive ones and networks. With less, noise
drowns what they could find beside a line in scaled features.
"""
SCALED_CLIPS = (0.25, 0.5, 1.0, 2.0)
SCALED_LENGTHS = (0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0)
CAUTIONS = (CAUTION, 0.0)
"""How much slopes are shortened for their noise: by all of it or, where noise is loud, also not at
all, because columns that go together may show more than each of them.
"""
SCALED_ROUNDS = {3: 0.0, 6: 0.0, 12: 0.0, 25: 0.0, 50: 1000.0, 100: QUIET}
"""What is tried in standardised features: clips, lengths, and rounds with the records x mu from
which they are tried.
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
    caution: float = CAUTION


def points_of(batch: Batch) -> list[Point]:
    """Return the last iterates' candidates, then those of the averages. What is drawn towards the
    mean by the noise of its last round is not averaged.
    """
    outputs = ("last",) if batch.algorithm == "scaled" else ("last", "tail")
    return [
        Point(batch.model, batch.algorithm, batch.rounds, **p, output=output)
        for output in outputs
        for p in batch.points
    ]


def regrouped(points: Sequence[Point]) -> list[tuple[Batch, list[tuple[Point, int]]]]:
    """Batches for these candidates, and where in them each is."""
    groups: dict[tuple[str, str, int], list[Point]] = {}
    for point in points:
        groups.setdefault((point.model, point.algorithm, point.rounds), []).append(point)
    found = []
    for key, members in groups.items():
        settings = tuple(_settings(p) for p in members)
        found.append((Batch(*key, settings), [(p, j) for j, p in enumerate(members)]))
    return found


def _settings(point: Point) -> dict[str, float]:
    """Return the settings of a candidate that a batch may have several of."""
    found = {"clip": point.clip, "step": point.step, "momentum": point.momentum}
    if point.algorithm == "scaled":
        found["caution"] = point.caution
    return found


def regrets(losses: Mapping[Point, np.ndarray]) -> dict[Point, float]:
    """Return how much worse each candidate is than the best, as the root mean square over the
    worlds: much worse in one counts more than a little in all.
    """
    best = np.min(list(losses.values()), axis=0)
    return {
        point: float(np.sqrt(np.square(found - best).mean())) for point, found in losses.items()
    }


NEAR = math.log(2.3)
"""Steps and clips within a factor of 2 are near, rounded as they are."""


def near(points: Sequence[Point]) -> dict[Point, list[Point]]:
    """Return for each candidate those that differ from it by a factor of about 2 in step or clip
    alone.
    """
    families: dict[tuple, list[Point]] = {}
    for p in points:
        key = p.model, p.algorithm, p.rounds, p.momentum, p.output, p.caution
        families.setdefault(key, []).append(p)
    found: dict[Point, list[Point]] = {}
    for members in families.values():
        for p in members:
            found[p] = [q for q in members if _one_factor(p, q)]
    return found


def _one_factor(p: Point, q: Point) -> bool:
    step = abs(math.log(p.step / q.step))
    clip = abs(math.log(p.clip / q.clip))
    alone = min(step, clip) < math.log(1.3)
    return p != q and alone and max(step, clip) < NEAR


def cautious(
    regret: Mapping[Point, float], around: Mapping[Point, Sequence[Point]]
) -> dict[Point, float]:
    """Return the mean of each candidate's regret and of the worst near it: the settings that are
    chosen must do well even if the records ask for half or twice as much.
    """
    found = {}
    for point, own in regret.items():
        others = [regret[q] for q in around.get(point, ()) if q in regret]
        found[point] = (own + max([own, *others])) / 2
    return found


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
    if worth >= BENDING and features <= 200:
        found.append("mlp:16")
    return found


def rounded(value: float) -> float:
    """Return the number with two digits, which a person can read and type."""
    return float(f"{value:.2g}")
