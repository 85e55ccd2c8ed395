"""Newton's method finds the minimum of a penalised fit, for many fits at once."""

import torch
from sklearn.linear_model import LogisticRegression, PoissonRegressor

from silodp.core.problem.losses import Hazard, Ordinal, Poisson, cross_entropy, logistic
from silodp.silo.fits.newton import minimise

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(80, 3, generator=RANDOM, dtype=torch.float64)
Y = (torch.rand(80, generator=RANDOM) < torch.sigmoid(2 * X[:, 0])).long()


def fit(loss, y, k=1, weight=None, strength=1.0):
    design = torch.einsum("mp,kl->mklp", X, torch.eye(k, dtype=torch.float64)).flatten(2)
    weight = torch.ones(1, len(y), dtype=torch.float64) if weight is None else weight
    penalty = torch.full((len(weight), design.shape[-1]), strength, dtype=torch.float64)
    offset = torch.zeros(len(y), k, dtype=torch.float64)
    return minimise(design, offset, y, weight, loss, penalty, torch.zeros_like(penalty))


def test_it_finds_the_coefficients_that_scikit_learn_finds():
    found = fit(logistic, Y)[0]
    other = LogisticRegression(C=1.0, fit_intercept=False, tol=1e-10).fit(X.numpy(), Y.numpy())
    assert torch.allclose(found, torch.from_numpy(other.coef_[0]), atol=1e-5)
    counts = torch.poisson(X[:, 1].exp(), generator=RANDOM)
    found = fit(Poisson(100.0), counts, strength=8.0)[0]
    other = PoissonRegressor(alpha=0.1, fit_intercept=False, tol=1e-10)
    other.fit(X.numpy(), counts.numpy())
    assert torch.allclose(found, torch.from_numpy(other.coef_), atol=1e-4)


def test_no_slope_is_left_for_losses_of_several_outputs():
    for loss, y, k in (
        (cross_entropy, Y, 3),
        (Hazard(4), torch.arange(80) % 9, 4),
        (Ordinal(4), torch.arange(80) % 4, 3),
    ):
        t = fit(loss, y, k)[0].requires_grad_(True)
        value = loss(X @ t.reshape(k, 3).T, y).sum() + t.square().sum() / 2
        (slope,) = torch.autograd.grad(value, t)
        assert float(slope.abs().max()) < 1e-4


def test_a_fit_beside_others_is_the_fit_that_it_is_alone():
    weight = torch.ones(3, 80, dtype=torch.float64)
    weight[1, :40] = 0
    weight[2, 40:] = 0
    together = fit(logistic, Y, weight=weight)
    for row, found in zip(weight, together, strict=True):
        assert torch.allclose(fit(logistic, Y, weight=row[None])[0], found, atol=1e-8)
