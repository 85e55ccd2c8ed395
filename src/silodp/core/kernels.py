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


def conv_gradients(a: Tensor, e: Tensor, shape: torch.Size, stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """Each record's gradient (B, *shape) by a convolution's weight, for a padded input (B, C, H, W) and the gradient by the output.

    One program makes a tile of (outputs x kernel rows) by (channels x kernel columns), a product over the rows of the input and the columns
    of the output, in float32 throughout: with few channels such a tile is fuller than that of outputs by patches.
    """
    outputs, channels, kernel_rows, kernel_columns = shape
    groups, (rows, columns) = a.shape[1] // channels, e.shape[2:]
    high, wide = outputs // groups * kernel_rows, channels * kernel_columns
    tall, broad = _tile(high), _tile(wide)
    tiles = triton.cdiv(high, tall), triton.cdiv(wide, broad)
    depth = ((rows - 1) * stride[0] + (kernel_rows - 1) * dilation[0] + 1) * columns
    out = torch.empty(len(a), *shape, device=a.device, dtype=a.dtype)
    if len(a) == 0:
        return out
    _conv_gradients[(len(a) * groups * tiles[0] * tiles[1],)](
        *(a, e, out, groups, *tiles, outputs // groups, channels, *a.shape[2:], rows, columns),
        *(kernel_rows, kernel_columns, *stride, *dilation, tall, broad, depth, 32),
        num_warps=max(1, tall * broad // 512),
    )
    return out


def _tile(length: int) -> int:
    """The length of a tile that leaves least over, and of such the longest."""
    return min((16, 32, 64), key=lambda tile: (triton.cdiv(length, tile) * tile, -tile))


@triton.jit
def _conv_gradients(
    a,
    e,
    out,
    groups,
    tiles_high,
    tiles_wide,
    outputs,
    channels,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    TALL: tl.constexpr,
    BROAD: tl.constexpr,
    DEPTH: tl.constexpr,
    DEEP: tl.constexpr,
):
    cell = tl.program_id(0)
    across = cell % tiles_wide
    down = cell // tiles_wide % tiles_high
    group = cell // (tiles_wide * tiles_high) % groups
    record = (cell // (tiles_wide * tiles_high * groups)).to(tl.int64)
    m = down * TALL + tl.arange(0, TALL)
    n = across * BROAD + tl.arange(0, BROAD)
    output = group * outputs + m // KH
    k = m % KH
    own = n // KW
    column = n % KW
    m_inside = m < outputs * KH
    n_inside = n < channels * KW
    slopes = e + record * (groups * outputs * ROWS * COLUMNS) + output * (ROWS * COLUMNS)
    inputs = a + record * (groups * channels * HEIGHT * WIDTH) + (group * channels + own) * (HEIGHT * WIDTH) + column * DW
    total = tl.zeros((TALL, BROAD), tl.float32)
    for start in range(0, DEPTH, DEEP):
        place = start + tl.arange(0, DEEP)
        row = place // COLUMNS
        j = place % COLUMNS
        inside = place < DEPTH
        shifted = row[None, :] - (k * DH)[:, None]
        there = (shifted >= 0) & (shifted < ROWS * SH) & (shifted % SH == 0) & m_inside[:, None] & inside[None, :]
        left = tl.load(slopes[:, None] + shifted // SH * COLUMNS + j[None, :], mask=there, other=0.0)
        right = tl.load(inputs[None, :] + (row * WIDTH + j * SW)[:, None], mask=inside[:, None] & n_inside[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    at = out + record * (groups * outputs * channels * KH * KW) + (output * (channels * KH * KW) + k * KW)[:, None]
    tl.store(at + (own * (KH * KW) + column)[None, :], total, mask=m_inside[:, None] & n_inside[None, :])
