"""Turn a record's floats into integers on the lattice, verified in integers.

Whatever the floats were, no record passes its bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from silodp.core.statistics.gram import CROSS, DIAGONAL, pairs
from silodp.silo.answer.slots import size_of


def _root_above(dim: int) -> int:
    """Return the square root of dim, rounded up, and at least 1."""
    return math.isqrt(max(0, dim - 1)) + 1


def quantised(rows: Tensor, clip: float, gamma: float) -> Tensor:
    """Return rows (m, d) of any floats as int64 rows k with sum(k^2) <= floor((C / gamma)^2).

    Each row is a function of its own row alone. A row is clipped to C less what rounding can add,
    gamma sqrt(d) / 2 (and 2^-30 of it for floats), divided by gamma and rounded to the nearest
    integers. A row becomes zero if it is zero, not finite or, against all arithmetic, above the
    bound.
    """
    # Squares are then added in one order, whatever another record contains.
    rows = rows.contiguous()
    most = int(Fraction(clip / gamma) ** 2)
    room = clip / gamma * (1 - 2.0**-30) - math.sqrt(rows.shape[1]) / 2
    largest = rows.abs().amax(1, keepdim=True)
    sound = torch.isfinite(largest) & (largest > 0)
    # Entries of sound rows are within [-1, 1], so no square overflows. Other rows may have any.
    unit = rows / torch.where(sound, largest, 1.0)
    length = torch.linalg.vector_norm(unit, dim=1, keepdim=True).clamp_(min=1.0)
    factor = torch.minimum(torch.where(sound, largest, 0.0) / gamma, room / length)
    rounded = unit.mul_(factor).round_()
    # The first check is in float64, to about d 2^-53. Below twice the bound an int64 sum of squares
    # cannot wrap. The second check is in integers, and decides (step 2 of the proof in `exact`).
    sound &= (_squares(rounded) <= 2.0 * most)[:, None]
    integers = rounded.masked_fill_(~sound, 0.0).long()
    return integers.masked_fill_((_squares(integers) > most)[:, None], 0)


def levelled(rows: Tensor, numbers: int, gamma: float, blocks: Sequence[int] = ()) -> Tensor:
    """Return rows of `numbers` numbers in [0, 1] and blocks of cells as int64 multiples of gamma.

    The cells of a block are >= 0 and sum to 1 at most. Without `blocks` all cells are one block. A
    row that is verified to be none of this form becomes zero, which is of this form. A row of a
    file has one cell of a block that is 1. A person's average shares the 1 among the cells of its
    rows. Any two such rows differ by at most sqrt(2) over a block: the distance is convex, so it is
    largest between corners, which are 0 and single cells of 1. gamma is a power of two below 1, so
    1 / gamma is an integer. Cells are rounded down, since otherwise their sum could be rounded up.
    """
    top = int(1 / gamma)
    scaled = (rows.nan_to_num(0.0, 0.0, 0.0) / gamma).clamp(-1, top + 1)
    integers = torch.cat([scaled[:, :numbers].round(), scaled[:, numbers:].floor()], 1).long()
    values = integers[:, :numbers]
    cells = integers[:, numbers:]
    sound = ((values >= 0) & (values <= top)).all(1) & (cells >= 0).all(1)
    for block in cells.split(list(blocks or (cells.shape[1],)), 1):
        sound &= block.sum(1) <= top
    return integers.masked_fill_(~sound[:, None], 0)


def multiplied(
    factors: Tensor, clip: float, gamma: float, real: Tensor | None = None, terms: int = 1
) -> Tensor:
    """Return products of rows of factors z (m, terms p) of any floats as int64 multiples of gamma
    (m, d), summed over the terms.

    No two rows of products are more than 2 C / gamma apart.

     1. k is z in steps of `fine`. That sum(k^2) <= K^2 over all terms is verified in integers
        (`quantised`).
     2. With a = DIAGONAL, c = CROSS, q = gamma / fine^2, a power of two, a row is round(a sum_t
        k_ti^2 / (a q)) and round(c sum_t k_ti k_tj / (a q)) for i < j, in integers.
     3. Before rounding two rows are at most sqrt(2) K^2 / q apart in norm (`statistics.gram` has
        the proof in `Factored`, which requires c^2 <= 2 a^2), and rounding adds at most sqrt(d).
     4. K is the largest integer with 2 K^4 <= (q (floor(2 C / gamma) - ceil(sqrt(d))))^2. With C /
        gamma < 2^30 and q <= 2^25, 2 c K^2 is below 2^62. It bounds the sums over terms too, since
        |sum_t k_ti k_tj| <= sum(k^2).

    If a record is a person, z are its rows, (m P, terms p), and `real` (m, P) marks those that
    exist. The result is the average of their products, rounded once more, so that rounding adds 2
    sqrt(d) in all. Averages are at most as far apart: they are positive semidefinite and have
    traces up to K^2. Integers are added in any order, so the products are made for as many places
    at a time as a chunk has.
    """
    size = factors.shape[1] // terms
    i, j = pairs(size)
    exponent = math.frexp(gamma)[1] - 1
    q = 2 ** (24 + exponent % 2)
    fine = math.ldexp(1.0, (exponent - q.bit_length() + 1) // 2)
    roundings = 1
    if real is not None:
        roundings = 2  # of the products, and of a person's average
    apart = int(Fraction(2 * clip / gamma)) - roundings * _root_above(len(i))
    most = math.isqrt(math.isqrt(q * q * apart * apart // 2))
    k = quantised(factors, fine * most, fine)
    weight = torch.where(i == j, 2 * DIAGONAL, 2 * CROSS)

    def products(k: Tensor) -> Tensor:
        doubled = k[..., i].mul_(k[..., j])
        for start in range(size, k.shape[-1], size):
            doubled += k[..., start + i] * k[..., start + j]
        return doubled.mul_(weight).add_(DIAGONAL * q).div_(2 * DIAGONAL * q, rounding_mode="floor")

    if real is None:
        return products(k)
    total = torch.zeros(len(real), len(i), dtype=torch.int64)
    rows = real.sum(1, keepdim=True).clamp(min=1)
    k = k.unflatten(0, real.shape)
    at_once = size_of(len(real) * len(i))
    for some, there in zip(k.split(at_once, 1), real.split(at_once, 1), strict=True):
        total += products(some).where(there[..., None], 0).sum(1)
    return (2 * total + rows).div_(2 * rows, rounding_mode="floor")


def _squares(rows: Tensor) -> Tensor:
    return torch.from_numpy(np.einsum("md,md->m", rows.numpy(), rows.numpy()))
