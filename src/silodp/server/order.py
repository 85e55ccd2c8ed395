"""An order to train: everything that is decided before any record is read, in words and numbers
that a file can hold.

`plan`, `train` and `federation run` fill in one and the same Order, with these defaults, and a
run's folder keeps it: what a simulation rehearses is what a federation then runs. Where records
lie, and who answers, is no part of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from silodp.core.errors import BadInput
from silodp.core.sampling import Sampling

if (
    TYPE_CHECKING
):  # the command line reads the defaults below before it knows whether it needs an accountant
    from silodp.core.privacy.accounting import Budget

OUTPUTS = ("last", "random", "tail")
"""Which iterate a run hands over: the last, a uniformly random one (the paper's rule), or the
average of the tail.
"""
WEIGHTS = ("equal", "records", "precision")
TRUSTS = ("isrl", "masks", "shuffle", "central")
TOTALS = ("masks", "shuffle")
"""Trusts under which the server sees totals over silos, and no silo's own answer."""
NOISES = ("exact", "paper", "theory")
SCHEDULE = ("rounds", "phase", "local_steps", "inner", "restarts", "slope", "momentum", "kappa")
"""The settings of ready algorithms, in a user's words."""
FILES = ("algorithm", "model", "prox", "loss", "feature_map")
"""Words that may be FILE.py:NAME."""
AUTO = "auto"
"""The algorithm that leaves the choice to the advisor (`server/advice`)."""
OPEN: Any = None
"""What an order leaves open: for the advisor to choose or, where the algorithm is named, for USUAL.
"""
USUAL: dict[str, Any] = {
    "rounds": 25,
    "momentum": 0.9,
    "step": 0.5,
    "clip": 1.0,
    "weights": "equal",
    "output": "last",
}
OWN = (
    "phase",
    "local_steps",
    "inner",
    "restarts",
    "slope",
    "kappa",
    "settings",
    "anchor_share",
    "sampling",
    "rule",
    "noise",
    "lipschitz",
    "smoothness",
    "pl",
    "gap",
)
"""What only some algorithms have, or theorems: whoever says one of these has an algorithm in mind,
and without its name that is NAMED.
"""
NAMED = "spider"
EPSILON = 3.0
MODEL = "mlp:8"
LARGEST = 1e7
"""Epsilon at most: `gdp_epsilon` gives up at a mu of 1e4, which is an epsilon of about 5e7, and
evaluations add up.
"""


@dataclass(frozen=True)
class Order:
    """What to train, how, and at what price at most."""

    algorithm: str = AUTO
    model: str | None = None
    """None: over a network what the silos approve; else the advisor's, or MODEL where the algorithm
    is named.
    """
    prox: str = "zero"
    loss: str = ""
    """FILE.py:NAME; the task's own by default."""
    feature_map: str = ""
    """FILE.py:NAME, a public function of one record's features; none by default."""
    rounds: int = OPEN
    phase: int = 5
    local_steps: int = 5
    inner: int = 5
    restarts: int = 1
    slope: float = 1.0
    momentum: float = OPEN
    kappa: float = 0.7
    settings: tuple[str, ...] = ()
    """NAME=VALUE for settings that only this algorithm has."""
    step: float = OPEN
    clip: float = OPEN
    epsilon: tuple[str, ...] = ()
    """Numbers, or NAME=NUMBER for one silo. None given: EPSILON, and over a network each silo's
    whole budget.
    """
    delta: tuple[str, ...] = ()
    """As epsilon. None given: 1/n^2 of each silo, and over a network each silo's own."""
    user_level: bool = False
    """Whether epsilon and delta are for a whole silo's records, not for one of them."""
    trust: str = "isrl"
    """isrl (nobody is trusted), masks (all but `colluding` of the silos, to add their noise),
    shuffle (a shuffler, which passes on totals) or central (the server itself). A total is of
    `least` silos or more."""
    least: int | None = None
    colluding: int = 0
    drops: float = 0.0
    """Under masks: the share of questions that are asked once more, since a silo that had been
    counted on did not answer.
    """
    weights: str = OPEN
    participation: str = "all"
    sampling: str | None = None
    rule: str | None = None
    anchor_share: float | None = None
    noise: str = "exact"
    """exact (calibrated to the budgets), theory (a theorem's, with its schedule) or paper (the
    experiments' constants: shown, never run).
    """
    output: str = OPEN
    seed: int | None = None
    """Of public coins: the start, and who is asked. A simulation draws all its noise from it, too,
    where it is given.
    """
    lipschitz: float | None = None
    smoothness: float | None = None
    pl: float | None = None
    gap: float | None = None

    def __post_init__(self) -> None:
        if self.algorithm == AUTO and any(
            getattr(self, name) != getattr(type(self), name) for name in OWN
        ):
            object.__setattr__(self, "algorithm", NAMED)
        if self.algorithm != AUTO:
            for name, value in USUAL.items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, value)
        for name in ("step", "clip"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise BadInput(f"{name} is {getattr(self, name):g}; it must be greater than 0")
        for name, known in (
            ("trust", TRUSTS),
            ("noise", NOISES),
            ("weights", WEIGHTS),
            ("output", OUTPUTS),
        ):
            if getattr(self, name) not in (*known, OPEN):
                raise BadInput(
                    f"{name} {getattr(self, name)!r} is unknown; choose one of {', '.join(known)}"
                )
        check_seed(self.seed)
        if not self.totals and self.least is not None:
            raise BadInput("--least belongs to --trust masks or shuffle; leave it out")
        if self.trust != "masks" and (self.colluding or self.drops):
            raise BadInput(
                f"--{'colluding' if self.colluding else 'drops'} belongs to --trust masks; "
                "leave it out"
            )
        if self.colluding < 0 or not 0 <= self.drops <= 1:
            raise BadInput(
                f"colluding is {self.colluding} and drops {self.drops:g}; the first must "
                "be 0 or more, the second between 0 and 1"
            )
        if self.trust != "isrl":
            if self.weights == "precision":
                raise BadInput(
                    "weights by precision belong to --trust isrl: a total, or a curator, "
                    "counts each record alike; leave them out"
                )
            if self.noise == "theory":
                noise = "--from-theory"
            else:
                noise = "--noise"
            ruled = self.rule is not None and self.totals  # binomial noise has a rule of its own
            for name, given in (
                (noise, self.noise != "exact"),
                ("--rule", ruled),
                ("--user-level", self.user_level),
            ):
                if given:
                    raise BadInput(f"{name} belongs to --trust isrl; leave it out")

    @property
    def totals(self) -> bool:
        """Whether the server sees totals alone."""
        return self.trust in TOTALS

    def under(self, trust: str) -> Order:
        """The order with another trust, and nothing left that belongs to its own."""
        own: dict[str, Any] = {} if trust in TOTALS else {"least": None}
        return replace(
            self, trust=trust, **own | ({} if trust == "masks" else {"colluding": 0, "drops": 0.0})
        )

    @property
    def coins(self) -> int:
        """The seed of public coins."""
        return self.seed or 0

    @property
    def schedule(self) -> dict[str, Any]:
        """The algorithm's settings, in a user's words."""
        from silodp.server.algorithms import assignments

        own = assignments(self.settings)
        if twice := [name for name in own if name in SCHEDULE]:
            option = "--" + twice[0].replace("_", "-")
            raise BadInput(
                f"--set is for settings that only one algorithm has; give {option} "
                f"{own[twice[0]]} instead of --set {twice[0]}"
            )
        return {name: getattr(self, name) for name in SCHEDULE} | own

    @property
    def theory(self) -> dict[str, float]:
        """The constants of a theorem, as far as they are given."""
        return {
            name: value
            for name in ("lipschitz", "smoothness", "pl", "gap")
            if (value := getattr(self, name)) is not None
        }

    def words(self) -> dict[str, Any]:
        """For run.json: plain JSON, in which a file is found again from any folder."""
        own = {
            name: str(Path(text).resolve())
            for name in FILES
            if (text := getattr(self, name)) and ".py:" in text
        }
        return json.loads(json.dumps(asdict(replace(self, **own))))

    @classmethod
    def read(cls, found: object, folder: Path) -> Order:
        """The order in the run.json of this folder."""
        if isinstance(found, Mapping):
            order = found.get("order")
        else:
            order = None
        if not isinstance(order, Mapping):
            raise BadInput(
                f"{folder} holds no run with an order that this version can read; it may "
                "be of an older version: start another"
            )
        if differs := sorted(order.keys() ^ {field.name for field in fields(cls)}):
            raise BadInput(
                f"the run in {folder} is of an older version (its order differs in "
                f"{', '.join(differs)}); start another"
            )
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in order.items()
        }
        if wrong := sorted(
            name for name, hint in get_type_hints(cls).items() if not is_of(hint, given[name])
        ):
            raise BadInput(
                f"the order in {folder} is not as silodp wrote it ({', '.join(wrong)}); "
                "restore its run.json"
            )
        return cls(**given)


def is_of(hint: Any, value: Any) -> bool:
    """Whether a value that was read from a file is of a type such as `float | None`, or `tuple[str,
    ...]`.
    """
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(isinstance(v, get_args(hint)[0]) for v in value)
    return any(
        type(value) is kind or (kind is float and type(value) is int)
        for kind in get_args(hint) or (hint,)
    )


def check_seed(seed: int | None) -> None:
    if seed is not None and seed < 0:
        raise BadInput(f"seed is {seed}; it must be 0 or more")


# --- budgets -------------------------------------------------------------------------------------


def default_delta(n: int) -> float:
    """1/n^2."""
    return 1.0 / max(n, 2) ** 2


def finite(epsilon: float) -> None:
    """Only the lab's own baselines run without noise."""
    if math.isinf(epsilon):
        raise BadInput(
            "epsilon is inf, which is no privacy at all; give a finite number, such as 3"
        )
    if epsilon > LARGEST:
        raise BadInput(
            f"epsilon is {epsilon:g}, which no accountant here can tell from infinite; "
            f"give at most {LARGEST:g}, such as 3"
        )


def targets(order: Order, names: Sequence[str], counts: Sequence[int]) -> list[Budget]:
    """What the order promises at each silo: for a record, or for a whole silo. Totals and a curator
    have one promise for all: the least.
    """
    from silodp.core.privacy.accounting import Budget

    epsilon, delta = (
        by_silo(field, getattr(order, field), names) for field in ("epsilon", "delta")
    )
    found = []
    for name, n in zip(names, counts, strict=True):
        if n < 1:
            raise BadInput(f"records is {n}; a silo needs 1 record or more")
        if (own := epsilon[name] if order.epsilon else EPSILON) is None:
            raise BadInput(
                f"silo {name} has no epsilon; give --epsilon NUMBER for all silos or "
                f"--epsilon {name}=NUMBER"
            )
        finite(own)
        given = delta[name]
        found.append(Budget(own, default_delta(n) if given is None else given))
    if order.trust == "isrl":
        return found
    return [least_of_all(found)] * len(found)


def budgets_of(
    order: Order, names: Sequence[str], counts: Sequence[int], samplings: Mapping[str, Sampling]
) -> list[Budget]:
    """The budget of a record in each silo, for everything that the order asks."""
    from silodp.core.privacy.accounting import record_budget_for_user

    promised = targets(order, names, counts)
    if not order.user_level:
        return promised
    gaussian = not any(sampling.sampled for sampling in samplings.values())
    return [
        record_budget_for_user(budget, n, gaussian=gaussian)
        for budget, n in zip(promised, counts, strict=True)
    ]


def least_of_all(budgets: Sequence[Budget]) -> Budget:
    from silodp.core.privacy.accounting import Budget

    return Budget(min(b.epsilon for b in budgets), min(b.delta for b in budgets))


def with_default_delta(order: Order, names: Sequence[str], counts: Sequence[int]) -> dict[str, int]:
    """Silos that get the default delta, with their numbers of records; of several with one delta,
    the one whose it is.
    """
    given = by_silo("delta", order.delta, names)
    mine = {name: n for name, n in zip(names, counts, strict=True) if given[name] is None}
    if order.trust == "isrl" or not mine:
        return mine
    return dict([max(mine.items(), key=lambda pair: pair[1])])


def by_silo(field: str, words: Sequence[str], names: Sequence[str]) -> dict[str, float | None]:
    """NUMBER for all silos, NAME=NUMBER for one, which wins; None where nothing is said."""
    values: dict[str, float | None] = dict.fromkeys(names)
    for word in sorted(words, key=lambda w: "=" in w):
        name, equals, number = word.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            raise BadInput(
                f"{field} {word!r} is not a number; use --{field} 2.0 or --{field} NAME=2.0"
            ) from None
        if equals and name not in values:
            raise BadInput(f"{field} names silo {name!r}, but the silos are {', '.join(names)}")
        for silo in [name] if equals else names:
            values[silo] = value
    return values
