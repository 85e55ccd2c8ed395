"""An order to train: everything that is decided before any record is read, in words and numbers
that fit in a file.

`plan`, `train` and `federation run` fill in the same Order, with the defaults below, and a run's
folder stores it. So a federation runs what a simulation has rehearsed. The places of the records,
and the silos that answer, are not part of an order.
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

# The command line reads the defaults below in every command. The accountant is slow to import.
if TYPE_CHECKING:
    from silodp.core.privacy.accounting import Budget

OUTPUTS = ("last", "random", "tail")
"""The iterate that a run returns: the last, a uniformly random one (the paper's rule), or the
average of the tail.
"""
WEIGHTS = ("equal", "records", "precision")
TRUSTS = ("isrl", "masks", "shuffle", "central")
TOTALS = ("masks", "shuffle")
"""The trusts with which the server sees totals over silos, and no silo's own answer."""
NOISES = ("exact", "paper", "theory")
SCHEDULE = ("rounds", "phase", "local_steps", "inner", "restarts", "slope", "momentum", "kappa")
"""The settings of ready algorithms, in a user's words."""
FILES = ("algorithm", "model", "prox", "loss", "feature_map")
"""Fields that may be FILE.py:NAME."""
AUTO = "auto"
"""The algorithm that leaves the choice to the advisor (`server/advice`)."""
OPEN: Any = None
"""The value of a field that is left open. The advisor chooses it, or USUAL has it if the algorithm
is named.
"""
USUAL: dict[str, Any] = {
    "rounds": 25,
    "momentum": 0.9,
    "step": 0.5,
    "clip": 1.0,
    "weights": "equal",
    "output": "last",
    "recalibration": 0.0,
}
SPECIFIC = (
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
"""Fields that only some algorithms or theorems use. An order with one of these and without an
algorithm gets the algorithm NAMED.
"""
NAMED = "spider"
EPSILON = 3.0
MODEL = "mlp:8"
LARGEST = 1e7
"""Largest epsilon. `gdp_epsilon` fails at a mu of 1e4, which is an epsilon of about 5e7, and
evaluations add up.
"""


@dataclass(frozen=True)
class Order:
    """What to train, how, and at what price at most."""

    algorithm: str = AUTO
    model: str | None = None
    """Without a model, a network run has the model that the silos approve. Otherwise the advisor
    chooses it, or it is MODEL if the algorithm is named.
    """
    prox: str = "zero"
    loss: str = ""
    """FILE.py:NAME, by default the loss of the task."""
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
    """NAME=VALUE, for settings that only this algorithm has."""
    step: float = OPEN
    clip: float = OPEN
    epsilon: tuple[str, ...] = ()
    """Numbers, or NAME=NUMBER for one silo. The default is EPSILON, and over a network each silo's
    whole budget.
    """
    delta: tuple[str, ...] = ()
    """As epsilon. The default is 1/n^2 of each silo, and over a network each silo's own delta."""
    user_level: bool = False
    """Whether epsilon and delta protect all records of a silo together, not a single record."""
    trust: str = "isrl"
    """Who is trusted: isrl (no party), masks (all silos but `colluding`, to add their noise),
    shuffle (a shuffler, which passes on totals) or central (the server itself).
    """
    least: int | None = None
    """Fewest silos in a total."""
    colluding: int = 0
    drops: float = 0.0
    """With masks, the share of questions expected to be asked again because a silo dropped out."""
    weights: str = OPEN
    participation: str = "all"
    sampling: str | None = None
    rule: str | None = None
    anchor_share: float | None = None
    noise: str = "exact"
    """exact (calibrated to the budgets), theory (of a theorem, with its schedule) or paper (the
    constants of the paper's experiments, whose price is shown but which never protect a run).
    """
    output: str = OPEN
    recalibration: float = OPEN
    """Share of the budget (mu^2) that buys one last question, by which the model's risks are made
    right; 0: none is asked. The advisor decides where this is open, and a named algorithm has none.
    """
    seed: int | None = None
    """Seed of public coins: the start, and the silos that are asked. With a seed, a simulation
    draws all of its noise from it too.
    """
    lipschitz: float | None = None
    smoothness: float | None = None
    pl: float | None = None
    gap: float | None = None

    def __post_init__(self) -> None:
        """Fill in the defaults of a named algorithm. Raise BadInput for a wrong value or
        combination.
        """
        if self.algorithm == AUTO and any(
            getattr(self, name) != getattr(type(self), name) for name in SPECIFIC
        ):
            object.__setattr__(self, "algorithm", NAMED)
        if self.algorithm != AUTO:
            for name, value in USUAL.items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, value)
        for name in ("step", "clip"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise BadInput(f"{name} is {getattr(self, name):g}; it must be greater than 0")
        for name, choices in (
            ("trust", TRUSTS),
            ("noise", NOISES),
            ("weights", WEIGHTS),
            ("output", OUTPUTS),
        ):
            value = getattr(self, name)
            if value not in (*choices, OPEN):
                raise BadInput(f"{name} {value!r} is unknown; choose one of {', '.join(choices)}")
        check_seed(self.seed)
        if self.recalibration:
            self._check_recalibration()
        if not self.totals and self.least is not None:
            raise BadInput("--least belongs to --trust masks or shuffle; leave it out")
        if not self.totals and self.colluding:
            raise BadInput("--colluding belongs to --trust masks or shuffle; leave it out")
        if self.trust != "masks" and self.drops:
            raise BadInput("--drops belongs to --trust masks; leave it out")
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
            # Totals are priced by a rule of their own.
            ruled = self.rule is not None and self.totals
            for name, given in (
                (noise, self.noise != "exact"),
                ("--rule", ruled),
                ("--user-level", self.user_level),
            ):
                if given:
                    raise BadInput(f"{name} belongs to --trust isrl; leave it out")

    def _check_recalibration(self) -> None:
        if not 0 < self.recalibration < 1:
            raise BadInput(
                f"recalibration is {self.recalibration:g}; give a share of the budget between 0 "
                "and 1, such as 0.08, or --no-recalibration"
            )
        if self.noise != "exact":
            raise BadInput(
                "--from-theory and --noise paper set the noise of training alone; leave "
                "--recalibration out"
            )

    @property
    def totals(self) -> bool:
        """Return whether the server sees totals alone."""
        return self.trust in TOTALS

    def under(self, trust: str) -> Order:
        """Return the order with another trust, without the fields that belong to the present trust
        alone.
        """
        changes: dict[str, Any] = {"trust": trust}
        if trust not in TOTALS:
            changes["least"] = None
            changes["colluding"] = 0
        if trust != "masks":
            changes["drops"] = 0.0
        return replace(self, **changes)

    @property
    def coins(self) -> int:
        """Return the seed of public coins."""
        return self.seed or 0

    @property
    def schedule(self) -> dict[str, Any]:
        """Return the algorithm's settings by name. Raise BadInput if `settings` repeats a field."""
        from silodp.server.algorithms import assignments

        assigned = assignments(self.settings)
        for name, value in assigned.items():
            if name in SCHEDULE:
                option = "--" + name.replace("_", "-")
                raise BadInput(
                    f"--set is for settings that only one algorithm has; give {option} "
                    f"{value} instead of --set {name}"
                )
        return {name: getattr(self, name) for name in SCHEDULE} | assigned

    @property
    def theory(self) -> dict[str, float]:
        """Return the constants of a theorem that are given."""
        return {
            name: value
            for name in ("lipschitz", "smoothness", "pl", "gap")
            if (value := getattr(self, name)) is not None
        }

    def words(self) -> dict[str, Any]:
        """Return the order as plain JSON for run.json. The path of a file is absolute, so that it
        is found from any folder.
        """
        absolute = {
            name: str(Path(text).resolve())
            for name in FILES
            if (text := getattr(self, name)) and ".py:" in text
        }
        return json.loads(json.dumps(asdict(replace(self, **absolute))))

    @classmethod
    def read(cls, description: object, folder: Path) -> Order:
        """Return the order in the content of the run.json of this folder.

        Raise BadInput if there is none, or if it is of another version or damaged.
        """
        if isinstance(description, Mapping):
            order = description.get("order")
        else:
            order = None
        if not isinstance(order, Mapping):
            raise BadInput(
                f"{folder} contains no order that this version can read; it may be of an older "
                "version: start another run"
            )
        if differs := sorted(order.keys() ^ {field.name for field in fields(cls)}):
            raise BadInput(
                f"the run in {folder} is of an older version (its order differs in "
                f"{', '.join(differs)}); start another"
            )
        # JSON has lists where an order has tuples.
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
    """Return whether a value from a file has a type such as `float | None` or `tuple[str, ...]`."""
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(isinstance(v, get_args(hint)[0]) for v in value)
    return any(
        type(value) is kind or (kind is float and type(value) is int)
        for kind in get_args(hint) or (hint,)
    )


def check_seed(seed: int | None) -> None:
    """Raise BadInput if the seed is negative."""
    if seed is not None and seed < 0:
        raise BadInput(f"seed is {seed}; it must be 0 or more")


# --- budgets -------------------------------------------------------------------------------------


def default_delta(n: int) -> float:
    """Return 1/n^2."""
    return 1.0 / max(n, 2) ** 2


def finite(epsilon: float) -> None:
    """Raise BadInput if epsilon is infinite or too large. Only internal baselines run without
    noise.
    """
    if math.isinf(epsilon):
        raise BadInput(
            "epsilon is inf, which is no privacy at all; give a finite number, such as 3"
        )
    if epsilon > LARGEST:
        raise BadInput(
            f"epsilon is {epsilon:g}, which the accountants cannot distinguish from infinite; "
            f"give at most {LARGEST:g}, such as 3"
        )


def targets(order: Order, names: Sequence[str], counts: Sequence[int]) -> list[Budget]:
    """Return what the order promises at each silo, for a record or for a whole silo.

    Totals and a trusted server have one promise for all silos: the least epsilon and the least
    delta. Raise BadInput for a silo without records or without a valid epsilon.
    """
    from silodp.core.privacy.accounting import Budget

    epsilon, delta = (
        by_silo(field, getattr(order, field), names) for field in ("epsilon", "delta")
    )
    budgets = []
    for name, n in zip(names, counts, strict=True):
        if n < 1:
            raise BadInput(f"records is {n}; a silo needs 1 record or more")
        silo_epsilon = epsilon[name]
        if not order.epsilon:
            silo_epsilon = EPSILON
        if silo_epsilon is None:
            raise BadInput(
                f"silo {name} has no epsilon; give --epsilon NUMBER for all silos or "
                f"--epsilon {name}=NUMBER"
            )
        finite(silo_epsilon)
        silo_delta = delta[name]
        if silo_delta is None:
            silo_delta = default_delta(n)
        budgets.append(Budget(silo_epsilon, silo_delta))
    if order.trust == "isrl":
        return budgets
    return [least_of_all(budgets)] * len(budgets)


def budgets_of(
    order: Order, names: Sequence[str], counts: Sequence[int], samplings: Mapping[str, Sampling]
) -> list[Budget]:
    """Return the budget of a record in each silo, for everything that the order asks."""
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
    """Return the budget of the least epsilon and the least delta."""
    from silodp.core.privacy.accounting import Budget

    return Budget(min(b.epsilon for b in budgets), min(b.delta for b in budgets))


def with_default_delta(order: Order, names: Sequence[str], counts: Sequence[int]) -> dict[str, int]:
    """Return the silos with the default delta, and their numbers of records.

    If all silos share one delta, return only the silo with the most records, which decides it.
    """
    given = by_silo("delta", order.delta, names)
    defaulted = {name: n for name, n in zip(names, counts, strict=True) if given[name] is None}
    if order.trust == "isrl" or not defaulted:
        return defaulted
    largest = max(defaulted, key=lambda name: defaulted[name])
    return {largest: defaulted[largest]}


def by_silo(field: str, words: Sequence[str], names: Sequence[str]) -> dict[str, float | None]:
    """Return the value of each silo, or None without one.

    NUMBER is for all silos. NAME=NUMBER is for one silo, and has priority. Raise BadInput for
    anything else, or for an unknown silo.
    """
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
        if equals:
            values[name] = value
        else:
            values = dict.fromkeys(names, value)
    return values
