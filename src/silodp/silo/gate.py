"""The gate: the one way out of a silo. It checks a query, charges for it, computes, adds noise, and makes the release.

Only this file makes a Release. Refusals are functions of query and ledger alone; after the charge every record, whatever it holds,
yields a normal release.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.query import DisjointBatches, Event, Grad, GradDiff, LocalSteps, Poisson, Query, Release, WithoutReplacement


class Ledger(Protocol):
    def charge(self, event: Event, silos: Sequence[int]) -> None: ...


class Answerer(Protocol):
    """Computes a private answer from records; holds the records, the noise and nothing else."""

    def answer(self, query: Query, silos: Sequence[int]) -> Tensor: ...


class Gate:
    """Answers queries for the silos it keeps: one in a deployment, all of them in a simulation."""

    def __init__(self, answerer: Answerer, ledger: Ledger, *, dim: int, counts: Sequence[int]) -> None:
        self._answerer, self.ledger = answerer, ledger
        self._dim, self._counts = dim, tuple(counts)

    def answer(self, query: Query, silos: Sequence[int]) -> Release:
        """Checks, charges, then looks at records. Raises Refused with a fixed code, before any record is touched."""
        check(query, self._dim, [self._counts[s] for s in silos])
        event = query.event()
        self.ledger.charge(event, silos)
        return Release(self._answerer.answer(query, silos), tuple(silos), event)


def check(query: Query, dim: int, counts: Sequence[int]) -> None:
    """Refuses what no policy could allow: points of another shape or not finite, senseless clips, noise, batches or steps."""
    statistic, mechanism = query.statistic, query.mechanism
    points: list[Tensor] = []
    if isinstance(statistic, Grad | GradDiff | LocalSteps):
        points = [statistic.w, statistic.reference] if isinstance(statistic, GradDiff) else [statistic.w]
        if any(p.ndim != 2 or p.shape != points[0].shape or p.shape[-1] != dim for p in points):
            raise Refused("shape")
    if not all(bool(torch.isfinite(p).all()) for p in points):
        raise Refused("not-finite")
    if isinstance(statistic, LocalSteps) and (statistic.steps < 1 or not bool((torch.as_tensor(statistic.step) > 0).all())):
        raise Refused("steps")
    clip, multiplier = torch.as_tensor(mechanism.clip), torch.as_tensor(mechanism.noise_multiplier)
    if not bool((clip >= 0).all()):
        raise Refused("clip")
    if not bool((multiplier >= 0).all()):
        raise Refused("noise")
    match mechanism.sampling:
        case DisjointBatches(batches=batches, index=index) if not 0 <= index < batches:
            raise Refused("batch")
        case Poisson(rate) | WithoutReplacement(rate) if not (0 < rate <= 1 and math.isfinite(rate)):
            raise Refused("batch")
    if any(mechanism.sampling.batch(n) < 1 for n in counts):
        raise Refused("batch")
