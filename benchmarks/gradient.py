"""The clipped mean gradient of every silo: silodp all at once, its peers in a loop over silos.
float32, clip 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy as torch_cross_entropy

from benchmarks.models import cnn, images, mlp, texts, transformer, vectors
from benchmarks.table import Method, Row, build, compare
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.engine.clipping import ENGINES, IN_TORCH, choose, clipped_sum, task
from silodp.engine.task import Engine

CLIP = 1.0

WORKS = {
    "MLP 50-64-2, 25 silos x 300 records": (mlp, vectors, 25, 300),
    "MLP 50-64-2, 25 silos x 1234 records": (mlp, vectors, 25, 1234),
    "CNN for CIFAR-10, 10 silos x 64 records": (cnn, images, 10, 64),
    "transformer, 10 silos x 32 records": (transformer, texts, 10, 32),
}

Client = Callable[[Tensor, Tensor], Tensor]
"""The clipped mean gradient (d,) of one silo's records, at the parameters that its model has."""


def rows(repeat: int) -> list[Row]:
    found = []
    for work, (model, data, silos, records) in WORKS.items():
        torch.manual_seed(0)
        found += compare("gradient", work, methods(model(), *data(silos, records)), repeat)
    return found


def methods(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Method]:
    ours, plain = (by_silodp(model, x, y, engines) for engines in (ENGINES, IN_TORCH))

    def looped(client: Client) -> Method:
        def run() -> Tensor:
            return torch.stack([client(*silo) for silo in zip(x, y, strict=True)])

        return Method(run, check=lambda: (run(), ours()))

    own = {"silodp": Method(ours, check=lambda: (ours(), ours()))}
    problem = Problem(model, cross_entropy)
    if choose(task(problem, problem.initial([0]), x, y, torch.ones(y.shape), CLIP)) is ENGINES[0]:
        own["silodp, without a C compiler"] = Method(plain, check=lambda: (plain(), ours()))
    return own | build(
        {
            "Opacus hooks, looped": lambda: looped(hooks(copy.deepcopy(model))),
            "Opacus ghost, looped": lambda: looped(ghost(copy.deepcopy(model))),
            "torch.func vmap(grad), looped": lambda: looped(functional(model)),
        }
    )


def by_silodp(
    model: nn.Module, x: Tensor, y: Tensor, engines: Sequence[Engine]
) -> Callable[[], Tensor]:
    problem = Problem(model, cross_entropy)
    w = torch.cat([p.detach().flatten() for p in model.parameters()])[None]
    weight = torch.ones(y.shape)
    return lambda: clipped_sum(problem, w, x, y, weight, CLIP, engines=engines)[0] / x.shape[1]


def hooks(model: nn.Module) -> Client:
    from opacus import GradSampleModule

    sampled = GradSampleModule(model, loss_reduction="sum")

    def mean(records: Tensor, labels: Tensor) -> Tensor:
        sampled.zero_grad()
        torch_cross_entropy(sampled(records), labels, reduction="sum").backward()
        return _clipped_mean([p.grad_sample for p in sampled.parameters()])  # type: ignore[attr-defined]

    return mean


def ghost(model: nn.Module) -> Client:
    """Opacus's ghost clipping as its DPTensorFastGradientClipping does it: a pass for the norms,
    then one for the weighted sum.
    """
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    sampled = GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=CLIP)

    def mean(records: Tensor, labels: Tensor) -> Tensor:
        sampled.zero_grad()
        losses = torch_cross_entropy(sampled(records), labels, reduction="none")
        losses.sum().backward(retain_graph=True)
        scale = sampled.get_clipping_coef()
        sampled.zero_grad()
        sampled.disable_hooks()
        (scale * losses).sum().backward()
        sampled.enable_hooks()
        return torch.cat([p.grad.flatten() for p in sampled.parameters()]) / len(labels)  # type: ignore[union-attr]

    return mean


def functional(model: nn.Module) -> Client:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p: dict[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        return torch_cross_entropy(functional_call(model, p, (record[None],)), label[None])

    each = vmap(grad(loss), (None, 0, 0))
    return lambda records, labels: _clipped_mean(list(each(parameters, records, labels).values()))


def _clipped_mean(gradients: list[Tensor]) -> Tensor:
    """The mean over records (n, *shape) of their gradients, all parameters clipped as one
    vector.
    """
    norm = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
    scale = (CLIP / norm).clamp(max=1)
    return torch.cat([torch.einsum("n,n...->...", scale, g).flatten() for g in gradients]) / len(
        norm
    )
