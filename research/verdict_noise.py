"""The noise of the verdict's comparisons, and what it really spends by exact accounting: set, or
computed, before any record is read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from research.verdict_plan import Arm, Condition, Figure, local_count, sampling
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget, composed_epsilon
from silodp.core.sampling import Poisson, Sampling
from silodp.host import atomic
from silodp.server.algorithms import find
from silodp.server.paper import paper_multipliers
from silodp.server.plan import calibrate, dry_run

ALGORITHMS = {
    "mb-sgd": "mb-sgd",
    "spider": "spider",
    "alternate": "spider-alternate",
    "local-sgd": "local-sgd",
}


def settings(figure: Figure, condition: Condition, arm: Arm, counts: tuple[int, ...]) -> dict:
    """The schedule of the algorithm, as the algorithm takes it."""
    everything = {
        "rounds": figure.rounds,
        "phase": arm.phase,
        "local_steps": local_count(figure, counts),
        "form": condition.form,
        "slope": 1.0,
    }
    algorithm = find(ALGORITHMS[arm.curve])
    return algorithm.schedule({k: v for k, v in everything.items() if k in algorithm.settings})


def batches(figure: Figure, condition: Condition, arm: Arm, n: int, epsilon: float) -> Sampling:
    """What a silo of n records draws; Local SGD's steps take one record each on average."""
    if arm.curve != "local-sgd":
        return sampling(figure, condition, arm, epsilon)
    rate = 1 / n
    return Poisson(rate if rate * n >= 1 else math.nextafter(rate, 1))


def noise(
    figure: Figure, condition: Condition, arm: Arm, counts: tuple[int, ...], epsilon: float
) -> dict[str, list[float]]:
    """Noise multipliers (std / sensitivity) of each kind of release for each silo, and under
    "spent" the epsilon that a run then costs.

    Priced is the very algorithm, by a dry run of it, for a silo that is asked in every round.
    """
    algorithm = find(ALGORITHMS[arm.curve])
    found = {"spent": []}
    schedule = settings(figure, condition, arm, counts)

    def run(fed, problem, w, **mechanisms):
        return algorithm.run(fed, problem, w, step=0.1, **schedule, **mechanisms)

    for n in counts:
        budget = Budget(epsilon, n**-2.0)
        drawn = batches(figure, condition, arm, n, epsilon)
        mechanisms = {kind: Gaussian(kind, 1.0, 1.0, drawn) for kind in algorithm.kinds}
        if condition.noise == "exact":
            plan = calibrate(run, mechanisms, [[budget]], (n,), shares=_shares(figure, arm))
            mechanisms = plan.mechanisms
        else:
            share = (
                drawn.batch(n) / n
            )  # the constants are for the mean of n records, whatever the batch
            constants = paper_multipliers(algorithm.name, budget, schedule)
            if condition.noise == "file" and arm.curve == "spider":
                constants["anchor"] /= math.sqrt(
                    max(figure.rounds / arm.phase, 1)
                )  # the file leaves max(R / q, 1) out
            mechanisms = {
                kind: replace(m, noise_multiplier=share * constants[kind])
                for kind, m in mechanisms.items()
            }
        multipliers = {
            kind: float(torch.as_tensor(m.noise_multiplier).flatten()[0])
            for kind, m in mechanisms.items()
        }
        for kind, value in multipliers.items():
            found.setdefault(kind, []).append(value)
        found["spent"].append(_spent(run, mechanisms, multipliers, budget.delta))
    return found


def _spent(run, mechanisms, multipliers: dict[str, float], delta: float) -> float:
    from silodp.server.federation import Everyone

    releases: dict[tuple[Sampling, float], int] = {}
    for asked in dry_run(run, mechanisms, Everyone(1)):
        key = (asked.event.sampling, multipliers[asked.kind])
        releases[key] = releases.get(key, 0) + int(asked.event.count)
    return composed_epsilon(
        tuple((drawn, m, count) for (drawn, m), count in releases.items()), delta
    )


def _shares(figure: Figure, arm: Arm) -> dict[str, float] | None:
    """The split of the budget that the text's constants make: an anchor's noise multiplier is 1 /
    sqrt(q) of a difference's; in the alternate form the two are alike."""
    if arm.curve == "alternate":
        return {"anchor": 0.5, "refine": 0.5}
    if arm.curve != "spider" or arm.phase == 1:
        return None
    anchors = math.ceil(figure.rounds / arm.phase)
    parts = {"anchor": anchors * arm.phase, "refine": figure.rounds - anchors}
    return {kind: part / sum(parts.values()) for kind, part in parts.items()}


class Table:
    """The noise of every arm and epsilon, kept in noise.json: what is missing is computed, on all
    cores.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            self.known: dict[str, dict[str, list[float]]] = json.loads(path.read_text())
        else:
            self.known = {}

    def of(
        self, figure: Figure, condition: Condition, arm: Arm, counts: Sequence[int], epsilon: float
    ) -> dict[str, list[float]]:
        return self.known[_key(figure, condition, arm, distinct(counts), epsilon)]

    def fill(self, wanted: Iterable[tuple[Figure, Condition, Arm, tuple[int, ...], float]]) -> None:
        left = {key: task for task in wanted if (key := _key(*task)) not in self.known}
        if not left:
            return
        cores = min(os.cpu_count() or 1, len(left))
        if cores == 1:
            found = [noise(*task) for task in left.values()]
        else:
            with ProcessPoolExecutor(
                cores,
                mp_context=get_context("spawn"),
                initializer=torch.set_num_threads,
                initargs=(1,),
            ) as pool:
                found = list(pool.map(noise, *zip(*left.values(), strict=True)))
        self.known |= dict(zip(left, found, strict=True))
        atomic.write_json(self.path, self.known)


def distinct(counts: Sequence[int]) -> tuple[int, ...]:
    """The silos' numbers of records, each once: silos of one size have the same noise."""
    return tuple(dict.fromkeys(counts))


def _key(
    figure: Figure, condition: Condition, arm: Arm, counts: tuple[int, ...], epsilon: float
) -> str:
    """What the noise follows from: no grid and no form of clipping."""
    return f"R{figure.rounds}-{condition.batches}-{condition.noise}-{arm.name}-n{','.join(map(str, counts))}-e{epsilon:g}"  # noqa: E501
