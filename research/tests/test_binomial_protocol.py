"""Both encodings have one law, found by going through every outcome of the coins; the estimator is
unbiased with the variance promised.
"""

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from gaussian_noise import gaussian_epsilon

from research.binomial import protocol as sh
from research.binomial.accountant import epsilon
from research.binomial.protocol import Parameters
from silodp.core.errors import BadInput

MNIST = {"contributions": 30_000, "dimension": 3_394}


# --- the paper's protocol to the letter, bit by bit ----------------------------------------------


def randomize_bits(
    values: np.ndarray, clip: float, parameters: Parameters, random_bytes
) -> np.ndarray:
    """R_vec, literal: (K, d) records to bits (K, d, g + b), of which rounded value + Bin(b, p) are
    ones.
    """
    ones = sh.rounded(values, clip, parameters, random_bytes)
    ones += sh.binomial(random_bytes, parameters.noise_bits, parameters.p, ones.size).reshape(
        ones.shape
    )
    return np.arange(parameters.bits) < ones[..., None]


def shuffle_bits(messages: list[np.ndarray], random_bytes) -> np.ndarray:
    """S, literal: all messages (K_i, d, g + b) to (d, bits), each coordinate's bits in an order of
    its own, every order equally likely.
    """
    pooled = np.concatenate(
        [np.moveaxis(bits, 1, 0).reshape(bits.shape[1], -1) for bits in messages], axis=1
    )
    return np.stack([row[_permutation(len(row), random_bytes)] for row in pooled])


def _permutation(n: int, random_bytes) -> np.ndarray:
    """The ranks of n random keys, all drawn again if two are equal: exactly uniform."""
    while True:
        keys = np.frombuffer(random_bytes(8 * n), dtype="<u8")
        order = np.argsort(keys)
        if np.all(np.diff(keys[order]) > 0):
            return order


def analyze_bits(
    shuffled: np.ndarray, clip: float, contributions: int, parameters: Parameters
) -> np.ndarray:
    """A_vec from shuffled bits (d, m (g + b))."""
    if shuffled.shape[1] != contributions * parameters.bits:
        raise BadInput(
            f"{shuffled.shape[1]} bits for a coordinate; {contributions} contributions "
            f"send {contributions * parameters.bits}"
        )
    return sh.analyze_counts(shuffled.sum(axis=1, dtype=np.int64), clip, contributions, parameters)


def simulated(seed: int):
    return np.random.default_rng(seed).bytes


# --- every outcome of the coins ------------------------------------------------------------------


def quarters(n: int):
    """All thresholds for n values whose fractions are multiples of 1/4: only a threshold's top two
    bits matter.
    """
    return [
        np.array(theta, dtype="<u4").tobytes()
        for theta in itertools.product(range(0, 2**32, 2**30), repeat=n)
    ]


def coins(trials: int, p: float, size: int):
    """All words for `size` draws of Bin(trials, p): only the low `trials` bits of each word
    matter.
    """
    words = size * round(-math.log2(p))
    return [
        np.array(w, dtype="<u8").tobytes()
        for w in itertools.product(range(2**trials), repeat=words)
    ]


def law(run, *menus) -> dict:
    """Exact law of run(random_bytes), each call of random_bytes being answered with every entry of
    its menu in turn.
    """
    outcomes: Counter = Counter()
    for answers in itertools.product(*menus):
        left = iter(answers)

        def scripted(n, left=left):
            answer = next(left)
            assert len(answer) == n
            return answer

        outcomes[run(scripted)] += 1
        assert next(left, None) is None
    total = sum(outcomes.values())
    return {outcome: Fraction(count, total) for outcome, count in outcomes.items()}


SMALL = [
    # records of two silos, clip L, parameters: fractions of the scaled values are multiples of 1/4
    ([[[-1.0]], [[0.25]]], 1.0, Parameters(2, 1, 0.5)),
    ([[[0.5], [-0.5]], [[1.0]]], 1.0, Parameters(1, 1, 0.5)),
    ([[[1.0]], [[-1.0]]], 2.0, Parameters(3, 1, 0.25)),
    ([[[0.25, -0.5]], [[-0.25, 0.75]]], 1.0, Parameters(2, 1, 0.5)),
    ([[[0.75]]], 1.0, Parameters(2, 2, 0.25)),
]


def literal_total(silo, clip, parameters):
    records, dimension = np.shape(silo)
    return law(
        lambda source: tuple(
            int(v)
            for v in randomize_bits(np.array(silo), clip, parameters, source).sum(axis=(0, 2))
        ),
        quarters(records * dimension),
        coins(parameters.noise_bits, parameters.p, records * dimension),
    )


def counts_total(silo, clip, parameters):
    records, dimension = np.shape(silo)
    return law(
        lambda source: tuple(
            int(v) for v in sh.randomize_counts(np.array(silo), clip, parameters, source)
        ),
        quarters(records * dimension),
        coins(records * parameters.noise_bits, parameters.p, dimension),
    )


def added(laws) -> dict:
    """Law of the total of independent silos, as the shuffler adds it."""
    total: Counter = Counter()
    for outcome in itertools.product(*(one.items() for one in laws)):
        key = tuple(int(v) for v in sh.add_counts([np.array(value) for value, _ in outcome]))
        total[key] += math.prod((probability for _, probability in outcome), start=Fraction(1))
    return dict(total)


@pytest.mark.parametrize(("silos", "clip", "parameters"), SMALL)
def test_literal_bits_and_counts_give_the_server_one_law(silos, clip, parameters):
    bits = [literal_total(silo, clip, parameters) for silo in silos]
    counts = [counts_total(silo, clip, parameters) for silo in silos]
    assert bits == counts
    assert added(bits) == added(counts)


def exact_variance(parameters, clip, records):
    """`variance` with what rounding really decides, the sum of f (1 - f), in place of the most that
    it can.
    """
    f = sh.lattice(records, clip, parameters.levels) / 2.0**32 % 1
    most = (2 * clip / (parameters.levels * len(records))) ** 2 * (1 / 4 - f * (1 - f)).sum(axis=0)
    return sh.variance(parameters, len(records), clip) - most


@pytest.mark.parametrize(("silos", "clip", "parameters"), SMALL)
def test_the_mean_is_unbiased_with_the_variance_promised(silos, clip, parameters):
    """Exact first and second moments; goes red with an unshifted range, a centring by L or a p b
    that is not taken off m times.
    """
    records = np.concatenate([np.array(silo) for silo in silos])
    m = len(records)
    assert not np.any(sh.lattice(records, clip, parameters.levels) % 2**30)
    totals = added([counts_total(silo, clip, parameters) for silo in silos])
    means = np.array([sh.analyze_counts(np.array(total), clip, m, parameters) for total in totals])
    chances = np.array([float(c) for c in totals.values()])[:, None]
    mean = (chances * means).sum(axis=0)
    assert mean == pytest.approx(records.mean(axis=0), abs=1e-14)
    assert (chances * (means - mean) ** 2).sum(axis=0) == pytest.approx(
        exact_variance(parameters, clip, records), rel=1e-12
    )
    assert np.all(exact_variance(parameters, clip, records) <= sh.variance(parameters, m, clip))


def test_every_order_of_the_bits_is_equally_likely():
    message = np.array([[[True, False, False]]])
    keys = [np.array(order, dtype="<u8").tobytes() for order in itertools.permutations(range(3))]
    orders = law(lambda source: tuple(int(b) for b in shuffle_bits([message], source)[0]), keys)
    assert orders == {
        (1, 0, 0): Fraction(1, 3),
        (0, 1, 0): Fraction(1, 3),
        (0, 0, 1): Fraction(1, 3),
    }


def test_equal_keys_are_drawn_again():
    """Ties would keep the order in which messages came."""
    answers = iter(
        [np.array([5, 5, 1], dtype="<u8").tobytes(), np.array([9, 5, 1], dtype="<u8").tobytes()]
    )
    assert list(_permutation(3, lambda n: next(answers))) == [2, 1, 0]


# --- the whole protocol --------------------------------------------------------------------------


def test_both_protocols_end_to_end_agree_with_the_promised_variance():
    """400 runs of each: the mean of 6 coordinates within 5 standard errors (false alarm 1e-5), the
    variance within 35 % (1e-4).
    """
    parameters, clip, runs = Parameters(6, 5, 0.25), 3.0, 400
    rng = np.random.default_rng(7)
    silos = [clip * 0.3 * rng.standard_normal((k, 6)) / math.sqrt(6) for k in (4, 3, 5)]
    records = np.concatenate(silos)
    source = simulated(8)
    literal, counts = [], []
    for _ in range(runs):
        shuffled = shuffle_bits(
            [randomize_bits(s, clip, parameters, source) for s in silos], source
        )
        literal.append(analyze_bits(shuffled, clip, 12, parameters))
        total = sh.add_counts([sh.randomize_counts(s, clip, parameters, source) for s in silos])
        counts.append(sh.analyze_counts(total, clip, 12, parameters))
    promised = exact_variance(parameters, clip, records)
    for means in (np.array(literal), np.array(counts)):
        assert np.all(
            np.abs(means.mean(axis=0) - records.mean(axis=0)) < 5 * np.sqrt(promised / runs)
        )
        assert means.var(axis=0) == pytest.approx(promised, rel=0.35)


@pytest.mark.parametrize(
    ("trials", "p"),
    [
        (1, 0.5),
        (63, 0.5),
        (64, 0.25),
        (65, 0.125),
        (128, 0.5),
        (129, 0.5),
        (200, 0.25),
        (1000, 0.5),
    ],
)
@pytest.mark.parametrize("at_once", [2**26, 64])
def test_noise_has_the_moments_of_the_binomial(trials, p, at_once, monkeypatch):
    """20,000 draws: mean within 5 standard errors, variance within 6 % (5 standard errors or more),
    in however many parts they are made.
    """
    monkeypatch.setattr(sh, "_CHUNK_COINS", at_once)
    draws = sh.binomial(simulated(3), trials, p, 20_000)
    spread = trials * p * (1 - p)
    assert draws.min() >= 0
    assert draws.max() <= trials
    assert abs(draws.mean() - trials * p) < 5 * math.sqrt(spread / 20_000)
    assert draws.var() == pytest.approx(spread, rel=0.06)


def test_records_are_clipped_as_one_vector_and_bad_ones_count_as_zero():
    records = np.array(
        [[3.0, 4.0], [1e300, -1e300], [np.nan, 1.0], [np.inf, 0.0], [0.3, -0.4], [0.0, 0.0]]
    )
    centred = sh.lattice(records, 1.0, 10) / 2.0**32 / 5 - 1
    root = math.sqrt(0.5)
    assert centred == pytest.approx(
        np.array([[0.6, 0.8], [root, -root], [0, 0], [0, 0], [0.3, -0.4], [0, 0]]), abs=1e-9
    )


def test_two_records_are_never_farther_apart_than_the_accountant_is_told():
    rng = np.random.default_rng(4)
    direction = rng.standard_normal((50, 300))
    for clip in (1e-3, 1.0, 37.5):
        ends = sh.lattice(np.concatenate([1e9 * direction, -direction * clip]), clip, 40)
        apart = np.linalg.norm((ends[:50] - ends[50:]) / 2.0**32, axis=1)
        assert np.all(apart <= sh.noise(Parameters(40, 1, 0.5), 10, 300).shift)
        assert apart.max() == pytest.approx(40, rel=1e-6)


def test_totals_that_the_contributions_cannot_make_are_refused():
    parameters = Parameters(2, 3, 0.5)
    with pytest.raises(BadInput, match=r"outside 0 \.\. 20"):
        sh.analyze_counts(np.array([3, 21]), 1.0, 4, parameters)
    with pytest.raises(BadInput, match="4 contributions send 20"):
        analyze_bits(np.zeros((2, 25), dtype=bool), 1.0, 4, parameters)


@pytest.mark.parametrize("bad", [(0, 1, 0.5), (1, -1, 0.5), (1, 1, 0.3), (1, 1, 1.0)])
def test_bad_parameters_are_refused(bad):
    with pytest.raises(BadInput, match="levels must be 1 or more"):
        Parameters(*bad)


# --- parameters ----------------------------------------------------------------------------------


def test_message_sizes():
    assert sh.message_bits(Parameters(4, 11, 0.5), 3, 10) == {"literal": 450, "counts": 60}
    assert sh.message_bits(Parameters(1, 0, 0.5), 1, 1) == {"literal": 1, "counts": 1}


def test_the_proven_parameters_are_those_of_the_paper():
    assert sh.proven(100, 3, 1.0, 1e-6) == Parameters(
        20, math.ceil(24e4 * 400 * math.log(4e7) ** 2 / 100), 0.25
    )
    assert sh.proven(1, 1, 1.0, 1e-2).levels == 4
    with pytest.raises(BadInput, match="epsilon <= 15"):
        sh.proven(100, 3, 16.0, 1e-6)


@pytest.mark.parametrize(("rounds", "p"), [(1, 0.5), (1, 0.25), (50, 0.5)])
def test_numerical_parameters_keep_the_budget_and_one_noise_bit_less_does_not(rounds, p):
    parameters = sh.numerical(**MNIST, target_epsilon=1.0, target_delta=1e-9, rounds=rounds, p=p)
    release = sh.noise(parameters, **MNIST)
    assert epsilon([(release, rounds)], 1e-9) <= 1.0
    assert parameters.levels / math.sqrt(MNIST["dimension"]) > 3.5
    less = Parameters(parameters.levels, parameters.noise_bits - 1, p)
    assert epsilon([(sh.noise(less, **MNIST), rounds)], 1e-9) > 1.0


def test_numerical_parameters_beat_the_proven_ones():
    """m = 30,000, d = 3,394, epsilon = 1: at least 100 times fewer bits and 10 times less
    variance.
    """
    delta = 30_000.0**-2
    ours, theirs = (find(30_000, 3_394, 1.0, delta) for find in (sh.numerical, sh.proven))
    fewer = (
        sh.message_bits(theirs, 1200, 3394)["literal"]
        / sh.message_bits(ours, 1200, 3394)["literal"]
    )
    less = sh.variance(theirs, 30_000, 1.0) / sh.variance(ours, 30_000, 1.0)
    assert fewer >= 100
    assert less >= 10
    central = (2 / 30_000) ** 2 * (sh.noise(ours, 30_000, 3394).variance / ours.levels**2)
    assert sh.variance(ours, 30_000, 1.0) <= 1.02 * central
    assert gaussian_epsilon(sh.noise(ours, 30_000, 3394), 1, delta) >= 0.9


def test_silent_silos_and_the_shuffler_itself_see_more():
    parameters = sh.numerical(30_000, 100, 1.0, 1e-9)
    whole, fewer, alone = (
        epsilon([(sh.noise(parameters, silos * 1200, 100), 1)], 1e-9) for silos in (25, 20, 1)
    )
    assert whole <= 1.0 < fewer < alone
    assert fewer == pytest.approx(whole * math.sqrt(25 / 20), rel=0.05)
