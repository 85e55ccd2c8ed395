"""DP-SGD of linear models in all silos at once, and its exact price.

A step is that of Opacus: each row takes part with a public probability, the gradient of each row is
clipped in length, noise is added to their sum, and the sum is divided by the expected batch. It is
written in NumPy because a thousand steps in fifty silos take minutes in PyTorch. A test compares a
step with Opacus's own optimizer.

The outputs of a row are `bias + slope . x`: one output, or for survival one for each period. All
periods share the slope.
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special

from research.board.contestant import Case, periods

Data = dict[str, tuple[np.ndarray, np.ndarray]]


# --- price ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """How often a silo's rows take part, all of it public."""

    rate: float
    """The probability that a row takes part in a step, independently of all other rows."""
    steps: int
    """The steps of the whole run."""


@functools.lru_cache(maxsize=4096)
def spent(schedule: Schedule, noise: float, delta: float, grid: float = 1e-3) -> float:
    """Return the epsilon of a silo that adds noise with this ratio of standard deviation to clip.

    One row is replaced, so that the sum moves by up to two clips. The price is computed from the
    privacy-loss distribution, rounded up on a grid.
    """
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    replace_one = dp_accounting.NeighboringRelation.REPLACE_ONE
    event = dp_accounting.PoissonSampledDpEvent(schedule.rate, dp_accounting.GaussianDpEvent(noise))
    accountant = PLDAccountant(replace_one, value_discretization_interval=grid)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        accountant.compose(event, schedule.steps)
        return float(accountant.get_epsilon(delta))


@functools.lru_cache(maxsize=4096)
def noise_for(schedule: Schedule, epsilon: float, delta: float) -> float:
    """Return the least ratio of standard deviation to clip whose price is at most epsilon."""
    grid = 2e-3 * epsilon

    def excess(log_noise: float) -> float:
        return spent(schedule, math.exp(log_noise), delta, grid) - epsilon

    low = math.log(0.3)
    high = math.log(4)
    while excess(high) > 0:
        low = high
        high += 1
    root: float = optimize.brentq(excess, low, high, xtol=2e-4)  # type: ignore[assignment]
    while excess(root) > 0:
        root += 2e-4
    return math.exp(root)


# --- training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Models:
    """One linear model for each silo: bias (silos, outputs) and slope (silos, features)."""

    bias: np.ndarray
    slope: np.ndarray

    def mean(self, weights: np.ndarray) -> Models:
        """Return the weighted mean in the place of every model."""
        share = weights / weights.sum()
        return Models(
            np.broadcast_to(share @ self.bias, self.bias.shape).copy(),
            np.broadcast_to(share @ self.slope, self.slope.shape).copy(),
        )


class Silos:
    """The training rows of all silos, with what a private step needs."""

    def __init__(self, case: Case, rng: np.random.Generator) -> None:
        data = case.training()
        self.names = list(data)
        self.counts = np.array([len(y) for _, y in data.values()])
        self.case = case
        self.rng = rng
        self._x = np.concatenate([x for x, _ in data.values()])
        self._length = np.linalg.norm(self._x, axis=1)
        self._silo = np.repeat(np.arange(len(self.names)), self.counts)
        labels = np.concatenate([y for _, y in data.values()])
        if case.task == "survival":
            self.outputs = case.schema.task.bins
            self._at_risk, self._y = periods(labels, self.outputs)
        else:
            self.outputs = 1
            self._at_risk = np.ones((len(labels), 1), bool)
            self._y = labels[:, None]

    def start(self) -> Models:
        """Return models of zeros."""
        silos = len(self.names)
        return Models(np.zeros((silos, self.outputs)), np.zeros((silos, self._x.shape[1])))

    def step(
        self, models: Models, rates: np.ndarray, noise: np.ndarray, clip: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the noisy mean gradient of each silo, for bias and slope.

        A silo whose rate is 0 takes no part, and its gradient is 0.
        """
        bias = np.zeros_like(models.bias)
        slope = np.zeros_like(models.slope)
        rows = np.flatnonzero(self.rng.random(len(self._silo)) < rates[self._silo])
        silo = self._silo[rows]
        of_bias, of_slope = self._gradients(models, rows, silo)
        factor = np.minimum(1, clip / np.maximum(self._norm(of_bias, of_slope, rows), 1e-12))
        present, first = np.unique(silo, return_index=True)
        if len(rows):
            bias[present] = np.add.reduceat(factor[:, None] * of_bias, first)
            clipped = (factor * of_slope)[:, None] * self._x[rows]
            slope[present] = np.add.reduceat(clipped, first)
        active = np.flatnonzero(rates > 0)
        expected = (rates * self.counts)[active, None]
        for total in (bias, slope):
            drawn = self.rng.normal(size=(len(active), total.shape[1]))
            total[active] += drawn * (clip * noise[active, None])
            total[active] /= expected
        return bias, slope

    def predictions(self, models: Models) -> dict[str, np.ndarray]:
        """Return the predictions of each silo's model for its test rows."""
        answer = {}
        for k, (name, x) in enumerate(self.case.inputs().items()):
            outputs = models.bias[k] + (x @ models.slope[k])[:, None]
            values = expected_values(self.case, outputs)
            answer[name] = values if self.case.task == "survival" else values[:, 0]
        return answer

    def _gradients(
        self, models: Models, rows: np.ndarray, silo: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the loss's derivative of each row by its outputs, and its sum over them."""
        line = np.einsum("ij,ij->i", self._x[rows], models.slope[silo])
        values = expected_values(self.case, models.bias[silo] + line[:, None], bounded=False)
        residual = np.where(self._at_risk[rows], values - self._y[rows], 0.0)
        return residual, residual.sum(axis=1)

    def _norm(self, of_bias: np.ndarray, of_slope: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the length of each row's gradient."""
        return np.sqrt((of_bias**2).sum(axis=1) + (of_slope * self._length[rows]) ** 2)


def expected_values(case: Case, outputs: np.ndarray, *, bounded: bool = True) -> np.ndarray:
    """Return risks, expected counts, numbers or hazards of these outputs.

    `bounded` keeps a number within its public range. A count is never above its public maximum.
    """
    match case.task:
        case "binary" | "survival":
            return special.expit(outputs)
        case "count":
            return np.exp(np.minimum(outputs, math.log(case.schema.task.most)))
        case _:
            return np.clip(outputs, -1, 1) if bounded else outputs
