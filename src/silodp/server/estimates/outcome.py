"""Fit the label's distribution, given all columns, to a noisy table of each column with the label.

The model is log-linear. In the logits of the label's values each column has an effect of its own.
Of all distributions with given two-way tables, the one of largest entropy has this form. For a
label of two classes it is a logistic regression.

The tables state how the label depends on each column alone. How much of that two columns share
follows from the rows, which have the columns' joint distribution. So no evidence counts twice.

Effects are shrunk by their noise: they have a normal prior, and its deviation is the one that makes
the released tables most probable. Everything here reads released numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from silodp.server.estimates.grids import Grid

PRIORS = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0, 4.0)
"""The prior deviations of an effect that are compared."""
LEVEL = 10.0
"""The prior deviation of the level, which is hardly shrunk."""
LENGTH = 0.3
"""Effects of a number at places so far apart are alike. A place is a share of the records."""
BENT = 0.5
"""The deviation of a number's curve from its straight line, in effects."""
NEGLIGIBLE = 0.01
"""Curves of a smaller share of the prior's variance are left out."""
NEWTON_STEPS = 30
SETTLED = 1e-4
"""Newton's method ends when a step gains less, in log likelihood."""
LEAST = 1e-3
"""The least share of a value of the label."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The label given the columns."""

    level: np.ndarray
    """The logit of each of the label's values, without effects (values,)."""
    directions: np.ndarray
    """The directions in which effects change these logits (values, r)."""
    features: list[np.ndarray]
    """The features of each column's cells (cells, p)."""
    weights: np.ndarray
    """The effect of each feature in each direction, after that of the level (1 + sum of p, r)."""

    def chances(self, codes: Sequence[np.ndarray]) -> np.ndarray:
        """Return the probability of each value of the label (n, values) in rows of these cells."""
        effects = _inputs(self.features, codes) @ self.weights
        return special.softmax(self.level + effects @ self.directions.T, axis=1)

    def sample(self, codes: Sequence[np.ndarray], random: np.random.Generator) -> np.ndarray:
        """Return a value of the label for each row."""
        ends = self.chances(codes).cumsum(1)
        value = (random.random(len(ends))[:, None] > ends).sum(1)
        return np.minimum(value, ends.shape[1] - 1)


def _inputs(features: Sequence[np.ndarray], codes: Sequence[np.ndarray]) -> np.ndarray:
    """Return the inputs of each row: a 1 for the level, and the features of its cells."""
    parts = [own[code] for own, code in zip(features, codes, strict=True)]
    return np.column_stack([np.ones(len(codes[0])), *parts])


def fit_outcome(
    tables: Sequence[np.ndarray],
    noise: float,
    records: int,
    columns: Sequence[Grid],
    label: Grid,
    codes: Sequence[np.ndarray],
    bins: Sequence[np.ndarray],
) -> Outcome:
    """Return the model that fits tables of shares (cells, values) best, after shrinking.

    - `noise`: the standard deviation of the noise of a share.
    - `records`: the number of records, for the sampling error.
    - `columns`: the cells on which effects are defined. They may be finer than those of the tables.
    - `codes`: rows from the columns' joint distribution: the cell of each in `columns`.
    - `bins`: the same rows in the tables' cells.
    """
    sums = np.average([t.sum(0) for t in tables], axis=0, weights=[1 / len(t) for t in tables])
    shares = np.maximum(sums, max(noise, LEAST))
    shares = shares / shares.sum()
    contrasts, spread = _contrasts(label, shares)
    features = []
    for grid, code in zip(columns, codes, strict=True):
        features.append(_features(grid, np.bincount(code, minlength=grid.binned.cells) / len(code)))
    rows = len(codes[0])
    cells = []
    for table, own in zip(tables, bins, strict=True):
        cells.append((own == np.arange(len(table))[:, None]) / rows)
    member = np.concatenate(cells)
    released = np.concatenate([table @ contrasts for table in tables])
    # A contrast varies by the noise, and by the sampling of the records in its cell.
    error = np.sqrt(noise**2 + member.sum(1)[:, None] * spread / records + 1e-12)
    directions = contrasts * 0.5 / np.sqrt(spread)
    problem = _Problem(
        np.log(shares), directions, contrasts, _inputs(features, codes), member, released, error
    )
    best = -math.inf
    weights = np.zeros((problem.inputs.shape[1], directions.shape[1]))
    found = weights
    for prior in PRIORS:
        weights, evidence = problem.fit(weights, prior)
        if evidence > best:
            best = evidence
            found = weights
    return Outcome(problem.level, directions, features, found)


def _contrasts(label: Grid, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return contrasts between the label's values (values, r), and the variance of each among
    records (r,).

    They are orthogonal, so that their noise is independent, and uncorrelated among records. Each
    has mean 0 over the label's `shares`. So noise in the share of a cell does not change it.
    """
    values = np.arange(len(shares))
    if label.kind == "number":
        basis = np.column_stack([values, values**2])
    elif label.kind == "survival":
        # Codes alternate between lost and event; the last is for follow-up beyond the last edge.
        time = values // 2
        event = values % 2
        basis = np.column_stack([time, time**2, event, event * time])
    else:
        basis = np.eye(len(shares))
    basis = basis - shares @ basis
    basis = basis / np.maximum(np.abs(basis).max(0), 1e-12)
    left, sizes, _ = np.linalg.svd(basis, full_matrices=False)
    left = left[:, sizes > 1e-6 * sizes[0]]
    spread, turn = np.linalg.eigh((left.T * shares) @ left)
    return left @ turn, spread


def _features(grid: Grid, shares: np.ndarray) -> np.ndarray:
    """Return features of a column's cells (cells, p), with mean 0 and independent effects.

    A number has a straight line, smooth curves, and one feature for missing values. Of any other
    column each cell is a feature.
    """
    cells = grid.binned.cells
    if grid.kind != "number":
        found = np.eye(cells)
        return found - shares @ found
    bins = grid.binned.bins
    ends = np.array(grid.ends)
    middle = ((ends[1:] + ends[:-1]) / 2 - ends[0]) / (ends[-1] - ends[0])
    known = (shares[:-1] + 1e-9) / (shares[:-1] + 1e-9).sum()
    centre = known @ middle
    line = (middle - centre) / max(math.sqrt(known @ (middle - centre) ** 2), 1 / bins)
    place = known.cumsum() - known / 2
    alike = np.exp(-((place[:, None] - place) ** 2) / (2 * LENGTH**2))
    sizes, curves = np.linalg.eigh(alike)
    clear = sizes > NEGLIGIBLE * sizes[-1]
    curves = BENT * curves[:, clear] * np.sqrt(sizes[clear])
    found = np.zeros((cells, 2 + curves.shape[1]))
    found[:-1, 0] = line
    found[:-1, 1:-1] = curves
    found[-1, -1] = 1.0
    return found - shares @ found


@dataclass(frozen=True, eq=False)
class _Problem:
    """Least squares between released contrasts and those of the model, with a prior."""

    level: np.ndarray
    directions: np.ndarray
    contrasts: np.ndarray
    inputs: np.ndarray
    """One row for each simulated row (n, p)."""
    member: np.ndarray
    """1 / n where a row is in a cell of a table, otherwise 0 (cells of all tables, n)."""
    released: np.ndarray
    error: np.ndarray
    """The standard error of each released contrast (cells, r)."""

    def fit(self, weights: np.ndarray, prior: float) -> tuple[np.ndarray, float]:
        """Return the most probable effects, by Newton's method from `weights`, and the log evidence
        of this prior by Laplace's method.
        """
        precision = np.full(weights.shape, 1 / prior**2)
        precision[0] = 1 / LEVEL**2
        flat = precision.ravel()
        value, chances, residual = self._value(weights, precision)
        for _ in range(NEWTON_STEPS):
            slopes = self._slopes(chances)
            curvature = slopes.T @ slopes + np.diag(flat)
            gradient = slopes.T @ residual.ravel() - flat * weights.ravel()
            step = np.linalg.solve(curvature, gradient).reshape(weights.shape)
            size = 1.0
            new = self._value(weights + step, precision)
            while new[0] > value and size > 1e-3:
                size /= 2
                new = self._value(weights + size * step, precision)
            if new[0] > value:
                break
            gain = value - new[0]
            weights = weights + size * step
            value, chances, residual = new
            if gain < SETTLED:
                break
        slopes = self._slopes(chances)
        _, volume = np.linalg.slogdet(slopes.T @ slopes + np.diag(flat))
        return weights, -value - (volume - np.log(flat).sum()) / 2

    def _value(
        self, weights: np.ndarray, precision: np.ndarray
    ) -> tuple[float, np.ndarray, np.ndarray]:
        """Return the negative log posterior, each row's chances, and the residuals in errors."""
        effects = self.inputs @ weights
        chances = special.softmax(self.level + effects @ self.directions.T, axis=1)
        residual = (self.released - self.member @ (chances @ self.contrasts)) / self.error
        value = ((residual**2).sum() + (precision * weights**2).sum()) / 2
        return float(value), chances, residual

    def _slopes(self, chances: np.ndarray) -> np.ndarray:
        """Return the derivative of every modelled contrast by every weight, in errors."""
        centred = chances @ self.directions
        several = self.directions.shape[1]
        found = np.empty((*self.released.shape, self.inputs.shape[1], several))
        for g in range(self.contrasts.shape[1]):
            weighted = chances * self.contrasts[:, g]
            for b in range(several):
                change = weighted @ self.directions[:, b] - weighted.sum(1) * centred[:, b]
                slope = self.member @ (self.inputs * change[:, None])
                found[:, g, :, b] = slope / self.error[:, g, None]
        return found.reshape(self.released.size, -1)
