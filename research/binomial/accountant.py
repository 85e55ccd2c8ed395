"""What integer sums with binomial noise cost: a rigorous upper bound on epsilon.

A release is d integer totals. Each record adds a vector rounded at random from u in [0, g]^d, and
each total gets Bin(B, p). Neighbours replace one record, whose u moves by t with ||t||_2 <= g: the
l2 ball of diameter 2L scaled by g / 2L. All numbers are in lattice units.

**Claim.** For T releases, alpha >= 2 and any tail > 0 the transcript is (epsilon, delta)-DP, in
both directions, with delta = T d tail + what the conversion of T D_alpha takes, and

    D_alpha <= min{ c (1 + (alpha - 1) c) (||t||^2 + d / 4),  c (||t|| + sqrt d)^2 },   c = max over
    1 <= |k| <= g of D_alpha(k) / k^2,

where D_alpha(k) is the divergence of Bin(B, p) + k from Bin(B, p) with the first restricted to a
window [lo, hi] that it misses with probability <= tail. For a Gaussian of variance s^2 c would be
alpha / (2 s^2), and d / 4 would be missing.

*Windows.* Let Q be the law under one data set and P under its neighbour; replace each binomial of P
by its restriction to a window, not normalised. What results, P~, is a measure <= P that lacks mass
<= T d tail, so P(S) <= P~(S) + T d tail. The conversion from Renyi divergence rests on a pointwise
inequality between densities and holds for P~ as it does for a probability. Round by round, given
the history, sum P~^alpha Q^(1 - alpha) is a product of sums over coordinates; it is at most the
product of their largest values over histories, which is composition for adaptively chosen queries.
The window lies where Q > 0, so nothing is infinite; it may depend on the shift.

*Rounding.* u_j is rounded to floor(u_j + theta_j), theta uniform and independent over coordinates,
records and rounds. Give both data sets the same thetas. The other records then cancel, and
coordinate j shifts by an integer k_j that is floor or ceil of t_j, the latter with probability f =
frac(t_j). (x, y) -> x^alpha y^(1 - alpha) is jointly convex, so the sum for the mixtures is at most
the expectation over the thetas of prod_j exp((alpha - 1) c k_j^2). Bounding that by its largest
value (quasi-convexity) gives the second form, as
||k|| <= ||t|| + sqrt d. But the thetas are independent, and keeping the expectation is better:
k_j^2 takes two values 2 floor|t_j| + 1
apart with mean t_j^2 + f (1 - f) <= t_j^2 + 1/4, so by Hoeffding's lemma with beta = (alpha - 1) c

    log E exp(beta k_j^2) <= beta (t_j^2 + 1/4) + beta^2 (2 |t_j| + 1)^2 / 8 <= beta (1 + beta)
    (t_j^2 + 1/4).

*Once.* A silo may round its sum U of all records instead, floor(U_j + theta_j) with one uniform
theta for each coordinate: U_j + theta_j is uniform modulo 1, so a record that moves U by t shifts
it by floor or ceil of t_j with the same probabilities, and all else stands. Where U is kept within
a range first, t only gets shorter, coordinate by coordinate.

*Both directions.* Signs of k are free and differ between coordinates, so c is over both; k < 0 is k
> 0 for Bin(B, 1 - p), mirrored.

*Cells.* For k > 0, nu(z) / nu(z + k) is a constant times prod_i (z + i) / (B - z - i + 1): a
product of positive, increasing, convex functions of z, so convex, and so is its power alpha - 1 >=
1. Moving the mass at z to the two ends of a cell around it, mean kept, can only raise the
expectation of a convex function. So a few hundred nodes do for any B, at the price of about s^2 /
6000 of variance.

*Shifts.* log nu is concave, hence k -> (alpha - 1) D_alpha(k) is convex (a sum of log-convex terms)
and between two computed k the chord bounds it: a geometric grid of k is enough. Nothing is assumed
about where the maximum lies.

*Floats.* p is a power of two, so h(z) = log nu(z) - log nu(z + 1) comes from exact integers with a
relative error below 2^-50, and the mass of the window is normalised to 1, which it does not exceed:
no log-gamma enters. The errors of sums are bounded a priori and added.

Sampling of silos amplifies nothing here, and no flag offers it. It would take that a release with
the silo in and one with it out are as close as neighbours are; but those differ by a whole silo's K
records, a shift of up to K g, so which silos took part shows in the total.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from silodp.core.errors import BadInput
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.privacy.accounting import renyi_conversion

MAX_TRIALS = 2**42
MAX_LEVELS = 2**16
MAX_WINDOW = 2**23
ORDERS = np.geomspace(2, 1024, 28)
TAIL_SHARES = (0.01, 0.3)
"""Share of delta that pays for the tails; the second only where noise is so scarce that the first
leaves no window.
"""
_CELLS_PER_STD = 32
_ULP = 2.0**-52
_AT_ONCE = 2**16
"""Numbers of one block, so that the memory of a price does not grow with its levels or window."""


@dataclass(frozen=True)
class BinomialSum:
    """One release: `dimension` totals of records rounded into 0 .. `levels`, each with noise
    Bin(`trials`, `p`).
    """

    trials: int
    p: float
    levels: int
    dimension: int

    def __post_init__(self) -> None:
        if not is_power_of_half(self.p):
            raise BadInput(
                f"p is {self.p:g}; it must be 1/2, 1/4, 1/8, ... (down to 2^-10), which "
                "random bits draw exactly"
            )
        if not 1 <= self.levels <= MAX_LEVELS:
            raise BadInput(f"levels is {self.levels}; it must lie between 1 and {MAX_LEVELS}")
        if self.dimension < 1:
            raise BadInput(f"dimension is {self.dimension}; it must be 1 or more")
        if not 0 <= self.trials <= MAX_TRIALS:
            raise BadInput(f"trials is {self.trials}; it must lie between 0 and {MAX_TRIALS}")

    @property
    def variance(self) -> float:
        """Of one total's noise, in lattice units."""
        return self.trials * self.p * (1 - self.p)

    @property
    def shift(self) -> float:
        """Largest ||t||_2 when a record is replaced, with the rounding tolerance of clipping
        charged.
        """
        return self.levels * (1 + CLIP_TOLERANCE)


def is_power_of_half(p: float) -> bool:
    """Whether p is 2^-j for 1 <= j <= 10."""
    return 0 < p < 1 and math.frexp(p)[0] == 0.5 and p >= 2.0**-10


# --- one coordinate ------------------------------------------------------------------------------


def _reach(trials: int, p: float, log_inverse: float) -> int:
    """Least x >= trials p with P(Bin > x) <= exp(-log_inverse), by Chernoff's bound exp(-B KL((x +
    1) / B, p)); at most `trials`.
    """

    def enough(x: int) -> bool:
        if x >= trials:
            return True
        hits = x + 1
        misses = trials - x - 1
        expected = trials * p
        divergence = hits * math.log1p((hits - expected) / expected)
        if misses:
            divergence += misses * math.log1p((misses - trials * (1 - p)) / (trials * (1 - p)))
        # the numerators are exact, so up to MAX_WINDOW the two terms cancel to within 1e-8
        return divergence >= log_inverse * (1 + 1e-9) + 1e-6

    # not enough below the mean, enough at the end
    low = math.ceil(trials * p) - 1
    high = trials
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high


def _window(trials: int, p: float, tail: float) -> tuple[int, int]:
    """An interval that Bin(trials, p) misses with probability <= tail."""
    log_inverse = math.log(2 / tail)
    return trials - _reach(trials, 1 - p, log_inverse), _reach(trials, p, log_inverse)


def _steps(trials: int, p: float, z: np.ndarray) -> np.ndarray:
    """h(z) = log nu(z) - log nu(z + 1) = log of (z + 1)(1 - p) / ((B - z) p), to a relative
    2^-50.
    """
    x = (z + 1 - p * (trials + 1)) / (p * (trials - z))
    near = np.abs(x) < 0.5
    return np.where(
        near, np.log1p(np.where(near, x, 0.0)), np.log((z + 1) * (1 - p) / ((trials - z) * p))
    )


@dataclass(frozen=True, eq=False)
class _Cells:
    """The noise moved to the nodes of its cells, and the privacy loss log nu(z) / nu(z + k) at each
    node for a grid of shifts.
    """

    weights: np.ndarray  # (nodes,), sum 1
    shifts: np.ndarray  # (shifts,)
    losses: np.ndarray  # (shifts, nodes)
    doubt: float  # relative error of weights and of sums over nodes

    def divergence_per_square(self, order: float) -> float:
        """Upper bound on D_alpha(k) / k^2 over 1 <= k <= g."""
        with np.errstate(over="ignore", invalid="ignore"):
            gain = np.expm1((order - 1) * self.losses)
            top = np.log1p(
                np.maximum(0.0, gain @ self.weights + self.doubt * (np.abs(gain) @ self.weights))
            )
        k = self.shifts
        top += (order - 1) * np.abs(self.losses).max(axis=1) * (k + 8) * 2 * _ULP
        if not np.all(np.isfinite(top)):
            return math.inf
        slope = np.diff(top) / np.diff(k)
        start = top[:-1] - slope * k[:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            turn = np.where(
                (start < 0) & (slope > 0), -2 * start / slope, k[:-1]
            )  # where a chord over k^2 is largest
        turn = np.where(
            np.diff(k) > 1, np.clip(turn, k[:-1], k[1:]), k[1:]
        )  # between neighbouring integers there is no shift
        worst = max(np.max(top / k**2), np.max((start + slope * turn) / turn**2, initial=0.0))
        return float(worst) * (1 + 1e-12) / (order - 1)


def _losses(trials: int, p: float, nodes: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Return log nu(z) / nu(z + k) for each shift k, in increasing order, and each node z.

    The steps are summed one after the other, in blocks, so that only the wanted sums are kept.
    """
    losses = np.empty((len(shifts), len(nodes)))
    so_far = np.zeros(len(nodes))
    rows = max(1, _AT_ONCE // len(nodes))
    for first in range(0, int(shifts[-1]), rows):
        block = _steps(
            trials, p, nodes + np.arange(first, min(first + rows, int(shifts[-1])))[:, None]
        )
        block[0] += so_far
        sums = np.cumsum(block, axis=0)
        wanted = (shifts > first) & (shifts <= first + len(sums))
        losses[wanted] = sums[shifts[wanted] - first - 1]
        so_far = sums[-1]
    return losses


@functools.lru_cache(maxsize=16)
def _cells(trials: int, p: float, levels: int, tail: float) -> _Cells | None:
    """Cells for shifts by +1 .. +levels, or None where the noise is too narrow to have a window
    that it misses so seldom.
    """
    low, high = _window(trials, p, tail)
    if high + levels > trials or high <= low:
        return None
    if high - low > MAX_WINDOW:
        raise BadInput(
            f"noise of std {math.sqrt(trials * p * (1 - p)):.3g} is too wide for the "
            "accountant; use fewer levels or less noise"
        )
    size = high - low + 1
    h = np.empty(size - 1)
    for first in range(0, size - 1, _AT_ONCE):
        last = min(first + _AT_ONCE, size - 1)
        h[first:last] = _steps(trials, p, np.arange(low + first, low + last, dtype=np.float64))
    mode = min(max(math.floor((trials + 1) * p) - low, 0), high - low)
    log_nu = np.concatenate([np.cumsum(h[:mode][::-1])[::-1], [0.0], -np.cumsum(h[mode:])])

    width = max(1, math.floor(math.sqrt(trials * p * (1 - p)) / _CELLS_PER_STD))
    nodes = np.append(np.arange(low, high, width, dtype=np.float64), high)
    to_the_left = np.zeros(len(nodes))
    to_the_right = np.zeros(len(nodes))
    for first in range(0, size, _AT_ONCE):
        z = np.arange(low + first, min(low + first + _AT_ONCE, high + 1), dtype=np.float64)
        nu = np.exp(log_nu[first : first + len(z)])
        cell = np.minimum((z - low) // width, len(nodes) - 2).astype(np.int64)
        right = (z - nodes[cell]) / (nodes[cell + 1] - nodes[cell])
        np.add.at(to_the_left, cell, nu * (1 - right))
        np.add.at(to_the_right, cell + 1, nu * right)
    weights = to_the_left + to_the_right

    dense = np.arange(1, min(levels, 32) + 1)
    if levels > 32:
        sparse = np.ceil(
            np.geomspace(32, levels, max(2, math.ceil(math.log(levels / 32) / 0.05) + 1))
        )
    else:
        sparse = dense
    shifts = np.unique(np.minimum(np.concatenate([dense, sparse]), levels)).astype(np.int64)
    losses = _losses(trials, p, nodes, shifts)
    doubt = (
        2.1 * (size + 8) * 2 * _ULP * (float(np.abs(log_nu).max()) + 1) + (len(nodes) + 16) * _ULP
    )
    return _Cells(weights / weights.sum(), shifts.astype(np.float64), losses, doubt)


# --- releases ------------------------------------------------------------------------------------


def work(release: BinomialSum, tail: float) -> int:
    """Return how many numbers `divergence_per_square` computes, without computing them."""
    if release.trials == 0:
        return 0
    found = 0
    for p in {release.p, 1 - release.p}:
        low, high = _window(release.trials, p, tail)
        window = max(0, high - low)
        if high + release.levels <= release.trials and 0 < window <= MAX_WINDOW:
            width = max(1, math.floor(math.sqrt(release.variance) / _CELLS_PER_STD))
            found += 2 * window + (window // width + 2) * release.levels
    return found


def divergence_per_square(release: BinomialSum, order: float, tail: float) -> float:
    """c(alpha) of the module's claim; infinite where the noise has no window that it misses with
    probability <= tail.
    """
    if order < 2:
        raise BadInput(
            f"the Renyi order is {order:g}; the binomial accountant's proof needs 2 or more"
        )
    worst = 0.0
    for p in {release.p, 1 - release.p}:
        if release.trials:
            cells = _cells(release.trials, p, release.levels, tail)
        else:
            cells = None
        if cells is None:
            worst = math.inf
        else:
            worst = max(worst, cells.divergence_per_square(order))
        if math.isinf(worst):
            break
    return worst


def renyi(release: BinomialSum, order: float, tail: float) -> float:
    """D_alpha of one release, up to a set of probability dimension x tail that must be paid from
    delta.
    """
    c = divergence_per_square(release, order, tail)
    kept = c * (1 + (order - 1) * c) * (release.shift**2 + release.dimension / 4)
    return min(kept, c * (release.shift + math.sqrt(release.dimension)) ** 2) * (1 + 1e-12)


def epsilon(
    releases: Sequence[tuple[BinomialSum, int]], delta: float, *, rho: float = 0.0
) -> float:
    """Upper bound on epsilon at delta for (release, rounds) composed, on a schedule fixed in
    advance; infinite where none can be given.

    `rho` is the zCDP of Gaussian releases beside them: each adds order x rho to the divergence.
    """
    if not 0 < delta < 1:
        raise BadInput(f"delta is {delta:g}; it must lie strictly between 0 and 1")
    paying = sum(release.dimension * rounds for release, rounds in releases)
    if not paying and not rho:
        return 0.0
    for share in TAIL_SHARES:
        tail = share * delta / max(paying, 1) * (1 - 1e-12)
        rest = delta * (1 - share) * (1 - 1e-12)
        best = _least(
            lambda a, t=tail: (
                a * rho
                + sum(rounds * renyi(release, a, t) for release, rounds in releases if rounds)
            ),
            rest,
        )
        if math.isfinite(best):
            return best
    return math.inf


def _least(divergence: Callable[[float], float], delta: float) -> float:
    """Least epsilon over orders >= 2, by a coarse scan and a search around its best; every order
    gives a valid bound.
    """

    def at(order: float) -> float:
        return max(0.0, divergence(order) * (1 + 1e-12) + renyi_conversion(order, delta) + 1e-12)

    values = [at(a) for a in ORDERS]
    best = int(np.argmin(values))
    if not math.isfinite(values[best]):
        return math.inf
    from scipy import optimize  # slow to load

    low = ORDERS[max(best - 1, 0)]
    high = ORDERS[min(best + 1, len(ORDERS) - 1)]
    refined = optimize.minimize_scalar(
        at, bounds=(float(low), float(high)), method="bounded", options={"maxiter": 8}
    )
    return min(values[best], float(refined.fun))  # type: ignore[attr-defined]
