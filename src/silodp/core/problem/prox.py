"""Define proximal operators of the non-smooth part f1 of the loss, on flat parameter vectors.

Vectors are (..., d) with any leading run or silo axes. Rows never mix, so a run that has diverged
to NaN does not change the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Protocol

import torch
from torch import Tensor

from silodp.core.errors import BadInput


class Prox(Protocol):
    """A closed convex function f1 together with its proximal operator.

    `check_prox` in silodp.testing lists the rules that it must satisfy.
    """

    def value(self, w: Tensor, /) -> Tensor:
        """Return f1(w), of shape w.shape[:-1].

        It is +inf outside the constraint set. A projected point counts as inside despite rounding.
        """
        ...

    def __call__(self, w: Tensor, step: float | Tensor, /) -> Tensor:
        """Return argmin_y step * f1(y) + 1/2 ||y - w||^2.

        `step` is above 0: a number, or a tensor that broadcasts to (..., 1).
        """
        ...


def gradient_mapping(w: Tensor, gradient: Tensor, prox: Prox, step: float | Tensor) -> Tensor:
    """Return (w - prox(w - step * gradient)) / step, the paper's measure of stationarity.

    It is zero exactly where w is stationary for f0 + f1.
    """
    step = _factor(step, w)
    return (w - prox(w - step * gradient, step)) / step


class _ByCoordinate:
    """f1(w) = l1 ||w||_1 + l2 / 2 ||w||^2 subject to low <= w_i <= high.

    A part that is None is absent. The interval need not contain 0.

    To soft-threshold, shrink and then clip is exact:

    1. The objective separates into convex functions of one variable.
    2. Such a function falls up to its minimiser and rises after it.
    3. So on an interval it is least at the minimiser clipped to that interval.
    """

    def parts(self) -> tuple[float | None, float | None, float | None, float | None]:
        """Return (l1, l2, low, high)."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        for name, field in vars(self).items():
            if name in ("strength", "l1", "l2"):
                _check_weight(self, name)
            elif name == "low":
                _require(
                    self, name, _is_number(field) and field < math.inf, "a number below infinity"
                )
            else:
                low = self.parts()[2]
                _require(
                    self,
                    name,
                    _is_number(field) and field >= low and field > -math.inf,
                    f"a number, at least low, {low}",
                )

    def value(self, w: Tensor) -> Tensor:
        """Return l1 ||w||_1 + l2 / 2 ||w||^2, or +inf outside the interval."""
        l1, l2, low, high = self.parts()
        value = w.new_zeros(w.shape[:-1])
        if l1 is not None:
            value = value + l1 * w.abs().sum(-1)
        if l2 is not None:
            value = value + l2 / 2 * w.square().sum(-1)
        if low is None or high is None:
            return value
        slack = _slack(w)
        inside = (w >= low - slack * abs(low)) & (w <= high + slack * abs(high))
        return value + _indicator(w, inside.all(-1))

    def __call__(self, w: Tensor, step: float | Tensor) -> Tensor:
        """Return the minimiser of each coordinate."""
        l1, l2, low, high = self.parts()
        if l1 is not None:
            w = _soft_threshold(w, l1 * _factor(step, w))
        if l2 is not None:
            w = w / (1 + l2 * _factor(step, w))
        if low is not None:
            w = w.clamp(low, high)
        return w


@dataclass(frozen=True)
class Zero(_ByCoordinate):
    """f1 = 0: the smooth, unconstrained case."""

    def parts(self) -> tuple:
        return None, None, None, None


@dataclass(frozen=True)
class L1(_ByCoordinate):
    """f1(w) = strength * ||w||_1, which makes coordinates exactly zero."""

    strength: float

    def parts(self) -> tuple:
        return self.strength, None, None, None


@dataclass(frozen=True)
class SquaredL2(_ByCoordinate):
    """f1(w) = strength / 2 * ||w||^2, weight decay."""

    strength: float

    def parts(self) -> tuple:
        return None, self.strength, None, None


@dataclass(frozen=True)
class ElasticNet(_ByCoordinate):
    """f1(w) = l1 * ||w||_1 + l2 / 2 * ||w||^2."""

    l1: float
    l2: float

    def parts(self) -> tuple:
        return self.l1, self.l2, None, None


@dataclass(frozen=True)
class Box(_ByCoordinate):
    """The constraint low <= w_i <= high; either bound may be infinite."""

    low: float
    high: float

    def parts(self) -> tuple:
        return None, None, self.low, self.high


@dataclass(frozen=True)
class NonNegative(_ByCoordinate):
    """The constraint w_i >= 0."""

    def parts(self) -> tuple:
        return None, None, 0.0, math.inf


@dataclass(frozen=True)
class L1Box(_ByCoordinate):
    """f1(w) = strength * ||w||_1 subject to low <= w_i <= high."""

    strength: float
    low: float
    high: float

    def parts(self) -> tuple:
        return self.strength, None, self.low, self.high


@dataclass(frozen=True)
class GroupL1:
    """f1(w) = strength * sum over groups of ||w[start:stop]||_2, which makes whole groups zero.

    Entries outside all groups are unchanged.
    """

    strength: float
    groups: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        _check_weight(self, "strength")
        pairs = isinstance(self.groups, tuple) and all(
            isinstance(g, tuple) and len(g) == 2 and _is_slice(*g) for g in self.groups
        )
        ordered: list[tuple[int, int]] = []
        if pairs:
            ordered = sorted(self.groups)
        disjoint = all(stop <= start for (_, stop), (start, _) in pairwise(ordered))
        _require(
            self,
            "groups",
            bool(ordered) and disjoint,
            "a tuple of disjoint (start, stop) pairs with 0 <= start < stop",
        )

    def value(self, w: Tensor) -> Tensor:
        """Return the weighted sum of the groups' norms."""
        self._check_fits(w)
        return self.strength * torch.stack(
            [torch.linalg.vector_norm(w[..., a:b], dim=-1) for a, b in self.groups]
        ).sum(0)

    def __call__(self, w: Tensor, step: float | Tensor) -> Tensor:
        """Return w with each group shortened by step * strength, down to zero."""
        self._check_fits(w)
        threshold = self.strength * _factor(step, w)
        y = w.clone()
        for start, stop in self.groups:
            norm = torch.linalg.vector_norm(w[..., start:stop], dim=-1, keepdim=True)
            y[..., start:stop] *= torch.where(norm > threshold, 1 - threshold / norm, 0.0)
        return y

    def _check_fits(self, w: Tensor) -> None:
        """Raise BadInput if a group ends after the last parameter."""
        d = w.shape[-1]
        _require(
            self, "groups", max(stop for _, stop in self.groups) <= d, f"within the {d} parameters"
        )


@dataclass(frozen=True)
class L2Ball:
    """The constraint ||w||_2 <= radius."""

    radius: float

    def __post_init__(self) -> None:
        _require(
            self,
            "radius",
            _is_number(self.radius) and 0 < self.radius < math.inf,
            "a finite number above 0",
        )

    def value(self, w: Tensor) -> Tensor:
        """Return 0 in the ball and +inf outside."""
        return _indicator(w, torch.linalg.vector_norm(w, dim=-1) <= self.radius * (1 + _slack(w)))

    def __call__(self, w: Tensor, step: float | Tensor) -> Tensor:
        """Return the projection on the ball."""
        norm = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
        return w * torch.where(norm > self.radius, self.radius / norm, 1.0)


@dataclass(frozen=True)
class Simplex:
    """The constraint w_i >= 0, sum_i w_i = total."""

    total: float = 1.0

    def __post_init__(self) -> None:
        _require(
            self,
            "total",
            _is_number(self.total) and 0 < self.total < math.inf,
            "a finite number above 0",
        )

    def value(self, w: Tensor) -> Tensor:
        """Return 0 in the simplex and +inf outside."""
        slack = _slack(w) * self.total
        return _indicator(w, (w >= -slack).all(-1) & ((w.sum(-1) - self.total).abs() <= slack))

    def __call__(self, w: Tensor, step: float | Tensor) -> Tensor:
        """Return max(w - theta, 0).

        theta comes from the longest prefix of the sorted entries that stays positive (Held et al.
        1974).
        """
        # A common shift does not change the projection, and small numbers add up more exactly.
        w = w - w.amax(-1, keepdim=True)
        descending = w.sort(-1, descending=True).values
        excess = descending.cumsum(-1) - self.total
        count = torch.arange(1, w.shape[-1] + 1, device=w.device)
        # The support is 0 only for NaN, and must not become a negative index.
        support = (descending * count > excess).sum(-1, keepdim=True).clamp(min=1)
        return (w - excess.gather(-1, support - 1) / support).clamp(min=0)


@dataclass(frozen=True)
class NuclearNorm:
    """f1(w) = strength * the sum of the singular values of w, which lowers its rank.

    w is read row by row as a matrix of the given shape.
    """

    strength: float
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        _check_weight(self, "strength")
        pair = isinstance(self.shape, tuple) and len(self.shape) == 2
        _require(
            self,
            "shape",
            pair and all(isinstance(n, int) and n > 0 for n in self.shape),
            "a pair (rows, cols) of positive integers",
        )

    def value(self, w: Tensor) -> Tensor:
        """Return the weighted sum of singular values, or NaN for a w that is not finite."""
        matrix, finite = self._matrix(w)
        return (self.strength * torch.linalg.svdvals(matrix).sum(-1)).masked_fill(~finite, math.nan)

    def __call__(self, w: Tensor, step: float | Tensor) -> Tensor:
        """Return w with each singular value lowered by step * strength, down to zero."""
        matrix, finite = self._matrix(w)
        u, singular, vh = torch.linalg.svd(matrix, full_matrices=False)
        shrunk = _soft_threshold(singular, self.strength * _factor(step, w))
        y = ((u * shrunk[..., None, :]) @ vh).reshape(w.shape)
        return y.masked_fill(~finite[..., None], math.nan)

    def _matrix(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return w as matrices, and which rows of w are finite.

        The other rows become zero, because one NaN makes the whole batched SVD raise. Raise
        BadInput if the shape does not fit.
        """
        rows, cols = self.shape
        _require(
            self,
            "shape",
            rows * cols == w.shape[-1],
            f"(rows, cols) with rows * cols = {w.shape[-1]}, the number of parameters",
        )
        finite = w.isfinite().all(-1)
        return w.masked_fill(~finite[..., None], 0.0).reshape(*w.shape[:-1], rows, cols), finite


@dataclass(frozen=True)
class Part:
    """f1(w) = prox.value(w[start:stop]). The other entries, for instance biases, are unchanged."""

    prox: Prox
    start: int
    stop: int

    def __post_init__(self) -> None:
        _require(
            self, "start", isinstance(self.start, int) and self.start >= 0, "an integer, at least 0"
        )
        _require(
            self, "stop", _is_slice(self.start, self.stop), f"an integer above start, {self.start}"
        )

    def value(self, w: Tensor) -> Tensor:
        """Return f1 of the entries from start to stop."""
        self._check_fits(w)
        return self.prox.value(w[..., self.start : self.stop])

    def __call__(self, w: Tensor, step: float | Tensor) -> Tensor:
        """Return w with the prox applied to the entries from start to stop."""
        self._check_fits(w)
        inner = self.prox(w[..., self.start : self.stop], step)
        return torch.cat([w[..., : self.start], inner, w[..., self.stop :]], dim=-1)

    def _check_fits(self, w: Tensor) -> None:
        """Raise BadInput if the part ends after the last parameter."""
        _require(
            self,
            "stop",
            self.stop <= w.shape[-1],
            f"at most {w.shape[-1]}, the number of parameters",
        )


SPECS = (
    "zero",
    "l1:STRENGTH",
    "squared-l2:STRENGTH",
    "elastic-net:L1:L2",
    "group-l1:STRENGTH:START-STOP:START-STOP...",
    "l2-ball:RADIUS",
    "box:LOW:HIGH",
    "non-negative",
    "simplex",
    "simplex:TOTAL",
    "nuclear-norm:STRENGTH:ROWS:COLS",
    "l1-box:STRENGTH:LOW:HIGH",
    "part:START:STOP:SPEC",
)


def by_name(text: str, from_file: Callable[[str], Prox] | None = None) -> Prox:
    """Return the operator that a spec such as "elastic-net:0.01:0.1" names.

    SPECS lists the forms. `from_file` makes the operator that FILE.py:NAME:PARAMETERS names, alone
    or in a part. Raise BadInput for any other text.
    """
    words = text.split(":")
    try:
        if from_file and words[0].endswith(".py") and words[1:]:
            prox = from_file(text)
        else:
            prox = _parse(words, from_file)
    except BadInput:
        raise
    except ValueError:
        prox = None
    if prox is None:
        raise BadInput(f"the prox is {text!r}, but must be one of {', '.join(SPECS)}")
    return prox


_OF_NUMBERS: dict[tuple[str, int], type] = {
    ("zero", 0): Zero,
    ("l1", 1): L1,
    ("squared-l2", 1): SquaredL2,
    ("elastic-net", 2): ElasticNet,
    ("l2-ball", 1): L2Ball,
    ("box", 2): Box,
    ("non-negative", 0): NonNegative,
    ("simplex", 0): Simplex,
    ("simplex", 1): Simplex,
    ("l1-box", 3): L1Box,
}
"""The kinds by a spec's first word and the count of numbers after it."""


def _parse(words: list[str], from_file: Callable[[str], Prox] | None) -> Prox | None:
    """Return the operator that the words name, or None.

    Raise ValueError for a number that is none.
    """
    match words:
        case ["group-l1", strength, *groups]:
            pairs = (group.split("-") for group in groups)
            return GroupL1(float(strength), tuple((int(start), int(stop)) for start, stop in pairs))
        case ["nuclear-norm", strength, rows, cols]:
            return NuclearNorm(float(strength), (int(rows), int(cols)))
        case ["part", start, stop, *inner]:
            return Part(by_name(":".join(inner), from_file), int(start), int(stop))
    kind = _OF_NUMBERS.get((words[0], len(words) - 1))
    return kind and kind(*map(float, words[1:]))


def _soft_threshold(w: Tensor, threshold: float | Tensor) -> Tensor:
    """Return w with each entry moved towards 0 by the threshold, at most to 0."""
    return w.sign() * (w.abs() - threshold).clamp(min=0)


def _factor(step: float | Tensor, w: Tensor) -> float | Tensor:
    """Return the step in w's dtype.

    Raise BadInput for a step of shape (d,), since it would scale coordinates instead of rows.
    """
    if not isinstance(step, Tensor):
        return step
    if step.ndim and step.shape[-1] != 1:
        raise BadInput(
            f"the step has shape {tuple(step.shape)}, but must be a number or a tensor "
            "whose last axis has length 1"
        )
    return step.to(w)


def _slack(w: Tensor) -> float:
    """Return the relative distance from a constraint set that rounding may cause."""
    return math.sqrt(torch.finfo(w.dtype).eps)


def _indicator(w: Tensor, inside: Tensor) -> Tensor:
    """Return 0 where `inside` is true and +inf elsewhere."""
    return w.new_zeros(inside.shape).masked_fill(~inside, math.inf)


def _require(prox: Prox, field: str, ok: bool, accepted: str) -> None:
    """Raise BadInput, with the field's value and what is accepted, unless `ok`."""
    if not ok:
        raise BadInput(
            f"the {field} of {type(prox).__name__} is {getattr(prox, field)!r}, but must "
            f"be {accepted}"
        )


def _check_weight(prox: Prox, field: str) -> None:
    """Raise BadInput unless the field is a finite number, at least 0."""
    weight = getattr(prox, field)
    _require(
        prox, field, _is_number(weight) and 0 <= weight < math.inf, "a finite number, at least 0"
    )


def _is_number(value: object) -> bool:
    """Return whether the value is a real number."""
    return isinstance(value, Real)


def _is_slice(start: object, stop: object) -> bool:
    """Return whether 0 <= start < stop."""
    return isinstance(start, int) and isinstance(stop, int) and 0 <= start < stop
