"""The same algorithms over totals, which a shuffler has added or masks hide the parts of, and the
shares of noise that fill a budget.

An algorithm cannot tell this federation from the other: it asks `fed.mean(query)`. Its mechanisms
are `Shuffled`, so each silo's gate answers with integers for the shuffler, the shuffler passes
their sum on, and the mean comes out here. The mean is over records, whichever silo holds them; for
silos of one size that is the mean over silos.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian, Masked, Shuffled
from silodp.core.privacy.accounting import GDP, ROUND_UP
from silodp.core.query import Query
from silodp.core.weights import Weights
from silodp.server.federation import Channel, Everyone, Federation
from silodp.server.plan import Asked, Plan


class ShuffledFederation(Federation):
    """Ask the silos of this round, and read the mean out of the total. The channel's
    `value` is (J, 1, d): sums over silos.
    """

    def __init__(self, channel: Channel, participation: Everyone, weights: Weights) -> None:
        super().__init__(channel, participation, weights.for_totals())

    def mean(self, query: Query) -> Tensor:
        """(J, d): the mean over all contributed records."""
        found = super().mean(query)
        return found.to(getattr(query.statistic, "w", found))

    def each(self) -> dict[int, Federation]:
        raise BadInput(
            "the server sees totals over silos, so no silo can be asked by itself; use an "
            "algorithm that asks for means"
        )


# --- shares of noise -----------------------------------------------------------------------------


def share_of(mechanism: Gaussian, counted: int, *, masked: bool) -> Shuffled:
    """Return the mechanism of totals with the noise of this one, as far as `counted` silos add
    their shares of it: every silo has the largest share that any silo's budget asks for.
    """
    noise = torch.as_tensor(mechanism.noise_multiplier, dtype=torch.float64)
    if noise.ndim:
        noise = noise.amax(-1, keepdim=True)
    fields = vars(mechanism) | {"noise_multiplier": noise / math.sqrt(counted), "counted": counted}
    kind = Masked if masked else Shuffled
    return kind(**fields)


def in_totals(plan: Plan, counted: int, *, masked: bool, drops: float = 0.0) -> Plan:
    """Return the plan with its means taken from totals, under the noise of `counted` silos at
    least; a share `drops` of the questions is asked, and paid for, once more.
    """
    again = asked_again(plan.asked, drops)
    mechanisms = {kind: share_of(m, counted, masked=masked) for kind, m in plan.mechanisms.items()}
    asked = []
    for one in plan.asked + again:
        event = mechanisms[one.kind].event(one.event.count)
        asked.append(replace(one, event=replace(event, sampling=one.event.sampling)))
    made = Plan(dict(mechanisms), GDP(), asked, plan.counts, plan.budgets)
    if not again:
        return made
    # The price of everything falls with the square of the noise.
    more = made.share_of_budget().max(1, keepdims=True)
    factor = torch.from_numpy(np.sqrt(np.maximum(more, 1.0)) * ROUND_UP)
    noisy = {
        kind: replace(m, noise_multiplier=m.noise_multiplier * factor)
        for kind, m in mechanisms.items()
    }
    return replace(
        made,
        mechanisms=noisy,
        asked=[replace(one, event=noisy[one.kind].noisy(one.event)) for one in asked],
    )


def asked_again(asked: Sequence[Asked], drops: float) -> list[Asked]:
    """Return the questions that are asked once more: of alike ones this share, rounded up, each of
    every silo that is asked any of them.
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
