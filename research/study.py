"""Studies: which curves are compared, on what data and schedule, and what is tuned for each. A
study is all that decides a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from silodp.core.errors import BadInput
from silodp.core.problem.build import Words, build
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.models import lenet
from silodp.core.problem.problem import Problem
from silodp.core.problem.task import Task
from silodp.host.extension import file_hash, load
from silodp.server.algorithms import WORDS, find
from silodp.server.order import Order
from silodp.simulation.sweep import Arm

EPSILONS = (0.75, 1.0, 1.5, 3.0, 6.0, 12.0, 18.0)

PAPER = (
    "spider",
    "mb-sgd",
    "local-sgd",
    "spider-paper",
    "mb-sgd-paper",
    "local-sgd-paper",
    "spider-open",
    "mb-sgd-open",
    "local-sgd-open",
)
RIVALS = (
    "spider-paper",
    "mb-sgd",
    "local-sgd",
    "spider-diff",
    "diff2",
    "scaffold",
    "disk",
    "momentum",
    "adam",
    "balanced",
    "diff2-local",
    "accelerated",
    "localized",
)

CURVES = {
    "spider": "SPIDER, exact accounting, best of both forms (phase 1 is MB-SGD)",
    "spider-diff": "SPIDER, exact accounting, difference clipping (phase > 1)",
    "mb-sgd": "MB-SGD, exact accounting",
    "local-sgd": "Local SGD, exact accounting",
    "spider-paper": "SPIDER, the paper's noise, best of both forms",
    "spider-diff-paper": "SPIDER, the paper's noise (phase > 1)",
    "mb-sgd-paper": "MB-SGD, the paper's noise",
    "local-sgd-paper": "Local SGD, the paper's noise",
    "spider-open": "SPIDER, not private",
    "spider-diff-open": "SPIDER, not private, difference clipping (phase > 1)",
    "mb-sgd-open": "MB-SGD, not private",
    "local-sgd-open": "Local SGD, not private",
    "diff2": "DIFF2",
    "diff2-local": "DIFF2, local steps",
    "accelerated": "Accelerated MB-SGD",
    "localized": "Localized MB-SGD",
    "scaffold": "DP-SCAFFOLD",
    "disk": "DiSK",
    "momentum": "MB-SGD with server momentum",
    "adam": "MB-SGD with server Adam",
    "balanced": "MB-SGD, half of the silos in turn",
    "linear": "Logistic regression, server momentum",
    "mb-sgd-shuffle": "MB-SGD, totals",
    "spider-shuffle": "SPIDER, totals (phase > 1)",
    "momentum-shuffle": "MB-SGD with server momentum, totals",
    "mb-sgd-masks": "MB-SGD, masks, 2 silos may collude",
    "spider-masks": "SPIDER, masks, 2 silos may collude (phase > 1)",
    "mb-sgd-central": "MB-SGD, central DP",
    "spider-central": "SPIDER, central DP (phase > 1)",
    "momentum-central": "MB-SGD with server momentum, central DP",
}


@dataclass(frozen=True)
class Grid:
    """What is tuned, by training loss: every combination that an algorithm takes."""

    steps: tuple[float, ...]
    clips: tuple[float, ...]
    phases: tuple[int, ...]
    slopes: tuple[float, ...] = (0.5, 2.0)
    local: tuple[int, ...] = (2,)
    local_steps: tuple[float, ...] = ()
    """Step sizes of local SGD where they differ."""
    alternate: bool = True
    """Whether SPIDER's alternate form is a candidate too."""
    momenta: tuple[float, ...] = (0.5, 0.9)
    kappas: tuple[float, ...] = (0.5, 0.7)
    adam_steps: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1)
    shares: tuple[float, ...] = (0.5, 0.9)
    """Shares of the budget for SPIDER's anchors, beside the default."""


@dataclass(frozen=True)
class Own:
    """An algorithm that somebody names, with settings of its own: steps and clips are tuned, and
    the slope of its differences if it takes one.
    """

    algorithm: str
    given: dict[str, str]
    file: str
    """SHA-256 of its FILE.py: a folder is not continued with another."""

    @classmethod
    def of(cls, text: str, given: Mapping[str, str]) -> Own:
        return cls(text, dict(given), file_hash(text))

    def order(self, **words: Any) -> Order:
        """An order of these words, and of what is given; the rest is as in every order."""
        given = {
            name: WORDS[name].parse(name, text)
            for name, text in self.given.items()
            if name in WORDS
        }
        own = tuple(f"{name}={text}" for name, text in self.given.items() if name not in WORDS)
        return Order(self.algorithm, **words | given, settings=own)

    def arm(self, study: Study) -> Arm:
        few = min(Order.phase, study.rounds)
        order = self.order(rounds=study.rounds, phase=few, inner=few)
        if "slope" in find(self.algorithm).settings and "slope" not in self.given:
            slopes = {"slope": study.grid.slopes}
        else:
            slopes = {}
        return Arm(self.algorithm, order, _tuned(study, **slopes))


@dataclass(frozen=True)
class Study:
    """Everything that decides a result: written to config.json, and compared when a folder is
    continued.
    """

    dataset: str
    rounds: int
    grid: Grid
    trials: int = 10
    epsilons: tuple[float, ...] = EPSILONS
    model: str = "mlp:5"
    cohort: int | None = None
    """M: how many silos, uniformly at random, answer a round; all by default."""
    methods: tuple[str, ...] = PAPER
    sampling: str = "full"
    """Batches of gradients and differences; SPIDER's anchors always take every record."""
    draw: int = 0
    """Which draw of the noise on each split: a study repeated with another says how much of its
    result is chance.
    """

    features: str = ""
    """A map that ships, through which the model sees a data set's pixels; by default it sees what
    the paper makes of them.
    """
    own: tuple[Own, ...] | None = None
    """Algorithms beside those of `methods`, by name or FILE.py:NAME."""

    @property
    def own_curves(self) -> list[str]:
        return [one.algorithm for one in self.own or ()]

    def arms(self) -> list[Arm]:
        return [arm for method in self.methods for arm in ARMS[method](self)] + [
            one.arm(self) for one in self.own or ()
        ]

    def beside(self, algorithms: Sequence[str], given: Mapping[str, str]) -> Study:
        """The same study with curves of these algorithms too; of their settings those that are
        given are fixed.
        """
        curves = tuple(name for name in algorithms if name in ARMS and name not in self.methods)
        own = tuple(Own.of(name, given) for name in algorithms if name not in ARMS)
        study = replace(self, methods=self.methods + curves, own=own or None)
        study.arms()  # what is wrong is said before anything is run
        return study

    def placed(self, arm: Arm, silos: int) -> Arm:
        """The arm with the study's batches, and those of so many silos that answer a round."""
        algorithm = find(arm.order.algorithm)
        half = max(1, silos // 2)
        if arm.curve == "balanced":
            who = f"balanced:{half}"
        elif self.cohort:
            who = f"uniform:{self.cohort}"
        else:
            who = "all"
        own = arm.order.sampling or algorithm.disjoint
        if own:
            batches = arm.order.sampling
        elif self.sampling == "full":
            batches = None
        else:
            batches = self.sampling
        if batches and "anchor" in algorithm.kinds:
            batches = ",".join(
                f"{kind}={'full' if kind == 'anchor' else batches}" for kind in algorithm.kinds
            )
        return replace(arm, order=replace(arm.order, participation=who, sampling=batches))

    def problem(self, features: Sequence[int], classes: int) -> Problem:
        if self.model == "cnn":
            return Problem(lenet(features[0], classes), cross_entropy)
        return build(Words(self.model, Task.plain(classes)), math.prod(features), load=load)


# --- what each curve tries -----------------------------------------------------------------------


def _tuned(study: Study, **more: tuple[float, ...]) -> dict[str, tuple[float, ...]]:
    return {"step": study.grid.steps, "clip": study.grid.clips, **more}


def _arm(
    study: Study,
    curve: str,
    noise: str,
    grid: dict[str, tuple[float, ...]],
    algorithm: str,
    **words: Any,
) -> Arm:
    """`noise` is exact, the paper's, or none."""
    order = Order(
        algorithm, rounds=study.rounds, noise="paper" if noise == "paper" else "exact", **words
    )
    return Arm(curve, order, grid, private=noise != "none")


def _spider(
    study: Study,
    curve: str,
    noise: str,
    phases: Sequence[int],
    algorithm: str = "spider",
    **words: Any,
) -> list[Arm]:
    """One arm for each phase; the paper's noise goes with plain differences, ours with clipped
    ones.

    Phase 1 is MB-SGD, whose runs count for SPIDER too; with the paper's constants it is not, for
    SPIDER's anchors get more noise.
    """
    grid = _tuned(study, slope=(math.inf,) if noise == "paper" else study.grid.slopes)
    least = 1 if noise == "paper" else 2
    return [
        _arm(study, curve, noise, grid, algorithm, phase=q, **words)
        for q in phases
        if least <= q <= study.rounds
    ]


def _both_forms(study: Study, curve: str, noise: str) -> list[Arm]:
    if noise == "paper":
        slopes = (math.inf,)
    else:
        slopes = study.grid.slopes[-1:]
    alternate = _arm(
        study, curve, noise, _tuned(study, slope=slopes), "spider-alternate", anchor_share=0.5
    )
    phases = () if noise == "none" else study.grid.phases
    return _spider(study, curve, noise, phases) + ([alternate] if study.grid.alternate else [])


def _shared(study: Study) -> list[Arm]:
    """SPIDER with phases > 1, with the default split of the budget and with others."""
    return [
        arm
        for s in (None, *study.grid.shares)
        for arm in _spider(study, "spider-diff", "exact", study.grid.phases, anchor_share=s)
    ]


def _mb_sgd(study: Study, curve: str, noise: str, **words: Any) -> list[Arm]:
    return [_arm(study, curve, noise, _tuned(study), "mb-sgd", **words)]


def _local(study: Study, curve: str, noise: str, algorithm: str = "local-sgd") -> list[Arm]:
    grid = {"step": study.grid.local_steps or study.grid.steps, "clip": study.grid.clips}
    return [_arm(study, curve, noise, grid, algorithm, local_steps=k) for k in study.grid.local]


def _rival(study: Study, algorithm: str, curve: str = "", **grid: tuple[float, ...]) -> list[Arm]:
    return [_arm(study, curve or algorithm, "exact", _tuned(study, **grid), algorithm)]


def _convex(study: Study, algorithm: str, each: Sequence[dict[str, Any]]) -> list[Arm]:
    """On disjoint batches and on all records in every round."""
    if find(algorithm).disjoint:
        other = "full"
    else:
        other = "disjoint"
    return [
        _arm(study, algorithm, "exact", _tuned(study), algorithm, sampling=batches, **words)
        for words in each
        for batches in (None, other)
    ]


COLLUDING = 2
"""Silos that may tell their noise, in studies of masks. With none of them, masks and a shuffle have
the same totals.
"""


def _trusting(study: Study, name: str, trust: str) -> list[Arm]:
    words = {"trust": trust, "colluding": COLLUDING if trust == "masks" else 0}
    curve = f"{name}-{trust}"
    if name == "spider":
        return _spider(study, curve, "exact", study.grid.phases, **words)
    grid = {"momentum": study.grid.momenta} if name == "momentum" else {}
    return [_arm(study, curve, "exact", _tuned(study, **grid), name, **words)]


ARMS: dict[str, Callable[[Study], list[Arm]]] = {
    **{
        f"{method}{kind}": lambda s, arms=arms, curve=f"{method}{kind}", noise=noise: arms(
            s, curve, noise
        )
        for method, arms in (("spider", _both_forms), ("mb-sgd", _mb_sgd), ("local-sgd", _local))
        for kind, noise in (("", "exact"), ("-paper", "paper"), ("-open", "none"))
    },
    "spider-diff": _shared,
    "spider-diff-open": lambda s: _spider(s, "spider-diff-open", "none", s.grid.phases),
    "diff2": lambda s: _spider(s, "diff2", "exact", s.grid.phases, "diff2"),
    "diff2-local": lambda s: [
        arm
        for k in s.grid.local
        for arm in _spider(s, "diff2-local", "exact", s.grid.phases, "diff2-local", local_steps=k)
    ],
    "accelerated": lambda s: _convex(s, "accelerated", [{"restarts": k} for k in (1, 2)]),
    "localized": lambda s: _convex(
        s, "localized", [{"settings": (f"pull={pull}",)} for pull in (0.01, 0.1)]
    ),
    "scaffold": lambda s: _local(s, "scaffold", "exact", "scaffold"),
    "disk": lambda s: _rival(s, "disk", kappa=s.grid.kappas),
    "momentum": lambda s: _rival(s, "momentum", momentum=s.grid.momenta),
    "adam": lambda s: _rival(s, "adam", step=s.grid.adam_steps, momentum=(0.0, 0.9)),
    "balanced": lambda s: _mb_sgd(s, "balanced", "exact"),
    "linear": lambda s: _rival(s, "momentum", "linear", momentum=s.grid.momenta),
    **{
        f"{name}-{trust}": lambda s, name=name, trust=trust: _trusting(s, name, trust)
        for name in ("mb-sgd", "spider", "momentum")
        for trust in ("masks", "shuffle", "central")
    },
}

# --- the paper's figures -------------------------------------------------------------------------


def _even(low: float, high: float, count: int) -> tuple[float, ...]:
    return tuple(np.linspace(math.exp(low), math.exp(high), count).round(6).tolist())


WBCD = Study(
    "wbcd",
    25,
    Grid(_even(-9, 0, 15), (0.1, 1.0, 5.0, 10.0), tuple(range(1, 11)), (0.25, 1.0), (2, 4)),
)
MNIST = Grid(_even(-9, 0, 5), (1.0, 5.0, 10.0, 100.0, 10000.0), (1, 2, 3, 4), slopes=(1.0,))
CIFAR = Grid((), (1.0,), (1, 2), slopes=(1.0,), alternate=False)

FIGURES: dict[str, Study] = {
    "wbcd": WBCD,
    **{
        f"mnist-M{m}-R{r}": Study(
            "mnist",
            r,
            replace(MNIST, phases=MNIST.phases[: 2 if r == 25 else 4]),
            model="mlp:64",
            cohort=None if m == 25 else m,
        )
        for m in (25, 12)
        for r in (25, 50)
    },
    "cifar10-R50": Study(
        "cifar10",
        50,
        replace(CIFAR, steps=_even(-5, 0, 12)[6::5]),
        model="cnn",
        trials=3,
        epsilons=(0.75, 3.0, 18.0),
    ),
    "cifar10-R100": Study(
        "cifar10",
        100,
        replace(CIFAR, steps=_even(-5, 1, 8)[3::4]),
        model="cnn",
        trials=3,
        epsilons=(0.75, 3.0, 18.0),
    ),
}
"""The paper's seven figures with the grids of its appendix (evenly spaced is read as linear);
slopes and local steps are ours.

For CIFAR-10, where a run takes each of 48,000 images in every round, a part of them: two steps, one
clip, phases 1 and 2, no alternate form, three epsilons and three splits.
"""


LEADERBOARD: dict[str, Study] = {
    "leaderboard-wbcd": replace(
        WBCD, grid=replace(WBCD.grid, phases=(1, 2, 4, 8), local=(2,)), trials=20, methods=RIVALS
    ),
    "leaderboard-mnist": replace(
        FIGURES["mnist-M25-R50"],
        grid=replace(MNIST, phases=(1, 2, 4), slopes=(0.5, 2.0)),
        trials=5,
        methods=RIVALS,
    ),
    "leaderboard-cifar10": replace(
        FIGURES["cifar10-R50"],
        grid=replace(
            FIGURES["cifar10-R50"].grid, kappas=(0.7,), adam_steps=(0.01, 0.02), shares=()
        ),
        methods=RIVALS,
    ),
}
"""Every method of ours and others under the same exact budget, beside SPIDER with the paper's
noise.
"""

FEATURES: dict[str, Study] = {
    "leaderboard-wbcd-linear": Study(
        "wbcd",
        10,
        Grid((0.3, 1.0, 3.0), (0.5, 1.0), (), momenta=(0.5,)),
        model="logistic",
        trials=20,
        methods=("linear",),
    ),
    "leaderboard-mnist-linear": Study(
        "mnist",
        20,
        Grid((0.3, 0.7, 1.5), (1.5, 3.0), (), momenta=(0.9,)),
        model="logistic",
        features="digit",
        trials=5,
        methods=("linear",),
    ),
    "leaderboard-cifar10-linear": Study(
        "cifar10",
        20,
        Grid((0.5, 1.0, 2.0), (3.0,), (), momenta=(0.9,)),
        model="logistic",
        features="photo:256",
        trials=3,
        epsilons=(0.75, 1.5, 3.0, 6.0, 18.0),
        methods=("linear",),
    ),
}
"""Linear models beside the paper's networks: the same splits and budgets, few rounds and, of
pictures, public features.
"""

_SMALL = {
    "wbcd": replace(WBCD.grid, phases=(2, 5), slopes=(0.25, 1.0, math.inf), shares=()),
    "mnist": replace(MNIST, phases=(2, 5), slopes=(0.5, 2.0, math.inf), shares=()),
}
VARIANCE: dict[str, Study] = {
    f"variance-{data}-R{rounds}{f'-M{cohort}' if cohort else ''}-{sampling.replace(':', '')}": Study(  # noqa: E501
        data,
        rounds,
        _SMALL[data],
        epsilons=(1.0, 6.0, 18.0),
        model="mlp:5" if data == "wbcd" else "mlp:64",
        cohort=cohort,
        sampling=sampling,
        trials=10 if data == "wbcd" else 5,
        methods=("mb-sgd", "spider-diff", "mb-sgd-open", "spider-diff-open"),
    )
    for data, rounds, cohort, sampling in (
        ("mnist", 10, None, "full"),
        ("mnist", 50, None, "full"),
        ("mnist", 200, None, "full"),
        ("mnist", 50, 12, "full"),
        ("mnist", 50, 3, "full"),
        ("mnist", 50, None, "poisson:0.02"),
        ("wbcd", 25, None, "full"),
        ("wbcd", 100, None, "full"),
        ("wbcd", 25, 1, "full"),
        ("wbcd", 25, None, "poisson:0.1"),
    )
}
"""Where variance reduction might help: many rounds, few silos, few that answer, small batches."""

TRUST: dict[str, Study] = {
    "trust-mnist": replace(
        FIGURES["mnist-M25-R50"],
        grid=replace(
            MNIST,
            steps=(0.125, 0.25, 0.375, 0.5, 0.75, 1.0),
            clips=(5.0, 10.0),
            phases=(2,),
            slopes=(2.0,),
            shares=(),
        ),
        trials=16,
        methods=(
            "mb-sgd",
            "spider-diff",
            *(
                f"{name}-{trust}"
                for trust in ("shuffle", "masks", "central")
                for name in ("mb-sgd", "spider")
            ),
        ),
    ),
    "trust-wbcd": Study(
        "wbcd",
        25,
        Grid((0.0625, 0.125, 0.25, 0.5, 1.0), (0.25, 0.5, 1.0), (), momenta=(0.9,)),
        model="logistic",
        trials=100,
        methods=("momentum", "momentum-shuffle", "momentum-central"),
    ),
}
"""What trust costs: the same algorithms under ISRL-DP, in totals with and without silos that
collude, and under central DP. The grid of MNIST is around what the paper's whole grid picks.
"""

STUDIES = {**FIGURES, **LEADERBOARD, **FEATURES, **VARIANCE, **TRUST}


def demo(dataset: str, rounds: int, *, hidden: int, full: bool) -> Study:
    """`python -m research compare`: the paper's breast-cancer experiment, or its likes on other
    data, over a thinned grid unless `full`.
    """
    grid = WBCD.grid
    if not full:
        grid = replace(
            grid,
            steps=grid.steps[::2],
            phases=(1, 2, 5),
            slopes=(0.25, 1.0),
            local=(2,),
            alternate=False,
        )
    return Study(
        dataset,
        rounds,
        grid,
        model=f"mlp:{hidden}",
        methods=tuple(m for m in PAPER if m != "spider-open"),
    )


def reduced(study: Study) -> Study:
    """What two cores can do: two trials at three epsilons, over a grid around what the whole grid
    picks.
    """
    grid = study.grid
    if study.dataset == "wbcd":
        return replace(
            study,
            trials=5,
            epsilons=(0.75, 3.0, 18.0),
            grid=replace(grid, steps=grid.steps[4::5], phases=(1, 2, 5), slopes=(1.0,), local=(2,)),
        )
    thin = replace(
        grid,
        steps=grid.steps[len(grid.steps) // 2 :: 2],
        clips=grid.clips[:2],
        phases=(1, 2),
        slopes=(2.0,),
        local_steps=(),
    )
    return replace(study, trials=2, epsilons=(0.75, 3.0, 18.0), grid=thin)


def studies_by_name(name: str) -> dict[str, Study]:
    """The named study; "all" are the paper's figures; a data set's figures; or a family:
    "leaderboard", its "linear" models alone, "variance" or "trust".
    """
    families = {
        "all": FIGURES,
        "leaderboard": {**LEADERBOARD, **FEATURES},
        "linear": FEATURES,
        "variance": VARIANCE,
        "trust": TRUST,
    }
    found = families.get(name) or {
        k: s for k, s in STUDIES.items() if name in (k, s.dataset) and (k in FIGURES or name == k)
    }
    if not found:
        raise BadInput(
            f"figure {name!r} is unknown; choose all, leaderboard, linear, variance, "
            f"trust, wbcd, mnist, cifar10 or one of {', '.join(STUDIES)}"
        )
    return found
