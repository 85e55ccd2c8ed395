"""A layer's share in each record's gradient, as integers: factors whose products are summed for a
whole chunk, or the share itself.

`products` has what is claimed of them, and why.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from silodp.engine.convolution import padded, patches
from silodp.silo.answer.grids import Inputs, inputs_of, integers_of, prepared, run, totals_of

GRIDS = 53
Part = list[tuple[Tensor, Tensor]]
"""Terms of a layer's gradient, (m, T, f) inputs and (m, T, h) slopes: one of a gradient, two of a
difference.
"""


@dataclass(eq=False)
class Layer:
    """A layer with parameters, and how its gradient is summed: by products of its factors, or made
    for each record.
    """

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


Known = dict[Layer, Inputs]
"""What was made of layers' inputs before, which no question changes."""


def outputs(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels  # type: ignore[return-value]


def bits_of(terms: int) -> tuple[int, int]:
    """(a, v): how large the integers of inputs and slopes may be, if so many of their products are
    added.
    """
    free = GRIDS - (terms - 1).bit_length()
    return free // 2, free - free // 2


def factors_of(layer: nn.Module, given: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """(m, T, f) what the layer multiplies and (m, T, h) the slopes, at each of its places."""
    if isinstance(layer, nn.Conv2d):
        return patches(layer, padded(layer, given)).squeeze(1).transpose(1, 2), slope.flatten(
            2
        ).transpose(1, 2)
    a, e = (t.reshape(len(t), -1, t.shape[-1]) for t in (given, slope))
    return a, e


def share_of(*found: tuple[Layer, Tensor, Tensor]) -> tuple[Layer, Part | Tensor]:
    """A layer's share in each record's gradient, or in its difference between two points: factors,
    or the share itself, (m, h, f).
    """
    layer = found[0][0]
    if not isinstance(layer.module, nn.Linear | nn.Conv2d):
        each = [_normed(layer, given, slope) for _, given, slope in found]
        return layer, each[0] if len(each) == 1 else each[0] - each[1]
    factors = [factors_of(layer.module, given, slope) for _, given, slope in found]
    (a, e), *rest = factors
    terms: Part = [(a, e)]
    if rest:
        (b, f) = rest[0]
        terms = [(a, e - f), *([(a - b, f)] if layer.depends else [])]
    if not layer.made:
        return layer, terms
    whole = torch.bmm(terms[0][1].transpose(1, 2), terms[0][0])
    for a, e in terms[1:]:
        whole.baddbmm_(e.transpose(1, 2), a)
    return layer, torch.cat(
        [whole, terms[0][1].sum(1)[..., None]], 2
    ) if "bias" in layer.names else whole


def _normed(layer: Layer, given: Tensor, slope: Tensor) -> Tensor:
    """(m, k, 1 or 2): of a norm's weight and bias."""
    module = layer.module
    if isinstance(module, nn.GroupNorm):
        unit = functional.group_norm(given, module.num_groups, eps=module.eps)
        each = [(slope * unit).flatten(2).sum(2), slope.flatten(2).sum(2)]
    else:
        assert isinstance(module, nn.LayerNorm)
        unit = functional.layer_norm(given, module.normalized_shape, eps=module.eps)
        each = [
            t.reshape(len(t), -1, math.prod(module.normalized_shape)).sum(1)
            for t in (slope * unit, slope)
        ]
    return torch.stack(
        [t for name, t in zip(("weight", "bias"), each, strict=True) if name in layer.names], 2
    )


class Chunk:
    """The shares of all layers in the gradients of a chunk of records, as integers: factors V and
    A, whose products are over all its records at once, and wholes, each record's share itself,
    where it is small or made of many places."""

    def __init__(
        self, shares: Sequence[tuple[Layer, Part | Tensor]], size: int, known: Known | None = None
    ) -> None:
        """In chunks of `size` records, if this is a whole one; with what was made of layers' inputs
        before, where it was.
        """
        factored = [(layer, terms) for layer, terms in shares if not isinstance(terms, Tensor)]
        whole = [(layer, rows) for layer, rows in shares if isinstance(rows, Tensor)]
        self.layers = [layer for layer, _ in (*whole, *factored)]
        self._shapes = [rows.shape[1:] for _, rows in whole]
        self._order = [self.layers.index(layer) for layer, _ in shares]
        self.wholes = [rows.flatten(1).double() for _, rows in whole]
        self._inputs, self._slopes = (
            [[term[k] for term in terms] for _, terms in factored] for k in (0, 1)
        )
        self._bits = [bits_of(size * layer.places * len(terms)) for layer, terms in factored]
        self._known = [(known or {}).get(layer) for layer, _ in factored]
        self._run = functools.partial(
            run, like=(*self.wholes, *(e for terms in self._slopes for e in terms))[0]
        )

    def squares(self) -> list[Tensor]:
        """(m,) of each layer: an upper estimate of its share's squared length."""
        bias = ["bias" in layer.names for layer in self.layers[len(self.wholes) :]]
        most = [2.0**a for a, _ in self._bits]
        self._made, squares = self._run(prepared)(
            self._inputs, self._slopes, bias, most, self._known, self.wholes, self._order
        )
        self._inputs = []
        return squares

    def quantise(
        self,
        squares: list[Tensor],
        room: float,
        clip: float,
        gamma: float,
        more: float,
        bound: float,
    ) -> Tensor:
        """Makes integers of gradients that are at most `room` long; (m,) which records keep to the
        bound then.
        """
        grids = [
            math.ldexp(1.0, math.frexp(clip)[1] - v) for _, v in self._bits
        ]  # clip / grid <= 2^v
        self.rhos = [
            grid / math.ldexp(gamma, a) for grid, (a, _) in zip(grids, self._bits, strict=True)
        ]
        tops = [2.0**v for _, v in self._bits]
        numbers = squares, room, tops, grids, self.rhos, gamma, more, bound, self._order
        self.a, self.v, kept = self._run(integers_of)(
            self._made, self._slopes, self.wholes, *numbers
        )
        self._made = self._slopes = []
        return kept

    def numbers(self) -> Tensor:
        """Every record's integers, (m, ...)."""
        return torch.cat([t.flatten(1) for t in (*self.wholes, *self.a, *self.v)], 1)

    def added(self, chosen: Tensor) -> dict[str, Tensor]:
        """By the names of the parameters, the sum over the chosen records, (m,) bool, in integers;
        asked once.
        """
        totals = self._run(totals_of)(self.a, self.v, self.rhos, self.wholes, chosen)
        shaped = [
            total.view(shape) for total, shape in zip(totals, self._shapes, strict=False)
        ] + totals[len(self.wholes) :]
        return {
            name: part
            for layer, total in zip(self.layers, shaped, strict=True)
            for name, part in _named(layer, total).items()
        }


def gridded(layer: Layer, inputs: list[Tensor], chunk: int) -> Inputs:
    """The layer's inputs, terms (m, T, f), on the grid that chunks of so many records have."""
    a_bits, _ = bits_of(chunk * layer.places * len(inputs))
    return run(inputs_of, inputs[0])(inputs, "bias" in layer.names, 2.0**a_bits)


def _named(layer: Layer, total: Tensor) -> dict[str, Tensor]:
    """(h, f) by the names of the parameters: the last column is the bias's."""
    if len(layer.names) == 1:
        return {name: total for name in layer.names.values()}
    return {layer.names["weight"]: total[:, :-1], layer.names["bias"]: total[:, -1]}
