"""Sum clipped per-record gradients for many runs and silos at once.

In a simulation this computes every Grad and GradDiff query.

ENGINES are tried in order, and the first that supports a task computes it:

- `native`, in C: chains of Linear and ReLU, also behind convolutions, and sequence models.
- `ghost`: chains of Linear and element-wise modules.
- `structured`: convolutional and sequence models of known modules.
- `records`: every model.

The engines in torch also run on a GPU.

Inside, the axes are (S, J, features, n): silos, runs, features, records. Records come last, so that
sums over few features vectorise. A norm is taken of exactly the terms that are summed. Where terms
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
"""The engines that need no compiled code."""

ENGINES: tuple[Engine, ...] = (Native(), *IN_TORCH)
"""All engines, the fastest first. The last supports everything."""

# At first, glibc returns freed blocks to the system, and each call has to fault its temporaries in
# again (1,600 pages for 25 silos of 300 records, a third of the time). After a block of nearly
# 32 MiB has once been freed, it keeps them. The block is never touched.
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
    """Return, for each run and silo, the sum over records of weight * g * min(1, clip / ||g||).

    The result has the shape (J, S, d). g is a record's gradient of f0 at w, all parameters as one
    vector. With `reference`, g is grad f0(w, x) - grad f0(reference, x). With a `limit` (a number
    or (J, 1)) each of these two gradients is clipped to it first.

    - w is (J, d), or (J, S, d) if each silo has its own point.
    - x is (S, n, *features) and y is (S, n, *target).
    - weight is (S, n) or (J, S, n), and 0 for records that do not take part.
    - clip is a number or (J, 1). inf clips nothing.
    - memory is about how many bytes temporaries take.

    Raise BadInput for other shapes, types or clips.

    Formal guarantees. A record contributes a vector of norm <= clip * (1 + CLIP_TOLERANCE). It
    contributes exactly zero if its gradient is zero or not finite, or if clip is 0. A record of
    weight 0 may have any values, NaN too, and changes nothing. A number beyond LIMITS counts as not
    finite, or as 0.
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
    """Return whether no difference of two gradients within the limit is longer than the clip.

    The sum of differences is then one sum minus another.
    """
    clips = torch.as_tensor(clip, device=w.device)
    limits = torch.as_tensor(limit, device=w.device)
    return bool((clips >= 2 * limits).all())


def choose(task: Task, engines: Sequence[Engine] = ENGINES) -> Engine:
    """Return the first engine that supports the task."""
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
    """Return the arguments of `clipped_sum` as the engines take them.

    Raise BadInput for arguments that no engine could use.
    """
    points = [w]
    if reference is not None:
        points.append(reference)
    _refuse_unusable(points, x, y, weight, clip)
    smallest = LIMITS[w.dtype][1]
    clips = torch.as_tensor(clip, dtype=torch.float64, device=w.device).reshape(-1, 1)
    clips = torch.where(clips >= smallest, clips.clamp(max=1e300), 0).expand(w.shape[0], 1)
    split = None
    if x.dim() == 3:
        split = behind(problem)
    if split and x.shape[:2].numel() * split[0].width * w.dtype.itemsize <= memory:
        # The fixed features are computed once for all runs, and the rest is a chain.
        shapes, problem = split
        x = shapes(x.to(w.dtype))
    limits = None
    if limit is not None and reference is not None:
        limits = torch.as_tensor(limit, dtype=torch.float64, device=w.device).reshape(-1, 1)
        limits = limits.clamp(max=1e300).expand(w.shape[0], 1)
    return Task(problem, points, x, y, weight, clips, memory, limits)


def _refuse_unusable(
    points: list[Tensor], x: Tensor, y: Tensor, weight: Tensor, clip: Number
) -> None:
    """Raise BadInput for shapes, types, clips or settings that no engine could use."""
    w = points[0]
    runs = w.shape[0]
    silos, records = x.shape[:2]
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
