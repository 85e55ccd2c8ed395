"""The main job: what privacy costs, by epsilon and algorithm, on the paper's experiments."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from silodp.core.errors import BadInput
from silodp.core.losses import cross_entropy
from silodp.core.problem import Problem
from silodp.lab.runfolder import open_folder, write_environment
from silodp.lab.sweep import Arm, Store, as_tensor, best_settings, pending, run_arm, spread
from silodp.server.settings import default_shares, find
from silodp.silo.datasets import DATASETS

EPSILONS = (0.75, 1.0, 1.5, 3.0, 6.0, 12.0, 18.0)
CLIPS = (0.1, 1.0, 5.0, 10.0)
NOTE = "Tuning (by training loss, as in the paper) and standardisation of the features look at the data and are not charged to the budget."

CURVES = {
    "spider": "SPIDER, exact accounting (phase tuned, 1 is MB-SGD)",
    "spider-diff": "SPIDER, exact accounting, difference clipping (phase > 1)",
    "mb-sgd": "MB-SGD, exact accounting",
    "local-sgd": "Local SGD, exact accounting",
    "spider-paper": "SPIDER, the paper's noise (phase > 1)",
    "mb-sgd-paper": "MB-SGD, the paper's noise",
    "local-sgd-paper": "Local SGD, the paper's noise",
    "mb-sgd-open": "MB-SGD, not private",
    "local-sgd-open": "Local SGD, not private",
}


@dataclass(frozen=True)
class Study:
    """Everything that decides a result: written to config.json, and compared when a folder is continued."""

    dataset: str = "wbcd"
    rounds: int = 25
    trials: int = 10
    epsilons: tuple[float, ...] = EPSILONS
    hidden: int = 5
    full: bool = False

    def arms(self) -> list[Arm]:
        """The paper's grid: 15 evenly spaced steps between e^-9 and 1 and 4 clips; the default thins steps and phases, `full` does not."""
        steps = tuple(np.linspace(math.exp(-9), 1, 15)[:: 1 if self.full else 2].round(6).tolist())
        phases = range(1, 11) if self.full else (1, 2, 5)
        slopes = (0.25, 0.5, 1.0, 2.0) if self.full else (0.25, 1.0)
        local = (2, 4) if self.full else (2,)
        grid = {"step": steps, "clip": CLIPS}
        rounds = {"rounds": self.rounds}
        arms = [
            Arm("spider", "spider", {**rounds, "phase": q}, {**grid, "slope": slopes if q > 1 else (1.0,)}, shares=spider_shares(q))
            for q in phases
            if q <= self.rounds
        ]
        arms += [
            Arm("spider-paper", "spider", {**rounds, "phase": q}, {**grid, "slope": (math.inf,)}, "paper")
            for q in phases
            if 1 < q <= self.rounds
        ]
        for noise, suffix in (("exact", ""), ("paper", "-paper"), ("none", "-open")):
            arms.append(Arm(f"mb-sgd{suffix}", "mb-sgd", rounds, grid, noise))
            arms += [Arm(f"local-sgd{suffix}", "local-sgd", {**rounds, "steps": k}, grid, noise) for k in local]
        return arms


def spider_shares(phase: int) -> dict[str, float]:
    return default_shares(find("spider"), {"phase": phase, "slope": 1.0}) or {}


def problem_for(study: Study, features: int, classes: int) -> Problem:
    model = nn.Sequential(nn.Linear(features, study.hidden), nn.ReLU(), nn.Linear(study.hidden, classes))
    return Problem(model, cross_entropy)


def compare(study: Study, folder: Path, *, data_dir: Path | None = None, quiet: bool = False) -> list[dict]:
    """Runs what is missing of the study, writes the run folder, and returns the summary rows."""
    if study.dataset not in DATASETS:
        raise BadInput(f"data set {study.dataset!r} is unknown; choose one of {', '.join(DATASETS)}")
    open_folder(folder, study)
    store = Store(folder / "results.csv")
    todo = pending(store, study.arms(), study.trials)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), disable=quiet
    ) as bar:
        total = len(study.arms()) * study.trials
        task = bar.add_task(f"{study.dataset}, {total} batches of runs", total=total, completed=total - len(todo))
        for arm, trial, rows in spread(_unit, [(study, arm, trial, data_dir) for arm, trial in todo]):
            store.add(arm.key, trial, rows)
            bar.advance(task)
    rows = summarise(store, study)
    (folder / "summary.json").write_text(json.dumps(rows, indent=1))
    write_environment(folder, noise="simulation: seeded pseudo-random float noise")
    return rows


def _unit(study: Study, arm: Arm, trial: int, data_dir: Path | None) -> tuple[Arm, int, list[dict]]:
    split = DATASETS[study.dataset].load(trial, data_dir)
    problem = problem_for(study, split.train.x.shape[-1], split.classes)
    return arm, trial, list(run_arm(arm, problem, split, trial, study.epsilons))


def summarise(store: Store, study: Study) -> list[dict]:
    """One row for each curve and epsilon: test error of the best setting, its standard error over trials, and what it really spent."""
    rows = []
    for curve in CURVES:
        for epsilon in (math.inf,) if curve.endswith("-open") else study.epsilons:
            runs = [r for r in store.runs() if _belongs(r, curve) and float(r["epsilon"]) == epsilon]
            if not runs:
                continue
            chosen = best_settings(runs)
            errors = as_tensor(chosen, "test_error")
            rows.append(
                {
                    "curve": curve,
                    "epsilon": epsilon if math.isfinite(epsilon) else None,
                    "test_error": float(errors.mean()),
                    "standard_error": float(errors.std() / math.sqrt(len(errors))) if len(errors) > 1 else 0.0,
                    "spent_epsilon": spent if math.isfinite(spent := float(as_tensor(chosen, "spent_epsilon").max())) else None,
                    "settings": {k: float(v) for k in ("phase", "steps", "step", "clip", "slope") if (v := chosen[0][k]) != ""},
                }
            )
    return rows


def _belongs(row: dict[str, str], curve: str) -> bool:
    """Whether a run counts for a curve: "spider-diff" is "spider" without the runs whose phase of 1 makes them MB-SGD."""
    return row["curve"] == "spider" and int(row["phase"]) > 1 if curve == "spider-diff" else row["curve"] == curve


def improvement(rows: Sequence[dict], over: str, of: str = "spider") -> float:
    """Average over epsilons of the relative reduction of test error, in per cent."""
    error = {(r["curve"], r["epsilon"]): r["test_error"] for r in rows}
    pairs = [(error[of, e], error[over, e]) for c, e in error if c == of and (over, e) in error]
    return 100 * float(np.mean([(b - a) / b for a, b in pairs if b > 0]))
