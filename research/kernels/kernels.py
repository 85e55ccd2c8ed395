"""The clipped sums of a network of one hidden layer, in Triton.

Products of matrices are float32 throughout: by multiply and add, or on tensor cores from three
products of TF32 parts, which lose no more.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false, reportInvalidTypeForm=false
from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

triton: Any
tl: Any
try:
    import triton
    from triton import language as tl
except (
    ModuleNotFoundError
):  # no GPU, no Triton: the file can be imported, and only tensors on a GPU come here
    triton = SimpleNamespace(jit=lambda kernel: kernel)
    tl = None

BLOCK = 256


def square(u: Tensor) -> Tensor:
    """||u||^2 over features of (S, J or 1, features, n), in float64, (S, J or 1, n)."""
    u = u if u.stride(3) == 1 else u.contiguous()
    silos, runs, features, records = u.shape
    total = torch.empty(silos, runs, records, dtype=torch.float64, device=u.device)
    _square[(silos * runs, triton.cdiv(records, BLOCK))](
        u, total, features, records, runs, *u.stride()[:3], BLOCK=BLOCK
    )
    return total


@triton.jit
def _square(u, out, features, records, runs, u0, u1, u2, BLOCK: tl.constexpr):
    cell = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < records
    total = tl.zeros((BLOCK,), tl.float64)
    for i in range(features):
        row = i.to(tl.int64)
        a = tl.load(
            u + cell // runs * u0 + cell % runs * u1 + row * u2 + column, mask=inside, other=0.0
        ).to(tl.float64)
        total += a * a
    tl.store(out + cell * records + column, total, mask=inside)


def network_sums(
    points: list[Tensor],
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    clips: Tensor,
    sizes: Sequence[int],
    places: Sequence[int],
    memory: int = 2**31,
) -> Tensor:
    """The clipped sums (J, S, d) of Linear, ReLU, Linear with cross-entropy, with so many units and
    classes as `gpu` says.

    points are (J, d) or (J, S, d), weight (S, n) or (J, S, n), clips (J, 1) in float64; `sizes` are
    inputs, hidden units and outputs, `places` where weight, bias, weight and bias lie in a point.
    The first layer is two products of matrices, and one kernel does all between them.
    """
    inputs, hidden, outputs = sizes
    units, classes = (triton.next_power_of_2(size) for size in sizes[1:])
    (runs, silos, records), dim = (len(clips), *x.shape[:2]), points[0].shape[-1]
    own = points[0].dim() == 3
    drawn = weight.dim() == 3
    width = triton.cdiv(inputs + 1, 4) * 4
    y = y.contiguous()
    weight = weight.float().contiguous()
    x = x.flatten(2).transpose(1, 2)
    length = square(x[:, None])[:, 0].add_(1)
    # a bias is the weight of an input that is always 1; columns are filled up for the products'
    # sake
    a = functional.pad(x.masked_fill(~(length < 1e30)[:, None], 0), (0, -records % 32))
    a = torch.cat(
        [a, torch.ones_like(a[:, :1]), a.new_zeros(silos, width - inputs - 1, a.shape[2])], 1
    )
    out = torch.zeros(runs, silos, dim, device=x.device)
    held = max(1, 4 * hidden * silos)  # bytes of one number of each hidden unit and silo in one run
    many = max(32, min(a.shape[2], memory // (held * len(points)) // 32 * 32))
    step = max(1, memory // (held * (len(points) * many + 2 * width)))
    for j in range(0, runs if out.numel() and records else 0, step):
        part = slice(j, j + step)
        here = [p[part].contiguous() for p in points]
        some = len(clips[part])
        for start in range(0, a.shape[2], many):
            of = a[:, :, start : start + many]
            flows = [_first_layer(p, of, sizes, places) for p in here]
            pieces = triton.cdiv(of.shape[2], MOST)
            tail = torch.empty(pieces, some, silos, outputs, hidden + 1, device=x.device)
            _between[(some * silos, pieces)](
                *(
                    flows[0],
                    flows[-1],
                    here[0],
                    here[-1],
                    y,
                    weight[part] if drawn else weight,
                    length,
                    clips[part].contiguous(),
                    tail,
                ),
                *(
                    some,
                    silos,
                    records,
                    start,
                    of.shape[2],
                    triton.cdiv(of.shape[2], pieces * 32) * 32,
                ),
                *(dim * silos if own else dim, dim if own else 0, records * silos if drawn else 0),
                *(
                    *places[2:],
                    hidden,
                    outputs,
                    units,
                    classes,
                    min(32, 2048 // (units * len(points))),
                    len(points) > 1,
                ),
                num_warps=1,
            )
            first = (
                torch.bmm(flows[0], of.transpose(1, 2))
                .view(silos, some, hidden, width)
                .transpose(0, 1)
            )
            last = tail.sum(0, dtype=torch.float64)
            for place, found in zip(
                places,
                (first[..., :inputs], first[..., inputs], last[..., :hidden], last[..., hidden]),
                strict=True,
            ):
                found = found.flatten(2)
                out[part, :, place : place + found.shape[2]] += found
    return out


def _first_layer(point: Tensor, a: Tensor, sizes: Sequence[int], places: Sequence[int]) -> Tensor:
    """The outputs (S, J h, n) of the first layer for inputs a (S, i, n), the last of them the
    bias's and zeros.
    """
    inputs, hidden, _ = sizes
    if point.dim() == 2:
        point = point[None]
    else:
        point = point.transpose(0, 1)
    weight, bias = (
        point[..., place : place + hidden * size]
        for place, size in zip(places, (inputs, 1), strict=False)
    )
    rows = torch.cat([weight.unflatten(-1, (hidden, inputs)), bias[..., None]], -1)
    return torch.bmm(
        functional.pad(rows, (0, a.shape[1] - inputs - 1)).flatten(1, 2).expand(len(a), -1, -1), a
    )


MOST = 512
"""Records that one program takes, as many at a time as registers hold."""


@triton.jit
def _between(
    z,
    z2,
    w,
    reference,
    y,
    weight,
    length,
    clip,
    tail,
    runs,
    silos,
    records,
    start,
    columns,
    piece,
    of_run,
    of_silo,
    weights_of_run,
    SECOND: tl.constexpr,
    SECOND_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    UNITS: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCK: tl.constexpr,
    DIFFERENCE: tl.constexpr,
):
    """From the outputs z (S, J, h, n) of the first layer, and z2 at the reference, to their clipped
    gradients, which take the place of z.
    """
    cell = tl.program_id(0).to(tl.int64)
    run = cell % runs
    silo = cell // runs
    h = tl.arange(0, UNITS)
    o = tl.arange(0, CLASSES)
    point = w + run * of_run + silo * of_silo
    other = reference + run * of_run + silo * of_silo
    limit = tl.load(clip + run)
    by_second = tl.zeros((CLASSES, UNITS), tl.float32)
    by_bias = tl.zeros((CLASSES,), tl.float32)
    for first in range(
        tl.program_id(1) * piece, tl.minimum((tl.program_id(1) + 1) * piece, columns), BLOCK
    ):
        n = first + tl.arange(0, BLOCK)
        at = silo * records + start + n
        there = start + n < records
        share = tl.load(weight + run * weights_of_run + at, mask=there, other=0.0)
        there &= share != 0
        label = tl.load(y + at, mask=there, other=-1)
        size1 = tl.load(length + at, mask=there, other=0.0)
        place = (cell * HIDDEN + h[:, None]) * columns + n[None, :]
        inside = (h < HIDDEN)[:, None] & (n < columns)[None, :]
        hidden = tl.maximum(
            tl.load(z + place, mask=inside, other=0.0), 0.0, propagate_nan=tl.PropagateNan.ALL
        )
        e2 = _slopes(point, hidden, label, h, o, SECOND, SECOND_BIAS, HIDDEN, OUTPUTS)
        e1 = _back(point, hidden, e2, h, o, SECOND, HIDDEN, OUTPUTS)
        if DIFFERENCE:
            size2 = _exact(hidden, hidden)
        else:
            size2 = _length(hidden, 0)
        sound = (size1 < 1e30) & (size2 < 1e30)
        if DIFFERENCE:
            hidden2 = tl.maximum(
                tl.load(z2 + place, mask=inside, other=0.0), 0.0, propagate_nan=tl.PropagateNan.ALL
            )
            f2 = _slopes(other, hidden2, label, h, o, SECOND, SECOND_BIAS, HIDDEN, OUTPUTS)
            e1 -= _back(other, hidden2, f2, h, o, SECOND, HIDDEN, OUTPUTS)
            e2 -= f2
            rise = hidden - hidden2
            rise2 = _exact(rise, rise)
            size = _length(e1, 0) * size1 + _exact(e2, e2) * (size2 + 1) + rise2 * _exact(f2, f2)
            cross = _exact(hidden, rise) * _exact(e2, f2)
            norm = (
                tl.sqrt(tl.maximum(size * (1 + 1e-13) + 2 * cross, 0.0))
                + tl.sqrt(size) * 9.5367431640625e-07
            )
            sound &= rise2 < 1e30
        else:
            norm = tl.sqrt(_length(e1, 0) * size1 + _length(e2, 0) * (size2 + 1))
        scale = limit / tl.maximum(norm, tl.maximum(limit, 1e-19))
        sound &= (norm < 1e300) & (scale >= 1.1754943508222875e-38)
        scale = scale.to(tl.float32) * share
        tl.store(z + place, tl.where(sound[None, :], e1 * scale[None, :], 0.0), mask=inside)
        hidden = tl.where(sound[None, :], hidden, 0.0)
        e2 = tl.where(sound[None, :], e2 * scale[None, :], 0.0)
        by_bias += tl.sum(e2, 1)
        for k in tl.range(OUTPUTS, loop_unroll_factor=2):
            found = _row(e2, o, k)[None, :] * hidden
            if (
                DIFFERENCE
            ):  # a record's two terms may be long and cancel: they are added before records are
                found += tl.where(
                    sound[None, :], _row(f2 * scale[None, :], o, k)[None, :] * rise, 0.0
                )
            by_second += tl.where(o[:, None] == k, tl.sum(found, 1)[None, :], 0.0)
    into = tail + ((tl.program_id(1) * runs + run) * silos + silo) * (OUTPUTS * (HIDDEN + 1))
    tl.store(
        into + o[:, None] * (HIDDEN + 1) + h[None, :],
        by_second,
        mask=(o < OUTPUTS)[:, None] & (h < HIDDEN)[None, :],
    )
    tl.store(into + o * (HIDDEN + 1) + HIDDEN, by_bias, mask=o < OUTPUTS)


@triton.jit
def _row(u, o, k):
    """Row k of u."""
    return tl.sum(tl.where(o[:, None] == k, u, 0.0), 0)


@triton.jit
def _slopes(
    point,
    hidden,
    label,
    h,
    o,
    SECOND: tl.constexpr,
    SECOND_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """The gradients (o, n) of the loss by the outputs, for hidden units (h, n); none for a label
    that no output has.
    """
    output = (
        tl.zeros((o.shape[0], label.shape[0]), tl.float32)
        + tl.where(o < OUTPUTS, 0.0, float("-inf"))[:, None]
    )
    for k in tl.range(OUTPUTS, loop_unroll_factor=2):
        row = tl.load(point + SECOND + k * HIDDEN + h, mask=h < HIDDEN, other=0.0)
        found = tl.sum(row[:, None] * hidden, 0) + tl.load(point + SECOND_BIAS + k)
        output = tl.where(o[:, None] == k, found[None, :], output)
    hit = ((o[:, None] == label[None, :]) & (o < OUTPUTS)[:, None]).to(tl.float32)
    chance = tl.exp(output - tl.max(output, 0)[None, :])
    return (chance / tl.sum(chance, 0)[None, :] - hit) * tl.sum(hit, 0)[None, :]


@triton.jit
def _back(
    point, hidden, e2, h, o, SECOND: tl.constexpr, HIDDEN: tl.constexpr, OUTPUTS: tl.constexpr
):
    """The gradients (h, n) by the hidden units' inputs, from those by the outputs."""
    e1 = tl.zeros_like(hidden)
    for k in tl.range(OUTPUTS, loop_unroll_factor=2):
        row = tl.load(point + SECOND + k * HIDDEN + h, mask=h < HIDDEN, other=0.0)
        e1 += row[:, None] * _row(e2, o, k)[None, :]
    return tl.where(hidden > 0, e1, 0.0)


@triton.jit
def _length(u, axis: tl.constexpr):
    """||u||^2, with what squares may have lost to underflow."""
    return tl.sum(u * u, axis).to(tl.float64) + u.shape[axis] * 1.1754943508222875e-38


@triton.jit
def _exact(u, v):
    """u.v over rows in float64, where products of float32 numbers are exact: they are about to
    cancel.
    """
    return tl.sum(u.to(tl.float64) * v.to(tl.float64), 0)
