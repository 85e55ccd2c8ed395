"""`silodp plan`: what an algorithm will release and spend, before any data is touched."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget, gdp_to_zcdp, record_budget_for_user, rounded_up, user_level
from silodp.core.sampling import DisjointBatches, FullBatch
from silodp.core.theory import isrl as theory
from silodp.server.algorithms import find
from silodp.server.paper import paper_multipliers
from silodp.server.plan import Plan, calibrate, with_multipliers
from silodp.server.settings import default_shares, participation_by_name, prepared, sampling_by_name


@dataclass(frozen=True)
class Wish:
    """What a user wants to know the price of."""

    algorithm: str
    records: tuple[int, ...]
    epsilon: float
    delta: float | None
    clip: float
    schedule: dict
    noise: str = "exact"
    sampling: str | None = None
    participation: str = "all"
    rule: str | None = None
    anchor_share: float | None = None
    user_level: bool = False
    seed: int = 0
    theory: dict | None = None


def planned(wish: Wish) -> dict:
    """The answer that `silodp plan --json` prints; "releases" and the totals are those of the first silo, "silos" has them all."""
    algorithm = find(wish.algorithm)
    settings = algorithm.schedule(wish.schedule)
    if any(n < 1 for n in wish.records):
        raise BadInput(f"records is {min(wish.records)}; a silo needs 1 record or more")
    targets = [Budget(wish.epsilon, wish.delta if wish.delta is not None else default_delta(n)) for n in wish.records]
    finite(wish.epsilon)
    gaussian = isinstance(sampling_by_name(wish.sampling, algorithm, wish.schedule["rounds"]), FullBatch | DisjointBatches)
    budgets = targets
    if wish.user_level:
        budgets = [record_budget_for_user(b, n, gaussian=gaussian) for b, n in zip(targets, wish.records, strict=True)]
    plan = noise_plan(wish, algorithm, settings, budgets)
    spent = np.broadcast_to(plan.spent(), (1, len(budgets)))[0]
    found = plan.mu()
    mu = None if found is None else np.broadcast_to(found, (1, len(budgets)))[0].tolist()
    silos = [
        {
            "records": n,
            "releases": [_release(plan, kind, i, n, wish.clip) for kind in algorithm.kinds if plan.count(kind, i)],
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "mu": mu[i] if mu else None,
            "spent_epsilon": float(spent[i]),
        }
        for i, (n, budget) in enumerate(zip(wish.records, budgets, strict=True))
    ]
    answer = {**silos[0], "algorithm": wish.algorithm, "rule": plan.rule.name, "silos": silos}
    if wish.user_level:
        answer["user_level"] = {"epsilon": wish.epsilon, "delta": targets[0].delta}
    elif math.isfinite(spent[0]) and spent[0] > 0:
        answer["converted"] = _conversions(Budget(float(spent[0]), budgets[0].delta), wish.records[0], mu[0] if mu else None)
    if any(v is not None for name, v in (wish.theory or {}).items() if name != "dimension"):  # d alone decides no Gaussian noise
        answer["theory"] = _theory(wish, budgets[0])
    if wish.delta is None:
        warn_of_delta({f"a silo of {n} records": n for n in wish.records})
    return answer


def default_delta(n: int) -> float:
    """1/n^2."""
    return 1.0 / max(n, 2) ** 2


def warn_of_delta(records: Mapping[str, int]) -> None:
    """One sentence on stderr if 1/n^2 of one of these silos promises little: with probability delta a record may be told whole."""
    large = [f"{silo} {rounded_up(default_delta(n))}" for silo, n in records.items() if default_delta(n) > 1e-3]
    if large:
        more = f" and {len(large) - 8} more" if len(large) > 8 else ""
        print(f"silodp: few records make a large default delta, 1/n^2: {', '.join(large[:8])}{more}; --delta sets another", file=sys.stderr)


def noise_plan(wish: Wish, algorithm, settings: dict, budgets: list[Budget]) -> Plan:
    """The algorithm's mechanisms with noise that fills each silo's budget under ISRL-DP, or with the paper's constants."""
    who = participation_by_name(wish.participation, len(wish.records), wish.seed)()
    sampling = sampling_by_name(wish.sampling, algorithm, wish.schedule["rounds"])
    mechanisms = {kind: Gaussian(kind, wish.clip, 0.0, sampling) for kind in algorithm.kinds}
    run = prepared(algorithm, settings, 1.0)
    if wish.noise == "exact":
        shares = default_shares(algorithm, settings, wish.anchor_share)
        return calibrate(run, mechanisms, budgets, wish.records, who, shares=shares, rule=wish.rule)
    if wish.noise != "paper":
        raise BadInput(f"noise {wish.noise!r} is unknown; use exact or paper")
    if wish.sampling not in (None, "full"):
        raise BadInput("the paper's constants are shown for full batches only; leave --sampling out")
    cells = [paper_multipliers(wish.algorithm, b, settings) for b in budgets]
    noisy = {
        kind: replace(m, noise_multiplier=torch.tensor([[c[kind] for c in cells]], dtype=torch.float64)) for kind, m in mechanisms.items()
    }
    return with_multipliers(run, noisy, wish.records, budgets, who)


def _release(plan: Plan, kind: str, silo: int, n: int, clip: float) -> dict:
    mechanism = plan.mechanisms[kind]
    largest = mechanism.clipped(2 * clip) if kind == "refine" else mechanism
    multiplier = float(torch.as_tensor(mechanism.noise_multiplier).reshape(1, -1)[0, silo])
    sensitivity = float(largest.sensitivity(n))
    return {
        "kind": kind, "count": plan.count(kind, silo), "sensitivity": sensitivity, "noise_std": multiplier * sensitivity,
        "noise_multiplier": multiplier,
    }  # fmt: skip


LARGEST = 1e7
"""Epsilon at most: `gdp_epsilon` gives up at a mu of 1e4, which is an epsilon of about 5e7, and evaluations add up."""


def finite(epsilon: float) -> None:
    """Only the lab's own baselines run without noise."""
    if math.isinf(epsilon):
        raise BadInput("epsilon is inf, which is no privacy at all; give a finite number, such as 3")
    if epsilon > LARGEST:
        raise BadInput(f"epsilon is {epsilon:g}, which no accountant here can tell from infinite; give at most {LARGEST:g}, such as 3")


def check_seed(seed: int | None) -> None:
    if seed is not None and seed < 0:
        raise BadInput(f"seed is {seed}; it must be 0 or more")


def _conversions(spent: Budget, n: int, mu: float | None) -> dict:
    """What the spend implies elsewhere; rho and the group's mu only where the run as a whole has a mu."""
    whole = user_level(spent, n)
    return {
        "zcdp_rho": gdp_to_zcdp(mu) if mu is not None else None,
        "central": {"epsilon": spent.epsilon, "delta": spent.delta},
        "user_level": {"epsilon": whole.epsilon, "delta": whole.delta} if whole.delta < 0.5 else None,
        "user_level_mu_by_group_privacy": n * mu if mu is not None else None,
    }


def _theory(wish: Wish, budget: Budget) -> dict:
    given = wish.theory or {}
    for name in ("lipschitz", "smoothness", "dimension"):
        if given.get(name) is None:
            raise BadInput(f"the theory needs --{name} as well; --lipschitz, --smoothness and --dimension belong to every theorem")
    silos = len(wish.records)
    name, _, answering = wish.participation.partition(":")
    constants = theory.Constants(
        **given, records=min(wish.records), silos=silos, answering=int(answering) if answering else silos, epsilon=budget.epsilon,
        delta=budget.delta,
    )  # fmt: skip
    return theory.prescribe(wish.algorithm, constants).as_dict()
