"""The paper's shuffle protocol in simulation: silos that add binomial noise, and the noise bits
that fill a budget.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from research.binomial.accountant import MAX_LEVELS, MAX_TRIALS
from research.binomial.mechanism import Binomial
from research.binomial.protocol import EXCESS, least_bits
from research.binomial.rule import Totals, total_share
from silodp.core.errors import BadInput
from silodp.core.events import Event
from silodp.core.mechanisms import Gaussian, Mechanism
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.weights import Weights
from silodp.server.federation import Everyone, Federation, StopRun
from silodp.server.plan import Plan, Run
from silodp.server.plan import calibrate as plan_gaussian
from silodp.server.shuffled import ShuffledFederation
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate
from silodp.silo.ledger.memory import MemoryLedger
from silodp.wire.inprocess import Total

P = 0.5


class BinomialSilos(Simulated):
    """Answers for all silos with whole numbers under binomial noise."""

    def _noisy(self, mean: Tensor, mechanism: Mechanism, silos: Sequence[int]) -> Tensor:
        if isinstance(mechanism, Binomial):
            return self.binomial(mechanism, mean, silos)
        return super()._noisy(mean, mechanism, silos)

    def binomial(self, mechanism: Binomial, mean: Tensor, silos: Sequence[int]) -> Tensor:
        """What each silo sends the shuffler: whole numbers, its records' rounded sum plus Bin(K b,
        p).

        Runs of one world and as many noise bits share their draws. Rounding K records is drawn as
        one Gaussian of its largest variance, K / 4.
        """
        batch = self._batch(mechanism.sampling, silos)
        bits = torch.as_tensor(mechanism.noise_bits).expand(len(self._world), 1)
        keys = list(zip(self._world.tolist(), bits.flatten().tolist(), strict=True))
        kinds = list(dict.fromkeys(keys))
        records = batch.long().numpy()
        shape = tuple(mean.shape[1:])
        rounding, noise = (np.empty((len(kinds), *shape)) for _ in range(2))
        for at, (world, b) in enumerate(kinds):
            rounding[at] = self._generators[world].standard_normal(shape) * np.sqrt(records) / 2
            noise[at] = self._generators[world].binomial(records * b, mechanism.p, shape)
        which = torch.tensor([kinds.index(key) for key in keys], device=mean.device)
        on = {"dtype": torch.float64, "device": mean.device}
        clip, levels = (
            torch.as_tensor(v, **on).reshape(-1, 1, 1) for v in (mechanism.clip, mechanism.levels)
        )
        unit = torch.where(clip > 0, mean.double() / clip, 0.0).clamp_(-1, 1)
        most = batch.to(**on) * levels
        rounded = (
            ((unit + 1) * (most / 2) + torch.from_numpy(rounding).to(**on)[which])
            .round_()
            .clamp_(min=0.0)
            .minimum(most)
        )
        return rounded + torch.from_numpy(noise).to(**on)[which]


class Shuffler:
    """A channel that adds up: what comes out is the sum over silos, (J, 1, d), or nothing."""

    def __init__(self, gate: Gate, counts: Sequence[int]) -> None:
        self._gate = gate
        self._counts = tuple(counts)

    def ask(self, query: Query, silos: Sequence[int]) -> Total:
        release = self._gate.answer(query, silos)
        mechanism = query.mechanism
        records = mechanism.contributed(self._counts[i] for i in release.silos)
        if records < mechanism.contributions:
            raise StopRun(
                f"{records} records were contributed where {mechanism.contributions} are "
                "needed; nothing is passed on"
            )
        return Total(release.value.sum(1, keepdim=True), release.silos)


def connect(
    problem: Problem,
    records: Records,
    plan: Plan,
    seeds: Sequence[int | tuple[int, ...]],
    who: Everyone | None = None,
) -> tuple[Federation, MemoryLedger]:
    """Return a federation over these records behind a shuffler, and its ledger."""
    ledger = MemoryLedger(plan.rule, plan.budgets.tolist(), records.counts)
    silos = BinomialSilos(problem, records, seeds)
    gate = Gate(silos, ledger, dim=problem.dim, counts=records.counts, runs=len(seeds))
    weights = Weights("records", records.counts)
    channel = Shuffler(gate, records.counts)
    return ShuffledFederation(channel, who or Everyone(len(records)), weights), ledger


# --- noise bits that fill a budget ---------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One kind of release: how often a record pays for it, and the Gaussian noise multiplier of the
    same split of the budget.
    """

    name: str
    paid: int
    multiplier: float


def calibrate(
    run: Run,
    mechanisms: Mapping[str, Gaussian],
    budgets: Sequence[Budget],
    counts: Sequence[int],
    participation: Everyone,
    *,
    dimension: int,
    least: int,
    shares: Mapping[str, float] | None = None,
) -> Plan:
    """Levels and noise bits with which `run` as a whole spends each run's budget, if no total of
    fewer than `least` silos is passed on.

    `mechanisms` are the Gaussians of the same schedule; the budget is split between kinds as they
    would split it.
    """
    plan = plan_gaussian(
        run,
        mechanisms,
        [[b] * len(counts) for b in budgets],
        counts,
        participation,
        shares=shares,
        rule="gdp",
    )
    batch = next(iter(plan.mechanisms.values())).sampling
    batches = sorted(int(batch.batch(n)) for n in counts)
    released = sum(batches[:least])  # of any `least` silos: all but the largest
    found = [
        numerical(tuple(kinds_of(plan, run=j, silos=len(counts))), released, dimension, budget)
        for j, budget in enumerate(budgets)
    ]
    rules = [Totals.for_budget(budget) for budget in budgets]

    def chosen(kind: str, which: int) -> torch.Tensor:
        return torch.tensor([[bits.get(kind, (1, 1))[which]] for bits in found])

    noisy = {
        kind: Binomial(kind, m.clip, chosen(kind, 0), chosen(kind, 1), released, P, m.sampling)
        for kind, m in mechanisms.items()
    }
    rule = Totals(
        np.array([[b] for b in budgets], dtype=object), np.array([[r.order] for r in rules])
    )
    asked = [
        replace(
            a,
            event=replace(noisy[a.kind].event(a.event.count, dimension), sampling=a.event.sampling),
        )
        for a in plan.asked
    ]
    return Plan(noisy, rule, asked, plan.counts, plan.budgets)


def kinds_of(plan: Plan, *, run: int, silos: int) -> list[Kind]:
    """The kinds that are asked at all; the noise multiplier is that of the silo that is asked most
    often.
    """
    kinds = []
    for name, mechanism in plan.mechanisms.items():
        if paid := max(_paid(plan, name, silo) for silo in range(silos)):
            multipliers = torch.as_tensor(mechanism.noise_multiplier).expand(
                plan.budgets.shape[0], silos
            )
            kinds.append(Kind(name, paid, float(multipliers[run].max())))
    return kinds


def _paid(plan: Plan, kind: str, silo: int) -> int:
    """How many releases of this kind one record of the silo pays for: all on full batches, one
    batch's on a partition.
    """
    buckets: dict[str, np.ndarray] = {}
    for asked in plan.asked:
        if asked.kind == kind and silo in asked.silos:
            key, price = GDP().price(
                Event(asked.event.sampling, 1.0, asked.event.count), np.zeros(())
            )
            buckets[key] = buckets.get(key, np.zeros(())) + price
    return round(float(GDP().total(buckets)))


@functools.lru_cache(maxsize=256)
def numerical(
    kinds: tuple[Kind, ...], contributions: int, dimension: int, budget: Budget
) -> dict[str, tuple[int, int]]:
    """(levels, noise bits) of each kind: the least noise, in the proportion of the kinds' Gaussian
    variances, that keeps the budget.
    """
    levels = [
        math.ceil(math.sqrt((dimension + contributions / kind.multiplier**2) / (4 * EXCESS)))
        for kind in kinds
    ]
    if max(levels) > MAX_LEVELS:
        raise BadInput(
            f"{max(levels)} levels are needed but the accountant takes {MAX_LEVELS}; use a "
            "smaller dimension or fewer records"
        )
    order = Totals.for_budget(budget).order
    variances = [(kind.multiplier * g) ** 2 for kind, g in zip(kinds, levels, strict=True)]
    most = math.floor(MAX_TRIALS / contributions * min(1.0, variances[0] / max(variances)))

    def at(b: int) -> list[int]:
        return [max(1, math.ceil(b * v / variances[0])) for v in variances]

    def fits(b: int) -> bool:
        try:
            shares = (
                kind.paid * total_share(P, contributions, dimension, budget, float(order), g, bits)
                for kind, g, bits in zip(kinds, levels, at(b), strict=True)
            )
            return sum(shares) <= 1.0
        except BadInput as limit:
            raise BadInput(
                f"epsilon is {budget.epsilon:g}, which is beyond the accountant: {limit}, "
                "by a larger epsilon"
            ) from limit

    bits = least_bits(fits, math.ceil(variances[0] / (P * (1 - P) * contributions)), most)
    if bits is None:
        raise BadInput(
            f"epsilon is {budget.epsilon:g}, which needs more than {MAX_TRIALS} noise bits "
            "in a total, the accountant's limit; "
            "use a larger epsilon or delta, or a smaller dimension"
        )
    return {kind.name: (g, b) for kind, g, b in zip(kinds, levels, at(bits), strict=True)}
