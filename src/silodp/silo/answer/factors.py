"""Represent a layer's share in each record's gradient as integers.

A share is a pair of factors, whose products are summed for a whole chunk, or the share itself.
`products` has the guarantees and their proof.
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
    """A layer with parameters, and how its gradient is summed.

    It is summed by products of its factors, or made for each record.
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
        """Return how many terms a difference of the layer's gradient has."""
        if self.depends:
            return 2
        return 1


Known = dict[Layer, Inputs]
"""What was made of layers' inputs before, which no query changes."""


def outputs(layer: nn.Module) -> int:
    """Return the number of the layer's outputs."""
    if isinstance(layer, nn.Linear):
        return layer.out_features
    return layer.out_channels  # type: ignore[return-value]


def bits_of(terms: int) -> tuple[int, int]:
    """Return (a, v), how large the integers of inputs and slopes may be.

    `terms` is how many of their products are added.
    """
    free = GRIDS - (terms - 1).bit_length()
    return free // 2, free - free // 2


def factors_of(layer: nn.Module, given: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Return the layer's inputs (m, T, f) and the slopes (m, T, h), at each of its places."""
    if isinstance(layer, nn.Conv2d):
        a = patches(layer, padded(layer, given)).squeeze(1).transpose(1, 2)
        e = slope.flatten(2).transpose(1, 2)
        return a, e
    a, e = (t.reshape(len(t), -1, t.shape[-1]) for t in (given, slope))
    return a, e


def share_of(*traced: tuple[Layer, Tensor, Tensor]) -> tuple[Layer, Part | Tensor]:
    """Return a layer's share in each record's gradient, or in its difference between two points.

    It is factors, or the share itself, (m, h, f).
    """
    layer = traced[0][0]
    if not isinstance(layer.module, nn.Linear | nn.Conv2d):
        shares = [_normed(layer, given, slope) for _, given, slope in traced]
        if len(shares) == 1:
            return layer, shares[0]
        return layer, shares[0] - shares[1]
    factors = [factors_of(layer.module, given, slope) for _, given, slope in traced]
    (a, e), *rest = factors
    terms: Part = [(a, e)]
    if rest:
        # e (x) a - f (x) b = (e - f) (x) a + f (x) (a - b), where a = b unless it depends on w.
        (b, f) = rest[0]
        terms = [(a, e - f)]
        if layer.depends:
            terms.append((a - b, f))
    if not layer.made:
        return layer, terms
    share = torch.bmm(terms[0][1].transpose(1, 2), terms[0][0])
    for a, e in terms[1:]:
        share.baddbmm_(e.transpose(1, 2), a)
    if "bias" in layer.names:
        share = torch.cat([share, terms[0][1].sum(1)[..., None]], 2)
    return layer, share


def _normed(layer: Layer, given: Tensor, slope: Tensor) -> Tensor:
    """Return the share of a norm's weight and bias, (m, k, 1 or 2)."""
    module = layer.module
    if isinstance(module, nn.GroupNorm):
        unit = functional.group_norm(given, module.num_groups, eps=module.eps)
        weight = (slope * unit).flatten(2).sum(2)
        bias = slope.flatten(2).sum(2)
    else:
        assert isinstance(module, nn.LayerNorm)
        unit = functional.layer_norm(given, module.normalized_shape, eps=module.eps)
        width = math.prod(module.normalized_shape)
        weight, bias = (t.reshape(len(t), -1, width).sum(1) for t in (slope * unit, slope))
    parts = {"weight": weight, "bias": bias}
    return torch.stack([part for name, part in parts.items() if name in layer.names], 2)


class Chunk:
    """The shares of all layers in the gradients of a chunk of records, as integers.

    Shares are factors V and A, whose products are over all its records at once, or wholes: each
    record's share itself, if it is small or made of many places.
    """

    def __init__(
        self, shares: Sequence[tuple[Layer, Part | Tensor]], size: int, known: Known | None = None
    ) -> None:
        """Sort the shares into factors and wholes.

        `size` is the number of records in a complete chunk. `known` has what was made of layers'
        inputs before.
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
        """Return an upper estimate of the squared length of each layer's share, (m,) each."""
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
        """Return every record's integers, (m, ...)."""
        return torch.cat([t.flatten(1) for t in (*self.wholes, *self.a, *self.v)], 1)

    def added(self, chosen: Tensor) -> dict[str, Tensor]:
        """Return the sum over the chosen records, (m,) bool, in integers, by the names of the
        parameters.

        It may be called once, since it uses up the factors.
        """
        totals = self._run(totals_of)(self.a, self.v, self.rhos, self.wholes, chosen)
        for k, shape in enumerate(self._shapes):
            totals[k] = totals[k].view(shape)
        sums: dict[str, Tensor] = {}
        for layer, total in zip(self.layers, totals, strict=True):
            sums |= _named(layer, total)
        return sums


def gridded(layer: Layer, inputs: list[Tensor], chunk: int) -> Inputs:
    """Return the layer's inputs, terms (m, T, f), on the grid of chunks of so many records."""
    a_bits, _ = bits_of(chunk * layer.places * len(inputs))
    return run(inputs_of, inputs[0])(inputs, "bias" in layer.names, 2.0**a_bits)


def _named(layer: Layer, total: Tensor) -> dict[str, Tensor]:
    """Return (h, f) by the names of the parameters. The last column is the bias's."""
    if len(layer.names) == 1:
        return {name: total for name in layer.names.values()}
    return {layer.names["weight"]: total[:, :-1], layer.names["bias"]: total[:, -1]}
