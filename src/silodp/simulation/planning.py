"""`silodp plan`: what an order will release and spend, before any record is read."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from silodp.core.errors import BadInput
from silodp.core.events import Event
from silodp.core.figures import rounded_up
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.privacy.accounting import Budget, gdp_to_zcdp, user_level
from silodp.core.protocol.masks import modulus_for
from silodp.core.text import visible
from silodp.server.cautions import cautions
from silodp.server.federation import Everyone
from silodp.server.order import Order, default_delta, least_of_all, targets, with_default_delta
from silodp.server.plan import Plan
from silodp.server.prepare import Prepared, prepare, prescription


def planned(order: Order, records: Sequence[int], *, dimension: int | None = None) -> dict:
    """Return the answer of `silodp plan --json` for silos with these numbers of records.

    "releases" and the totals are those of the first silo. "silos" has them for all silos. With
    central trust all records are in one silo. Raise BadInput for an order that cannot be run.
    """
    if dimension is not None and dimension < 1:
        raise BadInput(
            f"dimension is {dimension}; --dimension is the number of parameters of the "
            "model, 1 or more"
        )
    names = named(records)
    warn(cautions(order, names, records))
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
    mus: list[float | None] = [None] * len(budgets)
    run_mu = plan.mu()
    if run_mu is not None:
        mus = np.broadcast_to(run_mu, (1, len(budgets)))[0].tolist()
    silos = [
        {
            "records": n,
            "releases": [
                _release(plan, kind, i, n, order.clip)
                for kind in plan.mechanisms
                if plan.count(kind, i)
            ],
            **asdict(budget),
            "mu": mus[i],
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
        spent_budget = Budget(float(spent[0]), budgets[0].delta)
        answer["converted"] = _conversions(spent_budget, counts[0], mus[0])
    # The dimension alone changes no Gaussian noise, so it is used for the theory only.
    if order.theory:
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
    """Return default names for silos."""
    return tuple(f"silo-{i + 1}" for i in range(len(records)))


def _curated(participation: Everyone, records: Sequence[int]) -> int:
    """Return the mean number of records of the silos in a round, which a curator uses together."""
    most = getattr(participation, "answering", participation.silos)
    least = getattr(participation, "least", most)
    return round((least + most) / 2 * sum(records) / len(records))


def warn_of_delta(records: Mapping[str, int]) -> None:
    """Print a sentence to stderr if the default delta, 1/n^2, of one of these silos is large.

    With probability delta a record may be revealed completely.
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
            "few records make a large default delta, 1/n^2: "
            f"{', '.join(large[:8])}{more}; --delta sets another"
        )
        warn([sentence])


def warn(sentences: Iterable[str]) -> None:
    """Print each sentence to stderr, after the program's name."""
    for sentence in sentences:
        print(visible(f"silodp: {sentence}"), file=sys.stderr)


def _release(plan: Plan, kind: str, silo: int, n: int, clip: float) -> dict:
    """Return the count, sensitivity and noise of a kind of release at one silo."""
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
    """Return the standard deviation of the noise in a mean with the order's weights, over the silos
    that the public coins choose in the first rounds.

    Each silo's noise gets a coordinate of its own. The mechanism's own mean multiplies it by the
    silo's share.
    """
    participation = made.participation()
    mechanism = made.plan.mechanisms[kind]
    weights = made.weights(counts)
    stds = torch.tensor(
        [
            _release(made.plan, kind, i, n, made.order.clip)["noise_std"]
            for i, n in enumerate(counts)
        ],
        dtype=torch.float64,
    )
    draws = Counter(participation.draw() for _ in range(min(made.order.rounds, 64)))
    squares = (
        n * mechanism.combine(torch.diag(stds[list(silos)])[None], silos, weights).square().sum()
        for silos, n in draws.items()
    )
    return math.sqrt(float(sum(squares)) / draws.total())


def _conversions(spent: Budget, n: int, mu: float | None) -> dict:
    """Return what the spend is in other notions of privacy. rho and the group's mu need a mu of the
    whole run.
    """
    conversions = {
        "zcdp_rho": None,
        "central": asdict(spent),
        "user_level": None,
        "user_level_mu_by_group_privacy": None,
    }
    if mu is not None:
        conversions["zcdp_rho"] = gdp_to_zcdp(mu)
        conversions["user_level_mu_by_group_privacy"] = n * mu
    silo_budget = user_level(spent, n)
    if silo_budget.delta < 0.5:
        conversions["user_level"] = asdict(silo_budget)
    return conversions


# --- totals: masks or a shuffle, beside ISRL-DP and central DP -----------------------------------

# Releases are counted by the same dry run as under ISRL-DP, and kinds of releases share the budget
# alike. The mean in a total is over the records of all silos. Under ISRL-DP it is over silos. For
# silos of one size these are the same.


def planned_totals(
    order: Order, records: Sequence[int], names: Sequence[str], dimension: int | None
) -> dict:
    """Return the answer that `silodp plan --trust masks --json` or `shuffle` prints.

    "releases" has the figures of each kind of release. Those of the first kind stand outside too.
    """
    if order.theory:
        raise BadInput(
            f"--{next(iter(order.theory))} belongs to a theorem, and none is about totals with "
            f"Gaussian noise; leave it out with --trust {order.trust}"
        )
    made = prepare(order, names, records, dimension=dimension)
    alone = prepare(order.under("isrl"), names, records, budgets=made.budgets).plan
    plan = made.plan
    budget = least_of_all(made.budgets)
    sampling = next(iter(made.samplings.values()))
    who = made.participation()
    answering = getattr(who, "answering", who.silos)
    batches = [sampling.batch(n) for n in records]
    contributions = answering * sum(batches) / len(batches)
    own = replace(plan, asked=[replace(a, event=a.event.alone()) for a in plan.asked])
    own = replace(own, mechanisms={kind: _Own(m) for kind, m in plan.mechanisms.items()})
    seen_by = "shuffler" if order.trust == "shuffle" else "all_others"
    local = float(own.spent().max())
    answers = []
    for kind in dict.fromkeys(asked.kind for asked in plan.asked):
        mechanism = plan.mechanisms[kind]
        if kind == "refine":
            mechanism = mechanism.clipped(2 * order.clip)
        largest = float(mechanism.clip)
        gaussian = alone.mechanisms[kind]
        share = float(torch.as_tensor(mechanism.noise_multiplier).max())
        each = gaussian.multipliers(range(len(records)))[0].tolist()
        reach = 2 * largest * (1 + CLIP_TOLERANCE)
        squares = [(z * reach / batch) ** 2 for z, batch in zip(each, batches, strict=True)]
        answer = {
            "kind": kind,
            "count": max(plan.count(kind, silo) for silo in range(len(records))),
            "parameters": {"noise_multiplier": share, "counted": mechanism.counted},
            "noise_std": {
                order.trust: float(mechanism.noise_in(answering, contributions)),
                "isrl": math.sqrt(sum(squares) / len(squares) / answering),
                "central": max(each) * reach / contributions,
            },
        }
        if dimension is not None and kind in made.algorithm.kinds:
            bits = 64
            if order.trust == "masks":
                most = mechanism.of(0).largest(dimension, sum(records), len(records))
                bits = modulus_for(most)
            answer["bits_per_silo_round"] = bits * dimension
        answers.append(answer)
    return answers[0] | {
        "releases": answers,
        "epsilon": {
            "server": float(plan.spent().max()),
            seen_by: local if math.isfinite(local) else None,
        },
        "delta": budget.delta,
        "mu": float(np.asarray(plan.mu()).max()),
    }


@dataclass(frozen=True)
class _Own:
    """Price a total's answers for a party that sees the silo's own numbers, under its own share."""

    mechanism: Any

    def noisy(self, event: Event) -> Event:
        return Event(event.sampling, self.mechanism.noise_multiplier, event.count)
