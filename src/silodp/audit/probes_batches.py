"""Probes of batches: whether they are drawn as they are priced. Coins have their rate, one by one,
and are tossed again each time. Sizes, places and partitions are right.

The probes see the releases of a deployed answerer with almost no noise. Record k pulls at two
coordinates, that of its sixteenth of the file and that of k modulo 16. So an answer shows how many
records of each group were drawn. Every row has about 650,000 coins of a rate near a third. A rate
that is wrong by 2 per cent is 11 standard errors away. It is seen with probability 0.99999, at a
false-alarm rate of 1e-8 for all rows.
"""

from __future__ import annotations

import functools
import math
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn

from silodp.audit.answers import Answering, N, Row, answerable
from silodp.audit.pipeline import Caught, Pipeline, Probes
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import logistic
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import Poisson, WithoutReplacement
from silodp.silo.answer.lattice import Keystream
from silodp.silo.data.records import Records

BATCHES = Probes("exact", "gate")
RATE = 1e-8
MANY = 2**16
GROUPS = 16
COINS = 0.347
DRAWS = 10
"""Fewest batches of a row. Each local step draws one."""
TINY = 1e-6


@functools.cache
def crowd() -> tuple[Problem, Records]:
    """Return a problem and a silo of MANY records, each of which pulls at its two groups'
    coordinates.
    """
    k = torch.arange(MANY)
    x = torch.zeros(1, MANY, 2 * GROUPS)
    x[0, k, k * GROUPS // MANY] = 1000.0
    x[0, k, GROUPS + k % GROUPS] = 1000.0
    return Problem(nn.Linear(2 * GROUPS, 1, bias=False), logistic), Records(
        x, torch.zeros(1, MANY, dtype=torch.int64), (MANY,), ("silo",)
    )


def question(row: Row) -> Query:
    """Return the row's question to the crowd, in which every record pulls by its whole clip in one
    direction.
    """
    query = row.query(loud=False, features=2 * GROUPS, sampling=row.sampling(COINS))
    zero = torch.zeros(1, 2 * GROUPS, dtype=torch.float64)
    fields: dict[str, Any] = {
        name: value for name, value in vars(query.statistic).items() if name != "releases"
    }
    if "reference" in row.statistic.wire:
        fields |= {"w": zero + 1, "reference": zero - 1}
    else:
        fields["w"] = zero
    if "steps" in row.statistic.wire:
        fields["step"] = TINY
    if "drift" in vars(query.statistic):
        fields["drift"] = zero
    return Query(row.statistic(**fields), query.mechanism)


def drawn(row: Row, pipeline: Pipeline) -> np.ndarray:
    """Return whole numbers (releases, 32): how often records of each group are in an answer, over
    its steps.

    Raise Caught if records do not count once each.
    """
    problem, records = crowd()
    gate = pipeline.open_gate(
        problem, records, partition=lambda name, batches: Keystream().permutation(MANY)
    )
    query = question(row)
    scale = query.mechanism.sampling.batch(MANY) * 2**0.5 / float(query.mechanism.clip)
    if row.steps > 1:
        # Local steps go against the gradient, by a tiny step.
        scale /= -TINY
    releases = math.ceil(DRAWS / row.steps)
    values = np.stack(
        [gate.answer(query, [0]).value[0, 0].numpy() * scale for _ in range(releases)]
    )
    counts = np.rint(values)
    if np.abs(values - counts).max() > 0.3:
        raise Caught(
            f"{row}: records do not count once each, with the weight that their batch's "
            "public size gives them"
        )
    return counts.astype(np.int64)


def subsampled() -> list[Row]:
    """Return the rows of Gaussian answers on sampled batches."""
    return [
        row
        for row in answerable()
        if row.mechanism is Gaussian and row.sampling in (Poisson, WithoutReplacement)
    ]


def coins_of(row: Row, counts: np.ndarray) -> tuple[int, int]:
    """Return (heads, coins) of all releases together."""
    return int(counts[:, :GROUPS].sum()), counts.shape[0] * row.steps * MANY


@BATCHES.probe("coins")
def coins(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check Poisson batches: every record has a coin of its own, at the rate that is paid for,
    tossed again in every answer and every local step.
    """
    rows = [row for row in subsampled() if row.sampling is Poisson]
    for row in rows:
        check_coins(row, drawn(row, pipeline), RATE / len(rows))


def check_coins(row: Row, counts: np.ndarray, rate: float) -> None:
    """Raise Caught unless the coins have their rate and are independent. The false-alarm rate is
    `rate`.
    """
    each = rate / 6
    q = COINS
    heads, tossed = coins_of(row, counts)
    if not _inside(heads, tossed, q, each):
        raise Caught(
            f"{row}: of {tossed} coins {heads / tossed:.4f} are heads; the rate that is "
            f"paid for is {q}"
        )
    for name, total in _groups(counts.sum(0)):
        if not _inside(total, tossed // GROUPS, q, each / (2 * GROUPS)):
            raise Caught(
                f"{row}: records of {name} are in {total / (tossed // GROUPS):.4f} of the "
                f"batches, and not in {q}"
            )
    group = row.steps * MANY // GROUPS
    z = (counts - group * q) / np.sqrt(group * q * (1 - q))
    for name, part in (("neighbours", z[:, :GROUPS]), ("records 16 apart", z[:, GROUPS:])):
        _chi_square(
            part,
            part.size,
            f"{row}: the coins of {name}, or of two local steps, are not independent",
            each,
        )
    _chi_square(
        z[:, :GROUPS].sum(1) / GROUPS**0.5,
        len(z),
        f"{row}: the sizes of batches are not binomial",
        each,
    )
    _anew(row, z, each)


@BATCHES.probe("batches without replacement")
def sizes(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check batches without replacement: floor(rate n) distinct records, from all places of the
    file alike, drawn again each time.
    """
    rows = [row for row in subsampled() if row.sampling is WithoutReplacement]
    for row in rows:
        counts = drawn(row, pipeline)
        each = RATE / len(rows) / 3
        size = int(COINS * MANY)
        wrong = counts[:, :GROUPS].sum(1) != row.steps * size
        if wrong.any():
            raise Caught(
                f"{row}: a batch has {counts[wrong][0, :GROUPS].sum() / row.steps:g} "
                f"records where {size} are paid for"
            )
        group = row.steps * MANY // GROUPS
        q = size / MANY
        # For a batch of a fixed size the squares sum to chi-square with 15 degrees of freedom, by
        # the multivariate hypergeometric law.
        z = (counts - group * q) / np.sqrt(group * q * (1 - q) * MANY / (MANY - 1))
        for part in (z[:, :GROUPS], z[:, GROUPS:]):
            _chi_square(
                part,
                len(z) * (GROUPS - 1),
                f"{row}: some records are likelier in a batch than others",
                each,
            )
        _anew(row, z, each)


@BATCHES.probe("partitions")
def partitions(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check the ledger's partitions: 40 of them are permutations, all different, and no place is
    likelier than another.
    """
    silo = Answering(folder / "partitions", pipeline, Gaussian)
    orders = np.stack(
        [silo.ledger.partition(f"p{i}", 3, generation=silo.door._generation) for i in range(40)]
    )
    if not (np.sort(orders, 1) == np.arange(N)).all():
        raise Caught("a partition leaves a record out, or has one twice")
    if len({order.tobytes() for order in orders}) < len(orders):
        raise Caught("two partitions are the same")
    first = np.array([np.isin(np.arange(N), order[: N // 3]) for order in orders]).sum(0)
    low, high = stats.binom.interval(1 - RATE / N, len(orders), 1 / 3)
    if not ((low <= first) & (first <= high)).all():
        raise Caught(
            "a place in the file is likelier to be in the first batch of a partition than another"
        )


def _inside(heads: int, tossed: int, q: float, level: float) -> bool:
    """Return whether this many heads are likely at rate q."""
    return bool(
        stats.binom.cdf(heads, tossed, q) > level / 2
        and stats.binom.sf(heads - 1, tossed, q) > level / 2
    )


def _groups(totals: np.ndarray) -> list[tuple[str, int]]:
    """Return the name of each group with its total."""
    names = [f"{word} {g} of {GROUPS}" for word, g in product(("block", "residue"), range(GROUPS))]
    return list(zip(names, totals.tolist(), strict=True))


def _chi_square(z: np.ndarray, freedom: int, sentence: str, level: float) -> None:
    """Raise Caught with the sentence unless the squares of z sum to chi-square."""
    low, high = stats.chi2.isf([1 - level / 2, level / 2], freedom)
    if not low < float(np.square(z).sum()) < high:
        raise Caught(
            f"{sentence} (their spread is {np.square(z).sum() / freedom:.3g} of what it should be)"
        )


def _anew(row: Row, z: np.ndarray, level: float) -> None:
    """Raise Caught if two releases share their batch, and so have the same numbers in every
    group.
    """
    pairs = list(combinations(z[:, :GROUPS], 2))
    low = stats.chi2.isf(1 - level / len(pairs), GROUPS - 1)
    if any(float(np.square(a - b).sum()) / 2 < low for a, b in pairs):
        raise Caught(f"{row}: two questions get the same batch; draw a new batch for each")
