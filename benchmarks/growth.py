"""One round of MB-SGD by silodp as silos N, records n, hidden width (d = 53 width + 2) and runs J
grow tenfold, each by itself.

Every point is measured in a process of its own: the time of a round is the median of 21, and the
memory is the highest resident set during the rounds (VmHWM, from Linux) above the resident set just
before them, when the records and the start are there.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.models import mlp, vectors
from benchmarks.table import Row
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.server.algorithms.mb_sgd import mb_sgd
from silodp.server.plan import calibrate
from silodp.silo.data.records import Records
from silodp.simulation.connect import simulate

BASE = {"N": 25, "n": 300, "width": 64, "J": 1}
FACTORS = (3, 10)
ROUNDS = 23


def point(silos: int, records: int, width: int, runs: int) -> tuple[float, float]:
    """Median milliseconds of a round, and MiB of its temporaries, in this process."""
    torch.manual_seed(0)
    problem = Problem(mlp(width), cross_entropy)
    kept = Records.of(list(zip(*vectors(silos, records), strict=True)))
    algorithm = functools.partial(mb_sgd, rounds=ROUNDS, step=0.5)
    plan = calibrate(
        algorithm, {"minibatch": Gaussian("minibatch", 1.0, 0.0)}, Budget(1.0, 1e-5), kept.counts
    )
    fed, _ = simulate(problem, kept, plan, range(runs))
    w = problem.initial([0]).expand(runs, -1).clone()
    resident = _restart_peak()
    times = [time.perf_counter()]
    for _ in algorithm(fed, problem, w, **plan.mechanisms):
        times.append(time.perf_counter())
    rounds = [after - before for before, after in itertools.pairwise(times[2:])]
    return 1e3 * statistics.median(rounds), _memory("VmHWM") - resident


def _restart_peak() -> float:
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> float:
    """MiB, or NaN where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next(
        (int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":")), math.nan
    )


def rows() -> list[Row]:
    found: list[Row] = []
    for method, size in {
        "silodp": BASE,
        **{f"silodp, {k} x {f}": BASE | {k: f * BASE[k]} for k in BASE for f in FACTORS},
    }.items():
        command = [sys.executable, "-m", "benchmarks.growth", *map(str, size.values())]
        taken, memory = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )
        first = found[0].median_ms if found else taken
        found.append(
            Row(
                "growth",
                ", ".join(f"{k} = {v}" for k, v in size.items()),
                method,
                taken,
                taken / first,
                memory,
            )
        )
        print(found[-1], flush=True)
    return found


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = {"N": "silos N", "n": "records n", "width": "hidden width", "J": "runs J"}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True)
    for axis, title, field in zip(
        axes,
        ("milliseconds of a round", "MiB of temporaries"),
        ("median_ms", "peak_mib"),
        strict=True,
    ):
        for name, marker in zip(names, "osD^", strict=True):
            mine = [rows[0], *(row for row in rows if row.method.startswith(f"silodp, {name} x"))]
            axis.loglog(
                (1, *FACTORS),
                [getattr(row, field) for row in mine],
                marker=marker,
                label=names[name],
            )
        axis.loglog(
            (1, *FACTORS),
            [getattr(rows[0], field) * f for f in (1, *FACTORS)],
            color="grey",
            linestyle=":",
            label="linear",
        )
        axis.set(
            title=title,
            xlabel="times as many",
            xticks=(1, *FACTORS),
            xticklabels=[str(f) for f in (1, *FACTORS)],
        )
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:.0f}")
        axis.minorticks_off()
        axis.legend(fontsize=8)
    start = ", ".join(f"{k} = {v}" for k, v in BASE.items())
    figure.suptitle(f"One round of MB-SGD by silodp, from {start}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    print(json.dumps(point(*map(int, sys.argv[1:]))))
