"""The gate: the one way out of a silo. It checks a query, charges for it, computes, adds noise, and makes the release.

Only this file makes a Release. Refusals are functions of query and ledger alone; after the charge a deployed answerer yields a normal
release whatever a record holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.mechanisms import Shuffled
from silodp.core.privacy.binomial import MAX_LEVELS, MAX_TRIALS, is_power_of_half
from silodp.core.query import Query, Release
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, WithoutReplacement
from silodp.core.statistics import (
    MAX_BINS,
    MAX_CLASSES,
    Cells,
    ClassCounts,
    Grad,
    GradDiff,
    Histogram,
    LocalSteps,
    MissingRates,
    Moments,
    Score,
    Statistic,
    SteeredSteps,
)


class Ledger(Protocol):
    def charge(self, event: Event | TotalEvent, silos: Sequence[int]) -> None: ...


class Answerer(Protocol):
    """Computes a private answer from records; holds the records, the noise and nothing else."""

    @property
    def features(self) -> int: ...
    def answer(self, query: Query, silos: Sequence[int]) -> Tensor: ...


class Gate:
    """Answers queries for the silos it keeps: one in a deployment, all of them in a simulation."""

    def __init__(self, answerer: Answerer, ledger: Ledger, *, dim: int, counts: Sequence[int], runs: int = 1) -> None:
        """`runs` is J: how many points a query has, each with noise and a charge of its own."""
        self._answerer, self.ledger = answerer, ledger
        self._dim, self._counts, self._runs = dim, tuple(counts), runs

    def answer(self, query: Query, silos: Sequence[int]) -> Release:
        """Checks, charges, then looks at records. Raises Refused with a fixed code, before any record is touched."""
        if any(type(s) is not int or not 0 <= s < len(self._counts) for s in silos) or len(set(silos)) != len(silos):
            raise Refused("shape")  # a silo named twice, or by another name such as -1, would answer twice for one price
        check(query, self._dim, [self._counts[s] for s in silos], runs=self._runs, silos=len(self._counts))
        if isinstance(query.statistic, Histogram | Moments | MissingRates) and query.statistic.features != self._answerer.features:
            raise Refused("shape")  # the norm of a record's vector follows from the silo's own number of features
        event = query.event()
        self.ledger.charge(event, silos)
        return Release(self._answerer.answer(query, silos), tuple(silos), event)


def check(query: Query, dim: int, counts: Sequence[int], *, runs: int = 1, silos: int | None = None) -> None:
    """Refuses what no policy could allow: points of another shape or not finite, senseless clips, noise, batches or steps.

    Hyper-parameters are one number, or exactly one per run; noise multipliers one number, or one per run and silo that the gate keeps:
    any other shape could clip records by one entry and scale their noise by another.
    """
    statistic, mechanism = query.statistic, query.mechanism
    points: list[Tensor] = []
    if isinstance(statistic, Grad | GradDiff | LocalSteps | Score):
        match statistic:
            case GradDiff(w=w, reference=other) | SteeredSteps(w=w, drift=other):
                points = [w, other]
            case Grad(w=w) | LocalSteps(w=w) | Score(w=w):
                points = [w]
        if any(p.shape != (runs, dim) or p.dtype not in (torch.float32, torch.float64) for p in points):
            raise Refused("shape")
    if isinstance(statistic, Histogram | Moments):
        vectors = [statistic.edges] if isinstance(statistic, Histogram) else [statistic.low, statistic.high]
        if any(v.ndim != 1 or v.shape != vectors[0].shape for v in vectors):
            raise Refused("shape")
    match statistic:
        case Score(cap=cap) if not 0 < cap < math.inf:
            raise Refused("clip")
        case Score(bins=count) if type(count) is not int or not 0 <= count <= MAX_BINS:
            raise Refused("shape")
        case ClassCounts(classes=count) if type(count) is not int or not 2 <= count <= MAX_CLASSES:
            raise Refused("shape")
        case MissingRates(features=count) if type(count) is not int or count < 1:
            raise Refused("shape")
    if not all(bool(torch.isfinite(p).all()) for p in points):
        raise Refused("not-finite")
    if isinstance(statistic, LocalSteps):
        step = torch.as_tensor(statistic.step)
        if (
            type(statistic.steps) is not int
            or statistic.steps < 1
            or step.shape not in ((), (runs, 1))
            or not bool(((step > 0) & torch.isfinite(step)).all())
        ):
            raise Refused("steps")
    clip = torch.as_tensor(mechanism.clip, dtype=torch.float64)
    if clip.shape not in ((), (runs, 1)) or not bool((clip >= 0).all()):
        raise Refused("clip")
    if isinstance(mechanism, Shuffled):
        _check_shuffled(statistic, mechanism, runs)
    else:
        multiplier, kept = torch.as_tensor(mechanism.noise_multiplier), len(counts) if silos is None else silos
        if multiplier.shape not in ((), (1, kept), (runs, kept)) or not bool((multiplier >= 0).all()):
            raise Refused("noise")
    if isinstance(statistic, Histogram | Moments | Cells):
        if not isinstance(mechanism.sampling, FullBatch):
            raise Refused("batch")
        if not bool((clip >= statistic.norm).all()):
            raise Refused("clip")
    if isinstance(statistic, Cells) and not bool((clip <= 2 * statistic.norm).all()):
        raise Refused("clip")  # a cell is 1 whatever the clip: a larger one only makes the lattice coarser
    match mechanism.sampling:
        case DisjointBatches(batches=batches, index=index, partition=name):
            # the ledger knows a batch by its name and the answerer by its value: only of these types are the two one
            if not (type(batches) is type(index) is int and type(name) is str and 0 <= index < batches):
                raise Refused("batch")
        case Poisson(rate) | WithoutReplacement(rate) if not (0 < rate <= 1 and math.isfinite(rate)):
            raise Refused("batch")
    if any(mechanism.sampling.batch(n) < 1 for n in counts):
        raise Refused("batch")


def _check_shuffled(statistic: Statistic, mechanism: Shuffled, runs: int) -> None:
    """Totals are of gradients and their differences, on batches that the totals rule can price.

    Local steps are no sums over records, cells have a norm of their own, and of feature statistics a total could not tell absent values.
    """
    if not isinstance(statistic, Grad | GradDiff):
        raise Refused("statistic")
    if not isinstance(mechanism.sampling, FullBatch | DisjointBatches):
        raise Refused("sampling")
    levels, bits = torch.as_tensor(mechanism.levels), torch.as_tensor(mechanism.noise_bits)
    if any(t.shape not in ((), (runs, 1)) or t.dtype != torch.int64 for t in (levels, bits)):
        raise Refused("noise")
    most = MAX_TRIALS // mechanism.contributions if type(mechanism.contributions) is int and mechanism.contributions >= 1 else 0
    if not (bool(((levels >= 1) & (levels <= MAX_LEVELS)).all()) and bool(((bits >= 1) & (bits <= most)).all())):
        raise Refused("noise")
    if type(mechanism.p) is not float or not is_power_of_half(mechanism.p):
        raise Refused("noise")
