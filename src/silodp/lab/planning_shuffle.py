"""`silodp plan --trust masks` or `shuffle`: what totals send, add and spend, beside ISRL-DP and central DP, before any data is touched.

Releases are counted by the same dry run as under ISRL-DP, and the budget is split between anchors and differences in the same shares.
ISRL-DP and central DP are accounted exactly (GDP), so what the binomial accountant loses in its Renyi conversion shows in the figures.
The mean in a total is over records, whichever silo holds them; under ISRL-DP it is over silos. For silos of one size these are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from silodp.core.events import TotalEvent
from silodp.core.mechanisms import shuffle
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.privacy.accounting import Budget
from silodp.core.privacy.totals import Schedule
from silodp.core.sampling import FullBatch, Sampling
from silodp.core.theory import shuffle as theory_shuffle
from silodp.server import shuffled
from silodp.server.order import Order
from silodp.server.prepare import Prepared, constants_of, prepare


@dataclass(frozen=True)
class _Kind(shuffled.Kind):
    """One kind of release, with the Gaussian noise multiplier in each silo, and its clip. `multiplier`, the largest, is central DP's too."""

    multipliers: tuple[float, ...]
    clip: float


def planned_totals(order: Order, records: Sequence[int], names: Sequence[str], dimension: int | None) -> dict:
    """The answer that `silodp plan --trust masks --json` or `shuffle` prints; the figures are those of the first kind of release.

    "differences" has them for the second kind, where there is one; "theory" the theorem, where its constants are given.
    """
    made = prepare(order, names, records, dimension=dimension)
    assert dimension is not None
    budget, sampling, who = made.budgets[0], next(iter(made.samplings.values())), made.participation()
    batches = sorted(int(sampling.batch(n)) for n in records)
    answering, released = getattr(who, "answering", who.silos), next(iter(made.plan.mechanisms.values())).contributions
    kinds = _kinds(order, names, records, made.budgets)
    found = [_parameters(made, kind) for kind in kinds]
    local = _spent(kinds, found, batches[0], dimension, budget.delta)
    seen_by = "shuffler" if order.trust == "shuffle" else "all_others"
    spent = {"server": _spent(kinds, found, released, dimension, budget.delta), seen_by: local if math.isfinite(local) else None}
    contributions = round(answering * sum(batches) / len(batches))
    answers = [
        {
            "bits_per_silo_round": shuffle.message_bits(parameters, batches[-1], dimension) | _masked_bits(made, kind, dimension),
            "noise_std": {
                order.trust: math.sqrt(float(shuffle.variance(parameters, contributions, kind.clip))),
                "isrl": _isrl(kind, records, sampling, answering),
                "central": kind.multiplier * 2 * kind.clip * (1 + CLIP_TOLERANCE) / contributions,
            },
            "parameters": asdict(parameters) | {"levels_per_sqrt_d": parameters.levels / math.sqrt(dimension)},
            "proven": _proven(kind, len(kinds), released, contributions, batches[-1], dimension, budget),
        }
        for kind, parameters in zip(kinds, found, strict=True)
    ]
    answer = answers[0] | {"epsilon": spent, "delta": budget.delta}
    if len(answers) > 1:
        answer["differences"] = answers[1]
    if order.theory:
        constants = constants_of(order, budget, records, dimension, answering)
        answer["theory"] = theory_shuffle.prescribe(order.algorithm, constants).as_dict()
    return answer


def _kinds(order: Order, names: Sequence[str], records: Sequence[int], budgets: Sequence[Budget]) -> list[_Kind]:
    """The kinds of release with the noise multipliers that fill the one budget under ISRL-DP in every silo."""
    silos, plan = len(records), prepare(order.under("isrl"), names, records, budgets=budgets).plan
    plan = replace(plan, asked=plan.asked + shuffled.asked_again(plan.asked, order.drops))
    return [
        _Kind(
            **asdict(kind),
            multipliers=tuple(torch.as_tensor(plan.mechanisms[kind.name].noise_multiplier).reshape(-1).expand(silos).tolist()),
            clip=order.clip * (2 if kind.name == "refine" else 1),
        )
        for kind in shuffled.kinds_of(plan, run=0, silos=silos)
    ]


def _parameters(made: Prepared, kind: _Kind) -> shuffle.Parameters:
    """Least noise bits at which a ledger of totals lets all releases pass; what they spend by the accountant's best order is a little less."""
    mechanism = made.plan.mechanisms[kind.name]
    return shuffle.Parameters(int(mechanism.levels), int(mechanism.noise_bits), mechanism.p)


def _masked_bits(made: Prepared, kind: _Kind, dimension: int) -> dict[str, int]:
    mechanism = made.plan.mechanisms[kind.name]
    return {"masked": mechanism.modulus * dimension} if mechanism.masked else {}


def _spent(kinds: Sequence[_Kind], found: Sequence[shuffle.Parameters], contributions: int, dimension: int, delta: float) -> float:
    """Against whoever sees totals of so many contributions; infinite where the accountant can give no bound."""
    made = Schedule()
    for kind, p in zip(kinds, found, strict=True):
        made.add("", TotalEvent(FullBatch(), p.levels, p.noise_bits, p.p, contributions, dimension, kind.paid))
    return made.epsilon(delta)


def _isrl(kind: _Kind, records: Sequence[int], sampling: Sampling, answering: int) -> float:
    """Noise std of the mean over M silos, each with the noise that its own budget needs."""
    own = [z * 2 * kind.clip * (1 + CLIP_TOLERANCE) / sampling.batch(n) for z, n in zip(kind.multipliers, records, strict=True)]
    return math.sqrt(sum(s * s for s in own) / len(own) / answering)


def _proven(kind: _Kind, kinds: int, released: int, contributions: int, largest: int, dimension: int, budget: Budget) -> dict:
    """The proven parameters for the same releases: the budget shared equally by the kinds, and composed within each."""
    each, rest = theory_shuffle.per_call(budget.epsilon / kinds, budget.delta / kinds, kind.paid)
    made = shuffle.proven(released, dimension, each, rest)
    return {
        **asdict(made),
        "epsilon_per_release": each,
        "delta_per_release": rest,
        "bits_per_silo_round": shuffle.message_bits(made, largest, dimension),
        "noise_std": math.sqrt(float(shuffle.variance(made, contributions, kind.clip))),
    }
