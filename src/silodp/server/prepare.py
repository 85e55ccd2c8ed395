"""From an order to what runs: the algorithm with its settings, and the noise with which all that it
asks fits every silo's budget.

This is the one place where an order is planned, whoever is trusted and wherever the records lie:
`silodp plan` shows it, a simulation and a run over a network follow it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.query import Query
from silodp.core.sampling import FullBatch, Sampling
from silodp.core.theory import isrl as theory
from silodp.core.weights import Weights
from silodp.server.algorithms import Algorithm, find
from silodp.server.estimates import recalibration
from silodp.server.estimates.recalibration import rehearsal
from silodp.server.estimates.scaling import learn_scaling
from silodp.server.federation import Everyone, Measured
from silodp.server.order import Order, budgets_of, least_of_all, targets
from silodp.server.paper import paper_multipliers
from silodp.server.plan import Plan, Run, calibrate, with_multipliers
from silodp.server.settings import (
    default_shares,
    participation_by_name,
    prepared,
    samplings_by_name,
)
from silodp.server.shuffled import in_totals

SCALING = ("ranges", "moments")
SCALING_SHARE = 0.1
"""Part of the budget (mu^2) that private feature scaling takes."""
MOST_ROUNDS = 100_000
"""Most rounds that a theorem may ask for. A dry run also asks every question."""
AGAINST = {
    "isrl": (
        "epsilon protects against all who see what a silo sends, also the server and the "
        "other silos"
    ),
    "masks": (
        "epsilon protects against the server and the colluding silos together, if the masks "
        "cannot be broken. If all other silos collude with the server, a silo has only its own "
        "noise"
    ),
    "shuffle": (
        "epsilon protects against the server, which sees totals, unless it states otherwise. "
        "Against the shuffler, and all who see one silo's numbers, a silo has only its own noise"
    ),
    "central": (
        "epsilon protects against readers of the model and of the server's messages. The server "
        "itself sees every record"
    ),
}


@dataclass(frozen=True)
class Prepared:
    """An order that can be run. Of a curator, who has all records in one place, budgets and plan
    are of one silo.
    """

    order: Order
    algorithm: Algorithm
    settings: dict[str, Any]
    samplings: dict[str, Sampling]
    budgets: list[Budget]
    plan: Plan
    run: Run
    participation: Callable[[], Everyone]

    @property
    def mechanisms(self) -> dict[str, Any]:
        """Return the mechanisms of the algorithm itself."""
        return {kind: self.plan.mechanisms[kind] for kind in self.algorithm.kinds}

    @property
    def recalibration(self) -> Gaussian | None:
        """Return how the question is asked by which the model's risks are made right, if it is."""
        return self.plan.mechanisms.get(recalibration.KIND)

    def weights(self, counts: Sequence[int], held_out: Sequence[int] = ()) -> Weights:
        """Return how silos count in a mean. A total counts records alike, whichever silo holds
        them.
        """
        return Weights(
            "records" if self.order.totals else self.order.weights, tuple(counts), tuple(held_out)
        )

    @property
    def least(self) -> int:
        """Return the fewest silos of a total."""
        return least_of(self.order, self.participation())


def prepare(
    order: Order,
    names: Sequence[str],
    counts: Sequence[int],
    *,
    budgets: Sequence[Budget] | None = None,
    dimension: int | None = None,
    scaled: int | None = None,
    epsilons: Sequence[float] = (),
) -> Prepared:
    """`budgets` are the silos' own, where they have some. `scaled`: so many features whose scaling
    is learnt first, within the budget.

    `epsilons` plan a batch of runs, one for each, that differ from the order in epsilon alone;
    infinite is without noise, for baselines.
    """
    algorithm = find(order.algorithm)
    theorem = None
    if order.noise == "theory":
        if order.user_level or order.rule or scaled is not None:
            raise BadInput(
                "--from-theory takes its noise from a theorem about records as they are; "
                "leave out --user-level and --rule, "
                "and give --schema, --scale none, or a file of public ranges with --scale"
            )
        theorem = prescription(
            order, least_of_all(budgets or targets(order, names, counts)), counts, dimension
        )
        order = by_theorem(order, theorem, min(counts))
    settings = algorithm.schedule(order.schedule)
    samplings = samplings_by_name(order.sampling, algorithm, order.rounds)
    if budgets:
        mine = list(budgets)
    else:
        mine = budgets_of(order, names, counts, samplings)
    participation = participation_by_name(order.participation, len(counts), order.coins)
    participation()  # refuses what cannot take part
    run = prepared(algorithm, settings, order.step)
    why = _why_together(order)
    if why:
        rehearsed = _together(run, f"{algorithm.name} asks silos one by one, {why}", order.totals)
    else:
        rehearsed = run
    who = participation()
    if order.trust == "central":
        mine = [least_of_all(mine)]
        counts = [sum(counts)]
        who = Everyone(1)
    runs = [[replace(budget, epsilon=epsilon) for budget in mine] for epsilon in epsilons] or [mine]
    if order.totals:
        # A total is protected by everybody's noise: the smallest budget decides.
        runs = [[least_of_all(row)] * len(counts) for row in runs]
        _check_totals(order, algorithm, samplings)
    plan = _gaussian(order, settings, runs, counts, who, rehearsed, scaled)
    if theorem:
        plan = _with_theorems_noise(plan, theorem)
    if order.totals:
        counted = least_of(order, who) - order.colluding
        plan = in_totals(plan, counted, masked=order.trust == "masks", drops=order.drops)
    return Prepared(order, algorithm, settings, samplings, mine, plan, run, participation)


def asks(order: Order) -> tuple[dict[str, Gaussian], dict[str, float] | None]:
    """Return what the order's algorithm releases, by kind, with noise still to be set; and how they
    split a budget (None: it is one's).
    """
    algorithm = find(order.algorithm)
    samplings = samplings_by_name(order.sampling, algorithm, order.rounds)
    mechanisms = {
        kind: Gaussian(kind, order.clip, 0.0, samplings[kind]) for kind in algorithm.kinds
    }
    return mechanisms, default_shares(
        algorithm, algorithm.schedule(order.schedule), order.anchor_share
    )


def _gaussian(
    order: Order,
    settings: dict,
    runs: list[list[Budget]],
    counts: Sequence[int],
    who: Everyone,
    run: Run,
    scaled: int | None,
) -> Plan:
    """Noise of each silo's own, scaling included, in one dry run."""
    mechanisms, shares = asks(order)
    if order.noise == "paper":
        if order.sampling not in (None, "full"):
            raise BadInput(
                "the paper's constants are shown for full batches only; leave --sampling out"
            )
        cells = [[paper_multipliers(order.algorithm, b, settings) for b in row] for row in runs]
        noisy = {
            kind: replace(m, noise_multiplier=_rows([c[kind] for c in row] for row in cells))
            for kind, m in mechanisms.items()
        }
        return with_multipliers(run, noisy, counts, runs, who)
    if scaled is not None:
        shares = shares or dict.fromkeys(mechanisms, 1.0)
        mechanisms |= {kind: Gaussian(kind, 1.0, 0.0, FullBatch()) for kind in SCALING}
        shares = {
            kind: share * (1 - SCALING_SHARE) for kind, share in shares.items()
        } | dict.fromkeys(SCALING, SCALING_SHARE / 2)
        run = _after_scaling(run, scaled)
    if order.recalibration:
        shares = shares or dict.fromkeys(mechanisms, 1.0)
        whole = sum(shares[kind] for kind in mechanisms)
        rest = (1 - order.recalibration) / whole
        shares = {kind: rest * share for kind, share in shares.items()}
        shares[recalibration.KIND] = order.recalibration
        mechanisms |= {recalibration.KIND: recalibration.mechanism()}
        run = _then_recalibration(run)
    return calibrate(run, mechanisms, runs, counts, who, shares=shares, rule=order.rule)


def _after_scaling(run: Run, features: int) -> Run:
    def both(
        fed: Any, problem: Any, w: Tensor, *, ranges: Gaussian, moments: Gaussian, **rest: Gaussian
    ) -> Iterator[Tensor]:
        learn_scaling(fed.everyone(), features, ranges=ranges, moments=moments)
        yield from run(fed, problem, w, **rest)

    return both


def _then_recalibration(run: Run) -> Run:
    """Return the run with the question after its last iterate that `server/loop.py` asks."""

    def both(
        fed: Any, problem: Any, w: Tensor, *, recalibration: Gaussian, **rest: Gaussian
    ) -> Iterator[Tensor]:
        yield from run(fed, problem, w, **rest)
        fed.measure(rehearsal(w, recalibration))

    return both


def _why_together(order: Order) -> str:
    """Return why silos cannot be asked one by one under this order, or None."""
    if order.trust == "central":
        return "and a curator answers for all of them at once; use an algorithm that asks for means"
    if order.totals:
        return "and the server sees totals alone; use an algorithm that asks for means"
    if order.weights != "equal":
        return "and counts them alike; leave --weights out"
    return ""


def _together(run: Run, why: str, totals: bool) -> Run:
    """Return `run` for a dry run. It is refused with this sentence as soon as it asks silos one by
    one, or asks what cannot be in a total.
    """

    def asked(fed: Any, problem: Any, w: Tensor, **rest: Any) -> Iterator[Tensor]:
        yield from run(_Together(fed, why, totals), problem, w, **rest)

    return asked


class _Together:
    def __init__(self, fed: Any, why: str, totals: bool) -> None:
        self._fed = fed
        self._why = why
        self._totals = totals

    def mean(self, query: Query) -> Tensor:
        return self.measure(query).mean

    def measure(self, query: Query) -> Measured:
        if self._totals and not query.statistic.in_totals:
            raise BadInput(
                f"a total is one sum over records, and {type(query.statistic).__name__} has "
                "several; use an algorithm such as mb-sgd"
            )
        return self._fed.measure(query)

    def cohort(self) -> _Together:
        return _Together(self._fed.cohort(), self._why, self._totals)

    def each(self) -> dict[int, Any]:
        raise BadInput(self._why)


def _rows(numbers: Iterable[list[float]]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.float64)


# --- in totals -----------------------------------------------------------------------------------


def _check_totals(order: Order, algorithm: Algorithm, samplings: Mapping[str, Sampling]) -> None:
    """Raise BadInput where the algorithm or its batches are not for totals."""
    if "local_steps" in algorithm.settings:
        raise BadInput(
            f"{algorithm.name} takes local steps, which are no sums over records; totals "
            "suit mb-sgd or spider"
        )
    if any(sampling.sampled for sampling in samplings.values()):
        raise BadInput(
            f"sampling {order.sampling!r} has no exact price in a total; use full or disjoint "
            f"with --trust {order.trust}"
        )


def asked_at_least(who: Everyone) -> int:
    """Return the fewest silos that are asked in a round."""
    return getattr(who, "least", None) or getattr(who, "answering", who.silos)


def least_of(order: Order, who: Everyone, *, fewest: int = 1) -> int:
    """Return the fewest silos whose total is passed on: as many as are asked, unless the order says
    less. BadInput if there may be fewer than `fewest`.
    """
    most = asked_at_least(who)
    least = most if order.least is None else order.least
    if not fewest <= least <= most:
        raise BadInput(
            f"least is {least}, the quorum of a total; it must be between {fewest} and "
            f"{most}, the silos that are asked in a round"
        )
    if order.trust == "masks" or order.colluding:
        hidden = order.colluding + 2
    else:
        hidden = 1
    if least < hidden:
        raise BadInput(
            f"{least} silos with {order.colluding} colluding leave no honest silo "
            f"among which to hide; use {hidden} silos or more"
        )
    return least


# --- by a theorem --------------------------------------------------------------------------------


def prescription(
    order: Order, budget: Budget, counts: Sequence[int], dimension: int | None
) -> theory.Prescription:
    """Return the theorem of the order's algorithm at its constants, for the smallest silo."""
    if order.trust == "central":
        counts = [sum(counts)]
    _, _, answering = order.participation.rpartition(":")
    if answering.isdecimal() and len(counts) > 1:
        asked = int(answering)
    else:
        asked = len(counts)
    return theory.prescribe(order.algorithm, constants_of(order, budget, counts, dimension, asked))


def constants_of(
    order: Order, budget: Budget, counts: Sequence[int], dimension: int | None, answering: int
) -> theory.Constants:
    given: dict[str, Any] = order.theory | (
        {"dimension": dimension} if dimension is not None else {}
    )
    for name in ("lipschitz", "smoothness", "dimension"):
        if name not in given:
            raise BadInput(
                f"the theory needs --{name} as well; --lipschitz, --smoothness and "
                "--dimension belong to every theorem"
            )
    return theory.Constants(
        **given,
        records=min(counts),
        silos=len(counts),
        answering=answering,
        epsilon=budget.epsilon,
        delta=budget.delta,
    )


def by_theorem(order: Order, found: theory.Prescription, n: int) -> Order:
    """Return the order with rounds R, batches K, phase q, step and clip of its theorem; n is the
    smallest silo's number of records.
    """
    if not found.noise:
        raise BadInput(
            f"with these constants {found.theorem} answers with the start and asks no "
            "silo; give others, or no --from-theory"
        )
    if (rounds := found.rounds * found.restarts) > MOST_ROUNDS:
        raise BadInput(
            f"with these constants {found.theorem} asks for {rounds:.3g} rounds, more than "
            f"{MOST_ROUNDS:,}; give a smaller epsilon"
        )
    assert order.lipschitz is not None
    assert order.smoothness is not None
    if found.output in ("w_R", "w_S"):
        out = "last"
    else:
        out = "random"
    made = replace(
        order,
        rounds=found.rounds * found.restarts,
        step=found.step,
        clip=order.lipschitz,
        output=out,
    )
    if found.phase:
        return replace(made, phase=found.phase, slope=order.smoothness, sampling="full")
    if found.inner_steps:
        rate = found.batch / n
        if math.floor(rate * n) < found.batch:
            rate = math.nextafter(rate, 1.0)
        if found.batch < n:
            sampled = f"anchor=full,refine=without-replacement:{rate!r}"
        else:
            sampled = "full"
        return replace(
            made, inner=found.inner_steps, restarts=found.restarts, slope=math.inf, sampling=sampled
        )
    return replace(made, sampling="disjoint")


def _with_theorems_noise(plan: Plan, found: theory.Prescription) -> Plan:
    """Return the plan with the theorem's noise instead of the least: it is priced for what it is,
    and refused if that is too little.
    """
    std = {"minibatch": found.noise.get("sigma"), "anchor": found.noise.get("sigma_1")}
    std["refine"] = found.noise.get("sigma_2_hat", found.noise.get("sigma_2"))
    noisy = {}
    for kind, m in plan.mechanisms.items():
        if kind == "refine":
            largest = m.clipped(2 * m.clip)
        else:
            largest = m
        sigma = std[kind]
        if sigma is None:
            noisy[kind] = m
        else:
            noisy[kind] = replace(
                m, noise_multiplier=_rows([[sigma / largest.sensitivity(n) for n in plan.counts]])
            )
    made = replace(plan, mechanisms=noisy)
    for budget, spent in zip(plan.budgets[0], made.spent()[0].tolist(), strict=True):
        if not spent <= budget.epsilon:
            failed = "; ".join(words for words, holds in found.conditions if not holds)
            raise BadInput(
                f"the noise of {found.theorem} would spend epsilon {spent:.4g} of "
                f"{budget.epsilon:g}"
                f"{f' (a condition fails: {failed})' if failed else ''}; leave "
                "--from-theory out, which takes the least noise that suffices"
            )
    return made
