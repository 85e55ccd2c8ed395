"""Fit the columns' joint distribution to noisy one- and two-way tables, as a mixture of classes.

Within a class the columns are independent. Such a mixture agrees with any number of overlapping
tables, at a cost that grows with their number. An exact graphical model (Private-PGM) of all pairs
of ten columns would need a table of all ten.

Everything here reads released numbers only, so it costs no privacy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CLASSES = 48
"""The classes of a mixture."""
STEPS = 600
RATE = 0.1
"""Steps of the optimiser (Adam), and their size."""
CLOSE = 0.02
"""The fit ends when its mean squared error is this share of the noise's variance."""
FLOOR = 0.002
"""A share that is added to every cell at the start, so that no cell starts impossible."""
SPREAD = 0.3
"""How far classes are apart at the start, in logits."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """Shares of the classes (m,), and of every column's cells in each (m, c)."""

    shares: np.ndarray
    columns: list[np.ndarray]

    def sample(self, rows: int, random: np.random.Generator) -> list[np.ndarray]:
        """Return the cell of each row in every column."""
        which = random.choice(len(self.shares), rows, p=self.shares)
        found = []
        for column in self.columns:
            ends = column.cumsum(1)
            ends = ends / ends[:, -1:]
            # Rounding may leave the last end just below 1, and a draw may be above it.
            cell = (random.random(rows)[:, None] > ends[which]).sum(1)
            found.append(np.minimum(cell, column.shape[1] - 1))
        return found


def on_simplex(values: np.ndarray, possible: np.ndarray) -> np.ndarray:
    """Return the nearest shares (at least 0, sum 1) to noisy ones, with 0 where impossible."""
    own = values[possible]
    falling = np.sort(own)[::-1]
    cut = (falling.cumsum() - 1) / np.arange(1, len(own) + 1)
    last = np.nonzero(falling > cut)[0][-1]
    found = np.zeros(len(values))
    found[possible] = np.clip(own - cut[last], 0, None)
    return found


def shrunk(
    table: np.ndarray,
    noise: float,
    rows: np.ndarray,
    columns: np.ndarray,
    main: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Return a noisy table of shares, moved towards independent columns by as much as noise asks.

    `rows` and `columns` are the shares of each column alone. The rest of the table is multiplied by
    James and Stein's factor: 1 - (its expected square if it is only noise) / (its square). The part
    of the rest within the patterns `main` of both columns has a factor of its own. There are few of
    them, so that noise hides less of it.
    """
    alone = np.outer(rows, columns)
    live = np.ix_(rows > 0, columns > 0)
    rest = (table - alone)[live]
    rest = rest - rest.mean(0)
    rest = rest - rest.mean(1, keepdims=True)
    free = (rest.shape[0] - 1) * (rest.shape[1] - 1)
    if main is not None:
        one = _spanned(main[0][rows > 0])
        other = _spanned(main[1][columns > 0])
        part = one @ (one.T @ rest @ other) @ other.T
        fewer = one.shape[1] * other.shape[1]
        alone[live] += _kept(part, fewer * noise**2)
        rest = rest - part
        free -= fewer
    alone[live] += _kept(rest, free * noise**2)
    return alone


def _kept(rest: np.ndarray, expected: float) -> np.ndarray:
    """Return an array times James and Stein's factor. `expected` is its square if it is noise."""
    square = float((rest**2).sum())
    if square <= expected:
        return np.zeros_like(rest)
    return (1 - expected / square) * rest


def _spanned(patterns: np.ndarray) -> np.ndarray:
    """Return orthogonal patterns that span the given ones, less their means."""
    left, sizes, _ = np.linalg.svd(patterns - patterns.mean(0), full_matrices=False)
    return left[:, sizes > 1e-9]


def fit(
    alone: Sequence[np.ndarray],
    pairs: Mapping[tuple[int, int], np.ndarray],
    merges: Sequence[np.ndarray],
    noise: float,
) -> Mixture:
    """Return the mixture that is nearest to these tables of shares, by least squares.

    - `alone`: the shares of each column's cells. A share of 0 is that of an impossible cell.
    - `pairs`: for two columns, their coarse cells.
    - `merges`: the coarse cell of each cell of a column.
    - `noise`: the standard deviation of the noise of a share.
    """
    if not pairs:
        return Mixture(np.ones(1), [shares[None] for shares in alone])
    generator = torch.Generator().manual_seed(0)
    weights = torch.zeros(CLASSES)
    logits = []
    for shares in alone:
        start = torch.from_numpy(np.log(shares + FLOOR / shares.size)).float().repeat(CLASSES, 1)
        start = start + SPREAD * torch.randn(start.shape, generator=generator)
        # Their exponential is 0 in float32, whatever the optimiser adds.
        logits.append(start.masked_fill(torch.from_numpy(shares <= 0), -200.0))
    unknown = [weights, *logits]
    for one in unknown:
        one.requires_grad_()
    loss = _Loss(alone, pairs, merges)
    optimiser = torch.optim.Adam(unknown, lr=RATE)
    for _ in range(STEPS):
        ratio = loss(weights, logits) / (loss.cells * max(noise, 1e-6) ** 2)
        if ratio.item() < CLOSE:
            break
        optimiser.zero_grad()
        ratio.backward()
        optimiser.step()
    found = torch.softmax(weights.detach().double(), 0).numpy()
    columns = [torch.softmax(one.detach().double(), 1).numpy() for one in logits]
    return Mixture(found / found.sum(), columns)


class _Loss:
    """The sum of squared differences between a mixture's tables and the given ones."""

    def __init__(
        self,
        alone: Sequence[np.ndarray],
        pairs: Mapping[tuple[int, int], np.ndarray],
        merges: Sequence[np.ndarray],
    ):
        self.alone = [torch.from_numpy(table).float() for table in alone]
        self.pairs = {pair: torch.from_numpy(table).float() for pair, table in pairs.items()}
        self.merges = [torch.eye(int(merge.max()) + 1)[merge] for merge in merges]
        self.cells = sum(table.size for table in [*alone, *pairs.values()])

    def __call__(self, weights: Tensor, logits: Sequence[Tensor]) -> Tensor:
        """Return the loss of these logits of the classes' shares, and of their cells' shares."""
        shares = torch.softmax(weights, 0)
        columns = [torch.softmax(one, 1) for one in logits]
        total = torch.zeros(())
        for column, table in zip(columns, self.alone, strict=True):
            total = total + (shares @ column - table).square().sum()
        coarse = [column @ merge for column, merge in zip(columns, self.merges, strict=True)]
        for (a, b), table in self.pairs.items():
            made = (shares[:, None] * coarse[a]).T @ coarse[b]
            total = total + (made - table).square().sum()
        return total
