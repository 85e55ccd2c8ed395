"""`silodp certify` finds the known mistakes of DP code, and leaves sound code alone."""

import functools

import numpy as np
import pytest

from silodp.core.errors import BadInput
from silodp.lab.certify import certify, neighbours

RUNS, STEPS = 600, 5
SOUND = 8.92  # noise in clips for 5 steps at epsilon 2, delta 1e-5, replace one


def sgd(x, y, seed, *, noise=SOUND, clip="record", steps=STEPS):
    """DP-SGD of a model with two tensors, logistic weights of x and of -x, and how it clips."""
    rng, w, seen = np.random.default_rng(seed), np.zeros((2, x.shape[1])), []
    for _ in range(steps):
        slope = 1 / (1 + np.exp(-np.clip(x @ (w[0] - w[1]), -50, 50))) - y
        rows = np.stack([slope[:, None] * x, -slope[:, None] * x], axis=1)  # records, tensors, features
        if clip == "record":
            rows = rows * np.minimum(1, 1 / np.maximum(np.linalg.norm(rows, axis=(1, 2), keepdims=True), 1e-12))
        elif clip == "tensor":
            rows = rows * np.minimum(1, 1 / np.maximum(np.linalg.norm(rows, axis=2, keepdims=True), 1e-12))
        total = rows.sum(0)
        if clip == "batch":  # the batch's mean is clipped, and the noise is that of one record's share
            mean = total / len(x)
            total = mean * min(1, 1 / max(np.linalg.norm(mean), 1e-12)) * len(x)
        noisy = total + rng.normal(0, noise, w.shape)
        seen.append(noisy.ravel())
        w = w - 0.5 * noisy / len(x)
    return np.concatenate(seen)


def verdict(release, epsilon=2.0, **options):
    return [f.refuted for f in certify(release, epsilon, 1e-5, runs=RUNS, records=12, features=3, **options)]


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
        rows = slope * np.minimum(1, 1 / np.maximum(np.linalg.norm(slope, axis=1, keepdims=True), 1e-12))
        return np.tile(rows.sum(0), 64) + rng.normal(0, 2 / 0.5, 64 * x.shape[1])  # mu 0.5 were it one tensor: epsilon 2

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
        "import numpy as np\n\ndef good(x, y, seed):\n    return np.random.default_rng(seed).normal(size=3)\n\n"
        "def bad(x, y, seed):\n    return np.append(x[0], y[0])\n"
    )
    code, said, _ = silodp("certify", "mine.py:good", "--epsilon", "1", "--runs", "100")
    assert (code, "not refuted by these attacks" in said) == (0, True)
    code, said, _ = silodp("certify", "mine.py:bad", "--epsilon", "1", "--runs", "100")
    assert (code, "The claim is refuted" in said) == (1, True)
    for words, wrong in ((["mine.py:none"], "has no 'none'"), (["mine.py:bad", "--unit", "village"], "must be one of record, silo")):
        code, _, said = silodp("certify", *words, "--epsilon", "1")
        assert code == 2
        assert wrong in said
