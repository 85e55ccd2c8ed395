"""FedAvg with DP-SGD in each silo, by the settings of three public examples, and an exact price.

FLamby's example (flamby/dp_example/create_fed_heart_disease_dp_results.py, commit edacf54d) trains
a linear model on heart disease: 15 rounds of 100 updates, batches of 4, SGD with rate 0.001, clip
1.1. FL4Health's example (examples/dp_fed_examples/instance_level_dp, commit ce141b95): 10 rounds of
one epoch, batches of 64, SGD with rate 0.001 and momentum 0.9, clip 5. The example of Liu, Hu, Wu
and Smith on School (kenziyuliu/private-cross-silo-fl, commit f16ff76f): 200 rounds of one epoch,
batches of 32, SGD with rate 0.01, clip 1. All average by rows; the first two use Opacus.

Two things differ from these examples. Batches are drawn as the accountant assumes, and every step
of every round is counted. Features are within their public ranges instead of standardised, since a
private mean and variance would have to be paid for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from research.board.contestant import TASKS, Answer, Case
from research.board.peers.dpsgd import Models, Schedule, Silos, noise_for, spent


@dataclass(frozen=True)
class Settings:
    """The settings of a public example."""

    name: str
    rounds: int
    batch: int
    rate: float
    momentum: float
    clip: float
    updates: int | None = None
    """Updates of each round; None is one epoch."""

    def schedule(self, rows: int) -> Schedule:
        """Return the schedule of a silo, as Opacus makes it of its number of batches."""
        batches = -(-rows // self.batch)
        return Schedule(1 / batches, self.rounds * (self.updates or batches))


FLAMBY = Settings("FLamby's settings", 15, 4, 0.001, 0.0, 1.1, updates=100)
FL4HEALTH = Settings("FL4Health's settings", 10, 64, 0.001, 0.9, 5.0)
LIU = Settings("Liu's settings", 200, 32, 0.01, 0.0, 1.0)


@dataclass(frozen=True)
class FederatedAveraging:
    """FedAvg whose silos train by DP-SGD."""

    settings: Settings
    trust: str = "isrl"
    tasks: frozenset[str] = frozenset(TASKS)

    @property
    def name(self) -> str:
        """Return the name in tables."""
        return f"FedAvg with DP-SGD, {self.settings.name}"

    def predict(self, case: Case) -> Answer:
        """Train one model for all silos."""
        silos = Silos(case, np.random.default_rng((case.seed, 1)))
        schedules = [self.settings.schedule(int(rows)) for rows in silos.counts]
        noise = np.array([noise_for(one, case.epsilon, case.delta) for one in schedules])
        models = self._train(silos, schedules, noise)
        prices = [
            spent(one, sigma, case.delta, 2e-3 * case.epsilon)
            for one, sigma in zip(schedules, noise, strict=True)
        ]
        return Answer(silos.predictions(models), max(prices), self.settings.name)

    def _train(self, silos: Silos, schedules: list[Schedule], noise: np.ndarray) -> Models:
        """Return the shared model, once for each silo."""
        rates = np.array([one.rate for one in schedules])
        local_steps = np.array([one.steps // self.settings.rounds for one in schedules])
        models = silos.start()
        velocity = silos.start()
        for _ in range(self.settings.rounds):
            for update in range(local_steps.max()):
                active = update < local_steps
                bias, slope = silos.step(models, rates * active, noise, self.settings.clip)
                velocity = _moved(velocity, bias, slope, self.settings.momentum, active)
                models = Models(
                    models.bias - self.settings.rate * active[:, None] * velocity.bias,
                    models.slope - self.settings.rate * active[:, None] * velocity.slope,
                )
            models = models.mean(silos.counts)
        return models


def _moved(
    velocity: Models, bias: np.ndarray, slope: np.ndarray, momentum: float, active: np.ndarray
) -> Models:
    """Return the velocity of SGD with momentum after a step of the active silos."""
    kept = np.where(active, momentum, 1.0)[:, None]
    return Models(kept * velocity.bias + bias, kept * velocity.slope + slope)
