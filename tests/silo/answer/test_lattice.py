"""Exact noise: its law, its three cases, what it trusts of floats, and that nobody can seed it.

The streams here are seeded through the private seam (a Keystream subclass that only tests have), so
no statistical test can flake; its stated false-alarm rate says how surprised one may be when a
change of the code makes it fail.
"""

import copy
import inspect
import math
import os
import pickle
import subprocess
import sys
from collections import Counter

import mpmath
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import stats
from scipy.special import ndtri

from silodp.core.errors import BadInput
from silodp.silo.answer import lattice
from silodp.silo.answer.lattice import Keystream, rounded_gaussian

ALARM = 1e-6


class SeededKeystream(Keystream):
    """ChaCha20 under a known key."""

    def __init__(self, seed):
        super().__init__()
        self._known = Cipher(
            algorithms.ChaCha20(seed.to_bytes(32, "little"), bytes(16)), mode=None
        ).encryptor()

    def bytes(self, n):
        return self._known.update(bytes(n))


class ScriptedKeystream(Keystream):
    """The given 64-bit words, one after the other, and an error when they run out."""

    def __init__(self, *words):
        super().__init__()
        self.left = list(words)

    def bytes(self, n):
        taken, self.left = self.left[: n // 8], self.left[n // 8 :]
        assert 8 * len(taken) == n, "more words were drawn than the script has"
        return b"".join(word.to_bytes(8, "little") for word in taken)


@pytest.fixture(autouse=True)
def _precise():
    with mpmath.workprec(400):
        yield


def upper_tail(x):
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2


def chi_square(draws, edges, cdf):
    """p-value of the counts between consecutive edges (half-integers) and beyond them."""
    probability = np.diff(np.concatenate([[0.0], cdf(np.asarray(edges)), [1.0]]))
    observed = np.bincount(np.searchsorted(edges, draws), minlength=len(edges) + 1)
    expected = probability * len(draws)
    assert expected.min() > 5
    return stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(edges))


def half_integers(scale, width):
    return np.arange(-math.floor(width * scale), math.floor(width * scale)) + 0.5


# ---- the law ----


@pytest.mark.parametrize("scale", [1.0, 1.3, 2.0, 2.7, 10.3, 63.9])
def test_each_integer_has_the_probability_of_its_cell(scale):
    """Chi-square against Phi((k + 1/2)/s) - Phi((k - 1/2)/s), k by k; false alarms 1e-6 per
    scale.
    """
    draws = lattice._draw(scale, 500_000, SeededKeystream(1))
    assert chi_square(draws, half_integers(scale, 3), lambda x: stats.norm.cdf(x / scale)) > ALARM


@pytest.mark.parametrize(("scale", "size"), [(2.0**20 + 0.37, 500_000), (2.0**40, 6_000)])
def test_large_scales_have_the_right_shape_and_uniform_low_bits(scale, size):
    """Chi-square over 80 cells and over k mod 16; false alarms 2e-6 per scale."""
    draws = lattice._draw(scale, size, SeededKeystream(2))
    edges = np.floor(np.linspace(-2.5, 2.5, 81) * scale) + 0.5
    assert chi_square(draws, edges, lambda x: stats.norm.cdf(x / scale)) > ALARM
    assert stats.chisquare(np.bincount(draws % 16, minlength=16)).pvalue > ALARM


def test_the_chi_square_sees_a_law_as_near_as_the_discrete_gaussian():
    draws = lattice._draw(2.0, 500_000, SeededKeystream(3))
    assert chi_square(draws, half_integers(2.0, 3), discrete_gaussian_cdf(2.0)) < 1e-12


def test_tails_are_counted_exactly():
    """Two-sided binomial tests of how often |k| passes 3, 4, 4.8 and 5 s in 8 million draws, both
    sides; false alarms 8e-6.
    """
    scale = 20.0
    draws = lattice._draw(scale, 8_000_000, SeededKeystream(4))
    for multiple in (3, 4, 4.8, 5):
        beyond = int(multiple * scale)
        for count in ((draws > beyond).sum(), (draws < -beyond).sum()):
            assert (
                stats.binomtest(
                    int(count), len(draws), stats.norm.sf((beyond + 0.5) / scale)
                ).pvalue
                > ALARM
            )


def test_the_tail_case_has_the_conditional_law():
    """1,500 draws given p < 2^-20 (two-sided, s = 10): chi-square, false alarms 1e-6."""
    stream, scale = SeededKeystream(5), 10.0
    tail = [abs(int(lattice._draw(scale, 1, Prefixed(stream, 19))[0])) for _ in range(1_500)]
    edges = np.arange(48, 56) + 0.5
    assert min(tail) >= 47
    assert (
        chi_square(
            np.array(tail), edges, lambda x: np.maximum(0, 1 - stats.norm.sf(x / scale) * 2.0**20)
        )
        > ALARM
    )


class Prefixed(Keystream):
    """Another stream, with the first `zeros` bits after the first word's sign set to zero."""

    def __init__(self, stream, zeros):
        super().__init__()
        self.stream, self.mask = stream, 2**63 | (2 ** (63 - zeros) - 1)

    def bytes(self, n):
        words = np.frombuffer(self.stream.bytes(n), dtype="<u8").copy()
        words[0] &= np.uint64(self.mask)
        self.mask = 2**64 - 1
        return words.tobytes()


def test_coordinates_and_calls_are_uncorrelated():
    """Correlations of values and of squares, between neighbours and between two keys, within 4.9
    sigma; false alarms 4e-6.
    """
    first, second = (
        lattice._draw(8.0, 300_000, SeededKeystream(seed)).astype(float) for seed in (6, 7)
    )
    for left, right in ((first[1:], first[:-1]), (first, second)):
        for power in (1, 2):
            assert abs(np.corrcoef(left**power, right**power)[0, 1]) < 4.9 / math.sqrt(len(left))


# ---- the exact cases ----


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize("scale", [1.0, 2.7, 64.0, 2.0**20 + 0.1, 2.0**40])
@pytest.mark.parametrize("multiple", [0.0, 0.4, 1.7, 4.2, 5.9, 13.0])
def test_a_near_tie_is_decided_by_the_first_bit_that_differs(scale, multiple, sign):
    """p agrees with Q((k + 1/2)/s), computed by mpmath, for as many words as it takes, and then is
    one unit below or above it.
    """
    k, unit = int(multiple * scale), 1 / mpmath.mpf(scale)
    threshold, next_threshold = (upper_tail((k + mpmath.mpf(0.5) + i) * unit) for i in (0, 1))
    fewest = next(n for n in range(1, 9) if mpmath.ldexp(threshold - next_threshold, 64 * n) > 4)
    for agreeing in (fewest, fewest + 1, fewest + 3):
        nearest = int(mpmath.floor(mpmath.ldexp(threshold, 64 * agreeing)))
        for number, expected in ((nearest - 1, k + 1), (nearest + 1, k)):
            words = [number >> 64 * i & (2**64 - 1) for i in reversed(range(agreeing))]
            stream = ScriptedKeystream(words[0] | sign << 63, *words[1:], 2**63, 2**63)
            (drawn,) = lattice._draw(scale, 1, stream)
            assert drawn == (-expected if sign else expected)
            assert len(stream.left) <= 2, "every agreeing word was needed"


def test_the_tail_goes_as_deep_as_the_bits_do():
    for zero_words in (1, 3, 12):
        words = [0] * zero_words + [12345678901234567890]
        p = mpmath.ldexp(mpmath.mpf(12345678901234567890), -64 * (zero_words + 1))
        (k,) = lattice._draw(1000.3, 1, ScriptedKeystream(*words))
        with mpmath.workprec(2000):
            assert (
                upper_tail((k + mpmath.mpf(0.5)) / mpmath.mpf(1000.3))
                < p
                < upper_tail((k - mpmath.mpf(0.5)) / mpmath.mpf(1000.3))
            )


@pytest.mark.parametrize("scale", [1.0, 3.3, 2.0**20, 2.0**40])
def test_the_float_bracket_holds_for_every_completion_of_the_bits(scale):
    words = SeededKeystream(8).uint64(1_000)
    for word, low, high, tail in zip(words, *lattice._bracket(words, scale), strict=True):
        if not tail:
            m = int(word) & (2**63 - 1)
            assert low == high or high == low + 1
            with mpmath.workprec(160):
                assert upper_tail((int(high) + mpmath.mpf(0.5)) / scale) <= mpmath.ldexp(m, -64)
                assert mpmath.ldexp(m + 1, -64) <= upper_tail((int(low) - mpmath.mpf(0.5)) / scale)


def test_near_ties_settled_slowly_agree_with_the_fast_case():
    """The slow cases alone, from a bracket of the whole line, give what the fast path gives."""
    for scale in (1.5, 40.0, 2.0**20):
        words = SeededKeystream(9).uint64(40)
        fast = np.abs(lattice._draw(scale, 40, SeededKeystream(9)))
        for word, k in zip(words, fast, strict=True):
            p = lattice._LazyUniform(int(word) & (2**63 - 1), SeededKeystream(10))
            assert p.bisect(scale, *p.tail_range(scale)) == k


# ---- what is trusted, and what is proved ----


def test_ndtri_keeps_the_bound_that_the_fast_case_asks_of_it():
    """|ndtri(p) - Phi^-1(p)| on [2^-20, 1/2]: a grid in p, one in log p, both sides of Cephes's
    branch at exp(-2), and next to 1/2.

    The bound asked is 2^-44; the largest error seen is also held to a sixteenth of it, so that a
    worse scipy is noticed before it matters.
    """
    grid = np.concatenate(
        [
            np.linspace(2.0**-20, 0.5, 5_500),
            np.geomspace(2.0**-20, 0.5, 5_500),
            math.exp(-2) * (1 + np.arange(-300, 301) * 2.0**-52),
            0.5 - 2.0 ** -np.arange(2.0, 55),
        ]
    )
    with mpmath.workprec(120):
        root = mpmath.sqrt(2 * mpmath.pi)
        pairs = zip(map(mpmath.mpf, grid), map(mpmath.mpf, -ndtri(grid)), strict=True)
        worst = max(abs((upper_tail(z) - p) * mpmath.exp(z * z / 2) * root) for p, z in pairs)
    assert worst < lattice.NDTRI_ERROR / 16


def test_the_error_budget_of_the_bracket_adds_up():
    z_max = -float(ndtri(2.0**-20)) + 1e-3
    bits_not_drawn = 2.0**-64 / stats.norm.pdf(z_max)
    conversion = 2.0**-53 * math.sqrt(math.pi / 2)
    roundings = 3 * 2.0**-53 * (z_max + 1)
    assert lattice.NDTRI_ERROR + bits_not_drawn + conversion + roundings < 0.7 * lattice._RADIUS


def test_the_integer_enclosures_hold_and_are_narrow():
    rng = np.random.default_rng(0)
    for bits in (90, 200, 700):
        with mpmath.workprec(2 * bits + 300):
            low, high = lattice._sqrt_two_pi(bits)
            assert low <= mpmath.ldexp(mpmath.sqrt(2 * mpmath.pi), bits) <= high <= low + 8
            for x in [*rng.uniform(0, 9, 40), 1e-9, 2.0**-41]:
                a, b = float(x).as_integer_ratio()
                low, high = lattice._gauss_integral(a, b, bits)
                exact = mpmath.ldexp(
                    mpmath.erf(mpmath.mpf(x) / mpmath.sqrt(2)) * mpmath.sqrt(mpmath.pi / 2), bits
                )
                assert low <= exact <= high
                assert high - low < 2 ** (12 + x * x), (
                    "wide enclosures would only waste bits, but x^2 guard bits should do"
                )


# ---- an independent sampler ----


def discrete_gaussian_cdf(scale):
    support = np.arange(-int(12 * scale), int(12 * scale) + 1)
    cumulative = np.cumsum(np.exp(-(support**2) / (2 * scale**2)))
    return lambda edges: cumulative[np.floor(edges).astype(int) - support[0]] / cumulative[-1]


@pytest.fixture(scope="module")
def opendp_gaussian():
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T=float)
    return lambda scale, size: np.array(dp.m.make_gaussian(*space, scale=scale)([0] * size))


def test_opendp_and_silodp_each_keep_their_own_law(opendp_gaussian):
    """OpenDP's discrete Gaussian at s = 2 under the same chi-square; OpenDP cannot be seeded, so
    false alarms are 1e-9.
    """
    edges = half_integers(2.0, 3)
    assert chi_square(opendp_gaussian(2.0, 20_000), edges, discrete_gaussian_cdf(2.0)) > 1e-9
    assert (
        chi_square(
            lattice._draw(2.0, 20_000, SeededKeystream(11)), edges, lambda x: stats.norm.cdf(x / 2)
        )
        > 1e-9
    )


def test_opendp_and_silodp_agree_at_a_large_scale(opendp_gaussian):
    """Two-sample Kolmogorov-Smirnov at s = 1000, where the two laws differ by less than 1e-6; false
    alarms 1e-9.
    """
    assert (
        stats.ks_2samp(
            opendp_gaussian(1000.0, 20_000), lattice._draw(1000.0, 300_000, SeededKeystream(12))
        ).pvalue
        > 1e-9
    )


# ---- entropy ----


def test_nothing_public_takes_a_seed():
    assert list(inspect.signature(rounded_gaussian).parameters) == ["scale", "size"]
    assert list(inspect.signature(Keystream).parameters) == []
    for method in (Keystream.bytes, Keystream.uint64, Keystream.permutation):
        assert list(inspect.signature(method).parameters) == ["self", "n"]
    assert list(inspect.signature(Keystream.coins).parameters) == ["self", "n", "probability"]


def test_every_call_draws_a_key_of_its_own(monkeypatch):
    keys = []
    monkeypatch.setattr(os, "urandom", lambda n, real=os.urandom: keys.append(real(n)) or keys[-1])
    first, second = rounded_gaussian(64.0, 100), rounded_gaussian(64.0, 100)
    assert first.dtype == np.int64
    assert (first != second).any()
    assert [len(key) for key in keys] == [32, 32]
    assert keys[0] != keys[1]
    assert Keystream().bytes(32) != Keystream().bytes(32)


def test_a_stream_never_repeats_itself_and_changes_its_key_in_time(monkeypatch):
    stream = Keystream()
    assert len({stream.bytes(16) for _ in range(100)}) == 100
    monkeypatch.setattr(stream, "_left", 15)
    cipher = stream._cipher
    assert len(stream.bytes(16)) == 16
    assert stream._cipher is not cipher


def test_a_keystream_is_not_copied_nor_pickled():
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="another process"):
            duplicate(Keystream())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_other_bits_even_if_the_lock_was_held():
    script = """
import os
from silodp.silo.answer.lattice import Keystream
stream = Keystream()
read, write = os.pipe()
with stream._lock:
    child = os.fork()
    if child == 0:
        os.write(write, stream.bytes(32))
        os._exit(0)
os.waitpid(child, 0)
assert os.read(read, 32) != stream.bytes(32)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)


# ---- permutations and coins ----


def test_every_permutation_is_as_likely():
    """Chi-square over the 24 orders of 4 in 24,000 draws; false alarms 1e-6."""
    stream = SeededKeystream(13)
    counts = Counter(tuple(stream.permutation(4)) for _ in range(24_000))
    assert len(counts) == 24
    assert stats.chisquare(list(counts.values())).pvalue > ALARM


def test_a_long_permutation_is_one_and_equal_keys_are_drawn_again():
    assert (np.sort(SeededKeystream(14).permutation(100_000)) == np.arange(100_000)).all()
    assert list(Keystream().permutation(0)) == []
    assert list(ScriptedKeystream(5, 9, 5, 7, 3, 6).permutation(3)) == [1, 2, 0]


@pytest.mark.parametrize("probability", [0.5, 0.1, 1 / 3, 0.001, 1e-5])
def test_coins_fall_with_their_probability(probability):
    """Two-sided binomial test on a million coins; false alarms 1e-6 per probability."""
    heads = SeededKeystream(15).coins(1_000_000, probability)
    assert heads.dtype == bool
    assert stats.binomtest(int(heads.sum()), len(heads), probability).pvalue > ALARM


def test_a_coin_is_exact_to_the_last_bit_of_the_float():
    p = 1.5 * 2.0**-70  # the first word of p is 0, the second 3/2 2^58
    threshold = 3 << 57
    assert [
        bool(ScriptedKeystream(*words).coins(1, p)[0])
        for words in ((0, threshold - 1), (0, threshold))
    ] == [True, False]
    assert not ScriptedKeystream(1).coins(1, p)[0]
    assert ScriptedKeystream(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0).coins(1, 5e-324)[0]
    assert Keystream().coins(100, 1.0).all()
    assert not Keystream().coins(100, 0.0).any()


@pytest.mark.parametrize("probability", [-0.1, 1.1, math.nan, math.inf])
def test_a_coin_refuses_what_is_no_probability(probability):
    with pytest.raises(BadInput, match="probability"):
        Keystream().coins(3, probability)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -3.0, 0.0, 0.999, 2.0**41])
def test_a_scale_outside_the_range_is_refused(scale):
    with pytest.raises(BadInput, match="scale"):
        rounded_gaussian(scale, 3)


def test_sizes_are_counts():
    assert rounded_gaussian(2, 0).shape == (0,)
    assert rounded_gaussian(2, 40_000).shape == (40_000,)
    with pytest.raises(BadInput, match="size"):
        rounded_gaussian(2.0, -1)
    with pytest.raises(TypeError):
        rounded_gaussian(2.0, 2.5)  # type: ignore[arg-type]
