"""A record's floats as integers on the lattice, verified in integers: whatever the floats were, no
record passes its bound.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from silodp.core.statistics.gram import CROSS, DIAGONAL, pairs
from silodp.silo.answer.slots import size_of


def quantised(rows: Tensor, clip: float, gamma: float) -> Tensor:
    """Rows (m, d) of any floats as int64 rows k with sum(k^2) <= floor((C / gamma)^2), each a
    function of its own row alone.

    A row is clipped to C less what rounding can add, gamma sqrt(d) / 2 (and 2^-30 of it for
    floats), divided by gamma and rounded to the nearest integers. A row that is zero, not finite
    or, against all arithmetic, above the bound becomes zero.
    """
    rows = (
        rows.contiguous()
    )  # whatever one record holds, the others' squares are added in one order
    most = int(Fraction(clip / gamma) ** 2)
    room = clip / gamma * (1 - 2.0**-30) - math.sqrt(rows.shape[1]) / 2
    largest = rows.abs().amax(1, keepdim=True)
    sound = torch.isfinite(largest) & (largest > 0)
    unit = rows / torch.where(
        sound, largest, 1.0
    )  # entries within [-1, 1]: no square overflows; a row that is not sound may hold anything
    length = torch.linalg.vector_norm(unit, dim=1, keepdim=True).clamp_(min=1.0)
    whole = unit.mul_(
        torch.minimum(torch.where(sound, largest, 0.0) / gamma, room / length)
    ).round_()
    # float64 first, to about d 2^-53: below twice the bound an int64 sum of squares cannot wrap,
    # and then it decides
    sound &= (_squares(whole) <= 2.0 * most)[:, None]
    integers = whole.masked_fill_(~sound, 0.0).long()
    return integers.masked_fill_((_squares(integers) > most)[:, None], 0)


def levelled(rows: Tensor, numbers: int, gamma: float) -> Tensor:
    """Rows of `numbers` numbers in [0, 1] and cells >= 0 that sum to 1 at most, as int64 multiples
    of gamma: those verified to be such.

    A row of a file has one cell that is 1; a person's average shares the 1 among the cells of its
    rows. Any two such rows differ by at most sqrt(2) over the cells: the distance is convex, so
    that it is largest between corners, which are 0 and single cells of 1. gamma is a power of two
    below 1, so that 1 / gamma is an integer; cells are rounded down, or their sum could be rounded
    up. A row of any other form becomes zero, which is of this form.
    """
    top = int(1 / gamma)
    whole = (rows.nan_to_num(0.0, 0.0, 0.0) / gamma).clamp(-1, top + 1)
    whole = torch.cat([whole[:, :numbers].round(), whole[:, numbers:].floor()], 1).long()
    values = whole[:, :numbers]
    cells = whole[:, numbers:]
    sound = ((values >= 0) & (values <= top)).all(1) & (cells >= 0).all(1) & (cells.sum(1) <= top)
    return whole.masked_fill_(~sound[:, None], 0)


def multiplied(factors: Tensor, clip: float, gamma: float, real: Tensor | None = None) -> Tensor:
    """The products of rows of factors z (m, p) of any floats, as int64 multiples of gamma (m, d) of
    which no two are more than 2 C / gamma apart.

    k is z in steps of `fine`, with sum(k^2) <= K^2 verified in integers (`quantised`). With a =
    DIAGONAL, c = CROSS, q = gamma / fine^2, a power of two, a row is round(a k_i^2 / (a q)) and
    round(c k_i k_j / (a q)) for i < j, in integers. Before rounding two rows are at most sqrt(2)
    K^2 / q apart in norm (`statistics.gram.Gram` has the proof, which asks c^2 <= 2 a^2), and
    rounding adds at most sqrt(d): K is the largest integer with 2 K^4 <= (q (floor(2 C / gamma) -
    ceil(sqrt(d))))^2. With C / gamma < 2^30 and q <= 2^25, 2 c K^2 is below 2^62.

    Where a record is a person, z are its rows, (m P, p), and `real` (m, P) says which are there:
    the average of their products, rounded once more, so that rounding adds 2 sqrt(d) in all.
    Averages are at most as far apart: A and A' of matrices k k' have <A, A'> >= 0 and norms up to
    K^2. As integers are added, the products of as many places at a time as a chunk holds.
    """
    i, j = pairs(factors.shape[1])
    exponent = math.frexp(gamma)[1] - 1
    q = 2 ** (24 + exponent % 2)
    fine = math.ldexp(1.0, (exponent - q.bit_length() + 1) // 2)
    apart = int(Fraction(2 * clip / gamma)) - (1 if real is None else 2) * (
        math.isqrt(len(i) - 1) + 1
    )
    most = math.isqrt(math.isqrt(q * q * apart * apart // 2))
    k = quantised(factors, fine * most, fine)
    weight = torch.where(i == j, 2 * DIAGONAL, 2 * CROSS)

    def products(k: Tensor) -> Tensor:
        doubled = k[..., i].mul_(k[..., j]).mul_(weight)
        return doubled.add_(DIAGONAL * q).div_(2 * DIAGONAL * q, rounding_mode="floor")

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
