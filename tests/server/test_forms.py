"""The three forms in which gradient differences are clipped: what each is, that engines and gates
agree on it, and what it costs.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.errors import BadInput, Refused
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import ClippedDiff
from silodp.engine.clipping import ENGINES, clipped_sum
from silodp.engine.ghost import Ghost
from silodp.engine.records import Records as EachRecord
from silodp.server.algorithms import find
from silodp.server.algorithms.difference import FORMS, ask_difference
from silodp.server.plan import calibrate
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import check
from silodp.simulation.connect import simulate

LIMIT = 0.7
PROBLEM = Problem(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), cross_entropy)


def records(n=12, silos=2):
    random = torch.Generator().manual_seed(3)
    x = torch.randn(silos, n, 4, generator=random) * torch.logspace(-1, 1, n)[None, :, None]
    return x, torch.randint(0, 2, (silos, n), generator=random)


def points(runs=3):
    random = torch.Generator().manual_seed(4)
    w = torch.randn(runs, PROBLEM.dim, generator=random)
    return w, w + 0.3 * torch.randn(runs, PROBLEM.dim, generator=random)


def by_hand(w, reference, x, y, clip, limit):
    """One record and one run at a time, in float64."""
    total = torch.zeros(len(w), len(x), PROBLEM.dim, dtype=torch.float64)

    def gradient(at, record, label):
        alone = clipped_sum(
            PROBLEM,
            at[None].double(),
            record[None, None].double(),
            label[None, None],
            torch.ones(1, 1),
            math.inf,
        )[0, 0]
        return alone * min(1.0, limit / float(alone.norm()))

    for j in range(len(w)):
        for s in range(len(x)):
            for record, label in zip(x[s], y[s], strict=True):
                g = gradient(w[j], record, label) - gradient(reference[j], record, label)
                total[j, s] += g * min(1.0, clip / max(float(g.norm()), 1e-300))
    return total


@pytest.mark.parametrize("clip", [2 * LIMIT, 0.2])
@pytest.mark.parametrize("engines", [(Ghost(), EachRecord()), (EachRecord(),), ENGINES])
def test_each_gradient_is_clipped_to_the_limit_before_they_are_subtracted(engines, clip):
    (w, reference), (x, y) = points(), records()
    found = clipped_sum(
        PROBLEM,
        w,
        x,
        y,
        torch.ones(x.shape[:2]),
        clip,
        reference=reference,
        limit=LIMIT,
        engines=engines,
    )
    torch.testing.assert_close(
        found.double(), by_hand(w, reference, x, y, clip, LIMIT), atol=3e-5, rtol=2e-4
    )


@pytest.mark.parametrize("engines", [(Ghost(),), (EachRecord(),)])
def test_each_run_has_a_limit_of_its_own_and_a_bad_record_counts_nothing(engines):
    (w, reference), (x, y) = points(), records()
    limits, clips = torch.tensor([[0.1], [0.7], [5.0]]), torch.tensor([[0.15], [0.3], [2.0]])
    whole = clipped_sum(
        PROBLEM,
        w,
        x,
        y,
        torch.ones(x.shape[:2]),
        clips,
        reference=reference,
        limit=limits,
        engines=engines,
    )
    for j, (limit, clip) in enumerate(
        zip(limits.flatten().tolist(), clips.flatten().tolist(), strict=True)
    ):
        torch.testing.assert_close(
            whole[j : j + 1].double(),
            by_hand(w[j : j + 1], reference[j : j + 1], x, y, clip, limit),
            atol=3e-5,
            rtol=2e-4,
        )
    x = torch.cat([x, torch.tensor([torch.nan, torch.inf]).reshape(2, 1, 1).expand(2, 1, 4)], 1)
    bad = clipped_sum(
        PROBLEM,
        w,
        x,
        torch.cat([y, y[:, :1]], 1),
        torch.ones(x.shape[:2]),
        clips,
        reference=reference,
        limit=limits,
        engines=engines,
    )
    torch.testing.assert_close(bad, whole)


def federation_of(x, y):
    return Records(x, y, tuple(len(part) for part in y), tuple(f"silo{i}" for i in range(len(y))))


@pytest.mark.parametrize("clip", [2 * LIMIT, 0.2])
def test_a_deployed_gate_gives_the_same_mean(clip):
    (w, reference), (x, y) = points(1), records(silos=1)
    query = Query(
        ClippedDiff(w.double(), reference.double(), LIMIT), Gaussian("refine", clip, 1e-6)
    )
    exact = Exact(PROBLEM, federation_of(x, y), partition=lambda name, batches: np.arange(12))
    simulated = Simulated(PROBLEM, federation_of(x.double(), y), [0])
    assert exact._products is not None, (
        "the model should be one whose gradients are summed by products"
    )
    torch.testing.assert_close(
        exact.answer(query, [0]), simulated.answer(query, [0]), atol=2e-5, rtol=0
    )


def test_sums_of_the_form_each_telescope_and_of_the_form_move_do_not():
    """h after an anchor and two differences is the clipped gradient at the last point: what the
    authors' implementation has.
    """
    x, y = records()
    w = [points(1)[0] + 0.4 * k for k in range(3)]
    silos = federation_of(x, y)
    answerer, anchor, refine = (
        Simulated(PROBLEM, silos, [0]),
        Gaussian("anchor", LIMIT, 0.0),
        Gaussian("refine", 1.0, 0.0),
    )

    def clipped_gradient(at):
        return clipped_sum(PROBLEM, at, x, y, torch.ones(x.shape[:2]), LIMIT) / 12

    def after(form):
        h = clipped_gradient(w[0])
        for here, there in zip(w[1:], w, strict=False):
            h = h + answerer.answer(
                ask_difference(here, there, refine, anchor, math.inf, form), [0, 1]
            )
        return h

    torch.testing.assert_close(after("each"), clipped_gradient(w[2]), atol=1e-6, rtol=1e-4)
    assert float((after("move") - clipped_gradient(w[2])).abs().max()) > 0.01


@pytest.mark.parametrize("form", FORMS)
def test_a_replaced_record_moves_a_difference_by_no_more_than_its_noise_is_for(form):
    """The planted record is as bad as can be: its gradients at the two points are long and
    opposite.
    """
    x, y = records(silos=1)
    w, reference = points(1)
    asked = ask_difference(
        w, reference, Gaussian("refine", 1.0, 0.0), Gaussian("anchor", LIMIT, 0.0), 0.1, form
    )
    means = []
    for scale in (1e3, -1e3, 1.0):
        x[0, 0] = scale * torch.tensor([1.0, -2.0, 3.0, 1.0])
        means.append(Simulated(PROBLEM, federation_of(x, y), [0]).answer(asked, [0])[0, 0])
    moved = max(float((a - b).norm()) for a in means for b in means)
    assert moved <= float(asked.mechanism.sensitivity(12))
    assert float(asked.mechanism.clip) == pytest.approx(
        2 * LIMIT if form == "each" else min(2 * LIMIT, 0.1 * float((w - reference).norm()))
    )


def test_the_form_each_without_its_limits_would_be_seen():
    """Planted: were the two gradients not clipped, one record would move the sum by more than the
    noise of the form is for.
    """
    x, y = records(silos=1)
    w, reference = points(1)
    longest = 0.0
    for scale in (1e3, -1e3):
        x[0, 0] = scale * torch.tensor([1.0, -2.0, 3.0, 1.0])
        sums = [
            clipped_sum(PROBLEM, p, x[:, :1], y[:, :1], torch.ones(1, 1), math.inf)
            for p in (w, reference)
        ]
        longest = max(longest, float((sums[0] - sums[1]).norm()))
    assert longest > 2 * 2 * LIMIT


@pytest.mark.parametrize("name", ["spider", "spider-alternate"])
def test_every_form_runs_within_the_same_budget(name):
    x, y = records()
    silos, algorithm = federation_of(x, y), find(name)
    spent = []
    for form in FORMS:
        settings = algorithm.schedule({"rounds": 4, "phase": 2, "slope": 1.0, "form": form})

        def run(fed, problem, w, settings=settings, **mechanisms):
            return algorithm.run(fed, problem, w, step=0.1, **settings, **mechanisms)

        plan = calibrate(
            run,
            {k: Gaussian(k, LIMIT, 0.0) for k in algorithm.kinds},
            Budget(2.0, 1e-3),
            silos.counts,
        )
        fed, ledger = simulate(PROBLEM, silos, plan, [0])
        *_, w = run(fed, PROBLEM, PROBLEM.initial([0]), **plan.mechanisms)
        assert bool(torch.isfinite(w).all())
        spent.append(ledger.epsilon().max().item())
    assert max(spent) <= 2.0
    assert min(spent) == pytest.approx(2.0, rel=1e-6)


def test_an_unknown_form_and_a_senseless_limit_are_refused():
    w, reference = points(1)
    with pytest.raises(BadInput, match="form is 'other'; choose one of move, each, both"):
        ask_difference(
            w, reference, Gaussian("refine", 1.0, 0.0), Gaussian("anchor", 1.0, 0.0), 1.0, "other"
        )
    for limit in (0.0, -1.0, math.nan, torch.ones(2, 1)):
        with pytest.raises(Refused, match="clip"):
            check(
                Query(ClippedDiff(w, reference, limit), Gaussian("refine", 1.0, 1.0)),
                PROBLEM.dim,
                [12],
            )
