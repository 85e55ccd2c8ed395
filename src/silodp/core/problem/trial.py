"""A model and a loss of a user's own are tried on made-up records as a run uses them; what is wrong
is said in one sentence.

No record of anybody is seen here, so that the reason of a failure may be told.
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
"""Records that a model is shown."""
CLOSE = 1e-3
"""Of the largest number: a batch may be summed in another order than a record alone."""
SIZES = (1e3, -1e3, 1e8, -1e8, 1e30, -1e30)
"""How many times as large other records and outputs are, that a memory of extremes would keep."""
AWAY = 0.1
"""How far from the start a model is tried too: at a start of zeros everything looks alike."""


def made_up(rows: int, features: int) -> Tensor:
    """(rows, features) in [0, 1), the same numbers every time."""
    return torch.rand(rows, features, generator=torch.Generator().manual_seed(0))


def targets(task: Task, dtype: torch.dtype) -> Tensor:
    """Every label that there is, or a few numbers."""
    if task.kind in ("regression", "count"):
        return torch.tensor([0.0, 1.0, task.most or 0.5], dtype=dtype)
    return torch.arange(task.classes or 2 * task.bins + 1)


def try_model(problem: Problem, x: Tensor, name: str) -> Tensor:
    """The outputs (N, ...) at the start for records x (N, ...); BadInput if they cannot be had, are
    no numbers, or mix records.
    """
    start, away = _points(problem, x)
    with said(f"{name} cannot be run on records of {x[0].numel()} features"):
        found, together = (_outputs(problem, w, x) for w in (start, away))
        alone = [_outputs(problem, away, row[None]) for row in x]
    if not all(
        isinstance(part, Tensor) and part.dim() and len(part) == rows
        for part, rows in [(together, len(x)), *((a, 1) for a in alone)]
    ):
        raise BadInput(
            f"{name} gives {_shape(together)} for {len(x)} records; it should give outputs "
            "(N, k) for N records"
        )
    if not bool(found.isfinite().all()):
        raise BadInput(
            f"{name} gives outputs that are not finite at the start; a run would learn "
            "nothing from such records"
        )
    if not _same(together, torch.cat(alone)):
        raise BadInput(
            f"{name} mixes records: it gives a record alone other outputs than in a batch; "
            "let each follow from its own record"
        )
    for size in SIZES:  # larger and smaller records than any before
        with contextlib.suppress(Exception), torch.no_grad():
            _outputs(problem, away, size * x)
    with said(f"{name} cannot be run twice"):
        again = _outputs(problem, away, x)
        back = _outputs(problem, away, x.flip(0)).flip(0)
    if not (_same(together, again) and _same(together, back)):
        raise BadInput(
            f"{name} remembers records: it gives other outputs once it has seen others; keep "
            "nothing between two calls"
        )
    with said(f"{name} {_SIDE}", _PLAIN):
        vmap(grad(lambda w, row: _outputs(problem, w, row[None]).sum()), (None, 0))(away, x)
    return found


def try_loss(problem: Problem, x: Tensor, y: Tensor, name: str, hint: str = "mend it") -> None:
    """BadInput if the loss fails on one of the targets y (N, ...), is not one finite number per
    record, or mixes records.

    As many records x as the model is to be shown: they are repeated for further targets.
    """
    start, away = (
        _outputs(problem, w, x)[torch.arange(len(y)) % len(x)] for w in _points(problem, x)
    )
    width = "x".join(map(str, start.shape[1:])) or "1"
    single = []
    for output, target in zip(away, y, strict=True):
        with said(
            (
                f"{name} cannot be run on {_label(target)} of a model with {width} "
                f"output{'s' * (width != '1')}"
            ),
            hint,
        ):
            single.append(problem.loss(output[None], target[None]))
        if not isinstance(single[-1], Tensor) or single[-1].shape not in ((), (1,)):
            raise BadInput(
                f"{name} gives {_shape(single[-1])} for one record; it should give one "
                "number per record, (N,) for outputs (N, k)"
            )
    for size in SIZES:  # larger and smaller outputs than any before
        with contextlib.suppress(Exception), torch.no_grad():
            problem.loss(size * away, y)
            problem.loss(size * away[:1], y[:1])
    for output, target, before in reversed(list(zip(away, y, single, strict=True))):
        with said(f"{name} cannot be run twice"):
            again = problem.loss(output[None], target[None])
        if not _same(again.reshape(()), before.reshape(())):
            raise BadInput(
                f"{name} remembers records: it gives another number once it has seen others; "
                "keep nothing between two calls"
            )
    with said(f"{name} {_SIDE}", _PLAIN):
        vmap(grad(problem.record_loss))(away, y)
        finite = vmap(problem.record_loss)(start, y).isfinite()
    if not bool(finite.any() if y.is_floating_point() else finite.all()):
        raise BadInput(
            f"{name} is not finite at the start on {_label(y[int(finite.int().argmin())])}; {hint}"
        )
    try:
        together = problem.loss(away, y)
    except Exception:  # a run shows it single records, and those it takes
        return
    if together.dim() and not (
        together.shape == y.shape[:1]
        and _same(together, torch.stack([one.reshape(()) for one in single]))
    ):
        raise BadInput(
            f"{name} mixes records: it gives {_shape(together)} for {len(y)} records, "
            "other than for each alone; it should give (N,)"
        )


@contextlib.contextmanager
def said(what: str, hint: str = "mend it") -> Iterator[None]:
    """Whatever fails inside is a BadInput: what failed, why in a line, and what would be right."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of what is slow, not wrong
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
    "use tensor operations alone: no .item(), no `if` on a number, no draw, and a comparison "
    "with torch.arange(k) in place of one_hot"
)


def _points(problem: Problem, x: Tensor) -> tuple[Tensor, Tensor]:
    """The start, and a point away from it."""
    start = problem.initial([0])[0].to(x.device, x.dtype if x.is_floating_point() else None)
    return start, start + AWAY * torch.randn(
        problem.dim, generator=torch.Generator().manual_seed(0)
    ).to(start)


def _outputs(problem: Problem, w: Tensor, x: Tensor) -> Tensor:
    return functional_call(problem.model, problem.split(w) | problem.constants(w), (x,))


def _same(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    far = CLOSE * float(right.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(left, right, rtol=0, atol=far, equal_nan=True)


def _shape(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"numbers of shape {tuple(found.shape)}"
    return type(found).__name__


def _label(target: Tensor) -> str:
    if not target.dim() and not target.is_floating_point():
        return f"label {int(target)}"
    return f"target {target.tolist()}"
