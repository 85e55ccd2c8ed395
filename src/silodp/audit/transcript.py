"""The transcript attack: decide from everything that one silo releases which of two neighbouring
data sets it has.

The attack runs the code that users run: plan.calibrate, Federation, InProcess, Gate, MemoryLedger,
Simulated. The attacker has the releases, all public facts, and every record but one, which is one
of two canaries. So the attacker can compute what each data set would have answered without noise,
at the points of the queries. The score is the log-likelihood ratio of the transcript.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silodp.audit.canary import (
    ROWS,
    canary_problem,
    neighbours,
    of_products,
    person_problem,
    persons,
)
from silodp.audit.pipeline import SOUND, Pipeline
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch, Sampling
from silodp.core.statistics import Grad
from silodp.core.weights import Weights
from silodp.server.algorithms import find
from silodp.server.federation import Answered, Everyone, Federation
from silodp.server.plan import Plan
from silodp.server.settings import default_shares, prepared
from silodp.silo.answer.exact import Exact
from silodp.silo.data.records import Records
from silodp.testing.federation import Recording
from silodp.wire.inprocess import InProcess

CHUNK = 1000
REHEARSAL = 100
CLIP = 1.0


@dataclass(frozen=True)
class Case:
    """One row of the audit: an algorithm with its schedule and batches, and the claim (epsilon,
    delta) under attack.
    """

    algorithm: str
    epsilon: float
    settings: dict[str, float] = field(default_factory=dict)
    sampling: Sampling | None = None
    delta: float = 1e-5
    rule: str | None = None
    step: float = 0.1
    gap: str = ""
    """The reason why the attack must stay below the claim, if there is one."""

    @property
    def batches(self) -> Sampling:
        """Return the sampling of the case, by default that of the algorithm."""
        if self.sampling:
            return self.sampling
        if find(self.algorithm).disjoint:
            return DisjointBatches(int(self.settings.get("rounds", 1)))
        return FullBatch()

    @property
    def budget(self) -> Budget:
        """Return the claim as a budget."""
        return Budget(self.epsilon, self.delta)

    def run(self) -> Callable[..., Any]:
        """Return the algorithm with all of its arguments except the mechanisms."""
        return prepared(find(self.algorithm), self.settings, self.step)

    def plan(self, counts: Sequence[int], pipeline: Pipeline) -> Plan:
        """Return the plan that the pipeline calibrates for the claim."""
        algorithm = find(self.algorithm)
        mechanisms = {kind: Gaussian(kind, CLIP, 0.0, self.batches) for kind in algorithm.kinds}
        shares = default_shares(algorithm, self.settings)
        return pipeline.calibrate(
            self.run(), mechanisms, self.budget, counts, shares=shares, rule=self.rule
        )


def attack(
    case: Case, runs: int, *, seed: int = 0, pipeline: Pipeline = SOUND
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of `runs` independent runs on each of the two data sets.

    Before them a rehearsal shows the attacker the real size of the noise.
    """
    if case.algorithm == "one-shot":
        problem, worlds = of_products()
    else:
        problem = canary_problem()
        worlds = neighbours(quiet=case.batches.sampled)
    stage = Stage(case, case.plan(worlds[0].counts, pipeline), worlds, pipeline, problem)
    return played(stage, runs, seed)


def attack_persons(
    case: Case, runs: int, *, first: int = ROWS, seed: int = 0, pipeline: Pipeline = SOUND
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of `attack` if the canary is a person, of `first` rows in the first data
    set.
    """
    worlds = persons(first)
    stage = Stage(case, case.plan(worlds[0].counts, pipeline), worlds, pipeline, person_problem())
    return played(stage, runs, seed)


def played(stage: Stage, runs: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of `runs` runs on each data set of the stage, with different seeds."""
    loudness = stage.rehearse(range(seed, seed + REHEARSAL))
    scores = []
    for world in range(2):
        first = seed + REHEARSAL + world * runs
        chunks = [
            range(first + start, first + min(start + CHUNK, runs))
            for start in range(0, runs, CHUNK)
        ]
        parts = [stage.scores(world, chunk, loudness) for chunk in chunks]
        scores.append(torch.cat(parts).numpy())
    return scores[0], scores[1]


@dataclass(frozen=True)
class Stage:
    """Two data sets, and the run that an attacker listens to on each."""

    case: Case
    plan: Plan
    worlds: tuple[Records, Records]
    pipeline: Pipeline
    problem: Problem = field(default_factory=canary_problem)

    def play(self, world: int, seeds: Sequence[int]) -> tuple[Attacker, list[tuple[Query, Tensor]]]:
        """Run the algorithm once for each seed on one of the data sets. Return an attacker, and the
        transcript that it heard.
        """
        problem = self.problem
        records = self.worlds[world]
        gate, answerer = self.pipeline.simulated(problem, records, self.plan, seeds)
        channel, fed = self.federation(gate)
        for _ in self.case.run()(
            fed, problem, torch.zeros(len(seeds), problem.dim), **self.plan.mechanisms
        ):
            pass
        models = [self.pipeline.answerer(problem, w, [0]) for w in self.worlds]
        attacker = self.attacker(models, records.counts, answerer)
        return attacker, [
            (query, value)
            for query, silos, release in channel.log
            if (value := self.heard(silos, release)) is not None
        ]

    def attacker(self, *arguments: Any) -> Attacker:
        """Return an attacker with these arguments."""
        return Attacker(*arguments)

    def federation(self, gate: Any) -> tuple[Recording, Federation]:
        """Return a recording channel, and the federation that asks through it."""
        channel = Recording(InProcess(gate))
        counts = self.worlds[0].counts
        return channel, Federation(channel, Everyone(len(counts)), Weights("equal", counts))

    def heard(self, silos: tuple[int, ...], release: Answered) -> Tensor | None:
        """Return the part of an answer that the attacker hears, silo 0's release. Return None if
        silo 0 did not answer.
        """
        if 0 in silos:
            return release.value[:, silos.index(0)].double()
        return None

    def rehearse(self, seeds: Sequence[int]) -> list[float]:
        """Return the real size of each release's noise, over its claimed size."""
        attacker, transcript = self.play(0, seeds)
        return [attacker.loudness(query, value) for query, value in transcript]

    def scores(self, world: int, seeds: Sequence[int], loudness: Sequence[float]) -> Tensor:
        """Return the score of a run on this data set, for each seed."""
        attacker, transcript = self.play(world, seeds)
        evidence = [
            attacker.evidence(query, value, size)
            for (query, value), size in zip(transcript, loudness, strict=True)
        ]
        return torch.stack(evidence).sum(0)


def attack_deployed(case: Case, runs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of `attack` on one release of a deployed gate's own arithmetic: records as
    integers, and noise from operating-system entropy.

    All runs ask about the same point, so each data set's integer sum is computed once. The noise is
    drawn again for every run.
    """
    problem = canary_problem()
    worlds = neighbours(silos=1)
    query = Query(
        Grad(torch.zeros(1, problem.dim)),
        case.plan(worlds[0].counts, SOUND).mechanisms["minibatch"],
    )
    attacker = Attacker([SOUND.answerer(problem, w, [0]) for w in worlds], worlds[0].counts)
    scores = []
    for world in worlds:
        gate = remembering(SOUND.exact)(problem, world, partition=no_partition)
        value = torch.cat([gate.answer(query, [0])[:, 0] for _ in range(runs)])
        scores.append(attacker.evidence(query, value).numpy())
    return scores[0], scores[1]


def attack_gate(
    runs: int, *, first: int = ROWS, pipeline: Pipeline = SOUND
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of answers of the deployed arithmetic at noise multiplier 1, in two silos
    that differ in a person. Each answer is 1-GDP.
    """
    problem = person_problem()
    scores = []
    query = Query(Grad(problem.initial([0]).double()), Gaussian("gradient", 1.0, 1.0))
    for world in persons(first, quiet=True):
        gate = pipeline.open_gate(problem, world)
        scores.append(np.array([float(gate.answer(query, [0]).value.sum()) for _ in range(runs)]))
    return scores[0], scores[1]


def remembering(exact: type[Exact]) -> type[Exact]:
    """Return a subclass that sums the integers of a point's records once. The sum is the same in
    every run, and takes longer than the noise.
    """

    class Remembering(exact):
        def _sum(self, rows: Any, chosen: np.ndarray, *given: Any, **more: Any) -> np.ndarray:
            sums = self.__dict__.setdefault("sums", {})
            point = float(rows.points[0].flatten()[0])
            key = (point, chosen.tobytes(), given, *more.values())
            if key not in sums:
                sums[key] = super()._sum(rows, chosen, *given, **more)
            return sums[key].copy()

    return Remembering


def no_partition(name: str, batches: int) -> np.ndarray:
    """Raise AssertionError, because a full batch needs no partition."""
    raise AssertionError("a full batch needs no partition")


class Attacker:
    """An attacker with both data sets, and with the partition of disjoint batches. Their price
    holds against an attacker with the partition. The attacker does not have the coins of
    sub-sampling.
    """

    def __init__(self, models: Sequence[Any], counts: Sequence[int], victim: Any = None) -> None:
        self._models = models
        self._counts = counts
        for model in models if victim else ():
            model._partitions = victim._partitions
            model._world = victim._world
            model._generators = victim._generators

    def loudness(self, query: Query, value: Tensor) -> float:
        """Return the size of the noise in answers of the first data set, in units of the claimed
        size. For secret batches return 1.
        """
        if query.mechanism.sampling.sampled:
            return 1.0
        residual = (value - self.expected(query, 0)) / self._std(query)[:, None]
        return max(float(residual[residual.isfinite()].square().mean().sqrt()), 1e-6)

    def evidence(self, query: Query, value: Tensor, loudness: float = 1.0) -> Tensor:
        """Return the log-likelihood ratio (J,) of an answer (J, d): the log of its density under
        the second data set, minus that under the first.
        """
        sampling = query.mechanism.sampling
        std = self._std(query) * loudness
        first = self.expected(query, 0)
        second = self.expected(query, 1)
        if not sampling.sampled:
            apart = ((value - (first + second) / 2) * (second - first)).sum(-1) / std**2
            return torch.where(std > 0, apart, 0.0)
        rate = sampling.batch(self._counts[0]) / self._counts[0]
        likelihoods = [
            (value * mean - mean.square() / 2).sum(-1) / std**2 + math.log(rate)
            for mean in (first, second)
        ]
        if rate < 1:
            log_absent = math.log1p(-rate)
        else:
            log_absent = -math.inf
        absent = torch.full_like(likelihoods[0], log_absent)
        return torch.logaddexp(likelihoods[1], absent) - torch.logaddexp(likelihoods[0], absent)

    def expected(self, query: Query, world: int) -> Tensor:
        """Return silo 0's answer (J, d) without noise, with the canary in the batch. In sub-sampled
        batches all other records pull at nothing.
        """
        mechanism = replace(query.mechanism, noise_multiplier=0.0)
        sampling = query.mechanism.sampling
        scale = 1.0
        if sampling.sampled:
            mechanism = replace(mechanism, sampling=FullBatch())
            scale = self._counts[0] / sampling.batch(self._counts[0])
        answer = self._models[world].answer(replace(query, mechanism=mechanism), [0])
        return scale * answer[:, 0].double()

    def _std(self, query: Query) -> Tensor:
        """Return the standard deviation (J,) of a coordinate of the claimed noise. For local steps
        it is that of all steps together, times the step size.

        Only the end of local steps is seen. Nothing is lost by this: the canary's gradient has the
        length of the clip and the same direction in every step, so the end is as good as the steps.
        """
        mechanism = query.mechanism
        multiplier = torch.as_tensor(mechanism.noise_multiplier, dtype=torch.float64).flatten()[0]
        sensitivity = mechanism.sensitivity(self._counts[0])
        sensitivity = torch.as_tensor(sensitivity, dtype=torch.float64).flatten()
        std = (multiplier * sensitivity).expand(query.statistic.shape[0])
        return std * query.statistic.gain
