"""Where the bins of an evaluation are: by what is already released about the model's risks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from silodp.core.errors import BadInput

UNKNOWN = 0.3
"""The prevalence that is assumed where no public estimate exists."""
WIDE = 1.8
"""The spread of logits that is assumed where nothing is released about them."""
FARTHEST = 12.0
"""Logits beyond which risks are 0 or 1 for every use."""
PIECES = 20
"""Parts of each released bin, in which records are taken to be spread evenly."""


@dataclass(frozen=True)
class RiskSpread:
    """How the logits of predicted risks are spread: places, and the share of records at each."""

    logits: np.ndarray
    shares: np.ndarray
    released: bool
    """Whether a release says so, not an assumption."""

    @property
    def risks(self) -> np.ndarray:
        """Return the risk at each place."""
        return special.expit(self.logits)

    @property
    def prevalence(self) -> float:
        """Return the mean risk."""
        return float(self.shares @ self.risks)


def spread_of(summary: Mapping[str, Any], positive: float = 0.0) -> RiskSpread:
    """Return how the risks of a run's model are spread, from the answer by which the run has
    recalibrated it. Without one it is assumed, around the public prevalence `positive`.
    """
    found = summary.get("recalibration") or {}
    logits = np.array(found.get("logits", ()), dtype=np.float64)
    shares = np.array(found.get("shares", ()), dtype=np.float64)
    if len(logits) > 1 and logits.shape == shares.shape and shares.sum() > 0:
        width = (logits[-1] - logits[0]) / (len(logits) - 1)
        part = (np.arange(PIECES) + 0.5) / PIECES - 0.5
        logits = (logits[:, None] + width * part).ravel()
        shares = np.repeat(shares / shares.sum(), PIECES) / PIECES
        return RiskSpread(np.clip(logits, -FARTHEST, FARTHEST), shares, True)
    return assumed(positive or UNKNOWN)


def assumed(prevalence: float, spread: float = WIDE) -> RiskSpread:
    """Return normal logits of which the mean risk is the prevalence."""
    deviations = np.linspace(-4, 4, 801)
    shares = np.exp(-(deviations**2) / 2)
    shares = shares / shares.sum()
    low = -4 * FARTHEST
    high = 4 * FARTHEST
    for _ in range(60):
        middle = (low + high) / 2
        if shares @ special.expit(middle + spread * deviations) < prevalence:
            low = middle
        else:
            high = middle
    logits = low + spread * deviations
    return RiskSpread(np.clip(logits, -FARTHEST, FARTHEST), shares, False)


@dataclass(frozen=True)
class RiskBins:
    """Bins of the logit of the risk: the edges between them, and the mean risk within each."""

    edges: tuple[float, ...]
    means: tuple[float, ...]
    threshold: float
    """The risk from which the second outcome is predicted: one of the edges."""

    @property
    def count(self) -> int:
        """Return the number of bins."""
        return len(self.edges) + 1

    @property
    def ends(self) -> np.ndarray:
        """Return the risks at which the bins end, from 0 to 1."""
        return np.array([0.0, *special.expit(self.edges), 1.0])

    @property
    def above(self) -> int:
        """Return the first bin above the threshold."""
        return 1 + int(np.argmin(np.abs(np.array(self.edges) - special.logit(self.threshold))))


def bins_of(spread: RiskSpread, count: int, threshold: float) -> RiskBins:
    """Return so many bins, one edge at the threshold.

    The other edges divide the average of the two outcomes' distributions evenly. So few pairs of
    two outcomes share a bin, also where one outcome is rare.
    """
    if not 0 < threshold < 1:
        raise BadInput(f"the threshold is {threshold:g}; it must be a risk between 0 and 1")
    risk = spread.risks
    one = spread.shares * risk
    other = spread.shares * (1 - risk)
    density = one / one.sum() + other / other.sum()
    order = np.argsort(spread.logits, kind="stable")
    logits = spread.logits[order]
    reached = np.cumsum(density[order]) / density.sum()
    fixed = float(special.logit(threshold))
    wanted = np.interp(np.arange(1, count) / count, reached, logits)
    nearest = int(np.argmin(np.abs(wanted - fixed)))
    wanted[nearest] = fixed
    edges = _apart(wanted, nearest)
    means = _means(spread, edges)
    return RiskBins(tuple(edges.tolist()), tuple(means.tolist()), threshold)


def _apart(edges: np.ndarray, fixed: int, least: float = 1e-3) -> np.ndarray:
    """Return the edges in strict order, without moving the fixed one."""
    edges = edges.copy()
    for j in range(fixed + 1, len(edges)):
        edges[j] = max(edges[j], edges[j - 1] + least)
    for j in range(fixed - 1, -1, -1):
        edges[j] = min(edges[j], edges[j + 1] - least)
    return edges


def _means(spread: RiskSpread, edges: np.ndarray) -> np.ndarray:
    """Return the mean risk within each bin, and its middle where no record is expected."""
    place = np.searchsorted(edges, spread.logits, side="right")
    count = len(edges) + 1
    shares = np.bincount(place, spread.shares, count)
    sums = np.bincount(place, spread.shares * spread.risks, count)
    ends = special.expit(np.array([-math.inf, *edges, math.inf]))
    middles = (ends[1:] + ends[:-1]) / 2
    return np.where(shares > 1e-9, sums / np.maximum(shares, 1e-300), middles)


def expected_cells(spread: RiskSpread, edges: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the shares of records by bin, without and with the outcome, if risks come true."""
    place = np.searchsorted(np.array(edges), spread.logits, side="right")
    count = len(edges) + 1
    risks = spread.risks
    negative = np.bincount(place, spread.shares * (1 - risks), count)
    positive = np.bincount(place, spread.shares * risks, count)
    return negative, positive
