"""Define the layers of the structured engine.

A rule gives what a layer contributes to a record's gradient, from a factor of its input and the
gradient by its output. To add a layer type, add one entry to RULES and one to `model.LAYERS`. Axes
are (B, ...): the records of S silos, one silo after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from silodp.engine.convolution import (
    Parameters,
    conv_factor,
    conv_forward,
    conv_gradients,
    conv_known,
)
from silodp.engine.ghost import Term, contract, squares

# --- what a layer contributes --------------------------------------------------------------------


class Part(Protocol):
    """A layer's share of each record's gradient."""

    def squares(self) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Return three things (B,) in float64.

        These are squared norms, sums of squared norms of terms that may cancel (if any), and other
        squares that must be finite.
        """
        ...

    def add(self, scale: Tensor, sound: Tensor | None, out: dict[str, Tensor]) -> None:
        """Add the sums over each silo's sound records, scaled by scale (S, n), to out's (S,
        *shape).

        It may overwrite the part's own tensors. A product may round differently by where its
        factors are in memory. They are laid out in the same way whether or not a record is unsound,
        so others' sums keep every bit.
        """
        ...


class Whole:
    """Each record's gradient by each parameter, (B, *shape), in new memory.

    Its axes may be in memory in any order.
    """

    def __init__(self, gradients: dict[str, Tensor]) -> None:
        self.axes = {
            name: sorted(range(1, g.dim()), key=lambda axis, g=g: -g.stride(axis))
            for name, g in gradients.items()
        }
        self.gradients = {
            name: g.permute(0, *self.axes[name]).flatten(1) for name, g in gradients.items()
        }

    def squares(self) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Return the squared norms, without terms that could cancel."""
        return torch.stack([_square(g) for g in self.gradients.values()]).sum(0), None, []

    def add(self, scale: Tensor, sound: Tensor | None, out: dict[str, Tensor]) -> None:
        """Add the sums over sound records."""
        for name, g in self.gradients.items():
            if sound is not None:
                g.masked_fill_(~sound.view(-1, 1), 0)
            total = torch.bmm(scale[:, None], g.unflatten(0, scale.shape))
            into = out[name].permute(0, *self.axes[name])
            into.add_(total.view(into.shape))


class Outer:
    """A Linear layer on plain vectors.

    e (x) u is never built. `ghost` has the sums.
    """

    def __init__(self, terms: list[Term], names: set[str]) -> None:
        self.terms = terms
        self.names = names

    def squares(self) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Return the squared norms, the sums of terms' squares if two can cancel, and the inputs'
        squares.
        """
        if len(self.terms) == 1:
            uu, ee = (_square(t) for t in self.terms[0])
            bias = int("bias" in self.names)  # a bias is a weight whose input is 1
            return ee * (uu + bias), None, [uu]
        square, size, lengths = squares(
            self.names, [Term(u.t()[None, None], e.t()[None, None]) for u, e in self.terms]
        )
        return square.flatten(), size.flatten(), [length.flatten() for length in lengths]

    def add(self, scale: Tensor, sound: Tensor | None, out: dict[str, Tensor]) -> None:
        """Add the sums over sound records."""
        terms = []
        for u, e in self.terms:
            e = e * scale.view(-1, 1)
            if sound is not None:
                u = u.clone()  # u is shared with other runs; a clone has its strides
                u.masked_fill_(~sound.view(-1, 1), 0)
                e.masked_fill_(~sound.view(-1, 1), 0)
            u, e = (t.unflatten(0, scale.shape).transpose(1, 2)[:, None] for t in (u, e))
            terms.append(Term(u, e))
        for name, total in contract(self.names, terms).items():
            if name in out:
                out[name].add_(total.squeeze(1))


class Tokens:
    """An Embedding: each record has one row of gradient for each of its different tokens."""

    def __init__(self, layer: nn.Embedding, tokens: Tensor, e: Tensor) -> None:
        if layer.padding_idx is not None:
            e = e.masked_fill((tokens == layer.padding_idx)[..., None], 0)
        self.records = len(tokens)
        table = layer.num_embeddings
        place = (
            tokens.flatten(1) + table * torch.arange(self.records, device=tokens.device)[:, None]
        )
        places, row = place.flatten().unique(return_inverse=True)
        self.record = places // table
        self.token = places % table
        self.rows = e.new_zeros(len(places), layer.embedding_dim).index_add_(
            0, row, e.reshape(-1, layer.embedding_dim)
        )

    def squares(self) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Return the squared norms, without terms that could cancel."""
        square = _square(self.rows)
        return square.new_zeros(self.records).index_add_(0, self.record, square), None, []

    def add(self, scale: Tensor, sound: Tensor | None, out: dict[str, Tensor]) -> None:
        """Add the sums over sound records."""
        rows = self.rows * scale.flatten()[self.record, None]
        if sound is not None:
            rows.masked_fill_(~sound.flatten()[self.record, None], 0)
        out["weight"].index_put_((self.record // scale.shape[1], self.token), rows, accumulate=True)


def _square(g: Tensor) -> Tensor:
    """Return ||g||^2 of each row (B, d) in float64.

    Long rows are summed in blocks of 64, as in `ghost`, with what their squares lose added.
    """
    if g.shape[1] < 1024:
        return torch.linalg.vector_norm(g, dim=1, dtype=torch.float64).square_()
    in_blocks = g.shape[1] // 64 * 64
    blocks = g[:, :in_blocks].unflatten(1, (-1, 64))
    total = torch.linalg.vector_norm(blocks, dim=2).double().square_().sum(1)
    if in_blocks < g.shape[1]:
        total += torch.linalg.vector_norm(g[:, in_blocks:], dim=1, dtype=torch.float64).square_()
    return total.add_(g.shape[1] * torch.finfo(g.dtype).tiny)


# --- the layers ----------------------------------------------------------------------------------


class Rule(NamedTuple):
    """The rule of a layer type."""

    known: Callable[..., bool]
    """Takes (module, number of axes of its input).

    Return whether the rule covers the settings, and the module treats each record alone.
    """
    factor: Callable[..., Tensor]
    """Takes (module, input). Return the factor u."""
    forward: Callable[..., Tensor]
    """Takes (module, parameters, input, u). Return the output in new memory.

    Parameters are (S, *shape) if `several` and each silo has its own point.
    """
    part: Callable[..., Part]
    """Takes (module, terms as in `ghost.Term` with u for a, names of the parameters to train).

    Return what the layer contributes.
    """
    several: bool = False
    """Whether `forward` can have a point for each silo."""


def _whole(weight: Callable[..., Tensor], bias: Callable[..., Tensor]) -> Callable[..., Part]:
    """Return the rule of a layer by its gradients by weight and bias.

    They map (module, u, e) and (module, e) to (B, *shape).
    """

    def part(layer: nn.Module, terms: list[Term], names: set[str]) -> Part:
        """Return each record's gradients by the parameters to train."""
        gradients = {}
        if "weight" in names:
            gradients["weight"] = weight(layer, *terms[0])
            for term in terms[1:]:
                gradients["weight"] += weight(layer, *term)
        if "bias" in names:
            gradients["bias"] = bias(layer, terms[0].e)
        return Whole(gradients)

    return part


def _linear_forward(layer: nn.Linear, p: Parameters, a: Tensor, u: Tensor) -> Tensor:
    """Return the outputs of a Linear layer, with one point or one for each silo."""
    weight = p["weight"]
    bias = p.get("bias")
    if weight.dim() == 2:
        return functional.linear(a, weight, bias)
    z = torch.bmm(a.reshape(len(weight), -1, a.shape[-1]), weight.transpose(1, 2))
    if bias is not None:
        z = z + bias[:, None]
    return z.reshape(*a.shape[:-1], -1)


def _affine(layer: nn.Module, p: Parameters, a: Tensor, u: Tensor) -> Tensor:
    """Return the normalised input times the weight, plus the bias, in new memory."""
    if "weight" in p:
        z = u * p["weight"]
    else:
        z = u.clone()
    if "bias" in p:
        z = z + p["bias"]
    return z


def _sum_places(layer: nn.Conv2d | nn.GroupNorm, e: Tensor) -> Tensor:
    """Return the sum over places (B, channels), in new memory."""
    if e.dim() > 2:
        return e.flatten(2).sum(2)
    return e.clone()


def _sum_rows(layer: nn.LayerNorm, e: Tensor) -> Tensor:
    """Return the sum over the axes that are not normalised."""
    return e.reshape(len(e), -1, *layer.normalized_shape).sum(1)


def _sum_positions(layer: nn.Linear, e: Tensor) -> Tensor:
    """Return the sum over positions (B, outputs), in new memory."""
    if e.dim() > 2:
        return e.flatten(1, -2).sum(1)
    return e.clone()


def _linear_part(layer: nn.Linear, terms: list[Term], names: set[str]) -> Part:
    """Return what a Linear layer contributes: an outer product for plain vectors, else whole
    gradients.
    """
    if terms[0].e.dim() == 2 and "weight" in names:
        return Outer(terms, names)
    return _whole(
        lambda layer, u, e: torch.bmm(e.flatten(1, -2).transpose(1, 2), u.flatten(1, -2)),
        _sum_positions,
    )(layer, terms, names)


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule(
        lambda layer, axes: axes >= 2,
        lambda layer, a: a,
        _linear_forward,
        _linear_part,
        several=True,
    ),
    nn.Conv2d: Rule(
        conv_known, conv_factor, conv_forward, _whole(conv_gradients, _sum_places), several=True
    ),
    nn.LayerNorm: Rule(
        lambda layer, axes: axes > len(layer.normalized_shape),
        lambda layer, a: functional.layer_norm(a, layer.normalized_shape, eps=layer.eps),
        _affine,
        _whole(lambda layer, u, e: _sum_rows(layer, u * e), _sum_rows),
    ),
    nn.GroupNorm: Rule(
        lambda layer, axes: axes >= 2,
        lambda layer, a: functional.group_norm(a, layer.num_groups, eps=layer.eps),
        lambda layer, p, a, u: _affine(
            layer, {name: q.view(-1, *(1,) * (a.dim() - 2)) for name, q in p.items()}, a, u
        ),
        _whole(lambda layer, u, e: _sum_places(layer, u * e), _sum_places),
    ),
    nn.Embedding: Rule(
        lambda layer, axes: (
            layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
        ),
        lambda layer, a: a,
        lambda layer, p, a, u: functional.embedding(a, p["weight"]),
        lambda layer, terms, names: Tokens(layer, *terms[0]),
    ),
}
