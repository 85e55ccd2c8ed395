"""`silodp plan --trust shuffle`: what the shuffle protocol sends, adds and spends, beside ISRL-DP and central DP, before any data is touched.

Releases are counted by the same dry run as under ISRL-DP, and the budget is split between anchors and differences in the same shares.
ISRL-DP and central DP are accounted exactly (GDP), so what the binomial accountant loses in its Renyi conversion shows in the figures.
The shuffled mean is over records, whichever silo holds them; under ISRL-DP it is over silos. For silos of one size these are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from silodp.core.errors import BadInput
from silodp.core.events import TotalEvent
from silodp.core.mechanisms import shuffle
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.privacy.accounting import Budget
from silodp.core.privacy.totals import Schedule
from silodp.core.sampling import DisjointBatches, FullBatch
from silodp.core.theory import isrl as theory
from silodp.core.theory import shuffle as theory_shuffle
from silodp.lab.planning import Wish, default_delta, finite, noise_plan, planned
from silodp.server import shuffled
from silodp.server.algorithms import find
from silodp.server.settings import sampling_by_name

TRUSTS = ("isrl", "shuffle", "central")


@dataclass(frozen=True)
class _Kind(shuffled.Kind):
    """One kind of release, with the Gaussian noise multiplier in each silo, and its clip. `multiplier`, the largest, is central DP's too."""

    multipliers: tuple[float, ...]
    clip: float


def planned_for(trust: str, wish: Wish, *, least: int | None = None) -> dict:
    """The plan under this trust: `planned` for "isrl", the same with all records in one place for "central", else the shuffle protocol."""
    if trust not in TRUSTS:
        raise BadInput(f"trust {trust!r} is unknown; choose one of {', '.join(TRUSTS)}")
    if trust != "shuffle" and least is not None:
        raise BadInput("--least belongs to --trust shuffle; leave it out")
    dimension = (wish.theory or {}).get("dimension")
    if dimension is not None and dimension < 1:
        raise BadInput(f"dimension is {dimension}; --dimension is the number of parameters of the model, 1 or more")
    if trust == "isrl":
        return planned(wish)
    _check(wish)
    if trust == "central":
        return planned(replace(wish, records=(sum(wish.records),), delta=_delta(wish), participation="all"))
    return _shuffled(wish, least)


def _shuffled(wish: Wish, least: int | None) -> dict:
    """The answer that `silodp plan --trust shuffle --json` prints; the figures are those of the first kind of release.

    "differences" has them for the second kind, where there is one; "theory" the theorem, where its constants are given.
    """
    sampling, dimension = _sampling(wish), _dimension(wish)
    answering, fewest = _attendance(wish.participation, len(wish.records))
    least = fewest if least is None else least
    if not 1 <= least <= answering:
        raise BadInput(f"least is {least}; it must lie between 1 and {answering}, the silos that take part in a round")
    budget = Budget(wish.epsilon, _delta(wish))
    batches = sorted(int(sampling.batch(n)) for n in wish.records)
    kinds = _kinds(wish, budget)
    released = sum(batches[:least])
    found = numerical(kinds, released, dimension, budget)
    local = _spent(kinds, found, batches[0], dimension, budget.delta)
    spent = {
        "server": _spent(kinds, found, released, dimension, budget.delta),
        "shuffler": local if math.isfinite(local) else None,
    }
    contributions = round(answering * sum(batches) / len(batches))
    answers = [
        {
            "bits_per_silo_round": shuffle.message_bits(parameters, batches[-1], dimension),
            "noise_std": {
                "shuffle": math.sqrt(float(shuffle.variance(parameters, contributions, kind.clip))),
                "isrl": _isrl(kind, wish.records, sampling, answering),
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
    if any((wish.theory or {}).get(name) is not None for name in ("lipschitz", "smoothness", "pl", "gap")):
        answer["theory"] = _theory(wish, budget, answering)
    return answer


# --- what is asked for -----------------------------------------------------------------------------------------------------------


def _check(wish: Wish) -> None:
    for name, given in (("--noise", wish.noise != "exact"), ("--rule", wish.rule is not None), ("--user-level", wish.user_level)):
        if given:
            raise BadInput(f"{name} belongs to --trust isrl; leave it out")
    if any(n < 1 for n in wish.records):
        raise BadInput(f"records is {min(wish.records)}; a silo needs 1 record or more")
    finite(wish.epsilon)


def _delta(wish: Wish) -> float:
    """One for all silos: the smallest of their 1/n^2 if none is given."""
    return wish.delta if wish.delta is not None else min(default_delta(n) for n in wish.records)


def _dimension(wish: Wish) -> int:
    dimension = (wish.theory or {}).get("dimension")
    if dimension is None:
        raise BadInput("dimension is missing; --trust shuffle needs --dimension, the number of parameters of the model")
    return dimension


def _sampling(wish: Wish) -> FullBatch | DisjointBatches:
    algorithm = find(wish.algorithm)
    if "local_steps" in algorithm.settings:
        raise BadInput(f"{wish.algorithm} takes local steps, which are no sums over records; the shuffle protocol suits mb-sgd or spider")
    sampling = sampling_by_name(wish.sampling, algorithm, wish.schedule["rounds"])
    if not isinstance(sampling, FullBatch | DisjointBatches):
        raise BadInput(f"sampling {wish.sampling!r} has no accountant for binomial noise; use full or disjoint with --trust shuffle")
    return sampling


def _attendance(participation: str, silos: int) -> tuple[int, int]:
    """(silos that take part in a round, fewest that may)."""
    name, _, count = participation.partition(":")
    answering = int(count) if count.isdigit() else silos
    return answering, 1 if name == "random" else answering


def _kinds(wish: Wish, budget: Budget) -> list[_Kind]:
    """The kinds of release with the noise multipliers that fill the budget under ISRL-DP in every silo."""
    algorithm = find(wish.algorithm)
    plan = noise_plan(wish, algorithm, algorithm.schedule(wish.schedule), [budget] * len(wish.records))
    silos = len(wish.records)
    return [
        _Kind(
            **asdict(kind),
            multipliers=tuple(torch.as_tensor(plan.mechanisms[kind.name].noise_multiplier).reshape(-1).expand(silos).tolist()),
            clip=wish.clip * (2 if kind.name == "refine" else 1),
        )
        for kind in shuffled.kinds_of(plan, run=0, silos=silos)
    ]


# --- parameters ------------------------------------------------------------------------------------------------------------------


def numerical(kinds: Sequence[_Kind], contributions: int, dimension: int, budget: Budget) -> list[shuffle.Parameters]:
    """Least noise bits at which a ledger of totals lets all releases pass; what they spend by the accountant's best order is a little less."""
    found = shuffled.numerical(tuple(kinds), contributions, dimension, budget)
    return [shuffle.Parameters(*found[kind.name], shuffled.P) for kind in kinds]


def _spent(kinds: Sequence[_Kind], found: Sequence[shuffle.Parameters], contributions: int, dimension: int, delta: float) -> float:
    """Against whoever sees totals of so many contributions; infinite where the accountant can give no bound."""
    made = Schedule()
    for kind, p in zip(kinds, found, strict=True):
        made.add("", TotalEvent(FullBatch(), p.levels, p.noise_bits, p.p, contributions, dimension, kind.paid))
    return made.epsilon(delta)


def _isrl(kind: _Kind, records: Sequence[int], sampling: FullBatch | DisjointBatches, answering: int) -> float:
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


def _theory(wish: Wish, budget: Budget, answering: int) -> dict:
    given = wish.theory or {}
    for name in ("lipschitz", "smoothness"):
        if given.get(name) is None:
            raise BadInput(f"the theory needs --{name} as well; --lipschitz, --smoothness and --dimension belong to every theorem")
    constants = theory.Constants(
        **given, records=min(wish.records), silos=len(wish.records), answering=answering, epsilon=budget.epsilon, delta=budget.delta
    )
    return theory_shuffle.prescribe(wish.algorithm, constants).as_dict()
