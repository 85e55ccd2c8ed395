"""The ghost path as one compiled function: torch.compile takes Python out of it, and fuses what goes over the same numbers.

It pays for long runs with few records in a call. A new shape takes some ten seconds to compile (two if torch's cache has it), and needs a
C++ compiler. Chains of Linear layers and ReLU with a loss of `losses` take part. The numbers are those of `clipping` to within rounding,
whose bounds hold in whatever order sums are made; a call with an unsound record is left to `clipping`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from silodp.core.clipping import LIMITS, _measured
from silodp.core.layers import RULES, Layer, Term
from silodp.core.problem import Problem, split

Sums = Callable[[list[Tensor], Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(points, x, y, weight, clips), as `clipping` has them, to the clipped sums (S, J, d) and whether every record is sound."""


def fused(problem: Problem, layers: list[Layer]) -> Sums | None:
    """What adds up a chain's clipped gradients, or differences, in one call; None for a chain or a loss that does not take part."""
    if problem.slope is None or any(layer.rule is None and type(layer.module) is not nn.ReLU for layer in layers):
        return None
    kinds = tuple((type(layer.module), tuple(layer.names.items())) for layer in layers)
    return _compiled(kinds, tuple(problem.shapes.items()), problem.slope)


@functools.lru_cache(maxsize=64)
def _compiled(kinds: tuple, shapes: tuple, slope: Callable[[Tensor, Tensor], Tensor]) -> Sums:
    """One function for all problems of this form, so that it is compiled once."""
    layers = [Layer(nn.ReLU(), RULES.get(kind), dict(names), 0) for kind, names in kinds]

    def sums(points: list[Tensor], x: Tensor, y: Tensor, weight: Tensor, clips: Tensor) -> tuple[Tensor, Tensor]:
        longest, smallest = LIMITS[weight.dtype]
        ruled, terms, norm, lengths = _measured(slope, lambda w: split(w, dict(shapes)), layers, points, x, y)
        scale = clips / torch.maximum(norm, clips.clamp(min=smallest))
        sound = (scale >= torch.finfo(weight.dtype).tiny).all()
        for length in lengths:
            sound = sound & (length < longest**2).all()
        scale = (scale.to(weight.dtype) * weight)[:, :, None]
        found = {}
        for (rule, names, p), t in zip(ruled, terms, strict=True):
            for name, total in rule.contract(p, [Term(a, e * scale) for a, e in t]).items():
                found[names[name]] = total.flatten(2)
        return torch.cat([found[name] for name, _ in shapes], 2), sound

    return torch.compile(sums)
