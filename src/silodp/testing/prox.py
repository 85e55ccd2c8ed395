"""Check on random points that an operator is the proximal operator of its function."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from silodp.core.problem.problem import shown
from silodp.core.problem.prox import Prox
from silodp.testing.sentence import one_sentence

Reference = Callable[[Any], tuple[Any, list[Any]]]


def check_prox(
    prox: Prox,
    dim: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    reference: Reference | None = None,
) -> None:
    """Check a prox of yours.

    Raise AssertionError with one sentence if something is wrong.

    On random vectors of `dim` entries, it must be the proximal operator of the convex f1 in
    `prox.value`. The check covers the optimality certificate, firm non-expansiveness, agreement
    between steps, that rows of a batch do not mix, and that its numbers are shown, which a
    definition needs.

    `reference` maps a cvxpy variable y to (f1(y) as a cvxpy expression, constraints). If it is
    given, cvxpy must find the same minimiser.
    """
    if isinstance(prox, type):
        name = prox.__name__
    else:
        name = type(prox).__name__
    assert not isinstance(prox, type), f"{name} is a class; give an object of it, with its numbers"
    for part, form in (("value", "value(w)"), ("__call__", "__call__(w, step)")):
        assert callable(getattr(prox, part, None)), (
            f"{name} has no {form}; a prox is a frozen dataclass with value(w) and "
            "__call__(w, step)"
        )
    random = torch.Generator().manual_seed(seed)
    w = _points(dim, random, dtype)
    step = _steps(random, dtype)
    with one_sentence(name):
        _check_shapes(prox, w, step)
        _check_optimal(prox, w, step, random)
        _check_firmly_nonexpansive(prox, w, step, random)
        _check_steps_agree(prox, w, step)
        _check_rows_do_not_mix(prox, w, step)
        if reference is not None:
            _check_against_cvxpy(prox, w, step, reference)
        shown(prox)


def _points(dim: int, random: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return small, middling and large vectors, two with ties, and zero: (6, dim)."""
    draws = torch.randn(5, dim, generator=random, dtype=torch.float64) * torch.tensor(
        [[0.1], [1.0], [10.0], [1.0], [3.0]]
    )
    draws[3:].round_()
    return torch.cat([draws, torch.zeros(1, dim)]).to(dtype)


def _steps(random: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return one step for each of the points, between 0.01 and 10: (6, 1)."""
    return (10 ** (3 * torch.rand(6, 1, generator=random, dtype=torch.float64) - 2)).to(dtype)


def _tolerance(w: Tensor) -> float:
    """Return the tolerance for a point's type.

    It is wider than the distance from a constraint set at which f1 may still call a point feasible.
    """
    return 4 * math.sqrt(torch.finfo(w.dtype).eps)


def _check_shapes(prox: Prox, w: Tensor, step: Tensor) -> None:
    """Check shapes and types, and that the argument is not changed."""
    before = w.clone()
    y = prox(w, step)
    value = prox.value(w)
    for part, result in (("prox", y), ("value", value)):
        assert isinstance(result, Tensor), (
            f"{prox}: {part} gives {type(result).__name__}, not a tensor"
        )
    assert torch.equal(w, before), f"{prox}: the argument was changed in place"
    assert y.shape == w.shape, f"{prox}: prox of shape {tuple(w.shape)} has shape {tuple(y.shape)}"
    assert value.shape == w.shape[:-1], (
        f"{prox}: value of shape {tuple(w.shape)} has shape {tuple(value.shape)}"
    )
    assert y.dtype == value.dtype == w.dtype, (
        f"{prox}: {w.dtype} became {y.dtype} in prox and {value.dtype} in value"
    )
    assert prox.value(y).isfinite().all(), f"{prox}: prox left the domain, where f1 is finite"


def _check_optimal(prox: Prox, w: Tensor, step: Tensor, random: torch.Generator) -> None:
    """Check that y = prox(w) has the least objective among candidates z.

    Also (w - y) / step must be a subgradient of f1 at y.
    """
    y = prox(w, step)
    z = _candidates(prox, y, random)  # (k, 6, dim)
    f_y = prox.value(y)
    f_z = prox.value(z)
    s = step[..., 0]
    objective_y = s * f_y + (y - w).square().sum(-1) / 2
    objective_z = s * f_z + (z - w).square().sum(-1) / 2
    scale = 1 + objective_y + (w - y).norm(dim=-1) * ((z - y).norm(dim=-1) + y.norm(dim=-1))
    better = objective_y - objective_z - _tolerance(w) * scale
    assert (better <= 0).all(), (
        f"{prox}: another point has an objective lower by {better.max():.2g}, so prox is "
        "not the minimiser"
    )
    violation = (
        s * f_y + ((w - y) * (z - y)).sum(-1) - s * f_z - _tolerance(w) * (scale + (s * f_z).abs())
    )
    violation = violation[f_z.isfinite()]
    assert (violation <= 0).all(), (
        f"{prox}: step f1(z) >= step f1(y) + <w - y, z - y> fails by {violation.max():.2g}"
    )


def _candidates(prox: Prox, y: Tensor, random: torch.Generator) -> Tensor:
    """Return points to compare with y: far and near, anywhere and inside the domain.

    Points outside the domain have f1 = +inf and are never better.
    """

    def normal(*lead: int) -> Tensor:
        """Return normal numbers in the shape of y, with these leading axes."""
        return torch.randn(*lead, *y.shape, generator=random, dtype=torch.float64).to(y)

    one = y.new_ones(y.shape[:-1])[..., None]
    weights = normal(8).exp()
    # These are inside a simplex, which random points miss.
    on_simplex = weights / weights.sum(-1, keepdim=True) * y.sum(-1, keepdim=True)
    far = torch.cat(
        [
            normal(8),
            prox(5 * normal(8), one.expand(8, *one.shape)),
            on_simplex,
            torch.zeros_like(y)[None],
        ]
    )
    near = [y + size * normal(16) for size in (0.3, 0.03, 0.003)]
    between = [y + size * (far - y) for size in (0.3, 0.03, 0.003)]
    return torch.cat([far, *near, *between])


def _check_firmly_nonexpansive(
    prox: Prox, w: Tensor, step: Tensor, random: torch.Generator
) -> None:
    """Check ||prox(u) - prox(v)||^2 <= <prox(u) - prox(v), u - v>, for far and near pairs."""
    for size in (5.0, 0.1):
        other = w + size * torch.randn(w.shape, generator=random, dtype=torch.float64).to(w)
        moved = prox(w, step) - prox(other, step)
        excess = (moved * (moved - (w - other))).sum(-1) - _tolerance(w) * (1 + w.square().sum(-1))
        assert (excess <= 0).all(), f"{prox}: not firmly non-expansive, by {excess.max():.2g}"


def _check_steps_agree(prox: Prox, w: Tensor, step: Tensor) -> None:
    """Check that y = prox(w, step) is also prox(y + r (w - y), r step) for each r > 0.

    For an indicator, y must be a fixed point for every step.
    """
    y = prox(w, step)
    for r in (0.01, 0.5, 20.0):
        _assert_close(
            prox(y + r * (w - y), r * step),
            y,
            f"{prox}: prox(y + r (w - y), r step) is not y = prox(w, step) for r = {r}",
        )
    values = prox.value(torch.cat([w, -w, y]))
    if ((values == 0) | values.isinf()).all():
        _assert_close(prox(y, 7 * step), y, f"{prox}: a projected point is not its own projection")


def _check_rows_do_not_mix(prox: Prox, w: Tensor, step: Tensor) -> None:
    """Check that batches give what single rows give.

    The batches have leading axes, a step for each row, and one step for all as a number or tensor.
    """
    alone = torch.stack([prox(row, s) for row, s in zip(w, step[:, 0].tolist(), strict=True)])
    values = torch.stack([prox.value(row) for row in w])
    _assert_close(
        prox(w, step), alone, f"{prox}: rows with their own steps differ from one row at a time"
    )
    _assert_close(
        prox(w.reshape(2, 3, -1), step.reshape(2, 3, 1)).reshape(w.shape),
        alone,
        f"{prox}: two leading axes differ from one",
    )
    _assert_close(
        prox.value(w.reshape(2, 3, -1)).reshape(-1),
        values,
        f"{prox}: value of a batch differs from one row at a time",
    )
    for shape in ((), (1,), (1, 1)):
        shared = step[0].reshape(shape)
        _assert_close(
            prox(w, shared),
            prox(w, shared.item()),
            f"{prox}: a step of shape {shape} differs from the same number",
        )


def _check_against_cvxpy(prox: Prox, w: Tensor, step: Tensor, reference: Reference) -> None:
    """Check that cvxpy finds the same minimiser."""
    import cvxpy as cp  # a development dependency, needed only with a reference

    for row, s, ours in zip(w, step[:, 0].tolist(), prox(w, step), strict=True):
        y = cp.Variable(len(row))
        f1, constraints = reference(y)
        problem = cp.Problem(
            cp.Minimize(s * f1 + cp.sum_squares(y - row.double().numpy()) / 2), constraints
        )
        problem.solve(solver=cp.CLARABEL)
        theirs = torch.as_tensor(y.value, dtype=w.dtype)
        error = (ours - theirs).norm()
        allowed = max(1e-4, _tolerance(w)) * (1 + row.norm())
        assert error <= allowed, (
            f"{prox}: differs from cvxpy's minimiser by {error:.2g}, more than {allowed:.2g}"
        )


def _assert_close(got: Tensor, wanted: Tensor, message: str) -> None:
    """Raise AssertionError unless two tensors agree up to rounding."""
    tolerance = _tolerance(wanted)
    assert torch.allclose(got, wanted, rtol=tolerance, atol=tolerance), (
        f"{message}; largest difference {(got - wanted).abs().max():.2g}"
    )
