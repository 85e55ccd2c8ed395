"""`silodp audit certify` finds the known mistakes of DP code, and leaves sound code alone."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest

from silodp.audit.certify import certify, neighbours
from silodp.core.errors import BadInput

RUNS, STEPS = 600, 5
SOUND = 8.92  # noise in clips for 5 steps at epsilon 2, delta 1e-5, replace one


def sgd(x, y, seed, *, noise=SOUND, clip="record", steps=STEPS):
    """DP-SGD of a model with two tensors, logistic weights of x and of -x, and how it clips."""
    rng, w, seen = np.random.default_rng(seed), np.zeros((2, x.shape[1])), []
    for _ in range(steps):
        slope = 1 / (1 + np.exp(-np.clip(x @ (w[0] - w[1]), -50, 50))) - y
        rows = np.stack(
            [slope[:, None] * x, -slope[:, None] * x], axis=1
        )  # records, tensors, features
        if clip == "record":
            rows = rows * np.minimum(
                1, 1 / np.maximum(np.linalg.norm(rows, axis=(1, 2), keepdims=True), 1e-12)
            )
        elif clip == "tensor":
            rows = rows * np.minimum(
                1, 1 / np.maximum(np.linalg.norm(rows, axis=2, keepdims=True), 1e-12)
            )
        total = rows.sum(0)
        if (
            clip == "batch"
        ):  # the batch's mean is clipped, and the noise is that of one record's share
            mean = total / len(x)
            total = mean * min(1, 1 / max(np.linalg.norm(mean), 1e-12)) * len(x)
        noisy = total + rng.normal(0, noise, w.shape)
        seen.append(noisy.ravel())
        w = w - 0.5 * noisy / len(x)
    return np.concatenate(seen)


def verdict(release, epsilon=2.0, *, runs=RUNS, **options):
    return [
        f.refuted
        for f in certify(release, epsilon, 1e-5, runs=runs, records=12, features=3, **options)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_sound_code_is_not_refuted(seed):
    assert not any(verdict(sgd, seed=1000 * seed))


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param({"noise": SOUND / 7}, id="a seventh of the noise"),
        pytest.param({"clip": "batch"}, id="the mini-batch is clipped, not the record"),
        pytest.param({"clip": None}, id="nothing is clipped"),
    ],
)
def test_a_known_mistake_is_found(mistake):
    assert any(verdict(functools.partial(sgd, **mistake)))


def test_clipping_each_tensor_is_found_where_there_are_many():
    """Forgetting composition is the same mistake: so many answers, each with the noise of one."""

    def many(x, y, seed):
        rng = np.random.default_rng(seed)
        slope = (0.5 - y)[:, None] * x
        rows = slope * np.minimum(
            1, 1 / np.maximum(np.linalg.norm(slope, axis=1, keepdims=True), 1e-12)
        )
        return np.tile(rows.sum(0), 64) + rng.normal(
            0, 2 / 0.5, 64 * x.shape[1]
        )  # mu 0.5 were it one tensor: epsilon 2

    assert any(verdict(many))


def test_a_claim_about_a_whole_silo_is_attacked_with_a_whole_silo():
    def update(x, y, seed):
        """Noise for a silo's update of length 1 that nobody clips, or clips."""
        mean = ((y - 0.5)[:, None] * x).mean(0)
        return mean, np.random.default_rng(seed).normal(0, 4.0, x.shape[1])

    def bare(x, y, seed):
        return sum(update(x, y, seed))

    def clipped(x, y, seed):
        mean, noise = update(x, y, seed)
        return mean * min(1, 1 / max(np.linalg.norm(mean), 1e-12)) + noise

    assert any(verdict(bare, unit="silo"))
    assert not any(verdict(clipped, unit="silo"))


# --- the mistakes of public code (docs/certify.md), planted, each beside the same code without it


def laplace_update(x, y, seed, *, norm, length):
    """A client's update of 40 numbers, clipped to this length in this norm, under Laplace noise for
    what moves by 1 in sum: epsilon 3.
    """
    update = np.repeat(10 * ((y - 0.5)[:, None] * x).mean(0), 40 // x.shape[1] + 1)[:40]
    update *= length / max(np.linalg.norm(update, norm), length)
    return update + np.random.default_rng(seed).laplace(0, 1 / 3, 40)


def features_sent(x, y, seed, *, power):
    """A record's features of length 0.01 under Gaussian noise for a move of 0.02 at epsilon 1: its
    deviation, or its variance taken for one.
    """
    rows = np.sign(y - 0.5)[:, None] * x
    rows *= 0.01 / np.linalg.norm(rows, axis=1, keepdims=True)
    return rows + np.random.default_rng(seed).normal(
        0, (0.02 * np.sqrt(2 * np.log(1.25 / 1e-5))) ** power, rows.shape
    )


def bits_sent(x, y, seed, *, each):
    """64 bits of a record by randomised response, at epsilon 1 for each of them or for all."""
    flip = np.random.default_rng(seed).random(64) < 1 / (1 + np.exp(1 if each else 1 / 64))
    return np.where(flip, 1 - y[0], y[0])


def trained_then_noised(x, y, seed, *, steps):
    """A model after so many steps on the clipped gradient of the whole batch, with Laplace noise
    for one step: epsilon 1.
    """
    w, step = np.zeros(x.shape[1]), 0.001
    for _ in range(steps):
        g = ((1 / (1 + np.exp(-np.clip(x @ w, -50, 50))) - y)[:, None] * x).mean(0)
        w = w - step * g / max(1, np.abs(g).sum())
    return w + np.random.default_rng(seed).laplace(0, 2 * step, len(w))


def squares_sent(x, y, seed, *, bound):
    """The sum of squares of values between 0 and 100, under Laplace noise for this bound."""
    values = np.clip(100 * x[:, 0] * y, 0, 100)
    return np.sum(values**2) + np.random.default_rng(seed).laplace(0, bound**2)


def residuals_sent(x, y, seed, *, largest):
    """The sums of years, for rows below and above zero, under Gaussian noise for this move."""
    side = x[:, 0] * (2 * y - 1) > 0
    sums = np.array([np.sum(2013.0 * side), np.sum(2013.0 * ~side)])
    noise = np.sqrt(2) * largest * np.sqrt(2 * np.log(1.25 / 1e-5))
    return sums + np.random.default_rng(seed).normal(0, noise, 2)


def weighted_mean(x, y, seed, *, weight):
    """The mean of ten clients of which one has this weight, under noise for a weight of 0.1."""
    update = 10 * ((y - 0.5)[:, None] * x).mean(0)
    update /= max(1, np.linalg.norm(update))
    noise = 2 * 0.1 * np.sqrt(2 * np.log(1.25 / 1e-5))
    return weight * update + np.random.default_rng(seed).normal(0, noise, len(update))


@pytest.mark.parametrize(
    ("code", "claim", "unit", "runs", "mistaken", "right"),
    [
        pytest.param(
            laplace_update,
            3.0,
            "silo",
            1500,
            {"norm": 2, "length": 1.0},
            {"norm": 1, "length": 0.5},
            id="Laplace noise for what is clipped in length",
        ),
        pytest.param(
            features_sent,
            1.0,
            "record",
            RUNS,
            {"power": 2},
            {"power": 1},
            id="a variance taken for a standard deviation",
        ),
        pytest.param(
            bits_sent,
            1.0,
            "record",
            RUNS,
            {"each": True},
            {"each": False},
            id="epsilon for each bit of many",
        ),
        pytest.param(
            trained_then_noised,
            1.0,
            "record",
            RUNS,
            {"steps": 20},
            {"steps": 1},
            id="noise for one step after twenty",
        ),
        pytest.param(
            squares_sent,
            1.0,
            "record",
            RUNS,
            {"bound": 1},
            {"bound": 100},
            id="noise for the lower bound alone",
        ),
        pytest.param(
            residuals_sent,
            1.0,
            "record",
            RUNS,
            {"largest": 26},
            {"largest": 2026},
            id="noise for a range that is far from zero",
        ),
        pytest.param(
            weighted_mean,
            1.0,
            "silo",
            RUNS,
            {"weight": 0.9},
            {"weight": 0.1},
            id="noise for equal weights where one is large",
        ),
    ],
)
def test_the_mistakes_of_public_code_are_found_and_the_same_code_without_them_is_left_alone(
    code, claim, unit, runs, mistaken, right
):
    assert any(verdict(functools.partial(code, **mistaken), claim, unit=unit, runs=runs))
    assert not any(verdict(functools.partial(code, **right), claim, unit=unit, runs=runs))


def test_every_adapter_is_in_the_published_table_with_the_version_that_it_names():
    root = Path(__file__).parents[2]
    page = (root / "docs/certify.md").read_text()
    adapters = sorted((root / "examples/certify").glob("*.py"))
    assert len(adapters) >= 5
    for path in adapters:
        said = path.read_text()
        assert "The claim" in said, path.name
        package, version = re.match(r'"""([A-Za-z0-9]+) ([0-9.]+)[ ,:(]', said).groups()
        assert f"{package} {version}" in page, path.name
        functions = re.findall(rf"{path.name}:(\w+)", said) + re.findall(r"`:(\w+)`", said)
        for name in functions:
            assert f"def {name}(x, y, seed" in said
            assert f"`{path.name}:{name}`" in page, f"{path.name}:{name} has no row"


@pytest.mark.parametrize("unit", ["record", "silo"])
def test_neighbours_differ_in_the_unit_alone_and_only_a_far_canary_is_long(unit):
    for name, (x, y), (other, z) in neighbours(unit, 30, 6, np.random.default_rng(0)):
        assert x.shape == other.shape == (30, 6)
        assert y.shape == z.shape == (30,)
        if unit == "record":
            assert np.array_equal(x[1:], other[1:])
            assert np.array_equal(y[1:], z[1:])
            assert "far" in name or "long" in name or np.linalg.norm(x, axis=1).max() <= 1 + 1e-12


def test_a_function_that_raises_or_changes_its_length_is_named_in_a_sentence():
    with pytest.raises(BadInput, match="raised ZeroDivisionError"):
        certify(lambda x, y, seed: 1 / 0, 1.0, 1e-5, runs=60)
    with pytest.raises(BadInput, match="several lengths"):
        certify(lambda x, y, seed: np.zeros(1 + seed % 2), 1.0, 1e-5, runs=60)


def test_the_command_exits_with_1_where_a_claim_is_refuted_and_0_where_not(silodp, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n\ndef good(x, y, seed):\n    return "
        "np.random.default_rng(seed).normal(size=3)\n\n"
        "def bad(x, y, seed):\n    return np.append(x[0], y[0])\n"
    )
    code, said, _ = silodp("audit", "certify", "mine.py:good", "--epsilon", "1", "--runs", "100")
    assert (code, "These attacks do not refute the claim" in said) == (0, True)
    code, said, _ = silodp("audit", "certify", "mine.py:bad", "--epsilon", "1", "--runs", "100")
    assert (code, "The claim is refuted" in said) == (1, True)
    for words, wrong in (
        (["mine.py:none"], "has no 'none'"),
        (["mine.py:bad", "--unit", "village"], "must be one of record, silo"),
    ):
        code, _, said = silodp("audit", "certify", *words, "--epsilon", "1")
        assert code == 2
        assert wrong in said
