"""Other people's code under our attack: does what this function gives away stay within the epsilon
that it claims?

The function, release(x, y, seed), takes a table and returns everything that an adversary would see,
as one array. It is called many times on two neighbouring tables that differ in one record (or in
all, where the claim is about a whole silo). The attacker learns on a third of the runs how outputs
differ, scores the others along that direction, and a Clopper-Pearson test of those scores bounds
epsilon from below, whatever the mechanism is. A bound above the claim refutes it. One below it
proves nothing: a better attack may exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from silodp.audit.bounds import epsilon_lower, epsilon_of, gdp_fit
from silodp.core.errors import BadInput

Table = tuple[np.ndarray, np.ndarray]
Release = Callable[[np.ndarray, np.ndarray, int], object]
UNITS = ("record", "silo")
LEAST_RUNS = 60
MOST_NUMBERS = 10**8


@dataclass(frozen=True)
class Finding:
    """What one pair of neighbours showed."""

    canary: str
    empirical: float
    """Epsilon at the claim's delta of the normal curve that fits the scores: an estimate, no bound.
    """
    lower: float
    """The true epsilon is below it with probability at most the level."""
    refuted: bool


def neighbours(
    unit: str, records: int, features: int, rng: np.random.Generator
) -> Iterator[tuple[str, Table, Table]]:
    """(name, one table, its neighbour). Rows have length 1 at most, but for canaries that are
    called long or far; labels are 0 and 1.
    """
    x = rng.normal(size=(records, features))
    x /= np.maximum(1.0, np.linalg.norm(x, axis=1, keepdims=True))
    x[:, 0] = 0.0  # a direction of its own for the canary
    y = rng.integers(0, 2, records).astype(float)

    def with_first(row: np.ndarray, label: float) -> Table:
        return np.vstack([row, x[1:]]), np.concatenate([[label], y[1:]])

    own = np.eye(features)[0]
    if unit == "silo":
        yield "all labels turned round", (x, y), (x, 1 - y)
        for name, length in (
            ("nearly empty", 1),
            ("nearly empty, or far", 100),
        ):  # quite empty ones make some code divide by zero
            yield (
                f"all rows {name}",
                (x + length * own, np.ones(records)),
                (1e-3 * (x + own), np.ones(records)),
            )
    else:
        # a model soon fits a far row, and its gradient ends
        for name, length in (("one row", 1), ("one long row", 5), ("one far row", 100)):
            yield (
                f"{name}, its label turned round",
                with_first(length * own, 1.0),
                with_first(length * own, 0.0),
            )


def certify(
    release: Release,
    epsilon: float,
    delta: float,
    *,
    unit: str = "record",
    runs: int = 1000,
    records: int = 40,
    features: int = 8,
    level: float = 0.01,
    seed: int = 0,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> list[Finding]:
    """A finding for each pair of neighbours. A true claim is refuted by any of them with
    probability at most `level`.
    """
    pairs = list(neighbours(unit, records, features, np.random.default_rng(seed)))
    found = []
    total = len(pairs) * runs
    for at, (name, one, other) in enumerate(pairs):
        seen: list[list[np.ndarray]] = [[], []]
        for run in range(runs):
            for side, (x, y) in enumerate((one, other)):
                seen[side].append(
                    _array(release, x.copy(), y.copy(), seed + 2 * (at * runs + run) + side, runs)
                )
            tick(at * runs + run + 1, total)
        if len({len(out) for side in seen for out in side}) != 1:
            raise BadInput(
                "release gave outputs of several lengths; it must give one array of one "
                "length, whatever the table"
            )
        scores = _scores(np.stack(seen[0]), np.stack(seen[1]))
        lower = epsilon_lower(*scores, delta, level / len(pairs))
        found.append(Finding(name, epsilon_of(gdp_fit(*scores)[0], delta), lower, lower > epsilon))
    return found


def _array(release: Release, x: np.ndarray, y: np.ndarray, seed: int, runs: int) -> np.ndarray:
    try:
        out = np.asarray(release(x, y, seed), dtype=float).ravel()
    except Exception as error:
        raise BadInput(
            f"release(x, y, seed) raised {type(error).__name__}: {error}; it must return "
            "an array of numbers"
        ) from error
    if len(out) * 2 * runs > MOST_NUMBERS:
        raise BadInput(
            f"release gave {len(out)} numbers a run, too many for {runs} runs; fewer "
            "--runs, or a smaller model"
        )
    return np.nan_to_num(out, nan=0.0, posinf=1e300, neginf=-1e300)


def _scores(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the last two thirds of the runs, along the direction that the first third shows;
    large for the second table.
    """
    cut = len(first) // 3
    learn = first[:cut], second[:cut]
    centre = (np.median(learn[0], axis=0) + np.median(learn[1], axis=0)) / 2
    spread = np.sqrt((learn[0].var(axis=0) + learn[1].var(axis=0)) / 2)
    scale = np.where(spread > 0, spread, 1.0)
    shift = (learn[1].mean(axis=0) - learn[0].mean(axis=0)) / scale
    shift = np.where(
        np.abs(shift) > 2 * np.sqrt(2 / cut), shift, 0.1 * shift
    )  # what is likely chance adds noise to the score

    def score(outputs: np.ndarray) -> np.ndarray:
        return np.clip((outputs - centre) / scale, -1e6, 1e6) @ shift

    return score(first[cut:]), score(second[cut:])
