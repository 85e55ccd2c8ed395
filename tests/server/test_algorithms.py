"""Every algorithm passes its conformance suite, and without noise finds what scikit-learn, cvxpy
and torch.optim find.
"""

import functools
import math

import cvxpy as cp
import numpy as np
import pytest
import torch
from sklearn.linear_model import Lasso, Ridge
from torch import nn

from silodp.core.errors import Refused
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.losses import logistic, squared_error
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import L1, Box, SquaredL2, Zero
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, WithoutReplacement
from silodp.core.statistics import Grad, GradDiff
from silodp.server.algorithms import ALGORITHMS, WORDS, Algorithm
from silodp.server.algorithms.diff2 import diff2
from silodp.server.algorithms.difference import ask_difference
from silodp.server.algorithms.prox_pl_svrg import prox_pl_svrg
from silodp.server.algorithms.prox_svrg import prox_svrg
from silodp.server.algorithms.scaffold import scaffold
from silodp.server.algorithms.spider import prox_spider
from silodp.server.federation import Everyone, Federation, Uniform
from silodp.server.plan import calibrate
from silodp.silo.data.records import Records
from silodp.simulation.connect import simulate
from silodp.testing import algorithm as conformance
from silodp.testing.algorithm import (
    check_algorithm,
    check_charges,
    check_narrow,
    check_optimum,
    check_runs_do_not_mix,
)
from silodp.testing.federation import check_replay

ITERATIVE = [name for name in ALGORITHMS if name not in ("one-shot", "scaled")]
"""Algorithms of one kind of model have tests of their own (test_one_shot.py, test_scaled.py)."""
DIM = 4
COUNTS = (30, 50)

LONG = {
    "prox-sgd": {"rounds": 120},
    "mb-sgd": {"rounds": 120},
    "local-sgd": {"rounds": 120, "local_steps": 1},
    "prox-svrg": {"rounds": 120, "inner": 5, "slope": 1.0},
    "prox-pl-svrg": {"restarts": 30, "rounds": 240, "inner": 4, "slope": 1.0},
    "spider": {"rounds": 120, "phase": 5, "slope": 1.0},
    "spider-alternate": {"rounds": 60, "slope": 1.0},
    "diff2": {"rounds": 120, "phase": 5, "slope": 1.0},
    "diff2-local": {"rounds": 120, "phase": 5, "local_steps": 1, "slope": 1.0},
    "scaffold": {"rounds": 120, "local_steps": 3},
    "momentum": {"rounds": 120, "momentum": 0.9},
    "adam": {"rounds": 600, "momentum": 0.9},
    "disk": {"rounds": 120, "kappa": 0.4},
    "accelerated": {"rounds": 240, "restarts": 4, "strong": 0.0},
    "localized": {"rounds": 240, "stages": 2, "pull": 1e-5, "growth": 8.0},
}
SHORT = {
    "prox-sgd": ({"rounds": 6}, 6),
    "mb-sgd": ({"rounds": 6}, 6),
    "local-sgd": ({"rounds": 4, "local_steps": 3}, 4),
    "prox-svrg": ({"rounds": 6, "inner": 3, "slope": 1.0}, 6),
    "prox-pl-svrg": ({"restarts": 2, "rounds": 8, "inner": 2, "slope": 1.0}, 10),
    "spider": ({"rounds": 7, "phase": 3, "slope": 1.0}, 7),
    "spider-alternate": ({"rounds": 3, "slope": 1.0}, 6),
    "diff2": ({"rounds": 7, "phase": 3, "slope": 1.0}, 7),
    "diff2-local": ({"rounds": 5, "phase": 3, "local_steps": 3, "slope": 1.0}, 5),
    "scaffold": ({"rounds": 4, "local_steps": 3}, 4),
    "momentum": ({"rounds": 6, "momentum": 0.9}, 6),
    "adam": ({"rounds": 6, "momentum": 0.9}, 6),
    "disk": ({"rounds": 6, "kappa": 0.4}, 6),
    "accelerated": ({"rounds": 6, "restarts": 2, "strong": 0.1}, 6),
    "localized": ({"rounds": 6, "stages": 2, "pull": 0.1, "growth": 8.0}, 6),
}
STEPS = {"adam": 0.02}
"""Of those whose step is not measured in 1 / beta."""


def arrays(loss, *, alike=False):
    """One (x, y) pair per silo: of unequal size, with means and labels of their own, or `alike`,
    the second the first one twice.
    """
    random = np.random.default_rng(7)
    truth = np.array([1.5, -2.0, 0.0, 0.4])
    silos = []
    for i, n in enumerate(COUNTS):
        x = random.normal(0.5 * i, 1, (n, DIM))
        z = x @ truth * (1 - 0.8 * i) + random.normal(0, 0.5, n)
        silos.append((x, (z > 0).astype(np.int64) if loss is logistic else z))
    if alike:
        x, y = silos[0]
        silos[1] = (np.concatenate([x, x]), np.concatenate([y, y]))
    return silos


def stacked(silos):
    """All records, each with weight 1 / (N n_i): the objective is the mean over silos of silo
    means.
    """
    weight = np.concatenate([np.full(len(y), 1 / (len(silos) * len(y))) for _, y in silos])
    return np.concatenate([x for x, _ in silos]), np.concatenate([y for _, y in silos]), weight


def plain(silos):
    x, y, weight = stacked(silos)
    w = np.linalg.lstsq(x * np.sqrt(weight)[:, None], y * np.sqrt(weight), rcond=None)[0]
    return weight @ (x @ w - y) ** 2


def ridge(silos, strength=0.2):
    x, y, weight = stacked(silos)
    w = (
        Ridge(alpha=strength / 2, fit_intercept=False, tol=1e-12)
        .fit(x, y, sample_weight=weight)
        .coef_
    )
    return weight @ (x @ w - y) ** 2 + strength / 2 * w @ w


def lasso(silos, strength=0.5):
    x, y, weight = stacked(silos)
    w = (
        Lasso(alpha=strength / 2, fit_intercept=False, tol=1e-12, max_iter=100_000)
        .fit(x, y, sample_weight=weight)
        .coef_
    )
    assert (np.abs(w) < 0.02).any(), "a lasso that pulls nobody to zero would not test its prox"
    return weight @ (x @ w - y) ** 2 + strength * np.abs(w).sum()


def boxed(silos, reach=0.5):
    x, y, weight = stacked(silos)
    w = cp.Variable(DIM)
    objective = cp.Minimize(weight @ cp.logistic(x @ w) - (weight * y) @ (x @ w))
    optimum = cp.Problem(objective, [cp.abs(w) <= reach]).solve(solver=cp.CLARABEL)
    assert (np.abs(w.value) > reach - 1e-6).any(), (
        "a box that holds nobody back would not test its prox"
    )
    return optimum


CONVEX = {
    "least squares": (squared_error, Zero(), plain, 0.2),
    "ridge": (squared_error, SquaredL2(0.2), ridge, 0.2),
    "lasso": (squared_error, L1(0.5), lasso, 0.2),
    "box-constrained logistic regression": (logistic, Box(-0.5, 0.5), boxed, 1.0),
}
PENALISED = ("ridge", "lasso")
LINEAR = ("least squares", "ridge")


@functools.cache
def convex(name, alike=False):
    loss, prox, solve, step = CONVEX[name]
    silos = arrays(loss, alike=alike)
    return (
        Problem(nn.Linear(DIM, 1, bias=False), loss, prox),
        Records.of(silos),
        float(solve(silos)),
        step,
    )


def test_the_tables_of_this_file_name_every_algorithm():
    assert set(LONG) == set(SHORT) == set(ITERATIVE)


# Adam's prox has the Euclidean metric, so with a penalty it ends elsewhere.
@pytest.mark.parametrize(
    ("name", "case"),
    [(n, c) for n in ITERATIVE for c in CONVEX if n != "adam" or c not in PENALISED],
)
def test_it_passes_the_conformance_suite_and_without_noise_finds_the_optimum_of_an_independent_solver(  # noqa: E501
    name, case
):
    algorithm, (short, iterates) = ALGORITHMS[name], SHORT[name]
    # A mean of silos' own proximal points is a proximal point of the mean only where the prox is
    # linear or the silos are alike.
    problem, records, optimum, step = convex(case, alike=name == "local-sgd" and case not in LINEAR)
    step = STEPS.get(name, step)
    batches = DisjointBatches(short["rounds"]) if algorithm.disjoint else None
    check_algorithm(
        algorithm,
        problem,
        records,
        optimum=optimum,
        step=step,
        long=LONG[name],
        short=short,
        iterates=iterates,
        sampling=batches,
    )


@pytest.mark.parametrize("case", CONVEX)
def test_several_local_steps_find_the_optimum_of_silos_that_are_alike(case):
    problem, records, optimum, step = convex(case, alike=True)
    check_optimum(
        ALGORITHMS["local-sgd"],
        problem,
        records,
        optimum=optimum,
        settings={"rounds": 40, "local_steps": 4},
        step=step,
    )


@pytest.mark.parametrize("case", CONVEX)
def test_control_variates_take_out_the_drift_of_local_steps_in_silos_that_differ(case):
    problem, records, optimum, step = convex(case)
    settings = {"rounds": 120, "local_steps": 4}
    check_optimum(
        ALGORITHMS["scaffold"], problem, records, optimum=optimum, settings=settings, step=step / 4
    )
    with pytest.raises(AssertionError, match="the reference has"):
        check_optimum(
            ALGORITHMS["local-sgd"],
            problem,
            records,
            optimum=optimum,
            settings=settings,
            step=step / 4,
        )


@pytest.mark.parametrize(
    "sampling", [Poisson(0.3), WithoutReplacement(0.3)], ids=["poisson", "without replacement"]
)
@pytest.mark.parametrize("name", ITERATIVE)
def test_runs_on_random_batches_do_not_mix(name, sampling):
    problem, records, _, step = convex("lasso")
    check_runs_do_not_mix(
        ALGORITHMS[name], problem, records, settings=SHORT[name][0], step=step, sampling=sampling
    )


@pytest.mark.parametrize(
    ("sampling", "rule"),
    [(Poisson(0.3), "renyi"), (FullBatch(), "renyi"), (FullBatch(), "committed")],
    ids=str,
)
@pytest.mark.parametrize("name", ["mb-sgd", "local-sgd", "spider", "scaffold"])
def test_other_rules_and_batches_are_charged_as_priced_too(name, sampling, rule):
    problem, records, _, step = convex("lasso")
    check_charges(
        ALGORITHMS[name],
        problem,
        records,
        settings=SHORT[name][0],
        step=step,
        sampling=sampling,
        rule=rule,
    )


@pytest.mark.parametrize("name", ITERATIVE)
def test_all_that_it_knows_it_knows_from_releases(name):
    problem, records, _, step = convex("ridge")
    settings, _ = SHORT[name]
    run = functools.partial(ALGORITHMS[name].run, **settings, step=step)
    mechanisms = {kind: Gaussian(kind, 1.0, 0.0) for kind in ALGORITHMS[name].kinds}
    plan = calibrate(run, mechanisms, Budget(1.0, 1e-5), COUNTS, Uniform(2, 1, seed=0))
    fed, _ = simulate(problem, records, plan, [3])
    check_replay(
        run,
        problem,
        torch.zeros(1, DIM),
        plan.mechanisms,
        fed._channel,
        lambda: Uniform(2, 1, seed=0),
    )


# --- the rivals, against loops of another hand ---------------------------------------------------


def noiseless(name, problem, records, participation=None, clip=1e6, **settings):
    """The iterates without noise, from zero."""
    plan = conformance._unpriced(ALGORITHMS[name], clip, 0.0, FullBatch(), COUNTS)
    fed, _ = simulate(problem, records, plan, [0], participation)
    return list(
        ALGORITHMS[name].run(fed, problem, torch.zeros(1, DIM), **settings, **plan.mechanisms)
    )


def full_gradients(problem, records, w):
    """(N, d) by autograd: each silo's mean gradient of f0 at the point w (d,)."""
    point = w.clone().requires_grad_()
    losses = [
        problem.losses(point[None], records.x[i, :n], records.y[i, :n]).mean()
        for i, n in enumerate(records.counts)
    ]
    return torch.stack([torch.autograd.grad(loss, point, retain_graph=True)[0] for loss in losses])


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("momentum", lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8)),
        ("adam", lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.8, 0.999))),
    ],
)
def test_the_steps_are_those_of_torch(name, theirs):
    problem, records, _, _ = convex("least squares")
    point = torch.zeros(DIM, requires_grad=True)
    optimiser = theirs([point])
    for w in noiseless(name, problem, records, rounds=20, step=0.05, momentum=0.8):
        point.grad = full_gradients(problem, records, point.detach()).mean(0)
        optimiser.step()
        assert torch.allclose(w[0], point, atol=1e-5)


@pytest.mark.parametrize("gamma", [0.3, 1.5])
def test_disk_is_the_papers_filter_with_two_gradients_wherever_one_can_take_their_place(gamma):
    """At gamma = (1 - kappa) / kappa, for any loss; at other gammas where gradients are linear in
    w.
    """
    problem, records, _, step = convex(
        "least squares" if gamma == 0.3 else "box-constrained logistic regression"
    )
    kappa, w, prev, h = 0.4, torch.zeros(DIM), torch.zeros(DIM), None
    share = (1 - kappa) / (kappa * gamma)
    for got in noiseless("disk", problem, records, rounds=12, step=step, kappa=kappa):
        ahead, here = (
            full_gradients(problem, records, p).mean(0) for p in (w + gamma * (w - prev), w)
        )
        g = share * ahead + (1 - share) * here
        h = g if h is None else (1 - kappa) * h + kappa * g
        prev, w = w, problem.prox(w - step * h, step)
        assert torch.allclose(got[0], w, atol=1e-5)


def test_disk_filters_noise_and_nothing_else_where_gradients_are_linear():
    problem, records, _, step = convex("ridge")
    filtered = noiseless("disk", problem, records, rounds=12, step=step, kappa=0.3)
    assert all(
        torch.allclose(a, b, atol=1e-4)
        for a, b in zip(
            filtered, noiseless("mb-sgd", problem, records, rounds=12, step=step), strict=True
        )
    )


@pytest.mark.parametrize(
    "who", [lambda: Everyone(2), lambda: Uniform(2, 1, seed=3)], ids=["all", "one of two"]
)
def test_scaffold_is_that_of_silos_which_keep_their_own_control_variates(who):
    problem, records, _, step = convex("lasso")
    step, steps, w, c, own = step / 3, 3, torch.zeros(DIM), torch.zeros(DIM), {}
    draws = who()
    for got in noiseless(
        "scaffold", problem, records, who(), rounds=9, local_steps=steps, step=step
    ):
        ends = []
        for i in draws.draw():
            control, y = own.get(i, c), w
            for _ in range(steps):
                y = problem.prox(
                    y - step * (full_gradients(problem, records, y)[i] - control + c), step
                )
            ends.append(y)
            own[i] = control - c + (w - y) / (steps * step)
        w, c = sum(ends) / len(ends), sum(own.values()) / len(own)
        assert torch.allclose(got[0], w, atol=1e-5)


def test_every_question_of_scaffold_goes_to_one_silo_and_drifts_cancel_where_all_take_part():
    asked = []

    class Channel:
        def ask(self, query, silos):
            asked.append((query, silos))
            return type(
                "Answer", (), {"value": torch.randn(1, len(silos), DIM), "silos": tuple(silos)}
            )()

    fed = Federation(Channel(), Everyone(3))
    list(
        scaffold(
            fed,
            Problem(nn.Linear(DIM, 1, bias=False), squared_error),
            torch.zeros(1, DIM),
            rounds=3,
            local_steps=2,
            step=0.5,
            minibatch=Gaussian("minibatch", 1.0, 1.0),
        )
    )
    assert [silos for _, silos in asked] == [(0,), (1,), (2,)] * 3
    for r in range(3):
        drifts = [query.statistic.drift for query, _ in asked[3 * r : 3 * r + 3]]
        assert torch.allclose(sum(drifts), torch.zeros(1, DIM), atol=1e-5)
        assert all(bool(d.any()) for d in drifts) == (r > 0)


@pytest.mark.parametrize(
    "slope", [0.05, torch.tensor([[0.05], [50.0]])], ids=["low", "low and high"]
)
def test_diff2_is_spider_until_a_difference_passes_twice_the_clip_and_then_has_no_cap(slope):
    ours, _ = heard(diff2, rounds=6, phase=3, slope=slope)
    theirs, _ = heard(prox_spider, rounds=6, phase=3, slope=slope)
    for (a, _), (b, _) in zip(ours, theirs, strict=True):
        assert torch.equal(a.statistic.w, b.statistic.w)
        if a.mechanism.kind == "refine":
            move = (a.statistic.w - a.statistic.reference).norm(dim=-1, keepdim=True)
            assert torch.allclose(a.mechanism.clip, slope * move)
            assert torch.allclose(b.mechanism.clip, a.mechanism.clip.clamp(max=1.0))


# --- the suite sees what it should ---------------------------------------------------------------


def spoilt(run):
    return Algorithm("spoilt", run, ("minibatch",), {"rounds": WORDS["rounds"]}, "")


def unproxed(fed, problem, w, *, rounds, step, minibatch):
    for r in range(rounds):
        w = w - step * fed.mean(Query(Grad(w), minibatch.at(r)))
        yield w


def peeking(fed, problem, w, *, rounds, step, minibatch):
    yield from unproxed(fed, problem, w, rounds=rounds, step=step, minibatch=minibatch)
    problem.losses(w, torch.zeros(1, DIM), torch.zeros(1))


def around(fed, problem, w, *, rounds, step, minibatch):
    fed._channel.ask(Query(Grad(w), minibatch), (0,))
    yield from unproxed(fed, problem, w, rounds=rounds, step=step, minibatch=minibatch)


def answer_dependent(fed, problem, w, *, rounds, step, minibatch):
    """One more query whenever the answers are not those of a dry run."""
    for point in unproxed(fed, problem, w, rounds=rounds, step=step, minibatch=minibatch):
        if bool(point.any()):
            fed.mean(Query(Grad(point), minibatch))
        yield point


def own_noise(fed, problem, w, *, rounds, step, minibatch):
    """Less noise than was planned, where it is not a dry run."""
    quiet = Gaussian(
        "minibatch", minibatch.clip, 0.9 if w.shape[-1] == DIM else 1.0, minibatch.sampling
    )
    yield from unproxed(fed, problem, w, rounds=rounds, step=step, minibatch=quiet)


def mixing(fed, problem, w, *, rounds, step, minibatch):
    for point in unproxed(fed, problem, w, rounds=rounds, step=step, minibatch=minibatch):
        yield point - 0.01 * point.mean(0)


def test_a_step_without_prox_misses_the_optimum():
    problem, records, optimum, step = convex("lasso")
    with pytest.raises(AssertionError, match="the reference has"):
        check_optimum(
            spoilt(unproxed), problem, records, optimum=optimum, settings={"rounds": 250}, step=step
        )


@pytest.mark.parametrize("run", [peeking, around], ids=lambda f: f.__name__)
def test_an_algorithm_that_reaches_past_its_port_is_caught(run):
    problem, records, _, step = convex("ridge")
    with pytest.raises(AssertionError, match="reached for"):
        check_narrow(
            spoilt(run),
            problem,
            records,
            settings={"rounds": 3},
            step=step,
            iterates=3,
            sampling=DisjointBatches(3),
        )


def test_a_missing_iterate_is_caught():
    problem, records, _, step = convex("ridge")
    with pytest.raises(AssertionError, match="yielded 3 iterates"):
        check_narrow(
            spoilt(unproxed),
            problem,
            records,
            settings={"rounds": 3},
            step=step,
            iterates=4,
            sampling=DisjointBatches(3),
        )


def test_a_query_that_no_dry_run_saw_is_refused_by_the_ledger():
    problem, records, _, step = convex("ridge")
    with pytest.raises(Refused, match="budget"):
        check_charges(
            spoilt(answer_dependent),
            problem,
            records,
            settings={"rounds": 3},
            step=step,
            sampling=DisjointBatches(1),
        )


def test_noise_that_is_not_the_plans_is_caught():
    problem, records, _, step = convex("ridge")
    with pytest.raises((Refused, AssertionError), match=r"budget|priced"):
        check_charges(
            spoilt(own_noise),
            problem,
            records,
            settings={"rounds": 3},
            step=step,
            sampling=DisjointBatches(3),
        )


def test_runs_that_mix_are_caught():
    problem, records, _, step = convex("ridge")
    with pytest.raises(AssertionError, match="differs from the run alone"):
        check_runs_do_not_mix(
            spoilt(mixing),
            problem,
            records,
            settings={"rounds": 3},
            step=step,
            sampling=DisjointBatches(3),
        )


# --- what the paper gets wrong, and what the schedule is -----------------------------------------


class Listening:
    """A federation of three silos whose answers are made up: it notes who is asked what."""

    def __init__(self, log, members=None, random=None):
        self.log, self.members, self.random = log, members, random or np.random.default_rng(0)

    def mean(self, query):
        members = self.members or tuple(sorted(self.random.choice(3, 2, replace=False).tolist()))
        self.log.append((query, members))
        return torch.full(query.statistic.shape, 0.1) * (1 + len(self.log))

    def cohort(self):
        return Listening(
            self.log, tuple(sorted(self.random.choice(3, 2, replace=False).tolist())), self.random
        )


def heard(run, **settings):
    problem = Problem(nn.Linear(DIM, 1, bias=False), squared_error)
    log = []
    mechanisms = {"anchor": Gaussian("anchor", 0.5, 1.0), "refine": Gaussian("refine", 0.5, 2.0)}
    points = list(
        run(Listening(log), problem, torch.zeros(2, DIM), step=0.5, **settings, **mechanisms)
    )
    return log, points


def test_an_epoch_of_svrg_asks_the_silos_that_gave_its_anchor():
    log, _ = heard(prox_svrg, rounds=24, inner=4, slope=1.0)
    epochs = [log[i : i + 4] for i in range(0, 24, 4)]
    for epoch in epochs:
        assert [q.mechanism.kind for q, _ in epoch] == ["anchor", "refine", "refine", "refine"]
        assert len({members for _, members in epoch}) == 1
    assert len({epoch[0][1] for epoch in epochs}) > 1


def test_differences_of_svrg_are_taken_to_the_anchors_own_point():
    log, points = heard(prox_svrg, rounds=6, inner=3, slope=1.0)
    assert all(torch.equal(q.statistic.reference, log[0][0].statistic.w) for q, _ in log[1:3])
    assert torch.equal(log[3][0].statistic.w, points[2])
    assert all(torch.equal(q.statistic.reference, points[2]) for q, _ in log[4:])


def test_spider_asks_an_anchor_every_phase_and_differences_of_consecutive_points_between():
    log, points = heard(prox_spider, rounds=8, phase=3, slope=1.0)
    kinds = [q.mechanism.kind for q, _ in log]
    assert kinds == ["anchor", "refine", "refine", "anchor", "refine", "refine", "anchor", "refine"]
    for r, (query, _) in enumerate(log):
        if isinstance(query.statistic, GradDiff):
            assert torch.equal(query.statistic.w, points[r - 1])
            assert torch.equal(
                query.statistic.reference, points[r - 2] if r > 1 else torch.zeros(2, DIM)
            )


def test_restarts_go_on_from_a_point_of_the_restart_before_and_the_last_yields_where_the_run_ends():
    log, points = heard(prox_pl_svrg, restarts=3, rounds=12, inner=2, slope=1.0)
    anchors = [q.statistic.w for q, _ in log if isinstance(q.statistic, Grad)]
    for s in range(3):
        own = points[5 * s : 5 * s + 4]
        assert any(torch.equal(points[5 * s + 4], p) for p in own)
        if s < 2:
            assert torch.equal(anchors[2 * (s + 1)], points[5 * s + 4])


@pytest.mark.parametrize("slope", [0.25, 3.0, math.inf, torch.tensor([[0.25], [3.0]])], ids=str)
def test_a_difference_is_clipped_to_the_public_move_and_never_past_twice_the_anchors_clip(slope):
    anchor, refine = Gaussian("anchor", 0.5, 1.0), Gaussian("refine", 99.0, 2.0)
    w, reference = torch.tensor([[3.0, 0.0, 4.0, 0.0], [0.1, 0.0, 0.0, 0.0]]), torch.zeros(2, DIM)
    query = ask_difference(w, reference, refine, anchor, slope)
    moves = torch.tensor([[5.0], [0.1]])
    assert torch.allclose(query.mechanism.clip, (slope * moves).clamp(max=1.0))
    assert query.mechanism.noise_multiplier == 2.0
    still = ask_difference(w, w, refine, anchor, slope)
    assert bool((still.mechanism.clip <= 1.0).all())
    assert math.isinf(float(torch.as_tensor(slope).max())) or bool(
        (still.mechanism.clip == 0).all()
    )
