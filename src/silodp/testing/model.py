"""Check that a model and its loss are clipped record by record.

The reference is a loop over records that shares no code with the engines. The check is for your own
models and losses, for new engines and layer rules, and for the tests of silodp.
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
"""The relative moves ||w - reference|| / ||w|| at which a clipped difference is measured."""

BAD = (0.0, 1e6, -1e12, 1e30, torch.nan, torch.inf, -torch.inf)
"""The values of a bad record, one for all features."""


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
    """Check that a model and loss of yours are clipped record by record.

    Raise AssertionError with one sentence if something is wrong.

    - `engine` must sum the clipped gradient, and gradient difference, of each record of `problem`.
    - `outputs` is the number of outputs that the model must have, if you give it.
    - x (S, n, *features) and y (S, n, *target) are some finite records of two silos or more. A
      handful is enough, since a loop visits each.

    The check covers these things:

    1. Model and loss run, give one finite number per record, and do not mix records.
    2. Sums equal those of the loop in float64, with weights, padding and leading axes.
    3. Clips may be 0, inf, or one for each run.
    4. Single records have norms within the clip, at relative moves from 1 to 1e-6.
    5. With floating features, records of zeros, huge numbers, NaN and inf do no harm.
    """
    with one_sentence(type(problem.model).__name__):
        _check_alone(problem, x.flatten(0, 1), y.flatten(0, 1), outputs)
        _check_engine(problem, x, y, engine, seed, tolerance)


def _check_alone(problem: Problem, x: Tensor, y: Tensor, outputs: int | None) -> None:
    """Check model and loss as a run does, with the same messages."""
    shape = tuple(try_model(problem, x, f"the model {type(problem.model).__name__}").shape)
    assert outputs is None or shape[1:] == (outputs,), (
        f"the model gives outputs of shape {shape}, not {(len(x), outputs)}"
    )
    loss = getattr(problem.loss, "__name__", type(problem.loss).__name__)
    try_loss(problem, x, y, f"the loss {loss}")


def _check_engine(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    engine: Callable[..., Tensor],
    seed: int,
    tolerance: float,
) -> None:
    """Check the engine against a loop over records."""
    w = problem.initial([seed, seed + 1]).to(x.device)
    if x.is_floating_point():
        w = w.to(x.dtype)
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
    """Return the gradient of each record at one point w (d,), (S, n, d) in float64.

    It is computed by plain autograd on one record after the other.
    """
    model = copy.deepcopy(problem.model).to(w.device).double()
    parameters = [p for p in model.parameters() if p.requires_grad]
    vector_to_parameters(w.double(), parameters)
    rows = []
    if x.is_floating_point():
        x = x.double()
    for record, target in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
        output = model(record[None])
        by_parameter = torch.autograd.grad(
            problem.loss(output, target[None]).sum(),
            parameters,
            allow_unused=True,
            materialize_grads=True,
        )
        rows.append(torch.cat([g.flatten() for g in by_parameter]))
    return torch.stack(rows).unflatten(0, x.shape[:2])


@dataclass(frozen=True)
class _Case:
    """An engine and what it sums, at one point or of differences."""

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
        """Return a weight of 1 for each record."""
        return torch.ones(self.x.shape[:2], dtype=self.w.dtype, device=self.w.device)

    def sum(self, weight: Tensor, clip: Number) -> Tensor:
        """Return the engine's sums."""
        return self.engine(
            self.problem, self.w, self.x, self.y, weight, clip, reference=self.reference
        )

    @cached_property
    def gradients(self) -> Tensor:
        """Return the gradients (J, S, n, d), not clipped."""
        here = torch.stack([record_gradients(self.problem, w, self.x, self.y) for w in self.w])
        if self.reference is None:
            return here
        there = [record_gradients(self.problem, w, self.x, self.y) for w in self.reference]
        return here - torch.stack(there)

    def loop(self, clip: float) -> Tensor:
        """Return (J, S, d): the sum of each record's clipped gradient.

        A record that is not finite is left out.
        """
        norm = self.gradients.norm(dim=-1, keepdim=True)
        clipped = torch.where(norm > clip, self.gradients * (clip / norm), self.gradients)
        return torch.where(norm.isfinite(), clipped, 0).sum(2)

    def at(self, runs: slice, silos: slice) -> _Case:
        """Return the case with some of the runs and silos."""
        if self.reference is None:
            reference = None
        else:
            reference = self.reference[runs]
        return replace(self, w=self.w[runs], reference=reference, x=self.x[silos], y=self.y[silos])

    def median(self) -> float:
        """Return a clip that shortens some records and leaves others."""
        return float(self.gradients.norm(dim=-1).median())


def _check_loop(case: _Case, tolerance: float) -> None:
    """Check sums at several clips against the loop."""
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
    """Check that weights select records, and that the others change nothing."""
    clip = case.median()
    keep = torch.zeros_like(case.ones)
    keep[:, ::2] = 1
    keep[0, 1:] = 0
    part = case.sum(keep, clip)
    junk = case.x.clone()
    if junk.is_floating_point():
        junk[keep == 0] = torch.nan
    else:
        junk[keep == 0] = 0
    assert torch.equal(part, replace(case, x=junk).sum(keep, clip)), (
        f"{case}: records of weight 0 change the sum when they are NaN"
    )
    both = part + case.sum(1 - keep, clip)
    assert torch.allclose(both, case.sum(case.ones, clip), rtol=1e-4, atol=1e-5 * clip), (
        f"{case}: sums over two halves do not add up"
    )
    by_run = torch.stack([keep, 1 - keep])
    swapped = torch.stack([part[0], case.sum(1 - keep, clip)[1]])
    assert torch.allclose(case.sum(by_run, clip), swapped, rtol=1e-4, atol=1e-5 * clip), (
        f"{case}: with weights (J, S, n), a run does not use its own"
    )


def _check_leading_axes(case: _Case, tolerance: float) -> None:
    """Check that runs, silos and points for each silo do not mix."""
    clip = case.median()
    together = case.sum(case.ones, clip)
    clips = torch.tensor([[clip], [clip / 3]], dtype=torch.float64, device=case.w.device)
    by_run = case.sum(case.ones, clips)
    for j in range(len(case.w)):
        alone = case.at(slice(j, j + 1), slice(None))
        _assert_close(
            together[j : j + 1],
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
            together[:, s : s + 1],
            alone.sum(alone.ones, clip),
            tolerance,
            f"{case}: silo {s} among others differs from it alone",
        )
    scale = 1 + 0.1 * torch.arange(len(case.x), dtype=case.w.dtype, device=case.w.device)[:, None]
    w = case.w[:, None] * scale
    if case.reference is None:
        reference = None
    else:
        reference = case.reference[:, None] * scale
    spread = case.engine(case.problem, w, case.x, case.y, case.ones, clip, reference=reference)
    for s in range(len(case.x)):
        alone = replace(case.at(slice(None), slice(s, s + 1)), w=w[:, s])
        if reference is not None:
            alone = replace(alone, reference=reference[:, s])
        _assert_close(
            spread[:, s : s + 1],
            alone.sum(alone.ones, clip),
            tolerance,
            f"{case}: with a point for each silo, silo {s} differs",
        )


def _assert_close(left: Tensor, right: Tensor, tolerance: float, sentence: str) -> None:
    """Raise AssertionError unless two sums agree to this relative tolerance."""
    error = float((left - right).norm() / right.norm().clamp_min(1e-30))
    assert error <= tolerance, f"{sentence} by {error:.1e} of its norm"


def _check_clips(case: _Case) -> None:
    """Check clips of 0 and inf, also for single runs, and a difference without a move."""
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
    """Check that each record contributes a vector within the clip.

    Each record is a silo. Clips are from far below the norms to above most of them.
    """
    single = replace(case, x=case.x.flatten(0, 1)[:, None], y=case.y.flatten(0, 1)[:, None])
    longest = float(single.sum(single.ones, torch.inf).double().norm(dim=-1).max())
    for clip in [longest * share for share in (1e-3, 0.1, 0.5, 0.999) if longest > 0]:
        norm = float(single.sum(single.ones, clip).double().norm(dim=-1).max())
        assert norm <= clip * (1 + CLIP_TOLERANCE), (
            f"{case}, {where}: a record contributes norm {norm:.9g} under clip {clip:.9g}"
        )


def _check_bad_records(case: _Case) -> None:
    """Check that a record with huge or unsound numbers harms no other record's sum."""
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
