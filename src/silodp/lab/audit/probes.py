"""What an examiner tries on a simulated pipeline: attacks where noise must hide, plain checks where statistics cannot see.

A probe takes a pipeline, a seed and an empty folder, and raises Caught with one sentence if something is wrong. Statistical probes have
a false-alarm rate of 1e-6 each; the others have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import torch
from scipy import stats
from torch import Tensor, nn

from silodp.core.errors import Refused
from silodp.core.mechanisms import Gaussian
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.privacy.accounting import gdp_mu
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.query import Query, Release
from silodp.core.sampling import DisjointBatches, Poisson, WithoutReplacement
from silodp.core.statistics import Grad, GradDiff, Statistic
from silodp.lab.audit.bounds import epsilon_of, gdp_lower
from silodp.lab.audit.pipeline import DIM, Pipeline, question
from silodp.lab.audit.transcript import Case, attack
from silodp.silo.data.records import Records
from silodp.testing.sampling import check_sampling

FALSE_ALARM = 1e-6
Probe = Callable[[Pipeline, int, Path], None]


class Caught(Exception):
    """Something is wrong with the pipeline; the message says what."""


def transcript_attack(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Anchors and differences together, against the claim epsilon = 6: the lower bound at confidence 1 - 1e-6 must stay below it."""
    case = Case("spider", 6.0, {"rounds": 2, "phase": 2, "slope": 1.0})
    mu = gdp_lower(*attack(case, 2000, seed=seed, pipeline=pipeline), FALSE_ALARM)
    if mu > gdp_mu(case.budget):
        raise Caught(f"neighbours can be told apart as at epsilon {epsilon_of(mu, case.delta):.1f} or more; the claim is {case.epsilon:g}")


def noise(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """On records that pull at nothing a release is its noise: of the size that the query says, and new in every round, silo and run."""
    _check_noise(pipeline, range(seed, seed + 4))


def seeds(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Two seeds that differ in one bit, the lowest or the highest that `silodp train` draws, give two noises."""
    _check_noise(pipeline, [seed, *(seed ^ (1 << bit) for bit in range(44))])


def _check_noise(pipeline: Pipeline, seeds: Sequence[int]) -> None:
    dim, counts, multiplier = 1000, (20, 30, 10), 2.0
    blank = Records(torch.zeros(3, 30, dim), torch.zeros(3, 30), counts, ("a", "b", "c"))
    answerer = pipeline.answerer(Problem(nn.Linear(dim, 1, bias=False), squared_error), blank, seeds)
    w = torch.zeros(len(seeds), dim)
    queries = [Query(s, Gaussian("probe", 1.0, multiplier)) for s in (Grad(w), Grad(w), GradDiff(w + 1, w))]
    std = multiplier * 2 / torch.tensor(counts, dtype=torch.float64)[:, None]
    drawn = {k: answerer.answer(query, range(3)).double() / std for k, query in enumerate(queries)}
    names = [f"round {r}, seed {s}, silo {i}" for r, s, i in product(drawn, seeds, range(3))]
    vectors = torch.stack(list(drawn.values())).reshape(len(names), dim)
    _check_sizes(vectors, names)
    limit = stats.norm.isf(FALSE_ALARM / len(names) ** 2) / math.sqrt(dim)
    matrix = torch.corrcoef(vectors).fill_diagonal_(0).abs()
    worst = int(matrix.argmax())
    if float(matrix.max()) > limit:
        a, b = names[worst // len(names)], names[worst % len(names)]
        raise Caught(f"the noise of ({a}) and that of ({b}) have a correlation of {float(matrix.max()):.2f}")


def _check_sizes(vectors: Tensor, names: list[str]) -> None:
    low, high = stats.chi2.interval(1 - FALSE_ALARM / len(names), vectors.shape[1])
    for name, total in zip(names, vectors.square().sum(1).tolist(), strict=True):
        if not low < total < high:
            raise Caught(f"({name}) has {math.sqrt(total / vectors.shape[1]):.2f} times the noise that the query asks for")


def hostile_records(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Each silo holds one record, from zero to NaN: without noise, no gradient or difference is longer than its clip or not finite."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([0.0, 1e-42, 1e-3, 1.0, 3.0, 30.0, 1e3, 1e6, 1e12, 1e20, 1e38, math.inf, math.nan])
    x = torch.randn(len(sizes), 1, 4, generator=random) * sizes[:, None, None]
    x[-2:, 0, 1:] = 1.0
    y = torch.cat([torch.full((len(sizes),), 50.0), torch.tensor([math.inf, math.nan, 1e30])])[:, None]
    x = torch.cat([x, torch.randn(3, 1, 4, generator=random)])
    records = Records(x, y, (1,) * len(x), tuple(map(str, range(len(x)))))
    problem = Problem(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), squared_error)
    w = torch.randn(20, problem.dim, generator=random)
    answerer = pipeline.answerer(problem, records, [seed])
    cases: list[tuple[Statistic, Tensor | float]] = [(Grad(w), 0.5), (Grad(w), 1e-4)]
    for move in (1.0, 1e-2, 1e-4, 1e-6):
        there = w * (1 + move)
        cases.append((GradDiff(there, w), 0.1 * torch.linalg.vector_norm(there - w, dim=-1, keepdim=True)))
    worst, where = 0.0, ""
    for statistic, clip in cases:
        value = answerer.answer(Query(statistic, Gaussian("probe", clip, 0.0)), range(len(x))).double()
        name = type(statistic).__name__
        if not bool(torch.isfinite(value).all()):
            raise Caught(f"{name}: a record that is not finite makes the answer not finite")
        times = float((torch.linalg.vector_norm(value, dim=-1) / torch.as_tensor(clip).double()).max())
        worst, where = max((worst, where), (times, name))
    if worst > 1 + CLIP_TOLERANCE:
        raise Caught(f"{where}: one record contributes {worst:.4g} times the clip")


def batches(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Batches are drawn as they are accounted for: nobody counts twice, and everybody is as likely as the price says."""
    for sampling in (WithoutReplacement(0.3), Poisson(0.3), DisjointBatches(3)):
        try:
            check_sampling(sampling, answerer=pipeline.answerer, seed=seed)
        except AssertionError as error:
            raise Caught(str(error)) from None


class _Spy:
    """An answerer without records that notes whether it was asked."""

    asked = False

    def answer(self, query: Query, silos: object) -> Tensor:
        self.asked = True
        return torch.zeros(query.statistic.shape)[:, None]


class _Broke:
    def charge(self, event: object, silos: object) -> None:
        raise Refused("budget")


class _Free:
    def charge(self, event: object, silos: object) -> None:
        pass


def charge_first(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """When the ledger refuses, no record has been looked at."""
    spy = _Spy()
    try:
        pipeline.gate(spy, _Broke(), dim=DIM, counts=[12]).answer(question(), [0])
    except Refused:
        pass
    else:
        raise Caught("the gate answers though the ledger refuses")
    if spy.asked:
        raise Caught("the gate looks at records before it charges")


def bare_release(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """A release is d noisy numbers for each run and silo, and public facts; nothing rides along."""
    query = question()
    release = pipeline.gate(_Spy(), _Free(), dim=DIM, counts=[12]).answer(query, [0])
    event = release.event
    if type(release) is not Release or set(vars(release)) != {"value", "silos", "event"}:
        raise Caught("a release has fields of its own")
    if release.value.shape != (1, 1, DIM):
        raise Caught(f"a release has {release.value.shape[-1]} numbers where the query asks for {DIM}")
    if (event.sampling, event.noise_multiplier, event.count) != (query.mechanism.sampling, query.mechanism.noise_multiplier, 1):
        raise Caught("a release's event is not that of the query")


SIMULATION: dict[str, Probe] = {
    "transcript attack": transcript_attack,
    "noise size and correlation": noise,
    "seeds": seeds,
    "hostile records": hostile_records,
    "batch membership": batches,
    "charge before records": charge_first,
    "bare release": bare_release,
}
