"""Every statistic, mechanism and sampling that a gate answers, each as a question to one deployed
silo with a known exact answer.

The list is made from the types of `core.query` and the gate's own checks: each combination that a
gate does not refuse is a row of the audit. A statistic, a mechanism or a sampling without an
example stops the audit with a sentence. So none can be added and forgotten.

The silo has 24 records of 2048 features, a quarter of them held out, and a logistic model. Record k
pulls at two coordinates of its own, in the middle. All other coordinates have noise alone, in every
batch. Three records of four are steep (longer than the clip, at every w).
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from silodp.audit.masked import Companion, unmasked, with_cohort
from silodp.audit.pipeline import Free, Pipeline, Silo, public, sealing, signing
from silodp.core import mechanisms, statistics
from silodp.core import sampling as samplings
from silodp.core.errors import Refused
from silodp.core.mechanisms import Gaussian, Masked, Shuffled
from silodp.core.mechanisms.totals import as_total
from silodp.core.privacy.accounting import GDP, Budget, Renyi
from silodp.core.problem.losses import logistic
from silodp.core.problem.problem import Problem
from silodp.core.protocol.box import open_box
from silodp.core.protocol.codec import Answer, decode_reply, encode_query
from silodp.core.query import Query
from silodp.core.statistics import Statistic
from silodp.core.statistics.regression import COX
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.heldout import held_out, split_records
from silodp.silo.data.records import Records
from silodp.silo.gate import check
from silodp.silo.service.door import definition_hash
from silodp.silo.service.masking import Masking
from silodp.silo.service.policy import Shuffling

N = 24
FEATURES = 2048
HELD_OUT = 0.25
FIRST = 1000
STEP = 1e-3
STEPS = 3
CROWD = 2
"""Silos whose noise a question for a total counts on: the price is of all, and one is asked."""


def _point(features: int, seed: int) -> Tensor:
    """Return a random point (1, features) close to zero."""
    return 0.01 * torch.randn(
        1, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def _first_group(features: int) -> int:
    """Return the first coordinate at which a record pulls, or 0 for few features."""
    if features > FIRST:
        return FIRST
    return 0


def _tables(features: int) -> statistics.Marginals:
    """Return a table of each feature, and one of the label by the first feature."""
    columns = [statistics.Binned(j, 1, (-0.5, 0.5)) for j in range(features)]
    label = statistics.Binned(statistics.LABEL, 2)
    pairs = [(j,) for j in range(features)]
    return statistics.Marginals.of([*columns, label], [*pairs, (features, 0)])


def _regression(features: int) -> statistics.Regression:
    """Return a step of a Cox regression on a few features, from the first that a record pulls
    at.
    """
    scale = torch.zeros(features, dtype=torch.float64)
    scale[_first_group(features) :][:30] = 1.0
    slopes = torch.zeros(int(scale.sum()), dtype=torch.float64)
    levels = torch.tensor([-1.0, 0.0, 0.5], dtype=torch.float64)
    return statistics.Regression(
        COX, slopes, levels, torch.tensor([0.0, 0.0, 1.0]), 0 * scale, scale, 1.0, 1.5
    )


EXAMPLES: dict[type, Callable[[int], Any]] = {
    statistics.Grad: lambda d: statistics.Grad(_point(d, 1)),
    statistics.GradDiff: lambda d: statistics.GradDiff(_point(d, 1) + 2.0, _point(d, 2) - 2.0),
    statistics.ScaledGrad: lambda d: statistics.ScaledGrad(
        _point(d, 1), torch.full((d,), 0.1), torch.full((d,), 0.5), 1.0
    ),
    statistics.ClippedDiff: lambda d: statistics.ClippedDiff(
        _point(d, 1) + 2.0, _point(d, 2) - 2.0, 8.0
    ),
    statistics.LocalSteps: lambda d: statistics.LocalSteps(_point(d, 1), STEPS, STEP),
    statistics.SteeredSteps: lambda d: statistics.SteeredSteps(
        _point(d, 1), STEPS, STEP, _point(d, 3)
    ),
    statistics.Histogram: lambda d: statistics.Histogram(torch.tensor([0.5]), d),
    # of zeros each u is -1: as long as a record can be
    statistics.Moments: lambda d: statistics.Moments(torch.zeros(d), torch.full((d,), 5.0)),
    statistics.Score: lambda d: statistics.Score(
        _point(d, 1), min(64, d), 8.0, 2, torch.linspace(-2, 2, min(64, d))[1:].double()
    ),
    statistics.GroupScore: lambda d: statistics.GroupScore(
        _point(d, 1), _first_group(d), min(statistics.MAX_GROUPS, d), 0
    ),
    statistics.GroupClasses: lambda d: statistics.GroupClasses(
        2, _first_group(d), min(statistics.MAX_GROUPS, d), 0
    ),
    statistics.ClassCounts: lambda d: statistics.ClassCounts(max(2, d)),
    statistics.Gram: lambda d: statistics.Gram(min(d, 62), 2, 1.0, 1.5),
    statistics.Marginals: lambda d: _tables(min(d, 32)),
    statistics.Regression: _regression,
    statistics.Outcomes: lambda d: statistics.Outcomes(min(64, d)),
    statistics.MissingRates: lambda d: statistics.MissingRates(d),
    statistics.RiskCells: lambda d: statistics.RiskCells(
        _point(d, 1), torch.linspace(-2, 2, min(d, 64)), 1.0
    ),
}
"""A statistic of each type, over so many features."""
SAMPLINGS: dict[type, samplings.Sampling] = {
    samplings.FullBatch: samplings.FullBatch(),
    samplings.DisjointBatches: samplings.DisjointBatches(3, 1),
    samplings.Poisson: samplings.Poisson(0.45),
    samplings.WithoutReplacement: samplings.WithoutReplacement(0.5),
}


def _shares(clip: float, sampling: samplings.Sampling, loud: bool) -> dict[str, Any]:
    return vars(Shuffled("audit", clip, 2.0 if loud else 1e-3, sampling, CROWD))


def _gaussian(clip: float, sampling: samplings.Sampling, loud: bool) -> Gaussian:
    """Return a Gaussian mechanism."""
    if loud:
        return Gaussian("audit", clip, 2.0, sampling)
    return Gaussian("audit", clip, 1e-3, sampling)


MECHANISMS: dict[type, Callable[[float, samplings.Sampling, bool], Any]] = {
    Gaussian: lambda clip, sampling, loud: Gaussian("audit", clip, 2.0 if loud else 1e-3, sampling),
    Shuffled: lambda *words: Shuffled(**_shares(*words)),
    Masked: lambda *words: Masked(**_shares(*words), modulus=64),
}
"""A mechanism of each type at this clip: `loud` with noise to be measured, or else with so little
that what it hides can be read.
"""


@dataclass(frozen=True)
class Row:
    """One combination that a gate answers."""

    statistic: type[Statistic]
    mechanism: type
    sampling: type

    def __str__(self) -> str:
        return f"{self.statistic.__name__}, {self.mechanism.__name__}, {self.sampling.__name__}"

    def query(
        self,
        *,
        loud: bool = True,
        features: int = FEATURES,
        sampling: samplings.Sampling | None = None,
    ) -> Query:
        """Return the row's example as a question. `loud` gives it noise to be measured."""
        statistic = _example(EXAMPLES, self.statistic)(features)
        clip = getattr(statistic, "norm", 1.0)
        mechanism = _example(MECHANISMS, self.mechanism)(
            clip, sampling or _example(SAMPLINGS, self.sampling), loud
        )
        return Query(statistic, mechanism)

    def of(self, query: Query) -> bool:
        """Return whether the query belongs to this row."""
        return self == Row(
            type(query.statistic), type(query.mechanism), type(query.mechanism.sampling)
        )

    @property
    def steps(self) -> int:
        """Return the number of local steps of an answer."""
        if "steps" in self.statistic.wire:
            return STEPS
        return 1


def _example(of: dict[type, Any], kind: type) -> Any:
    """Return the example of a type. Raise AssertionError if there is none."""
    if kind not in of:
        raise AssertionError(
            f"{kind.__name__} has no example in the audit (audit/answers.py); a gate "
            "must not answer what nobody audits"
        )
    return of[kind]


NEVER = ("statistic", "sampling", "batch")
"""Codes for a combination that a gate never answers. Any other code is about the example itself."""


@functools.cache
def answerable() -> tuple[Row, ...]:
    """Return every combination of types that the gate and the deployed answerer allow.

    Raise AssertionError if the gate refuses an example, or everything with one of the types.
    """
    problem, records = world()
    exact = Exact(
        problem, records, partition=lambda name, batches: np.arange(N), held_out_share=HELD_OUT
    )
    rows = []
    ports = [
        kinds.values()
        for kinds in (statistics.STATISTICS, mechanisms.MECHANISMS, samplings.SAMPLINGS)
    ]
    for kinds in itertools.product(*ports):
        row = Row(*kinds)  # type: ignore[arg-type]
        query = row.query()
        try:
            check(query, problem.dim, [N])
            exact.check(query)
        except Refused as refused:
            if refused.code not in NEVER:
                raise AssertionError(
                    f"the gate refuses the audit's example of {row} ({refused.code}), so "
                    "nobody audits it"
                ) from None
            continue
        rows.append(row)
    for kind in itertools.chain(*ports):
        if not any(kind in (row.statistic, row.mechanism, row.sampling) for row in rows):
            raise AssertionError(
                f"the gate refuses everything with {kind.__name__}, so nobody audits it"
            )
    return tuple(rows)


# --- the silo ------------------------------------------------------------------------------------


@functools.cache
def world() -> tuple[Problem, Records]:
    """Return the silo's problem and its records."""
    x = torch.zeros(1, N, FEATURES, dtype=torch.float64)
    for k in range(N):
        size = 100.0
        if k % 4 == 3:
            size = 0.05
        x[0, k, own_coordinates(k)] = torch.tensor([3.0, 4.0], dtype=torch.float64) * size
    # A missing value is filled in with zero, and pulls at nothing.
    missing = torch.rand(1, N, FEATURES, generator=torch.Generator().manual_seed(4)) < 0.2
    missing &= x == 0
    y = torch.arange(N)[None] % 3 % 2
    problem = Problem(nn.Linear(FEATURES, 1, bias=False), logistic)
    return problem, Records(x, y, (N,), ("silo",), missing)


def own_part(query: Query) -> np.ndarray:
    """Return which records (n,) this question is about: the held-out ones, or the others."""
    for_testing = held_out(N, HELD_OUT)
    if query.statistic.on_held_out:
        return for_testing
    return ~for_testing


def divisor(query: Query) -> float:
    """Return the divisor of an answer: the expected number of records of its part in a batch."""
    return query.mechanism.sampling.batch(N) * int(own_part(query).sum()) / N


@functools.cache
def exact_sum(statistic: type[Statistic]) -> Tensor:
    """Return the noiseless sum (d,) of the clipped vectors of the question's records, by the code
    of the simulation, not that of the gate.
    """
    problem, records = world()
    # The simulation computes this sum for any mechanism and sampling of the row.
    query = Row(statistic, Gaussian, samplings.FullBatch).query()
    if "steps" in statistic.wire:
        query = replace(query, statistic=statistics.Grad(query.statistic.w))  # type: ignore[union-attr]
    training, for_testing = split_records(records, HELD_OUT)
    part = training
    if statistic.on_held_out:
        part = for_testing
    part = Records(part.x.double(), part.y, part.counts, part.names, part.missing)
    query = replace(query, mechanism=replace(query.mechanism, noise_multiplier=0.0))
    mean = Simulated(problem, part, [0]).answer(query, [0])[0, 0]
    return mean.double() * part.counts[0]


def known(row: Row) -> Tensor:
    """Return the coordinates (d,) whose exact answer is known: all on full batches, otherwise those
    at which no record pulls.

    For local steps they are also those at which no record pulls: elsewhere a step's noise changes
    the next step's gradient.
    """
    total = exact_sum(row.statistic)
    if issubclass(row.sampling, samplings.FullBatch) and row.steps == 1:
        return torch.ones_like(total, dtype=torch.bool)
    return total == 0


def pull_of(query: Query) -> Tensor:
    """Return what each local step adds to its noisy gradient, (d,) or ()."""
    pull = torch.as_tensor(getattr(query.statistic, "pull", 0.0), dtype=torch.float64)
    if pull.ndim:
        return pull[0]
    return pull


def own_coordinates(k: int) -> slice:
    """Return the two coordinates at which record k pulls."""
    return slice(FIRST + 2 * k, FIRST + 2 * k + 2)


SEAL = sealing("the audit's shuffler of answers")


class Answering(Silo):
    """A deployed silo that answers every row: policy, durable ledger and door, with a budget that
    does not end.
    """

    statistics = tuple(statistics.STATISTICS)
    samplings = tuple(samplings.SAMPLINGS)
    held_out = HELD_OUT
    budget = Budget(1e12, 1e-5)

    def __init__(self, folder: Path, pipeline: Pipeline, mechanism: type) -> None:
        if mechanism.total:
            self.rule = GDP()
        else:
            self.rule = Renyi(2.0)
        self._asked = 0
        self._other = Companion("other-silo", definition_hash(world()[0]))
        if mechanism.masked:
            self.masking = Masking((self._other.member,), colluding=0, least=2)
        else:
            self.shuffling = (
                Shuffling(public(SEAL), "pseudonym.key", CROWD, 0),
                signing("the audit's pseudonym"),
            )
        self.set_up(folder, pipeline, *world())

    def put(self, query: Query) -> Tensor:
        """Return the answer (d,) to a new question. For a total it is taken out of its box, or the
        masks are removed.

        Raise AssertionError if the gate refuses.
        """
        self._asked += 1
        name = f"q{self._asked}"
        envelope = self.envelope(name, query, name)
        if query.mechanism.masked:
            assert self.trust is not None
            offer = self.trust.offer(public(self._key), envelope.run)
            batch = int(query.mechanism.sampling.batch(N))
            envelope = with_cohort(envelope, offer, batch, [(self._other, N)])
        reply = decode_reply(self.handle(encode_query(envelope, self._key)), limit=2**24)
        if not query.mechanism.total:
            assert isinstance(reply, Answer), f"the gate refused ({reply})"
            return reply.value[0].double()
        assert hasattr(reply, "box"), f"the gate refused ({reply})"
        if query.mechanism.masked:
            numbers = unmasked(reply.box, envelope, [self._other])  # type: ignore[union-attr]
        else:
            contribution, _ = open_box(reply.box, envelope.shuffle_round, SEAL)  # type: ignore[union-attr]
            numbers = contribution.numbers
        return mean_of(query, torch.from_numpy(numbers), divisor(query))

    def direct(self, query: Query) -> Tensor:
        """Return the answer of the same gate and answerer, without frame and ledger. A hundred such
        answers take as long as one at the door.
        """
        with self.pipeline.planted():
            gate = self.pipeline.gate(self.door._exact, Free(), dim=FEATURES, counts=[N])
            return mean_of(query, gate.answer(query, [0]).value[0, 0], divisor(query))

    def charged(self) -> dict[str, Any]:
        """Return event and amount of the last charge on disk."""
        last = [entry for entry in self.ledger.entries() if entry.act == "charge"][-1]
        return {"event": json.loads(last.event), "amount": last.amount}


def mean_of(query: Query, value: Tensor, records: float) -> Tensor:
    """(d,) float64: what a silo's answer tells of the mean over so many records; of a total it is
    integers in steps of the lattice.
    """
    if not query.mechanism.total:
        return value.double()
    return as_total(query.mechanism).mean_in(value[None], records)[0]


def std_of(query: Query) -> float:
    """Return the standard deviation of a coordinate of an answer as it is priced: sensitivity 2
    clip / divisor, and for local steps that of all steps together.
    """
    m = query.mechanism
    std = query.event().alone().multiplier * 2 * float(m.clip) / divisor(query)
    return std * query.statistic.gain


def centre_of(row: Row, query: Query) -> Tensor:
    """Return the exact answer (d,) of a Gaussian mechanism. It holds on the coordinates that are
    `known`.
    """
    mean = exact_sum(row.statistic) / divisor(query)
    if row.steps == 1:
        return mean
    return -STEP * STEPS * (mean + pull_of(query))
