"""The deployed answerer: exact integers on a lattice, a bound that no record can break, and noise
that nobody can switch off.
"""

import inspect
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from silodp.core.errors import BadInput, Refused
from silodp.core.lattice import GRAIN, lattice_step, noise_scale
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import cross_entropy, squared_error
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import L1
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, WithoutReplacement
from silodp.core.statistics import Grad, GradDiff, Histogram, LocalSteps, Moments, SteeredSteps
from silodp.silo.answer import exact, lattice, slots
from silodp.silo.answer.exact import Exact, check_lattice, coarser, quantised
from silodp.silo.answer.integers import multiplied
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records

N, FEATURES = 60, 5


def records(x=None, y=None) -> Records:
    rng = np.random.default_rng(7)
    default = rng.normal(size=(N, FEATURES)).astype(np.float32), rng.integers(0, 3, N)
    return Records.of([(default[0] if x is None else x, default[1] if y is None else y)])


def problem(loss=cross_entropy, prox=None, outputs=3) -> Problem:
    torch.manual_seed(3)
    return Problem(
        nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, outputs)), loss, prox
    )


def answerer(given=None, of=None) -> Exact:
    return Exact(
        of or problem(), given or records(), partition=lambda name, batches: np.arange(N)[::-1]
    )


@pytest.fixture
def silent(monkeypatch):
    """The noise replaced by zeros, in a test only: the shipped code has no way to do it."""
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))


def clipped_mean(x, y, w, reference=None, clip=0.5, of=None) -> np.ndarray:
    """An independent per-record loop in float64."""
    of, total = of or problem(), 0
    for xi, yi in zip(x.double(), y, strict=True):
        g = torch.zeros(1)
        for sign, point in ((1, w), (-1, reference)):
            if point is not None:
                p = point[0].double().requires_grad_()
                loss = of.loss(
                    torch.func.functional_call(of.model, of.split(p), (xi[None],)), yi[None]
                ).sum()
                g = g + sign * torch.autograd.grad(loss, p)[0]
        total = total + g * min(1.0, clip / float(g.norm()))
    return (total / len(x)).numpy()


W = problem().initial([1])


@pytest.mark.parametrize("sampling", [FullBatch(), Poisson(0.1), DisjointBatches(3, 1)])
def test_how_an_answer_is_packed_follows_from_the_query_and_loses_little_of_it(sampling):
    query = Query(Grad(W), Gaussian("a", 0.5, 2.0, sampling))
    made = [
        answerer(records(x=np.full((N, FEATURES), fill, np.float32))).packing(query)
        for fill in (0.0, 1e30, math.nan)
    ]
    assert made[0] == made[1] == made[2]
    assert made[0] is not None
    assert made[0].width == 3
    value = answerer().answer(query, [0])[0, 0].numpy()
    lost = made[0].unpacked(made[0].packed(value)) - value
    assert (
        np.abs(lost).max() <= 2.0 * 2 * 0.5 / sampling.batch(N) / 64
    )  # the noise's standard deviation by 64
    for steps in (1, 2):
        assert answerer().packing(Query(LocalSteps(W, steps, 0.1), query.mechanism)) is None


QUERIES = {
    "grad": Query(Grad(W), Gaussian("a", 0.5, 2.0)),
    "difference": Query(GradDiff(W, 0.9 * W), Gaussian("a", 0.05, 2.0)),
}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_without_its_noise_the_answer_is_the_clipped_mean_to_the_lattice(silent, query):
    data, clip = records(), query.mechanism.clip
    got = answerer(data).answer(query, [0]).numpy()
    assert got.shape == (1, 1, problem().dim)
    wanted = clipped_mean(
        data.x[0], data.y[0], W, getattr(query.statistic, "reference", None), clip
    )
    gamma, d = lattice_step(clip, problem().dim), problem().dim
    assert np.linalg.norm(got[0, 0] - wanted) <= gamma * math.sqrt(d)
    np.testing.assert_allclose(got * N / gamma, np.round(got * N / gamma), rtol=1e-15)


def test_the_noise_has_the_promised_deviation():
    """240 x 39 draws: the empirical std is within 4 % of 2 z C / n, at a false-alarm rate of about
    1e-7 (5.4 sigma).
    """
    query = Query(Grad(W), Gaussian("a", 0.5, 3.0))
    asked = answerer(
        records(x=np.full((N, FEATURES), np.nan))
    )  # nobody contributes: noise around zero
    draws = torch.cat([asked.answer(query, [0])[0] for _ in range(240)])
    assert float(draws.std() / (3.0 * 2 * 0.5 / N)) == pytest.approx(1, abs=0.04)
    assert len(torch.unique(draws)) > 0.99 * draws.numel()


def test_batches_follow_the_sampling_and_the_stored_partition(silent, monkeypatch):
    data, seen = records(), []
    wrapped = Exact._sum
    monkeypatch.setattr(
        Exact,
        "_sum",
        lambda self, rows, chosen, *rest: seen.append(chosen) or wrapped(self, rows, chosen, *rest),
    )
    asked = answerer(data)

    def ask(sampling) -> np.ndarray:
        return asked.answer(Query(Grad(W), Gaussian("a", 0.5, 2.0, sampling)), [0]).numpy()[0, 0]

    value = ask(DisjointBatches(7, 2))
    at = np.arange(N)[::-1][16:24]
    np.testing.assert_array_equal(seen[-1], at)
    assert (
        np.linalg.norm(value - clipped_mean(data.x[0][at.copy()], data.y[0][at.copy()], W)) < 1e-4
    )
    value = ask(Poisson(0.4))
    assert 5 <= len(seen[-1]) <= 45  # Bin(60, 0.4): beyond has probability below 1e-6
    assert (
        np.linalg.norm(
            value - clipped_mean(data.x[0][seen[-1]], data.y[0][seen[-1]], W) * len(seen[-1]) / 24
        )
        < 1e-4
    )
    ask(WithoutReplacement(0.25))
    assert len(set(seen[-1])) == len(seen[-1]) == 15


def test_a_partition_that_is_no_permutation_is_refused_and_its_refusal_comes_through():
    for order in (np.zeros(N, int), np.arange(N - 1), np.arange(N) + 1):
        asked = Exact(problem(), records(), partition=lambda name, batches, order=order: order)
        with pytest.raises(Refused, match="ledger"):
            asked.answer(Query(Grad(W), Gaussian("a", 0.5, 2.0, DisjointBatches(6, 1))), [0])


def test_local_steps_are_steps_of_noisy_means_through_the_prox(silent):
    data, of = records(), problem(prox=L1(0.01))
    value = answerer(data, of).answer(Query(LocalSteps(W, 3, 0.5), Gaussian("a", 0.5, 2.0)), [0])[0]
    drift = torch.linspace(-1, 1, W.shape[-1])[None]
    steered = answerer(data, of).answer(
        Query(SteeredSteps(W, 3, 0.5, drift), Gaussian("a", 0.5, 2.0)), [0]
    )[0]
    for got, push in ((value, 0.0), (steered, drift.double())):
        local = W.double()
        for _ in range(3):
            local = of.prox(
                local - 0.5 * (torch.from_numpy(clipped_mean(data.x[0], data.y[0], local)) + push),
                0.5,
            )
        assert float((got - (local - W.double())).norm()) < 1e-4


def test_local_steps_that_leave_the_numbers_end_finite():
    for step in (1e308, 5e-324):
        for statistic in (
            LocalSteps(W, 4, step),
            SteeredSteps(W, 4, step, torch.full_like(W, 3e38)),
            SteeredSteps(W, 4, 1.0, W.double() + 1e308),
        ):
            value = answerer().answer(Query(statistic, Gaussian("a", 1e9, 2.0)), [0])
            assert bool(torch.isfinite(value).all())


def histogram_sum(x, edges):
    """Counts by a loop over values: one in the bin of each finite value."""
    counts = np.zeros((x.shape[1], len(edges) + 1))
    for row in x:
        for j, value in enumerate(row):
            if math.isfinite(value):
                counts[j, sum(float(edge) < value for edge in edges)] += 1
    return counts.ravel()


def moments_sum(x, low, high):
    u = np.nan_to_num(
        np.clip(2 * (x.astype(np.float64) - low.numpy()) / (high - low).numpy() - 1, -1, 1)
    )
    return np.concatenate([u.sum(0), (u**2).sum(0)])


def test_feature_statistics_are_those_of_a_loop_and_of_the_simulation(silent):
    x = np.random.default_rng(0).normal(size=(N, FEATURES)).astype(np.float32)
    x[3, 1], x[4, 2], x[5, 0] = np.nan, np.inf, -np.inf
    data, edges = records(x=x), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    low, high = torch.full((FEATURES,), -2.0), torch.full((FEATURES,), 1.5)
    for statistic, wanted in (
        (Histogram(edges, FEATURES), histogram_sum(x, edges)),
        (Moments(low, high), moments_sum(x, low, high)),
    ):
        clip = math.sqrt(FEATURES * (1 if isinstance(statistic, Histogram) else 2))
        query = Query(statistic, Gaussian("a", clip, 2.0))
        answerer(data).check(query)
        np.testing.assert_allclose(
            answerer(data).answer(query, [0])[0, 0].numpy(), wanted / N, atol=3e-5
        )
        simulated = Simulated(problem(), data, [0]).answer(
            Query(statistic, Gaussian("a", clip, 0.0)), [0]
        )
        np.testing.assert_allclose(simulated[0, 0].numpy(), wanted / N, rtol=1e-12)


def test_a_clip_of_zero_gives_exactly_zero():
    assert not answerer().answer(Query(Grad(W), Gaussian("a", 0.0, 2.0)), [0]).any()


# --- no record can do more than its clip ---------------------------------------------------------

numbers = st.floats(width=64) | st.sampled_from(
    [0.0, -0.0, 5e-324, 1e308, -1.7e308, math.inf, -math.inf, math.nan, 1e-200]
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(numbers, min_size=1, max_size=40), st.floats(2.0**-400, 2.0**400))
def test_no_row_of_any_floats_passes_the_integer_bound(row, clip):
    gamma = lattice_step(clip, len(row))
    assert math.frexp(gamma)[0] == 0.5
    assert Fraction(gamma) ** 2 * len(row) <= (Fraction(clip) / 2**GRAIN) ** 2
    integers = quantised(torch.tensor([row], dtype=torch.float64), clip, gamma)
    assert integers.dtype == torch.int64
    assert sum(int(k) ** 2 for k in integers[0]) <= (Fraction(clip) / Fraction(gamma)) ** 2
    if not all(map(math.isfinite, row)):
        assert not integers.any()


def test_rows_within_and_beyond_the_clip_keep_all_but_a_sliver_of_their_length():
    rng = torch.Generator().manual_seed(0)
    for d in (1, 2, 3, 1000, 70_000):
        rows = torch.randn(4, d, generator=rng, dtype=torch.float64)
        rows *= torch.tensor([[0.3], [1.0], [5.0], [1e300]], dtype=torch.float64) / rows.norm(
            dim=1, keepdim=True
        )
        lengths = quantised(rows, 1.0, gamma := lattice_step(1.0, d)).double().norm(dim=1) * gamma
        assert bool((lengths <= 1).all())
        torch.testing.assert_close(
            lengths, torch.tensor([0.3, 1, 1, 1], dtype=torch.float64), atol=2.0**-GRAIN, rtol=0
        )


def test_a_vector_that_escapes_the_float_clip_is_caught_in_integers(monkeypatch):
    """As if the float norm were wrong by any factor: what then passes the bound contributes zero,
    and int64 never wraps.
    """
    rows, gamma = (
        torch.ones(3, 50, dtype=torch.float64) * torch.tensor([[1e-3], [1.0], [1.0]]),
        lattice_step(1.0, 50),
    )
    for factor in (0.99, 1e-3, 1e-12):
        monkeypatch.setattr(
            torch.linalg,
            "vector_norm",
            lambda u, factor=factor, **_: torch.full((3, 1), 50**0.5 * factor),
        )
        rows[2] = rows[2] / 0.5
        integers = quantised(rows, 1.0, gamma)
        assert integers[0].any()
        assert all(sum(int(k) ** 2 for k in row) <= (1 / gamma) ** 2 for row in integers)


def strict(output, target):
    """A loss that raises on a label that it does not know, alone or in a batch."""
    return nn.functional.cross_entropy(output, target, reduction="none")


@pytest.mark.parametrize("loss", [cross_entropy, strict, squared_error])
def test_replacing_one_record_changes_its_own_row_alone_to_the_last_bit(loss, monkeypatch):
    monkeypatch.setattr(slots, "CHUNK", 39 * 16)
    of = problem(loss, outputs=1 if loss is squared_error else 3)
    w, totals, base = of.initial([1]), [], records()
    bound = (Fraction(0.5) / Fraction(gamma := lattice_step(0.5, of.dim))) ** 2
    for bad_x, bad_y in (
        (0, 0),
        (math.nan, 0),
        (3e38, 1),
        (math.inf, 2),
        (1, 99),
        (-1, -5),
        (0, 2**62),
    ):
        x, y = base.x[0].numpy().copy(), base.y[0].numpy().copy()
        x[17], y[17] = bad_x, bad_y
        asked = answerer(records(x, y), of)
        totals.append(asked._sum(asked._gradients([w]), np.arange(N), 0.5, gamma, of.dim))
    for total in totals:
        assert (
            sum(int(k) ** 2 for k in (total - totals[1])) <= bound
        )  # totals[1], of NaN, is the sum of all the others
    if loss is not squared_error:
        np.testing.assert_array_equal(
            totals[4], totals[1]
        )  # a label that does not exist: zero too, and nobody else moved by a bit
        np.testing.assert_array_equal(totals[5], totals[1])


def test_a_record_that_breaks_a_batch_takes_nobody_with_it():
    """Raising by itself, or, as no kernel should, beside one other record only."""
    x, y = torch.arange(5.0, dtype=torch.float64)[:, None].expand(5, 2), torch.arange(5)

    def rows(x, y, beside=3):
        assert len(x) == 5
        if bool((y == 3).any() and (y == beside).any()):
            raise IndexError("label 3")
        return x * 2

    np.testing.assert_array_equal(slots.computed(rows, x, y, 2)[:, 0], [0, 2, 4, 0, 8])
    np.testing.assert_array_equal(
        slots.computed(lambda x, y: rows(x, y, beside=4), x, y, 2)[:, 0], [0, 2, 4, 6, 8]
    )


def test_a_computation_that_fails_on_every_record_gives_noise_around_zero(monkeypatch):
    def broken(*_):
        raise MemoryError("record 17 is 3.4")

    monkeypatch.setattr(Exact, "_gradients", lambda self, *points: broken)
    value = answerer().answer(QUERIES["grad"], [0])
    assert value.any()
    assert float(value.abs().max()) < 10 * 2.0 * 2 * 0.5 / N


# --- what is refused before the charge, and what does not exist ----------------------------------


@pytest.mark.parametrize(
    ("query", "code"),
    [
        (Query(Grad(W), Gaussian("a", 1.0, 1e-7)), "noise"),
        (Query(Grad(W), Gaussian("a", 1.0, 1e9)), "noise"),
        (Query(Grad(W), Gaussian("a", 5e-324, 1.0)), "clip"),
        (Query(Grad(W), Gaussian("a", 1e300, 1.0)), "clip"),
        (Query(Grad(W), Gaussian("a", math.nan, 1.0)), "clip"),
        (Query(Grad(W), Gaussian("a", 1.0, math.nan)), "noise"),
        (Query(Grad(torch.zeros(2, 39)), Gaussian("a", 1.0, 1.0)), "shape"),
        (Query(Histogram(torch.tensor([0.0, 1.0]), 4), Gaussian("a", 1.0, 1.0)), "shape"),
        (Query(Histogram(torch.tensor([1.0, 1.0]), 5), Gaussian("a", 1.0, 1.0)), "shape"),
        (Query(Histogram(torch.zeros(0), 5), Gaussian("a", 1.0, 1.0)), "shape"),
        (Query(Histogram(torch.tensor([0.0, math.inf]), 5), Gaussian("a", 1.0, 1.0)), "not-finite"),
        (Query(Moments(torch.zeros(5), torch.ones(4)), Gaussian("a", 1.0, 1.0)), "shape"),
        (Query(Moments(torch.ones(5), torch.zeros(5)), Gaussian("a", 1.0, 1.0)), "shape"),
    ],
)
def test_what_the_lattice_cannot_carry_is_refused_beforehand(query, code):
    with pytest.raises(Refused) as refusal:
        answerer().check(query)
    assert refusal.value.code == code


@pytest.mark.parametrize("d", [1, 3394, 62_006, exact.MAX_DIM])
def test_the_lattice_fits_int64_and_the_noise_its_sampler_at_every_dimension(d):
    for clip in (2.0**-400, 1e-6, 1.0, 0.7, 2.0**400):
        gamma = lattice_step(clip, d)
        assert clip / gamma < 2**30 and exact.MAX_RECORDS * int(clip / gamma + 1) < 2**62  # noqa: PT018
        query = Query(Grad(torch.zeros(1, 1).expand(1, d)), Gaussian("a", clip, 100.0))
        check_lattice(query, d, N)
        steps = Fraction(clip) / Fraction(gamma)
        assert Fraction(noise_scale(100.0, clip, gamma)) >= 100 * 2 * steps


def test_there_is_no_seed_and_no_switch_and_only_one_silo():
    code = [
        exact.check_lattice,
        lattice_step,
        noise_scale,
        exact.quantised,
        lattice.rounded_gaussian,
        lattice.Keystream.__init__,
    ]
    code += [member for _, member in inspect.getmembers(Exact, inspect.isfunction)]
    names = {
        name.lower() for function in code for name in inspect.signature(function).parameters
    } | {n.lower() for n in vars(answerer())}
    for word in (
        "seed",
        "generator",
        "random",
        "noise",
        "debug",
        "test",
        "off",
        "disable",
        "private",
        "secure",
    ):
        assert not any(word in name for name in names), word
    assert set(inspect.signature(Exact).parameters) == {
        "problem",
        "records",
        "partition",
        "held_out_share",
        "marks",
        "mapped",
    }
    with pytest.raises(BadInput, match="one silo"):
        Exact(
            problem(),
            Records.of([(np.ones((2, 5)), np.ones(2))] * 2),
            partition=lambda *_: np.arange(2),
        )


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("clip", [0.3, 1.0, 77.7])
@pytest.mark.parametrize("size", [2, 3, 9])
def test_products_of_any_floats_are_integers_no_farther_apart_than_their_noise_is_for(
    clip, size, terms
):
    """By Python's integers, over all pairs; orthogonal factors come within a thousandth of it. All
    terms of a record share its one bound.
    """
    gamma = lattice_step(clip, size * (size + 1) // 2)
    ordinary = np.concatenate([np.eye(size), np.random.default_rng(1).normal(size=(20, size))])
    far = 1e3 * clip * np.concatenate([ordinary, np.full((1, size), 1e300)])
    rows = multiplied(
        torch.from_numpy(
            np.tile(np.concatenate([far, [[np.nan] * size, [np.inf] * size, [0.0] * size]]), terms)
        ),
        clip,
        gamma,
        terms=terms,
    ).tolist()
    most = max(
        sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) for one in rows for other in rows
    )
    allowed = (2 * Fraction(clip) / Fraction(gamma)) ** 2
    assert 0.998 * allowed < most <= allowed


@pytest.mark.parametrize(("persons", "roundings"), [(False, 1), (True, 2)])
def test_products_leave_room_for_every_rounding_of_every_coordinate(persons, roundings):
    """On a coarse lattice the room can be seen: sqrt(d), rounded up, for each rounding."""
    clip, gamma, size, root = 1.0, 2.0**-8, 6, 5
    far = 1e9 * torch.eye(size, dtype=torch.float64)
    real = torch.ones(size, 1, dtype=torch.bool) if persons else None
    rows = multiplied(far, clip, gamma, real).tolist()
    apart = math.dist(rows[0], rows[1])
    assert apart <= 2 * clip / gamma - roundings * root + math.sqrt(0.5)
    assert apart >= 2 * clip / gamma - roundings * root - 2


def test_a_number_of_a_total_is_rounded_once():
    """floor((floor(x) + a) / b) is floor((x + a) / b): the shift of an integer is one rounding of
    the real sum, half a step of the lattice up.
    """
    random = np.random.default_rng(3)
    for shift in (1, 4, 9):
        total, noise = random.integers(-5000, 5000, 2000), random.normal(0, 700, 2000)
        sent = coarser(total + np.floor(noise + 0.5).astype(np.int64), shift)
        once = np.floor((total + noise + 0.5) / 2**shift + 0.5)
        assert np.array_equal(sent, once)
