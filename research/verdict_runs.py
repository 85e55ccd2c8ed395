"""Runs a unit of the verdict: all its trainings, over grid, epsilons and splits, are one vectorised
program on a CPU or a GPU.

Splits lie side by side as silos: T splits of N silos are T N silos with a point for each split, so
that one call of an engine has the clipped sums of all. Runs of one split share their draws of
batches and noise, which are made on the CPU from the split's number: on a GPU it is the same run.
Only Local SGD's noise, a vector for each record that is stepped on, is drawn where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from research.datasets import DATASETS
from research.kernels import ENGINES, pictures
from research.verdict_local import local_round
from research.verdict_noise import ALGORITHMS, Table, batches, distinct, settings
from research.verdict_plan import CONDITIONS, Figure, Unit, grid, records_of
from silodp.core.mechanisms import Gaussian
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.problem.build import Words, build
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.models import lenet
from silodp.core.problem.problem import Problem
from silodp.core.problem.task import Task
from silodp.core.query import Query
from silodp.core.sampling import Sampling
from silodp.engine.clipping import clipped_sum
from silodp.engine.native import standard_normals
from silodp.host.extension import load
from silodp.server.algorithms import find
from silodp.server.federation import Everyone, Uniform
from silodp.silo.answer.simulated import NOISE
from silodp.silo.data.datasets import Split
from silodp.silo.data.records import Records

VERDICT = 0x7E5D1C7
"""Sets this study's draws apart from others' with the same number of split."""
COLUMNS = ("loss_last", "error_last", "loss_random", "error_random", "loss_least", "error_least")


@lru_cache(maxsize=24)
def split_of(
    dataset: str, trial: int, data_dir: Path | None, device: str, records: int | None
) -> Split:
    """The split of a trial; with `records`, that many training records a silo, and a quarter as
    many to test on.
    """
    split = DATASETS[dataset].of(trial, data_dir)
    if records is not None:
        train = split.train
        silos = len(split.train)
        few = Records(
            train.x[:, :records].clone(),
            train.y[:, :records].clone(),
            (records,) * silos,
            train.names,
        )
        kept = torch.cat(
            [
                torch.nonzero(split.test_y == k).flatten()[: records // 4]
                for k in range(split.classes)
            ]
        )
        split = replace(split, train=few, test_x=split.test_x[kept], test_y=split.test_y[kept])
    return split.to(device)


def problem_of(figure: Figure, split: Split, device: str) -> Problem:
    shape = tuple(split.train.x.shape[2:])
    if figure.model == "cnn":
        problem = Problem(lenet(shape[0], split.classes), cross_entropy)
    else:
        problem = build(Words(figure.model, Task.plain(split.classes)), math.prod(shape), load=load)
    problem.model.to(device)
    return problem


class Splits:
    """The port that the algorithms ask: T splits of the same silos at once. Rows of a point (G T,
    d) are runs and, within each, splits.
    """

    def __init__(
        self,
        problem: Problem,
        splits: Sequence[Split],
        trials: Sequence[int],
        multipliers: dict[str, Tensor],
        drawn: Sampling,
        cohort: int | None,
    ) -> None:
        train = [split.train for split in splits]
        self.problem = problem
        self.counts = train[0].counts
        self.silos = len(train[0])
        self.splits = len(train)
        self.x = torch.stack([t.x for t in train])
        self.y = torch.stack([t.y for t in train])
        self.mask = train[0].mask
        self.multipliers = multipliers
        self.drawn = drawn
        """(G, N) by kind."""
        self.random = [
            np.random.default_rng(np.random.SeedSequence((VERDICT, t), spawn_key=NOISE))
            for t in trials
        ]
        self.who = [
            Uniform(self.silos, cohort, seed=t) if cohort else Everyone(self.silos) for t in trials
        ]
        if self.x.is_cuda:
            self.memory = torch.cuda.get_device_properties(self.x.device).total_memory // 16
        else:
            self.memory = 2**28

    def mean(self, query: Query) -> Tensor:
        members = self.cohort()
        x, y, weight = self._batch(members)
        statistic = query.statistic
        mechanism = query.mechanism
        w, *reference = (self._spread(point, members.shape[1]) for point in statistic.points)
        clip = self._of_runs(mechanism.clip, w)
        limit = getattr(statistic, "limit", None)
        total = clipped_sum(
            self.problem,
            w,
            x,
            y,
            weight,
            clip,
            reference=reference[0] if reference else None,
            limit=None if limit is None else self._of_runs(limit, w),
            memory=self.memory,
            engines=ENGINES,
        )
        total = total.view(-1, self.splits, members.shape[1], self.problem.dim)
        size = torch.tensor(
            [[self.drawn.batch(self.counts[i]) for i in row] for row in members.tolist()]
        ).to(total)  # (T, M)
        total.div_(size[None, :, :, None])
        std = (
            2
            * clip.reshape(-1, 1, 1).to(total)
            * (1 + CLIP_TOLERANCE)
            / size
            * self.multipliers[mechanism.kind].to(total)[:, members]
        )
        if bool((self.multipliers[mechanism.kind] > 0).any()):
            draws = torch.empty(
                self.splits, members.shape[1], self.problem.dim, pin_memory=total.is_cuda
            )
            for random, into in zip(self.random, draws.numpy(), strict=True):
                standard_normals(random, into)
            total.addcmul_(std[..., None], draws.to(total, non_blocking=True))
        return total.mean(2).flatten(0, 1)

    def cohort(self) -> Tensor:
        """(T, M): who answers this round in each split."""
        return torch.tensor([who.draw() for who in self.who])

    def _spread(self, point: Tensor, silos: int) -> Tensor:
        """(G, d) for one split, else (G, T M, d): a split's silos all have its point."""
        if self.splits == 1:
            return point
        return (
            point.view(-1, self.splits, 1, self.problem.dim).expand(-1, -1, silos, -1).flatten(1, 2)
        )

    def _of_runs(self, value: float | Tensor, w: Tensor) -> Tensor:
        """(G, 1) of one number a run (G T, 1), which must be the same for all its splits."""
        value = torch.as_tensor(value, dtype=w.dtype, device=w.device).expand(
            len(w) * self.splits, 1
        )
        return value.view(-1, self.splits)[:, :1]

    def _batch(self, members: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The records drawn, (T M, k, ...), padded to the most of any silo, and their weights."""
        device, (splits, silos) = self.x.device, members.shape
        t = torch.arange(splits)[:, None]
        if self.drawn.whole:
            x = self.x[t, members]
            y = self.y[t, members]
            return x.flatten(0, 1), y.flatten(0, 1), self.mask[members.flatten()].to(x.dtype)
        n = self.mask.shape[1]
        coins = np.stack([random.random((silos, n)) < self.drawn.rate for random in self.random])
        chosen = torch.from_numpy(coins) & self.mask.cpu()[members]
        most = max(1, int(chosen.sum(2).max()))
        order = chosen.to(torch.uint8).topk(most, 2).indices
        weight = chosen.gather(2, order).flatten(0, 1).to(device, self.x.dtype)
        order = order.to(device)
        at = members.to(device)[..., None]
        t = t.to(device)[..., None]
        return self.x[t, at, order].flatten(0, 1), self.y[t, at, order].flatten(0, 1), weight


@torch.no_grad()
def losses(problem: Problem, w: Tensor, splits: Sequence[Split]) -> Tensor:
    """(G T,): the mean over silos of each one's mean training loss."""
    found = torch.empty(len(w) // len(splits), len(splits), dtype=torch.float64, device=w.device)
    for t, split in enumerate(splits):
        train = split.train
        weight = (
            train.mask / torch.tensor(train.counts, device=w.device)[:, None] / len(train)
        ).double()[train.mask]
        x = train.x[train.mask]
        y = train.y[train.mask]
        found[:, t] = torch.cat(
            [
                problem.record_losses(_outputs(problem, part, x), y).double() @ weight
                for part in _parts(w[t :: len(splits)], x)
            ]
        )
    return found.flatten()


@torch.no_grad()
def errors(problem: Problem, w: Tensor, splits: Sequence[Split]) -> Tensor:
    """(G T,): test error; a model whose output is not finite is wrong everywhere."""
    found = torch.empty(len(w) // len(splits), len(splits), dtype=torch.float64, device=w.device)
    for t, split in enumerate(splits):
        for_each = []
        for part in _parts(w[t :: len(splits)], split.test_x):
            scores = _outputs(problem, part, split.test_x)
            for_each.append(
                ((scores.argmax(-1) != split.test_y) | ~torch.isfinite(scores).all(-1))
                .double()
                .mean(-1)
            )
        found[:, t] = torch.cat(for_each)
    return found.flatten()


def _outputs(problem: Problem, w: Tensor, x: Tensor) -> Tensor:
    """Without kernels of ours a GPU's grouped convolutions need far more room than they fill: there
    networks that see pictures go one by one.
    """
    if (found := pictures.outputs(problem, w, x)) is not None:
        return found
    one_by_one = w.is_cuda and x.dim() > 2
    return torch.cat([problem.outputs(part, x) for part in w.split(1 if one_by_one else len(w))])


def _parts(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    wide = 8 if x.dim() > 2 else 2  # what a network makes of a record is longer than the record
    return w.split(max(1, (2**31 if w.is_cuda else 2**25) // max(1, wide * x.numel())))


class Watch:
    """The iterates of a unit: the last, one at random for each split, and that of the least
    training loss seen.
    """

    def __init__(
        self,
        problem: Problem,
        splits: Sequence[Split],
        trials: Sequence[int],
        iterates: int,
        every: int,
    ) -> None:
        self.problem = problem
        self.splits = splits
        self.every = every
        self.iterates = iterates
        self.at = torch.tensor(
            [int(np.random.default_rng((VERDICT, t)).integers(1, iterates + 1)) for t in trials]
        )
        self.count = 0
        self.best = None
        self.least = None
        self.random = None
        self.last = None

    def see(self, w: Tensor) -> None:
        self.count = self.count + 1
        self.last = w
        if self.random is None or self.best is None:
            self.random, self.best = w.clone(), w.clone()
        here = (self.at == self.count).to(w.device).repeat(len(w) // len(self.splits))[:, None]
        self.random = torch.where(here, w, self.random)
        if self.count % self.every == 0 or self.count == self.iterates:
            found = losses(self.problem, w, self.splits).nan_to_num(torch.inf)
            if self.least is None:
                self.least = torch.full_like(found, torch.inf)
            better = found < self.least
            self.least = torch.where(better, found, self.least)
            self.best = torch.where(better[:, None], w, self.best)

    def rows(self) -> np.ndarray:
        """(G T, 6) float32, as COLUMNS."""
        assert self.last is not None
        assert self.random is not None
        assert self.best is not None
        found = []
        for w in (self.last, self.random, self.best):
            found += [
                losses(self.problem, w, self.splits).nan_to_num(torch.inf),
                errors(self.problem, w, self.splits),
            ]
        return torch.stack(found, 1).float().cpu().numpy()


def run(
    unit: Unit,
    figures: dict[str, Figure],
    table: Table,
    data_dir: Path | None,
    device: str,
    points: list[dict] | None = None,
) -> np.ndarray:
    """(points, trials, 6): what came of each training. `points` are epsilons with settings; by
    default the whole grid at each epsilon.
    """
    figure = figures[unit.figure]
    condition = CONDITIONS[unit.condition]
    points = points or [
        {"epsilon": e, **p} for e in unit.epsilons for p in grid(figure, condition, unit.arm)
    ]
    # a clip that follows the move of w is another in each split, and pictures fill a machine with
    # one: these go split by split
    if figure.model != "cnn" and (
        condition.form == "each" or unit.arm.curve in ("mb-sgd", "local-sgd")
    ):
        together = len(unit.trials)
    else:
        together = 1
    parts = [
        _run(unit, figure, table, data_dir, device, points, unit.trials[t : t + together])
        for t in range(0, len(unit.trials), together)
    ]
    return np.concatenate(parts, 1)


def _run(
    unit: Unit,
    figure: Figure,
    table: Table,
    data_dir: Path | None,
    device: str,
    points: list[dict],
    trials: Sequence[int],
) -> np.ndarray:
    condition = CONDITIONS[unit.condition]
    splits = [
        split_of(figure.dataset, t, data_dir, device, records_of(figure, condition)) for t in trials
    ]
    problem = problem_of(figure, splits[0], device)
    counts = splits[0].train.counts
    kinds = find(ALGORITHMS[unit.arm.curve]).kinds
    several = len(splits)
    at = {n: i for i, n in enumerate(distinct(counts))}
    multipliers = {
        kind: torch.zeros(len(points), len(counts), dtype=torch.float64) for kind in kinds
    }
    if condition.noise != "none":
        for g, point in enumerate(points):
            known = table.of(figure, condition, unit.arm, counts, point["epsilon"])
            for kind in kinds:
                multipliers[kind][g] = torch.tensor([known[kind][at[n]] for n in counts])
    drawn = batches(figure, condition, unit.arm, counts[0], unit.epsilons[0])
    fed = Splits(problem, splits, trials, multipliers, drawn, figure.cohort)
    columns = {
        name: torch.tensor([[p[name]] for p in points], device=device).repeat_interleave(several, 0)
        for name in points[0]
        if name != "epsilon"
    }
    w = problem.initial(list(trials)).to(device).repeat(len(points), 1)
    schedule = settings(figure, condition, unit.arm, counts)
    halves = 2 if unit.arm.curve == "alternate" else 1
    watch = Watch(problem, splits, trials, halves * figure.rounds, halves * figure.every)
    if unit.arm.curve == "local-sgd":
        random = torch.Generator(device).manual_seed(VERDICT + trials[0])
        for _ in range(figure.rounds):
            w = local_round(
                fed,
                w,
                schedule["local_steps"],
                columns["step"],
                columns["clip"],
                random,
                condition.optimiser,
            )
            watch.see(w)
    else:
        clip = columns.pop("clip")
        mechanisms = {kind: Gaussian(kind, clip, 0.0, drawn) for kind in kinds}
        for iterate in find(ALGORITHMS[unit.arm.curve]).run(
            fed, problem, w, **(schedule | columns), **mechanisms
        ):
            watch.see(iterate)
    return watch.rows().reshape(len(points), several, len(COLUMNS))
