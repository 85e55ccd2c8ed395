"""A personal model of one silo: the shared model, recalibrated, fitted further, or not used at all,
in the proportions that cross-validation inside the silo supports.

Each candidate minimises the loss of the silo's own records plus a penalty. With z the outputs of
the shared model, its outputs are a z + b + d(x):

| family       | a           | b           | d                  |
|--------------|-------------|-------------|--------------------|
| shared       | 1           | 0           | 0                  |
| recalibrated | near 1      | near 0      | 0                  |
| pulled       | near 1      | near 0      | penalised, strength |
| alone        | 0           | free        | penalised, strength |

Penalties are on coefficients of features of variance 1 in this silo. `choose` explains how the
candidates are weighted.

What comes out has seen records without noise. It is not private, and neither is any figure of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from silodp.core.problem.losses import Huber, squared_error
from silodp.core.problem.problem import Problem
from silodp.silo.fits.head import Head, design_of, find_head, likelihood, outputs_at
from silodp.silo.fits.newton import minimise
from silodp.silo.fits.rows import Rows

SHARED = "shared"
RECALIBRATED = "recalibrated"
PULLED = "pulled"
ALONE = "alone"
FAMILIES = (SHARED, RECALIBRATED, PULLED, ALONE)
STRENGTHS = {PULLED: (3.0, 10.0, 30.0, 100.0, 300.0), ALONE: (1.0, 3.0, 10.0, 30.0, 100.0)}
FEW_STRENGTHS = {PULLED: (10.0, 100.0), ALONE: (3.0, 30.0)}
"""Of fits without Newton's method, which take longer."""
SLOPE = 2.0
INTERCEPT = 1.0
FREE = 0.1
FIXED = 1e8
"""Penalties of a and b: as strong as so many records, and of what must not move at all."""
CAUTION = 0.5
"""The part of a standard error by which a less simple candidate must be better."""
FOLDS = 5
WORK = 3e7
"""Products for one matrix of second derivatives: what cross-validation may take of records."""
SAMPLE = (400, 3000)
"""Records that cross-validation uses, at least and at most."""
FEWEST = 20
STEPS = 100


@dataclass(frozen=True)
class Candidate:
    """One penalised fit. `strength` is None where the family has one fit only."""

    family: str
    strength: float | None = None


@dataclass(frozen=True, eq=False)
class Personal:
    """The models that `personal_model` fitted to a silo's records, as points (d,)."""

    personal: Tensor
    alone: Tensor
    shares: dict[str, float]
    """The weight of each family in the personal model. They add up to 1."""
    strength: float
    """Of the model of the silo alone."""


def personal_model(problem: Problem, shared: Tensor, rows: Rows, start: Tensor) -> Personal:
    """Return the personal model and the model of the silo alone.

    Args:
        problem: the model and the loss, as the silo approved them.
        shared: (d,) the released model.
        rows: the silo's records, none of those that are kept for testing.
        start: (d,) where a fit of a network alone starts: no data has had a part in it.

    """
    fits = _Fits(problem.by_row, shared.double(), rows, start.double())
    sample = fits.sample()
    losses, outputs = _cross_validated(sample)
    weights = choose(fits.candidates, losses, sample.dispersion(outputs[_best(losses)]))
    everything = torch.arange(rows.records)
    points = fits.points([everything])[0]
    alone = _best_of(fits.candidates, losses, ALONE)
    return Personal(
        fits.averaged(points, weights),
        points[alone],
        {
            family: sum(
                float(weight)
                for weight, one in zip(fits.settled(weights), fits.candidates, strict=True)
                if one.family == family
            )
            for family in FAMILIES
        },
        fits.candidates[alone].strength or 0.0,
    )


def choose(candidates: list[Candidate], losses: Tensor, scale: float) -> Tensor:
    """Return the weight (C,) of each candidate in the personal model.

    A candidate's weight falls exponentially with its loss on records that it was not fitted to.
    Losses of less simple candidates are raised first, so that a small silo's chance does not decide
    against simpler ones:

    1. Recalibration: by a part of the standard error of its difference from the shared model.
    2. Pulled and alone: by that part of the standard error of the difference from the better of
       the two, or from the shared model if that is smaller.

    Families start with equal weights, and so do the strengths of a family.

    Args:
        candidates: the shared model first, then recalibration if there is one.
        losses: (C, n) of each record, by fits that have not seen it.
        scale: what makes a difference of losses one of log-likelihoods.
    """
    mean = losses.mean(1)
    raised = mean.clone()
    error = _error(losses - losses[:1])
    simple = 0
    for i, one in enumerate(candidates):
        if one.family == RECALIBRATED:
            raised[i] += CAUTION * error[i]
            if bool(raised[i] < mean[0]):
                simple = i
    beside = torch.minimum(error, _error(losses - losses[simple : simple + 1]))
    for i, one in enumerate(candidates):
        if one.family in (PULLED, ALONE):
            raised[i] += CAUTION * beside[i]
    sizes = [sum(other.family == one.family for other in candidates) for one in candidates]
    prior = -torch.tensor(sizes, dtype=torch.float64).log()
    finite = torch.isfinite(raised)
    score = prior - scale * losses.shape[1] * (raised - raised[finite].min())
    return torch.where(finite, score, -torch.inf).softmax(0)


def _error(differences: Tensor) -> Tensor:
    """Return the standard errors of the means of differences (C, n)."""
    return differences.std(1) / math.sqrt(differences.shape[1])


def _best(losses: Tensor) -> int:
    return int(losses.mean(1).nan_to_num(torch.inf).argmin())


def _best_of(candidates: list[Candidate], losses: Tensor, family: str) -> int:
    mean = losses.mean(1).nan_to_num(torch.inf).tolist()
    own = [i for i, one in enumerate(candidates) if one.family == family]
    return min(own, key=lambda i: mean[i])


def _cross_validated(fits: _Fits) -> tuple[Tensor, Tensor]:
    """Return the losses (C, n) and outputs (C, m, k) of each record by fits without its fold."""
    rows = fits.rows
    fold = rows.folds(FOLDS)
    loss = likelihood(fits.problem)
    train = [torch.nonzero(fold != k)[:, 0] for k in range(FOLDS)]
    outputs = None
    for k, points in enumerate(fits.points(train)):
        out = fold[rows.owner] == k
        found = outputs_at(fits.problem, points, rows.x[out])
        if outputs is None:
            outputs = found.new_zeros(len(found), len(rows.y), found.shape[-1])
        outputs[:, out] = found
    assert outputs is not None
    each = torch.stack([loss(one, rows.y) for one in outputs])
    return rows.by_record(each), outputs


class _Fits:
    """All candidates' fits to the records of one silo, or to some of them."""

    def __init__(self, problem: Problem, shared: Tensor, rows: Rows, start: Tensor) -> None:
        self.problem = problem
        self.shared = shared
        self.rows = rows
        self._start = start
        self._head, self._whole = find_head(problem, shared, rows.x)
        self._loss = likelihood(problem)
        small = self._head is not None and self._head.convex
        straight = [Candidate(SHARED)]
        searched = []
        if self._head is not None:
            straight.append(Candidate(RECALIBRATED))
        for family in (PULLED, ALONE):
            if small and (self._whole or family == PULLED):
                straight += [Candidate(family, one) for one in STRENGTHS[family]]
            else:
                searched += [Candidate(family, one) for one in FEW_STRENGTHS[family]]
        self._straight = straight
        self.candidates = straight + searched

    def sample(self) -> _Fits:
        """Return the same for as many records as cross-validation needs: all of a small silo."""
        size = 1
        if self._head is not None and self._head.convex:
            size = len(self._head.places)
        outputs = outputs_at(self.problem, self.shared[None], self.rows.x[:1]).shape[-1]
        low, high = SAMPLE
        enough = min(max(int(WORK / (outputs * size**2)), low), high)
        if self.rows.records <= enough:
            return self
        random = torch.Generator().manual_seed(0)
        drawn = torch.randperm(self.rows.records, generator=random)[:enough]
        return _Fits(self.problem, self.shared, self.rows.of_records(drawn), self._start)

    def points(self, parts: list[Tensor]) -> list[Tensor]:
        """Return the candidates' points (C, d) for each list of record numbers."""
        if self._head is None:
            found = [self.shared[None] for _ in parts]
        else:
            found = self._newton(self._head, parts)
        searched = self.candidates[len(self._straight) :]
        return [
            torch.cat([own, *(self._searched(one, part)[None] for one in searched)])
            for own, part in zip(found, parts, strict=True)
        ]

    def averaged(self, points: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted average (d,) of the points."""
        return self.settled(weights) @ points

    def settled(self, weights: Tensor) -> Tensor:
        """Return the weights (C,), in which no network is averaged with another one.

        Averages of a head's coordinates are averages of outputs. Of other coordinates they are not:
        there the candidate with the largest weight, or the heads together, take all.
        """
        apart = len(self._straight)
        if self._whole or apart == len(self.candidates):
            return weights
        together = torch.cat([weights[:apart].sum()[None], weights[apart:]])
        first = int(together.argmax())
        found = torch.zeros_like(weights)
        if first == 0:
            found[:apart] = weights[:apart] / weights[:apart].sum()
        else:
            found[apart + first - 1] = 1
        return found

    def dispersion(self, outputs: Tensor) -> float:
        """Return the factor that makes a sum of losses behave as a log-likelihood.

        For a likelihood the expected curvature by a shift of the outputs is the expected square of
        the slope. The factor is the ratio of the two, on records that the fit has not seen.
        """
        rows = self.rows
        outputs = outputs.clone().requires_grad_(True)
        each = self._loss(outputs, rows.y)
        (slope,) = torch.autograd.grad(each.sum(), outputs, create_graph=True)
        curvature = torch.zeros(())
        for column in range(outputs.shape[1]):
            (second,) = torch.autograd.grad(
                slope[:, column].sum(),
                outputs,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            curvature = curvature + (second[:, column] * rows.weight).sum()
        squares = rows.by_record(slope.detach().T).square().sum()
        ratio = float(curvature / squares)
        if not math.isfinite(ratio) or ratio <= 0:
            return 1.0
        if self._likelihood:
            return min(ratio, 1 / float(rows.weight.mean()))
        return ratio

    @property
    def _likelihood(self) -> bool:
        """Return whether the loss is a log-likelihood as it is, and not one up to a factor.

        Rows of a person whose losses are averaged may count as independent at most.
        """
        loss = self.problem.loss
        return self.problem.known_loss and loss is not squared_error and not isinstance(loss, Huber)

    # --- convex fits -----------------------------------------------------------------------------

    @cached_property
    def _coordinates(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the design (m, k, p + 2), its offset (m, k), the variances (p,) and the scale.

        The first columns are the shared model's outputs and a shift of all outputs. The scale is
        the dispersion at the best constant outputs.
        """
        head = self._head
        assert head is not None
        if head.convex:
            places = head.places
        else:
            places = head.places[head.biases]
        design, _ = design_of(self.problem, self.shared, places, self.rows.x)
        fixed = self.shared.clone()
        fixed[head.places] = 0
        offset = outputs_at(self.problem, fixed[None], self.rows.x)[0]
        shared = outputs_at(self.problem, self.shared[None], self.rows.x)[0] - offset
        bias = head.biases[torch.isin(head.places, places)]
        shift = design[..., bias].sum(-1)
        deviation = design - design.mean(0)
        used = (design != 0).any(0).sum(0).clamp(min=1)
        variance = deviation.square().mean(0).sum(0) / used
        variance[bias] = 1
        floor = 0.01 * float(variance[~bias].mean()) if bool((~bias).any()) else 1.0
        variance = variance.clamp(min=max(floor, 1e-9))
        full = torch.cat([shared[..., None], shift[..., None], design], -1)
        return full, offset, variance, bias

    @cached_property
    def _scale(self) -> float:
        """Return what a strength is divided by: the dispersion of the best constant outputs."""
        design, offset, _, bias = self._coordinates
        constant = torch.cat([torch.zeros(1, dtype=torch.bool), torch.ones(1).bool(), bias])
        t = minimise(
            design,
            offset,
            self.rows.y,
            self.rows.weight[None],
            self._loss,
            torch.where(constant, FREE, FIXED)[None],
            torch.zeros(1, design.shape[-1], dtype=torch.float64),
        )
        return self.dispersion(offset + design @ t[0])

    def _newton(self, head: Head, parts: list[Tensor]) -> list[Tensor]:
        design, offset, variance, bias = self._coordinates
        penalties = []
        centres = []
        for one in self._straight:
            penalty, centre = self._penalty(one, variance, bias)
            penalties.append(penalty)
            centres.append(centre)
        penalty = torch.stack(penalties) / self._scale
        centre = torch.stack(centres)
        count = len(self._straight)
        weight = torch.zeros(len(parts), len(self.rows.y), dtype=torch.float64)
        for row, part in zip(weight, parts, strict=True):
            there = torch.isin(self.rows.owner, part)
            row[there] = self.rows.weight[there]
        fitted = minimise(
            design,
            offset,
            self.rows.y,
            weight.repeat_interleave(count, 0),
            self._loss,
            penalty.repeat(len(parts), 1),
            centre.repeat(len(parts), 1),
        )
        found = []
        for own in fitted.unflatten(0, (len(parts), count)):
            points = self.shared.repeat(count, 1)
            points[:, head.places] *= own[:, :1]
            places = head.places if head.convex else head.places[head.biases]
            points[:, places] += own[:, 2:] + own[:, 1:2] * bias
            points[0] = self.shared
            found.append(points)
        return found

    def _penalty(self, one: Candidate, variance: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        fixed = torch.full_like(variance, FIXED)
        slope = SLOPE
        shift = INTERCEPT
        if one.strength is not None:
            rest = one.strength * variance
        else:
            rest = fixed
        if one.family == RECALIBRATED and self._needs_biases:
            rest = torch.where(bias, INTERCEPT, fixed)
        if one.family == SHARED:
            slope = FIXED
            shift = FIXED
        if one.family == ALONE:
            slope = FIXED
            shift = FREE
            rest = torch.where(bias, FREE, rest)
        penalty = torch.cat([torch.tensor([slope, shift], dtype=torch.float64), rest])
        centre = torch.zeros_like(penalty)
        if one.family != ALONE:
            centre[0] = 1
        return penalty, centre

    @cached_property
    def _needs_biases(self) -> bool:
        """Return whether a shift of all outputs changes nothing, as for classes without order."""
        outputs = outputs_at(self.problem, self.shared[None], self.rows.x[:8])[0]
        before = self._loss(outputs, self.rows.y[:8])
        after = self._loss(outputs + 1, self.rows.y[:8])
        return torch.allclose(before, after)

    # --- other fits ------------------------------------------------------------------------------

    def _searched(self, one: Candidate, part: Tensor) -> Tensor:
        """Return the fit (d,) by L-BFGS of a model that is not convex, or is large.

        The penalty is on the distance from the shared model or, alone, from no model: weights of
        zero.
        """
        rows = self.rows.of_records(part)
        alone = one.family == ALONE
        start = self._start if alone else self.shared
        centre = torch.zeros_like(start) if alone else start
        strength = one.strength or 0.0
        w = start.clone().requires_grad_(True)
        steps = torch.optim.LBFGS(
            [w],
            max_iter=STEPS,
            line_search_fn="strong_wolfe",
            tolerance_grad=1e-7,
            tolerance_change=1e-10,
        )

        def closure() -> Tensor:
            steps.zero_grad()
            outputs = self.problem.outputs(w[None], rows.x)[0].flatten(1)
            each = rows.by_record(self._loss(outputs, rows.y))
            distance = (w - centre).square().sum()
            value = each.mean() + strength / (2 * rows.records) * distance
            value.backward()
            return value

        steps.step(closure)
        found = w.detach()
        if bool(torch.isfinite(found).all()):
            return found
        return start
