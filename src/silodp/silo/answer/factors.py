"""A layer's share in each record's gradient, as integers: factors whose products are summed for a whole chunk, or the share itself.

`products` has what is claimed of them, and why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from silodp.engine.convolution import padded, patches
from silodp.silo.answer.grids import on_grids, run, square_of

GRIDS = 53
Part = list[tuple[Tensor, Tensor]]
"""Terms of a layer's gradient, (m, T, f) inputs and (m, T, h) slopes: one of a gradient, two of a difference."""


@dataclass
class Layer:
    """A layer with parameters, and how its gradient is summed: by products of its factors, or made for each record."""

    module: nn.Module
    names: dict[str, str]
    places: int = 0
    width: int = 0
    depends: bool = False
    """Whether its input depends on w."""
    made: bool = True

    @property
    def terms(self) -> int:
        return 2 if self.depends else 1


def outputs(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels  # type: ignore[return-value]


def bits_of(terms: int) -> tuple[int, int]:
    """(a, v): how large the integers of inputs and slopes may be, if so many of their products are added."""
    free = GRIDS - (terms - 1).bit_length()
    return free // 2, free - free // 2


def factors_of(layer: nn.Module, given: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """(m, T, f) what the layer multiplies and (m, T, h) the slopes, at each of its places."""
    if isinstance(layer, nn.Conv2d):
        return patches(layer, padded(layer, given)).squeeze(1).transpose(1, 2), slope.flatten(2).transpose(1, 2)
    a, e = (t.reshape(len(t), -1, t.shape[-1]) for t in (given, slope))
    return a, e


def part_of(*found: tuple[Layer, Tensor, Tensor]) -> Whole | Factored:
    """A layer's share in each record's gradient, or in its difference between two points."""
    layer = found[0][0]
    if not isinstance(layer.module, nn.Linear | nn.Conv2d):
        each = [_normed(layer, given, slope) for _, given, slope in found]
        return Whole(layer, each[0] if len(each) == 1 else each[0] - each[1])
    factors = [factors_of(layer.module, given, slope) for _, given, slope in found]
    (a, e), *rest = factors
    terms: Part = [(a, e)]
    if rest:
        (b, f) = rest[0]
        terms = [(a, e - f), *([(a - b, f)] if layer.depends else [])]
    if not layer.made:
        return Factored(layer, terms)
    whole = torch.bmm(terms[0][1].transpose(1, 2), terms[0][0])
    for a, e in terms[1:]:
        whole.baddbmm_(e.transpose(1, 2), a)
    return Whole(layer, torch.cat([whole, terms[0][1].sum(1)[..., None]], 2) if "bias" in layer.names else whole)


def _normed(layer: Layer, given: Tensor, slope: Tensor) -> Tensor:
    """(m, k, 1 or 2): of a norm's weight and bias."""
    module = layer.module
    if isinstance(module, nn.GroupNorm):
        unit = functional.group_norm(given, module.num_groups, eps=module.eps)
        each = [(slope * unit).flatten(2).sum(2), slope.flatten(2).sum(2)]
    else:
        assert isinstance(module, nn.LayerNorm)
        unit = functional.layer_norm(given, module.normalized_shape, eps=module.eps)
        each = [t.reshape(len(t), -1, math.prod(module.normalized_shape)).sum(1) for t in (slope * unit, slope)]
    return torch.stack([t for name, t in zip(("weight", "bias"), each, strict=True) if name in layer.names], 2)


class Whole:
    """Each record's part of a gradient itself, (m, h, f): small, or made of many places."""

    def __init__(self, layer: Layer, rows: Tensor) -> None:
        self.layer, self.shape, self.rows = layer, rows.shape[1:], rows.flatten(1).double()

    def square(self) -> Tensor:
        return torch.linalg.vector_norm(self.rows, dim=1).square_()

    verified = square

    def quantise(self, scale: Tensor, masked: Tensor | None, clip: float, gamma: float, chunk: int) -> None:
        rows = self.rows if masked is None else self.rows.masked_fill_(masked[:, None], 0.0)
        rows.mul_((scale / gamma)[:, None]).round_()

    def numbers(self) -> Tensor:
        return self.rows

    def added(self, chosen: Tensor) -> dict[str, Tensor]:
        return _named(self.layer, (chosen @ self.rows).view(self.shape))


class Factored:
    """Each record's factors of a layer's gradient; the products are over all records of a chunk at once."""

    def __init__(self, layer: Layer, terms: Part) -> None:
        self.layer, self.terms = layer, terms

    def square(self) -> Tensor:
        return run(square_of, self.terms[0][0])(*self._factors())

    def _factors(self) -> tuple[list[Tensor], list[Tensor], bool]:
        inputs, slopes = zip(*self.terms, strict=True)
        return list(inputs), list(slopes), "bias" in self.layer.names

    def quantise(self, scale: Tensor, masked: Tensor | None, clip: float, gamma: float, chunk: int) -> None:
        a_bits, v_bits = bits_of(chunk * self.layer.places * len(self.terms))
        grid = math.ldexp(1.0, math.frexp(clip)[1] - v_bits)  # clip / grid <= 2^v
        self.rho = grid / math.ldexp(gamma, a_bits)
        self.a, self.v, square = run(on_grids, scale)(*self._factors(), scale, masked, 2.0**a_bits, 2.0**v_bits, grid)
        self.square_of_integers, self.terms = square * self.rho**2, []

    def verified(self) -> Tensor:
        return self.square_of_integers

    def numbers(self) -> Tensor:
        return torch.cat([self.a.flatten(1), self.v.flatten(1)], 1)

    def added(self, chosen: Tensor) -> dict[str, Tensor]:
        if not bool(chosen.all()):
            self.v.mul_(chosen[:, None, None])
        exact = self.v.flatten(0, 1).t() @ self.a.flatten(0, 1)
        return _named(self.layer, exact.mul_(self.rho).round_())


def _named(layer: Layer, total: Tensor) -> dict[str, Tensor]:
    """(h, f) by the names of the parameters: the last column is the bias's."""
    if len(layer.names) == 1:
        return {name: total for name in layer.names.values()}
    return {layer.names["weight"]: total[:, :-1], layer.names["bias"]: total[:, -1]}
