"""The small figures of docs/algorithms: `python docs/make_figures.py` draws all of them, `python
docs/make_figures.py spider` one.

Each shows how one algorithm and MB-SGD move under the same budget, at one setting that nobody
tuned. What tuning gives is in leaderboard.md.
"""

import sys
from pathlib import Path

import torch
from drawing import small_picture

from silodp import Budget, Gaussian, Problem, calibrate, simulate
from silodp.core.problem.models import model_by_name
from silodp.server.algorithms import ALGORITHMS, find
from silodp.server.plan import with_multipliers
from silodp.server.settings import default_shares, prepared, sampling_by_name
from silodp.silo.data.datasets import DATASETS
from silodp.testing.evaluate import training_loss

ROUNDS, EPSILON, SEEDS = 25, 1.0, range(20)
STEP = {
    "adam": 0.05,
    "local-sgd": 0.25,
    "scaffold": 0.25,
    "momentum": 0.1,
    "scaled": 0.05,
    "diff2-local": 0.25,
    "accelerated": 0.1,
    "localized": 0.1,
}
CLIP = 1.0


def losses(name: str, epsilon: float | None) -> torch.Tensor:
    """(iterates, runs): training loss after each iterate, for as many draws of noise from one
    start.
    """
    records = DATASETS["wbcd"].load(0, None).train
    problem = Problem(
        *model_by_name("logistic" if name == "one-shot" else "mlp:5", records.x.shape[-1], 2)
    )
    algorithm = find(name)
    settings = algorithm.schedule({"rounds": ROUNDS, "local_steps": 2, "restarts": 2})
    sampling = sampling_by_name(None, algorithm, ROUNDS)
    mechanisms = {kind: Gaussian(kind, CLIP, 0.0, sampling) for kind in algorithm.kinds}
    run, counts = prepared(algorithm, settings, STEP.get(name, 0.5)), records.counts
    if epsilon is None:
        plan, seeds = with_multipliers(run, mechanisms, counts, Budget(float("inf"), 1e-5)), [0]
    else:
        budgets, seeds = [Budget(epsilon, 1 / n**2) for n in counts], list(SEEDS)
        plan = calibrate(
            run, mechanisms, budgets, counts, shares=default_shares(algorithm, settings)
        )
    fed, _ = simulate(problem, records, plan, seeds)
    start = problem.initial([0]).expand(len(seeds), -1)
    points = [start, *run(fed, problem, start, **plan.mechanisms)]
    return torch.stack([training_loss(problem, w, records) for w in points])


def draw(name: str, folder: Path) -> Path:
    """NAME.svg in the folder."""
    with small_picture(path := folder / f"{name}.svg") as axes:
        for curve, colour in {"mb-sgd": "0.55", name: "#00796b"}.items():
            private, plain = losses(curve, EPSILON), losses(curve, None)
            middle, low, high = (
                private.mean(1),
                *private.quantile(torch.tensor([0.1, 0.9]).double(), dim=1),
            )
            axes.plot(middle, color=colour, label=f"{curve}, epsilon {EPSILON:g}")
            axes.fill_between(range(len(middle)), low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(plain, color=colour, linestyle="--", linewidth=1, label=f"{curve}, no noise")
        axes.set(xlabel="iterate", ylabel="training loss", yscale="log")
        axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 5], labels=["0.1", "0.2", "0.5", "1", "2", "5"])
        axes.set_yticks([], minor=True)
        axes.set_ylim(min(0.09, float(plain.min())), max(0.9, float(high.max())))
        axes.legend(frameon=False, fontsize=8)
    return path


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ALGORITHMS:
        print(draw(wanted, Path(__file__).parent / "algorithms"))
