"""How long one clipped mean gradient per silo takes: silodp against Opacus and torch.func, each in a loop over silos, in one process.

    python benchmarks/gradients.py [--silos 25] [--records 300] [--repeat 50]

The network is 50-64-2, the clip 1, the numbers float32. All three results must agree to 1e-4 before anything is timed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy as torch_cross_entropy

from silodp.core.clipping import clipped_sum
from silodp.core.losses import cross_entropy
from silodp.core.problem import Problem

CLIP = 1.0


def by_silodp(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    problem = Problem(model, cross_entropy)
    w = torch.cat([p.detach().flatten() for p in model.parameters()])[None]
    weight = torch.ones(y.shape)
    return lambda: clipped_sum(problem, w, x, y, weight, CLIP)[0] / x.shape[1]


def by_opacus(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    from opacus import GradSampleModule

    sampled = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")

    def mean(records: Tensor, labels: Tensor) -> Tensor:
        sampled.zero_grad()
        torch_cross_entropy(sampled(records), labels, reduction="sum").backward()
        return clipped_mean([p.grad_sample for p in sampled.parameters()])  # type: ignore[attr-defined]

    return lambda: torch.stack([mean(*silo) for silo in zip(x, y, strict=True)])


def by_vmap(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p: dict[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        return torch_cross_entropy(functional_call(model, p, (record[None],)), label[None])

    each = vmap(grad(loss), (None, 0, 0))
    return lambda: torch.stack([clipped_mean(list(each(parameters, *silo).values())) for silo in zip(x, y, strict=True)])


def clipped_mean(gradients: list[Tensor]) -> Tensor:
    """The mean over records (n, *shape) of their gradients, all parameters clipped as one vector."""
    norm = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
    scale = (CLIP / norm).clamp(max=1)
    return torch.cat([torch.einsum("n,n...->...", scale, g).flatten() for g in gradients]) / len(norm)


def milliseconds(methods: dict[str, Callable[[], Tensor]], repeat: int) -> dict[str, list[float]]:
    """The times of each method, taken in turns, so that a busy moment of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(repeat + 3):
        for name, method in methods.items():
            start = time.perf_counter()
            method()
            if turn >= 3:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("silos", 25), ("records", 300), ("repeat", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)  # Opacus's hooks warn once per process
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 64), nn.ReLU(), nn.Linear(64, 2))
    x, y = torch.randn(options.silos, options.records, 50), torch.randint(2, (options.silos, options.records))
    methods = {"silodp": by_silodp(model, x, y), "torch.func vmap(grad), looped": by_vmap(model, x, y)}
    try:
        methods["Opacus GradSampleModule, looped"] = by_opacus(model, x, y)
    except ImportError:
        print("Opacus is not installed, so it is left out; pip install opacus to compare with it.")
    results = {name: method() for name, method in methods.items()}
    for name, result in results.items():
        if (error := float((result - results["silodp"]).norm() / result.norm())) > 1e-4:
            raise SystemExit(f"silodp and {name} differ by {error:.1e} of the norm; nothing was timed.")
    times = milliseconds(methods, options.repeat)
    print(
        f"{options.silos} silos x {options.records} records, network 50-64-2, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(f"{'clipped mean gradient of every silo':36}{'median ms':>10}{'ratio':>7}{'best ms':>10}{'ratio':>7}")
    ours = times["silodp"]
    for name, taken in times.items():
        middle, best = statistics.median(taken), min(taken)
        print(f"{name:36}{middle:10.2f}{middle / statistics.median(ours):7.1f}{best:10.2f}{best / min(ours):7.1f}")


if __name__ == "__main__":
    main()
