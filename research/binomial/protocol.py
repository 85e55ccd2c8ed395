"""P_1D and P_vec (Cheu et al. 2021, the paper's appendix) as three roles: local randomizer,
shuffler, analyzer. Arithmetic only.

Corrected against the print: a coordinate in [-L, L] is shifted to [0, 2L], so the range that g
levels divide is 2L; the analyzer subtracts p b for each of the m contributions; re-centring a sum
of m shifted values subtracts m L; and the answer is the mean over the m = M K contributions. Two
encodings give the server the same view:
- literal: g + b bits for each record and coordinate; the shuffler permutes all bits of a
  coordinate;
- counts: one integer for each silo and coordinate; the shuffler **adds** them and passes on the
  totals, never the separate integers. A uniform permutation of bits says no more than how many are
  ones, so either server view can be made from the other.

All randomness comes from `random_bytes(n) -> n bytes`, uniform and independent: a keystream from
operating-system entropy in a silo or a shuffler, `numpy.random.Generator.bytes` in simulation.
Rounding and noise are exact in law: no float decides a coin.

Whoever sees one sender's message sees it under that sender's own noise only. The shuffler sees a
silo's counts under Bin(K b, p); a silo that sends literal bits must permute its own K (g + b) bits
of a coordinate first, or each record stands under Bin(b, p).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from research.binomial.accountant import (
    MAX_LEVELS,
    MAX_TRIALS,
    BinomialSum,
    epsilon,
    is_power_of_half,
)
from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget, gdp_mu

RandomBytes = Callable[[int], bytes]
_FRACTION_BITS = 32
_CHUNK_WORDS = 2**20
_CHUNK_COINS = 2**26
EXCESS = 0.02
"""Of variance, that rounding may add: the least number of levels at which it does not add more is
taken.
"""


@dataclass(frozen=True)
class Parameters:
    """g levels that divide [0, 2L], and b noise bits with probability p for each record and
    coordinate.
    """

    levels: int
    noise_bits: int
    p: float

    def __post_init__(self) -> None:
        if self.levels < 1 or self.noise_bits < 0 or not is_power_of_half(self.p):
            raise BadInput(
                f"levels = {self.levels}, noise_bits = {self.noise_bits}, p = {self.p:g}; "
                "levels must be 1 or more, noise_bits 0 or more, and p one of 1/2, 1/4, 1/8, ..."
            )

    @property
    def bits(self) -> int:
        """Length of one record's message for one coordinate."""
        return self.levels + self.noise_bits


# --- local randomizer ----------------------------------------------------------------------------


def binomial(random_bytes: RandomBytes, trials: int, p: float, size: int) -> np.ndarray:
    """`size` independent draws of Bin(trials, p), p = 2^-j: the ones among `trials` coins, each the
    AND of j random bits.
    """
    draws = np.zeros(size, dtype=np.int64)
    while (
        trials > _CHUNK_COINS
    ):  # more coins than memory should hold at once: binomials of one p add up
        draws += binomial(random_bytes, _CHUNK_COINS, p, size)
        trials -= _CHUNK_COINS
    words = -(-trials // 64)
    ands = -math.frexp(p)[1] + 1
    if words == 0:
        return draws
    last = np.uint64(2 ** ((trials - 1) % 64 + 1) - 1)
    rows = max(1, _CHUNK_WORDS // words)
    for start in range(0, size, rows):
        n = min(rows, size - start)
        coins = np.frombuffer(random_bytes(8 * ands * n * words), dtype="<u8").reshape(
            ands, n, words
        )
        ones = np.bitwise_and.reduce(coins, axis=0)
        ones[:, -1] &= last
        draws[start : start + n] += np.bitwise_count(ones).sum(axis=1, dtype=np.int64)
    return draws


def lattice(values: np.ndarray, clip: float, levels: int) -> np.ndarray:
    """Each record (a row) clipped to l2 norm `clip`, shifted from [-L, L] to [0, 2L] and scaled to
    [0, g], in units of 2^-32.

    A record with a value that is not finite counts as zero. Two records end at most g (1 + 1e-6)
    apart, for d up to 10^7.
    """
    if not (clip > 0 and math.isfinite(clip)):
        raise BadInput(f"clip is {clip:g}; it must be finite and greater than 0")
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 2 or not x.size:
        raise BadInput(
            f"records have shape {x.shape}; one row for each record and one column for "
            "each coordinate are needed"
        )
    x = np.where(np.isfinite(x).all(axis=1, keepdims=True), x, 0.0)
    x = x / np.maximum(
        np.abs(x).max(axis=1, keepdims=True), clip
    )  # first, so that no square overflows; what lay outside still has norm >= 1
    x = x / np.maximum(np.sqrt(np.square(x).sum(axis=1, keepdims=True)), 1.0)
    unit = 2.0**_FRACTION_BITS
    return np.clip(np.rint((x + 1) * (levels / 2 * unit)), 0, levels * unit).astype(np.int64)


def rounded(
    values: np.ndarray, clip: float, parameters: Parameters, random_bytes: RandomBytes
) -> np.ndarray:
    """Unbiased randomised rounding of the scaled records to integers in 0 .. g: floor(u + theta),
    theta uniform for each entry.
    """
    if parameters.levels > MAX_LEVELS:
        raise BadInput(f"levels is {parameters.levels}; the randomizer takes at most {MAX_LEVELS}")
    scaled = lattice(values, clip, parameters.levels)
    theta = np.frombuffer(random_bytes(4 * scaled.size), dtype="<u4").reshape(scaled.shape)
    return (scaled + theta.astype(np.int64)) >> _FRACTION_BITS


def randomize_counts(
    values: np.ndarray, clip: float, parameters: Parameters, random_bytes: RandomBytes
) -> np.ndarray:
    """R_vec, counts: (K, d) records of one silo to d integers, the sum of the records' rounded
    values plus Bin(K b, p).
    """
    ones = rounded(values, clip, parameters, random_bytes)
    records, dimension = ones.shape
    return ones.sum(axis=0) + binomial(
        random_bytes, records * parameters.noise_bits, parameters.p, dimension
    )


# --- shuffler ------------------------------------------------------------------------------------


def add_counts(counts: Sequence[np.ndarray]) -> np.ndarray:
    """S, on counts: one total for each coordinate."""
    return np.stack(counts).sum(axis=0, dtype=np.int64)


# --- analyzer ------------------------------------------------------------------------------------


def sum_in_total(total, span, contributions: int, levels, noise_bits, p: float):
    """A_1D: unbiased estimate of the sum of m values in [0, span]: span / g (total - p b m); of
    numbers, arrays or tensors alike.
    """
    return (total - p * (noise_bits * contributions)) * (span / levels)


def mean_in_total(total, clip, contributions: int, levels, noise_bits, p: float):
    """A_vec: unbiased estimate of the mean of m clipped records: A_1D over [0, 2L], less m L, over
    m.
    """
    return (
        sum_in_total(total, 2 * clip, contributions, levels, noise_bits, p) - contributions * clip
    ) / contributions


def analyze_counts(
    total: np.ndarray, clip: float, contributions: int, parameters: Parameters
) -> np.ndarray:
    """A_vec from the totals, which are checked."""
    total = np.asarray(total)
    if contributions < 1 or total.min() < 0 or total.max() > contributions * parameters.bits:
        raise BadInput(
            f"a total lies outside 0 .. {contributions * parameters.bits}, the range of "
            f"{contributions} contributions"
        )
    return mean_in_total(
        total, clip, contributions, parameters.levels, parameters.noise_bits, parameters.p
    )


def variance(parameters: Parameters, contributions: int, clip: float) -> float:
    """Of the mean, for each coordinate, at most: (2L / g m)^2 (m / 4 + m b p (1 - p)).

    In place of m / 4 it has the sum of f (1 - f), f the part of a value that rounding decides.
    """
    noise = contributions * parameters.noise_bits * parameters.p * (1 - parameters.p)
    return (2 * clip / (parameters.levels * contributions)) ** 2 * (contributions / 4 + noise)


def message_bits(parameters: Parameters, records: int, dimension: int) -> dict[str, int]:
    """Bits that a silo of K records sends in a round: literal d K (g + b), counts d ceil(log2(K (g
    + b) + 1)).
    """
    most = records * parameters.bits
    return {"literal": dimension * most, "counts": dimension * most.bit_length()}


# --- parameters ----------------------------------------------------------------------------------


def noise(parameters: Parameters, contributions: int, dimension: int) -> BinomialSum:
    """The release as the accountant reads it: m contributions leave Bin(m b, p) on each total."""
    return BinomialSum(
        contributions * parameters.noise_bits, parameters.p, parameters.levels, dimension
    )


def proven(
    contributions: int, dimension: int, target_epsilon: float, target_delta: float
) -> Parameters:
    """The parameters proven by Cheu et al. 2021 for one release of m contributions: safe, and
    enormous.

    g = max(2 sqrt m, d, 4), b = 24e4 g^2 ln^2(4 (d^2 + 1) / delta) / (eps^2 m), p = 1/4.
    """
    if not (0 < target_epsilon <= 15 and 0 < target_delta < 0.5):
        raise BadInput(
            f"epsilon = {target_epsilon:g}, delta = {target_delta:g}; the proof needs 0 < "
            "epsilon <= 15 and 0 < delta < 1/2"
        )
    levels = max(math.ceil(2 * math.sqrt(contributions)), dimension, 4)
    log = math.log(4 * (dimension**2 + 1) / target_delta)
    return Parameters(
        levels, math.ceil(24e4 * levels**2 * log**2 / (target_epsilon**2 * contributions)), 0.25
    )


def numerical(
    contributions: int,
    dimension: int,
    target_epsilon: float,
    target_delta: float,
    *,
    rounds: int = 1,
    p: float = 0.5,
) -> Parameters:
    """Least b at which `rounds` releases of at least m contributions are (epsilon, delta)-DP by the
    accountant of `binomial`.

    Bits grow with g, and rounding adds (d + m / z^2) / (4 g^2) to the variance, z the Gaussian's
    noise multiplier: d / 4 to the shift's square, m / 4 to the noise. So the least g at which that
    is EXCESS is taken.
    """
    multiplier = math.sqrt(rounds) / gdp_mu(Budget(target_epsilon, target_delta))
    levels = max(
        1, math.ceil(math.sqrt((dimension + contributions / multiplier**2) / (4 * EXCESS)))
    )
    most = MAX_TRIALS // contributions

    def fits(b: int) -> bool:
        release = noise(Parameters(levels, b, p), contributions, dimension)
        return epsilon([(release, rounds)], target_delta) <= target_epsilon

    bits = least_bits(
        fits, math.ceil((multiplier * levels) ** 2 / (p * (1 - p) * contributions)), most
    )
    if bits is None:
        raise BadInput(
            f"no noise up to {MAX_TRIALS} bits gives epsilon = {target_epsilon:g}; use "
            f"fewer levels than {levels}"
        )
    return Parameters(levels, bits, p)


def least_bits(fits: Callable[[int], bool], guess: int, most: int) -> int | None:
    """The least b with fits(b), for noise of which more always fits; None where even `most` does
    not.
    """
    low = 0
    high = min(most, max(1, guess))
    while not fits(high):
        if high == most:
            return None
        low = high
        high = min(most, math.ceil(high * 1.1) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high
