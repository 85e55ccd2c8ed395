"""Sweeps: arms (an algorithm with its noise and a grid) over trials and epsilons. They run as
batches, into a store that can be resumed.
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
"""Processes that share a GPU. Two of them hide each other's waiting. Six of them lost much time,
because the GPU changes between them.
"""

GRID = ("step", "clip", "slope", "momentum", "kappa")
"""Hyper-parameters that may differ between the runs of one batch. All others shape the schedule,
and are the same in one arm.
"""


def scheduled(order: Order) -> dict[str, Any]:
    """Return the settings of the order's algorithm."""
    return find(order.algorithm).schedule(order.schedule)


@dataclass(frozen=True)
class Arm:
    """One curve's batch of runs. The runs share the schedule and the noise of an order, and differ
    in a grid of other settings.
    """

    curve: str
    order: Order
    grid: dict[str, tuple[float, ...]]
    private: bool = True
    """Whether there is noise. A run without noise is a baseline."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the algorithm's settings that are not in the grid."""
        return {
            name: value for name, value in scheduled(self.order).items() if name not in self.grid
        }

    @property
    def key(self) -> str:
        """Return the name of the arm in a store."""
        parts = [self.curve, self.order.algorithm]
        parts += [f"{name}={value}" for name, value in sorted(self.columns.items())]
        if self.share:
            parts.append(f"share={self.share}")
        # A sampled batch is the same in all arms of a study, so it is not in the name.
        if self.order.sampling in ("full", "disjoint"):
            parts.append(self.order.sampling)
        return ",".join(parts)

    @property
    def columns(self) -> dict[str, Any]:
        """Return the settings by their names in tables of results. There local steps have always
        been called `steps`.
        """
        return {
            "steps" if name == "local_steps" else name: value
            for name, value in self.settings.items()
        }

    @property
    def share(self) -> str:
        """Return the anchors' share of the budget as a text, or an empty text without such a
        share.
        """
        if not self.private or self.order.noise == "paper":
            return ""
        algorithm = find(self.order.algorithm)
        shares = default_shares(algorithm, scheduled(self.order), self.order.anchor_share)
        if shares and "anchor" in shares:
            return f"{shares['anchor']:.3g}"
        return ""

    def points(self, epsilons: Sequence[float]) -> list[dict[str, float]]:
        """Return the settings of each run of the batch: the grid, for each epsilon."""
        if not self.private:
            epsilons = (math.inf,)
        names = [name for name in GRID if name in self.grid]
        return [
            {"epsilon": e, **dict(zip(names, values, strict=True))}
            for e in epsilons
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
    """Run all runs of one arm on one split, as one batch. Yield a row for each run, with training
    loss, test error and real spend.

    `draw` is the number of the draw of all noise. Runs of one trial and draw share their noise, for
    every epsilon. `engines` compute the clipped sums.
    """
    if len(epsilons) > 1 and "spread" in find(arm.order.algorithm).kinds:
        # runs side by side share what they have learned of the features
        for epsilon in epsilons:
            yield from run_arm(arm, problem, split, trial, [epsilon], draw, engines=engines)
        return
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
    # With the paper's constants the ledger only counts: a run may spend more than its claim, and
    # the row shows how much.
    if order.noise == "paper":
        budgets = [[replace(budget, epsilon=math.inf) for budget in row] for row in budgets]
    ledger = MemoryLedger(made.plan.rule, budgets, made.plan.counts)
    if draw:
        seeds = [(trial, draw)] * len(points)
    else:
        seeds = [trial] * len(points)
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
    for point, train_loss, test_error, spent in zip(
        points, loss.tolist(), error.tolist(), claims, strict=True
    ):
        if not math.isfinite(train_loss):
            # A run that diverged is the worst, also when its loss is not a number.
            train_loss = math.inf
        yield {
            "unit": arm.key,
            "curve": arm.curve,
            "trial": trial,
            "share": arm.share,
            **arm.columns,
            **point,
            "train_loss": train_loss,
            "test_error": test_error,
            "spent_epsilon": spent,
        }


Tick = Callable[[int, int], None]
"""Called with the number of finished tasks and the number of all tasks."""


def unseen(done: int, total: int) -> None:
    """Show no progress."""


def spread(
    work: Callable[..., Result],
    tasks: Sequence[tuple],
    on_gpu: Sequence[tuple] = (),
    *,
    tick: Tick = unseen,
    before: int = 0,
    by: Callable[..., Iterator[Result]] | None = None,
) -> Iterator[Result]:
    """Yield results as they finish, computed on all cores, or by the cluster `by`.

    `tick` is called after the caller has used each result. `before` is the number of tasks that
    were done already.
    """
    total = before + len(tasks) + len(on_gpu)
    tick(before, total)
    for done, result in enumerate((by or _spread)(work, tasks, on_gpu), before + 1):
        yield result
        tick(done, total)


def _spread(
    work: Callable[..., Result], tasks: Sequence[tuple], on_gpu: Sequence[tuple]
) -> Iterator[Result]:
    """Yield results as they finish, from one single-threaded process for each core.

    Batches of runs are independent, so no core waits for another. Tasks for a GPU have a few
    processes beside the others: as many as keep the GPU busy, and as fit into its memory.
    """
    cores = os.cpu_count() or 1
    groups: list[tuple[Sequence[tuple], int]] = []
    """Tasks, and the number of their processes."""
    if on_gpu:
        fitting = max(1, torch.cuda.get_device_properties(0).total_memory // 2**33)
        groups.append((on_gpu, min(SHARING, cores, fitting, len(on_gpu))))
    if tasks:
        groups.append((tasks, min(cores, len(tasks))))
    if sum(processes for _, processes in groups) <= 1:
        for group, _ in groups:
            yield from (work(*task) for task in group)
        return
    pools = [
        ProcessPoolExecutor(
            processes,
            mp_context=get_context("spawn"),
            initializer=torch.set_num_threads,
            initargs=(1,),
        )
        for _, processes in groups
    ]
    try:
        futures = [
            pool.submit(work, *task)
            for pool, (group, _) in zip(pools, groups, strict=True)
            for task in group
        ]
        for done in as_completed(futures):
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
    """The folder's results*.csv, with one row for each finished run.

    A unit (arm and trial) counts as done only if its closing row is there. So a sweep that is
    killed loses only the units in progress. A shard writes a file of its own. The folder's results
    are the union of all files.
    """

    def __init__(self, folder: Path, shard: tuple[int, int] = (1, 1)) -> None:
        if shard == (1, 1):
            self.path = folder / "results.csv"
        else:
            self.path = folder / f"results-{shard[0]}-of-{shard[1]}.csv"
        self.rows: list[dict[str, str]] = []
        self.done: set[tuple[str, int]] = set()
        for path in sorted({*folder.glob("results*.csv"), self.path}):
            rows = _finished(path)
            if path == self.path:
                atomic.write_table(path, COLUMNS, rows)
            self.rows += [r for r in rows if (r["unit"], int(r["trial"])) not in self.done]
            self.done |= {(r["unit"], int(r["trial"])) for r in rows}

    def add(self, unit: str, trial: int, rows: Iterable[dict]) -> None:
        """Append the rows of a finished unit and its closing row, and wait until they are on the
        disk.
        """
        with self.path.open("a", newline="") as file:
            # Settings without a column of their own are in the name of the unit.
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", extrasaction="ignore")
            for row in [*rows, {"unit": unit, "curve": "done", "trial": trial, "spent_epsilon": 0}]:
                writer.writerow(row)
                self.rows.append({k: str(row.get(k, "")) for k in COLUMNS})
            file.flush()
            os.fsync(file.fileno())
        self.done.add((unit, trial))

    def runs(self) -> list[dict[str, str]]:
        """Return the rows of runs, without closing rows."""
        return [r for r in self.rows if r["curve"] != "done"]


def _finished(path: Path) -> list[dict[str, str]]:
    """Return the rows of units with a closing row. Return none if the file does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r.get("spent_epsilon") not in (None, "")]
    closed = {(r["unit"], r["trial"]) for r in rows if r["curve"] == "done"}
    return [r for r in rows if (r["unit"], r["trial"]) in closed]


class Sweep(Protocol):
    """The work of a sweep: arms, each on a number of trials."""

    @property
    def trials(self) -> int:
        """Return the number of trials of each arm."""
        ...

    def arms(self) -> list[Arm]:
        """Return the arms."""
        ...


def pending(store: Store, sweep: Sweep, shard: tuple[int, int] = (1, 1)) -> list[tuple[Arm, int]]:
    """Return the units of this shard that are not done yet."""
    units = [(arm, t) for t in range(sweep.trials) for arm in sweep.arms()]
    return [
        (arm, t) for arm, t in units[shard[0] - 1 :: shard[1]] if (arm.key, t) not in store.done
    ]


def best_settings(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return the trials of the setting with the least mean training loss.

    The paper tunes in this way, on private data and without a charge.
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
    """Return a column of the rows as float64."""
    return torch.tensor([float(r[column]) for r in rows], dtype=torch.float64)
