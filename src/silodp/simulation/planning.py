"""`silodp plan`: what an order will release and spend, before any record is read."""

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
            "silodp: few records make a large default delta, 1/n^2: "
            f"{', '.join(large[:8])}{more}; --delta sets another"
        )
        print(visible(sentence), file=sys.stderr)


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

# Releases are counted by the same dry run as under ISRL-DP, and the budget is split between anchors
# and differences in the same shares. ISRL-DP and central DP are accounted exactly (GDP). So the
# figures show what the binomial accountant loses in its Renyi conversion. The mean in a total is
# over the records of all silos. Under ISRL-DP it is over silos. For silos of one size these are the
# same.


@dataclass(frozen=True)
class _Kind(shuffled.Kind):
    """One kind of release, with its clip and the Gaussian noise multiplier of each silo. The
    largest multiplier, `multiplier`, is also that of central DP.
    """

    multipliers: tuple[float, ...]
    clip: float


def planned_totals(
    order: Order, records: Sequence[int], names: Sequence[str], dimension: int | None
) -> dict:
    """Return the answer of `silodp plan --json` with --trust masks or shuffle.

    The figures are those of the first kind of release. "differences" has them for a second kind.
    "theory" has the theorem if its constants are given.
    """
    made = prepare(order, names, records, dimension=dimension)
    assert dimension is not None
    budget = made.budgets[0]
    sampling = next(iter(made.samplings.values()))
    participation = made.participation()
    batches = sorted(int(sampling.batch(n)) for n in records)
    answering = getattr(participation, "answering", participation.silos)
    released = next(iter(made.plan.mechanisms.values())).contributions
    kinds = _kinds(order, names, records, made.budgets)
    mechanisms = [made.plan.mechanisms[kind.name] for kind in kinds]
    coins = [shuffle.Parameters(int(m.levels), int(m.noise_bits), m.p) for m in mechanisms]
    local: float | None = _spent(kinds, coins, batches[0], dimension, budget.delta)
    if not math.isfinite(local):
        local = None
    if order.trust == "shuffle":
        observer = "shuffler"
    else:
        observer = "all_others"
    spent = {
        "server": _spent(kinds, coins, released, dimension, budget.delta),
        observer: local,
    }
    contributions = round(answering * sum(batches) / len(batches))
    answers = []
    for kind, mechanism, parameters in zip(kinds, mechanisms, coins, strict=True):
        bits = shuffle.message_bits(parameters, batches[-1], dimension)
        if mechanism.masked:
            bits = bits | {"masked": mechanism.modulus * dimension}
        proven = _proven(kind, len(kinds), released, contributions, batches[-1], dimension, budget)
        answers.append(
            {
                "bits_per_silo_round": bits,
                "noise_std": {
                    order.trust: math.sqrt(shuffle.variance(parameters, contributions, kind.clip)),
                    "isrl": _isrl(kind, records, sampling, answering),
                    "central": (
                        kind.multiplier * 2 * kind.clip * (1 + CLIP_TOLERANCE) / contributions
                    ),
                },
                "parameters": asdict(parameters)
                | {"levels_per_sqrt_d": parameters.levels / math.sqrt(dimension)},
                "proven": proven,
            }
        )
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
    """Return the kinds of release, with the noise multipliers that use up the one budget under
    ISRL-DP in every silo.
    """
    silos = len(records)
    plan = prepare(order.under("isrl"), names, records, budgets=budgets).plan
    plan = replace(plan, asked=plan.asked + shuffled.asked_again(plan.asked, order.drops))
    kinds = []
    for kind in shuffled.kinds_of(plan, run=0, silos=silos):
        multiplier = torch.as_tensor(plan.mechanisms[kind.name].noise_multiplier)
        multipliers = tuple(multiplier.reshape(-1).expand(silos).tolist())
        clip = order.clip
        if kind.name == "refine":
            # A difference of two clipped gradients can be twice as long.
            clip = order.clip * 2
        kinds.append(_Kind(**asdict(kind), multipliers=multipliers, clip=clip))
    return kinds


def _spent(
    kinds: Sequence[_Kind],
    coins: Sequence[shuffle.Parameters],
    contributions: int,
    dimension: int,
    delta: float,
) -> float:
    """Return the epsilon against a party that sees totals with this number of contributions. Return
    infinity if the accountant has no bound.
    """
    schedule = Schedule()
    for kind, p in zip(kinds, coins, strict=True):
        event = TotalEvent(
            FullBatch(), p.levels, p.noise_bits, p.p, contributions, dimension, kind.paid
        )
        schedule.add("", event)
    return schedule.epsilon(delta)


def _isrl(kind: _Kind, records: Sequence[int], sampling: Sampling, answering: int) -> float:
    """Return the standard deviation of the noise in the mean over M silos, each with the noise of
    its own budget.
    """
    stds = [
        z * 2 * kind.clip * (1 + CLIP_TOLERANCE) / sampling.batch(n)
        for z, n in zip(kind.multipliers, records, strict=True)
    ]
    return math.sqrt(sum(s * s for s in stds) / len(stds) / answering)


def _proven(
    kind: _Kind,
    kinds: int,
    released: int,
    contributions: int,
    largest: int,
    dimension: int,
    budget: Budget,
) -> dict:
    """Return the paper's proven parameters for the same releases. The kinds share the budget
    equally, and each kind's releases are composed.
    """
    each, rest = theory_shuffle.per_call(budget.epsilon / kinds, budget.delta / kinds, kind.paid)
    parameters = shuffle.proven(released, dimension, each, rest)
    return {
        **asdict(parameters),
        "epsilon_per_release": each,
        "delta_per_release": rest,
        "bits_per_silo_round": shuffle.message_bits(parameters, largest, dimension),
        "noise_std": math.sqrt(shuffle.variance(parameters, contributions, kind.clip)),
    }
