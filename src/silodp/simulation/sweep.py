"""Sweeps: arms (an algorithm with its noise and a grid) over trials and epsilons, advanced as
batches of runs, into a store that resumes.
"""

from __future__ import annotations

import csv
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from silodp.core.problem.problem import Problem
from silodp.engine.clipping import ENGINES
from silodp.engine.task import Engine
from silodp.host import atomic
from silodp.server.algorithms import find
from silodp.server.order import Order
from silodp.server.output import output
from silodp.server.prepare import prepare
from silodp.server.settings import default_shares
from silodp.silo.data.datasets import Split
from silodp.silo.ledger.memory import MemoryLedger
from silodp.simulation.connect import connect
from silodp.testing.evaluate import error_rate, training_loss

Result = TypeVar("Result")

SHARING = 2
"""Processes that share a GPU, which hide each other's waiting; it takes turns between them, and
with six much of it was lost.
"""

GRID = ("step", "clip", "slope", "momentum", "kappa")
"""Hyper-parameters that may differ between the runs of one batch; everything else shapes the
schedule and is fixed per arm.
"""


def scheduled(order: Order) -> dict[str, Any]:
    """The settings of the order's algorithm."""
    return find(order.algorithm).schedule(order.schedule)


@dataclass(frozen=True)
class Arm:
    """One curve's batch of runs: an order, whose schedule and noise they share, and a grid of the
    rest.
    """

    curve: str
    order: Order
    grid: dict[str, tuple[float, ...]]
    private: bool = True
    """Whether there is noise at all; without it a run is a baseline."""

    @property
    def settings(self) -> dict[str, Any]:
        """The algorithm's, but those of the grid."""
        return {
            name: value for name, value in scheduled(self.order).items() if name not in self.grid
        }

    @property
    def key(self) -> str:
        more = [f"share={self.share}"] if self.share else []
        if self.order.sampling in (
            "full",
            "disjoint",
        ):  # else batches are the study's, alike for all
            more.append(self.order.sampling)
        return ",".join(
            [
                self.curve,
                self.order.algorithm,
                *(f"{k}={v}" for k, v in sorted(self.columns.items())),
                *more,
            ]
        )

    @property
    def columns(self) -> dict[str, Any]:
        """The settings as tables of results have always named them: local steps are `steps`."""
        return {
            "steps" if name == "local_steps" else name: value
            for name, value in self.settings.items()
        }

    @property
    def share(self) -> str:
        """The anchors' share of the budget, where they are given one."""
        if not self.private or self.order.noise == "paper":
            return ""
        shares = (
            default_shares(
                find(self.order.algorithm), scheduled(self.order), self.order.anchor_share
            )
            or {}
        )
        if "anchor" in shares:
            return f"{shares['anchor']:.3g}"
        return ""

    def points(self, epsilons: Sequence[float]) -> list[dict[str, float]]:
        """The runs of the batch: the grid, for each epsilon."""
        names = [name for name in GRID if name in self.grid]
        return [
            {"epsilon": e, **dict(zip(names, values, strict=True))}
            for e in (epsilons if self.private else (math.inf,))
            for values in itertools.product(*(self.grid[name] for name in names))
        ]


def run_arm(
    arm: Arm,
    problem: Problem,
    split: Split,
    trial: int,
    epsilons: Sequence[float],
    draw: int = 0,
    *,
    engines: Sequence[Engine] = ENGINES,
) -> Iterator[dict[str, float | str]]:
    """All runs of one arm on one split, as one batch. Rows carry the training loss, the test error
    and what was really spent.

    `draw` says which of the draws of all noise it is: runs of one trial and draw share theirs,
    whatever their epsilon. `engines` compute the clipped sums.
    """
    order = replace(arm.order, seed=trial)
    points = arm.points(epsilons)
    records = split.train
    device = split.train.x.device
    made = prepare(
        order,
        records.names,
        records.counts,
        dimension=problem.dim,
        epsilons=[p["epsilon"] for p in points],
    )
    budgets = made.plan.budgets.tolist()
    if (
        order.noise == "paper"
        # the ledger only counts here: the constants may pass their own claim, and the row says by
        # how much
    ):
        budgets = [[replace(budget, epsilon=math.inf) for budget in row] for row in budgets]
    ledger = MemoryLedger(made.plan.rule, budgets, made.plan.counts)
    seeds = [(trial, draw) if draw else trial] * len(points)
    fed = connect(
        order.trust,
        problem,
        records,
        ledger,
        seeds,
        made.participation(),
        made.weights(records.counts),
        engines=engines,
    )
    columns = {
        name: torch.tensor([[p[name]] for p in points], device=device)
        for name in GRID
        if name in arm.grid
    }
    clip = columns.pop("clip")
    start = problem.initial([trial]).to(device).expand(len(points), -1)
    mechanisms = {kind: m.clipped(clip) for kind, m in made.mechanisms.items()}
    w = output(made.algorithm.run(fed, problem, start, **made.settings | columns, **mechanisms))
    loss = training_loss(problem, w, split.train)
    error = error_rate(problem, w, split.test_x, split.test_y)
    claims = ledger.epsilon().max(1).tolist()
    for point, a, b, spent in zip(points, loss.tolist(), error.tolist(), claims, strict=True):
        yield {
            "unit": arm.key,
            "curve": arm.curve,
            "trial": trial,
            "share": arm.share,
            **arm.columns,
            **point,
            "train_loss": a if math.isfinite(a) else math.inf,
            "test_error": b,
            "spent_epsilon": spent,
        }


Tick = Callable[[int, int], None]
"""Is told how much is done, of how much in all."""


def unseen(done: int, total: int) -> None:
    """For whoever does not look on."""


def spread(
    work: Callable[..., Result],
    tasks: Sequence[tuple],
    on_gpu: Sequence[tuple] = (),
    *,
    tick: Tick = unseen,
    before: int = 0,
    by: Callable[..., Iterator[Result]] | None = None,
) -> Iterator[Result]:
    """Results as they finish, on all cores, or `by` a cluster; `tick` is told of each once it is
    taken care of, `before` so many that were done already.
    """
    total = before + len(tasks) + len(on_gpu)
    tick(before, total)
    for done, result in enumerate((by or _spread)(work, tasks, on_gpu), before + 1):
        yield result
        tick(done, total)


def _spread(
    work: Callable[..., Result], tasks: Sequence[tuple], on_gpu: Sequence[tuple]
) -> Iterator[Result]:
    """From one single-threaded process for each core: batches of runs are independent, so cores
    need not wait for each other inside one. Tasks for a GPU have a few processes beside them, as
    many as keep it busy and it has room for.
    """
    cores = os.cpu_count() or 1
    if on_gpu:
        room = min(
            SHARING, cores, max(1, torch.cuda.get_device_properties(0).total_memory // 2**33)
        )
    else:
        room = 0
    groups = [
        (some, most)
        for some, most in ((on_gpu, min(room, len(on_gpu))), (tasks, min(cores, len(tasks))))
        if some
    ]
    if sum(most for _, most in groups) <= 1:
        yield from (work(*task) for some, _ in groups for task in some)
        return
    pools = [
        ProcessPoolExecutor(
            most, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
        )
        for _, most in groups
    ]
    try:
        for done in as_completed(
            [
                pool.submit(work, *task)
                for pool, (some, _) in zip(pools, groups, strict=True)
                for task in some
            ]
        ):
            yield done.result()
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list((pool._processes or {}).values()):
                process.terminate()


# --- the store -----------------------------------------------------------------------------------

COLUMNS: tuple[str, ...] = (
    "unit",
    "curve",
    "trial",
    "epsilon",
    "rounds",
    "phase",
    "steps",
    "share",
    "step",
    "clip",
    "slope",
    "momentum",
    "kappa",
    "train_loss",
    "test_error",
    "spent_epsilon",
)


class Store:
    """The folder's results*.csv, one row for each finished run. A unit (arm and trial) counts as
    done only when its closing row is there, so a killed sweep loses the unit it was in and nothing
    else. A shard writes a file of its own; the folder's results are the union."""

    def __init__(self, folder: Path, shard: tuple[int, int] = (1, 1)) -> None:
        self.path = folder / (
            "results.csv" if shard == (1, 1) else f"results-{shard[0]}-of-{shard[1]}.csv"
        )
        self.rows: list[dict[str, str]] = []
        self.done: set[tuple[str, int]] = set()
        for path in sorted({*folder.glob("results*.csv"), self.path}):
            rows = _finished(path) if path.exists() else []
            if path == self.path:
                atomic.write_table(path, COLUMNS, rows)
            self.rows += [r for r in rows if (r["unit"], int(r["trial"])) not in self.done]
            self.done |= {(r["unit"], int(r["trial"])) for r in rows}

    def add(self, unit: str, trial: int, rows: Iterable[dict]) -> None:
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(
                file, COLUMNS, lineterminator="\n", extrasaction="ignore"
            )  # a unit's name has all settings
            for row in [*rows, {"unit": unit, "curve": "done", "trial": trial, "spent_epsilon": 0}]:
                writer.writerow(row)
                self.rows.append({k: str(row.get(k, "")) for k in COLUMNS})
            file.flush()
            os.fsync(file.fileno())
        self.done.add((unit, trial))

    def runs(self) -> list[dict[str, str]]:
        return [r for r in self.rows if r["curve"] != "done"]


def _finished(path: Path) -> list[dict[str, str]]:
    """The rows of units whose closing row is there."""
    with path.open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r.get("spent_epsilon") not in (None, "")]
    closed = {(r["unit"], r["trial"]) for r in rows if r["curve"] == "done"}
    return [r for r in rows if (r["unit"], r["trial"]) in closed]


class Sweep(Protocol):
    """What is to be run: arms, each on a number of trials."""

    @property
    def trials(self) -> int: ...
    def arms(self) -> list[Arm]: ...


def pending(store: Store, sweep: Sweep, shard: tuple[int, int] = (1, 1)) -> list[tuple[Arm, int]]:
    """What is not done yet, and is this shard's."""
    units = [(arm, t) for t in range(sweep.trials) for arm in sweep.arms()]
    return [
        (arm, t) for arm, t in units[shard[0] - 1 :: shard[1]] if (arm.key, t) not in store.done
    ]


def best_settings(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The trials of the setting with the least mean training loss, as the paper tunes (on private
    data, and not charged for it).
    """
    names = ("unit", *GRID)
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return min(
        groups.values(),
        key=lambda group: sum(float(row["train_loss"]) for row in group) / len(group),
    )


def as_tensor(rows: Sequence[dict[str, str]], column: str) -> Tensor:
    return torch.tensor([float(r[column]) for r in rows], dtype=torch.float64)
