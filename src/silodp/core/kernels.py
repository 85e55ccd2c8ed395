"""What a GPU does better by hand: sums of products in float64 without copies of the numbers in float64."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

BLOCK = 256


def products(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """||u||^2, ||v||^2 and u.v over features of (S, J or 1, features, n), in float64, each (S, J, n)."""
    runs = max(u.shape[1], v.shape[1])
    u, v = (t.expand(-1, runs, -1, -1).contiguous() if t.stride(3) != 1 else t.expand(-1, runs, -1, -1) for t in (u, v))
    silos, runs, features, records = u.shape
    sums = torch.empty(3, silos, runs, records, dtype=torch.float64, device=u.device)
    grid = (triton.cdiv(records, BLOCK), silos * runs)
    _products[grid](u, v, sums, features, records, runs, sums.stride(0), *u.stride()[:3], *v.stride()[:3], BLOCK=BLOCK)
    return sums[0], sums[1], sums[2]


def square(u: Tensor) -> Tensor:
    """||u||^2 over features of (S, J or 1, features, n), in float64, (S, J or 1, n)."""
    u = u if u.stride(3) == 1 else u.contiguous()
    silos, runs, features, records = u.shape
    total = torch.empty(silos, runs, records, dtype=torch.float64, device=u.device)
    _square[(triton.cdiv(records, BLOCK), silos * runs)](u, total, features, records, runs, *u.stride()[:3], BLOCK=BLOCK)
    return total


@triton.jit
def _square(u, out, features, records, runs, u0, u1, u2, BLOCK: tl.constexpr):
    cell = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < records
    total = tl.zeros((BLOCK,), tl.float64)
    for i in range(features):
        row = i.to(tl.int64)
        a = tl.load(u + cell // runs * u0 + cell % runs * u1 + row * u2 + column, mask=inside, other=0.0).to(tl.float64)
        total += a * a
    tl.store(out + cell * records + column, total, mask=inside)


@triton.jit
def _products(u, v, out, features, records, runs, plane, u0, u1, u2, v0, v1, v2, BLOCK: tl.constexpr):
    cell = tl.program_id(1).to(tl.int64)
    silo, run = cell // runs, cell % runs
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < records
    uu = tl.zeros((BLOCK,), tl.float64)
    vv = tl.zeros((BLOCK,), tl.float64)
    uv = tl.zeros((BLOCK,), tl.float64)
    for i in range(features):
        row = i.to(tl.int64)
        a = tl.load(u + silo * u0 + run * u1 + row * u2 + column, mask=inside, other=0.0).to(tl.float64)
        b = tl.load(v + silo * v0 + run * v1 + row * v2 + column, mask=inside, other=0.0).to(tl.float64)
        uu += a * a
        vv += b * b
        uv += a * b
    at = cell * records + column
    tl.store(out + at, uu, mask=inside)
    tl.store(out + plane + at, vv, mask=inside)
    tl.store(out + 2 * plane + at, uv, mask=inside)
