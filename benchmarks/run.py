"""A whole run of ISRL-DP MB-SGD: 25 silos of 300 records, 50 rounds, network 50-64-2, clip 1, noise
for epsilon = 1, delta = 1e-5.

Every client computes the clipped mean gradient of all its records and adds its own noise; the
server takes the mean and steps. silodp's time includes its accounting: the noise calibrated to the
budget, each release checked and charged to each silo. The peers are told the noise. What pfl does
is less, see with_pfl.py.
"""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from benchmarks.gradient import CLIP, Client, ghost, hooks
from benchmarks.models import mlp, vectors
from benchmarks.table import Method, Row, build, compare
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.engine import native
from silodp.server.algorithms.mb_sgd import mb_sgd
from silodp.server.output import output
from silodp.server.plan import Plan, calibrate
from silodp.silo.data.records import Records
from silodp.simulation.connect import simulate

SILOS, RECORDS, ROUNDS, STEP, BATCH = 25, 300, 50, 0.5, 20
WORK = f"MB-SGD, {SILOS} silos x {RECORDS}, {ROUNDS} rounds"


@functools.cache
def data() -> tuple[Tensor, Tensor]:
    """Records x (N, n, 50) and labels y (N, n), the same in every process."""
    torch.manual_seed(0)
    return vectors(SILOS, RECORDS)


@functools.cache
def problem() -> Problem:
    return Problem(mlp(), cross_entropy)


@functools.cache
def start() -> Tensor:
    return problem().initial([0])[0]


def plan(epsilon: float, clip: float = CLIP) -> Plan:
    algorithm = functools.partial(mb_sgd, rounds=ROUNDS, step=STEP)
    return calibrate(
        algorithm,
        {"minibatch": Gaussian("minibatch", clip, 0.0)},
        Budget(epsilon, 1e-5),
        [RECORDS] * SILOS,
    )


def by_silodp(records: Records, epsilon: float, clip: float = CLIP, runs: int = 1) -> Tensor:
    """The last point (J, d) of each of J runs, whose noise differs."""
    made = plan(epsilon, clip)
    fed, _ = simulate(problem(), records, made, range(runs))
    return output(
        mb_sgd(
            fed, problem(), start().expand(runs, -1), rounds=ROUNDS, step=STEP, **made.mechanisms
        )
    )


def by_clients(client: Callable[[torch.nn.Module], Client], std: float) -> Tensor:
    """Opacus in a plain loop, without the loader and optimiser objects that its engine would add to
    each client.
    """
    model, w = mlp(), start().clone()
    clipped_mean = client(model)
    for _ in range(ROUNDS):
        vector_to_parameters(w, model.parameters())
        releases = [
            clipped_mean(*silo) + std * torch.randn(w.shape) for silo in zip(*data(), strict=True)
        ]
        w = w - STEP * torch.stack(releases).mean(0)
    return w


FLOWER: list[dict] = []
"""The runs that `by_flower` has made."""


def by_flower(std: float) -> dict:
    """In a process of its own: the threads and objects that Flower and Ray leave behind would slow
    whatever is timed next.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.pt"
        code = f"from benchmarks.with_flower import simulate; simulate({std!r}, {str(out)!r})"
        subprocess.run([sys.executable, "-c", code], check=True)
        FLOWER.append(torch.load(out))
    return FLOWER[-1]


def rows(repeat: int) -> list[Row]:
    records = Records.of(list(zip(*data(), strict=True)))
    multiplier = plan(1.0).mechanisms["minibatch"].noise_multiplier
    std = float(torch.as_tensor(multiplier).max()) * 2 * CLIP / RECORDS

    def moved(w: Tensor, clip: float = CLIP) -> tuple[Tensor, Tensor]:
        """How far a run without noise went, and how far silodp goes."""
        return w - start(), by_silodp(records, math.inf, clip)[-1] - start()

    def silodp(runs: int) -> Method:
        return Method(
            lambda: by_silodp(records, 1.0, runs=runs),
            check=lambda: moved(by_silodp(records, math.inf, runs=runs)[-1]),
            runs=runs,
        )

    def plain() -> Method:
        def run(epsilon: float) -> Tensor:
            with mock.patch.object(native, "library", return_value=None):
                return by_silodp(records, epsilon)

        return Method(lambda: run(1.0), check=lambda: moved(run(math.inf)[-1]))

    def opacus(client: Callable[[torch.nn.Module], Client]) -> Method:
        import opacus  # noqa: F401

        return Method(lambda: by_clients(client, std), check=lambda: moved(by_clients(client, 0.0)))

    def pfl() -> Method:
        from benchmarks.with_pfl import by_pfl

        return Method(lambda: by_pfl(std), check=lambda: moved(by_pfl(0.0), math.inf))

    def flower(whole: bool) -> Method:
        version("flwr"), version("ray")
        if whole:  # of the very run that the row before has timed
            return Method(lambda: FLOWER[-1]["whole"], check=lambda: moved(FLOWER[-1]["w"]))
        return Method(lambda: by_flower(std)["rounds"], check=lambda: moved(by_flower(0.0)["w"]))

    own = {
        "silodp, one run": silodp(1),
        "silodp, one run, without a C compiler": plain(),
        f"silodp, per run in a batch of {BATCH}": silodp(BATCH),
    }
    methods = own | build(
        {
            "Opacus hooks, loop over clients": lambda: opacus(hooks),
            "Opacus ghost, loop over clients": lambda: opacus(ghost),
            "pfl (clips users, not records)": pfl,
            "Flower simulation, rounds only": lambda: flower(whole=False),
            "Flower simulation, with its start": lambda: flower(whole=True),
        }
    )
    return compare("run", WORK, methods, repeat)
