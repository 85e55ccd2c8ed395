"""MR-MTL: each silo trains a model of its own, pulled to the mean of all (Liu, Hu, Wu and Smith, On
Privacy and Personalization in Cross-Silo Federated Learning, NeurIPS 2022).

Settings are those of its authors' example on School (README of kenziyuliu/private-cross-silo-fl,
commit f16ff76f): 200 rounds of one epoch, batches of 32, rate 0.01, clip 1, lambda 1. They were
chosen there by a search on School's data, and are used here on every table.

Three things differ from that code. Batches are drawn as the accountant assumes. The pull to the
mean is outside the clip, since it depends on no row. Features are scaled by public ranges instead
of each silo's own mean and variance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from research.board.contestant import TASKS, Answer, Case
from research.board.peers.dpsgd import Models, Schedule, Silos, noise_for, spent


@dataclass(frozen=True)
class MeanRegularised:
    """Mean-regularised multi-task learning with DP-SGD in each silo."""

    rounds: int = 200
    batch: int = 32
    rate: float = 0.01
    clip: float = 1.0
    pull: float = 1.0
    """The paper's lambda."""
    name: str = "MR-MTL"
    trust: str = "isrl"
    tasks: frozenset[str] = frozenset(TASKS)

    def schedule(self, rows: int) -> Schedule:
        """Return the schedule of a silo: one epoch for each round."""
        batches = -(-rows // self.batch)
        return Schedule(1 / batches, self.rounds * batches)

    def predict(self, case: Case) -> Answer:
        """Train a model for each silo."""
        silos = Silos(case, np.random.default_rng((case.seed, 2)))
        schedules = [self.schedule(int(rows)) for rows in silos.counts]
        noise = np.array([noise_for(one, case.epsilon, case.delta) for one in schedules])
        prices = [
            spent(one, sigma, case.delta, 2e-3 * case.epsilon)
            for one, sigma in zip(schedules, noise, strict=True)
        ]
        models = self._train(silos, schedules, noise)
        return Answer(silos.predictions(models), max(prices), f"lambda {self.pull:g}")

    def _train(self, silos: Silos, schedules: list[Schedule], noise: np.ndarray) -> Models:
        """Return the model of each silo."""
        rates = np.array([one.rate for one in schedules])
        local_steps = np.array([one.steps // self.rounds for one in schedules])
        models = silos.start()
        centre = models
        for _ in range(self.rounds):
            for update in range(local_steps.max()):
                active = update < local_steps
                bias, slope = silos.step(models, rates * active, noise, self.clip)
                move = self.rate * active[:, None]
                models = Models(
                    models.bias - move * (bias + self.pull * (models.bias - centre.bias)),
                    models.slope - move * (slope + self.pull * (models.slope - centre.slope)),
                )
            centre = models.mean(silos.counts)
        return models
