"""The layers of the structured engine: what each contributes to a record's gradient, from a factor
of its input and the gradient by its output.

Adding a layer type is one entry in RULES, and one in `model.LAYERS`. Axes are (B, ...): the records
of S silos, one silo after the other.
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
        """(B,) in float64: squared norms; sums of squared norms of terms that may cancel, if any;
        and other squares that must be finite.
        """
        ...

    def add(self, scale: Tensor, sound: Tensor | None, out: dict[str, Tensor]) -> None:
        """Adds the sums over each silo's sound records, scaled by scale (S, n), to out's (S,
        *shape); may overwrite what the part holds.

        A product may round by where its factors lie: they lie the same way whether or not a record
        is unsound, so others' sums keep every bit.
        """
        ...


class Whole:
    """Each record's gradient by each parameter, (B, *shape), newly made; its axes may lie in memory
    in any order.
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
        return torch.stack([_square(g) for g in self.gradients.values()]).sum(0), None, []

    def add(self, scale: Tensor, sound: Tensor | None, out: dict[str, Tensor]) -> None:
        for name, g in self.gradients.items():
            if sound is not None:
                g.masked_fill_(~sound.view(-1, 1), 0)
            total = torch.bmm(scale[:, None], g.unflatten(0, scale.shape))
            into = out[name].permute(0, *self.axes[name])
            into.add_(total.view(into.shape))


class Outer:
    """A Linear layer on plain vectors: e (x) u is never made, as in the ghost engine, which does
    the sums.
    """

    def __init__(self, terms: list[Term], names: set[str]) -> None:
        self.terms = terms
        self.names = names

    def squares(self) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        if len(self.terms) == 1:
            uu, ee = (_square(t) for t in self.terms[0])
            return ee * (uu + 1 if "bias" in self.names else uu), None, [uu]
        square, size, lengths = squares(
            self.names, [Term(u.t()[None, None], e.t()[None, None]) for u, e in self.terms]
        )
        return square.flatten(), size.flatten(), [length.flatten() for length in lengths]

    def add(self, scale: Tensor, sound: Tensor | None, out: dict[str, Tensor]) -> None:
        terms = []
        for u, e in self.terms:
            e = e * scale.view(-1, 1)
            if sound is not None:  # u is shared with other runs; a clone has its strides
                u, e = (t.masked_fill_(~sound.view(-1, 1), 0) for t in (u.clone(), e))
            terms.append(
                Term(*(t.unflatten(0, scale.shape).transpose(1, 2)[:, None] for t in (u, e)))
            )
        for name, total in contract(self.names, terms).items():
            if name in out:
                out[name].add_(total.squeeze(1))


class Tokens:
    """An Embedding: for each record one row of gradient for each token that it holds, however
    often.
    """

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
        square = _square(self.rows)
        return square.new_zeros(self.records).index_add_(0, self.record, square), None, []

    def add(self, scale: Tensor, sound: Tensor | None, out: dict[str, Tensor]) -> None:
        rows = self.rows * scale.flatten()[self.record, None]
        if sound is not None:
            rows.masked_fill_(~sound.flatten()[self.record, None], 0)
        out["weight"].index_put_((self.record // scale.shape[1], self.token), rows, accumulate=True)


def _square(g: Tensor) -> Tensor:
    """||g||^2 of each row (B, d) in float64; of long rows but for blocks of 64, as in `ghost`, with
    what their squares lose added.
    """
    if g.shape[1] < 1024:
        return torch.linalg.vector_norm(g, dim=1, dtype=torch.float64).square_()
    whole = g.shape[1] // 64 * 64
    total = (
        torch.linalg.vector_norm(g[:, :whole].unflatten(1, (-1, 64)), dim=2)
        .double()
        .square_()
        .sum(1)
    )
    if whole < g.shape[1]:
        total += torch.linalg.vector_norm(g[:, whole:], dim=1, dtype=torch.float64).square_()
    return total.add_(g.shape[1] * torch.finfo(g.dtype).tiny)


# --- the layers ----------------------------------------------------------------------------------


class Rule(NamedTuple):
    """How a layer type takes part."""

    known: Callable[..., bool]
    """(module, number of axes of its input): whether its settings are covered, and it treats each
    record alone.
    """
    factor: Callable[..., Tensor]
    """(module, input) to u."""
    forward: Callable[..., Tensor]
    """(module, parameters, input, u) to the output, newly made; parameters (S, *shape) where
    `several` and each silo has a point of its own.
    """
    part: Callable[..., Part]
    """(module, terms as in `ghost.Term`, with u for a, names of the parameters to train) to what
    the layer contributes.
    """
    several: bool = False


def _whole(weight: Callable[..., Tensor], bias: Callable[..., Tensor]) -> Callable[..., Part]:
    """The rule of a layer whose gradients by weight and bias are (module, u, e) and (module, e) to
    (B, *shape).
    """

    def part(layer: nn.Module, terms: list[Term], names: set[str]) -> Part:
        found = {}
        if "weight" in names:
            found["weight"] = weight(layer, *terms[0])
            for term in terms[1:]:
                found["weight"] += weight(layer, *term)
        if "bias" in names:
            found["bias"] = bias(layer, terms[0].e)
        return Whole(found)

    return part


def _linear_forward(layer: nn.Linear, p: Parameters, a: Tensor, u: Tensor) -> Tensor:
    weight = p["weight"]
    bias = p.get("bias")
    if weight.dim() == 2:
        return functional.linear(a, weight, bias)
    z = torch.bmm(a.reshape(len(weight), -1, a.shape[-1]), weight.transpose(1, 2))
    return (z if bias is None else z + bias[:, None]).reshape(*a.shape[:-1], -1)


def _affine(layer: nn.Module, p: Parameters, a: Tensor, u: Tensor) -> Tensor:
    if "weight" in p:
        z = u * p["weight"]
    else:
        z = u.clone()
    return z + p["bias"] if "bias" in p else z


def _sum_places(layer: nn.Conv2d | nn.GroupNorm, e: Tensor) -> Tensor:
    if e.dim() > 2:
        return e.flatten(2).sum(2)
    return e.clone()


def _sum_rows(layer: nn.LayerNorm, e: Tensor) -> Tensor:
    return e.reshape(len(e), -1, *layer.normalized_shape).sum(1)


def _linear_part(layer: nn.Linear, terms: list[Term], names: set[str]) -> Part:
    if terms[0].e.dim() == 2 and "weight" in names:
        return Outer(terms, names)
    return _whole(
        lambda layer, u, e: torch.bmm(e.flatten(1, -2).transpose(1, 2), u.flatten(1, -2)),
        lambda layer, e: e.flatten(1, -2).sum(1) if e.dim() > 2 else e.clone(),
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
