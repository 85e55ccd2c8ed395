"""The part of a model in which its outputs are straight lines: all of a linear model, the last
layer of a network.

Fits of that part are convex, so they can be computed to convergence and averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from silodp.core.problem.losses import Weighted
from silodp.core.problem.problem import Problem
from silodp.silo.fits.newton import OutputLoss

MOST = 160
"""Coordinates that Newton's method fits; a larger head is only recalibrated by it."""
PROBED = 8
"""Rows on which a head is tried."""


@dataclass(frozen=True, eq=False)
class Head:
    """Coordinates of w, and which of them are the same for all rows."""

    places: Tensor  # (p,) coordinates of w
    biases: Tensor  # (p,) bool

    @property
    def convex(self) -> bool:
        """Return whether Newton's method fits all of it."""
        return len(self.places) <= MOST


def find_head(problem: Problem, w: Tensor, x: Tensor) -> tuple[Head | None, bool]:
    """Return the largest such part, and whether it is the whole model.

    Args:
        problem: whose model is looked at; it sees rows.
        w: (d,) a point.
        x: rows; the first few are tried.
    """
    everything = torch.arange(problem.dim)
    if _straight(problem, w, everything, x[:PROBED]):
        return Head(everything, _biases(problem)), True
    last = _last_linear(problem)
    if last is not None and _straight(problem, w, last, x[:PROBED]):
        return Head(last, _biases(problem)[last]), False
    return None, False


def outputs_at(problem: Problem, points: Tensor, x: Tensor) -> Tensor:
    """Return the outputs (J, m, k) at points (J, d)."""
    with torch.no_grad():
        return problem.outputs(points, x).flatten(2)


def design_of(problem: Problem, w: Tensor, places: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs' derivative (m, k, p) by these coordinates, and the outputs (m, k) where
    they are zero.
    """
    base = w.clone()
    base[places] = 0
    offset = outputs_at(problem, base[None], x)[0]
    found = offset.new_empty(*offset.shape, len(places))
    for column, place in enumerate(places.tolist()):
        point = base.clone()
        point[place] = 1
        found[..., column] = outputs_at(problem, point[None], x)[0] - offset
    return found, offset


def likelihood(problem: Problem) -> OutputLoss:
    """Return the loss of a row that a personal model minimises.

    It is the task's own, without the weights of classes: `predict` takes them back out of the
    risks, and a personal model is fitted to those risks.
    """
    loss = problem.loss
    if not isinstance(loss, Weighted):
        return problem.record_losses
    log = torch.tensor(loss.weights, dtype=torch.float64).log()

    def unweighted(output: Tensor, target: Tensor) -> Tensor:
        if output.shape[-1] == 1:
            shift = (log[1] - log[0])[None]
        else:
            shift = log
        return loss.loss(output - shift, target)

    return unweighted


def _straight(problem: Problem, w: Tensor, places: Tensor, x: Tensor) -> bool:
    """Return whether the outputs are affine in these coordinates, on a few rows."""
    random = torch.Generator().manual_seed(0)
    points = w.repeat(4, 1)
    moved = torch.randn(2, len(places), generator=random, dtype=w.dtype)
    points[0, places] = 0
    points[1, places] = moved[0]
    points[2, places] = moved[1]
    points[3, places] = moved[0] - 2 * moved[1]
    zero, first, second, both = outputs_at(problem, points, x)
    wanted = first - 2 * second + 2 * zero
    return bool(torch.allclose(both, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max() + 1)))


def _biases(problem: Problem) -> Tensor:
    parts = [
        torch.full((size,), len(shape) < 2)
        for shape, size in zip(problem.shapes.values(), problem.sizes, strict=True)
    ]
    return torch.cat(parts)


def _last_linear(problem: Problem) -> Tensor | None:
    """Return the coordinates of the trainable parameters of the last linear layer.

    Thresholds of ordered classes are a layer of one input behind the score, and belong to it.
    """
    layers = [
        name
        for name, module in problem.model.named_modules()
        if isinstance(module, nn.Linear) and any(p.requires_grad for p in module.parameters())
    ]
    if not layers:
        return None
    wanted = layers[-1:]
    last = problem.model.get_submodule(layers[-1])
    if last.in_features == 1 and not last.weight.requires_grad:  # type: ignore[union-attr]
        wanted = layers[-2:]
    places = []
    start = 0
    for name, size in zip(problem.shapes, problem.sizes, strict=True):
        if name.rpartition(".")[0] in wanted:
            places.append(torch.arange(start, start + size))
        start += size
    return torch.cat(places)
