"""How good the default choice is: `python -m benchmarks.defaults` prints the tables of docs/choosing.md, in a few minutes.

A default is what the advisor chooses from public facts. It is compared with the best of all candidates on the very records, over 20 seeds (a
split and a noise each), which nobody could know without looking. Noise is that of the plan, silos count by records.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

from silodp.core.privacy.accounting import Budget
from silodp.core.problem.task import Task
from silodp.server.advice.chooser import Search, choose, points_of
from silodp.server.advice.facts import Facts
from silodp.server.advice.worlds import Sample, World, draw
from silodp.server.order import Order, default_delta

SEEDS, HELD_OUT = 20, 0.2
CLINICS = (303, 261, 46, 130)


class Tried(Search):
    """All candidates on given records, one set for each seed."""

    def __init__(self, order: Order, facts: Facts, samples: list[Sample]) -> None:
        super().__init__(order, facts, lambda text: None, None)
        self._given = samples

    def sample(self, world: int, trial: int) -> Sample:
        return self._given[trial]

    def table(self) -> dict:
        """The mean error of each candidate."""
        found = {}
        for batch in self.batches():
            errors = torch.stack([self.errors(batch, 0, trial) for trial in range(len(self._given))]).mean(0)
            found |= dict(zip(points_of(batch), errors.T.reshape(-1).tolist(), strict=True))
        return found


def judged(epsilon: float, counts: tuple[int, ...], kinds: tuple[str, ...], task: Task, samples: list[Sample], held_out: float) -> dict:
    """The default's error, the best candidate's, and how long the advice took."""
    names = tuple(f"silo-{i}" for i in range(len(counts)))
    trained = tuple(n - round(held_out * n) for n in counts)
    facts = Facts(names, trained, kinds, task, tuple(Budget(epsilon, default_delta(n)) for n in counts))
    start, cpu = time.perf_counter(), time.process_time()
    advice = choose(Order(epsilon=(repr(epsilon),)), facts)
    took, cpu = time.perf_counter() - start, time.process_time() - cpu
    torch.set_num_threads(1)
    tried = Tried(Order(epsilon=(repr(epsilon),)), facts, samples).table()
    chosen = next(e for p, e in tried.items() if _same(p, advice.order))
    best = min(tried, key=tried.__getitem__)
    said = advice.order
    words = f"{said.model} {said.algorithm} {said.rounds} x {said.step:g}, clip {said.clip:g}, {said.output}"
    return {
        "error": chosen,
        "best": tried[best],
        "candidates": len(tried),
        "took": took,
        "cpu": cpu,
        "chosen": words,
        "expected": advice.expected["error"],
    }


def _same(point, order: Order) -> bool:
    named = "mb-sgd" if point.algorithm == "momentum" and not point.momentum else point.algorithm
    moved = named != "momentum" or point.momentum == order.momentum
    return (named, point.model, point.rounds, point.clip, point.step, point.output) == (
        order.algorithm, order.model, order.rounds, order.clip, order.step, order.output) and moved  # fmt: skip


# --- three sets with unequal silos ---------------------------------------------------------------------------------------------------


def sets() -> dict[str, tuple]:
    """Name: (sizes, kinds, task, samples). Features lie in [-1, 1] by public ranges that are wider than the data."""
    from sklearn.datasets import load_breast_cancer, load_digits

    x, y = load_breast_cancer(return_X_y=True)
    generous = 2 * x.max(0)
    cancer = (2 * x / generous - 1).astype(np.float32)
    digits, digit = load_digits(return_X_y=True)
    world = World(6.0, 0.1, active=0.8)
    kinds = ("number",) * 5 + ("boolean",) * 3 + ("category",) * 5
    clinics = [draw(world, kinds, Task.plain(2), 592, 2000, 7000 + s) for s in range(SEEDS)]
    return {
        "four clinics (a generator)": (CLINICS, kinds, Task.plain(2), clinics),
        "breast cancer": ((250, 180, 90, 49), ("number",) * 30, Task.plain(2), _splits(cancer, y)),
        "digits, odd or even": ((900, 500, 297, 100), ("number",) * 64, Task.plain(2), _splits((digits / 8 - 1).astype(np.float32), digit % 2)),
    }  # fmt: skip


def _splits(x: np.ndarray, y: np.ndarray) -> list[Sample]:
    found = []
    for seed in range(SEEDS):
        order = np.random.default_rng(seed).permutation(len(y))
        test, train = np.split(order, [round(HELD_OUT * len(y))])
        a, b = (torch.from_numpy(x[part]) for part in (train, test))
        c, d = (torch.from_numpy(y[part].astype(np.int64)) for part in (train, test))
        found.append(Sample(a, c, b, d, Task.plain(2)))
    return found


def by_sets(only: str = "") -> None:
    print("| data | epsilon | default | best of all tried | gap | chosen |\n|---|---|---|---|---|---|")
    for name, (counts, kinds, task, samples) in sets().items():
        if only not in name:
            continue
        for epsilon in (1.0, 3.0, 8.0):
            r = judged(epsilon, counts, kinds, task, samples, HELD_OUT)
            gap = 100 * (r["error"] - r["best"])
            print(
                f"| {name} | {epsilon:g} | {100 * r['error']:.1f} % | {100 * r['best']:.1f} % ({r['candidates']}) | {gap:.1f} | {r['chosen']} |",
                flush=True,
            )


# --- thirty random shapes ------------------------------------------------------------------------------------------------------------


def by_shapes(number: int = 30) -> None:
    random, ratios, times = np.random.default_rng(16), [], []
    print("| sizes | features | epsilon | default | best | ratio | seconds (of CPU) |\n|---|---|---|---|---|---|---|")
    for i in range(number):
        silos = int(random.integers(1, 9))
        counts = tuple(int(n) for n in np.exp(random.uniform(np.log(60), np.log(4000), silos)))
        features, epsilon = (
            int(np.exp(random.uniform(np.log(4), np.log(40)))),
            float(np.round(np.exp(random.uniform(np.log(0.5), np.log(10))), 2)),
        )
        kinds = tuple(random.choice(["number", "boolean", "category"], features).tolist())
        bent = float(random.choice([0.0, 0.1, 0.3]))
        world = World(float(np.exp(random.uniform(np.log(1.5), np.log(8)))), float(random.uniform(-0.5, 0.5)), bent, bool(random.random() < 0.3),
                      float(random.uniform(0.3, 1)), float(random.uniform(0.1, 0.7)))  # fmt: skip
        records = min(sum(counts), 1000)
        samples = [draw(world, kinds, Task.plain(2), records, 1000, 90_000 + 10 * i + t) for t in range(4)]
        r = judged(epsilon, counts, kinds, Task.plain(2), samples, 0.0)
        ratios.append(r["error"] / r["best"])
        times.append(r["took"])
        sizes = " ".join(map(str, counts))
        print(
            f"| {sizes} | {features} | {epsilon:g} | {100 * r['error']:.1f} % | {100 * r['best']:.1f} % | {ratios[-1]:.2f} | {r['took']:.1f} ({r['cpu']:.1f}) |",
            flush=True,
        )
    within = np.mean(np.array(ratios) <= 1.2)
    print(
        f"\nWithin 1.2 times the best of all candidates on the very records: {100 * within:.0f} % of {number} shapes; advice took {max(times):.1f} s at most."
    )


if __name__ == "__main__":
    which = sys.argv[1:] or ["sets", "shapes"]
    if "sets" in which:
        by_sets(which[-1] if len(which) > 1 and which[-1] != "shapes" else "")
    if "shapes" in which:
        by_shapes()
