"""`python -m research verdict`: carries the plan out in resumable pieces, and reads the trials of
every tuned curve out of what was run.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from research.study import EPSILONS
from research.verdict_noise import Table, distinct
from research.verdict_plan import (
    CONDITIONS,
    OUTPUTS,
    Arm,
    Condition,
    Figure,
    Unit,
    arms,
    grid,
    rate,
    records_of,
    trainings,
    units,
)
from research.verdict_runs import COLUMNS, run, split_of
from silodp.host import atomic
from silodp.simulation.runfolder import make_folder
from silodp.simulation.sweep import Tick, spread, unseen

SPEED = {
    ("mlp", "cuda"): 4e8,
    ("mlp", "cpu"): 1.5e6,
    ("cnn", "cuda"): 5.2e6,
    ("cnn", "cpu"): 6.2e3,
    ("moved cnn", "cuda"): 2.1e6,
    ("moved cnn", "cpu"): 6.2e3,
    ("step", "cuda"): 1.5e8,
    ("step", "cpu"): 1.5e5,
}
"""Gradients of records a second, on a GPU or on a core, by which the time is foretold; of Local
SGD, steps of one network. Differences that are clipped by the move of w have no kernels of ours on
a GPU."""


GRACE = 40.0
"""Seconds after its time in which picked settings are still begun: they are few, and without them
what they were picked from says nothing.
"""


@dataclass(frozen=True)
class Job:
    """All that a process needs to run units of one folder."""

    folder: Path
    figures: dict[str, Figure]
    data_dir: Path | None
    until: float = math.inf
    """By the clock (time.time()): no unit is begun after it."""

    def path(self, unit: Unit) -> Path:
        return self.folder / "units" / f"{unit.key}.npy"

    def device(self, unit: Unit, gpu: bool) -> str:
        if gpu and self.figures[unit.figure].dataset != "wbcd" and torch.cuda.is_available():
            return "cuda"
        return "cpu"


def planned(
    figures: dict[str, Figure],
    names: Iterable[str],
    conditions: Iterable[str],
    epsilons: Sequence[float] = EPSILONS,
) -> list[Unit]:
    """In the order of their weight: the primary comparison of all figures first, and Local SGD,
    which takes longest, behind the others of a kind.
    """
    found = [
        unit
        for c in conditions
        for name in names
        for unit in units(name, CONDITIONS[c], figures, tuple(epsilons))
    ]
    return sorted(
        found, key=lambda unit: (unit.condition != "primary", unit.arm.curve == "local-sgd")
    )


def seconds(unit: Unit, figures: dict[str, Figure], device: str) -> float:
    """What a unit should take, from how many gradients it is."""
    figure = figures[unit.figure]
    condition = CONDITIONS[unit.condition]
    records = records_of(figure, condition)
    silos, n = {
        "wbcd": (2, 227),
        "mnist": (figure.cohort or 25, records or 1238),
        "cifar10": (10, records or 4800),
    }[figure.dataset]
    share = rate(figure, condition, unit.arm, unit.epsilons[-1])
    q = unit.arm.phase
    passes = {"spider": 2 - 1 / q, "alternate": 3.0}.get(unit.arm.curve, 1.0) + (
        0.4 / share / figure.every if unit.arm.curve != "local-sgd" else 0
    )
    work = trainings(unit, figures) * figure.rounds * silos * n * share * passes
    if figure.model != "cnn":
        network = "mlp"
    elif condition.form == "each":
        network = "cnn"
    else:
        network = "moved cnn"
    return work / SPEED["step" if unit.arm.curve == "local-sgd" else network, device]


def carry_out(
    job: Job,
    wanted: Sequence[Unit],
    *,
    shard: tuple[int, int] = (1, 1),
    gpu: bool = True,
    tick: Tick = unseen,
) -> list[Unit]:
    """Runs what is missing of the wanted units, and returns those that are still missing: others'
    shards, and what there was no time for.
    """
    make_folder(job.folder / "units")
    mine = wanted[shard[0] - 1 :: shard[1]]
    table = Table(job.folder / "noise.json")
    left = [unit for unit in mine if not job.path(unit).exists()]
    known = _counts(job.folder)
    priced = []
    done = len(mine) - len(left)
    tick(done, len(mine))
    for unit in mine:
        figure = job.figures[unit.figure]
        condition = CONDITIONS[unit.condition]
        if (key := _cut(figure, condition)) not in known:
            known[key] = distinct(
                split_of(
                    figure.dataset, 0, job.data_dir, "cpu", records_of(figure, condition)
                ).train.counts
            )
        if not job.path(unit).exists() and condition.noise != "none":
            priced += [(figure, condition, unit.arm, known[key], e) for e in unit.epsilons]
    atomic.write_json(job.folder / "counts.json", known)
    table.fill(priced)
    for picked in (False, True):  # settings are picked from what was run before
        tasks: dict[str, list[tuple]] = {"cpu": [], "cuda": []}
        for unit in left:
            if unit.picked is picked and not (
                picked and any(not job.path(u).exists() for u in _before(unit, wanted))
            ):
                if picked:
                    one = replace(job, until=job.until + GRACE)
                else:
                    one = job
                tasks[job.device(unit, gpu)].append((one, unit, job.device(unit, gpu)))
        for _ in spread(_work, tasks["cpu"], tasks["cuda"]):
            done += 1
            tick(done, len(mine))
    return [unit for unit in wanted if not job.path(unit).exists()]


def _before(unit: Unit, wanted: Iterable[Unit]) -> list[Unit]:
    return [
        u
        for u in wanted
        if (u.figure, u.condition, u.arm) == (unit.figure, unit.condition, unit.arm)
        and not u.picked
    ]


def _work(job: Job, unit: Unit, device: str) -> None:
    if time.time() >= job.until:
        return
    points = _picked(job, unit) if unit.picked else None
    found = run(unit, job.figures, Table(job.folder / "noise.json"), job.data_dir, device, points)
    file = io.BytesIO()
    np.save(file, found)
    atomic.write(job.path(unit), file.getvalue(), mode=0o644, durable=False)


def _picked(job: Job, unit: Unit) -> list[dict]:
    """The setting of least training loss at each epsilon, on the splits that it is picked on."""
    figure = job.figures[unit.figure]
    condition = CONDITIONS[unit.condition]
    settings = grid(figure, condition, unit.arm)
    points = []
    before = units(unit.figure, condition, job.figures, unit.epsilons)
    for one in before:
        if one.arm == unit.arm and not one.picked:
            loss = np.load(job.path(one))[:, :, 0].mean(1)
            points.append({"epsilon": one.epsilons[0], **settings[int(loss.argmin())]})
    return points


# --- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trials:
    """One arm, tuned at one epsilon by one output rule's training loss: its trials."""

    arm: str
    setting: dict[str, float]
    loss: float
    errors: tuple[float, ...]
    spent: float


def tuned(
    job: Job,
    name: str,
    condition: str,
    arm: Arm,
    table: Table,
    epsilons: Sequence[float],
    counts: tuple[int, ...],
) -> dict[tuple[float, str], Trials]:
    """By epsilon and output rule; empty where a unit is missing."""
    figure = job.figures[name]
    settings = grid(job.figures[name], CONDITIONS[condition], arm)
    mine = [
        u for u in units(name, CONDITIONS[condition], job.figures, tuple(epsilons)) if u.arm == arm
    ]
    if not mine or any(not job.path(u).exists() for u in mine):
        return {}
    last = [u for u in mine if u.picked or not figure.tuned_on]
    groups = list(dict.fromkeys(u.epsilons for u in last))
    at = [e for some in groups for e in some]
    parts = [
        np.concatenate([np.load(job.path(u)) for u in last if u.epsilons == some], 1)
        for some in groups
    ]
    found = np.concatenate(parts).reshape(
        len(at), -1, figure.trials, len(COLUMNS)
    )  # of picked settings, one at each epsilon
    chosen = [point for u in last if u.picked for point in _picked(job, u)]
    rows: dict[tuple[float, str], Trials] = {}
    for e, epsilon in enumerate(at):
        known = CONDITIONS[condition].noise == "none" or table.of(
            figure, CONDITIONS[condition], arm, counts, epsilon
        )
        for o, output in enumerate(OUTPUTS):
            loss = found[e, :, :, 2 * o]
            error = found[e, :, :, 2 * o + 1]
            best = int(np.nan_to_num(loss.mean(1), nan=math.inf).argmin())
            if chosen:
                setting = {k: v for k, v in chosen[e].items() if k != "epsilon"}
            else:
                setting = settings[best]
            if known is True:
                spent = math.inf
            else:
                spent = max(known["spent"])
            rows[epsilon, output] = Trials(
                arm.name, setting, float(loss[best].mean()), tuple(error[best].tolist()), spent
            )
    return rows


FIELDS = (
    "figure",
    "condition",
    "arm",
    "epsilon",
    "output",
    "spent",
    "step",
    "clip",
    "slope",
    "loss",
    "errors",
)


def collect(
    job: Job, names: Iterable[str], conditions: Iterable[str], epsilons: Sequence[float] = EPSILONS
) -> Iterator[dict]:
    """Every arm that is complete, tuned at every epsilon for every output rule: what verdict.csv
    has, one row each, with each trial's test error.
    """
    table = Table(job.folder / "noise.json")
    known = _counts(job.folder)
    for name in names:
        figure = job.figures[name]
        for condition in conditions:
            counts = known.get(_cut(figure, CONDITIONS[condition]), ())
            for arm in arms(figure, CONDITIONS[condition]):
                if counts:
                    found = tuned(job, name, condition, arm, table, epsilons, counts)
                else:
                    found = {}
                for (epsilon, output), t in found.items():
                    if output != "last" and condition not in ("primary", "text", "file"):
                        continue
                    yield {
                        "figure": name,
                        "condition": condition,
                        "arm": t.arm,
                        "epsilon": epsilon,
                        "output": output,
                        "spent": t.spent,
                        "step": t.setting["step"],
                        "clip": t.setting["clip"],
                        "slope": t.setting.get("slope", ""),
                        "loss": t.loss,
                        "errors": t.errors,
                    }


def _counts(folder: Path) -> dict[str, tuple[int, ...]]:
    """The silos' sizes, each once, of the data sets that were begun."""
    path = folder / "counts.json"
    if path.exists():
        return {name: tuple(sizes) for name, sizes in json.loads(path.read_text()).items()}
    return {}


def _cut(figure: Figure, condition: Condition) -> str:
    """The data set with as many records of it as are used."""
    return f"{figure.dataset}-{records_of(figure, condition) or 'all'}"


def write_trials(rows: Iterable[dict], path: Path) -> None:
    """verdict.csv: each tuned arm with the test error of every trial, for others to test
    otherwise.
    """
    lines = []
    for r in rows:
        numbers = [
            f"{r[k]:.6g}" if r[k] != "" else "" for k in ("spent", "step", "clip", "slope", "loss")
        ]
        lines.append(
            (
                *(r[k] for k in FIELDS[:3]),
                f"{r['epsilon']:g}",
                r["output"],
                *numbers,
                " ".join(f"{e:.4g}" for e in r["errors"]),
            )
        )
    atomic.write_table(path, FIELDS, lines)


def read_trials(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return [
            {
                **{k: r[k] for k in ("figure", "condition", "arm", "output")},
                **{
                    k: float(r[k]) if r[k] else ""
                    for k in ("epsilon", "spent", "step", "clip", "slope", "loss")
                },
                "errors": tuple(float(e) for e in r["errors"].split()),
            }
            for r in csv.DictReader(file)
        ]
