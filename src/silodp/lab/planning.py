"""`silodp plan`: what an order will release and spend, before any data is touched."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget, gdp_to_zcdp, rounded_up, user_level
from silodp.lab.planning_shuffle import planned_totals
from silodp.server.federation import Everyone
from silodp.server.order import Order, default_delta, targets, with_default_delta
from silodp.server.plan import Plan
from silodp.server.prepare import Prepared, prepare, prescription


def planned(order: Order, records: Sequence[int], *, dimension: int | None = None) -> dict:
    """The answer that `silodp plan --json` prints under the order's trust, for silos of so many records.

    "releases" and the totals are those of the first silo, "silos" has them all; under central trust all records are in one.
    """
    if dimension is not None and dimension < 1:
        raise BadInput(f"dimension is {dimension}; --dimension is the number of parameters of the model, 1 or more")
    names = named(records)
    if order.totals:
        return planned_totals(order, records, names, dimension)
    promised = targets(order, names, records)
    made = prepare(order, names, records, dimension=dimension)
    plan, order, budgets, counts = made.plan, made.order, made.budgets, tuple(records)
    if order.trust == "central":
        counts = (_curated(made.participation(), records),)
    spent = np.broadcast_to(plan.spent(), (1, len(budgets)))[0]
    found = plan.mu()
    mu = None if found is None else np.broadcast_to(found, (1, len(budgets)))[0].tolist()
    silos = [
        {
            "records": n,
            "releases": [_release(plan, kind, i, n, order.clip) for kind in made.algorithm.kinds if plan.count(kind, i)],
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "mu": mu[i] if mu else None,
            "spent_epsilon": float(spent[i]),
        }
        for i, (n, budget) in enumerate(zip(counts, budgets, strict=True))
    ]
    answer = {**silos[0], "algorithm": order.algorithm, "rule": plan.rule.name, "silos": silos}
    if order.trust == "isrl":
        kinds = [kind for kind in made.algorithm.kinds if any(asked.kind == kind for asked in plan.asked)]
        answer |= {"weights": order.weights, "mean_noise_std": {kind: _mean_noise(made, kind, counts) for kind in kinds}}
    if order.user_level:
        answer["user_level"] = {"epsilon": promised[0].epsilon, "delta": promised[0].delta}
    elif math.isfinite(spent[0]) and spent[0] > 0:
        answer["converted"] = _conversions(Budget(float(spent[0]), budgets[0].delta), counts[0], mu[0] if mu else None)
    if order.theory:  # d alone decides no Gaussian noise
        answer["theory"] = prescription(order, budgets[0], records, dimension).as_dict()
    if order.noise == "theory":
        answer["order"] = {
            name: getattr(order, name) for name in ("rounds", "phase", "inner", "restarts", "step", "clip", "sampling", "output")
        }
    if order.trust == "isrl":
        warn_of_delta({f"a silo of {n} records": n for n in with_default_delta(order, names, records).values()})
    return answer


def named(records: Sequence[int]) -> tuple[str, ...]:
    """Silos that nobody has named yet."""
    return tuple(f"silo-{i + 1}" for i in range(len(records)))


def _curated(who: Everyone, records: Sequence[int]) -> int:
    """Records in a round of the curator's: those of the silos that take part in it, on average."""
    most = getattr(who, "answering", who.silos)
    return round((getattr(who, "least", most) + most) / 2 * sum(records) / len(records))


def warn_of_delta(records: Mapping[str, int]) -> None:
    """One sentence on stderr if 1/n^2 of one of these silos promises little: with probability delta a record may be told whole."""
    large = [f"{silo} {rounded_up(default_delta(n))}" for silo, n in records.items() if default_delta(n) > 1e-3]
    if large:
        more = f" and {len(large) - 8} more" if len(large) > 8 else ""
        print(f"silodp: few records make a large default delta, 1/n^2: {', '.join(large[:8])}{more}; --delta sets another", file=sys.stderr)


def _release(plan: Plan, kind: str, silo: int, n: int, clip: float) -> dict:
    mechanism = plan.mechanisms[kind]
    largest = mechanism.clipped(2 * clip) if kind == "refine" else mechanism
    multiplier = float(torch.as_tensor(mechanism.noise_multiplier).reshape(1, -1)[0, silo])
    sensitivity = float(largest.sensitivity(n))
    return {
        "kind": kind, "count": plan.count(kind, silo), "sensitivity": sensitivity, "noise_std": multiplier * sensitivity,
        "noise_multiplier": multiplier,
    }  # fmt: skip


def _mean_noise(made: Prepared, kind: str, counts: Sequence[int]) -> float:
    """Std of the noise in a mean as the order's weights make it: over the silos that the public coins ask in the first rounds.

    Each silo's noise has an axis of its own, on which the mechanism's own mean leaves the silo's share of it.
    """
    who, mechanism, weights = made.participation(), made.plan.mechanisms[kind], made.weights(counts)
    stds = torch.tensor([_release(made.plan, kind, i, n, made.order.clip)["noise_std"] for i, n in enumerate(counts)], dtype=torch.float64)
    draws = Counter(who.draw() for _ in range(min(made.order.rounds, 64)))
    squares = (n * mechanism.combine(torch.diag(stds[list(asked)])[None], asked, weights).square().sum() for asked, n in draws.items())
    return math.sqrt(float(sum(squares)) / draws.total())


def _conversions(spent: Budget, n: int, mu: float | None) -> dict:
    """What the spend implies elsewhere; rho and the group's mu only where the run as a whole has a mu."""
    whole = user_level(spent, n)
    return {
        "zcdp_rho": gdp_to_zcdp(mu) if mu is not None else None,
        "central": {"epsilon": spent.epsilon, "delta": spent.delta},
        "user_level": {"epsilon": whole.epsilon, "delta": whole.delta} if whole.delta < 0.5 else None,
        "user_level_mu_by_group_privacy": n * mu if mu is not None else None,
    }
