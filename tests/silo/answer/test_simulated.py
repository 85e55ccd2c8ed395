"""The simulated answerer: it passes the mechanism and sampling suites, and those suites see each
way in which it could be broken.
"""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.mechanisms import Gaussian
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.problem.losses import cross_entropy, squared_error
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import L1
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, WithoutReplacement
from silodp.core.statistics import Grad, GradDiff, Histogram, LocalSteps, Moments, SteeredSteps
from silodp.engine import clipping
from silodp.silo.answer import simulated
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.testing.mechanism import check_mechanism
from silodp.testing.sampling import check_sampling

SAMPLINGS = [
    FullBatch(),
    DisjointBatches(4),
    DisjointBatches(1),
    Poisson(0.1),
    Poisson(0.4),
    Poisson(1.0),
    WithoutReplacement(0.1),
    WithoutReplacement(0.6),
    WithoutReplacement(1.0),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_sampling_passes_its_conformance_suite(sampling):
    check_sampling(sampling)


@pytest.mark.parametrize(
    "mechanism",
    [
        Gaussian("full", 0.7, 1.3),
        Gaussian("each silo its own", 5.0, torch.tensor([[0.5, 2.0, 9.0]], dtype=torch.float64)),
        Gaussian("disjoint", 0.7, 1.3, DisjointBatches(4)),
        Gaussian("poisson", 1e-3, 0.2, Poisson(0.3)),
        Gaussian("without replacement", 20.0, 3.0, WithoutReplacement(0.3)),
    ],
    ids=lambda m: m.kind,
)
def test_the_mechanism_passes_its_conformance_suite(mechanism):
    check_mechanism(mechanism)


# --- planted bugs, each seen by a suite ----------------------------------------------------------


class SharedNoise(Simulated):
    """One draw for all silos of a round."""

    def _noisy(self, mean, mechanism, silos):
        noise = super()._noisy(torch.zeros_like(mean), mechanism, silos)
        batch = self._batch(mechanism.sampling, silos).to(mean)
        return mean + noise[:, :1] * (batch[0] / batch)


class ReusedNoise(Simulated):
    """The same draws in every round."""

    def answer(self, query, silos):
        before = copy.deepcopy(self._generators)
        value = super().answer(query, silos)
        self._generators = before
        return value


class HalvedNoise(Simulated):
    """Noise for a sensitivity of clip / batch, as if a record were only removed."""

    def _noisy(self, mean, mechanism, silos):
        return super()._noisy(mean, mechanism.clipped(mechanism.clip / 2), silos)


class NoiseOnce(Simulated):
    """Local steps with noise in the last one only."""

    def answer(self, query, silos):
        if isinstance(query.statistic, LocalSteps):
            first = self.answer(Query(Grad(query.statistic.w), query.mechanism), silos)
            return -query.statistic.step * query.statistic.steps * first
        return super().answer(query, silos)


class FixedNoise(Simulated):
    """Noise that does not follow the clip."""

    def _noisy(self, mean, mechanism, silos):
        return super()._noisy(mean, mechanism.clipped(0.7), silos)


class Unclipped(Simulated):
    """Differences clipped nowhere, under noise for clipped ones."""

    def _mean(self, w, reference, mechanism, silos, limit=None):
        return super()._mean(
            w,
            reference,
            mechanism if reference is None else mechanism.clipped(math.inf),
            silos,
            limit,
        )


class PerTensor(Simulated):
    """Each tensor clipped to the clip, as the authors' code does."""

    def _mean(self, w, reference, mechanism, silos, limit=None):
        parts = []
        for name in self.problem.shapes:
            alone = super()._mean(w, reference, mechanism.clipped(math.inf), silos, limit)
            parts.append(self.problem.split(alone)[name].flatten(2))
        scaled = [
            p
            * (
                mechanism.clip
                / self._batch(mechanism.sampling, silos).to(p)
                / p.norm(dim=-1, keepdim=True)
            ).clamp(max=1)
            for p in parts
        ]
        return torch.cat([p.nan_to_num(0.0) for p in scaled], dim=-1)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (SharedNoise, "not independent"),
        (ReusedNoise, "not independent"),
        (HalvedNoise, r"0\.(49|50)\d times the standard deviation"),
        (NoiseOnce, "times the standard deviation"),
        (FixedNoise, "at 0.01 times the clip"),
        (Unclipped, "past the sensitivity"),
        (PerTensor, "past the sensitivity"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_the_mechanism_suite_sees_a_broken_answerer(broken, message):
    with pytest.raises(AssertionError, match=message):
        check_mechanism(Gaussian("full", 0.7, 1.3), answerer=broken)


def test_the_mechanism_suite_sees_a_sensitivity_that_is_too_small():
    class Half(Gaussian):
        def sensitivity(self, n):
            return super().sensitivity(n) / 2

    with pytest.raises(AssertionError, match="past the sensitivity"):
        check_mechanism(Half("half", 0.7, 1.3))


def test_the_mechanism_suite_sees_a_price_that_forgets_the_count():
    class Flat(Gaussian):
        def event(self, releases=1):
            return super().event()

    with pytest.raises(AssertionError, match="2 releases cost"):
        check_mechanism(Flat("flat", 0.7, 1.3))


class Redrawn(Simulated):
    """A partition that is not kept."""

    def _weight(self, sampling, silos):
        self._partitions.clear()
        return super()._weight(sampling, silos)


class Truncated(Simulated):
    """Poisson batches cut off at their expected size."""

    def _weight(self, sampling, silos):
        weight = super()._weight(sampling, silos)
        if isinstance(sampling, Poisson):
            weight = weight * (weight.cumsum(-1) <= self._batch(sampling, silos).ceil())
        return weight


class Realised(Simulated):
    """Poisson batches divided by the number of records drawn, which is secret."""

    def _mean(self, w, reference, mechanism, silos, limit=None):
        mean = super()._mean(w, reference, mechanism, silos, limit)
        return mean / mean.sum(-1, keepdim=True).clamp_min(1e-9)


class SharedCoins(Simulated):
    """One coin for all silos."""

    def _weight(self, sampling, silos):
        weight = super()._weight(sampling, silos)
        return weight[..., -2:-1, :].expand_as(weight) * self.records.mask[list(silos)]


class Padded(Simulated):
    """Padding taken for records."""

    def _weight(self, sampling, silos):
        return super()._weight(sampling, silos) + (~self.records.mask[list(silos)]).float()


class SilentWhenEmpty(Simulated):
    """No noise where nobody was drawn."""

    def answer(self, query, silos):
        value = super().answer(query, silos)
        return torch.where(
            (value.abs() * self._batch(query.mechanism.sampling, silos) > 0.5).any(
                -1, keepdim=True
            ),
            value,
            0.0,
        )


class WithReplacement(Simulated):
    """A record may be drawn twice."""

    def _weight(self, sampling, silos):
        weight = super()._weight(sampling, silos)
        return weight + weight * (
            torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.1
        )


@pytest.mark.parametrize(
    ("broken", "sampling", "message"),
    [
        (Redrawn, DisjointBatches(4), r"in \d batches of one partition"),
        (Truncated, Poisson(0.4), "of batches, not in|not binomial"),
        (Realised, Poisson(0.4), "public batch size"),
        (SharedCoins, Poisson(0.4), "not independent"),
        (SilentWhenEmpty, Poisson(0.1), "not answered by noise"),
        (Padded, FullBatch(), "padding row"),
        (Padded, Poisson(0.4), "padding row"),
        (WithReplacement, WithoutReplacement(0.4), "counts 2 times"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_the_sampling_suite_sees_a_broken_answerer(broken, sampling, message):
    with pytest.raises(AssertionError, match=message):
        check_sampling(sampling, answerer=broken)


# --- its own ground ------------------------------------------------------------------------------

COUNTS = (7, 12, 4)


def network():
    return Problem(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), cross_entropy, L1(0.01)
    )


def silos(seed=0):
    random = np.random.default_rng(seed)
    return [(random.normal(size=(n, 3)), random.integers(0, 2, n)) for n in COUNTS]


def clipped_mean(problem, w, x, y, clip, reference=None):
    """One record at a time, all tensors as one vector, by autograd."""

    def gradient(point, k):
        point = point.clone().requires_grad_()
        return torch.autograd.grad(
            problem.losses(point[None], x[k : k + 1], y[k : k + 1]).sum(), point
        )[0]

    total = torch.zeros_like(w)
    for k in range(len(x)):
        g = gradient(w, k) - (gradient(reference, k) if reference is not None else 0)
        if bool(torch.isfinite(g).all()):
            total += g * min(1.0, clip / max(float(g.norm()), 1e-30))
    return total / len(x)


def points(problem, count=1, seed=0):
    return problem.initial(range(seed, seed + count))


def test_a_gradient_is_the_mean_of_records_clipped_as_one_vector():
    problem, records = network(), Records.of(silos())
    w = points(problem, 2)
    for clip in (0.3, 100.0):
        got = Simulated(problem, records, [0]).answer(
            Query(Grad(w), Gaussian("g", clip, 0.0)), (0, 1, 2)
        )
        for j in range(2):
            for i, n in enumerate(COUNTS):
                assert torch.allclose(
                    got[j, i],
                    clipped_mean(problem, w[j], records.x[i, :n], records.y[i, :n], clip),
                    atol=1e-6,
                )


def test_a_difference_is_clipped_as_a_difference():
    problem, records = network(), Records.of(silos())
    (w,), (reference,) = points(problem), points(problem, seed=9)
    for clip in (0.05, 100.0):
        query = Query(GradDiff(w[None], reference[None]), Gaussian("g", clip, 0.0))
        got = Simulated(problem, records, [0]).answer(query, (0, 1, 2))
        for i, n in enumerate(COUNTS):
            wanted = clipped_mean(problem, w, records.x[i, :n], records.y[i, :n], clip, reference)
            assert torch.allclose(got[0, i], wanted, atol=1e-6)


def test_local_steps_are_a_loop_of_clipped_proximal_steps_in_each_silo():
    problem, records = network(), Records.of(silos())
    w = points(problem, 2)
    steps = torch.tensor([[0.5], [0.1]])
    clips = torch.tensor([[0.2], [5.0]])
    got = Simulated(problem, records, [0]).answer(
        Query(LocalSteps(w, 4, steps), Gaussian("g", clips, 0.0)), (2, 0)
    )
    for j in range(2):
        for k, i in enumerate((2, 0)):
            n, local = COUNTS[i], w[j]
            for _ in range(4):
                g = clipped_mean(
                    problem, local, records.x[i, :n], records.y[i, :n], float(clips[j])
                )
                local = problem.prox(local - steps[j] * g, float(steps[j]))
            assert torch.allclose(got[j, k], local - w[j], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steered_steps_add_their_drift_to_every_noisy_gradient(dtype):
    problem, records = network(), Records.of(silos())
    w, steps = points(problem, 2), torch.tensor([[0.5], [0.1]])
    drift = points(problem, 2, seed=4).to(dtype)
    got = Simulated(problem, records, [0]).answer(
        Query(SteeredSteps(w, 3, steps, drift), Gaussian("g", 0.2, 0.0)), (1,)
    )
    for j in range(2):
        n, local = COUNTS[1], w[j]
        for _ in range(3):
            g = clipped_mean(problem, local, records.x[1, :n], records.y[1, :n], 0.2)
            local = problem.prox(local - steps[j] * (g + drift[j].float()), float(steps[j]))
        assert torch.allclose(got[j, 0], local - w[j], atol=1e-5)


def test_a_drift_changes_no_noise():
    problem, records = network(), Records.of(silos())
    w, mechanism = points(problem), Gaussian("g", 0.2, 3.0)
    plain = Simulated(problem, records, [0]).answer(Query(LocalSteps(w, 1, 0.5), mechanism), (0,))
    steered = Simulated(problem, records, [0]).answer(
        Query(SteeredSteps(w, 1, 0.5, w), mechanism), (0,)
    )
    assert torch.allclose(steered, plain - 0.5 * w[:, None], atol=1e-5)


def test_a_model_that_needs_the_fallback_answers_like_any_other():
    problem = Problem(
        nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 2)),
        cross_entropy,
    )
    records = Records.of(silos())
    w = points(problem)
    got = Simulated(problem, records, [0]).answer(
        Query(Grad(w), Gaussian("g", 0.3, 0.0)), (0, 1, 2)
    )
    for i, n in enumerate(COUNTS):
        assert torch.allclose(
            got[0, i],
            clipped_mean(problem, w[0], records.x[i, :n], records.y[i, :n], 0.3),
            atol=1e-6,
        )


def test_silos_asked_alone_answer_as_they_do_together():
    problem, records = network(), Records.of(silos())
    query = Query(Grad(points(problem)), Gaussian("g", 0.3, 0.0))
    together = Simulated(problem, records, [0]).answer(query, (0, 1, 2))
    for i in range(3):
        assert torch.allclose(
            Simulated(problem, records, [0]).answer(query, (i,))[:, 0], together[:, i], atol=1e-7
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, 1e38])
@pytest.mark.parametrize("statistic", ["grad", "difference", "local"])
def test_a_bad_record_contributes_at_most_its_clip_and_changes_nobody_elses_part(bad, statistic):
    problem, data = network(), silos()
    clean = Records.of(
        [(x[1:] if i == 0 else x, y[1:] if i == 0 else y) for i, (x, y) in enumerate(data)]
    )
    data[0][0][0] = bad
    dirty = Records.of(data)
    w = points(problem)
    made = {"grad": Grad(w), "difference": GradDiff(w, w * 0.5), "local": LocalSteps(w, 1, 1.0)}[
        statistic
    ]
    smooth = Problem(problem.model, problem.loss)
    query = Query(made, Gaussian("g", 0.3, 0.0))
    got, wanted = (Simulated(smooth, r, [0]).answer(query, (0, 1, 2)) for r in (dirty, clean))
    assert bool(torch.isfinite(got).all())
    assert torch.equal(got[:, 1:], wanted[:, 1:])
    moved = (got[0, 0] * COUNTS[0] - wanted[0, 0] * (COUNTS[0] - 1)).norm()
    assert moved <= 0.3 * (1 + CLIP_TOLERANCE) + 1e-6
    if not math.isfinite(bad):
        assert moved <= 1e-6


@pytest.mark.parametrize("statistic", ["grad", "difference", "local"])
def test_at_clip_zero_the_answer_is_exactly_zero(statistic):
    problem, records = Problem(nn.Linear(3, 2), cross_entropy), Records.of(silos())
    w = points(problem, 2)
    made = {"grad": Grad(w), "difference": GradDiff(w, w * 0.5), "local": LocalSteps(w, 3, 1.0)}[
        statistic
    ]
    for clip in (0.0, torch.zeros(2, 1)):
        got = Simulated(problem, records, [0]).answer(
            Query(made, Gaussian("g", clip, 5.0)), (0, 1, 2)
        )
        assert bool((got == 0).all())


def test_a_run_at_clip_zero_leaves_the_noise_of_the_others():
    problem, records = Problem(nn.Linear(3, 2), cross_entropy), Records.of(silos())
    w = points(problem, 2)
    got = Simulated(problem, records, [0]).answer(
        Query(Grad(w), Gaussian("g", torch.tensor([[0.0], [1.0]]), 5.0)), (0, 1, 2)
    )
    assert bool((got[0] == 0).all())
    assert bool((got[1] != 0).all())


def test_noise_is_never_shared_between_silos_rounds_or_seeds():
    """Exact: no two of these pure-noise vectors have an entry in common (for floats of a continuous
    law, but for a chance below 1e-3).
    """
    problem = Problem(nn.Linear(50, 1, bias=False), squared_error)
    records = Records.of([(np.zeros((n, 50)), np.zeros(n)) for n in (8, 8, 8)])
    answerer = Simulated(problem, records, [1, 2])
    w = torch.zeros(2, 50)
    queries = [Grad(w), Grad(w), GradDiff(w, w), LocalSteps(w, 1, 1.0)]
    vectors = [
        v
        for q in queries
        for v in answerer.answer(Query(q, Gaussian("g", 1.0, 1.0)), (0, 1, 2)).flatten(0, 1).abs()
    ]
    values = torch.cat(vectors).tolist()
    assert len(set(values)) >= len(values) - 2


def test_runs_of_one_seed_share_their_draws_and_a_seed_repeats_itself():
    problem, records = network(), Records.of(silos())
    w = points(problem).expand(3, -1)
    query = Query(Grad(w), Gaussian("g", 1.0, 1.0, Poisson(0.5)))
    first, again = (
        Simulated(problem, records, [4, 5, 4]).answer(query, (0, 1, 2)) for _ in range(2)
    )
    assert torch.equal(first, again)
    assert torch.equal(first[0], first[2])
    assert not torch.equal(first[0], first[1])


def test_feature_statistics_count_every_record_once_and_carry_the_noise_of_their_norm():
    data = [
        (np.array([[0.5, -3.0], [2.5, np.nan], [0.1, 0.2]]), np.zeros(3)),
        (np.array([[9.0, 9.0]]), np.zeros(1)),
    ]
    answerer = Simulated(network(), Records.of(data), [0])
    edges = torch.tensor([-1.0, 0.0, 1.0])
    shares = answerer.answer(Query(Histogram(edges, 2), Gaussian("ranges", 2**0.5, 0.0)), (0, 1))
    assert shares[0, 0].reshape(2, 4).tolist() == pytest.approx(
        np.array([[0, 0, 2, 1], [1, 0, 1, 0]]) / 3
    )
    assert shares[0, 1].tolist() == [0, 0, 0, 1] * 2
    query = Query(
        Moments(torch.tensor([-1.0, -4.0]), torch.tensor([1.0, 4.0])), Gaussian("moments", 2.0, 0.0)
    )
    moments = answerer.answer(query, (0, 1))
    u = np.array([[0.5, -0.75], [1.0, 0.0], [0.1, 0.05]])
    assert moments[0, 0].tolist() == pytest.approx(
        np.concatenate([u.mean(0), (u**2).mean(0)]).tolist(), abs=1e-6
    )
    noisy = answerer.answer(
        Query(Histogram(torch.linspace(-9, 9, 4000), 2), Gaussian("ranges", 2**0.5, 3.0)), (0, 1)
    )
    std = noisy.std(-1)[0]
    assert std.tolist() == pytest.approx([3.0 * 2 * 2**0.5 / 3, 3.0 * 2 * 2**0.5], rel=0.05)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0, -1.0, 1.0])
def test_one_record_moves_feature_statistics_by_at_most_their_sensitivity(bad):
    features, n = 3, 5
    edges = torch.tensor([-1.0, 0.0, 1.0])
    cases = [
        (Histogram(edges, features), features**0.5),
        (
            Moments(torch.full((features,), -1.0), torch.full((features,), 1.0)),
            (2 * features) ** 0.5,
        ),
    ]
    here, there = np.full((n, features), 0.5), np.full((n, features), 0.5)
    here[0], there[0] = bad, -bad
    there[0, 0] = 0.2
    for statistic, norm in cases:
        mechanism = Gaussian("features", norm, 0.0)
        query = Query(statistic, mechanism)
        a, b = (
            Simulated(network(), Records.of([(x, np.zeros(n))]), [0]).answer(query, (0,))
            for x in (here, there)
        )
        assert bool(torch.isfinite(a).all())
        assert float((a - b).norm()) <= float(mechanism.sensitivity(n))


def test_the_answerer_leaves_the_global_generator_alone():
    problem, records = network(), Records.of(silos())
    torch.manual_seed(0)
    before = torch.get_rng_state()
    query = Query(LocalSteps(points(problem), 2, 0.1), Gaussian("g", 1.0, 1.0, Poisson(0.5)))
    Simulated(problem, records, [0]).answer(query, (0, 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_engine_is_the_one_that_is_checked():
    assert simulated.clipped_sum is clipping.clipped_sum
