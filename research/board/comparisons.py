"""Tests between contestants, by PLAN.md: corrected t tests over seeds, Holm over tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from research.board.tables import HELD_OUT, TABLES

LEVEL = 0.05
Trials = Any
"""A frame of trials. pandas has no type that a checker can follow here."""


@dataclass(frozen=True)
class Comparison:
    """How one contestant's loss differs from another's on a table."""

    difference: float
    """The mean over the seeds. Below 0, the first contestant is better."""
    p: float
    """Corrected over the tables; 1 where there is nothing to test."""
    seeds: int

    @property
    def better(self) -> bool:
        """Return whether the first contestant is significantly better."""
        return self.difference < 0 and self.p < LEVEL

    @property
    def worse(self) -> bool:
        """Return whether the first contestant is significantly worse."""
        return self.difference > 0 and self.p < LEVEL


def corrected_p(differences: np.ndarray) -> float:
    """Return the two-sided p-value of paired differences over splits that overlap (Nadeau and
    Bengio, 2003).
    """
    count = len(differences)
    if count < 2:
        return 1.0
    variance = float(np.var(differences, ddof=1)) * (1 / count + HELD_OUT / (1 - HELD_OUT))
    mean = float(np.mean(differences))
    if variance == 0:
        return float(mean == 0)
    return float(2 * stats.t.sf(abs(mean) / math.sqrt(variance), count - 1))


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Return the p-values of some tables, corrected by Holm's method."""
    adjusted = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda one: p_values[one])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return adjusted


@dataclass(frozen=True, eq=False)
class Level:
    """The trials of one epsilon: a frame of each table, with a row for each seed and a column for
    each contestant. Contestants without privacy have the same seeds as the others.
    """

    epsilon: float
    losses: dict[str, Trials]
    trust: dict[str, str]
    """Of each contestant."""

    @classmethod
    def of(cls, trials: Trials, epsilon: float, column: str = "loss") -> Level:
        """Return the trials of this epsilon, with this column as the loss."""
        found = {}
        for table in TABLES:
            rows = cell(trials, table, epsilon)
            if len(rows):
                names = list(dict.fromkeys(rows["contestant"]))
                wide = rows.pivot(index="seed", columns="contestant", values=column)
                found[table] = wide[names]
        trust = dict(zip(trials["contestant"], trials["trust"], strict=True))
        return cls(epsilon, found, trust)

    def of_trust(self, *trusts: str) -> list[str]:
        """Return the contestants of these kinds of trust, in the order of the trials."""
        names = dict.fromkeys(name for wide in self.losses.values() for name in wide)
        return [name for name in names if self.trust[name] in trusts]

    def compared(self, first: str, second: str) -> dict[str, Comparison]:
        """Return for each table on which both contestants have scores how the first differs.

        A table on which one of them refused a trial is left out: `Ranking` counts a refusal as
        worse than every score.
        """
        found = {}
        p_values = {}
        for table, wide in self.losses.items():
            if first not in wide or second not in wide:
                continue
            differences = (wide[first] - wide[second]).to_numpy()
            if np.isnan(differences).any():
                continue
            p_values[table] = corrected_p(differences)
            found[table] = (float(differences.mean()), len(differences))
        adjusted = holm(p_values)
        return {
            table: Comparison(difference, adjusted[table], seeds)
            for table, (difference, seeds) in found.items()
        }


def cell(trials: Trials, table: str, epsilon: float) -> Trials:
    """Return the trials of a table at an epsilon, and of contestants without privacy with the same
    seeds.
    """
    rows = trials[trials["table"] == table]
    private = rows[rows["epsilon"] == epsilon]
    open_to_all = rows[np.isinf(rows["epsilon"]) & rows["seed"].isin(private["seed"])]
    return pd.concat([private, open_to_all])


class Ranking:
    """Some contestants at one epsilon, table by table."""

    def __init__(self, level: Level, contestants: Sequence[str]) -> None:
        self.level = level
        self.contestants = [name for name in contestants if name in level.trust]
        self._compared: dict[tuple[str, str], dict[str, Comparison]] = {}

    @property
    def tables(self) -> list[str]:
        """Return the tables that have trials of these contestants."""
        return [table for table in self.level.losses if self.means(table)]

    def means(self, table: str) -> dict[str, float]:
        """Return the mean loss by contestant, lowest first; NaN, last, where one refused."""
        wide = self.level.losses[table]
        means = {
            name: float(wide[name].mean(skipna=False)) for name in self.contestants if name in wide
        }
        return dict(sorted(means.items(), key=lambda item: (math.isnan(item[1]), item[1])))

    def first(self, table: str) -> str:
        """Return the contestant with the lowest mean loss."""
        return next(iter(self.means(table)))

    def worse(self, one: str, other: str, table: str) -> bool:
        """Return whether one contestant is significantly worse than another, or refused."""
        means = self.means(table)
        if math.isnan(means[one]) or math.isnan(means[other]):
            return math.isnan(means[one]) and not math.isnan(means[other])
        if (one, other) not in self._compared:
            self._compared[one, other] = self.level.compared(one, other)
        return self._compared[one, other][table].worse

    def within_noise(self, table: str) -> list[str]:
        """Return the contestants that are first, or not significantly worse than the first."""
        first = self.first(table)
        return [
            name
            for name in self.means(table)
            if name == first or not self.worse(name, first, table)
        ]


def complete(trials: Trials) -> Trials:
    """Return the trials without those seeds of a table and epsilon for which a contestant of trust
    isrl, or without privacy, has not run.
    """
    kept = []
    for _, rows in trials.groupby(["table", "epsilon"], sort=False):
        ranked = rows[rows["trust"].isin(["isrl", "none"])]
        counts = ranked.groupby("seed").size()
        seeds = counts[counts == counts.max()].index
        kept.append(rows[rows["seed"].isin(seeds)])
    return pd.concat(kept, ignore_index=True)
