"""The same algorithms over totals, which a shuffler has added or masks hide the parts of, and the
noise bits that fill a budget.

An algorithm cannot tell this federation from the other: it asks `fed.mean(query)`. Its mechanisms
are `Shuffled`, so each silo's gate answers with whole numbers for the shuffler, the shuffler passes
their sum on, and the analyzer's estimate of the mean comes out here. The mean is over records,
whichever silo holds them; for silos of one size that is the mean over silos.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.events import Event
from silodp.core.mechanisms import Gaussian, Masked, Shuffled
from silodp.core.mechanisms.shuffle import EXCESS, least_bits
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.privacy.binomial import MAX_LEVELS, MAX_TRIALS
from silodp.core.privacy.totals import Totals, total_share
from silodp.core.protocol.masks import modulus_for
from silodp.core.query import Query
from silodp.core.weights import Weights
from silodp.server.federation import Channel, Everyone, Federation
from silodp.server.plan import Asked, Plan, Run, calibrate

P = 0.5


class ShuffledFederation(Federation):
    """Asks whoever takes part in this round, and reads the mean out of the total. The channel's
    `value` is (J, 1, d): sums over silos.
    """

    def __init__(self, channel: Channel, participation: Everyone, weights: Weights) -> None:
        super().__init__(channel, participation, weights.for_totals())

    def mean(self, query: Query) -> Tensor:
        """(J, d): the analyzer's unbiased estimate of the mean over all contributed records."""
        found = super().mean(query)
        return found.to(getattr(query.statistic, "w", found))

    def each(self) -> dict[int, Federation]:
        raise BadInput(
            "the server sees totals over silos, so no silo can be asked by itself; use an "
            "algorithm that asks for means"
        )


# --- noise bits that fill a budget ---------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One kind of release: how often a record pays for it, and the Gaussian noise multiplier of the
    same split of the budget.
    """

    name: str
    paid: int
    multiplier: float


def calibrate_shuffled(
    run: Run,
    mechanisms: Mapping[str, Gaussian],
    budgets: Sequence[Budget],
    counts: Sequence[int],
    participation: Everyone,
    *,
    dimension: int,
    least: int,
    shares: Mapping[str, float] | None = None,
    colluding: int | None = None,
    drops: float = 0.0,
) -> Plan:
    """Levels and noise bits with which `run` as a whole spends each run's budget, if no total of
    fewer than `least` silos is passed on.

    `mechanisms` are the Gaussians of the same schedule; the budget is split between kinds as they
    would split it. With `colluding` the totals are masked, and count on the noise of all but so
    many silos, the largest; a share `drops` of the questions is asked, and paid for, once more.
    """
    plan = calibrate(
        run,
        mechanisms,
        [[b] * len(counts) for b in budgets],
        counts,
        participation,
        shares=shares,
        rule="gdp",
    )
    plan = replace(plan, asked=plan.asked + asked_again(plan.asked, drops))
    batch = next(iter(plan.mechanisms.values())).sampling
    batches = sorted(int(batch.batch(n)) for n in counts)
    released = sum(batches[: least - (colluding or 0)])  # of any `least` silos: all but the largest
    found = [
        numerical(tuple(kinds_of(plan, run=j, silos=len(counts))), released, dimension, budget)
        for j, budget in enumerate(budgets)
    ]
    rules = [Totals.for_budget(budget) for budget in budgets]

    def chosen(kind: str, which: int) -> torch.Tensor:
        return torch.tensor([[bits.get(kind, (1, 1))[which]] for bits in found])

    noisy = {
        kind: Shuffled(kind, m.clip, chosen(kind, 0), chosen(kind, 1), released, P, m.sampling)
        for kind, m in mechanisms.items()
    }
    if colluding is not None:
        largest = sum(batches) * max(int((m.levels + m.noise_bits).max()) for m in noisy.values())
        noisy = {kind: Masked(**vars(m), modulus=modulus_for(largest)) for kind, m in noisy.items()}
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


def asked_again(asked: Sequence[Asked], drops: float) -> list[Asked]:
    """The questions that are asked once more: of alike ones this share, rounded up, each of whoever
    is asked any of them.
    """
    alike: dict[tuple, list[Asked]] = {}
    for one in asked if drops else ():
        alike.setdefault((one.kind, one.event.sampling), []).append(one)
    everybody = {
        key: tuple(sorted({silo for one in some for silo in one.silos}))
        for key, some in alike.items()
    }
    return [
        replace(some[0], silos=everybody[key])
        for key, some in alike.items()
        for _ in range(math.ceil(drops * len(some)))
    ]


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
