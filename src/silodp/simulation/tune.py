"""`silodp tune`: settings for a private run. This module has the free search, on public or
synthetic data. `charged` has the search on the silos' own records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from silodp.core.errors import BadInput
from silodp.core.problem.build import Words, build
from silodp.core.problem.problem import Problem
from silodp.core.problem.task import Task
from silodp.host import atomic
from silodp.host.extension import file_hash, load
from silodp.runs import RunFolder
from silodp.server.algorithms import find
from silodp.server.order import AUTO, EPSILON, FILES, MODEL, SCHEDULE, Order, by_silo, finite
from silodp.silo.data.datasets import DATASETS, Split
from silodp.silo.data.files import load_silos
from silodp.silo.data.records import Records
from silodp.simulation.runfolder import open_folder
from silodp.simulation.sweep import (
    Arm,
    Store,
    Tick,
    as_tensor,
    best_settings,
    pending,
    run_arm,
    scheduled,
    spread,
    unseen,
)
from silodp.simulation.synthetic import Shape, synthetic

SPENT = ("epsilon", "delta", "seed")
"""Fields of the tuning alone. The next command has values of its own for them."""


@dataclass(frozen=True)
class Ranges:
    """The values to try: every combination that an algorithm takes.

    Without a named algorithm, phase 1 is mb-sgd, and larger phases are spider. For SVRG a phase is
    the number of inner steps.
    """

    rounds: tuple[int, ...] = (10, 40)
    phases: tuple[int, ...] = (1, 4)
    steps: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    clips: tuple[float, ...] = (0.5, 2.0)

    def __post_init__(self) -> None:
        """Raise BadInput if a list of values is empty, or if a value is not positive and finite."""
        for name in ("rounds", "phases", "steps", "clips"):
            values = getattr(self, name)
            if not values or not all(0 < v < math.inf for v in values):
                raise BadInput(f"{name} are {values}; give one or more, each greater than 0")

    def orders(self, order: Order) -> list[Order]:
        """Return the order with each schedule. Steps and clips are not yet set. Raise BadInput if
        no phase fits.
        """
        pairs = [(r, q) for r in self.rounds for q in self.phases if q <= r]
        if not pairs:
            raise BadInput(
                f"phases {self.phases} are all larger than rounds {self.rounds}; give a "
                "phase that fits"
            )
        candidates = []
        for r, q in pairs:
            if order.algorithm not in (AUTO, "spider"):
                name = order.algorithm
            elif q == 1:
                name = "mb-sgd"
            else:
                name = "spider"
            candidates.append(replace(order, algorithm=name, rounds=r, phase=q, inner=q))
        # An algorithm without phases has the same schedule for every phase.
        schedules = [(order.algorithm, scheduled(order)) for order in candidates]
        return [one for i, one in enumerate(candidates) if schedules[i] not in schedules[:i]]


def problem_of(order: Order, features: Sequence[int], classes: int) -> Problem:
    """Return the problem of the order for records of this shape."""
    return build(
        Words(order.model or MODEL, Task.plain(classes), order.prox, order.loss),
        math.prod(features),
        load=load,
    )


def code_of(order: Order) -> tuple[str, ...]:
    """Return the SHA-256 of each FILE.py of the order, or an empty text."""
    return tuple(file_hash(getattr(order, name) or "") for name in FILES)


def row_of(order: Order) -> dict[str, Any]:
    """Return the row of a candidate in a table."""
    return {
        "algorithm": order.algorithm,
        **scheduled(order),
        "step": order.step,
        "clip": order.clip,
    }


# --- free: public or synthetic data --------------------------------------------------------------


@dataclass(frozen=True)
class FreeSearch:
    """A search on data that need no privacy: a built-in set by name, public files, or synthetic
    records of the silos' shape.
    """

    order: Order
    ranges: Ranges
    data: str | None = None
    shape: Shape | None = None
    public: tuple[str, ...] = ()
    label: str = "label"
    classes: tuple[str, ...] = ()
    trials: int = 3
    code: tuple[str, ...] = ()
    """SHA-256 of each FILE.py of the order. A folder is not continued with another file."""

    @property
    def epsilon(self) -> float:
        """Return the one epsilon of all silos. The silos of a free search have no names."""
        epsilon = by_silo("epsilon", self.order.epsilon, ["all"])["all"]
        if epsilon is None:
            return EPSILON
        finite(epsilon)
        return epsilon

    def arms(self) -> list[Arm]:
        """Return an arm for each schedule, with the grid of steps and clips."""
        arms = []
        for order in self.ranges.orders(self.order):
            grid = {"step": self.ranges.steps, "clip": self.ranges.clips}
            if "slope" in scheduled(order):
                grid["slope"] = (order.slope,)
            arms.append(Arm("tune", order, grid))
        return arms

    def split(self, trial: int) -> Split:
        """Return the training and test records of a trial."""
        if self.shape:
            return synthetic(self.shape, self.shape.records, trial)
        if self.data:
            return DATASETS[self.data].load(trial, None)
        return _public_split(self, trial)


def _public_split(search: FreeSearch, trial: int) -> Split:
    """Return 80 % of each file as training records, and the rest as test records.

    Features are standardised, which is free for public data.
    """
    silos = load_silos(
        [Path(p) for p in search.public], search.label, classes=search.classes or None
    ).records_raw
    every = np.concatenate([np.asarray(x, np.float64) for x, _ in silos])
    mean = every.mean(0)
    scale = every.std(0) + 1e-12
    train = []
    test = []
    for i, (x, y) in enumerate(silos):
        order = np.random.default_rng((trial, i)).permutation(len(y))
        cut = len(y) * 4 // 5
        x = ((np.asarray(x) - mean) / scale)[order]
        y = np.asarray(y)[order]
        train.append((x[:cut], y[:cut]))
        test.append((x[cut:], y[cut:]))
    test_x, test_y = (np.concatenate(part) for part in zip(*test, strict=True))
    return Split(
        Records.of(train),
        torch.from_numpy(test_x).float(),
        torch.from_numpy(test_y).long(),
        len(search.classes) or 2,
    )


def search_freely(search: FreeSearch, folder: Path, *, tick: Tick = unseen) -> dict:
    """Run what is missing in the folder. Return all candidates with their test errors, and the one
    with the least training loss.

    Raise BadInput if the search does not have exactly one source of data.
    """
    search = replace(search, code=code_of(search.order))
    if sum(map(bool, (search.data, search.shape, search.public))) != 1:
        raise BadInput(
            "give one of --data NAME, --public FILE for each silo, or --records with "
            "--features for synthetic data"
        )
    if search.data is not None and search.data not in DATASETS:
        raise BadInput(f"data set {search.data!r} is unknown; choose one of {', '.join(DATASETS)}")
    if search.epsilon and search.arms() and not RunFolder(folder).configuration.exists():
        # A wrong search is reported before the folder contains it.
        split = search.split(0)
        problem_of(search.order, split.train.x.shape[2:], split.classes)
    open_folder(folder, search)
    store = Store(folder)
    units = [(search, arm, trial) for arm, trial in pending(store, search)]
    for arm, trial, rows in spread(_free_unit, units, tick=tick, before=len(store.done)):
        store.add(arm.key, trial, rows)
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in store.runs():
        groups.setdefault((row["unit"], row["step"], row["clip"], row["slope"]), []).append(row)
    # The groups are in the order in which they were finished. The sorting makes it the same in
    # every run.
    candidates = sorted(
        (_free_row(rows) for rows in groups.values()),
        key=lambda row: (row.get("rounds", 1), row.get("phase", 1), row["step"], row["clip"]),
    )
    best = best_settings(store.runs())
    answer = {
        "free": True,
        "candidates": candidates,
        "chosen": _free_row(best),
        "spent_on_silos": 0.0,
    }
    order = next(arm.order for arm in search.arms() if arm.key == best[0]["unit"])
    return finish(
        folder, answer, replace(order, step=float(best[0]["step"]), clip=float(best[0]["clip"]))
    )


def _free_unit(search: FreeSearch, arm: Arm, trial: int) -> tuple[Arm, int, list[dict]]:
    """Run one arm on one trial. Return both with the rows of results."""
    split = search.split(trial)
    problem = problem_of(search.order, split.train.x.shape[2:], split.classes)
    return arm, trial, list(run_arm(arm, problem, split, trial, (search.epsilon,)))


def _free_row(rows: Sequence[dict[str, str]]) -> dict:
    """Return the settings of these rows, with the means of test error and training loss."""
    first = rows[0]
    counts = {k: int(first[k]) for k in ("rounds", "phase") if first[k] != ""}
    settings = {k: float(first[k]) for k in ("step", "clip", "slope") if first[k] != ""}
    means = {k: float(as_tensor(rows, k).mean()) for k in ("test_error", "train_loss")}
    return {"algorithm": first["unit"].split(",")[1], **counts, **settings, **means}


def finish(folder: Path, answer: dict, order: Order) -> dict:
    """Write tune.json, and settings.toml with the options of the next command. Return the answer.

    settings.toml has the chosen settings, and each field in which the order differs from the
    defaults.
    """
    answer["settings"] = str(RunFolder(folder).settings)
    usual = Order(order.algorithm).words()
    words = replace(order, model=order.model or MODEL).words()
    chosen = {"algorithm", "step", "clip", *find(order.algorithm).settings}
    changed = {name for name in words if words[name] != usual[name]} - {*SCHEDULE, *SPENT}
    options = {name: value for name, value in words.items() if name in chosen | changed}
    # TOML writes infinity as inf.
    lines = [
        f"{name} = {json.dumps(value).replace('Infinity', 'inf')}"
        for name, value in options.items()
    ]
    atomic.write(RunFolder(folder).settings, "\n".join(lines) + "\n", mode=0o644)
    atomic.write(RunFolder(folder).tuning, json.dumps(answer, indent=1) + "\n")
    return answer
