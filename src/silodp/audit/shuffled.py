"""The transcript attack on totals: tell two neighbouring data sets apart by the totals of all
rounds, or by one silo's own numbers.

It runs the code that users run: in simulation calibrate, in_totals, ShuffledFederation,
ThroughShuffler, Gate, MemoryLedger and Simulated; of a deployment the silos' own arithmetic (Exact)
and the shuffler's choice and addition (Pool), without seals. The attacker knows every record but
one, and projects what it sees on the direction in which that one pulls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silodp.audit import claims
from silodp.audit.canary import RECORDS, canary_problem, neighbours
from silodp.audit.pipeline import SOUND, Pipeline
from silodp.audit.transcript import (
    CLIP,
    Attacker,
    Case,
    Stage,
    no_partition,
    played,
    remembering,
)
from silodp.core.mechanisms import Gaussian, Shuffled
from silodp.core.mechanisms.totals import as_total
from silodp.core.protocol.box import Contribution
from silodp.core.protocol.relay import Request
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.core.weights import Weights
from silodp.server.algorithms import find
from silodp.server.federation import Answered, Everyone, Federation
from silodp.server.plan import Plan
from silodp.server.settings import default_shares
from silodp.server.shuffled import ShuffledFederation
from silodp.silo.data.records import Records
from silodp.testing.federation import Recording

SILOS = 3
REHEARSAL = 200
POINTS = (0.0, 0.3)
"""Where the deployed silos are asked: one round each, as far as a case has rounds."""
ROUND = "5d" * 32


def plan_of(
    case: Case, counts: Sequence[int], pipeline: Pipeline, colluding: int | None = None
) -> Plan:
    """Shares of noise that fill the claim if every silo is in every total: numbers, so that any
    number of runs has them.

    With `colluding` the totals are masked, and count on the noise of all but so many.
    """
    algorithm = find(case.algorithm)
    mechanisms = {kind: Gaussian(kind, CLIP, 0.0, case.batches) for kind in algorithm.kinds}
    shares = default_shares(algorithm, case.settings)
    plan = pipeline.calibrate(
        case.run(), mechanisms, case.budget, counts, shares=shares, rule="gdp"
    )
    made = pipeline.in_totals(plan, len(counts) - (colluding or 0), masked=colluding is not None)
    return replace(made, mechanisms={kind: m.of(0) for kind, m in made.mechanisms.items()})


def claims_of(case: Case, gate: str, pipeline: Pipeline) -> claims.Claims:
    """Return what the price says of the totals that the server sees, or of the numbers that the
    shuffler does.
    """
    silos = 1 if gate == "deployed numbers" else SILOS
    return claims.of_plan(plan_of(case, (RECORDS,) * silos, pipeline), case.budget)


# --- simulation ----------------------------------------------------------------------------------


def attack_shuffled(
    case: Case, runs: int, *, seed: int = 0, pipeline: Pipeline = SOUND
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of what the server sees in `runs` runs of the whole algorithm on each of the two data
    sets.
    """
    worlds = neighbours(silos=SILOS)
    return played(
        _Shuffle(case, plan_of(case, worlds[0].counts, pipeline), worlds, pipeline), runs, seed
    )


class _Shuffle(Stage):
    def attacker(self, *known: Any) -> Attacker:
        return Server(*known)

    def federation(self, gate: Any) -> tuple[Recording, Federation]:
        counts = self.worlds[0].counts
        channel = Recording(self.pipeline.channel(gate))
        return channel, ShuffledFederation(
            channel, Everyone(len(counts)), Weights("records", tuple(counts))
        )

    def heard(self, silos: tuple[int, ...], release: Answered) -> Tensor:
        """Return the total that was passed on."""
        return release.value.double().sum(1)


class Server(Attacker):
    """Knows both data sets, the stored partitions and all that is public; sees totals."""

    def expected(self, query: Query, world: int) -> Tensor:
        """(J, d): the total without noise, in steps of the lattice."""
        m = as_total(query.mechanism)
        silent = Gaussian(m.kind, m.clip, 0.0, m.sampling)
        silos = range(len(self._counts))
        mean = self._models[world].answer(replace(query, mechanism=silent), silos).double()
        batch = torch.tensor([[m.sampling.batch(n)] for n in self._counts], dtype=torch.float64)
        return (mean * batch).sum(1) / m.steps(mean.shape[-1])

    def _std(self, query: Query) -> Tensor:
        m = as_total(query.mechanism)
        steps = m.steps(query.statistic.shape[-1])
        scale = m.noise_multiplier * 2 * m.clips.reshape(-1, 1) / steps
        std = scale * math.sqrt(len(self._counts))
        return std.expand(query.statistic.shape[0], 1)[:, 0]


# --- deployment ----------------------------------------------------------------------------------


def attack_totals(
    case: Case, runs: int, *, pipeline: Pipeline = SOUND
) -> tuple[np.ndarray, np.ndarray]:
    """Attack totals of the deployed silos' numbers, as `attack_shuffled` does, added as the
    shuffler's pool adds them. The gradients are the same in all runs and computed once. Noise is
    drawn for each run.

    The gradients are the same in all runs and computed once; noise is drawn anew.
    """
    mechanism = plan_of(case, neighbours(silos=SILOS)[0].counts, pipeline).mechanisms["minibatch"]
    points = POINTS[: int(case.settings["rounds"])]
    return scores_of(
        [Deployed(world, mechanism, pipeline, points) for world in neighbours(silos=SILOS)], runs
    )


def attack_numbers(
    case: Case, runs: int, *, pipeline: Pipeline = SOUND
) -> tuple[np.ndarray, np.ndarray]:
    """Attack what the shuffler sees of one silo. The silo's own share makes the claim its local
    epsilon.
    """
    points = POINTS[: int(case.settings["rounds"])]
    mechanism = plan_of(case, (RECORDS,), pipeline).mechanisms["minibatch"]
    return scores_of(
        [Deployed(world, mechanism, pipeline, points, alone=True) for world in neighbours(silos=1)],
        runs,
    )


def scores_of(worlds: Sequence[Deployed], runs: int) -> tuple[np.ndarray, np.ndarray]:
    """Projections on the direction of the record that differs, less their middle as a rehearsal
    finds it.
    """
    heard = [np.fromiter(world.projections(REHEARSAL), float) for world in worlds]
    middle = (heard[0].mean() + heard[1].mean()) / 2
    first, second = (np.fromiter(world.projections(runs), float) - middle for world in worlds)
    return first, second


@dataclass(frozen=True)
class Deployed:
    """Silos with a deployed gate's arithmetic, and a pool that adds up their numbers; `alone`: what
    the shuffler sees of the first.
    """

    world: Records
    mechanism: Shuffled
    pipeline: Pipeline
    points: Sequence[float]
    alone: bool = False

    def projections(self, runs: int) -> Iterator[float]:
        """Return for each run everything seen, on the direction in which the record that differs
        pulls.
        """
        model = Server(
            [
                self.pipeline.answerer(canary_problem(), w, [0])
                for w in neighbours(silos=len(self.world))
            ],
            self.world.counts,
        )
        directions = [
            (model.expected(query, 1) - model.expected(query, 0))[0].numpy()
            for query in self.queries()
        ]
        for seen in self.rounds(runs):
            yield float(
                sum(vector @ direction for vector, direction in zip(seen, directions, strict=True))
            )

    def queries(self) -> list[Query]:
        return [
            Query(Grad(torch.full((1, canary_problem().dim), at)), self.mechanism)
            for at in self.points
        ]

    def rounds(self, runs: int) -> Iterator[list[np.ndarray]]:
        """Return for each run what is seen of each round, d integers."""
        pool = _unsealed(self.pipeline.pool)
        for answers in self.numbers(runs):
            yield [numbers[0] if self.alone else self._total(pool, numbers) for numbers in answers]

    def numbers(self, runs: int) -> Iterator[list[list[np.ndarray]]]:
        """Return for each run and round the numbers of every silo."""
        exact = remembering(self.pipeline.exact)
        queries = self.queries()
        silos = [
            exact(canary_problem(), self.world.select([i]), partition=no_partition)
            for i in range(len(self.world))
        ]
        for _ in range(runs):
            yield [
                [silo.answer(query, [0]).flatten().numpy() for silo in silos] for query in queries
            ]

    def _total(self, pool: Any, numbers: Sequence[np.ndarray]) -> np.ndarray:
        dim = len(numbers[0])
        demanded = self.mechanism.counted
        pool.known = {
            bytes([i]): Contribution(ROUND, demanded, own) for i, own in enumerate(numbers)
        }
        totals = pool.total(Request(ROUND, dim, tuple(pool.known))).totals
        return totals.reshape(-1, dim).sum(
            axis=0
        )  # whether there is more than one total is a plain check's business


def _unsealed(pool: Any) -> Any:
    """Choose and add contributions without seals, which take longer than all the rest."""

    class Unsealed(pool):
        known: dict[bytes, Contribution]

        def _opened(self, box: bytes, request: Request) -> tuple[str, Contribution]:
            return box.hex(), self.known[box]

    return Unsealed(None, ())
