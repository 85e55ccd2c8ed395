"""Draw exact integer noise and secret coins for a deployed gate.

They come from operating-system entropy and nothing else: no seed enters here. `rounded_gaussian(s,
d)` is round(N(0, s^2)) in lattice units, the post-processing of a continuous Gaussian. Hence it is
exactly mu-GDP on integer sums (Mironov 2012 is about the floats that this replaces). Its law is
that of a *real* Gaussian, not of a float near one.

Method: inversion with certified rounding. A coordinate is a sign and p = 0.b1 b2 b3 ... / 2,
uniform on (0, 1/2), whose bits come from the keystream as they are needed; |Z| = Q^-1(p) with Q(x)
= P(N(0, 1) > x), and k = floor(s |Z| + 1/2). Three cases partition the bits:

 1. 63 bits and the float ndtri place s |Z| + 1/2 in an interval that contains no integer: k is
    certain, and no further bit could change it.
 2. The interval contains an integer (a near-tie, probability 2^-42 s): compare p with Q((k +
    1/2)/s) in integer interval arithmetic, and draw more bits of p until the two are apart.
 3. p < 2^-20, where 63 bits are too few: bisect for k with the comparisons of case 2 alone, to any
    depth of the tail.

Each case returns the one k that *every* completion of the bits drawn so far has, so the law is
exact whatever the cases' probabilities. A float is trusted in case 1 only, for |ndtri(p) -
Phi^-1(p)| <= 2^-44 on [2^-20, 1/2]; it is 2^-49.4 on the tests' grid of 11,600 points.

Why not another way: tables of Q need 5 s entries. Rejection (Karney; Canonne, Kamath and Steinke)
spends many branches on a coordinate, and the discrete Gaussian is not mu-GDP. Inversion takes 64
bits, one ufunc, and about one slow coordinate in 500,000.

Two limits. The bits are ChaCha20's: uniform to anyone who cannot break it. And time depends on the
draw: a slow coordinate (30 microseconds for a near-tie, about a millisecond beyond 4.76 s) shows in
the time of a call, which a silo should not reveal.
"""

import functools
import math
import operator
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray
from scipy.special import ndtri

from silodp.core.errors import BadInput

MAX_SCALE = (
    2.0**40
    # |k| >= 2^63 then needs |Z| > 2^22: probability below exp(-2^43), and numpy raises rather than
    # wraps
)
NDTRI_ERROR = 2.0**-44  # what case 1 asks of scipy, absolute, on [2^-20, 1/2]
# In units of s, the distance from the float centre s z + 1/2 to the true s |Z| + 1/2 is at most
# 7.1e-14, and 2^-43 is 1.13e-13:
#   ndtri 2^-44; bits not drawn 2^-64 / phi(4.77) < 1.2e-14; p as a float64 2^-53 p / phi(z) <
#   1.4e-16; three roundings < 2e-15 (s >= 1).
_RADIUS = 2.0**-43
_TAIL = 2**44  # 63-bit numerators below this are p < 2^-20
_CHUNK = 2**14
_PIECE = 2**18
_BYTES_PER_KEY = 2**37  # half of what ChaCha20's 32-bit block counter allows

_alive: weakref.WeakSet["Keystream"] = weakref.WeakSet()


class Keystream:
    """Secret uniform bits: ChaCha20 under a key from os.urandom that belongs to this object alone.

    Threads may share an object (a lock orders the draws). A forked child finds every object with a
    new key. None can be copied or pickled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rekey()
        _alive.add(self)

    def _rekey(self) -> None:
        self._cipher = Cipher(algorithms.ChaCha20(os.urandom(32), bytes(16)), mode=None).encryptor()
        self._left = _BYTES_PER_KEY

    def __reduce__(self):
        raise TypeError(
            "a Keystream cannot be copied or sent to another process; make a new one there"
        )

    def bytes(self, n: int) -> "bytes":
        """Return the next n bytes of the keystream."""
        with self._lock:
            if n > self._left:
                self._rekey()
            self._left -= n
            return self._cipher.update(bytes(n))

    def uint64(self, n: int) -> NDArray[np.uint64]:
        """Return n independent integers, uniform on 0 .. 2^64 - 1."""
        return np.frombuffer(self.bytes(8 * _count(n)), dtype="<u8")

    def permutation(self, n: int) -> NDArray[np.int64]:
        """Return a permutation of 0 .. n - 1, each with probability exactly 1/n!.

        It has the ranks of n keys, which are all drawn again if two are equal.
        """
        while True:
            keys = self.uint64(n)
            order = np.argsort(keys)
            ranked = keys[order]
            if not (ranked[1:] == ranked[:-1]).any():
                return order

    def coins(self, n: int, probability: float) -> NDArray[np.bool_]:
        """Return n independent coins, True with exactly the given probability.

        Every float is a dyadic rational. Ties draw 64 more bits. Raise BadInput for another
        probability.
        """
        if not 0 <= probability <= 1:
            raise BadInput(f"probability is {probability}; it must be between 0 and 1")
        if probability == 1:
            return np.ones(_count(n), dtype=bool)
        numerator, denominator = float(probability).as_integer_ratio()
        threshold, rest = divmod(numerator << 64, denominator)
        words = self.uint64(n)
        heads = words < np.uint64(threshold)
        if rest:
            ties = np.flatnonzero(words == np.uint64(threshold))
            if len(ties):
                heads[ties] = self.coins(
                    len(ties), rest / denominator
                )  # the float's low bits, so the quotient is exact
        return heads


def _rekey_after_fork() -> None:
    for stream in list(_alive):
        Keystream.__init__(
            stream
        )  # a new lock too: another thread may have held the old one while the process forked


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_rekey_after_fork)


def rounded_gaussian(scale: float, size: int) -> NDArray[np.int64]:
    """Draw `size` independent values of round(N(0, scale^2)), exactly, under fresh keys, on all
    cores.

    P(k) = Phi((k + 1/2)/scale) - Phi((k - 1/2)/scale) for every integer k. Added to an integer
    query of l2 sensitivity D (in lattice units) it is (D / scale)-GDP. The scale, a float, is
    between 1 and 2^40; the speed does not depend on it up to about 2^30. Raise BadInput for another
    scale.
    """
    if not 1 <= scale <= MAX_SCALE:
        raise BadInput(
            f"scale is {scale}; rounded Gaussian noise needs a scale between 1 and 2^40 "
            "lattice units"
        )
    noise = np.empty(_count(size), dtype=np.int64)

    def draw(start: int) -> None:  # a key for each piece, whoever draws it
        noise[start : start + _PIECE] = _draw(float(scale), min(_PIECE, size - start), Keystream())

    if size <= _PIECE:
        draw(0)
    else:
        with ThreadPoolExecutor(_cores()) as pool:
            list(pool.map(draw, range(0, size, _PIECE)))
    return noise


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _count(n: int) -> int:
    if operator.index(n) < 0:
        raise BadInput(f"size is {n}; it must be 0 or more")
    return int(n)


def _draw(scale: float, size: int, keystream_for_tests: Keystream) -> NDArray[np.int64]:
    """Draw as `rounded_gaussian` on a given keystream. Only tests pass one that is not fresh."""
    stream = keystream_for_tests
    noise = np.empty(size, dtype=np.int64)
    for start in range(0, size, _CHUNK):
        words = stream.uint64(min(_CHUNK, size - start))
        low, high, tail = _bracket(words, scale)
        magnitude = low.astype(np.int64)
        for i in np.flatnonzero((low != high) | tail):
            p = _LazyUniform(int(words[i]) & (2**63 - 1), stream)
            magnitude[i] = p.bisect(
                scale, *(p.tail_range(scale) if tail[i] else (int(low[i]), int(high[i])))
            )
        sign = words.astype(np.int64) >> 63  # 0 or -1
        noise[start : start + len(words)] = (magnitude ^ sign) - sign
    return noise


def _bracket(
    words: NDArray[np.uint64], scale: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return bounds low <= k <= high for every p that begins with these 63 bits, and who is in the
    tail.

    The bounds do not hold for a p in the tail.
    """
    numerator = words & np.uint64(2**63 - 1)
    tail = numerator < np.uint64(_TAIL)
    p = np.maximum(numerator.astype(np.float64) * 2.0**-64, 2.0**-20)
    centre = ndtri(p) * -scale + 0.5
    return np.floor(centre - scale * _RADIUS), np.floor(centre + scale * _RADIUS), tail


class _LazyUniform:
    """A number p in [numerator, numerator + 1] / 2^bits, refined on demand.

    It is compared exactly with |Z| = Q^-1(p).
    """

    def __init__(self, numerator: int, stream: Keystream) -> None:
        self.numerator = numerator
        self.bits = 64
        self.stream = stream

    def extend(self) -> None:
        self.numerator, self.bits = (
            self.numerator << 64 | int(self.stream.uint64(1)[0]),
            self.bits + 64,
        )

    def tail_range(self, scale: float) -> tuple[int, int]:
        """Return a range that contains k.

        With p >= 2^-bits, Q(x) <= exp(-x^2 / 2) gives Z^2 <= 2 ln 2 bits < 1.4 bits.
        """
        while self.numerator == 0:
            self.extend()
        return 0, int(scale * math.sqrt(1.4 * self.bits)) + 1

    def bisect(self, scale: float, low: int, high: int) -> int:
        """Return the k in low .. high with (k - 1/2)/scale < |Z| < (k + 1/2)/scale."""
        numerator, denominator = scale.as_integer_ratio()
        while low < high:
            k = (low + high) // 2
            if self.beyond((2 * k + 1) * denominator, 2 * numerator):
                low = k + 1
            else:
                high = k
        return low

    def beyond(self, a: int, b: int) -> bool:
        """Return whether |Z| > a / b. Equality has probability 0.

        That is (1/2 - p) sqrt(2 pi) > integral of exp(-t^2 / 2) over (0, a / b).
        """
        while True:
            bits = self.bits + 64 * (
                1 + a * a // (64 * b * b)
            )  # x^2 and more guard bits: the series' terms grow to exp(x^2 / 2)
            root_low, root_high = _sqrt_two_pi(bits)
            mass_low, mass_high = _gauss_integral(a, b, bits)
            left = (1 << self.bits - 1) - self.numerator  # 1/2 - p is in [left - 1, left] / 2^bits
            if (left - 1) * root_low >= mass_high << self.bits:
                return True
            if left * root_high <= mass_low << self.bits:
                return False
            self.extend()


def _gauss_integral(a: int, b: int, bits: int) -> tuple[int, int]:
    """Return integers on either side of 2^bits times the integral of exp(-t^2 / 2) over (0, a / b).

    With x = a / b it is the sum of (-1)^n x^(2n+1) / (2^n n! (2n+1)). The invariant, times 2^bits:
    x^(2n+1) / (2^n n!) is between term and term + slack, and the sum of the terms before n is
    within error of total.
    """
    x2 = a * a
    two = 2 * b * b
    n = 0
    total = 0
    error = 0
    term = (a << bits) // b
    slack = 1
    while term or 2 * x2 > two * n:
        if n % 2:
            total += -(term // (2 * n + 1))
        else:
            total += term // (2 * n + 1)
        error += slack // (2 * n + 1) + 2
        n += 1
        term = term * x2 // (two * n)
        slack = slack * x2 // (two * n) + 2
    error += (
        2 * slack
    )  # what is left out is below a geometric series of ratio 1/2 that starts at term + slack
    return total - error, total + error


@functools.lru_cache(maxsize=64)
def _sqrt_two_pi(bits: int) -> tuple[int, int]:
    """Return integers on either side of 2^bits sqrt(2 pi).

    pi = 16 arctan(1/5) - 4 arctan(1/239) (Machin), with 64 guard bits.
    """
    one = 1 << bits + 64

    def arctan_of_inverse(
        q: int,
    ) -> (
        int
    ):  # each quotient, and the rest of the series (as 5^(2n+1) > 2^4n), is off by less than 1
        return sum(
            (-1) ** n * (one // ((2 * n + 1) * q ** (2 * n + 1))) for n in range(bits // 4 + 17)
        )

    pi = (
        16 * arctan_of_inverse(5) - 4 * arctan_of_inverse(239) >> 64
    )  # 20 (bits / 4 + 18) < 2^64: off by at most 2 once shifted
    return math.isqrt(2 * (pi - 2) << bits), math.isqrt(2 * (pi + 2) << bits) + 1
