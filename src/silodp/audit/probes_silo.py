"""Probes of a silo: attacks on what noise must hide, and plain checks of what statistics cannot
see.

They test a simulation, and the door of a deployed silo over frames, restarts, retries and copies.
Statistical probes have a false-alarm rate of 1e-6 each. The others have none, unless two 100-bit
draws of noise agree by chance.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from silodp.audit import normal
from silodp.audit.bounds import epsilon_of, gdp_fit, gdp_lower, refuted
from silodp.audit.canary import ROWS
from silodp.audit.claims import Claims
from silodp.audit.pipeline import (
    BUDGET,
    DIM,
    Blank,
    Caught,
    Free,
    Pipeline,
    Probes,
    Silo,
    question,
)
from silodp.audit.transcript import Case, attack, attack_gate, attack_persons
from silodp.core.errors import BadInput, Refused
from silodp.core.mechanisms import Gaussian
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.privacy.accounting import gdp_mu
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.protocol.codec import OVERHEAD, Answer, decode_reply
from silodp.core.query import Query, Release
from silodp.core.sampling import DisjointBatches, Poisson, WithoutReplacement
from silodp.core.statistics import Grad, GradDiff, Statistic
from silodp.silo.answer.exact import lattice_step
from silodp.silo.data.records import Records
from silodp.silo.ledger import released
from silodp.silo.ledger.durable import DurableLedger
from silodp.testing.sampling import check_sampling

FALSE_ALARM = 1e-6
SIMULATION = Probes("answerer", "gate", "ledger", "calibrate")
DEPLOYMENT = Probes("gate", "exact", "door", "reopen")

# --- simulation ----------------------------------------------------------------------------------


@SIMULATION.probe("transcript attack")
def transcript_attack(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Attack anchors and differences together, against the claim epsilon = 6. The lower bound at
    confidence 1 - 1e-6 must stay below it.
    """
    case = Case("spider", 6.0, {"rounds": 2, "phase": 2, "slope": 1.0})
    mu = gdp_lower(*attack(case, 2000, seed=seed, pipeline=pipeline), FALSE_ALARM)
    if mu > gdp_mu(case.budget):
        raise Caught(
            f"neighbours can be distinguished as at epsilon {epsilon_of(mu, case.delta):.1f} "
            f"or more; the claim is {case.epsilon:g}"
        )


def check_claims(
    case: Case, scores: tuple[np.ndarray, np.ndarray], claims: Claims, who: str
) -> None:
    """Raise Caught if the scores of an attack on totals refute one of the claims that follow from
    their price.
    """
    if refuted(*scores, claims, FALSE_ALARM):
        empirical = epsilon_of(gdp_fit(*scores)[0], case.delta)
        raise Caught(
            f"{who} tell neighbours apart as at epsilon {empirical:.1f}, about; the claim is "
            f"{case.epsilon:g}"
        )


@SIMULATION.probe("noise size and correlation")
def noise(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check the noise of releases on records that pull at nothing: it has the size of the query,
    and is new in every round, silo and run.
    """
    _check_noise(pipeline, range(seed, seed + 4))


@SIMULATION.probe("seeds")
def seeds(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that two seeds that differ in one bit give two noises, from the lowest to the highest
    bit that `silodp train` draws.
    """
    _check_noise(pipeline, [seed, *(seed ^ (1 << bit) for bit in range(44))])


def _check_noise(pipeline: Pipeline, seeds: Sequence[int]) -> None:
    """Raise Caught unless the noise of these seeds is independent and has its size."""
    dim = 1000
    counts = (20, 30, 10)
    multiplier = 2.0
    blank = Records(torch.zeros(3, 30, dim), torch.zeros(3, 30), counts, ("a", "b", "c"))
    answerer = pipeline.answerer(
        Problem(nn.Linear(dim, 1, bias=False), squared_error), blank, seeds
    )
    w = torch.zeros(len(seeds), dim)
    queries = [
        Query(s, Gaussian("probe", 1.0, multiplier)) for s in (Grad(w), Grad(w), GradDiff(w + 1, w))
    ]
    std = multiplier * 2 / torch.tensor(counts, dtype=torch.float64)[:, None]
    noises = [(answerer.answer(query, range(3)).double() / std).flatten(0, 1) for query in queries]
    normal.look(
        torch.cat(noises).numpy(),
        f"simulated releases of {len(seeds)} seeds, 3 silos and 3 rounds",
        FALSE_ALARM,
    )


@SIMULATION.probe("hostile records")
def hostile_records(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check silos with one record each, from zero to NaN. Without noise no gradient or difference
    may be longer than its clip, or not finite.
    """
    random = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(
        [0.0, 1e-42, 1e-3, 1.0, 3.0, 30.0, 1e3, 1e6, 1e12, 1e20, 1e38, math.inf, math.nan]
    )
    x = torch.randn(len(sizes), 1, 4, generator=random) * sizes[:, None, None]
    x[-2:, 0, 1:] = 1.0
    y = torch.cat([torch.full((len(sizes),), 50.0), torch.tensor([math.inf, math.nan, 1e30])])[
        :, None
    ]
    x = torch.cat([x, torch.randn(3, 1, 4, generator=random)])
    records = Records(x, y, (1,) * len(x), tuple(map(str, range(len(x)))))
    problem = Problem(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), squared_error)
    w = torch.randn(20, problem.dim, generator=random)
    answerer = pipeline.answerer(problem, records, [seed])
    cases: list[tuple[Statistic, Tensor | float]] = [(Grad(w), 0.5), (Grad(w), 1e-4)]
    for move in (1.0, 1e-2, 1e-4, 1e-6):
        there = w * (1 + move)
        cases.append(
            (GradDiff(there, w), 0.1 * torch.linalg.vector_norm(there - w, dim=-1, keepdim=True))
        )
    worst = 0.0
    where = ""
    for statistic, clip in cases:
        query = Query(statistic, Gaussian("probe", clip, 0.0))
        value = answerer.answer(query, range(len(x))).double()
        name = type(statistic).__name__
        if not bool(torch.isfinite(value).all()):
            raise Caught(f"{name}: a record that is not finite makes the answer not finite")
        lengths = torch.linalg.vector_norm(value, dim=-1) / torch.as_tensor(clip).double()
        times = float(lengths.max())
        worst, where = max((worst, where), (times, name))
    if worst > 1 + CLIP_TOLERANCE:
        raise Caught(f"{where}: one record contributes {worst:.4g} times the clip")


@SIMULATION.probe("batch membership")
def batches(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that batches are drawn as they are priced: no record counts twice, and each is as
    likely as the price requires.
    """
    for sampling in (WithoutReplacement(0.3), Poisson(0.3), DisjointBatches(3)):
        try:
            check_sampling(sampling, answerer=pipeline.answerer, seed=seed)
        except AssertionError as error:
            raise Caught(str(error)) from None


@SIMULATION.probe("charge before records")
def charge_first(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that no record was read when the ledger refuses."""
    spy = Blank()
    empty_ledger = mock.Mock(**{"charge.side_effect": Refused("budget")})
    try:
        pipeline.gate(spy, empty_ledger, dim=DIM, counts=[12]).answer(question(), [0])
    except Refused:
        pass
    else:
        raise Caught("the gate answers though the ledger refuses")
    if spy.asked:
        raise Caught("the gate looks at records before it charges")


@SIMULATION.probe("bare release")
def bare_release(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that a release is d noisy numbers for each run and silo, and public facts, and nothing
    else.
    """
    query = question()
    release = pipeline.gate(Blank(), Free(), dim=DIM, counts=[12]).answer(query, [0])
    event = release.event
    if type(release) is not Release or set(vars(release)) != {"value", "silos", "event"}:
        raise Caught("a release has fields of its own")
    if release.value.shape != (1, 1, DIM):
        raise Caught(
            f"a release has {release.value.shape[-1]} numbers where the query asks for {DIM}"
        )
    if (event.sampling, event.noise_multiplier, event.count) != (
        query.mechanism.sampling,
        query.mechanism.noise_multiplier,
        1,
    ):
        raise Caught("a release's event is not that of the query")


@SIMULATION.probe("persons")
def persons(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check a person of 20 rows in one direction, or of one row, in place of another. At claim 1 no
    more may be learned about a person than about a record.
    """
    case = Case("mb-sgd", 1.0, {"rounds": 2})
    for first in (ROWS, 1):
        mu = gdp_lower(
            *attack_persons(case, 400, first=first, seed=seed, pipeline=pipeline), FALSE_ALARM
        )
        if mu > gdp_mu(case.budget):
            raise Caught(
                "two persons can be distinguished as at epsilon "
                f"{epsilon_of(mu, case.delta):.1f} or more; the claim is 1"
            )


# --- deployment ----------------------------------------------------------------------------------


@DEPLOYMENT.probe("charge on disk before records")
def durable_charge_first(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that another process finds the charge on disk at the moment when records are read."""
    charges: list[int] = []
    """Charges on disk at each reading of records."""

    class Watching(pipeline.exact):
        def answer(self, query: Query, silos: Sequence[int]) -> Tensor:
            try:
                entries = DurableLedger.open(silo.path).entries()
                charges.append(sum(entry.act == "charge" for entry in entries))
            except (BadInput, Refused):
                # The transaction that charges has not ended.
                charges.append(0)
            return super().answer(query, silos)

    silo = Silo(folder / "silo", replace(pipeline, exact=Watching))
    silo.ask("first", question())
    if set(charges) != {1}:
        raise Caught(
            f"{charges[0]} charges were on disk when records were looked at; there should be one"
        )


@DEPLOYMENT.probe("restarts and old copies")
def restarts(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that over restarts the answers never cost more than the budget, and that a missing or
    an older ledger is refused.
    """
    silo = Silo(folder / "silo", pipeline)
    price = 0.3 * gdp_mu(BUDGET) ** 2
    spent = 0.0
    shutil.copy(silo.path, folder / "older")
    for turn in range(6):
        frame = silo.frame(f"q{turn}", question(1 / math.sqrt(price)))
        reply = decode_reply(silo.handle(frame), limit=2**20)
        if isinstance(reply, Answer):
            spent += price
        silo.restart()
    if spent > gdp_mu(BUDGET) ** 2:
        raise Caught(
            f"with restarts in between, answers worth {spent / gdp_mu(BUDGET) ** 2:.1f} "
            "budgets were given"
        )
    for what in ("older", "missing"):
        silo.path.unlink()
        if what == "older":
            shutil.copy(folder / "older", silo.path)
        try:
            pipeline.reopen(silo.path)
        except BadInput:
            continue
        raise Caught(f"the gate opens with a ledger that is {what}")


@DEPLOYMENT.probe("retries")
def retries(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that the same frame, also after a restart, gets the same bytes and costs nothing."""
    silo = Silo(folder / "silo", pipeline)
    check_retries(silo, silo.frame("once", question()))


def check_retries(silo: Silo, frame: bytes) -> None:
    """Raise Caught unless a repeated frame gets the same bytes and leaves the ledger as it is."""
    first = silo.handle(frame)
    count = silo.ledger.head()
    for again in ("", " after a restart"):
        if silo.handle(frame) != first:
            raise Caught(f"the same query asked again{again} gets another answer")
        if silo.ledger.head() != count:
            raise Caught(f"the same query asked again{again} changes the ledger")
        silo.restart()


@DEPLOYMENT.probe("twin silos")
def entropy(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that two silos, alike to the last byte, answer the same frame with different noise. So
    none of the noise comes from the server.
    """
    twins = [Silo(folder / name, pipeline) for name in ("one", "two")]
    frame = twins[0].frame("same", question())
    one, two = (decode_reply(twin.handle(frame), limit=2**20) for twin in twins)
    if not (isinstance(one, Answer) and isinstance(two, Answer)):
        raise Caught("the gate does not answer")
    if torch.equal(one.value, two.value):
        raise Caught(
            "two silos with the same records give the same answer to the same frame: "
            "its sender can predict the noise"
        )
    if torch.equal(one.value, twins[0].ask("other", question()).value):
        raise Caught("two queries get the same noise")


@DEPLOYMENT.probe("bare reply")
def bare_reply(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that a reply is d numbers, the names and the event of the query, and count and head of
    the released ledger entries, and nothing else about the records.
    """
    silo = Silo(folder / "silo", pipeline)
    query = question()
    frame = silo.frame("bare", query)
    reply = decode_reply(silo.handle(frame), limit=2**20)
    if not isinstance(reply, Answer):
        raise Caught("the gate does not answer")
    if reply.value.shape != (1, DIM):
        raise Caught(f"a reply has {reply.value.numel()} numbers where the query asks for {DIM}")
    head = released.genesis(silo.ledger.settings)
    for entry in silo.ledger.entries():
        head = released.after(head, entry)
        if entry.act == "charge":
            break
    event = reply.event
    mechanism = query.mechanism
    facts = (
        reply.silo,
        reply.query_id,
        reply.digest,
        event.sampling,
        event.noise_multiplier,
        event.count,
        reply.count,
        reply.head,
    )
    digest = hashlib.sha256(frame[OVERHEAD:]).hexdigest()
    public = (
        silo.policy.silo,
        "bare",
        digest,
        mechanism.sampling,
        mechanism.noise_multiplier,
        1,
        *head,
    )
    if facts != public:
        raise Caught(
            "a reply contains something that follows neither from the query nor from the ledger"
        )


@DEPLOYMENT.probe("public lattice")
def on_lattice(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that every released number is on one lattice, gamma / n times the integers, that the
    query alone decides.

    Then every data set can release every number that can be released at all. Float noise has
    another support around each sum. With it there are numbers that only one of two neighbours can
    release (Mironov 2012).
    """
    for target in (0.25, 30.0):
        silo = Silo(folder / f"target-{target}", pipeline, target=target)
        gamma = lattice_step(1.0, DIM)
        n = silo.records.counts[0]
        # The numbers are tested at the gate, and after the door has packed them onto a coarser
        # lattice.
        with pipeline.planted():
            gate = pipeline.gate(silo.door._exact, Free(), dim=DIM, counts=[n])
            release = gate.answer(question(), [0])
        value = [
            *silo.ask("lattice", question()).value.flatten().tolist(),
            *release.value.flatten().tolist(),
        ]
        off = sum(gamma * round(v * n / gamma) / n != v for v in value)
        if off:
            raise Caught(
                f"{off} of {len(value)} released numbers are not on the public lattice of "
                f"step {gamma:.3g} / {n}"
            )


@DEPLOYMENT.probe("persons at the gate")
def persons_at_the_gate(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check persons behind a deployed gate. Every answer at noise multiplier 1 must be 1-GDP."""
    for first in (ROWS, 1):
        mu = gdp_lower(*attack_gate(150, first=first, pipeline=pipeline), FALSE_ALARM)
        if mu > 1:
            raise Caught(
                f"an answer distinguishes two persons as a mechanism of mu {mu:.1f} or "
                "more; 1 is charged"
            )
