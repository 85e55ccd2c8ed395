"""Training in standardised features: what is asked, what is learnt and what is released."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

from silodp.core.errors import BadInput, Refused
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import logistic
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import L1
from silodp.core.query import Query
from silodp.core.statistics import Grad, ScaledGrad
from silodp.server.algorithms import find
from silodp.server.algorithms.scaled import scaled
from silodp.server.estimates.scaling import Standard, question, standardisation
from silodp.server.federation import Measured
from silodp.server.settings import SPREAD_SHARE, default_shares

FEATURES = 3
SHIFT = torch.tensor([0.2, -0.5, 0.0], dtype=torch.float64)
SCALE = torch.tensor([0.1, 0.3, 1.0], dtype=torch.float64)


def problem(model="logistic", prox=None):
    module, loss = model_by_name(model, FEATURES, 2)
    return Problem(module, loss) if prox is None else Problem(module, loss, prox)


def records(n=400, seed=0):
    random = np.random.default_rng(seed)
    x = np.clip([-0.6, 0.3, 0.0] + random.normal(size=(n, FEATURES)) * [0.05, 0.2, 0.4], -1, 1)
    line = (x - [-0.6, 0.3, 0.0]) / [0.05, 0.2, 0.4] @ [1.5, -1.0, 0.5]
    return x, (random.random(n) < 1 / (1 + np.exp(-line))).astype(np.int64)


class Noiseless:
    """Answers every question about these records without noise, and lists the questions."""

    def __init__(self, made, x, y):
        self._problem = made
        self._x = torch.from_numpy(x)
        self._y = torch.from_numpy(y)
        self.asked = []

    def mean(self, query):
        self.asked.append(query)
        return query.statistic.rows(self._problem, 0)(self._x, self._y).mean(0, keepdim=True)

    def measure(self, query):
        zero = torch.zeros(1, 1)
        return Measured(self.mean(query), zero, zero + len(self._x))


def test_it_asks_for_gradients_of_the_scaled_features_clipped_as_one_vector():
    x, y = (torch.from_numpy(part) for part in records(20))
    w = torch.tensor([[0.3, -1.0, 2.0, 0.1]], dtype=torch.float64)
    z = torch.cat([(x - SHIFT) / SCALE, torch.ones(20, 1)], 1)
    slope = (z @ w[0]).sigmoid() - y
    weight = 2 / z.norm(dim=1).clamp_min(2)
    free = (weight * slope)[:, None] * z
    length = free.norm(dim=1, keepdim=True)
    assert float(weight.min()) < 1, "a record that is longer than usual counts less"
    rows = ScaledGrad(w, SHIFT, SCALE, 0.5).rows(problem(), 0)(x, y)
    assert torch.allclose(rows, free * (0.5 / length.clamp_min(0.5)))
    assert float(rows.norm(dim=1).max()) <= 0.5 + 1e-12
    assert float(length.max()) > 0.5, "some record is clipped"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"scale": torch.tensor([0.1, 0.0, 1.0])}, "shape"),
        ({"scale": SCALE[:2]}, "shape"),
        ({"shift": torch.tensor([0.1, float("inf"), 1.0])}, "not-finite"),
        ({"bound": 0.0}, "clip"),
    ],
)
def test_a_scale_or_a_bound_without_meaning_is_refused(change, code):
    words = {"w": torch.zeros(1, 4), "shift": SHIFT, "scale": SCALE, "bound": 1.0} | change
    with pytest.raises(Refused, match=code):
        ScaledGrad(**words).check(4, 1)


def test_a_clip_below_the_bound_of_its_vectors_is_refused():
    """The price is for twice the clip. Vectors that may be longer than it would cost more."""
    asked = ScaledGrad(torch.zeros(1, 4), SHIFT, SCALE, 1.0)
    asked.check_mechanism(Gaussian("a", 1.0, 1.0))
    with pytest.raises(Refused, match="clip"):
        asked.check_mechanism(Gaussian("a", 0.99, 1.0))


def test_a_model_of_scaled_features_and_its_release_compute_the_same():
    made = problem("mlp:4")
    w = made.initial([3]).double()
    x = torch.from_numpy(records(10)[0])
    standard = Standard.of(made, SHIFT, SCALE)
    inward = standard.inward(w)
    assert torch.allclose(made.outputs(inward, (x - SHIFT) / SCALE), made.outputs(w, x))
    assert torch.allclose(standard.outward(inward), w)
    assert torch.equal(standard.slopes(w), made.split(w)[standard.weight].flatten(1))


def test_where_noise_hides_a_column_it_is_scaled_like_the_others():
    mean = torch.tensor([-0.6, -0.5, -0.7, 0.4]).double()
    square = mean.square() + torch.tensor([0.05, 0.2, 0.3, 0.1]).double().square()
    answer = torch.cat([mean, square])
    shift, scale = standardisation(answer, 1e-4)
    assert torch.allclose(shift, mean, atol=0.01)
    assert torch.allclose(scale, torch.tensor([0.05, 0.2, 0.3, 0.1]).double(), rtol=0.2)
    shift, scale = standardisation(answer, 100.0)
    assert float(shift.abs().max()) < 0.01
    assert float(scale.max() / scale.min()) < 1.01
    assert 0.2 < float(scale[0]) < 0.4


def test_without_noise_it_finds_the_model_that_scikit_learn_finds():
    x, y = records()
    made = problem()
    words = {kind: Gaussian(kind, 100.0, 0.0) for kind in ("start", "spread", "minibatch")}
    fed = Noiseless(made, x, y)
    start = made.initial([0]).double()
    *_, last = scaled(fed, made, start, rounds=300, step=1.0, momentum=0.9, **words)
    moments = question(FEATURES).rows(made, 0)(torch.from_numpy(x), torch.from_numpy(y)).mean(0)
    shift, scale = standardisation(moments, 0.0)
    z = (torch.from_numpy(x) - shift) / scale
    length = (1 + z.square().sum(1)).sqrt().numpy()
    counts = np.minimum(1, 2 / length)  # a record that is longer than usual counts less
    known = LogisticRegression(C=1e8, max_iter=10_000, tol=1e-10).fit(x, y, counts)
    assert np.allclose(last[0, :3].double(), known.coef_[0], rtol=1e-2)
    assert float(last[0, 3]) == pytest.approx(float(known.intercept_[0]), rel=1e-2)


def test_the_questions_before_the_first_round_have_their_shares_of_the_budget():
    shares = default_shares(find("scaled"), {"mean_share": 0.2})
    rest = pytest.approx(0.8 - SPREAD_SHARE)
    assert shares == {"start": 0.2, "spread": SPREAD_SHARE, "minibatch": rest}


def test_a_prox_or_a_model_that_does_not_begin_with_a_linear_layer_is_refused():
    words = {"rounds": 1, "step": 1.0, "momentum": 0.0}
    words |= {kind: Gaussian(kind, 1.0, 0.0) for kind in ("start", "spread", "minibatch")}
    fed = Noiseless(problem(), *records(30))
    for made, why in (
        (problem(prox=L1(0.1)), "--prox"),
        (problem("additive:6"), "linear layer"),
        (Problem(nn.Linear(FEATURES, 1), logistic, L1(0.1)), "--prox"),
    ):
        with pytest.raises(BadInput, match=why):
            next(scaled(fed, made, made.initial([0]), **words))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_record_whose_gradient_is_not_finite_adds_nothing(bad):
    x, y = (torch.from_numpy(part) for part in records(5))
    x[2, 1] = bad
    rows = ScaledGrad(torch.ones(1, 4).double(), SHIFT, SCALE, 1.0).rows(problem(), 0)(x, y)
    assert rows[2].tolist() == [0.0] * 4
    assert (rows[[0, 1, 3, 4]].norm(dim=1) > 0).all()


def test_runs_side_by_side_have_starts_of_their_own_and_noise_in_common():
    made = problem()
    words = {kind: Gaussian(kind, 1.0, 0.0) for kind in ("start", "spread", "minibatch")}
    settings = {"rounds": 1, "step": 0.0, "momentum": 0.0}

    class Several(Noiseless):
        noise = torch.tensor([[0.01], [0.01]])

        def measure(self, query):
            found = super().measure(query)
            several = found.mean.expand(2, -1).clone()
            several[1] = several[1] / 2
            return Measured(several, self.noise, found.records.expand(2, 1))

    fed = Several(made, *records(30))
    (w,) = scaled(fed, made, made.initial([0, 0]).double(), **settings, **words)
    assert float(w[1, -1]) < float(w[0, -1]) - 0.3
    fed.noise = torch.tensor([[0.01], [0.5]])
    with pytest.raises(BadInput, match="several epsilons side by side"):
        next(scaled(fed, made, made.initial([0, 0]).double(), **settings, **words))


def test_every_question_of_a_run_is_priced_as_it_is_asked():
    """A question about the outcome, one about the features, and one gradient in each round; nothing
    else.
    """
    made = problem()
    words = {kind: Gaussian(kind, 0.7, 0.0) for kind in ("start", "spread", "minibatch")}
    fed = Noiseless(made, *records(30))
    start = made.initial([0]).double()
    list(scaled(fed, made, start, rounds=3, step=0.1, momentum=0.5, **words))
    asked = fed.asked
    assert [q.mechanism.kind for q in asked] == ["start", "spread", *["minibatch"] * 3]
    assert asked[0].mechanism.clip == asked[0].statistic.norm == 0.5
    assert asked[1].mechanism.clip == question(FEATURES).norm
    for query in asked[2:]:
        assert isinstance(query, Query)
        assert not isinstance(query.statistic, Grad)
        assert query.statistic.bound == query.mechanism.clip == 0.7
