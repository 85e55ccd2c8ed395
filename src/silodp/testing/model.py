"""Says whether a model and its loss are clipped record by record, against a loop over records that
shares no code with the engines.

For anyone with a model or loss of their own, for authors of a new engine or layer rule, and for the
tests here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from silodp.core.numbers import CLIP_TOLERANCE, Number
from silodp.core.problem.problem import Problem
from silodp.core.problem.trial import try_loss, try_model
from silodp.engine.clipping import clipped_sum
from silodp.testing.sentence import one_sentence

MOVES = tuple(10.0**-k for k in range(7))
"""Relative moves ||w - reference|| / ||w|| at which a clipped difference is measured."""

BAD = (0.0, 1e6, -1e12, 1e30, torch.nan, torch.inf, -torch.inf)
"""What every feature of a bad record is set to."""


def check_model(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    *,
    outputs: int | None = None,
    engine: Callable[..., Tensor] = clipped_sum,
    seed: int = 0,
    tolerance: float = 1e-4,
) -> None:
    """Says whether a model and loss of yours are clipped record by record: raises AssertionError
    with one sentence if not.

    `engine` must sum the clipped whole gradient, and gradient difference, of each record of
    `problem`; `outputs` is the number that the model must have, if you say it.

    x (S, n, *features) and y (S, n, *target) are some finite records of two silos or more; a
    handful is enough, since a loop visits each. Checked: that model and loss run, give one finite
    number per record, and do not mix records; equality with that loop in float64; weights, padding
    and leading axes; clips 0, inf and one for each run; norms of single records at relative moves
    from 1 to 1e-6; and, for floating features, records of zeros, huge numbers, NaN and inf.
    """
    with one_sentence(type(problem.model).__name__):
        _check_alone(problem, x.flatten(0, 1), y.flatten(0, 1), outputs)
        _check_engine(problem, x, y, engine, seed, tolerance)


def _check_alone(problem: Problem, x: Tensor, y: Tensor, outputs: int | None) -> None:
    """What a run refuses is refused here, in the same words."""
    shape = tuple(try_model(problem, x, f"the model {type(problem.model).__name__}").shape)
    assert outputs is None or shape[1:] == (outputs,), (
        f"the model gives outputs of shape {shape}, not {(len(x), outputs)}"
    )
    try_loss(
        problem, x, y, f"the loss {getattr(problem.loss, '__name__', type(problem.loss).__name__)}"
    )


def _check_engine(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    engine: Callable[..., Tensor],
    seed: int,
    tolerance: float,
) -> None:
    w = problem.initial([seed, seed + 1]).to(x.device, x.dtype if x.is_floating_point() else None)
    random = torch.Generator().manual_seed(seed)
    direction = torch.randn(w.shape, generator=random, dtype=torch.float64).to(w)
    direction *= w.norm(dim=-1, keepdim=True) / direction.norm(dim=-1, keepdim=True)
    for reference in (None, w + 0.1 * direction):
        case = _Case(engine, problem, w, reference, x, y)
        _check_loop(case, tolerance)
        _check_weights(case)
        _check_leading_axes(case, tolerance)
        _check_clips(case)
        if x.is_floating_point():
            _check_bad_records(case)
    for move in MOVES:
        _check_norms(
            _Case(engine, problem, w, w + move * direction, x, y), f"relative move {move:g}"
        )


def record_gradients(problem: Problem, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of each record at one point w (d,): (S, n, d) in float64, by plain autograd on
    one record after the other.
    """
    model = copy.deepcopy(problem.model).to(w.device).double()
    parameters = [p for p in model.parameters() if p.requires_grad]
    vector_to_parameters(w.double(), parameters)
    rows = []
    for record, target in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
        output = model(record[None].double() if x.is_floating_point() else record[None])
        found = torch.autograd.grad(
            problem.loss(output, target[None]).sum(),
            parameters,
            allow_unused=True,
            materialize_grads=True,
        )
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows).unflatten(0, x.shape[:2])


@dataclass(frozen=True)
class _Case:
    engine: Callable[..., Tensor]
    problem: Problem
    w: Tensor
    reference: Tensor | None
    x: Tensor
    y: Tensor

    def __str__(self) -> str:
        if self.reference is None:
            return "Grad"
        return "GradDiff"

    @property
    def ones(self) -> Tensor:
        return torch.ones(self.x.shape[:2], dtype=self.w.dtype, device=self.w.device)

    def sum(self, weight: Tensor, clip: Number) -> Tensor:
        return self.engine(
            self.problem, self.w, self.x, self.y, weight, clip, reference=self.reference
        )

    @cached_property
    def gradients(self) -> Tensor:
        """(J, S, n, d), not clipped."""
        found = torch.stack([record_gradients(self.problem, w, self.x, self.y) for w in self.w])
        if self.reference is None:
            return found
        return found - torch.stack(
            [record_gradients(self.problem, w, self.x, self.y) for w in self.reference]
        )

    def loop(self, clip: float) -> Tensor:
        """(J, S, d): each record's gradient clipped, a record that is not finite left out, the rest
        summed.
        """
        norm = self.gradients.norm(dim=-1, keepdim=True)
        clipped = torch.where(norm > clip, self.gradients * (clip / norm), self.gradients)
        return torch.where(norm.isfinite(), clipped, 0).sum(2)

    def at(self, runs: slice, silos: slice) -> _Case:
        """The same with some of the runs and silos."""
        if self.reference is None:
            reference = None
        else:
            reference = self.reference[runs]
        return replace(self, w=self.w[runs], reference=reference, x=self.x[silos], y=self.y[silos])

    def median(self) -> float:
        """A clip that some records feel and some do not."""
        return float(self.gradients.norm(dim=-1).median())


def _check_loop(case: _Case, tolerance: float) -> None:
    median = case.median()
    for clip in (torch.inf, 2 * median, median, median / 10):
        fast = case.sum(case.ones, clip)
        slow = case.loop(clip)
        assert fast.shape == slow.shape, (
            f"{case}: shape {tuple(fast.shape)} instead of (J, S, d) = {tuple(slow.shape)}"
        )
        assert not fast.requires_grad, f"{case}: the result carries a graph"
        _assert_close(
            fast, slow, tolerance, f"{case}, clip {clip:g}: the sum is off from a loop over records"
        )


def _check_weights(case: _Case) -> None:
    clip = case.median()
    keep = torch.zeros_like(case.ones)
    keep[:, ::2] = 1
    keep[0, 1:] = 0
    part = case.sum(keep, clip)
    junk = case.x.clone()
    junk[keep == 0] = torch.nan if junk.is_floating_point() else 0
    assert torch.equal(part, replace(case, x=junk).sum(keep, clip)), (
        f"{case}: records of weight 0 change the sum when they hold NaN"
    )
    both = part + case.sum(1 - keep, clip)
    assert torch.allclose(both, case.sum(case.ones, clip), rtol=1e-4, atol=1e-5 * clip), (
        f"{case}: sums over two halves do not add up"
    )
    by_run = torch.stack([keep, 1 - keep])
    swapped = torch.stack([part[0], case.sum(1 - keep, clip)[1]])
    assert torch.allclose(case.sum(by_run, clip), swapped, rtol=1e-4, atol=1e-5 * clip), (
        f"{case}: weights (J, S, n) are not each run's own"
    )


def _check_leading_axes(case: _Case, tolerance: float) -> None:
    clip = case.median()
    whole = case.sum(case.ones, clip)
    clips = torch.tensor([[clip], [clip / 3]], dtype=torch.float64, device=case.w.device)
    by_run = case.sum(case.ones, clips)
    for j in range(len(case.w)):
        alone = case.at(slice(j, j + 1), slice(None))
        _assert_close(
            whole[j : j + 1],
            alone.sum(case.ones, clip),
            tolerance,
            f"{case}: run {j} among others differs from run {j} alone",
        )
        _assert_close(
            by_run[j : j + 1],
            alone.sum(case.ones, float(clips[j])),
            tolerance,
            f"{case}: run {j} is not clipped at its own clip",
        )
    for s in range(len(case.x)):
        alone = case.at(slice(None), slice(s, s + 1))
        _assert_close(
            whole[:, s : s + 1],
            alone.sum(alone.ones, clip),
            tolerance,
            f"{case}: silo {s} among others differs from it alone",
        )
    scale = 1 + 0.1 * torch.arange(len(case.x), dtype=case.w.dtype, device=case.w.device)[:, None]
    points = [None if p is None else p[:, None] * scale for p in (case.w, case.reference)]
    spread = case.engine(
        case.problem, points[0], case.x, case.y, case.ones, clip, reference=points[1]
    )
    for s in range(len(case.x)):
        w, reference = (None if p is None else p[:, s] for p in points)
        assert w is not None
        alone = replace(case.at(slice(None), slice(s, s + 1)), w=w, reference=reference)
        _assert_close(
            spread[:, s : s + 1],
            alone.sum(alone.ones, clip),
            tolerance,
            f"{case}: with a point for each silo, silo {s} differs",
        )


def _assert_close(left: Tensor, right: Tensor, tolerance: float, sentence: str) -> None:
    error = float((left - right).norm() / right.norm().clamp_min(1e-30))
    assert error <= tolerance, f"{sentence} by {error:.1e} of its norm"


def _check_clips(case: _Case) -> None:
    assert not case.sum(case.ones, 0.0).any(), f"{case}: clip 0 does not give exactly zero"
    mixed = case.sum(case.ones, torch.tensor([[0.0], [torch.inf]], device=case.w.device))
    assert not mixed[0].any(), f"{case}: clip 0 of one run does not give exactly zero"
    assert mixed[1].isfinite().all(), f"{case}: clip inf gives numbers that are not finite"
    if case.reference is not None:
        assert not replace(case, reference=case.w).sum(case.ones, 1.0).any(), (
            "GradDiff: no move does not give exactly zero"
        )
    _check_norms(case, "whole move")


def _check_norms(case: _Case, where: str) -> None:
    """Each record as a silo of its own contributes a vector within the clip, at clips from far
    below the norms to above most of them.
    """
    single = replace(case, x=case.x.flatten(0, 1)[:, None], y=case.y.flatten(0, 1)[:, None])
    longest = float(single.sum(single.ones, torch.inf).double().norm(dim=-1).max())
    for clip in [longest * share for share in (1e-3, 0.1, 0.5, 0.999) if longest > 0]:
        norm = float(single.sum(single.ones, clip).double().norm(dim=-1).max())
        assert norm <= clip * (1 + CLIP_TOLERANCE), (
            f"{case}, {where}: a record contributes norm {norm:.9g} under clip {clip:.9g}"
        )


def _check_bad_records(case: _Case) -> None:
    clip = case.median()
    alone = torch.zeros_like(case.ones)
    alone[0, 0] = 1
    for value in BAD:
        x = case.x.clone()
        x[0, 0] = value
        bad = replace(case, x=x)
        one = bad.sum(alone, clip)
        all_ = bad.sum(bad.ones, clip)
        norm = float(one.double().norm(dim=-1).max())
        assert norm <= clip * (1 + CLIP_TOLERANCE), (
            f"{case}: a record of {value} contributes norm {norm:.9g} under clip {clip:.9g}"
        )
        assert all_.isfinite().all(), f"{case}: a record of {value} makes the sum not finite"
        _assert_close(
            all_ - one,
            bad.sum(1 - alone, clip),
            1e-4,
            f"{case}: a record of {value} changes what the others contribute,",
        )
        first = replace(bad, x=x[:1, :1], y=case.y[:1, :1]).loop(torch.inf)
        for j in range(len(case.w)):
            if not first[j].any():
                assert not one[j].any(), (
                    f"{case}: a record of {value} has no finite gradient other than 0 and "
                    f"contributes {norm:.3g}"
                )
