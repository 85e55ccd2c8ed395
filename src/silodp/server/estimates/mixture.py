"""Fit a distribution to noisy one- and two-way tables, as a mixture of classes.

Within a class the columns are independent, and each class has one value of the label. Such a
mixture agrees with any number of overlapping tables, at a cost that grows with their number. An
exact graphical model (Private-PGM) of all pairs of ten columns would need a table of all ten.

Everything here reads released numbers only, so it costs no privacy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CLASSES = 48
"""The classes of a mixture, shared among the label's values."""
LEAST_CLASSES = 4
"""The fewest classes for one value of the label."""
STEPS = 600
RATE = 0.1
"""Steps of the optimiser (Adam), and their size."""
CLOSE = 0.02
"""The fit ends when its mean squared error is this share of the noise's variance."""
FLOOR = 0.002
"""A share that is added to every cell at the start, so that no cell starts impossible."""
SPREAD = 0.3
"""How far classes of the same label are apart at the start, in logits."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """Shares of the classes (m,), the label of each, and shares of every column's cells (m, c)."""

    shares: np.ndarray
    labels: np.ndarray
    columns: list[np.ndarray]

    def sample(self, rows: int, random: np.random.Generator) -> list[np.ndarray]:
        """Return the cell of each row in every column, and last in the label."""
        which = random.choice(len(self.shares), rows, p=self.shares)
        found = []
        for column in self.columns:
            ends = column.cumsum(1)
            ends = ends / ends[:, -1:]
            # Rounding may leave the last end just below 1, and a draw may be above it.
            cell = (random.random(rows)[:, None] > ends[which]).sum(1)
            found.append(np.minimum(cell, column.shape[1] - 1))
        return [*found, self.labels[which]]


def on_simplex(values: np.ndarray, possible: np.ndarray) -> np.ndarray:
    """Return the nearest shares (at least 0, sum 1) to noisy ones, with 0 where impossible."""
    own = values[possible]
    falling = np.sort(own)[::-1]
    cut = (falling.cumsum() - 1) / np.arange(1, len(own) + 1)
    last = np.nonzero(falling > cut)[0][-1]
    found = np.zeros(len(values))
    found[possible] = np.clip(own - cut[last], 0, None)
    return found


def shrunk(table: np.ndarray, noise: float, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return a noisy table of shares, moved towards independent columns by as much as noise asks.

    `rows` and `columns` are the shares of each column alone. The rest of the table is multiplied by
    James and Stein's factor: 1 - (its expected square if it is only noise) / (its square).
    """
    alone = np.outer(rows, columns)
    live = np.ix_(rows > 0, columns > 0)
    rest = (table - alone)[live]
    rest = rest - rest.mean(0)
    rest = rest - rest.mean(1, keepdims=True)
    free = (rest.shape[0] - 1) * (rest.shape[1] - 1)
    square = float((rest**2).sum())
    if square > free * noise**2:
        alone[live] += (1 - free * noise**2 / square) * rest
    return alone


def fit(
    by_label: Sequence[np.ndarray],
    pairs: Mapping[tuple[int, int], np.ndarray],
    merges: Sequence[np.ndarray],
    possible: Sequence[np.ndarray],
    label: np.ndarray,
    noise: float,
) -> Mixture:
    """Return the mixture that is nearest to these tables of shares, by least squares.

    - `by_label`: for each column, its cells by the label's values.
    - `pairs`: for two columns, their coarse cells.
    - `merges`: the coarse cell of each cell of a column.
    - `possible`: which cells of a column can have records.
    - `label`: the share of each of the label's values.
    - `noise`: the standard deviation of the noise of a share.
    """
    values = len(label)
    each = max(CLASSES // values, LEAST_CLASSES)
    labels = np.repeat(np.arange(values), each)
    generator = torch.Generator().manual_seed(0)
    weights = torch.from_numpy(np.log(np.maximum(label, 1e-9)[labels] / each)).float()
    logits = []
    for table, allowed in zip(by_label, possible, strict=True):
        start = np.clip(table, 0, None) + FLOOR / table.size
        start = np.where(allowed[:, None], start, 1e-30)
        start = torch.from_numpy(np.log(start / start.sum(0)).T[labels]).float()
        start = start + SPREAD * torch.randn(start.shape, generator=generator)
        # Their exponential is 0 in float32, whatever the optimiser adds.
        logits.append(start.masked_fill(torch.from_numpy(~allowed), -200.0))
    unknown = [weights, *logits]
    for one in unknown:
        one.requires_grad_()
    loss = _Loss(by_label, pairs, merges, labels)
    optimiser = torch.optim.Adam(unknown, lr=RATE)
    for _ in range(STEPS):
        ratio = loss(weights, logits) / (loss.cells * max(noise, 1e-6) ** 2)
        if ratio.item() < CLOSE:
            break
        optimiser.zero_grad()
        ratio.backward()
        optimiser.step()
    shares = torch.softmax(weights.detach().double(), 0).numpy()
    columns = [torch.softmax(one.detach().double(), 1).numpy() for one in logits]
    return Mixture(shares / shares.sum(), labels, columns)


class _Loss:
    """The sum of squared differences between a mixture's tables and the given ones."""

    def __init__(
        self,
        by_label: Sequence[np.ndarray],
        pairs: Mapping[tuple[int, int], np.ndarray],
        merges: Sequence[np.ndarray],
        labels: np.ndarray,
    ):
        self.by_label = [torch.from_numpy(table).float() for table in by_label]
        self.pairs = {pair: torch.from_numpy(table).float() for pair, table in pairs.items()}
        self.merges = [torch.eye(int(merge.max()) + 1)[merge] for merge in merges]
        self.labels = torch.eye(by_label[0].shape[1])[labels]
        tables = [*by_label, *pairs.values()]
        self.cells = sum(table.size for table in tables)

    def __call__(self, weights: Tensor, logits: Sequence[Tensor]) -> Tensor:
        """Return the loss of these logits of the classes' shares, and of their cells' shares."""
        shares = torch.softmax(weights, 0)[:, None]
        columns = [torch.softmax(one, 1) for one in logits]
        labelled = shares * self.labels
        total = torch.zeros(())
        for column, table in zip(columns, self.by_label, strict=True):
            total = total + (column.T @ labelled - table).square().sum()
        if self.pairs:
            coarse = [column @ merge for column, merge in zip(columns, self.merges, strict=True)]
            for (a, b), table in self.pairs.items():
                total = total + ((shares * coarse[a]).T @ coarse[b] - table).square().sum()
        return total
