"""Local SGD as the authors run it: K noisy steps a round in every silo, each on one record on average, for thousands of networks at once.

A step takes each of a silo's n records by a coin of its own, with probability 1/n, clips its gradient, adds noise for a sum, and steps: K R releases on
Poisson batches, which is what is priced. Nothing is truncated: a step has as many places as the fullest batch of it has records.
For networks of one hidden layer, whose gradients have a closed form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from silodp.core.errors import BadInput
from silodp.core.numbers import CLIP_TOLERANCE

if TYPE_CHECKING:
    from silodp.lab.studies.verdict_runs import Splits

BETAS, SMALL = (0.9, 0.999), 1e-8
"""Of Adam, as torch has it."""
COINS = 2**26
"""As many are tossed at a time."""


def drawn(counts: Tensor, steps: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Which records each step of each silo takes: (steps, S, k) places among the silo's records, and whether there is one, those first."""
    most = int(counts.max())
    places, there = [], []
    for start in range(0, steps, chunk := max(1, COINS // (len(counts) * most))):
        some = min(chunk, steps - start)
        coins = torch.rand(some, len(counts), most, generator=random, device=counts.device, dtype=torch.float64) * counts[:, None] < 1
        coins &= torch.arange(most, device=counts.device) < counts[:, None]
        found = coins.to(torch.uint8).topk(max(1, int(coins.sum(2).max())), 2)
        places.append(found.indices)
        there.append(found.values > 0)
    wide = max(part.shape[2] for part in places)
    whole = [torch.cat([nn.functional.pad(part, (0, wide - part.shape[2])) for part in parts]) for parts in (places, there)]
    return whole[0], whole[1]


@torch.no_grad()
def local_round(fed: Splits, w: Tensor, steps: int, step: Tensor, clip: Tensor, random: torch.Generator, optimiser: str = "sgd") -> Tensor:
    """(G T, d): the mean over a split's silos of where they end, from w; step and clip are (G T, 1), alike in all splits of a run."""
    layers = list(fed.problem.model.children())
    if [type(m) for m in layers] != [nn.Linear, nn.ReLU, nn.Linear]:
        raise BadInput("steps of one record are for networks of one hidden layer")
    members = fed.cohort()
    (splits, silos), device, dim, (hidden, outputs) = members.shape, w.device, w.shape[1], list(fed.problem.shapes.values())[2][::-1]
    runs, many = len(w) // splits, splits * silos
    at, there = drawn(torch.tensor(fed.counts)[members.flatten()].to(device), steps, random)
    filled = there.any(1).sum(1).clamp(min=1).tolist()
    own = torch.arange(splits)[:, None].expand(-1, silos).reshape(-1, 1).to(device), members.reshape(-1, 1).to(device)
    # (S, G, ...): a silo's networks side by side, so that all of them see a record in one product
    point = w.view(runs, splits, 1, dim).expand(-1, -1, silos, -1).reshape(runs, many, dim).transpose(0, 1)
    parts = [part.contiguous() for part in fed.problem.split(point).values()]
    w1, b1, w2, b2 = parts
    clips, paces = (v.view(runs, splits)[None, :, :1].to(w) for v in (clip, step))  # (1, G, 1)
    multiplier = fed.multipliers["minibatch"].to(w)[:, members.flatten()].T[..., None]  # (S, G, 1)
    std = 2 * clips * (1 + CLIP_TOLERANCE) * multiplier
    noisy, moments = bool((multiplier > 0).any()), [[torch.zeros_like(part) for part in parts] for _ in BETAS]
    for k in range(steps):
        index = at[k, :, : filled[k]]
        x, y, of = fed.x[*own, index], fed.y[*own, index], there[k, :, : filled[k]].to(w)  # (S, k, f), (S, k)
        a = torch.bmm(w1.flatten(1, 2), x.transpose(1, 2)).view(many, runs, hidden, -1).add_(b1[..., None]).relu_()
        e2 = torch.softmax(torch.matmul(w2, a).add_(b2[..., None]), 2)
        e2.sub_(nn.functional.one_hot(y, outputs).transpose(1, 2)[:, None].to(w))
        e1 = torch.matmul(w2.transpose(2, 3), e2).mul_(a > 0)
        norm = (e1.square().sum(2) * (x.square().sum(2) + 1)[:, None] + e2.square().sum(2) * (a.square().sum(2) + 1)).sqrt_()
        scale = torch.where(torch.isfinite(norm), of[:, None] * (clips / torch.maximum(norm, clips)), 0.0)[:, :, None]
        e1, e2, a = (part.nan_to_num_(0.0, 0.0, 0.0) for part in (e1.mul_(scale), e2.mul_(scale), a))
        noise = torch.randn(many, 1, dim, device=device, generator=random) if noisy else None
        if optimiser == "adam":
            sums = [torch.bmm(e1.flatten(1, 2), x).view_as(w1), e1.sum(3), torch.matmul(e2, a.transpose(2, 3)), e2.sum(3)]
            _adam(parts, sums, noise, std, paces, moments, k + 1, fed)
            continue
        e1, e2 = e1.mul_(-paces[..., None]), e2.mul_(-paces[..., None])
        w1.flatten(1, 2).baddbmm_(e1.flatten(1, 2), x)
        w2.flatten(0, 1).baddbmm_(e2.flatten(0, 1), a.transpose(2, 3).flatten(0, 1))
        b1.add_(e1.sum(3))
        b2.add_(e2.sum(3))
        if noise is not None:
            for part, draws in zip(parts, fed.problem.split(noise).values(), strict=True):
                part.addcmul_(_wide(-paces * std, part), draws)
    ends = torch.cat([part.flatten(2) for part in parts], 2)
    return ends.transpose(0, 1).reshape(runs, splits, silos, dim).mean(2).flatten(0, 1)


def _wide(value: Tensor, like: Tensor) -> Tensor:
    return value.reshape(*value.shape[:2], *(1,) * (like.dim() - 2))


def _adam(
    parts: list[Tensor],
    sums: list[Tensor],
    noise: Tensor | None,
    std: Tensor,
    paces: Tensor,
    moments: list[list[Tensor]],
    count: int,
    fed: Splits,
) -> None:
    """One step of torch's Adam, which every round starts anew."""
    draws = list(fed.problem.split(noise).values()) if noise is not None else []
    for i, (part, g) in enumerate(zip(parts, sums, strict=True)):
        if draws:
            g = g.addcmul(_wide(std, g), draws[i])
        for moment, beta, seen in zip(moments, BETAS, (g, g.square()), strict=True):
            moment[i].mul_(beta).add_(seen, alpha=1 - beta)
        even = [moment[i] / (1 - beta**count) for moment, beta in zip(moments, BETAS, strict=True)]
        part.addcmul_(_wide(-paces, part), even[0].div_(even[1].sqrt_().add_(SMALL)))
