"""DIFF2's local routine and the convex ISRL-DP algorithms do what their papers write, against loops
of another hand.
"""

import functools

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import L1, Zero
from silodp.core.sampling import DisjointBatches, FullBatch
from silodp.server.algorithms import ALGORITHMS
from silodp.server.plan import calibrate, with_multipliers
from silodp.silo.data.records import Records
from silodp.simulation.connect import simulate
from silodp.testing.evaluate import training_loss

DIM, COUNTS = 4, (30, 50)


@functools.cache
def least_squares(prox=Zero()) -> tuple[Problem, Records]:  # noqa: B008 -- frozen
    random, silos = np.random.default_rng(7), []
    for i, n in enumerate(COUNTS):
        x = random.normal(0.5 * i, 1, (n, DIM))
        silos.append(
            (x, x @ np.array([1.5, -2.0, 0.0, 0.4]) * (1 - 0.8 * i) + random.normal(0, 0.5, n))
        )
    return Problem(nn.Linear(DIM, 1, bias=False), squared_error, prox), Records.of(silos)


def noiseless(name: str, problem: Problem, records: Records, **settings) -> list[torch.Tensor]:
    """The iterates without noise and with nothing clipped, from zero."""
    mechanisms = {kind: Gaussian(kind, 1e6, 0.0, FullBatch()) for kind in ALGORITHMS[name].kinds}
    run = functools.partial(ALGORITHMS[name].run, **settings)
    fed, _ = simulate(
        problem, records, with_multipliers(run, mechanisms, COUNTS, Budget(np.inf, 1e-6)), [0]
    )
    return [w[0].double() for w in run(fed, problem, torch.zeros(1, DIM), **mechanisms)]


def gradients(records: Records, w: torch.Tensor) -> torch.Tensor:
    """(N, d): each silo's mean gradient of the squared error."""
    x, y = records.x.double(), records.y.double().reshape(len(records), -1)
    return torch.stack(
        [2 * x[i, :n].T @ (x[i, :n] @ w - y[i, :n]) / n for i, n in enumerate(COUNTS)]
    )


# --- DIFF2's local routine -----------------------------------------------------------------------


def test_one_local_step_is_diff2():
    problem, records = least_squares(L1(0.2))
    words = {"rounds": 9, "phase": 4, "step": 0.1, "slope": 1e6}
    mine, plain = (
        noiseless(name, problem, records, **words, **more)
        for name, more in (("diff2-local", {"local_steps": 1}), ("diff2", {}))
    )
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mine, plain, strict=True))


def test_each_silo_goes_along_the_estimate_and_its_own_differences_and_the_round_ends_at_their_mean():  # noqa: E501
    problem, records = least_squares(L1(0.2))
    step, w, h, prev = 0.05, torch.zeros(DIM, dtype=torch.float64), None, None
    for r, got in enumerate(
        noiseless(
            "diff2-local", problem, records, rounds=6, phase=3, local_steps=3, step=step, slope=1e6
        )
    ):
        g = gradients(records, w).mean(0)
        h = g if r % 3 == 0 else h + g - gradients(records, prev).mean(0)
        ends = []
        for i in range(len(records)):
            point = w
            for _ in range(
                3
                # differences of one silo telescope: the estimate is h plus what this silo's
                # gradient has changed by
            ):
                v = h + gradients(records, point)[i] - gradients(records, w)[i]
                point = problem.prox(point - step * v, step)
            ends.append(point)
        prev, w = w, torch.stack(ends).mean(0)
        assert torch.allclose(got, w, atol=1e-4)


def test_a_silo_pays_for_every_local_difference():
    run = functools.partial(
        ALGORITHMS["diff2-local"].run, rounds=5, phase=2, local_steps=4, step=0.1, slope=1.0
    )
    plan = calibrate(
        run,
        {kind: Gaussian(kind, 1.0, 0.0) for kind in ("anchor", "refine")},
        Budget(1.0, 1e-5),
        COUNTS,
    )
    for silo in range(len(COUNTS)):
        asked = [a.kind for a in plan.asked if silo in a.silos]
        assert (asked.count("anchor"), asked.count("refine")) == (3, 2 + 5 * 3)


# --- the convex algorithms -----------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_accelerated_steps_are_minimisers_of_their_papers_models(mu):
    """Each w_t makes the derivative of alpha (<g, w> + mu/2 ||w^md - w||^2) + ((1 - alpha) mu +
    eta)/2 ||w_{t-1} - w||^2 zero, in each of two stages.
    """
    problem, records = least_squares()
    step, last = 0.1, torch.zeros(DIM, dtype=torch.float64)
    points = noiseless("accelerated", problem, records, rounds=10, restarts=2, step=step, strong=mu)
    assert len(points) == 10
    for r, ag in enumerate(points):
        t = r % 5 + 1
        before = points[r - 1] if r else torch.zeros(DIM, dtype=torch.float64)
        last = before if t == 1 else last
        alpha, eta = 2 / (t + 1), 4 / (step * t * (t + 1))
        ahead = ((1 - alpha) * (mu + eta) * before + alpha * ((1 - alpha) * mu + eta) * last) / (
            eta + (1 - alpha**2) * mu
        )
        w = (ag - (1 - alpha) * before) / alpha
        slope = alpha * (gradients(records, ahead).mean(0) + mu * (w - ahead)) + (
            (1 - alpha) * mu + eta
        ) * (w - last)
        assert slope.abs().max() < 1e-3 * eta
        last = w


def test_acceleration_is_ahead_of_plain_steps_where_a_direction_is_flat():
    random = np.random.default_rng(3)
    x = random.normal(size=(COUNTS[1], DIM)) * np.array([1.0, 1.0, 0.1, 0.1])
    records, problem = Records.of([(x[:30], x[:30].sum(1)), (x, x.sum(1))]), least_squares()[0]
    plain, faster = (
        training_loss(
            problem,
            noiseless(name, problem, records, rounds=40, step=0.2, **more)[-1].float()[None],
            records,
        ).item()
        for name, more in (("mb-sgd", {}), ("accelerated", {"restarts": 1}))
    )
    assert faster < plain / 2


def test_a_stage_of_localized_ends_at_the_minimum_of_the_loss_and_its_pull():
    """From zero, a pull of strength 0.5 is ridge regression, which has a closed form."""
    problem, records = least_squares()
    w = noiseless("localized", problem, records, rounds=400, step=0.1, stages=1, pull=0.5)[-1]
    assert (gradients(records, w).mean(0) + 0.5 * w).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("rounds", "stages", "lengths"),
    [(25, 3, (16, 6, 3)), (8, 10, (5, 2, 1)), (1, 3, (1,)), (7, 1, (7,))],
)
def test_stages_of_localized_halve_and_are_held_ever_closer_to_where_they_began(
    rounds, stages, lengths
):
    asked, pulls = [], []

    class Silent:
        def mean(self, query):
            asked.append(query)
            return torch.ones(1, DIM)

    class Seen:
        def prox(self, point, size):
            pulls.append(size)
            return point

    mechanism = Gaussian("minibatch", 1.0, 1.0, DisjointBatches(rounds))
    list(
        ALGORITHMS["localized"].run(
            Silent(),
            Seen(),
            torch.zeros(1, DIM),
            rounds=rounds,
            step=1.0,
            minibatch=mechanism,
            stages=stages,
            pull=1.0,
        )
    )
    assert [query.mechanism.sampling.index for query in asked] == list(
        range(rounds)
    )  # no record is asked about twice
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    firsts = [pulls[at] for at in starts]
    assert firsts == [
        0.5 / (1 + 0.5 * 8.0**i) for i in range(len(lengths))
    ]  # s / (1 + s lambda_i), s = step / 2 in a stage's first round
    assert sum(lengths) == rounds


@pytest.mark.parametrize("name", ["accelerated", "localized"])
def test_on_disjoint_batches_every_round_has_the_whole_budget(name):
    run = functools.partial(
        ALGORITHMS[name].run,
        rounds=6,
        step=0.1,
        **({"restarts": 2} if name == "accelerated" else {}),
    )
    budget = Budget(1.0, 1e-5)

    def noise(sampling) -> float:
        return float(
            calibrate(run, {"minibatch": Gaussian("minibatch", 1.0, 0.0, sampling)}, budget, COUNTS)
            .mechanisms["minibatch"]
            .noise_multiplier.max()
        )

    once, each = noise(DisjointBatches(6)), noise(FullBatch())
    assert each == pytest.approx(once * 6**0.5, rel=1e-3)
