"""silodp against its peers, in one table.

    python -m benchmarks [--parts gradient,run,growth,gate] [--repeat 15] [--run-repeat 5] [--write
    docs]

Peers run in the same process, or from it, on the same machine and work. Results must agree to 1e-4
with the noise off before anything is timed; times are medians of repeats taken in turns; a ratio is
to the first row of its work. A peer that is not installed is named and left out:
benchmarks/requirements.txt has them all. OMP_NUM_THREADS sets the threads of every method that runs
in this process.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import warnings
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks import gate, gradient, growth, run
from benchmarks.table import HEAD, Row

PACKAGES = ("silodp", "torch", "opacus", "flwr", "ray", "pfl")


def machine() -> str:
    def installed(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"no {name}"

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = ", ".join(map(installed, PACKAGES))
    return (
        f"{cores} cores ({platform.machine()}), {torch.get_num_threads()} torch threads, "
        f"Python {platform.python_version()}, {packages}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts",
        default="gradient,run,growth,gate",
        help="which of gradient, run, growth and gate, with commas between them",
    )
    parser.add_argument("--repeat", type=int, default=15, help="repeats of a gradient")
    parser.add_argument("--run-repeat", type=int, default=5, help="repeats of a whole run")
    parser.add_argument("--write", type=Path, help="folder for benchmarks.csv and growth.png")
    options = parser.parse_args()
    warnings.filterwarnings(
        "ignore", category=UserWarning
    )  # Opacus's hooks warn once for each model
    print(machine(), HEAD, sep="\n", flush=True)
    parts = {
        "gradient": lambda: gradient.rows(options.repeat),
        "run": lambda: run.rows(options.run_repeat),
        "growth": growth.rows,
        "gate": lambda: gate.rows(options.run_repeat),
    }
    chosen = options.parts.split(",")
    if unknown := [part for part in chosen if part not in parts]:
        parser.error(f"--parts has {unknown[0]!r}; use {', '.join(parts)}")
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    rows = [row for part in chosen for row in parts[part]()]
    if options.write:
        write(rows, options.write)


def write(rows: list[Row], folder: Path) -> None:
    with (folder / "benchmarks.csv").open("w", newline="") as file:
        file.write(f"# {machine()}\n")
        table = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        table.writeheader()
        table.writerows(
            {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(row).items()}
            for row in rows
        )
    if grown := [row for row in rows if row.part == "growth"]:
        growth.plot(grown, folder / "growth.png")


if __name__ == "__main__":
    main()
