"""An attack on other people's code: does a function stay within the epsilon that it claims?

The function, release(x, y, seed), takes a table and returns everything that an adversary would see,
as one array. It is called many times on two neighbouring tables that differ in one record (or in
all records, for a claim about a whole silo). On a third of the runs the attacker learns how outputs
differ. It scores the other runs along that direction. A Clopper-Pearson test of the scores bounds
epsilon from below, for every mechanism. A bound above the claim refutes it. A bound below it proves
nothing: a better attack may exist.
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
    """The result of one pair of neighbours."""

    canary: str
    empirical: float
    """Epsilon of the normal curve that fits the scores, at the claim's delta. It is no bound, only
    an estimate.
    """
    lower: float
    """The true epsilon is below it with probability at most the level."""
    refuted: bool


def neighbours(
    unit: str, records: int, features: int, rng: np.random.Generator
) -> Iterator[tuple[str, Table, Table]]:
    """Yield (name, a table, its neighbour). Rows have length 1 at most, except canaries named long
    or far. Labels are 0 and 1.
    """
    x = rng.normal(size=(records, features))
    x /= np.maximum(1.0, np.linalg.norm(x, axis=1, keepdims=True))
    # The canary has the first direction alone.
    x[:, 0] = 0.0
    y = rng.integers(0, 2, records).astype(float)

    def with_first(row: np.ndarray, label: float) -> Table:
        return np.vstack([row, x[1:]]), np.concatenate([[label], y[1:]])

    direction = np.eye(features)[0]
    if unit == "silo":
        yield "all labels turned round", (x, y), (x, 1 - y)
        # Rows are not quite empty, because empty rows make some code divide by zero.
        for name, length in (("nearly empty", 1), ("nearly empty, or far", 100)):
            yield (
                f"all rows {name}",
                (x + length * direction, np.ones(records)),
                (1e-3 * (x + direction), np.ones(records)),
            )
    else:
        # A model soon fits a far row, whose gradient then ends. So there are shorter rows too.
        for name, length in (("one row", 1), ("one long row", 5), ("one far row", 100)):
            yield (
                f"{name}, its label turned round",
                with_first(length * direction, 1.0),
                with_first(length * direction, 0.0),
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
    """Return a finding for each pair of neighbours. All of them together refute a true claim with
    probability at most `level`.

    Raise BadInput if the release fails, or if its outputs differ in length.
    """
    pairs = list(neighbours(unit, records, features, np.random.default_rng(seed)))
    findings = []
    total = len(pairs) * runs
    for at, (name, one, other) in enumerate(pairs):
        outputs: list[list[np.ndarray]] = [[], []]
        for run in range(runs):
            for side, (x, y) in enumerate((one, other)):
                run_seed = seed + 2 * (at * runs + run) + side
                outputs[side].append(_array(release, x.copy(), y.copy(), run_seed, runs))
            tick(at * runs + run + 1, total)
        if len({len(output) for side in outputs for output in side}) != 1:
            raise BadInput(
                "release gave outputs of several lengths; it must give one array of one "
                "length, whatever the table"
            )
        scores = _scores(np.stack(outputs[0]), np.stack(outputs[1]))
        lower = epsilon_lower(*scores, delta, level / len(pairs))
        empirical = epsilon_of(gdp_fit(*scores)[0], delta)
        findings.append(Finding(name, empirical, lower, lower > epsilon))
    return findings


def _array(release: Release, x: np.ndarray, y: np.ndarray, seed: int, runs: int) -> np.ndarray:
    """Return the output of a release as finite numbers. Raise BadInput if it is none, or too
    long.
    """
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
    """Return the scores of the last two thirds of the runs, along the direction that the first
    third shows. They are large for the second table.
    """
    cut = len(first) // 3
    learn = (first[:cut], second[:cut])
    centre = (np.median(learn[0], axis=0) + np.median(learn[1], axis=0)) / 2
    spread = np.sqrt((learn[0].var(axis=0) + learn[1].var(axis=0)) / 2)
    scale = np.where(spread > 0, spread, 1.0)
    shift = (learn[1].mean(axis=0) - learn[0].mean(axis=0)) / scale
    # A shift that chance explains would only add noise to the score.
    shift = np.where(np.abs(shift) > 2 * np.sqrt(2 / cut), shift, 0.1 * shift)

    def score(outputs: np.ndarray) -> np.ndarray:
        return np.clip((outputs - centre) / scale, -1e6, 1e6) @ shift

    return score(first[cut:]), score(second[cut:])
