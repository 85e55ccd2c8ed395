"""Probes of prices: each kind of event against an independent integral, files that grow, restarts,
models of two layers, and the places of persons.

Probes of prices draw nothing and raise no false alarm. The probe of two layers allows ten standard
deviations of the noise.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from silodp.audit import prices
from silodp.audit.answers import CROWD, SAMPLINGS, Answering, N, answerable
from silodp.audit.pipeline import BUDGET, DIM, Caught, Pipeline, Probes, Silo, question
from silodp.core.errors import Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget, Committed, Renyi, Rule
from silodp.core.problem.losses import logistic
from silodp.core.problem.problem import Problem
from silodp.core.problem.schema import Schema
from silodp.core.protocol.codec import Answer, decode_reply
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, Sampling, WithoutReplacement
from silodp.core.statistics import Grad, LocalSteps
from silodp.silo.answer import exact as exact_module
from silodp.silo.answer import products as products_module
from silodp.silo.answer import slots as slots_module
from silodp.silo.answer.products import Products
from silodp.silo.data.records import Records
from silodp.silo.data.tables import Table

PRICES = Probes("exact", "gate", "door", "reopen", "table", "pricing")
MULTIPLIERS = (0.35, 1.0, 3.0)
ROUNDING = 1e-6
"""Relative error that an integral may have."""


# --- each kind of event --------------------------------------------------------------------------


@PRICES.probe("independent price of every event")
def price_of_every_event(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that no charge on disk is below the divergence of two laws that an adversary really
    meets.
    """
    with pipeline.pricing():
        silo = Answering(folder / "silo", pipeline, Gaussian)
        # Rare and nearly full batches are tested too, because the price of a full batch is a cap.
        rates = [kind(rate) for kind in (Poisson, WithoutReplacement) for rate in (0.1, 0.95)]
        for sampling in [*SAMPLINGS.values(), *rates]:
            for multiplier in MULTIPLIERS:
                _check_price(silo, sampling, multiplier)


def _check_price(silo: Answering, sampling: Sampling, multiplier: float) -> None:
    """Raise Caught if the charge for a release or for local steps is too low."""
    features = silo.problem.dim
    w = torch.zeros(1, features, dtype=torch.float64)
    for statistic in (Grad(w), LocalSteps(w, 3, 1e-3)):
        query = Query(statistic, Gaussian("audit", 1.0, multiplier, sampling))
        silo.put(query)
        assert isinstance(silo.rule, Renyi)
        least = prices.least_divergence(sampling, multiplier, N, float(silo.rule.order))
        least *= query.statistic.releases
        charged = silo.charged()["amount"]
        if charged < least * (1 - ROUNDING):
            raise Caught(
                f"{type(statistic).__name__}, {sampling}, noise multiplier {multiplier:g}: charged "
                f"is {charged:.4g}, but neighbours really diverge by {least:.4g}"
            )


# --- what a ledger has spent ---------------------------------------------------------------------


class Spending(Silo):
    """A small silo with this rule, which answers these batches."""

    statistics = ("Grad", "LocalSteps")
    samplings = ("FullBatch", "DisjointBatches", "Poisson", "WithoutReplacement")

    def __init__(
        self,
        folder: Path,
        pipeline: Pipeline,
        rule: Rule,
        n: int = 12,
        budget: Budget = BUDGET,
    ) -> None:
        self.rule = rule
        self.budget = budget
        problem, records = self.world(n)
        self.set_up(folder, pipeline, problem, records)

    @staticmethod
    def world(n: int) -> tuple[Problem, Records]:
        """Return a problem, and a silo of n records."""
        x = torch.randn(1, n, DIM, generator=torch.Generator().manual_seed(5))
        problem = Problem(nn.Linear(DIM, 1, bias=False), logistic)
        return problem, Records(x, torch.arange(n)[None] % 2, (n,), ("silo",))

    def try_to_ask(self, name: str, sampling: Sampling, multiplier: float, steps: int = 1) -> bool:
        """Ask a question, and return whether there is an answer."""
        full = question(multiplier)
        query = replace(full, mechanism=replace(full.mechanism, sampling=sampling))
        if steps > 1:
            query = replace(query, statistic=LocalSteps(full.statistic.points[0], steps, 1e-3))
        return isinstance(decode_reply(self.handle(self.frame(name, query)), limit=2**20), Answer)

    def amount(self) -> float:
        """Return the amount of the last charge."""
        return [entry for entry in self.ledger.entries() if entry.act == "charge"][-1].amount


def check_spent(
    silo: Silo, releases: Sequence[tuple[prices.Losses, int]], what: str, budget: Budget
) -> None:
    """Raise Caught if the releases are beyond what the ledger shows as spent, or beyond the
    budget.
    """
    for epsilon in {min(silo.ledger.spent(), budget.epsilon), budget.epsilon}:
        delta = prices.delta_of(releases, epsilon)
        if delta > budget.delta * (1 + 1e-3):
            raise Caught(
                f"{what}: the ledger shows epsilon {silo.ledger.spent():.4g} of "
                f"{budget.epsilon:g} at delta {budget.delta:g}, but at epsilon {epsilon:.4g} what "
                f"was answered has delta {delta:.3g}"
            )


@PRICES.probe("independent spend")
def independent_spend(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that the answers of a ledger, until it refuses, together have no more delta than it
    shows.
    """
    multiplier = 2.2
    poisson = Poisson(0.3)
    with pipeline.pricing():
        for name, samplings in (
            ("full batches", [FullBatch()]),
            ("one batch again and again", [DisjointBatches(2, 0)]),
            ("full batches and a batch", [FullBatch(), DisjointBatches(2, 0)]),
        ):
            silo = Spending(folder / name.replace(" ", "-"), pipeline, GDP())
            count = 0
            while count < 40:
                sampling = samplings[count % len(samplings)]
                if not silo.try_to_ask(f"q{count}", sampling, multiplier):
                    break
                count += 1
            (pair,) = prices.pairs_of(FullBatch(), multiplier, 12)
            check_spent(silo, [(prices.losses_of(pair), count)], name, silo.budget)
        silo = Spending(folder / "steps", pipeline, GDP())
        assert silo.try_to_ask("steps", FullBatch(), 4.0, steps=4), "the gate refused"
        (pair,) = prices.pairs_of(FullBatch(), 4.0, 12)
        check_spent(silo, [(prices.losses_of(pair), 4)], "four local steps", silo.budget)
        rule = Committed((Event(poisson, 0.7, 6),))
        silo = Spending(folder / "committed", pipeline, rule)
        count = sum(silo.try_to_ask(f"q{k}", poisson, 0.7) for k in range(7))
        (pair,) = prices.pairs_of(poisson, 0.7, 12)
        check_spent(silo, [(prices.losses_of(pair), count)], "a committed schedule", silo.budget)


class Totalling(Answering):
    """A silo of totals with a budget that ends."""

    budget = Budget(6.0, 1e-5)


@PRICES.probe("independent spend of totals")
def independent_spend_of_totals(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check the same of totals, by the noise of as many shares as the question counts on."""
    (row,) = (
        row
        for row in answerable()
        if row.statistic is Grad and row.mechanism.__name__ == "Shuffled" and row.sampling.whole
    )
    share = 4.0
    query = row.query()
    mechanism = replace(query.mechanism, noise_multiplier=share)
    (pair,) = prices.pairs_of(FullBatch(), share * math.sqrt(CROWD), N)
    with pipeline.pricing():
        silo = Totalling(folder / "silo", pipeline, row.mechanism)
        count = 3
        for _ in range(count):
            silo.put(replace(query, mechanism=mechanism))
        check_spent(silo, [(prices.losses_of(pair), count)], "totals", silo.budget)


@PRICES.probe("sum that is not Gaussian")
def sum_that_is_not_gaussian(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that no ledger charges a total of so many silos with so small shares, of 2.6 steps of
    the lattice, that nothing proves its sum to be Gaussian. It does not matter how much noise there
    is in all.
    """
    event = TotalEvent(FullBatch(), 2e-5, counted=2**20)
    assert event.multiplier > 0.02
    with pipeline.pricing():
        ledger = pipeline.ledger(GDP(), Budget(3000.0, 1e-5), [12])
        try:
            ledger.charge(event, [0])
        except Refused:
            return
    raise Caught("a ledger charges for a sum of rounded Gaussians that is far from Gaussian")


# --- files that grow, and restarts ---------------------------------------------------------------


@PRICES.probe("price of a grown file")
def price_of_a_grown_file(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that a ledger made for 12 records prices by 48, once the file has them. A batch without
    replacement is then a larger part of it.
    """
    rate = 0.16
    order = 2.0
    multiplier = 0.35
    with pipeline.pricing():
        silo = Spending(folder / "silo", pipeline, Renyi(order), budget=Budget(60.0, 1e-5))
        for n in (12, 48):
            if n != 12:
                _, grown = silo.world(n)
                x = torch.cat([silo.records.x, grown.x[:, 12:]], 1)
                silo.records = Records(x, grown.y, (n,), ("silo",))
                silo.restart()
            sampling = WithoutReplacement(rate)
            assert silo.try_to_ask(f"of-{n}", sampling, multiplier), "the gate refused"
            least = prices.least_divergence(sampling, multiplier, n, order)
            if silo.amount() < least * (1 - ROUNDING):
                raise Caught(
                    f"a file of {n} records, whose ledger was made for 12: charged is "
                    f"{silo.amount():.4g}, but neighbours really diverge by {least:.4g}"
                )


@PRICES.probe("price after a restart")
def price_after_a_restart(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that a ledger that is opened again shows the same spend, and prices the same question
    alike.
    """
    with pipeline.pricing():
        silo = Spending(folder / "silo", pipeline, Renyi(2.0), budget=Budget(60.0, 1e-5))
        amounts: list[float] = []
        for turn in range(4):
            assert silo.try_to_ask(f"q{turn}", Poisson(0.3), 2.0), "the gate refused"
            amounts.append(silo.amount())
            spent = silo.ledger.spent()
            silo.restart()
            if silo.ledger.spent() != spent:
                raise Caught(
                    f"the ledger showed {spent:.4g} as spent, and {silo.ledger.spent():.4g} "
                    "after a restart"
                )
        if max(amounts) > min(amounts) * (1 + 1e-12):
            raise Caught(
                f"the same question costs {amounts[0]:.4g} at first, and {min(amounts):.4g} after "
                "a restart"
            )


@PRICES.probe("spend over an edit")
def spend_over_an_edit(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that the spend before an edit stays, and that both batches are paid for if a record is
    in another batch of the same partition afterwards.
    """
    multiplier = 3.0
    with pipeline.pricing():
        for name, samplings in (
            ("full batches", (FullBatch(), FullBatch())),
            ("batches of one name", (DisjointBatches(2, 0), DisjointBatches(2, 1))),
        ):
            silo = Spending(folder / name.replace(" ", "-"), pipeline, GDP())
            for turn, sampling in enumerate(samplings):
                if turn:
                    x = silo.records.x.clone()
                    x[0, 3, 0] += 1.0
                    silo.records = replace(silo.records, x=x)
                    silo.restart()
                assert silo.try_to_ask(f"q{turn}", sampling, multiplier), "the gate refused"
            (pair,) = prices.pairs_of(FullBatch(), multiplier, 12)
            check_spent(silo, [(prices.losses_of(pair), 2)], f"{name} around an edit", silo.budget)


# --- two layers ----------------------------------------------------------------------------------


class TwoLayers(Silo):
    """A deployed silo with a model that is summed by products of layers: Linear, ReLU, Linear."""

    n = 40
    samplings = ("FullBatch", "Poisson")
    rule = Renyi(2.0)
    budget = Budget(1e12, 1e-5)

    def __init__(self, folder: Path, pipeline: Pipeline) -> None:
        random = torch.Generator().manual_seed(8)
        x = torch.randn(1, self.n, 6, generator=random)
        x *= 10.0 ** (torch.arange(self.n) % 4 - 2)[:, None]
        y = torch.arange(self.n)[None] % 2
        problem = Problem(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1)), logistic)
        # Chunks of four records, so that there are several.
        with mock.patch.object(products_module, "MOST", 4):
            self.set_up(folder, pipeline, problem, Records(x, y, (self.n,), ("silo",)))
        if self.door._exact._products is None:
            raise AssertionError(
                "two linear layers are not summed by products, so the audit does not cover them"
            )
        self.w = torch.randn(1, problem.dim, generator=random, dtype=torch.float64)

    def mean(self, clip: float) -> torch.Tensor:
        """Return the mean (d,) of the clipped gradients, computed for each record in float64 by
        autograd.
        """
        total = torch.zeros(self.problem.dim, dtype=torch.float64)
        for x, y in zip(self.records.x[0].double(), self.records.y[0], strict=True):
            point = self.w.clone().requires_grad_()
            loss = self.problem.losses(point, x[None], y[None]).sum()
            (gradient,) = torch.autograd.grad(loss, point)
            total += gradient[0] * min(1.0, clip / float(gradient.norm()))
        return total / self.n


@PRICES.probe("two layers")
def two_layers(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that a full batch of a model with two layers is the mean of gradients, each clipped as
    one vector.
    """
    silo = TwoLayers(folder / "silo", pipeline)
    clip = 0.5
    multiplier = 1e-3
    query = Query(Grad(silo.w), Gaussian("audit", clip, multiplier))
    off = float((silo.ask("two-layers", query).value[0].double() - silo.mean(clip)).abs().max())
    std = multiplier * 2 * clip / silo.n
    if off > 10 * std:
        raise Caught(
            f"a model of two layers: the answer is off by {off / std:.3g} standard deviations of "
            "its noise"
        )


@PRICES.probe("work of a batch")
def work_of_a_batch(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that every chunk of records is computed, for every batch that is drawn. Otherwise the
    time of an answer would reveal who is in a secret batch.
    """
    silo = TwoLayers(folder / "silo", pipeline)
    query = Query(Grad(silo.w), Gaussian("audit", 0.5, 1.0, Poisson(0.05)))
    for turn in range(8):
        _check_work(silo, f"products-{turn}", query, Products, "_records")
    # Other models are asked record by record, here in chunks of four too.
    silo.door._exact._products = None
    with mock.patch.object(slots_module, "CHUNK", 4 * silo.problem.dim):
        for turn in range(8):
            _check_work(silo, f"alone-{turn}", query, exact_module, "computed")


def _check_work(silo: TwoLayers, name: str, query: Query, where: Any, function: str) -> None:
    """Raise Caught unless an answer calls this function once for each chunk of four records."""
    lock = threading.Lock()
    count = [0]
    chunks = -(-silo.n // 4)
    shipped = getattr(where, function)

    def counted(*words: Any, **more: Any) -> Any:
        with lock:
            count[0] += 1
        return shipped(*words, **more)

    with mock.patch.object(where, function, counted):
        silo.ask(name, query)
    if count[0] != chunks:
        raise Caught(
            f"an answer on a secret batch computes {count[0]} of {chunks} chunks of records: "
            "its time reveals the chunks without a drawn record"
        )


# --- the places of persons -----------------------------------------------------------------------

PEOPLE = 60
CAP = 3
SHARE = 0.25
SCHEMA = Schema.of(
    {
        "person": "patient",
        "rows_per_person": CAP,
        "columns": {
            "number": {"type": "number", "range": [0, 1000]},
            "age": {"type": "number", "range": [0, 100]},
        },
        "label": {"column": "ill", "task": "binary", "classes": ["no", "yes"]},
    }
)


class People(Silo):
    """A deployed silo with a file of up to six rows of each of 60 persons, some spelled in two
    ways.
    """

    held_out = SHARE

    def __init__(self, folder: Path, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.age = 40
        problem = Problem(nn.Linear(2, 1, bias=False), logistic, person=SCHEMA.person)
        table = self.read()
        self.raw = table.raw
        self.set_up(folder, pipeline, problem, self.records_of(table))

    def read(self) -> Table:
        """Return the file as the pipeline reads it by the schema."""
        person_of = np.repeat(np.arange(PEOPLE), np.arange(PEOPLE) % 6 + 1)
        ids = [f"P{k}" if row % 2 else f" p{k} " for row, k in enumerate(person_of)]
        ages = (np.arange(len(person_of)) * 7 % 90).astype(float)
        ages[3] = self.age
        cells = {
            "patient": np.array(ids, object),
            "number": person_of.astype(float),
            "age": ages,
            "ill": np.where(person_of % 2 == 0, "yes", "no").astype(object),
        }
        return self.pipeline.table("people.csv", cells, SCHEMA)

    @staticmethod
    def records_of(table: Table) -> Records:
        """Return the records of a file."""
        return Records.of([(table.x, table.y)], ["silo"])

    def edit(self) -> None:
        """Change one cell of one row, and start the gate again."""
        self.age += 1
        table = self.read()
        self.raw = table.raw
        self.records = self.records_of(table)
        self.restart()

    def places(self) -> list[set[int]]:
        """Return the persons with a row at each place."""
        x = self.door._exact._x.double()
        y = self.door._exact._y
        numbers = ((x[..., 0] + 1) * 500).round().long()
        return [set(row[filled].tolist()) for row, filled in zip(numbers, y >= 0, strict=True)]

    def people_held_out(self) -> set[int]:
        """Return the persons whose records are held out."""
        pairs = zip(self.places(), self.door._exact._held, strict=True)
        return {number for numbers, aside in pairs if aside for number in numbers}


@PRICES.probe("places of persons")
def places_of_persons(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that each person of a file has one place with all of its rows, that no list number
    decides the place, and that the person stays in its part through an edit.
    """
    twins = [People(folder / name, pipeline) for name in ("one", "two")]
    for silo in twins:
        places = silo.places()
        numbers = [number for place in places for number in place]
        if any(len(place) != 1 for place in places) or sorted(numbers) != list(range(PEOPLE)):
            raise Caught(
                f"a file of {PEOPLE} persons has {len(places)} places, of which "
                f"{len(numbers) - len(set(numbers))} have a person that another one has too"
            )
    one, two = twins
    same_parts = one.people_held_out() == two.people_held_out()
    if one.places() == two.places() or same_parts:
        raise Caught(
            "two silos with the same file give persons the same places: they follow from the file"
        )
    before = one.places()
    held = one.people_held_out()
    one.restart()
    if one.places() != before:
        raise Caught("after a restart persons have other places, which no charge knows of")
    one.edit()
    moved = held - one.people_held_out()
    if one.people_held_out() != held:
        raise Caught(
            f"after one edited cell {len(moved)} of {len(held)} held-out persons are trained on"
        )
