"""How much an additive model gains or loses against logistic regression, by noise: test error of
both at equal, exact budgets.

    python -m benchmarks.additive

Noisy gradient descent over four silos that weigh by records, ISRL-DP, delta = 1/n^2 of a silo. Ten
seeds: of noise and, for the sets of scikit-learn, of the split too. Each model has the best of the
same 27 settings (rounds, step, clip) by mean test error: what tuning cannot beat, and more than it
may hope for. `curves` has six columns with known curves, some bent and one with a jump, and two
that do nothing. Columns of breast_cancer and diabetes (its label above 140) are scaled by the whole
set's ranges, which stand for public ones.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from silodp.core.privacy.accounting import Budget, gdp_mu
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.engine.clipping import ENGINES, clipped_sum
from silodp.testing.evaluate import error_rate

MODELS = ("logistic", "additive:8:1")
ROUNDS, STEPS, CLIPS = (5, 15, 40), (1.0, 3.0, 9.0), (0.25, 0.5, 1.0)
SILOS, SEEDS, TEST = 4, 10, 20_000

Split = tuple[Tensor, Tensor, Tensor, Tensor]


def curves(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Eight columns within [-1, 1], and a class by the sum of six curves."""
    random = torch.Generator().manual_seed(seed)
    x = (0.45 * torch.randn(n, 8, generator=random)).clamp(-1, 1)
    z = (
        3 * torch.sin(2.5 * x[:, 0])
        + 8 * (x[:, 1].square() - 0.2)
        + 1.5 * x[:, 2]
        + 2.5 * ((x[:, 3] > 0.1).float() - 0.4)
    )
    z = z - 3 * x[:, 4].clamp(min=0) + 1.2 * torch.cos(4 * x[:, 5])
    return x, (torch.rand(n, generator=random) < z.sigmoid()).long()


def splits(name: str) -> Iterator[tuple[Split, int]]:
    """(training x and y, test x and y), and how many seeds of noise it is for."""
    if name.startswith("curves"):
        n = int(name.partition(" ")[2])
        x, y = curves(n + TEST, 1)
        yield (x[:n], y[:n], x[n:], y[n:]), SEEDS
        return
    from sklearn import datasets

    data = (
        datasets.load_breast_cancer()
        if name == "breast_cancer"
        else datasets.load_diabetes(scaled=False)
    )
    x, y = torch.tensor(data.data).float(), torch.tensor(data.target)
    low, high = x.min(0).values, x.max(0).values
    x, y = (
        2 * (x - low) / (high - low) - 1,
        y.long() if name == "breast_cancer" else (y > 140).long(),
    )
    for seed in range(SEEDS):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        train, test = order[: len(y) * 4 // 5 // SILOS * SILOS], order[len(y) * 4 // 5 :]
        yield (x[train], y[train], x[test], y[test]), 1


def errors(split: Split, model: str, epsilon: float, seeds: int) -> Tensor:
    """Test error, (settings, seeds)."""
    x, y, *test = split
    n = len(y) // SILOS
    x, y = x.reshape(SILOS, n, -1), y.reshape(SILOS, n)
    problem, mu = Problem(*model_by_name(model, x.shape[-1], 2)), gdp_mu(Budget(epsilon, n**-2))
    step, clip = (
        torch.tensor(v).repeat_interleave(seeds)[:, None]
        for v in zip(*itertools.product(STEPS, CLIPS), strict=True)
    )
    found = []
    for rounds in ROUNDS:
        random = torch.Generator().manual_seed(rounds)
        std = (
            2 * clip * math.sqrt(rounds) / mu / n / math.sqrt(SILOS)
        )  # of the mean of four silos' means
        w = problem.initial([0]).expand(len(step), -1)
        for _ in range(rounds):
            mean = clipped_sum(problem, w, x, y, torch.ones(SILOS, n), clip, engines=ENGINES).sum(
                1
            ) / (SILOS * n)
            w = w - step * (mean + std * torch.randn(mean.shape, generator=random))
        found.append(error_rate(problem, w, *test).reshape(-1, seeds))
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--records", type=int, nargs="*", default=[500, 2000, 8000, 20_000], help="of the curves"
    )
    parser.add_argument("--epsilon", type=float, nargs="*", default=[1.0, 3.0, 8.0])
    parser.add_argument(
        "--model", nargs="*", default=list(MODELS), help="logistic, additive:K:1 or another"
    )
    asked = parser.parse_args()
    print(f"{'data':18}{'epsilon':>8}" + "".join(f"{model:>22}" for model in asked.model))
    for name in [*(f"curves {n}" for n in asked.records), "breast_cancer", "diabetes"]:
        made = list(splits(name))
        for epsilon in asked.epsilon:
            cells = []
            for model in asked.model:
                found = 100 * torch.cat(
                    [errors(split, model, epsilon, seeds) for split, seeds in made], 1
                )
                best = found[found.mean(1).argmin()]
                cells.append(f"{best.mean():.1f} ± {best.std() / math.sqrt(best.numel()):.1f} %")
            print(f"{name:18}{epsilon:8g}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
