"""Kaplan-Meier curves on public time bins, from one private histogram of (bin, event), with a band
that includes the privacy noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import isotonic_regression

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.schema import Label
from silodp.core.quality import Z
from silodp.core.statistics import ClassCounts
from silodp.server.estimates.scoring import ask_pooled
from silodp.server.federation import Port

LEAST = 5.0
"""Where fewer than this many standard errors of its noise are left at risk, the curve ends: a ratio
of noise says nothing.
"""


def survival_label(label: Label | None) -> Label:
    """Return the label, if it is a survival time."""
    if label is None or label.task != "survival":
        raise BadInput(
            'a survival curve needs a label of task = "survival", with time, event and '
            "edges; give a --schema that has one"
        )
    return label


def survival(fed: Port, mechanism: Gaussian, label: Label, counts: Sequence[int]) -> dict:
    """Return the curve over all records of the silos that answer: one question, of which each
    record is in one of 2 x bins + 1 cells.
    """
    statistic = ClassCounts(2 * len(label.edges) + 1)
    found = ask_pooled(fed, statistic, mechanism, counts)
    n = found.records
    return {
        "curve": curve(n * found.mean, n * found.noise, n, label.edges),
        "records": n,
        "count_error": n * found.noise,
        "time": label.columns[0],
    }


def curve(cells: np.ndarray, noise: float, n: int, edges: Sequence[float]) -> list[dict]:
    """For each edge the chance to be without the event until then, with its 95 per cent interval,
    from noisy counts of the codes 2 b + event.

    The counts add up to the public n, so they are moved alike until they do: the noise along their
    sum is gone. The life table: of n still there before bin b, d have the event in it and c are
    lost in it, who count half. With q = d / (n - c / 2), the cumulative hazard H is the sum of
    -log(1 - q), and S = exp(-H). Its variance is Greenwood's, sum of q / ((n - c / 2) (1 - q)),
    plus that of the noise by the delta method: noise^2 x the squared gradient of H by the counts. H
    is then made to rise (isotonic regression, weighted by precision), which does not push it up as
    clipping each negative count would. That the lost count half is right for bins in which few are:
    with two years in one, and a rate of loss of 1.5 per cent a month, an interval that should cover
    95 per cent covered 91.
    """
    bins = len(edges)
    cells = cells + (n - cells.sum()) / len(cells)
    lost = cells[0:-1:2]
    events = cells[1::2]
    there = np.cumsum(cells[::-1])[::-1][:-1:2]  # before bin b: all codes from 2 b on
    risk = there - lost / 2
    summed = np.arange(len(cells), 1, -2)
    spread = noise * np.sqrt(summed * (1 - summed / len(cells)))
    clear = np.logical_and.accumulate(risk > np.maximum(LEAST * spread, 1.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.minimum(
            events / risk, 1 - 0.5 / np.maximum(risk, 1.0)
        )  # nobody left is no proof of a chance of 0
        hazard = np.cumsum(-np.log1p(-q))
        greenwood = np.cumsum(np.clip(q, 0, None) / (risk * (1 - q)))
    variance = np.zeros(bins)
    gradient = np.zeros(len(cells))
    for b in np.flatnonzero(
        clear
        # -log(1 - d / r) has the slopes 1 / (r - d) by d and, through r, -d / (r (r - d)) by
        # whoever is in r
    ):
        left = risk[b] * (1 - q[b])
        gradient[2 * b] += -q[b] / left / 2
        gradient[2 * b + 1 :] += -q[b] / left
        gradient[2 * b + 1] += 1 / left
        variance[b] = greenwood[b] + noise**2 * len(cells) * float(gradient.var())
    error = np.sqrt(variance)
    rows = []
    k = int(clear.sum())
    if k:
        rising = np.clip(
            isotonic_regression(hazard[:k], weights=1 / np.maximum(variance[:k], 1e-12)).x, 0, None
        )
    else:
        rising = np.zeros(0)
    for b, edge in enumerate(edges):
        if b < k:
            low = np.exp(-(rising[b] + Z * error[b]))
            high = np.exp(-max(rising[b] - Z * error[b], 0.0))
            rows.append(
                {
                    "time": edge,
                    "survival": float(np.exp(-rising[b])),
                    "low": float(low),
                    "high": float(high),
                    "at_risk": float(risk[b]),
                }
            )
        else:
            rows.append(
                {
                    "time": edge,
                    "survival": None,
                    "low": 0.0,
                    "high": rows[-1]["high"] if rows else 1.0,
                    "at_risk": float(risk[b]),
                }
            )
    return rows
