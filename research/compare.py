"""The main job: what privacy costs, by epsilon and algorithm. Carries out studies, many batches of
runs side by side, and sums them up.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from research.datasets import DATASETS
from research.kernels import ENGINES
from research.study import CURVES, Study
from silodp.core.errors import BadInput
from silodp.core.features.feature_map import feature_map
from silodp.host import atomic
from silodp.host.extension import load
from silodp.silo.data.datasets import Split
from silodp.simulation.runfolder import open_folder, write_environment
from silodp.simulation.sweep import (
    Arm,
    Store,
    Tick,
    as_tensor,
    best_settings,
    pending,
    run_arm,
    spread,
    unseen,
)

if TYPE_CHECKING:
    from research.on_ray import Cluster

NOTE = (
    "Tuning (by training loss, as in the paper) and standardisation of the features look at "
    "the data and are not charged to the budget."
)
ON_GPU = ("mnist", "cifar10")
"""Data sets that fill a GPU; smaller ones are faster on the CPU, where their batches run side by
side.
"""


def carry_out(
    studies: Mapping[Path, Study],
    *,
    data_dir: Path | None = None,
    tick: Tick = unseen,
    shard: tuple[int, int] = (1, 1),
    gpu: bool = True,
    cluster: Cluster | None = None,
) -> dict[Path, list[dict]]:
    """Runs what is missing of each folder's study, and returns the summary rows of those that are
    complete.

    With a shard (i, k) every k-th batch of runs is run here, into a file of its own; whoever finds
    all of them in the folder sums up. A cluster runs the batches elsewhere, and what they find is
    written here.
    """
    for study in studies.values():
        if study.dataset not in DATASETS:
            raise BadInput(
                f"data set {study.dataset!r} is unknown; choose one of {', '.join(DATASETS)}"
            )
    for dataset in {
        study.dataset for folder, study in studies.items() if not (folder / "config.json").exists()
    }:
        DATASETS[dataset].of(
            0, data_dir, raw=True
        )  # what is wrong is said before a folder holds it
    for folder, study in studies.items():
        open_folder(folder, study)
    stores = {folder: Store(folder, shard) for folder in studies}
    tasks: dict[bool, list[tuple]] = {False: [], True: []}
    has_gpu = gpu and (cluster.gpus if cluster else torch.cuda.is_available())
    for folder, study in studies.items():
        there = has_gpu and study.dataset in ON_GPU
        tasks[there] += [
            (folder, study, *unit, data_dir, "cuda" if there else "cpu")
            for unit in pending(stores[folder], study, shard)
        ]
    total = sum(len(study.arms()) * study.trials for study in studies.values())
    more = {
        "tick": tick,
        "before": total - sum(map(len, tasks.values())),
        "by": cluster.spread if cluster else None,
    }
    for folder, arm, trial, rows, facts in spread(_unit, tasks[False], tasks[True], **more):
        if not (folder / "data.json").exists():
            atomic.write_json(folder / "data.json", facts)
        stores[folder].add(arm.key, trial, rows)
    return {
        f: _close(f, s, store)
        for f, s in studies.items()
        if not pending(store := Store(f, shard), s)
    }  # others may have written


def _close(folder: Path, study: Study, store: Store) -> list[dict]:
    rows = summarise(store.runs(), study)
    atomic.write_json(folder / "summary.json", rows)
    write_table(rows, folder / "figure.csv")
    write_environment(folder, noise="simulation: seeded pseudo-random float noise")
    return rows


def _unit(
    folder: Path, study: Study, arm: Arm, trial: int, data_dir: Path | None, device: str
) -> tuple[Path, Arm, int, list[dict], dict[str, Any]]:
    """A batch of runs, and the facts of its data; nothing is written, since the folder may be
    another machine's.
    """
    split = _split(study.dataset, trial, data_dir, device, study.features)
    problem = study.problem(tuple(split.train.x.shape[2:]), split.classes)
    problem.model.to(device)
    placed = study.placed(arm, len(split.train))
    rows = list(run_arm(placed, problem, split, trial, study.epsilons, study.draw, engines=ENGINES))
    return folder, arm, trial, rows, _facts(study, split, problem.dim)


def _facts(study: Study, split: Split, parameters: int) -> dict[str, Any]:
    """data.json: the shape of the data and how many batches of runs there are, for reports; n is
    public.
    """
    train = split.train
    silos = [
        {"name": name, "records": n} for name, n in zip(train.names, train.counts, strict=True)
    ]
    facts = {
        "silos": silos,
        "features": list(train.x.shape[2:]),
        "classes": split.classes,
        "test_records": len(split.test_y),
    }
    return facts | {"parameters": parameters, "units": len(study.arms()) * study.trials}


@lru_cache(maxsize=2)  # a process meets the same trial's batches one after the other
def _split(
    dataset: str, trial: int, data_dir: Path | None, device: str, features: str = ""
) -> Split:
    split = DATASETS[dataset].of(trial, data_dir, raw=bool(features))
    if features:
        seen = feature_map(features, load)
        train = split.train
        x = torch.stack([seen.of(silo.flatten(1)) for silo in train.x]) * train.mask[..., None]
        split = replace(split, train=replace(train, x=x), test_x=seen.of(split.test_x.flatten(1)))
    return split.to(device)


def summarise(runs: Sequence[dict[str, str]], study: Study) -> list[dict]:
    """One row for each curve and epsilon: test error of the best setting, its standard error over
    trials, and what it really spent.
    """
    groups: dict[tuple[str, float], list[dict[str, str]]] = {}
    for run in runs:
        for curve in _curves(run, study):
            groups.setdefault((curve, float(run["epsilon"])), []).append(run)
    order = [
        (c, e)
        for c in (*CURVES, *study.own_curves)
        for e in ((math.inf,) if c.endswith("-open") else study.epsilons)
        if (c, e) in groups
    ]
    return [_row(curve, epsilon, groups[curve, epsilon]) for curve, epsilon in order]


def _row(curve: str, epsilon: float, runs: Sequence[dict[str, str]]) -> dict:
    chosen = sorted(best_settings(runs), key=lambda r: int(r["trial"]))
    errors = as_tensor(chosen, "test_error")
    return {
        "curve": curve,
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "test_error": float(errors.mean()),
        "standard_error": float(errors.std() / math.sqrt(len(errors))) if len(errors) > 1 else 0.0,
        "spent_epsilon": spent
        if math.isfinite(spent := float(as_tensor(chosen, "spent_epsilon").max()))
        else None,
        "algorithm": chosen[0]["unit"].split(",")[1],
        "settings": {k: float(v) for k in SETTINGS if (v := chosen[0][k]) != ""},
        "errors": [round(e, 6) for e in errors.tolist()],
    }


FIGURES = ("epsilon", "test_error", "standard_error", "spent_epsilon")
SETTINGS = ("phase", "steps", "share", "step", "clip", "slope", "momentum", "kappa")


def _curves(run: dict[str, str], study: Study) -> list[str]:
    """The curves that a run counts for: MB-SGD is SPIDER with phase 1, and "spider-diff" SPIDER in
    its first form with phases > 1.
    """
    curves = [run["curve"]]
    if (
        run["curve"] in ("mb-sgd", "mb-sgd-open")
        and (spider := run["curve"].replace("mb-sgd", "spider")) in study.methods
    ):
        curves.append(spider)
    if run["curve"] in ("spider", "spider-paper") and run["phase"] not in ("", "1"):
        curves.append(run["curve"].replace("spider", "spider-diff"))
    return curves


def write_table(rows: Sequence[dict], path: Path) -> None:
    """figure.csv: what a figure is drawn from, small enough to be kept with it."""
    lines = []
    for r in rows:
        settings = " ".join(f"{k}={v:g}" for k, v in r["settings"].items())
        numbers = (f"{r[k]:.6g}" if r[k] is not None else "" for k in FIGURES)
        lines.append(
            (
                r["curve"],
                *numbers,
                r["algorithm"],
                settings,
                " ".join(f"{e:.6g}" for e in r["errors"]),
            )
        )
    atomic.write_table(path, ("curve", *FIGURES, "algorithm", "settings", "errors"), lines)


def read_table(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return [
            {
                "curve": r["curve"],
                **{k: float(r[k]) if r[k] else None for k in FIGURES},
                "algorithm": r["algorithm"],
                "settings": {
                    k: float(v) for k, v in (pair.split("=") for pair in r["settings"].split())
                },
                "errors": [float(e) for e in r["errors"].split()],
            }
            for r in csv.DictReader(file)
        ]


def improvement(rows: Sequence[dict], over: str, of: str = "spider") -> float:
    """Average over epsilons of the relative reduction of test error, in per cent."""
    error = {(r["curve"], r["epsilon"]): r["test_error"] for r in rows}
    pairs = [(error[of, e], error[over, e]) for c, e in error if c == of and (over, e) in error]
    return 100 * sum((b - a) / b for a, b in pairs if b > 0) / max(1, len(pairs))
