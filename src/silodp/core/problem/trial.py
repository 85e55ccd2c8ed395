"""Try a user's own model and loss on made-up records, and report the fault in one sentence.

The records are made up, so a message may give the reason of a failure.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from silodp.core.differentiate import grad
from silodp.core.errors import BadInput
from silodp.core.problem.problem import Problem
from silodp.core.problem.task import Task

ROWS = 3
"""How many records a model is tried on."""
CLOSE = 1e-3
"""How far numbers may differ, relative to the largest.

A batch may be summed in another order than a single record.
"""
SIZES = (1e3, -1e3, 1e8, -1e8, 1e30, -1e30)
"""Factors of other records and outputs, which a memory of extremes would store."""
AWAY = 0.1
"""How far the second point is from the start.

A model is tried at both, because at a start of zeros everything looks alike.
"""


def made_up(rows: int, features: int) -> Tensor:
    """Return (rows, features) in [0, 1), the same numbers every time."""
    return torch.rand(rows, features, generator=torch.Generator().manual_seed(0))


def targets(task: Task, dtype: torch.dtype) -> Tensor:
    """Return every label of the task, or a few numbers."""
    if task.kind in ("regression", "count"):
        return torch.tensor([0.0, 1.0, task.most or 0.5], dtype=dtype)
    return torch.arange(task.classes or 2 * task.bins + 1)


def try_model(problem: Problem, x: Tensor, name: str) -> Tensor:
    """Return the outputs (N, ...) at the start for records x (N, ...).

    Raise BadInput if the model fails, if its outputs are not finite numbers, or if it mixes or
    remembers records.
    """
    start, away = _points(problem, x)
    with reporting(f"{name} cannot be run on records of {x[0].numel()} features"):
        at_start = _outputs(problem, start, x)
        together = _outputs(problem, away, x)
        alone = [_outputs(problem, away, row[None]) for row in x]
    if not all(
        isinstance(part, Tensor) and part.dim() and len(part) == rows
        for part, rows in [(together, len(x)), *((a, 1) for a in alone)]
    ):
        raise BadInput(
            f"{name} gives {_shape(together)} for {len(x)} records; it must give outputs (N, k) "
            "for N records"
        )
    if not bool(at_start.isfinite().all()):
        raise BadInput(
            f"{name} gives outputs that are not finite at the start; choose other starting "
            "parameters, because a run would learn nothing from such records"
        )
    if not _same(together, torch.cat(alone)):
        raise BadInput(
            f"{name} mixes records: it gives a record alone other outputs than in a batch; "
            "make each output depend on one record"
        )
    for size in SIZES:  # larger and smaller records than any before
        with contextlib.suppress(Exception), torch.no_grad():
            _outputs(problem, away, size * x)
    with reporting(f"{name} cannot be run twice"):
        again = _outputs(problem, away, x)
        back = _outputs(problem, away, x.flip(0)).flip(0)
    if not (_same(together, again) and _same(together, back)):
        raise BadInput(
            f"{name} remembers records: it gives other outputs after it has seen others; keep "
            "nothing between two calls"
        )
    with reporting(f"{name} {_SIDE}", _PLAIN):
        vmap(grad(lambda w, row: _outputs(problem, w, row[None]).sum()), (None, 0))(away, x)
    return at_start


def try_loss(problem: Problem, x: Tensor, y: Tensor, name: str, hint: str = "correct it") -> None:
    """Raise BadInput if the loss fails on one of the targets y (N, ...).

    It must also give one finite number per record, and must not mix or remember records. x has as
    many records as the model gets in one batch. They are repeated for further targets.
    """
    start, away = (
        _outputs(problem, w, x)[torch.arange(len(y)) % len(x)] for w in _points(problem, x)
    )
    width = "x".join(map(str, start.shape[1:])) or "1"
    if width == "1":
        outputs = "1 output"
    else:
        outputs = f"{width} outputs"
    single = []
    for output, target in zip(away, y, strict=True):
        what = f"{name} cannot be run on {_label(target)} of a model with {outputs}"
        with reporting(what, hint):
            single.append(problem.loss(output[None], target[None]))
        if not isinstance(single[-1], Tensor) or single[-1].shape not in ((), (1,)):
            raise BadInput(
                f"{name} gives {_shape(single[-1])} for one record; it must give one number per "
                "record, (N,) for outputs (N, k)"
            )
    for size in SIZES:  # larger and smaller outputs than any before
        with contextlib.suppress(Exception), torch.no_grad():
            problem.loss(size * away, y)
            problem.loss(size * away[:1], y[:1])
    for output, target, before in reversed(list(zip(away, y, single, strict=True))):
        with reporting(f"{name} cannot be run twice"):
            again = problem.loss(output[None], target[None])
        if not _same(again.reshape(()), before.reshape(())):
            raise BadInput(
                f"{name} remembers records: it gives another number after it has seen others; "
                "keep nothing between two calls"
            )
    with reporting(f"{name} {_SIDE}", _PLAIN):
        vmap(grad(problem.record_loss))(away, y)
        finite = vmap(problem.record_loss)(start, y).isfinite()
    # Labels must all work. Of numbers, some made-up ones may be outside what a loss accepts.
    if y.is_floating_point():
        usable = bool(finite.any())
    else:
        usable = bool(finite.all())
    if not usable:
        raise BadInput(
            f"{name} is not finite at the start on {_label(y[int(finite.int().argmin())])}; {hint}"
        )
    try:
        together = problem.loss(away, y)
    except Exception:  # a run gives it single records, and those work
        return
    if together.dim() and not (
        together.shape == y.shape[:1]
        and _same(together, torch.stack([one.reshape(()) for one in single]))
    ):
        raise BadInput(
            f"{name} mixes records: it gives {_shape(together)} for {len(y)} records, other "
            "than for each alone; it must give (N,)"
        )


@contextlib.contextmanager
def reporting(what: str, hint: str = "correct it") -> Iterator[None]:
    """Turn any error inside into a BadInput with what failed, why, and what to do."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of slow operations, not of wrong ones
            yield
    except BadInput:
        raise
    except Exception as error:
        why = " ".join(str(error).split())
        raise BadInput(
            f"{what} ({type(error).__name__}: {why[:200]}{'...' * (len(why) > 200)}); {hint}"
        ) from None


_SIDE = (
    "runs on one record, but cannot be differentiated for records side by side "
    "(torch.func.vmap), as a run does"
)
_PLAIN = (
    "use only tensor operations: no .item(), no `if` on a number, no random numbers, and a "
    "comparison with torch.arange(k) in place of one_hot"
)


def _points(problem: Problem, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the start, and a point away from it."""
    start = problem.initial([0])[0].to(x.device)
    if x.is_floating_point():
        start = start.to(x.dtype)
    direction = torch.randn(problem.dim, generator=torch.Generator().manual_seed(0))
    return start, start + AWAY * direction.to(start)


def _outputs(problem: Problem, w: Tensor, x: Tensor) -> Tensor:
    """Return the model's outputs (n, ...) at a point w (d,)."""
    return functional_call(problem.model, problem.split(w) | problem.constants(w), (x,))


def _same(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors agree up to rounding."""
    if left.shape != right.shape:
        return False
    far = CLOSE * float(right.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(left, right, rtol=0, atol=far, equal_nan=True)


def _shape(result: Any) -> str:
    """Return what a function returned, in words."""
    if isinstance(result, Tensor):
        return f"numbers of shape {tuple(result.shape)}"
    return type(result).__name__


def _label(target: Tensor) -> str:
    """Return a label or target, in words."""
    if not target.dim() and not target.is_floating_point():
        return f"label {int(target)}"
    return f"target {target.tolist()}"
