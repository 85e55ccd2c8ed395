"""What the verdict's trials say: curves tuned as the paper tunes them, and differences paired over
splits, with honest chances.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scipy import stats

from research.verdict_plan import CONDITIONS, FIGURES

TEST_OVER_TRAINING = 0.25
"""Records of every split: a fifth to test on."""
ELSEWHERE = {
    "file": "text",
    "text": "primary",
    "full": "primary",
    "move": "primary",
    "both": "primary",
    "linear": "primary",
    "adam": "primary",
}
"""Where an arm is read from that a condition does not change."""
TITLES = {
    "wbcd": "Breast cancer, R = 25",
    "mnist-M25-R25": "MNIST, M = 25, R = 25",
    "mnist-M12-R50": "MNIST, M = 12, R = 50",
    "mnist-M12-R25": "MNIST, M = 12, R = 25",
    "mnist-M25-R50": "MNIST, M = 25, R = 50",
    "cifar10-R50": "CIFAR-10, R = 50",
    "cifar10-R100": "CIFAR-10, R = 100",
}
LEVEL = 0.05
ROUNDED = 0.01
"""Per cent: verdict.csv has four digits of an error, so that a smaller difference is none."""


@dataclass(frozen=True)
class Curve:
    """A method at one epsilon: its best arm by training loss, and each split's test error."""

    arm: str
    errors: tuple[float, ...]
    loss: float
    spent: float

    @property
    def error(self) -> float:
        return statistics.mean(self.errors)


class Trials:
    """The rows of verdict.csv."""

    def __init__(self, rows: Iterable[dict]) -> None:
        self.rows = {
            (r["figure"], r["condition"], r["arm"], r["epsilon"], r["output"]): r for r in rows
        }
        self.figures = [f for f in FIGURES if any(key[0] == f for key in self.rows)]

    def epsilons(self, figure: str, condition: str) -> list[float]:
        return sorted({e for f, c, _, e, _ in self.rows if (f, c) == (figure, condition)})

    def arms(self, figure: str, condition: str) -> list[str]:
        return list(
            dict.fromkeys(a for f, c, a, _, _ in self.rows if (f, c) == (figure, condition))
        )

    def curve(
        self, method: str, figure: str, condition: str, epsilon: float, output: str = "last"
    ) -> Curve | None:
        """Of "spider" (all phases, 1 among them, and the alternate form: what the paper plots),
        "reduced" (the same without phase 1), "phases" (phases > 1 alone) or an arm. None where
        something that it is tuned over was not run."""
        where = condition
        while (
            not (spiders := [a for a in self._every(figure, where) if a.startswith("spider-q")])
            and where in ELSEWHERE
        ):
            where = ELSEWHERE[where]
        later = [a for a in spiders if a != "spider-q1"]
        wanted = {
            "phases": later,
            "reduced": [*later, "alternate"],
            "spider": [*spiders, "alternate", *(["mb-sgd"] if "spider-q1" not in spiders else [])],
        }
        found = [
            self._row(figure, condition, arm, epsilon, output)
            for arm in wanted.get(method, [method])
        ]
        known = [r for r in found if r is not None]
        if not known or len(known) < len(found):
            return None
        best = min(known, key=lambda r: r["loss"])
        return Curve(best["arm"], best["errors"], best["loss"], best["spent"])

    def _every(self, figure: str, condition: str) -> list[str]:
        from research.verdict_plan import arms

        return [arm.name for arm in arms(FIGURES[figure], CONDITIONS[condition])]

    def _row(
        self, figure: str, condition: str, arm: str, epsilon: float, output: str
    ) -> dict | None:
        changed = [a for a in self._every(figure, condition)]
        while arm not in changed and condition in ELSEWHERE:
            condition = ELSEWHERE[condition]
            changed = self._every(figure, condition)
        return self.rows.get((figure, condition, arm, epsilon, output))


@dataclass(frozen=True)
class Gap:
    """Two curves at one epsilon: the first's test error against the second's."""

    figure: str
    epsilon: float
    first: Curve
    second: Curve
    chance: float
    """Of so large a difference by chance, two-sided, by Nadeau and Bengio's test; 1 where both are
    the same runs.
    """
    adjusted: float = 1.0
    """By Holm over the epsilons of a figure at which the two are not the same runs."""

    @property
    def relative(self) -> float:
        """In per cent: below 0 where the first has less error."""
        return 100 * (self.first.error - self.second.error) / self.second.error

    @property
    def same(self) -> bool:
        return self.first == self.second

    @property
    def better(self) -> bool:
        return self.relative < -ROUNDED

    @property
    def worse(self) -> bool:
        return self.relative > ROUNDED

    @property
    def sure(self) -> bool:
        return self.tested and self.adjusted < LEVEL

    @property
    def tested(self) -> bool:
        """Whether chance is told from effect: not where settings were picked on one of the splits,
        whose share in the spread is unknown.
        """
        return FIGURES[self.figure].tuned_on is None


def chance_of(first: Sequence[float], second: Sequence[float]) -> float:
    """Nadeau and Bengio 2003: T splits of the same records share most of what they train on, so the
    variance of the mean difference is taken as (1/T + test/training) times that between splits,
    with T - 1 degrees of freedom."""
    gaps = [a - b for a, b in zip(first, second, strict=True)]
    if len(gaps) < 2 or not any(gaps):
        return 1.0
    spread = statistics.stdev(gaps)
    if spread == 0:
        return 0.0
    t = statistics.mean(gaps) / (spread * math.sqrt(1 / len(gaps) + TEST_OVER_TRAINING))
    return float(2 * stats.t.sf(abs(t), len(gaps) - 1))


def holm(chances: Sequence[float]) -> list[float]:
    """Holm's adjusted chances, in the order given."""
    order = sorted(range(len(chances)), key=chances.__getitem__)
    found = [1.0] * len(chances)
    worst = 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(chances) - rank) * chances[i]))
        found[i] = worst
    return found


def gaps(
    trials: Trials,
    first: str,
    second: str,
    figures: Iterable[str],
    condition: str,
    output: str = "last",
) -> list[Gap]:
    """Of each figure at each epsilon where both curves are known, adjusted within a figure."""
    found: list[Gap] = []
    for figure in figures:
        mine = []
        for e in trials.epsilons(figure, condition):
            a, b = (trials.curve(m, figure, condition, e, output) for m in (first, second))
            if a and b:
                mine.append(Gap(figure, e, a, b, 1.0 if a == b else chance_of(a.errors, b.errors)))
        adjusted = iter(holm([g.chance for g in mine if not g.same]))
        found += [g if g.same else replace(g, adjusted=next(adjusted)) for g in mine]
    return found


def average(found: Sequence[Gap]) -> float:
    """In per cent, over figures and epsilons, as the paper averages: above 0 where the first is
    better.
    """
    return -statistics.mean(g.relative for g in found)


def count(found: Sequence[Gap]) -> dict[str, int]:
    """In how many cells the first has less, equal and more error, and in how many that is
    significant after Holm's correction.
    """
    return {
        "better": sum(g.better for g in found),
        "same": sum(not (g.better or g.worse) for g in found),
        "worse": sum(g.worse for g in found),
        "surely better": sum(g.better and g.sure for g in found),
        "surely worse": sum(g.worse and g.sure for g in found),
    }
