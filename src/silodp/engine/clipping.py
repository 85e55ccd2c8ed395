"""Sums of clipped per-record gradients for many runs and silos at once: what every Grad and
GradDiff query is computed by.

ENGINES are tried in order, and the first that supports a task computes it: `native` chains of
Linear and ReLU, also behind convolutions, in C; `ghost` chains of Linear and element-wise modules;
`structured` convolutional and sequence models of known modules; `records` every model. Those in
torch also run on a GPU.

Inside, the axes are (S, J, features, n): silos, runs, features, records. Records come last, so that
sums over few features vectorise. A norm is that of the very terms that are contributed; where terms
can cancel, it is taken in float64 and their rounding is added to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.numbers import Number
from silodp.core.problem.problem import Problem
from silodp.engine.ghost import Ghost
from silodp.engine.model import behind
from silodp.engine.native import Native
from silodp.engine.records import Records
from silodp.engine.structured import Structured
from silodp.engine.task import LIMITS, Engine, Task

IN_TORCH: tuple[Engine, ...] = (Ghost(), Structured(), Records())
"""Those that need nothing but what was installed."""

ENGINES: tuple[Engine, ...] = (Native(), *IN_TORCH)
"""All of them, the fastest first. The last supports everything."""

# glibc hands freed blocks back to the system, and each call would fault its temporaries in again
# (1,600 pages for 25 silos of 300 records, a third of the time), until a block of nearly 32 MiB has
# once been freed: from then on it keeps them. The block is never touched.
torch.empty(2**25 - 2**13, dtype=torch.uint8)


def clipped_sum(
    problem: Problem,
    w: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    clip: Number,
    *,
    reference: Tensor | None = None,
    limit: Number | None = None,
    memory: int = 2**28,
    engines: Sequence[Engine] = IN_TORCH,
) -> Tensor:
    """For each run and silo the sum over records of weight * g * min(1, clip / ||g||), of shape (J,
    S, d).

    g is a record's whole gradient of f0 at w, all parameters as one vector, or with `reference`
    grad f0(w, x) - grad f0(reference, x), where with a `limit` (a number or (J, 1)) each of the two
    is clipped to it first. w is (J, d), or (J, S, d) where each silo has a point of its own; x (S,
    n, *features); y (S, n, *target); weight (S, n) or (J, S, n), 0 for records that do not take
    part; clip a number or (J, 1), where inf clips nothing. Temporaries take about `memory` bytes.

    Formal guarantees: a record contributes a vector of norm <= clip * (1 + CLIP_TOLERANCE), and
    exactly zero where its gradient is zero or not finite, or clip is 0; a record of weight 0 may
    hold anything, NaN too, and changes nothing. What is beyond LIMITS counts as not finite, or 0.
    """
    if reference is not None and limit is not None and _never_longer(clip, limit, w):
        here, there = (
            clipped_sum(problem, point, x, y, weight, limit, memory=memory, engines=engines)
            for point in (w, reference)
        )
        return here.sub_(there)
    wanted = task(problem, w, x, y, weight, clip, reference=reference, limit=limit, memory=memory)
    return choose(wanted, engines).sum(wanted)


def _never_longer(clip: Number, limit: Number, w: Tensor) -> bool:
    """Whether no difference of two gradients within the limit is longer than the clip: it is then
    one of two sums.
    """
    return bool(
        (
            torch.as_tensor(clip, device=w.device) >= 2 * torch.as_tensor(limit, device=w.device)
        ).all()
    )


def choose(task: Task, engines: Sequence[Engine] = ENGINES) -> Engine:
    """The first that supports the task."""
    return next(engine for engine in engines if engine.supports(task))


def task(
    problem: Problem,
    w: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    clip: Number,
    *,
    reference: Tensor | None = None,
    limit: Number | None = None,
    memory: int = 2**28,
) -> Task:
    """The arguments of `clipped_sum` as the engines take them; raises BadInput for what none
    could.
    """
    points = [w] if reference is None else [w, reference]
    _refuse_unusable(points, x, y, weight, clip)
    smallest = LIMITS[w.dtype][1]
    if isinstance(clip, Tensor):
        clips = clip.to(w.device, torch.float64).reshape(-1, 1)
        clips = torch.where(clips >= smallest, clips.clamp(max=1e300), 0).expand(w.shape[0], 1)
    else:
        clips = torch.full(
            (w.shape[0], 1),
            min(clip, 1e300) if clip >= smallest else 0.0,
            dtype=torch.float64,
            device=w.device,
        )
    if (
        x.dim() == 3
        and (found := behind(problem))
        and x.shape[:2].numel() * found[0].width * w.dtype.itemsize <= memory
    ):
        # once for all runs, and the rest is a chain
        x = found[0](x.to(w.dtype))
        problem = found[1]
    if limit is None or reference is None:
        limits = None
    else:
        limits = torch.as_tensor(limit, dtype=torch.float64, device=w.device).reshape(-1, 1)
    if limits is None:
        limits = limits
    else:
        limits = limits.clamp(max=1e300).expand(w.shape[0], 1)
    return Task(problem, points, x, y, weight, clips, memory, limits)


def _refuse_unusable(
    points: list[Tensor], x: Tensor, y: Tensor, weight: Tensor, clip: Number
) -> None:
    w, (runs, silos, records) = points[0], (points[0].shape[0], *x.shape[:2])
    if w.dtype not in LIMITS:
        raise BadInput(f"w is {w.dtype}; use float32 or float64")
    if w.dim() not in (2, 3) or w.shape[1:-1] not in ((), (silos,)):
        raise BadInput(
            f"w has shape {tuple(w.shape)}; use (runs, parameters), or (runs, {silos} "
            "silos, parameters)"
        )
    if points[-1].shape != w.shape:
        raise BadInput(
            f"reference has shape {tuple(points[-1].shape)}; use that of w, {tuple(w.shape)}"
        )
    if y.shape[:2] != (silos, records) or weight.shape not in (
        (silos, records),
        (runs, silos, records),
    ):
        raise BadInput(
            f"y and weight have shapes {tuple(y.shape)} and {tuple(weight.shape)}; use "
            f"({silos}, {records}) as x has"
        )
    if isinstance(clip, Tensor):
        if clip.numel() not in (1, runs):
            raise BadInput(
                f"clip has shape {tuple(clip.shape)}; use a number, or one for each run in "
                f"shape ({runs}, 1)"
            )
    elif math.isnan(clip) or clip < 0:
        raise BadInput(f"clip is {clip}; use a number >= 0, or inf for no clipping")
    if torch.get_float32_matmul_precision() != "highest" or torch.is_autocast_enabled(
        w.device.type
    ):
        raise BadInput(
            "matrix products are set to reduced precision, which breaks clipping; use "
            "'highest' and no autocast"
        )
