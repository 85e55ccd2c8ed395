"""The paths in C give the numbers of those in torch, and leave to them what is unsound."""

import itertools
import subprocess
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.errors import BadInput
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.problem.losses import Huber, cross_entropy, logistic, squared_error
from silodp.core.problem.models import cnn
from silodp.core.problem.problem import Problem
from silodp.engine import native
from silodp.engine.clipping import ENGINES, IN_TORCH, clipped_sum, task
from silodp.engine.compiled import compiled
from silodp.engine.model import MeanPool, Residual, SelfAttention
from silodp.engine.structured import numbers
from silodp.testing.model import record_gradients

pytestmark = pytest.mark.skipif(native.library() is None, reason="the C code was not built")

IN_C = ENGINES[0]
FEATURES = 5
SMALL = nn.Sequential(nn.Linear(FEATURES, 70), nn.ReLU(), nn.Linear(70, 3))
DEEP = nn.Sequential(
    nn.Linear(FEATURES, 19, bias=False),
    nn.ReLU(),
    nn.Linear(19, 16),
    nn.Linear(16, 7),
    nn.ReLU(),
    nn.Linear(7, 2),
    nn.ReLU(),
)
CNN = nn.Sequential(
    *(
        nn.Conv2d(3, 7, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(7, 16, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ),
    *(nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 3)),
)
# rows and columns that pools leave over, padding of two kinds, no bias, no pool, no ReLU, a kernel
# longer than a block
ODD = nn.Sequential(
    *(
        nn.Conv2d(2, 5, (3, 2), padding=(1, 2), bias=False),
        nn.MaxPool2d((2, 3)),
        nn.Conv2d(5, 2, (2, 1), padding="valid"),
        nn.ReLU(),
    ),
    *(
        nn.Sequential(nn.Conv2d(2, 3, (1, 7), padding=(0, 3)), nn.MaxPool2d((3, 1)), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(3 * 4, 2),
    ),
)
TOKENS = 11
TRANSFORMER = nn.Sequential(
    *(
        nn.Embedding(TOKENS, 16, padding_idx=3),
        Residual(nn.LayerNorm(16), nn.Linear(16, 48), SelfAttention(2), nn.Linear(16, 16)),
    ),
    *(
        Residual(
            nn.LayerNorm(16),
            nn.Linear(16, 40),
            nn.GELU(),
            nn.Dropout(0.5).eval(),
            nn.Linear(40, 16),
        ),
        MeanPool(),
        nn.Linear(16, 3),
    ),
)
# widths and rows that fill no vector, heads of two widths, norms without weight or bias, sums
# within sums and of nothing
ROWS = nn.Sequential(
    *(
        nn.Linear(5, 12),
        Residual(
            nn.Identity(),
            nn.LayerNorm(12, bias=False),
            Residual(nn.Linear(12, 36), SelfAttention(3), nn.ReLU()),
        ),
    ),
    *(
        Residual(),
        nn.LayerNorm(12, elementwise_affine=False),
        nn.Linear(12, 54, bias=False),
        SelfAttention(2),
        nn.GELU(),
        MeanPool(),
    ),
    *(nn.LayerNorm(18), nn.Linear(18, 2)),
)
IMAGES = {
    "CNN": (3, 18, 18),
    "CNN of odd settings": (2, 9, 11),
    "ready CNN": (2 * 8 * 9,),
    "transformer": (6,),
    "sequence of numbers": (19, 5),
}
CASES = {
    "CNN": (Problem(CNN, cross_entropy), (3, 40), lambda shape: torch.randint(0, 3, shape)),
    "CNN of odd settings": (
        Problem(ODD, squared_error),
        (2, 17),
        lambda shape: torch.randn(*shape, 2),
    ),
    "ready CNN": (
        Problem(cnn((2, 8, 9), 2), cross_entropy),
        (1, 33),
        lambda shape: torch.randint(0, 2, shape),
    ),
    "transformer": (
        Problem(TRANSFORMER, cross_entropy),
        (2, 35),
        lambda shape: torch.randint(0, 3, shape),
    ),
    "sequence of numbers": (
        Problem(ROWS, cross_entropy),
        (3, 8),
        lambda shape: torch.randint(0, 2, shape),
    ),
    "labels": (Problem(SMALL, cross_entropy), (3, 100), lambda shape: torch.randint(0, 3, shape)),
    "deep": (Problem(DEEP, squared_error), (2, 97), lambda shape: torch.randn(*shape, 2)),
    "one logit": (
        Problem(nn.Sequential(nn.Linear(FEATURES, 1)), logistic),
        (2, 7),
        lambda shape: torch.randint(0, 2, shape).float(),
    ),
    "one target": (
        Problem(nn.Sequential(nn.Linear(FEATURES, 1)), squared_error),
        (2, 7),
        torch.randn,
    ),
    "many records": (
        Problem(SMALL, cross_entropy),
        (1, 3100),
        lambda shape: torch.randint(0, 3, shape),
    ),
}


def records(case, *shape):
    """Of five tokens, so that records repeat them, or of numbers."""
    size = *shape, *IMAGES.get(case, (FEATURES,))
    return torch.randint(0, 5, size) if case == "transformer" else torch.randn(size)


def sums(problem, w, x, y, weight, clip, reference=None, **about):
    """By C, which must do it."""
    wanted = task(problem, w, x, y, weight, clip, reference=reference, **about)
    assert IN_C.supports(wanted)
    return IN_C.sum(wanted)


def bytes_of(wanted):
    return native.blocks(wanted, compiled(wanted))


@pytest.mark.parametrize("difference", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_sums_are_those_of_the_path_in_torch(case, difference):
    torch.manual_seed(0)
    problem, shape, targets = CASES[case]
    x, y, clip = records(case, *shape), targets(shape), torch.tensor([[0.3], [2.0]])
    for own, weighted in itertools.product((False, True), repeat=2):
        seeds = range(4 * shape[0] if own else 4)
        w, reference = problem.initial(seeds).view(2, 2, *((shape[0],) if own else ()), problem.dim)
        weight = torch.rand(*((2, *shape) if weighted else shape)).round(decimals=1)
        about = {"reference": reference if difference else None}
        plain = clipped_sum(problem, w, x, y, weight, clip, **about)
        torch.testing.assert_close(
            sums(problem, w, x, y, weight, clip, **about),
            plain,
            rtol=2e-6,
            atol=2e-6 * float(plain.abs().max()),
        )


@pytest.mark.parametrize("case", ["labels", "CNN", "transformer", "sequence of numbers"])
@pytest.mark.parametrize("difference", [False, True])
def test_one_record_contributes_no_more_than_the_clip(difference, case):
    torch.manual_seed(0)
    problem = CASES[case][0]
    x, y, w = (
        records(case, 2000, 1),
        torch.randint(0, 3, (2000, 1)),
        3 * torch.randn(1, problem.dim),
    )
    reference = w + 1e-3 * torch.randn_like(w) if difference else None
    for clip in (1e-6, 0.01, 1.0):
        longest = (
            sums(problem, w, x, y, torch.ones(2000, 1), clip, reference).double().norm(dim=-1).max()
        )
        assert longest <= clip * (1 + CLIP_TOLERANCE)


@pytest.mark.parametrize("case", ["labels", "CNN", "sequence of numbers"])
@pytest.mark.parametrize("difference", [False, True])
def test_whatever_a_record_holds_the_answer_is_that_of_the_path_in_torch(difference, case):
    torch.manual_seed(0)
    problem = CASES[case][0]
    w, reference = problem.initial([1, 2]), problem.initial([3, 4])
    x, y, weight = records(case, 3, 8), torch.randint(0, 3, (3, 8)), torch.ones(3, 8)
    about = {"reference": reference if difference else None}
    for value, label, share in (
        (0.0, 0, 1.0),
        (1.0, 9, 1.0),
        (torch.nan, 0, 1.0),
        (torch.inf, 1, 0.0),
        (1e30, 2, 1.0),
        (1e-42, 1, 1.0),
    ):
        x[1, 3], y[1, 3], weight[1, 3] = value, label, share
        for clip in (0.0, 0.5, torch.inf):
            plain, ours = (
                clipped_sum(problem, w, x, y, weight, clip, **about, engines=engines)
                for engines in (IN_TORCH, ENGINES)
            )
            assert bool(torch.isfinite(plain).all())
            torch.testing.assert_close(ours, plain, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("case", ["many records", "CNN", "transformer"])
def test_threads_and_other_runs_change_no_bit(case):
    torch.manual_seed(0)
    problem, shape, targets = CASES[case]
    x, y, w = records(case, *shape), targets(shape), problem.initial(range(5))
    weight, before = torch.ones(shape), torch.get_num_threads()
    together = sums(problem, w, x, y, weight, 1.0)
    try:
        torch.set_num_threads(1)
        alone = torch.cat([sums(problem, point[None], x, y, weight, 1.0) for point in w])
    finally:
        torch.set_num_threads(before)
    assert bool((together == alone).all())
    little = bytes_of(task(problem, w, x, y, weight, 1.0)) if case in IMAGES else 1
    assert bool((sums(problem, w, x, y, weight, 1.0, memory=little) == alone).all())


def test_a_sum_of_many_records_loses_no_digits():
    """A running sum in float32 would lose a thousandth of it, and let one record move it by many
    clips.
    """
    problem = CASES["one logit"][0]
    x, y, w = torch.ones(9, 50000, FEATURES), torch.zeros(9, 50000), problem.initial([0])
    found = sums(problem, w, x, y, torch.ones(9, 50000), 1.0).double() / 50000
    torch.testing.assert_close(
        found,
        clipped_sum(problem, w.double(), x[:, :1], y[:, :1], torch.ones(9, 1), 1.0),
        rtol=1e-6,
        atol=0,
    )


def test_lanes_without_a_record_add_nothing_whatever_the_weights_make_of_them():
    conv = [
        nn.Conv2d(1, 2, 1),
        nn.ReLU(),
        nn.Conv2d(2, 1, 1),
        nn.ReLU(),
        nn.Conv2d(1, 1, 1),
        nn.Flatten(),
        nn.Linear(16, 2),
    ]
    problem = Problem(nn.Sequential(*conv), cross_entropy)
    w = problem.initial([1])
    w[0, :6] = torch.tensor(
        [3e38, 1, 3e38, 0.1, 10, 1]
    )  # the bias of an image of zeros overflows, that of the records does not
    x, y = -torch.ones(1, 5, 1, 4, 4), torch.zeros(1, 5).long()
    torch.testing.assert_close(
        sums(problem, w, x, y, torch.ones(1, 5), 1.0),
        clipped_sum(problem, w, x, y, torch.ones(1, 5), 1.0),
    )


@pytest.mark.parametrize(
    "case", ["labels", "deep", "CNN", "CNN of odd settings", "sequence of numbers"]
)
@pytest.mark.parametrize("difference", [False, True])
def test_a_record_that_is_bad_and_what_padding_holds_change_no_bit_of_other_runs_and_silos(
    case, difference
):
    torch.manual_seed(0)
    problem, shape, targets = CASES[case]
    x, y, w, reference = (
        records(case, *shape),
        targets(shape),
        *problem.initial(range(6)).view(2, 3, -1),
    )
    weight, reference = torch.ones(shape), reference if difference else None
    weight[:, 4] = 0
    without, broken = weight.clone(), w.clone()
    without[0, 5], broken[1] = 0, torch.nan
    clean, fewer = (sums(problem, w, x, y, these, 1.0, reference) for these in (weight, without))
    left = []
    for junk in (torch.nan, torch.inf, 1e38):
        dirty = x.clone()
        dirty[:, 4] = junk
        found = sums(problem, broken, dirty, y, weight, 1.0, reference)
        assert not found[1].any()
        assert torch.equal(found[[0, 2]], clean[[0, 2]])
        dirty[0, 5] = junk
        left.append(sums(problem, w, dirty, y, weight, 1.0, reference))
        assert torch.equal(left[-1][:, 1:], clean[:, 1:])
        if junk == 1e38 and case == "sequence of numbers":  # which a LayerNorm makes small
            continue
        assert torch.equal(left[-1], left[0])
        torch.testing.assert_close(left[-1], fewer, rtol=2e-6, atol=2e-6 * float(fewer.abs().max()))


def test_a_gradient_beyond_the_limit_contributes_nothing():
    problem = Problem(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 1)), squared_error
    )
    w, x, y = problem.initial([1]), torch.randn(1, 1, 1, 8, 8), torch.full((1, 1), 1e16)
    w[:, 20:] = 0
    assert not sums(problem, w, x, y, torch.ones(1, 1), 1.0).any()


def test_a_token_that_there_is_not_is_refused_unless_its_record_has_no_weight():
    problem, shape, targets = CASES["transformer"]
    x, y, w, weight = (
        records("transformer", *shape),
        targets(shape),
        problem.initial([0]),
        torch.ones(shape),
    )
    weight[1, 3] = 0
    clean = sums(problem, w, x, y, weight, 1.0)
    for token in (-1, TOKENS, 2**24 + 1, -(2**40)):
        x[1, 3, 2] = token
        assert torch.equal(sums(problem, w, x, y, weight, 1.0), clean)
        with pytest.raises(IndexError, match="out of range"):
            sums(problem, w, x, y, torch.ones(shape), 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gelu_and_softmax_are_right_wherever_their_inputs_lie(dtype):
    model = nn.Sequential(
        nn.Linear(1, 48, bias=False),
        SelfAttention(2),
        nn.GELU(),
        MeanPool(),
        nn.Linear(16, 2, bias=False),
    )
    problem = Problem(model, cross_entropy)
    w, x, y = (
        problem.initial([0]),
        torch.linspace(-12, 12, 4 * 301).view(1, 301, 4, 1),
        torch.zeros(1, 301).long(),
    )
    w[0, :48] *= 3
    exact = record_gradients(problem, w[0], x, y)
    for i in range(0, 301, 20):
        found = sums(problem, w, x[:, i : i + 1].to(dtype), y[:, :1], torch.ones(1, 1), torch.inf)[
            0
        ].double()
        torch.testing.assert_close(
            found, exact[:, i], rtol=0, atol=2e-6 * float(exact[:, i].abs().max())
        )


def test_a_sequence_of_a_kind_that_c_has_not_stays_with_torch():
    tokens, rows, y = torch.zeros(2, 3, 4).long(), torch.zeros(2, 3, 4, 6), torch.zeros(2, 3).long()
    many = [nn.LayerNorm(6) for _ in range(128)]
    frozen = nn.LayerNorm(6)
    frozen.bias.requires_grad_(False)
    for head, x in (
        ([nn.GELU("tanh"), MeanPool()], rows),
        ([nn.Tanh(), MeanPool()], rows),
        ([nn.LayerNorm((4, 6)), MeanPool()], rows),
        ([*many, MeanPool()], rows),
        ([frozen, MeanPool()], rows),
        ([nn.Embedding(5, 6), nn.Flatten(), nn.Linear(24, 6)], tokens),
    ):
        problem = Problem(nn.Sequential(*head, nn.Linear(6, 2)), cross_entropy)
        wanted = task(problem, problem.initial([0]), x, y, torch.ones(2, 3), 1.0)
        assert numbers(problem, x)
        assert not IN_C.supports(wanted)


def test_images_too_large_for_the_memory_are_left_to_torch():
    problem, shape, targets = CASES["CNN"]
    x, y, w = torch.randn(*shape, *IMAGES["CNN"]), targets(shape), problem.initial([0])
    needed = bytes_of(task(problem, w, x, y, torch.ones(shape), 1.0))
    for less in (0, 1):
        assert IN_C.supports(
            task(problem, w, x, y, torch.ones(shape), 1.0, memory=needed - less)
        ) is (less == 0)


def test_settings_that_torch_reads_in_its_own_way_give_what_the_model_gives():
    later, short = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3)
    later.padding = (1, 1)  # after it was made
    heads = (
        [
            nn.Unflatten(1, (1, -1, 8)),
            nn.Conv2d(1, 2, (1, 3), padding=(2, 0)),
            nn.MaxPool2d((3, 1)),
            nn.Flatten(),
            nn.Linear(24, 2),
        ],
        [nn.Unflatten(1, (1, 2, 8)), later, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 2)],
        [nn.Unflatten(1, (1, 4, 4)), short, nn.MaxPool2d((2,)), nn.Flatten(), nn.Linear(2, 2)],
    )
    x, y, weight = torch.randn(2, 5, 16), torch.randint(0, 2, (2, 5)), torch.ones(2, 5)
    for head in heads:
        problem = Problem(nn.Sequential(*head), cross_entropy)
        w = problem.initial([0])
        alone = record_gradients(problem, w[0], x, y).sum(1)[None]
        for engines in (IN_TORCH, ENGINES):
            torch.testing.assert_close(
                clipped_sum(problem, w, x, y, weight, torch.inf, engines=engines).double(),
                alone,
                rtol=1e-5,
                atol=1e-5,
            )
    cropped = Problem(
        nn.Sequential(
            nn.Unflatten(1, (1, 4, 4)),
            nn.Conv2d(1, 2, 1, padding=-1),
            nn.Flatten(),
            nn.Linear(8, 2),
        ),
        cross_entropy,
    )
    with pytest.raises(RuntimeError, match="negative padding"):
        clipped_sum(cropped, cropped.initial([0]), x, y, weight, 1.0, engines=ENGINES)


def test_infinite_outputs_contribute_nothing():
    problem = Problem(nn.Sequential(nn.Linear(FEATURES, 3)), cross_entropy)
    x, y, w = torch.ones(1, 1, FEATURES), torch.zeros(1, 1), torch.full((1, problem.dim), 3e38)
    for sign in (1, -1):
        assert not bool(
            clipped_sum(problem, sign * w, x, y, torch.ones(1, 1), 1.0, engines=ENGINES).any()
        )


def test_normals_and_the_generator_after_them_are_numpy_s_to_the_bit():
    for seed in range(4):
        ours, numpys = np.random.default_rng(seed), np.random.default_rng(seed)
        for count in (1, 0, 2, 1_000_001, 3):  # what an odd number leaves over is the next one's
            found, expected = np.empty(count, np.float32), numpys.standard_normal(count, np.float32)
            native.standard_normals(ours, found)
            np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))
            assert (ours.random(), ours.integers(7)) == (numpys.random(), numpys.integers(7))
        assert ours.bit_generator.state == numpys.bit_generator.state


@pytest.mark.parametrize("threads", [1, 2])
def test_normals_are_numpy_s_for_any_number_of_threads_also_where_a_rare_one_spans_the_middle(
    threads,
):
    """The first four come to the middle of their first 2^14 numbers within one that takes
    several.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in (20, 43, 52, 56, *range(8)):
            ours, numpys = np.random.default_rng(seed), np.random.default_rng(seed)
            for count in (2**14, 1, 2**14 + 3):
                native.standard_normals(ours, found := np.empty(count, np.float32))
                np.testing.assert_array_equal(
                    found.view(np.int32), numpys.standard_normal(count, np.float32).view(np.int32)
                )
            assert ours.bit_generator.state == numpys.bit_generator.state
    finally:
        torch.set_num_threads(before)


def test_normals_are_left_to_numpy_where_the_generator_is_another_or_ours_differ(monkeypatch):
    for made in (np.random.SFC64, np.random.PCG64DXSM, np.random.PCG64):
        ours, numpys = np.random.Generator(made(5)), np.random.Generator(made(5))
        native.standard_normals(ours, found := np.empty(99, np.float32))
        np.testing.assert_array_equal(found, numpys.standard_normal(99, np.float32))
        native._are_numpys.cache_clear()
        monkeypatch.setattr(
            native, "_normals", lambda made, generator, out: out.fill(0)
        )  # another layout of the state, say
    native._are_numpys.cache_clear()


def test_threads_that_share_a_generator_share_no_normals():
    generator, found = np.random.default_rng(5), np.empty((2, 3_000_000), np.float32)
    native.standard_normals(generator, found[0, :1])  # what is tried once
    together = threading.Barrier(2)

    def fill(out: np.ndarray) -> None:
        together.wait()
        native.standard_normals(generator, out)

    threads = [threading.Thread(target=fill, args=(out,)) for out in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = np.random.default_rng(5).standard_normal(6_000_001, np.float32)[1:].reshape(2, -1)
    assert np.array_equal(found, expected) or np.array_equal(found[::-1], expected)


def test_normals_are_put_where_numpy_would_or_nowhere():
    whole = np.zeros(8, np.float32)
    locked = whole[:4]
    locked.flags.writeable = False
    for out in (
        whole[5::-1],
        whole[::2],
        locked,
        whole.view(">f4"),
        whole.astype(np.float16),
        whole.astype(np.float64),
    ):
        with pytest.raises((ValueError, TypeError)):
            native.standard_normals(np.random.default_rng(0), out)
    assert not whole.any()


@pytest.fixture
def fresh():
    """Forget which library was loaded, before the test and after it."""
    native.library.cache_clear()
    native._loaded.cache_clear()
    yield
    native.library.cache_clear()
    native._loaded.cache_clear()


def test_an_absent_or_broken_library_leaves_the_sum_to_torch_and_starts_no_program(
    fresh, tmp_path, monkeypatch
):
    def refuse(*words, **settings):
        raise AssertionError("no program may start")

    monkeypatch.delenv("SILODP_NATIVE", raising=False)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    problem = CASES["one target"][0]
    wanted = task(
        problem,
        problem.initial([0]),
        torch.zeros(2, 3, FEATURES),
        torch.zeros(2, 3),
        torch.ones(2, 3),
        1.0,
    )
    for content in (None, b"\x7fELF"):  # not there, and cut off
        if content is not None:
            (tmp_path / "baseline.abi3.so").write_bytes(content)
        native._loaded.cache_clear()
        native.library.cache_clear()
        assert native.library() is None
        assert not IN_C.supports(wanted)
        assert clipped_sum(
            problem, wanted.points[0], wanted.x, wanted.y, wanted.weight, 1.0, engines=ENGINES
        ).shape == (1, 2, problem.dim)


def test_a_level_that_the_processor_lacks_is_neither_chosen_nor_loaded_by_name(fresh, monkeypatch):
    """The plain build reports the processor's level; faster builds are not even opened."""
    baseline = native._loaded(native.BASELINE)
    opened = []

    def load(level):
        opened.append(level)
        return SimpleNamespace(level=lambda: 1) if level == native.BASELINE else baseline

    monkeypatch.setattr(native, "_loaded", load)
    assert native.runnable_levels() == [native.BASELINE]
    assert set(opened) == {native.BASELINE}
    for level in ("x86-64-v3", "x86-64-v4", "nonsense"):
        monkeypatch.setenv("SILODP_NATIVE", level)
        with pytest.raises(BadInput, match=f"SILODP_NATIVE is '{level}'.*one of 0, 1, baseline"):
            native.library()


def test_other_activations_losses_and_shapes_stay_with_torch():
    x, labels = torch.zeros(2, 3, FEATURES), torch.zeros(2, 3)
    for model, loss, y in (
        (nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)), squared_error, labels),
        (nn.Sequential(nn.ReLU(), nn.Linear(FEATURES, 1)), squared_error, labels),
        (nn.Sequential(nn.Linear(FEATURES, 1)), Huber(1.0), labels),
        (nn.Sequential(nn.Linear(FEATURES, 2)), logistic, labels),
        (nn.Sequential(nn.Linear(FEATURES, 2)), squared_error, labels),
        (nn.Sequential(nn.Linear(FEATURES + 1, 1)), squared_error, labels),
        (nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(5, 1)), squared_error, labels),
    ):
        problem = Problem(model, loss)
        point = torch.zeros(1, problem.dim)
        assert not IN_C.supports(task(problem, point, x, y, torch.ones(2, 3), 1.0))
    replaced, more = (
        nn.Sequential(nn.Linear(FEATURES, 2), nn.ReLU(), nn.Linear(2, 1)) for _ in range(2)
    )
    replaced[2].weight, replaced[2].bias = (
        nn.Parameter(torch.zeros(3, 2)),
        nn.Parameter(torch.zeros(3)),
    )
    more[0].register_parameter("extra", nn.Parameter(torch.zeros(4)))
    for model, y in (
        (replaced, labels.long()),
        (more, labels.long()),
        (nn.Sequential(nn.Linear(FEATURES, 2)), labels.double()),
    ):
        problem = Problem(model, cross_entropy)
        point = torch.zeros(1, problem.dim)
        assert not IN_C.supports(task(problem, point, x, y, torch.ones(2, 3), 1.0))
    frozen = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(2 * 2 * 3, 2))
    frozen[0].bias.requires_grad_(False)
    for head in (
        [nn.Conv2d(1, 2, 2, stride=(1, 1), dilation=(1, 2)), nn.Flatten(), nn.Linear(2 * 2 * 2, 2)],
        [nn.Conv2d(1, 2, 2, stride=2), nn.Flatten(), nn.Linear(2 * 1 * 2, 2)],
        [
            nn.Conv2d(1, 2, 2, padding=1, padding_mode="circular"),
            nn.Flatten(),
            nn.Linear(2 * 4 * 5, 2),
        ],
        [nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten(), nn.Linear(2 * 3 * 4, 2)],
        [nn.Conv2d(1, 2, 2), nn.MaxPool2d(2, stride=1), nn.Flatten(), nn.Linear(2 * 1 * 2, 2)],
        [nn.Conv2d(1, 2, 2), nn.MaxPool2d(2, padding=1), nn.Flatten(), nn.Linear(2 * 2 * 2, 2)],
        [nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 2 * 3, 2)],
        [nn.Conv2d(1, 2, 2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2 * 1 * 1, 2)],
        list(frozen),
    ):
        problem, images = Problem(nn.Sequential(*head), cross_entropy), torch.zeros(2, 3, 1, 3, 4)
        assert numbers(problem, images) or head[0].padding_mode == "circular"
        point = torch.zeros(1, problem.dim)
        assert not IN_C.supports(task(problem, point, images, labels.long(), torch.ones(2, 3), 1.0))
        assert clipped_sum(
            problem, point, images, labels.long(), torch.ones(2, 3), 1.0, engines=ENGINES
        ).shape == (1, 2, problem.dim)
    problem = CASES["one target"][0]
    for point in (
        torch.zeros(1, problem.dim, dtype=torch.float64),
        torch.zeros(1, problem.dim + 1),
    ):
        assert not IN_C.supports(task(problem, point, x, labels, torch.ones(2, 3), 1.0))
