"""Check that batches are drawn as they are priced.

The check observes from outside, through an answerer's releases, which records are in a batch.
Record k's gradient is the k-th unit vector. So an answer times its batch size shows the records of
the batch, with noise too small to hide them. Statistical checks have a false-alarm rate of 1e-6
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, Sampling, WithoutReplacement
from silodp.core.statistics import Grad
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import Answerer
from silodp.testing.mechanism import FALSE_ALARM, Make

RUNS = 400
NOISE = 1e-3


def check_sampling(
    sampling: Sampling,
    *,
    answerer: Make = Simulated,
    counts: Sequence[int] = (12, 40, 25),
    seed: int = 0,
) -> None:
    """Check that an answerer of yours draws the batches that `sampling` names.

    Raise AssertionError with one sentence if something is wrong. For all samplings, a record counts
    once and with weight 1 / sampling.batch(n), and padding never counts. The rest depends on the
    sampling:

    - FullBatch: every record is always in the batch.
    - DisjointBatches: batches have floor(n / batches) records, and no record is in two. The
      partition never changes. It differs for another name or run, and each record is equally
      likely.
    - Poisson: coins are independent and have the rate. So the number of records is binomial and not
      cut off. The answer for an empty batch is noise alone.
    - WithoutReplacement: floor(rate n) distinct records, all equally likely, drawn again each time.
    """
    world = _World(answerer, counts, seed)
    match sampling:
        case FullBatch():
            for r in range(2):
                who = world.members(sampling)
                assert bool(who[:, world.real].all()), (
                    f"{sampling}: a record was left out in round {r}"
                )
        case DisjointBatches():
            _check_partition(world, sampling)
        case Poisson():
            _check_poisson(world, sampling)
        case WithoutReplacement():
            _check_without_replacement(world, sampling)
        case _:
            raise AssertionError(
                f"{sampling}: there is no conformance suite for this sampling; its law decides "
                "its price, so write one"
            )


def _check_partition(world: _World, sampling: DisjointBatches) -> None:
    """Check batches of a partition."""
    batches = [replace(sampling, index=i) for i in range(sampling.batches)]
    first = [world.members(b) for b in batches]
    for b, who in zip(batches, first, strict=True):
        world.assert_sizes(who, [n // sampling.batches for n in world.counts], f"{b}")
    times = torch.stack(first).int().sum(0)
    assert int(times.max()) == 1, (
        f"{sampling}: a record is in {int(times.max())} batches of one partition"
    )
    world.members(replace(sampling, partition=sampling.partition + "-other"))
    world.members(FullBatch())
    for b, who in zip(reversed(batches), reversed(first), strict=True):
        assert torch.equal(world.members(b), who), (
            f"{b}: asked again, the batch has other records; a partition must never be redrawn"
        )
    alone = world.members(batches[0], [len(world.counts) - 1])
    assert torch.equal(alone[:, 0], first[0][:, -1]), (
        f"{sampling}: a silo's batch depends on which other silos take part"
    )
    if sampling.batches > 1:
        other = world.members(replace(batches[0], partition=sampling.partition + "-other"))
        assert not torch.equal(other, first[0]), (
            f"{sampling}: a partition of another name is the same one"
        )
        assert not torch.equal(first[0][0], first[0][1]), (
            f"{sampling}: runs of different seeds share one partition"
        )
    for who in first[:2]:
        world.assert_even(who, [n // sampling.batches / n for n in world.counts], f"{sampling}")


def _check_poisson(world: _World, sampling: Poisson) -> None:
    """Check batches by independent coins."""
    rounds = [world.members(sampling) for _ in range(3)]
    who = torch.cat(rounds)
    world.assert_even(who, [sampling.rate] * len(world.counts), f"{sampling}")
    for i, n in enumerate(world.counts):
        sizes = who[:, i].sum(-1).numpy()
        p = _binomial_fit(sizes, n, sampling.rate)
        assert p > FALSE_ALARM, (
            f"{sampling}: batch sizes of silo {i} are not binomial (p = {p:.1g}): coins "
            "are not independent, or cut off"
        )
    flat = [r[:, world.real].double() - sampling.rate for r in rounds]
    scale = sampling.rate * (1 - sampling.rate)
    if scale > 0:
        pairs = [
            ("two rounds", flat[0], flat[1]),
            ("two runs", flat[0][::2], flat[0][1::2]),
            ("two records", flat[0][:, ::2][:, : flat[0].shape[1] // 2], flat[0][:, 1::2]),
        ]
        if len(world.counts) > 1:
            pairs.append(("two silos", *world.across(rounds[0].double() - sampling.rate)))
        for name, a, b in pairs:
            z = float((a * b).sum()) / (scale * a.numel() ** 0.5)
            assert abs(z) < stats.norm.isf(FALSE_ALARM / 2), (
                f"{sampling}: the coins of {name} are not independent (z = {z:.1f})"
            )
    _check_empty(world, sampling)


def _check_empty(world: _World, sampling: Poisson) -> None:
    """Check that the answer for an empty batch is noise of the usual size."""
    value = world.answer(sampling)
    who = value.round() != 0
    for i, n in enumerate(world.counts):
        empty = value[~who[:, i].any(-1), i].double()
        chance = (1 - sampling.rate) ** n
        assert len(empty) or RUNS * chance < 14, (
            f"{sampling}: no batch of silo {i} was empty in {RUNS} runs, though "
            f"{RUNS * chance:.0f} should be"
        )
        if len(empty):
            total = float((empty / (2 * NOISE)).square().sum())
            low, high = stats.chi2.interval(1 - FALSE_ALARM, empty.numel())
            assert low < total < high, (
                f"{sampling}: an empty batch of silo {i} is not answered by noise of the usual size"
            )


def _check_without_replacement(world: _World, sampling: WithoutReplacement) -> None:
    """Check batches of distinct records."""
    sizes = [int(sampling.rate * n) for n in world.counts]
    first = world.members(sampling)
    second = world.members(sampling)
    for who in (first, second):
        world.assert_sizes(who, sizes, f"{sampling}")
        world.assert_even(
            who, [k / n for k, n in zip(sizes, world.counts, strict=True)], f"{sampling}"
        )
    if any(k < n for k, n in zip(sizes, world.counts, strict=True)):
        assert not torch.equal(first, second), (
            f"{sampling}: the second batch is the first again; it must be drawn again"
        )


def _binomial_fit(sizes: np.ndarray, n: int, rate: float) -> float:
    """Return the p-value of a chi-square fit of the batch sizes to Bin(n, rate).

    Each cell expects 5 or more.
    """
    expected = stats.binom.pmf(np.arange(n + 1), n, rate) * len(sizes)
    cells = np.zeros(n + 1, int)
    room = 0.0
    for k in range(n):
        room += expected[k]
        cells[k + 1] = cells[k] + (room >= 5 and expected[k + 1 :].sum() >= 5)
        if cells[k + 1] > cells[k]:
            room = 0.0
    wanted = np.bincount(cells, weights=expected)
    got = np.bincount(cells, weights=np.bincount(sizes, minlength=n + 1))
    if len(wanted) > 1:
        return float(stats.chisquare(got, wanted * got.sum() / wanted.sum()).pvalue)
    return 1.0


class _World:
    """Silos of unequal size whose padding rows also have records, which must never be used."""

    def __init__(self, answerer: Make, counts: Sequence[int], seed: int) -> None:
        self.counts = tuple(counts)
        size = max(counts)
        x = torch.eye(size).expand(len(counts), size, size).contiguous()
        records = Records(
            x,
            torch.full((len(counts), size), -0.5),
            self.counts,
            tuple(f"silo-{i}" for i in range(len(counts))),
        )
        self.real = records.mask
        problem = Problem(nn.Linear(size, 1, bias=False), squared_error)
        self._answerer: Answerer = answerer(problem, records, range(seed, seed + RUNS))
        self._w = torch.zeros(RUNS, size)

    def answer(self, sampling: Sampling, silos: Sequence[int] | None = None) -> Tensor:
        """Return each record's weight in the batch, (runs, silos, records).

        It has noise of standard deviation 2 x NOISE.
        """
        if silos is None:
            silos = range(len(self.counts))
        value = self._answerer.answer(
            Query(Grad(self._w), Gaussian("check", 1.0, NOISE, sampling)), silos
        )
        return value * torch.tensor([sampling.batch(self.counts[s]) for s in silos])[:, None]

    def members(self, sampling: Sampling, silos: Sequence[int] | None = None) -> Tensor:
        """Return whether each record is in the batch, (runs, silos, records).

        Raise AssertionError for another weight than 0 or 1, and for padding.
        """
        value = self.answer(sampling, silos)
        who = value.round()
        assert bool(((value - who).abs() < 20 * NOISE).all()), (
            f"{sampling}: a mean is not divided by the public batch size sampling.batch(n)"
        )
        assert bool(((who == 0) | (who == 1)).all()), (
            f"{sampling}: a record counts {float(who.abs().max()):.0f} times in one batch"
        )
        if silos is None:
            real = self.real
        else:
            real = self.real[list(silos)]
        assert not bool(who[:, ~real].any()), f"{sampling}: a padding row was taken for a record"
        return who.bool()

    def across(self, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coins of the k-th records of one silo and of the next, for each k that both
        have.
        """
        pairs = [
            (coins[:, i, :m], coins[:, i + 1, :m])
            for i, m in enumerate(map(min, pairwise(self.counts)))
        ]
        return torch.cat([a for a, _ in pairs], 1), torch.cat([b for _, b in pairs], 1)

    def assert_sizes(self, who: Tensor, wanted: Sequence[int], what: str) -> None:
        """Raise AssertionError unless all batches have these sizes."""
        for i, size in enumerate(wanted):
            got = who[:, i].sum(-1)
            assert bool((got == size).all()), (
                f"{what}: silo {i} has batches of {sorted(set(got.tolist()))} records, not "
                f"of {size}"
            )

    def assert_even(self, who: Tensor, rates: Sequence[float], what: str) -> None:
        """Check that each record of silo i is in a batch with probability rates[i].

        This is a two-sided binomial test for every record.
        """
        for i, (n, rate) in enumerate(zip(self.counts, rates, strict=True)):
            hits = who[:, i, :n].sum(0).numpy()
            low, high = stats.binom.interval(1 - FALSE_ALARM / n, len(who), rate)
            bad = (hits < low) | (hits > high)
            assert not bad.any(), (
                f"{what}: record {bad.argmax()} of silo {i} is in "
                f"{hits[bad.argmax()] / len(who):.3f} of batches, not in {rate:.3f}"
            )
