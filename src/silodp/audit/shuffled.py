"""The transcript attack on a shuffle: tell two neighbouring data sets apart by the totals of all
rounds, or by one silo's own counts.

It runs the code that users run: in simulation calibrate_shuffled, ShuffledFederation,
ThroughShuffler, Gate, MemoryLedger and Simulated; of a deployment the silos' own arithmetic (Exact)
and the shuffler's choice and addition (Pool), without seals. The attacker knows every record but
one, and projects what it sees on the direction in which that one pulls. Sums of thousands of coins
are close to Gaussian, so their separation, read as a mu, is an estimate; a claim is refuted by
counting alone (`bounds.refuted`), since binomial noise has no mu.
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
from silodp.core.mechanisms import Gaussian, Shuffled, shuffle
from silodp.core.mechanisms.totals import as_total
from silodp.core.privacy.binomial import BinomialSum
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
    """Levels and coins that fill the claim if every silo is in every total: numbers, so that any
    number of runs shares them.

    With `colluding` the totals are masked, and count on the noise of all but so many.
    """
    algorithm = find(case.algorithm)
    mechanisms = {kind: Gaussian(kind, CLIP, 0.0, case.batches) for kind in algorithm.kinds}
    shape: dict[str, Any] = {
        "dimension": canary_problem().dim,
        "least": len(counts),
        "shares": default_shares(algorithm, case.settings),
    }
    plan = pipeline.calibrate_shuffled(
        case.run(),
        mechanisms,
        [case.budget],
        counts,
        Everyone(len(counts)),
        **shape,
        colluding=colluding,
    )
    noisy = {
        k: replace(m, levels=int(m.levels), noise_bits=int(m.noise_bits))
        for k, m in plan.mechanisms.items()
    }
    return replace(plan, mechanisms=noisy)


def claims_of(case: Case, gate: str, pipeline: Pipeline) -> claims.Claims:
    """What the accountant of binomial noise says of the totals that the server sees, or of the
    counts that the shuffler does.
    """
    dimension = canary_problem().dim
    if gate == "deployed counts":
        coins = _own_coins(case)
        release = BinomialSum(RECORDS * coins.noise_bits, coins.p, coins.levels, dimension)
        return claims.of_totals(
            [(release, len(POINTS[: int(case.settings["rounds"])]))], case.budget
        )
    return claims.of_totals(
        claims.totals_of(plan_of(case, (RECORDS,) * SILOS, pipeline), dimension), case.budget
    )


def _own_coins(case: Case) -> shuffle.Parameters:
    rounds = len(POINTS[: int(case.settings["rounds"])])
    return shuffle.numerical(RECORDS, canary_problem().dim, case.epsilon, case.delta, rounds=rounds)


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
        channel = Recording(self.pipeline.channel(gate, counts))
        return channel, ShuffledFederation(
            channel, Everyone(len(counts)), Weights("records", tuple(counts))
        )

    def heard(self, silos: tuple[int, ...], release: Answered) -> Tensor:
        """The total that was passed on."""
        return release.value.double().sum(1)


class Server(Attacker):
    """Knows both data sets, the stored partitions and all that is public; sees totals, whose noise
    it takes for Gaussian.
    """

    def expected(self, query: Query, world: int) -> Tensor:
        """(J, d): the mean of the total over coins."""
        m = as_total(query.mechanism)
        silos = range(len(self._counts))
        batch = torch.tensor([[m.sampling.batch(n)] for n in self._counts], dtype=torch.float64)
        mean = (
            self._models[world]
            .answer(replace(query, mechanism=Gaussian(m.kind, m.clip, 0.0, m.sampling)), silos)
            .double()
        )
        clip = torch.as_tensor(m.clip, dtype=torch.float64).reshape(-1, 1, 1)
        unit = torch.where(clip > 0, mean / clip, 0.0)
        return (batch * ((unit + 1) * (m.levels / 2) + m.p * m.noise_bits)).sum(1)

    def _std(self, query: Query) -> Tensor:
        m = as_total(query.mechanism)
        variance = sum(m.sampling.batch(n) for n in self._counts) * (
            m.noise_bits * m.p * (1 - m.p) + 1 / 4
        )
        return torch.full(query.statistic.shape[:1], math.sqrt(variance), dtype=torch.float64)


# --- deployment ----------------------------------------------------------------------------------


def attack_totals(
    case: Case, runs: int, *, pipeline: Pipeline = SOUND
) -> tuple[np.ndarray, np.ndarray]:
    """As `attack_shuffled`, on totals of the deployed silos' counts as the shuffler's pool adds
    them.

    The gradients are the same in all runs and computed once; rounding and coins are drawn anew.
    """
    mechanism = plan_of(case, neighbours(silos=SILOS)[0].counts, pipeline).mechanisms["minibatch"]
    points = POINTS[: int(case.settings["rounds"])]
    return scores_of(
        [Deployed(world, mechanism, pipeline, points) for world in neighbours(silos=SILOS)], runs
    )


def attack_counts(case: Case, runs: int) -> tuple[np.ndarray, np.ndarray]:
    """What the shuffler sees of one silo, whose own coins are as many as make the claim its local
    epsilon.
    """
    points = POINTS[: int(case.settings["rounds"])]
    coins = _own_coins(case)
    mechanism = Shuffled("minibatch", CLIP, coins.levels, coins.noise_bits, RECORDS, coins.p)
    return scores_of(
        [Deployed(world, mechanism, SOUND, points, alone=True) for world in neighbours(silos=1)],
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
    """Silos with a deployed gate's arithmetic, and a pool that adds up their counts; `alone`: what
    the shuffler sees of the first.
    """

    world: Records
    mechanism: Shuffled
    pipeline: Pipeline
    points: Sequence[float]
    alone: bool = False

    def projections(self, runs: int) -> Iterator[float]:
        """For each run: everything seen, on the direction in which the record that differs
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
        """For each run: what is seen of each round, d integers."""
        pool = _unsealed(self.pipeline.pool)
        for answers in self.counts(runs):
            yield [counts[0] if self.alone else self._total(pool, counts) for counts in answers]

    def counts(self, runs: int) -> Iterator[list[list[np.ndarray]]]:
        """For each run and round: the counts of every silo."""
        exact = remembering(self.pipeline.exact)
        queries = self.queries()
        silos = [
            exact(canary_problem(), self.world.select([i]), partition=no_partition)
            for i in range(len(self.world))
        ]
        for _ in range(runs):
            yield [[silo.answer(query, [0])[0, 0].numpy() for silo in silos] for query in queries]

    def _total(self, pool: Any, counts: Sequence[np.ndarray]) -> np.ndarray:
        m = self.mechanism
        dim = len(counts[0])
        bits = m.levels + m.noise_bits
        own = zip(self.world.counts, counts, strict=True)
        pool.known = {
            bytes([i]): Contribution(ROUND, m.contributions, n, bits, c)
            for i, (n, c) in enumerate(own)
        }
        totals = pool.total(Request(ROUND, dim, bits, tuple(pool.known))).totals
        return totals.reshape(-1, dim).sum(
            axis=0
        )  # whether there is more than one total is a plain check's business


def _unsealed(pool: Any) -> Any:
    """The same choice and addition, of contributions that lie open: seals take longer than all the
    rest.
    """

    class Unsealed(pool):
        known: dict[bytes, Contribution]

        def _opened(self, box: bytes, request: Request) -> tuple[str, Contribution]:
            return box.hex(), self.known[box]

    return Unsealed(None, (), largest=RECORDS)
