"""`silodp plan`: what an order will release and spend, before any data is touched."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from silodp.core.errors import BadInput
from silodp.core.events import TotalEvent
from silodp.core.mechanisms import shuffle
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.privacy.accounting import Budget, gdp_to_zcdp, rounded_up, user_level
from silodp.core.privacy.totals import Schedule
from silodp.core.sampling import FullBatch, Sampling
from silodp.core.text import visible
from silodp.core.theory import shuffle as theory_shuffle
from silodp.server import shuffled
from silodp.server.federation import Everyone
from silodp.server.order import Order, default_delta, targets, with_default_delta
from silodp.server.plan import Plan
from silodp.server.prepare import Prepared, constants_of, prepare, prescription


def planned(order: Order, records: Sequence[int], *, dimension: int | None = None) -> dict:
    """The answer that `silodp plan --json` prints under the order's trust, for silos of so many
    records.

    "releases" and the totals are those of the first silo, "silos" has them all; under central trust
    all records are in one.
    """
    if dimension is not None and dimension < 1:
        raise BadInput(
            f"dimension is {dimension}; --dimension is the number of parameters of the "
            "model, 1 or more"
        )
    names = named(records)
    if order.totals:
        return planned_totals(order, records, names, dimension)
    promised = targets(order, names, records)
    made = prepare(order, names, records, dimension=dimension)
    plan = made.plan
    order = made.order
    budgets = made.budgets
    counts = tuple(records)
    if order.trust == "central":
        counts = (_curated(made.participation(), records),)
    spent = np.broadcast_to(plan.spent(), (1, len(budgets)))[0]
    found = plan.mu()
    if found is None:
        mu = None
    else:
        mu = np.broadcast_to(found, (1, len(budgets)))[0].tolist()
    silos = [
        {
            "records": n,
            "releases": [
                _release(plan, kind, i, n, order.clip)
                for kind in made.algorithm.kinds
                if plan.count(kind, i)
            ],
            **asdict(budget),
            "mu": mu[i] if mu else None,
            "spent_epsilon": float(spent[i]),
        }
        for i, (n, budget) in enumerate(zip(counts, budgets, strict=True))
    ]
    answer = {**silos[0], "algorithm": order.algorithm, "rule": plan.rule.name, "silos": silos}
    if order.trust == "isrl":
        kinds = [
            kind for kind in made.algorithm.kinds if any(asked.kind == kind for asked in plan.asked)
        ]
        answer |= {
            "weights": order.weights,
            "mean_noise_std": {kind: _mean_noise(made, kind, counts) for kind in kinds},
        }
    if order.user_level:
        answer["user_level"] = asdict(promised[0])
    elif math.isfinite(spent[0]) and spent[0] > 0:
        answer["converted"] = _conversions(
            Budget(float(spent[0]), budgets[0].delta), counts[0], mu[0] if mu else None
        )
    if order.theory:  # d alone decides no Gaussian noise
        answer["theory"] = prescription(order, budgets[0], records, dimension).as_dict()
    if order.noise == "theory":
        answer["order"] = {
            name: getattr(order, name)
            for name in (
                "rounds",
                "phase",
                "inner",
                "restarts",
                "step",
                "clip",
                "sampling",
                "output",
            )
        }
    if order.trust == "isrl":
        warn_of_delta(
            {
                f"a silo of {n} records": n
                for n in with_default_delta(order, names, records).values()
            }
        )
    return answer


def named(records: Sequence[int]) -> tuple[str, ...]:
    """Silos that nobody has named yet."""
    return tuple(f"silo-{i + 1}" for i in range(len(records)))


def _curated(who: Everyone, records: Sequence[int]) -> int:
    """Records in a round of the curator's: those of the silos that take part in it, on average."""
    most = getattr(who, "answering", who.silos)
    return round((getattr(who, "least", most) + most) / 2 * sum(records) / len(records))


def warn_of_delta(records: Mapping[str, int]) -> None:
    """One sentence on stderr if 1/n^2 of one of these silos promises little: with probability delta
    a record may be told whole.
    """
    large = [
        f"{silo} {rounded_up(default_delta(n))}"
        for silo, n in records.items()
        if default_delta(n) > 1e-3
    ]
    if large:
        if len(large) > 8:
            more = f" and {len(large) - 8} more"
        else:
            more = ""
        sentence = (
            "silodp: few records make a large default delta, 1/n^2: "
            f"{', '.join(large[:8])}{more}; --delta sets another"
        )
        print(visible(sentence), file=sys.stderr)


def _release(plan: Plan, kind: str, silo: int, n: int, clip: float) -> dict:
    mechanism = plan.mechanisms[kind]
    if kind == "refine":
        largest = mechanism.clipped(2 * clip)
    else:
        largest = mechanism
    multiplier = float(torch.as_tensor(mechanism.noise_multiplier).reshape(1, -1)[0, silo])
    sensitivity = float(largest.sensitivity(n))
    return {
        "kind": kind,
        "count": plan.count(kind, silo),
        "sensitivity": sensitivity,
        "noise_std": multiplier * sensitivity,
        "noise_multiplier": multiplier,
    }


def _mean_noise(made: Prepared, kind: str, counts: Sequence[int]) -> float:
    """Std of the noise in a mean as the order's weights make it: over the silos that the public
    coins ask in the first rounds.

    Each silo's noise has an axis of its own, on which the mechanism's own mean leaves the silo's
    share of it.
    """
    who = made.participation()
    mechanism = made.plan.mechanisms[kind]
    weights = made.weights(counts)
    stds = torch.tensor(
        [
            _release(made.plan, kind, i, n, made.order.clip)["noise_std"]
            for i, n in enumerate(counts)
        ],
        dtype=torch.float64,
    )
    draws = Counter(who.draw() for _ in range(min(made.order.rounds, 64)))
    squares = (
        n * mechanism.combine(torch.diag(stds[list(asked)])[None], asked, weights).square().sum()
        for asked, n in draws.items()
    )
    return math.sqrt(float(sum(squares)) / draws.total())


def _conversions(spent: Budget, n: int, mu: float | None) -> dict:
    """What the spend implies elsewhere; rho and the group's mu only where the run as a whole has a
    mu.
    """
    whole = user_level(spent, n)
    return {
        "zcdp_rho": gdp_to_zcdp(mu) if mu is not None else None,
        "central": asdict(spent),
        "user_level": asdict(whole) if whole.delta < 0.5 else None,
        "user_level_mu_by_group_privacy": n * mu if mu is not None else None,
    }


# --- totals: masks or a shuffle, beside ISRL-DP and central DP -----------------------------------

# Releases are counted by the same dry run as under ISRL-DP, and the budget is split between anchors
# and differences in the same shares. ISRL-DP and central DP are accounted exactly (GDP), so what
# the binomial accountant loses in its Renyi conversion shows in the figures. The mean in a total is
# over records, whichever silo holds them; under ISRL-DP it is over silos. For silos of one size
# these are the same.


@dataclass(frozen=True)
class _Kind(shuffled.Kind):
    """One kind of release, with the Gaussian noise multiplier in each silo, and its clip.
    `multiplier`, the largest, is central DP's too.
    """

    multipliers: tuple[float, ...]
    clip: float


def planned_totals(
    order: Order, records: Sequence[int], names: Sequence[str], dimension: int | None
) -> dict:
    """The answer that `silodp plan --trust masks --json` or `shuffle` prints; the figures are those
    of the first kind of release.

    "differences" has them for the second kind, where there is one; "theory" the theorem, where its
    constants are given.
    """
    made = prepare(order, names, records, dimension=dimension)
    assert dimension is not None
    budget = made.budgets[0]
    sampling = next(iter(made.samplings.values()))
    who = made.participation()
    batches = sorted(int(sampling.batch(n)) for n in records)
    answering = getattr(who, "answering", who.silos)
    released = next(iter(made.plan.mechanisms.values())).contributions
    kinds = _kinds(order, names, records, made.budgets)
    mechanisms = [made.plan.mechanisms[kind.name] for kind in kinds]
    found = [shuffle.Parameters(int(m.levels), int(m.noise_bits), m.p) for m in mechanisms]
    local = _spent(kinds, found, batches[0], dimension, budget.delta)
    if order.trust == "shuffle":
        seen_by = "shuffler"
    else:
        seen_by = "all_others"
    spent = {
        "server": _spent(kinds, found, released, dimension, budget.delta),
        seen_by: local if math.isfinite(local) else None,
    }
    contributions = round(answering * sum(batches) / len(batches))
    answers = [
        {
            "bits_per_silo_round": shuffle.message_bits(parameters, batches[-1], dimension)
            | ({"masked": m.modulus * dimension} if m.masked else {}),
            "noise_std": {
                order.trust: math.sqrt(shuffle.variance(parameters, contributions, kind.clip)),
                "isrl": _isrl(kind, records, sampling, answering),
                "central": kind.multiplier * 2 * kind.clip * (1 + CLIP_TOLERANCE) / contributions,
            },
            "parameters": asdict(parameters)
            | {"levels_per_sqrt_d": parameters.levels / math.sqrt(dimension)},
            "proven": _proven(
                kind, len(kinds), released, contributions, batches[-1], dimension, budget
            ),
        }
        for kind, m, parameters in zip(kinds, mechanisms, found, strict=True)
    ]
    answer = answers[0] | {"epsilon": spent, "delta": budget.delta}
    if len(answers) > 1:
        answer["differences"] = answers[1]
    if order.theory:
        constants = constants_of(order, budget, records, dimension, answering)
        answer["theory"] = theory_shuffle.prescribe(order.algorithm, constants).as_dict()
    return answer


def _kinds(
    order: Order, names: Sequence[str], records: Sequence[int], budgets: Sequence[Budget]
) -> list[_Kind]:
    """The kinds of release with the noise multipliers that fill the one budget under ISRL-DP in
    every silo.
    """
    silos = len(records)
    plan = prepare(order.under("isrl"), names, records, budgets=budgets).plan
    plan = replace(plan, asked=plan.asked + shuffled.asked_again(plan.asked, order.drops))
    return [
        _Kind(
            **asdict(kind),
            multipliers=tuple(
                torch.as_tensor(plan.mechanisms[kind.name].noise_multiplier)
                .reshape(-1)
                .expand(silos)
                .tolist()
            ),
            clip=order.clip * (2 if kind.name == "refine" else 1),
        )
        for kind in shuffled.kinds_of(plan, run=0, silos=silos)
    ]


def _spent(
    kinds: Sequence[_Kind],
    found: Sequence[shuffle.Parameters],
    contributions: int,
    dimension: int,
    delta: float,
) -> float:
    """Against whoever sees totals of so many contributions; infinite where the accountant can give
    no bound.
    """
    made = Schedule()
    for kind, p in zip(kinds, found, strict=True):
        made.add(
            "",
            TotalEvent(
                FullBatch(), p.levels, p.noise_bits, p.p, contributions, dimension, kind.paid
            ),
        )
    return made.epsilon(delta)


def _isrl(kind: _Kind, records: Sequence[int], sampling: Sampling, answering: int) -> float:
    """Noise std of the mean over M silos, each with the noise that its own budget needs."""
    own = [
        z * 2 * kind.clip * (1 + CLIP_TOLERANCE) / sampling.batch(n)
        for z, n in zip(kind.multipliers, records, strict=True)
    ]
    return math.sqrt(sum(s * s for s in own) / len(own) / answering)


def _proven(
    kind: _Kind,
    kinds: int,
    released: int,
    contributions: int,
    largest: int,
    dimension: int,
    budget: Budget,
) -> dict:
    """The proven parameters for the same releases: the budget shared equally by the kinds, and
    composed within each.
    """
    each, rest = theory_shuffle.per_call(budget.epsilon / kinds, budget.delta / kinds, kind.paid)
    made = shuffle.proven(released, dimension, each, rest)
    return {
        **asdict(made),
        "epsilon_per_release": each,
        "delta_per_release": rest,
        "bits_per_silo_round": shuffle.message_bits(made, largest, dimension),
        "noise_std": math.sqrt(shuffle.variance(made, contributions, kind.clip)),
    }
