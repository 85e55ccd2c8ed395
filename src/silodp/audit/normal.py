"""Tests whether numbers are independent standard normals: the size of the noise, its shape, and its
correlation with itself.

All tests share one false-alarm rate. `look` raises Caught with one sentence. Rows are releases,
columns are coordinates. With 16,000 numbers and a rate of 1e-9, a standard deviation that is wrong
by 6 per cent is seen with probability 0.9999.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from silodp.audit.pipeline import Caught

BLOCKS = 32


def look(z: np.ndarray, what: str, rate: float) -> None:
    """Run all tests on z (releases, coordinates). Raise Caught if one of them alarms.

    Together they alarm falsely with probability at most `rate`.
    """
    each = rate / 7
    sizes(z, what, each)
    _coordinates(z, what, each)
    _centre(z, what, each)
    _within(z, what, each)
    _between(z, what, each)
    _shape(z, what, each)


def interval(z: np.ndarray, level: float) -> tuple[float, float, float]:
    """Return (estimate, low, high) of the standard deviation. The truth is outside with probability
    `level`.
    """
    total = float(np.square(z).sum())
    low, high = stats.chi2.isf([level / 2, 1 - level / 2], z.size)
    return math.sqrt(total / z.size), math.sqrt(total / low), math.sqrt(total / high)


def sizes(z: np.ndarray, what: str, rate: float) -> None:
    """Raise Caught unless the sums of squares are chi-square: of all numbers, of each release, and
    of each block of neighbouring coordinates.
    """
    parts = [("", z), *((f" of release {r}", row) for r, row in enumerate(z))]
    parts += [
        (f" of block {b} of {BLOCKS}", part)
        for b, part in enumerate(np.array_split(z, BLOCKS, axis=1))
    ]
    for name, part in parts:
        ratio, low, high = interval(part, rate / len(parts))
        if not low < 1 < high:
            raise Caught(
                f"{what}: the noise{name} has {ratio:.2f} times the standard deviation "
                "that is paid for"
            )


def _coordinates(z: np.ndarray, what: str, rate: float) -> None:
    """Raise Caught unless each coordinate has its noise, over all releases."""
    low, high = stats.chi2.isf([1 - rate / 2 / z.shape[1], rate / 2 / z.shape[1]], len(z))
    total = np.square(z).sum(0)
    if bad := int(((total < low) | (total > high)).sum()):
        raise Caught(
            f"{what}: {bad} of {z.shape[1]} coordinates have another noise than the rest, or none"
        )


def _centre(z: np.ndarray, what: str, rate: float) -> None:
    """Raise Caught if all numbers, or those of one release, have a common offset. This finds noise
    of one sign, and one draw shared by all coordinates.
    """
    means = np.append(z.mean(1) * math.sqrt(z.shape[1]), z.mean() * math.sqrt(z.size))
    if np.abs(means).max() > stats.norm.isf(rate / 2 / len(means)):
        raise Caught(
            f"{what}: answers are off their exact value by {np.abs(means).max():.1f} "
            "standard errors"
        )


def _within(z: np.ndarray, what: str, rate: float) -> None:
    """Raise Caught if coordinates at any distance have correlated noise."""
    n = z.shape[1]
    spectrum = np.fft.rfft(z, 2 * n, axis=1)
    lags = np.arange(1, n - 32)
    power = np.square(np.abs(spectrum)).sum(0)
    correlations = np.abs(np.fft.irfft(power)[lags] / np.sqrt(len(z) * (n - lags)))
    if correlations.max() > _limit(rate / len(lags)):
        raise Caught(
            f"{what}: noise of coordinates {int(lags[correlations.argmax()])} apart is correlated"
        )


def _between(z: np.ndarray, what: str, rate: float) -> None:
    """Raise Caught if a release has another one's noise, shifted by any distance, or mirrored."""
    releases, n = z.shape
    spectrum = np.fft.rfft(z, axis=1)
    most = _limit(rate / (releases * (releases - 1) * n))
    for a in range(releases - 1):
        for others in (spectrum[a + 1 :].conj(), spectrum[a + 1 :]):
            correlations = np.abs(np.fft.irfft(spectrum[a] * others, n)).max(1) / math.sqrt(n)
            if correlations.max() > most:
                other = a + 1 + correlations.argmax()
                raise Caught(
                    f"{what}: the noise of releases {a} and {other} is correlated; it must be "
                    "new in each"
                )


def _limit(rate: float) -> float:
    """Return the largest correlation that chance explains.

    Sums of products of normals have slightly heavier tails than a normal. A tenth more covers them
    from 500 terms on.
    """
    return 1.1 * float(stats.norm.isf(rate / 2))


def _shape(z: np.ndarray, what: str, rate: float) -> None:
    """Raise Caught unless the numbers have a normal law."""
    p = stats.kstest(z.ravel(), "norm", method="asymp").pvalue
    if p < rate:
        raise Caught(
            f"{what}: the noise has the right size but is not of the law that is paid for "
            f"(Kolmogorov-Smirnov p = {p:.1g})"
        )


def low_bits(integers: np.ndarray, what: str, rate: float) -> None:
    """Raise Caught unless the last byte is uniform, as that of a wide rounded Gaussian is. This
    finds lattice points that are left out, and noise that the sum alone decides.
    """
    counts = np.bincount(integers.ravel() & 255, minlength=256)
    if stats.chisquare(counts).pvalue < rate:
        raise Caught(f"{what}: the noise does not use every point of the lattice alike")
