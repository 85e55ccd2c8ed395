"""`python -m research verdict`: what is planned and how long it should take, then the work, then
the table.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from silodp.cli.console import dump, progress, say, show, table
from silodp.cli.interrupted import KEPT, interruptible
from silodp.cli.options import positive
from silodp.core.errors import BadInput


def verdict(
    names: Sequence[str],
    few: bool,
    trials: int | None,
    shard: tuple[int, int],
    gpu: bool,
    minutes: float | None,
    data_dir: Path | None,
    out_dir: Path | None,
    as_json: bool,
) -> None:
    """Figures or data sets, and conditions, by name: of neither, all."""
    from research import verdict as lab
    from research.verdict_plan import (
        CONDITIONS,
        FIGURES,
        LEFT_OUT,
        figures_by_name,
        reduced,
        trainings,
    )

    start = time.time()
    named = [c for c in CONDITIONS if c in names]
    larger = [
        c for c, condition in CONDITIONS.items() if few and not named and condition.records != 1
    ]  # not for two cores
    conditions = named or [c for c in CONDITIONS if c not in larger]
    chosen = [
        f
        for name in [n for n in names if n not in CONDITIONS] or ["all"]
        for f in figures_by_name(name)
    ]
    every = {name: reduced(figure) if few else figure for name, figure in FIGURES.items()}
    if trials is not None:
        every = {
            name: replace(figure, trials=int(positive("trials", trials)))
            for name, figure in every.items()
        }
    figures = {name: every[name] for name in dict.fromkeys(chosen)}
    if any(figure.dataset != "wbcd" for figure in figures.values()) and data_dir is None:
        raise BadInput(
            "MNIST and CIFAR-10 are not embedded; give --data-dir DIR, or run "
            "`python -m research verdict wbcd`"
        )
    epsilons = (0.75, 3.0, 18.0) if few else lab.EPSILONS
    folder = out_dir or Path("runs") / ("verdict-reduced" if few else "verdict")
    job = lab.Job(
        folder,
        every,
        data_dir,
        math.inf if minutes is None else start + 60 * positive("minutes", minutes),
    )
    wanted = lab.planned(figures, figures, conditions, epsilons)
    on = {unit: job.device(unit, gpu) for unit in wanted}
    cores = os.cpu_count() or 1
    plan = [
        (
            name,
            c,
            len(mine),
            sum(trainings(u, figures) for u in mine),
            sum(lab.seconds(u, figures, on[u]) / (cores if on[u] == "cpu" else 1) for u in mine),
        )
        for c in conditions
        for name in figures
        if (mine := [u for u in wanted if (u.figure, u.condition) == (name, c)])
    ]
    if gpu and torch.cuda.is_available():
        machine = torch.cuda.get_device_name()
    else:
        machine = f"{cores} cores"
    if not as_json:
        cells = [(n, c, k, f"{t:,}", f"{s:,.0f}") for n, c, k, t, s in plan]
        show(
            table(
                "figure|condition|units>|trainings>|seconds>", cells, title=f"Planned, on {machine}"
            )
        )
        say(
            (
                f"{sum(p[3] for p in plan):,} trainings in all; about "
                f"{sum(p[4] for p in plan) / 60:.0f} minutes."
            ),
            "Not run, whatever the time:",
            *(f"  {s}" for s in LEFT_OUT),
            *(
                f"Not run unless it is named, in the reduced protocol: {c} ({CONDITIONS[c].said})."
                for c in larger
            ),
        )
    with interruptible(KEPT.format(folder)), progress("verdict, units", quiet=as_json) as tick:
        missing = lab.carry_out(job, wanted, shard=shard, gpu=gpu, tick=tick)
    rows = list(
        lab.collect(job, every, CONDITIONS, epsilons)
    )  # of all that the folder has, whatever was asked for this time
    lab.write_trials(rows, folder / "verdict.csv")
    took = time.time() - start
    if as_json:
        return dump(
            {
                "folder": str(folder),
                "rows": len(rows),
                "missing": [u.key for u in missing],
                "seconds": took,
            }
        )
    say(
        f"{len(wanted) - len(missing)} of {len(wanted)} units are done, this time in "
        f"{took:.0f} s; {folder / 'verdict.csv'} has every trial of every tuned arm."
    )
    if missing:
        left = sorted({f"{u.figure} {u.condition} {u.arm.name}" for u in missing})
        say(f"Not run yet, and in no table: {'; '.join(left)}. Run the command again to go on.")
