"""How good the default choice is: `python -m benchmarks.defaults sets | shapes` prints the tables
of docs/choosing.md.

A default is what the advisor chooses from public facts. It is compared with the best of all
candidates on the very records, over 60 seeds (a split and a noise each: over 20 the least of
hundreds of means is two points below any candidate's true error at epsilon 1), which nobody could
know without looking. Noise is that of the plan, silos count by records. Rows are kept in --out as
they are done, and a run that was stopped goes on from there.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

from silodp.core.privacy.accounting import Budget
from silodp.core.problem.task import Task
from silodp.server.advice.candidates import Batch, points_of
from silodp.server.advice.chooser import Search, choose
from silodp.server.advice.facts import Facts
from silodp.server.advice.worlds import Sample, World, draw
from silodp.server.order import Order, default_delta

SEEDS, HELD_OUT, SHAPES = 60, 0.2, 30
CLINICS = (303, 261, 46, 130)
COLUMNS = (
    "what",
    "sizes",
    "features",
    "epsilon",
    "error",
    "best",
    "candidates",
    "took",
    "cpu",
    "expected",
    "chosen",
)


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
            errors = torch.stack(
                [self._errors(batch, trial) for trial in range(len(self._given))]
            ).mean(0)
            points = points_of(batch)  # the last iterates come first
            found |= dict(zip(points, errors.T.reshape(-1).tolist(), strict=False))
        return found

    @torch.no_grad()
    def _errors(self, batch: Batch, trial: int) -> torch.Tensor:
        """Return (J, 2): the share of wrong classes of each point's last iterate, and of the
        average of the later half.
        """
        sample = self._given[trial]
        found = []
        for w in self.ends(batch, 0, trial):
            scores = self._problem(batch.model).outputs(w, sample.test_x)
            if scores.shape[-1] == 1:
                said = (scores[..., 0] > 0).long()
            else:
                said = scores.argmax(-1)
            found.append((said != sample.test_y.long()).double().mean(-1))
        return torch.stack(found, 1)


def judged(
    epsilon: float,
    counts: tuple[int, ...],
    kinds: tuple[str, ...],
    task: Task,
    samples: list[Sample],
    held_out: float,
) -> dict:
    """The default's error, the best candidate's, and how long the advice took."""
    names = tuple(f"silo-{i}" for i in range(len(counts)))
    trained = tuple(n - round(held_out * n) for n in counts)
    facts = Facts(
        names, trained, kinds, task, tuple(Budget(epsilon, default_delta(n)) for n in counts)
    )
    start, cpu = time.perf_counter(), time.process_time()
    advice = choose(Order(epsilon=(repr(epsilon),)), facts)
    took, cpu = time.perf_counter() - start, time.process_time() - cpu
    torch.set_num_threads(1)
    tried = Tried(Order(epsilon=(repr(epsilon),)), facts, samples).table()
    said = advice.order
    return {
        "sizes": " ".join(map(str, counts)),
        "features": len(kinds),
        "epsilon": epsilon,
        "error": next(e for p, e in tried.items() if _same(p, said)),
        "best": min(tried.values()),
        "candidates": len(tried),
        "took": round(took, 1),
        "cpu": round(cpu, 1),
        "expected": advice.expected["error"],
        "chosen": (
            f"{said.model} {said.algorithm} {said.rounds} x {said.step:g}, clip {said.clip:g}, "
            f"{said.output}"
        ),
    }


def _same(point, order: Order) -> bool:
    named = "mb-sgd" if point.algorithm == "momentum" and not point.momentum else point.algorithm
    moved = named != "momentum" or point.momentum == order.momentum
    return (named, point.model, point.rounds, point.clip, point.step, point.output) == (
        order.algorithm,
        order.model,
        order.rounds,
        order.clip,
        order.step,
        order.output,
    ) and moved


# --- sets with unequal silos ---------------------------------------------------------------------


def sets() -> dict[str, tuple]:
    """Name: (sizes, kinds, task, samples). Features lie in [-1, 1] by public ranges that are wider
    than the data.
    """
    from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits

    x, y = load_breast_cancer(return_X_y=True)
    cancer = (x / x.max(0) - 1).astype(np.float32)  # ranges from 0 to twice the largest value
    digits, digit = load_digits(return_X_y=True)
    sugar, progress = load_diabetes(return_X_y=True, scaled=False)
    low, high = (
        np.array([18, 1, 10, 40, 50, 0, 0, 1, 2, 40.0]),
        np.array([100, 2, 60, 200, 400, 300, 120, 12, 8, 200.0]),
    )  # what a clinician would say
    kinds = ("number",) * 5 + ("boolean",) * 3 + ("category",) * 5
    clinics = [
        draw(World(6.0, 0.1, active=0.8), kinds, Task.plain(2), 592, 2000, 7000 + s)
        for s in range(SEEDS)
    ]
    return {
        "four clinics (a generator)": (CLINICS, kinds, Task.plain(2), clinics),
        "breast cancer": ((250, 180, 90, 49), ("number",) * 30, Task.plain(2), _splits(cancer, y)),
        "digits, odd or even": (
            (900, 500, 297, 100),
            ("number",) * 64,
            Task.plain(2),
            _splits((digits / 8 - 1).astype(np.float32), digit % 2),
        ),
        "diabetes, above the median": (
            (200, 130, 72, 40),
            ("number", "boolean") + ("number",) * 8,
            Task.plain(2),
            _splits(
                (2 * (sugar - low) / (high - low) - 1).clip(-1, 1).astype(np.float32),
                progress > 140,
            ),
        ),
    }


def _splits(x: np.ndarray, y: np.ndarray) -> list[Sample]:
    found = []
    for seed in range(SEEDS):
        order = np.random.default_rng(seed).permutation(len(y))
        test, train = np.split(order, [round(HELD_OUT * len(y))])
        a, b = (torch.from_numpy(x[part]) for part in (train, test))
        c, d = (torch.from_numpy(y[part].astype(np.int64)) for part in (train, test))
        found.append(Sample(a, c, b, d, Task.plain(2)))
    return found


def of_set(what: str) -> dict:
    """`what` is the name of a set, and epsilon."""
    name, epsilon = what.rsplit(" @ ", 1)
    return {"what": what} | judged(float(epsilon), *sets()[name], HELD_OUT)


# --- random shapes -------------------------------------------------------------------------------


def of_shape(what: str) -> dict:
    """`what` is the shape's number: sizes, columns, epsilon and a world of its own follow from
    it.
    """
    i = int(what)
    random = np.random.default_rng((16, i))
    counts = tuple(
        int(n) for n in np.exp(random.uniform(np.log(60), np.log(4000), int(random.integers(1, 9))))
    )
    features, epsilon = (
        int(np.exp(random.uniform(np.log(4), np.log(40)))),
        float(np.exp(random.uniform(np.log(0.5), np.log(10))).round(2)),
    )
    kinds = tuple(random.choice(["number", "boolean", "category"], features).tolist())
    world = World(
        float(np.exp(random.uniform(np.log(1.5), np.log(8)))),
        float(random.uniform(-0.5, 0.5)),
        float(random.choice([0.0, 0.1, 0.3])),
        bool(random.random() < 0.3),
        float(random.uniform(0.3, 1)),
        float(random.uniform(0.1, 0.8)),
        bool(random.random() < 0.25),
    )
    samples = [
        draw(world, kinds, Task.plain(2), min(sum(counts), 1000), 1000, 90_000 + 10 * i + t)
        for t in range(4)
    ]
    return {"what": what} | judged(epsilon, counts, kinds, Task.plain(2), samples, 0.0)


# --- printing ------------------------------------------------------------------------------------


def done(
    work: Callable[[str], dict], wanted: Iterable[str], out: Path, workers: int
) -> list[dict[str, Any]]:
    """The rows, in the order wanted; those that lie in `out` are not computed again."""
    rows = {row["what"]: row for row in csv.DictReader(out.open())} if out.exists() else {}
    wanted = list(wanted)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not rows:
            writer.writeheader()
        for row in _computed(work, [what for what in wanted if what not in rows], workers):
            writer.writerow(row)
            file.flush()
            rows[row["what"]] = row
    return [
        {k: float(v) if k in COLUMNS[3:10] else v for k, v in rows[what].items()} for what in wanted
    ]


def _computed(work: Callable[[str], dict], wanted: list[str], workers: int) -> Iterator[dict]:
    if workers == 1:
        yield from map(work, wanted)
        return
    with ProcessPoolExecutor(workers) as pool:
        for future in as_completed([pool.submit(work, what) for what in wanted]):
            yield future.result()


def by_sets(out: Path, workers: int, only: str) -> None:
    wanted = [f"{name} @ {epsilon}" for name in sets() if only in name for epsilon in (1, 3, 8)]
    print(
        "| data | epsilon | default | best of all tried | gap | chosen |\n|---|---|---|---|---|---|"
    )
    for r in done(of_set, wanted, out / "sets.csv", workers):
        print(
            f"| {r['what'].rsplit(' @ ', 1)[0]} | {r['epsilon']:g} | "
            f"{100 * r['error']:.1f} % | {100 * r['best']:.1f} % ({r['candidates']:.0f}) | "
            f"{100 * (r['error'] - r['best']):.1f} | {r['chosen']} |"
        )


def by_shapes(out: Path, workers: int, number: int) -> None:
    rows = done(of_shape, map(str, range(number)), out / "shapes.csv", workers)
    print(
        "| sizes | features | epsilon | default | best | ratio | seconds of advice (of "
        "CPU) |\n|---|---|---|---|---|---|---|"
    )
    for r in rows:
        print(
            f"| {r['sizes']} | {r['features']} | {r['epsilon']:g} | {100 * r['error']:.1f} "
            f"% | {100 * r['best']:.1f} % | "
            f"{r['error'] / r['best']:.2f} | {r['took']:.1f} ({r['cpu']:.1f}) |"
        )
    within = sum(r["error"] <= 1.2 * r["best"] for r in rows)
    print(
        f"\nWithin 1.2 times the best of all candidates on the very records: {within} of "
        f"{number} shapes; advice took "
        f"{max(r['cpu'] for r in rows):.1f} s of CPU at most."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", choices=["sets", "shapes"], nargs="*", default=["sets", "shapes"])
    parser.add_argument("--only", default="", help="Sets whose name has this.")
    parser.add_argument("--workers", type=int, default=2, help="Processes.")
    parser.add_argument("--number", type=int, default=SHAPES, help="Shapes.")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/defaults"),
        help="Where rows are kept: sets.csv and shapes.csv.",
    )
    said = parser.parse_args()
    if "sets" in said.which:
        by_sets(said.out, said.workers, said.only)
    if "shapes" in said.which:
        by_shapes(said.out, said.workers, said.number)
