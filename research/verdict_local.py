"""Local SGD as the authors run it: K noisy steps a round in every silo, each on one record on
average, for thousands of networks at once.

A step takes each of a silo's n records by a coin of its own, with probability 1/n, clips its
gradient, adds noise for a sum, and steps: K R releases on Poisson batches, which is what is priced.
Nothing is truncated: a step has as many places as the fullest batch of it has records. For networks
of one hidden layer, whose gradients have a closed form. On a GPU all steps of a round are one
kernel (`verdict_local.cu`) where the hidden units are a multiple of 32; elsewhere torch takes them
one by one.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from research.kernels.cuda import compiler, kernels
from silodp.core.errors import BadInput
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.problem.problem import Problem

if TYPE_CHECKING:
    from research.verdict_runs import Splits

BETAS = (0.9, 0.999)
SMALL = 1e-8
"""Of Adam, as torch has it."""
COINS = 2**26
"""As many are tossed at a time."""
TOGETHER = 2
"""Networks of one silo in a block of the kernel."""


def drawn(counts: Tensor, steps: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Which records each step of each silo takes: (steps, S, k) places among the silo's records,
    and whether there is one, those first.
    """
    most = int(counts.max())
    places = []
    there = []
    for start in range(0, steps, chunk := max(1, COINS // (len(counts) * most))):
        some = min(chunk, steps - start)
        coins = (
            torch.rand(
                some, len(counts), most, generator=random, device=counts.device, dtype=torch.float64
            )
            * counts[:, None]
            < 1
        )
        coins &= torch.arange(most, device=counts.device) < counts[:, None]
        found = coins.to(torch.uint8).topk(max(1, int(coins.sum(2).max())), 2)
        places.append(found.indices)
        there.append(found.values > 0)
    wide = max(part.shape[2] for part in places)
    whole = [
        torch.cat([nn.functional.pad(part, (0, wide - part.shape[2])) for part in parts])
        for parts in (places, there)
    ]
    return whole[0], whole[1]


@torch.no_grad()
def local_round(
    fed: Splits,
    w: Tensor,
    steps: int,
    step: Tensor,
    clip: Tensor,
    random: torch.Generator,
    optimiser: str = "sgd",
) -> Tensor:
    """(G T, d): the mean over a split's silos of where they end, from w; step and clip are (G T,
    1), alike in all splits of a run.
    """
    layers = list(fed.problem.model.children())
    if [type(m) for m in layers] != [nn.Linear, nn.ReLU, nn.Linear]:
        raise BadInput("steps of one record are for networks of one hidden layer")
    members = fed.cohort()
    (splits, silos), device, dim = members.shape, w.device, w.shape[1]
    runs = len(w) // splits
    many = splits * silos
    at, there = drawn(torch.tensor(fed.counts)[members.flatten()].to(device), steps, random)
    own = (
        torch.arange(splits)[:, None].expand(-1, silos).reshape(-1, 1).to(device),
        members.reshape(-1, 1).to(device),
    )
    # (S, G, ...): a silo's networks side by side, so that all of them see a record in one product
    point = (
        w.view(runs, splits, 1, dim)
        .expand(-1, -1, silos, -1)
        .reshape(runs, many, dim)
        .transpose(0, 1)
    )
    parts = [part.contiguous() for part in fed.problem.split(point).values()]
    clips, paces = (v.view(runs, splits)[None, :, :1].to(w) for v in (clip, step))  # (1, G, 1)
    multiplier = fed.multipliers["minibatch"].to(w)[:, members.flatten()].T[..., None]  # (S, G, 1)
    std = 2 * clips * (1 + CLIP_TOLERANCE) * multiplier
    round_ = Round(
        fed.x[*own, at],
        fed.y[*own, at],
        there,
        clips,
        paces,
        std,
        bool((multiplier > 0).any()),
        optimiser == "adam",
        random,
    )
    on_gpu = w.is_cuda and parts[1].shape[2] % 32 == 0 and compiler() is not None
    if on_gpu:
        parts = _walk_on_gpu(parts, round_)
    else:
        parts = _walk(fed.problem, parts, round_)
    ends = torch.cat([part.flatten(2) for part in parts], 2)
    return ends.transpose(0, 1).reshape(runs, splits, silos, dim).mean(2).flatten(0, 1)


class Round(NamedTuple):
    """What the steps of a round are made of: K steps, S silos, at most k records a step, G networks
    in each silo.
    """

    x: Tensor
    """(K, S, k, f)"""
    y: Tensor
    """(K, S, k)"""
    there: Tensor
    """(K, S, k): which of them are there; those are first."""
    clips: Tensor
    """(1, G, 1), as are paces."""
    paces: Tensor
    std: Tensor
    """(S, G, 1)"""
    noisy: bool
    adam: bool
    random: torch.Generator


def _walk(problem: Problem, parts: list[Tensor], of: Round) -> list[Tensor]:
    """Where networks (S, G, ...) end, a step at a time."""
    w1, b1, w2, b2 = parts
    (many, runs, hidden), outputs, filled = (
        b1.shape,
        b2.shape[2],
        of.there.any(1).sum(1).clamp(min=1).tolist(),
    )
    moments = [[torch.zeros_like(part) for part in parts] for _ in BETAS]
    for k in range(len(of.x)):
        x, y, there = (
            part[k, :, : filled[k]] for part in (of.x, of.y, of.there.to(w1))
        )  # (S, k, f), (S, k)
        a = (
            torch.bmm(w1.flatten(1, 2), x.transpose(1, 2))
            .view(many, runs, hidden, -1)
            .add_(b1[..., None])
            .relu_()
        )
        e2 = torch.softmax(torch.matmul(w2, a).add_(b2[..., None]), 2)
        e2.sub_(nn.functional.one_hot(y, outputs).transpose(1, 2)[:, None].to(w1))
        e1 = torch.matmul(w2.transpose(2, 3), e2).mul_(a > 0)
        norm = (
            e1.square().sum(2) * (x.square().sum(2) + 1)[:, None]
            + e2.square().sum(2) * (a.square().sum(2) + 1)
        ).sqrt_()
        scale = torch.where(
            torch.isfinite(norm), there[:, None] * (of.clips / torch.maximum(norm, of.clips)), 0.0
        )[:, :, None]
        e1, e2, a = (
            part.nan_to_num_(0.0, 0.0, 0.0) for part in (e1.mul_(scale), e2.mul_(scale), a)
        )
        if of.noisy:
            noise = torch.randn(many, 1, problem.dim, device=w1.device, generator=of.random)
        else:
            noise = None
        if noise is not None:
            draws = list(problem.split(noise).values())
        else:
            draws = []
        if of.adam:
            sums = [
                torch.bmm(e1.flatten(1, 2), x).view_as(w1),
                e1.sum(3),
                torch.matmul(e2, a.transpose(2, 3)),
                e2.sum(3),
            ]
            _adam(parts, sums, draws, of, moments, k + 1)
            continue
        e1 = e1.mul_(-of.paces[..., None])
        e2 = e2.mul_(-of.paces[..., None])
        w1.flatten(1, 2).baddbmm_(e1.flatten(1, 2), x)
        w2.flatten(0, 1).baddbmm_(e2.flatten(0, 1), a.transpose(2, 3).flatten(0, 1))
        b1.add_(e1.sum(3))
        b2.add_(e2.sum(3))
        for part, drawn_ in zip(parts, draws, strict=False):
            part.addcmul_(_wide(-of.paces * of.std, part), drawn_)
    return parts


def _walk_on_gpu(parts: list[Tensor], of: Round) -> list[Tensor]:
    """The same, all steps in one kernel; its noise is another draw."""
    (many, runs, hidden, inputs), outputs, (steps, _, most) = (
        parts[0].shape,
        parts[3].shape[2],
        of.there.shape,
    )
    state = torch.cat(
        [parts[0].transpose(2, 3).flatten(2), *(part.flatten(2) for part in parts[1:])], 2
    )
    if of.noisy:
        noise = torch.randn(steps, many, state.shape[2], device=state.device, generator=of.random)
    else:
        noise = state
    settings = torch.cat([v.expand(many, -1, -1) for v in (of.clips, of.paces, of.std)], 2)
    records = [
        of.x.contiguous(),
        of.x.square().sum(3),
        of.y.int(),
        of.there.sum(2, dtype=torch.int32),
    ]
    _kernel(inputs, hidden, outputs, of.adam)(
        (math.ceil(runs / TOGETHER), many, 1),
        (hidden * TOGETHER, 1, 1),
        [state, *records, noise, settings, steps, many, runs, most, int(of.noisy)],
        shared_mem=4 * most * (inputs + TOGETHER * (2 * hidden + outputs)),
    )
    first = state[..., : inputs * hidden].unflatten(2, (inputs, hidden)).transpose(2, 3).flatten(2)
    return [first, state[..., inputs * hidden :]]


@functools.lru_cache
def _kernel(inputs: int, hidden: int, outputs: int, adam: bool) -> Any:
    sizes = {
        "INPUTS": inputs,
        "HIDDEN": hidden,
        "OUTPUTS": outputs,
        "TOGETHER": TOGETHER,
        "ADAM": int(adam),
    }
    constants = {"BETA1": f"{BETAS[0]}f", "BETA2": f"{BETAS[1]}f", "SMALL": f"{SMALL}f"}
    return kernels(Path(__file__).with_suffix(".cu"), ("walk",), sizes | constants)[0]


def _wide(value: Tensor, like: Tensor) -> Tensor:
    return value.reshape(*value.shape[:2], *(1,) * (like.dim() - 2))


def _adam(
    parts: list[Tensor],
    sums: list[Tensor],
    draws: list[Tensor],
    of: Round,
    moments: list[list[Tensor]],
    count: int,
) -> None:
    """One step of torch's Adam, which every round starts anew."""
    for i, (part, g) in enumerate(zip(parts, sums, strict=True)):
        if draws:
            g = g.addcmul(_wide(of.std, g), draws[i])
        for moment, beta, seen in zip(moments, BETAS, (g, g.square()), strict=True):
            moment[i].mul_(beta).add_(seen, alpha=1 - beta)
        even = [moment[i] / (1 - beta**count) for moment, beta in zip(moments, BETAS, strict=True)]
        part.addcmul_(_wide(-of.paces, part), even[0].div_(even[1].sqrt_().add_(SMALL)))
