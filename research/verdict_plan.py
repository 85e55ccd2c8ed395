"""The verdict on the paper, written down before it is run: one primary comparison, and what is
varied from it, one thing at a time.

The primary comparison is the authors' own protocol with noise that keeps its word. What theirs is
was read from the paper's appendix and from the file that they published (DP_FL2.py): SPIDER's
gradients are clipped to L each and then subtracted; a batch of MB-SGD, of SPIDER's alternate form
and of Local SGD's steps is sqrt(24 / R) / 2 of a silo's records, of SPIDER with phase q sqrt(q)
times that, and all at most; Local SGD takes so many noisy steps a round, of one record each; steps
are evenly spaced in their logarithm; a curve has the setting with the least training loss. Where
they draw with replacement, for which no accountant is known, a record is drawn by a coin of its own
(Poisson).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from research.study import EPSILONS
from silodp.core.errors import BadInput
from silodp.core.sampling import FullBatch, Poisson, Sampling

CONSTANT = 24
"""Of the authors' batch size, "the largest epsilon that we test"."""
OUTPUTS = ("last", "random", "least")
"""The last iterate, a uniformly random one (the paper's listing), and that of the least training
loss (the authors' file), which is not private.
"""


def spaced(low: float, high: float, count: int, *, log: bool = True) -> tuple[float, ...]:
    if log:
        points = np.exp(np.linspace(low, high, count))
    else:
        points = np.linspace(math.exp(low), math.exp(high), count)
    return tuple(float(f"{p:.6g}") for p in points)


@dataclass(frozen=True)
class Figure:
    """One of the paper's seven figures, with the grid of its appendix."""

    dataset: str
    rounds: int
    span: tuple[float, float, int]
    """Exponents of the least and the largest step, and how many there are."""
    clips: tuple[float, ...]
    phases: tuple[int, ...]
    """Above 1: phase 1 is MB-SGD, by definition and with the same noise."""
    model: str
    trials: int = 20
    cohort: int | None = None
    """M: how many silos, uniformly at random, answer a round; all by default."""
    slopes: tuple[float, ...] = (1.0,)
    """Of the forms that clip a difference by the move of w: ours."""
    local_span: tuple[float, float, int] | None = None
    """Of Local SGD's steps, where they have a grid of their own."""
    every: int = 1
    """The output rule "least" looks at the training loss every so many rounds."""
    records: int | None = None
    """Training records of a silo, where they are fewer than the data set has."""
    wider: int = 13
    """How many steps there are where a condition sets their span."""
    tuned_on: int | None = None
    """Splits that settings are picked on, before the picked ones alone run on all of them; by
    default all.
    """


CLIPS = (0.001, 0.01, 0.1, 1.0, 5.0, 10.0)
FIGURES: dict[str, Figure] = {
    "wbcd": Figure(
        "wbcd",
        25,
        (-9, 0, 15),
        (0.1, 1.0, 5.0, 10.0),
        tuple(range(2, 11)),
        "mlp:5",
        slopes=(0.25, 1.0),
    ),
    **{
        f"mnist-M{m}-R{r}": Figure(
            "mnist",
            r,
            (-9, 0, 5),
            (1.0, 5.0, 10.0, 100.0, 10000.0),
            (2,) if r == 25 else (2, 3, 4),
            "mlp:64",
            cohort=None if m == 25 else m,
            every=1 if r == 25 else 2,
        )
        for m, r in ((25, 25), (12, 50), (12, 25), (25, 50))
    },
    "cifar10-R50": Figure(
        "cifar10",
        50,
        (-5, 0, 12),
        CLIPS,
        (2, 3, 4),
        "cnn",
        5,
        local_span=(-5, 1, 20),
        every=25,
        records=1000,
        tuned_on=1,
    ),
    "cifar10-R100": Figure(
        "cifar10",
        100,
        (-5, 1, 8),
        CLIPS,
        tuple(range(2, 9)),
        "cnn",
        5,
        local_span=(-5, 1, 20),
        every=25,
        records=1000,
        tuned_on=1,
    ),
}
"""Of CIFAR-10 settings are picked on the first split alone: on all five the grid would take an H200
an hour and a half.
"""


@dataclass(frozen=True)
class Condition:
    """The primary comparison, or that with one thing changed."""

    name: str
    said: str
    batches: str = "authors"
    """"authors" (the file's), "text" (the text's, which shrink with epsilon) or "full"."""
    form: str = "each"
    noise: str = "exact"
    """"exact" (scaled until a run spends its epsilon, at the text's split between anchors and
    differences), "text" or "file" (the constants of the paper's text, or of the published file), or
    "none"."""
    log: bool = True
    """Whether steps are evenly spaced in their logarithm."""
    optimiser: str = "sgd"
    """Of Local SGD's steps: the file makes a second optimiser, Adam, which replaces the first."""
    curves: tuple[str, ...] = ("mb-sgd", "spider", "alternate", "local-sgd")
    span: tuple[float, float] | None = None
    """Exponents of the least and the largest step, where they are others than the figure's."""
    records: float = 1.0
    """Times as many training records, on CIFAR-10, whose primary comparison has 1,000 a class of
    4,800; then phases above 1 are on a part of the grid.
    """


CONDITIONS: dict[str, Condition] = {
    c.name: c
    for c in (
        Condition("primary", "The authors' forms, batches and grids, and sound noise"),
        Condition("text", "with the constants of the paper's text", noise="text"),
        Condition(
            "file", "with the constants of the published file", noise="file", curves=("spider",)
        ),
        Condition(
            "full", "on full batches", batches="full", curves=("mb-sgd", "spider", "alternate")
        ),
        Condition(
            "small",
            "on batches that shrink with epsilon, as the text's do for the alternate form",
            batches="text",
            curves=("mb-sgd", "spider", "alternate"),
        ),
        Condition(
            "move",
            "with our differences, clipped at slope x move",
            form="move",
            curves=("spider", "alternate"),
        ),
        Condition(
            "both",
            "with both clippings of differences",
            form="both",
            curves=("spider", "alternate"),
        ),
        Condition(
            "linear",
            "with steps evenly spaced on the linear scale",
            log=False,
            curves=("mb-sgd", "spider", "alternate"),
        ),
        Condition(
            "many",
            "with all 4,800 training records a class, phases above 1 on a part of the grid",
            curves=("mb-sgd", "spider", "alternate"),
            records=4.8,
        ),
        Condition(
            "adam", "with Adam for Local SGD's steps", optimiser="adam", curves=("local-sgd",)
        ),
        Condition("open", "without noise", noise="none"),
        Condition(
            "wide",
            "without noise, on full batches and with larger steps",
            "full",
            noise="none",
            curves=("mb-sgd", "alternate"),
            span=(-2, 4),
        ),
    )
}
"""What a condition does not change is read from where it is run: MB-SGD has no differences to clip,
and the file's constants are the text's but for SPIDER's."""


LEFT_OUT = (
    (
        "Local SGD on CIFAR-10: its K steps of one record, 17,000 to 24,000 one after the "
        "other for each of 840 settings in 10 silos with 62,006 "
        "parameters each, would take an H200 hours."
    ),
    (
        "Phases above 1 of CIFAR-10 with all 4,800 training records a class on the whole grid: "
        "12 of 72 settings stand for it."
    ),
    (
        "The file's clipping of each tensor by itself, which needs sqrt(tensors) times the "
        "noise: it is not priced as anything sound."
    ),
    "Draws with replacement: no accountant is known for them.",
)
"""What is not run, whatever the time."""


@dataclass(frozen=True)
class Arm:
    """One algorithm with one schedule: what is tuned of it is step, clip and, in forms that have
    one, slope.
    """

    curve: str
    """"mb-sgd", "spider" (phase > 1, and 1 with the file's constants), "alternate" or "local-sgd".
    """
    phase: int = 1

    @property
    def name(self) -> str:
        if self.curve == "spider":
            return f"{self.curve}-q{self.phase}"
        return self.curve


def arms(figure: Figure, condition: Condition) -> list[Arm]:
    """With the file's constants phase 1 is not MB-SGD: its anchors have less noise, and the file
    tries it.
    """
    if condition.records != 1 and figure.dataset != "cifar10":
        return []
    phases = ((1,) if condition.noise == "file" else ()) + figure.phases
    if condition.noise == "none":
        phases = tuple(q for q in phases if q <= 3)
    found = {"spider": [Arm("spider", q) for q in phases]}
    curves = [c for c in condition.curves if not (c == "local-sgd" and figure.model == "cnn")]
    return [arm for curve in curves for arm in found.get(curve, [Arm(curve)])]


def records_of(figure: Figure, condition: Condition) -> int | None:
    """Training records of a silo; all that there are by default."""
    if figure.records is None:
        return None
    return round(figure.records * condition.records)


def rate(figure: Figure, condition: Condition, arm: Arm, epsilon: float) -> float:
    """The share of a silo's records in a batch."""
    if condition.batches == "full" and arm.curve != "local-sgd":
        return 1.0
    return min(
        1.0,
        math.sqrt(
            (epsilon if condition.batches == "text" else CONSTANT) * arm.phase / figure.rounds
        )
        / 2,
    )


def sampling(figure: Figure, condition: Condition, arm: Arm, epsilon: float) -> Sampling:
    share = rate(figure, condition, arm, epsilon)
    return FullBatch() if share == 1 else Poisson(share)


def local_count(figure: Figure, counts: tuple[int, ...]) -> int:
    """K: Local SGD's steps a round, of one record each."""
    return max(1, int(min(counts) * math.sqrt(CONSTANT / figure.rounds) / 2))


def grid(figure: Figure, condition: Condition, arm: Arm) -> list[dict[str, float]]:
    """Every setting that is tried."""
    if arm.curve == "local-sgd" and figure.local_span:
        span = figure.local_span
    else:
        span = figure.span
    if condition.span:
        span = (*condition.span, figure.wider)
    axes: dict[str, tuple[float, ...]] = {
        "step": spaced(*span, log=condition.log),
        "clip": figure.clips,
    }
    if condition.records != 1 and arm.curve == "spider":  # where most picks of 1,000 records lie
        axes = {"step": axes["step"][::-2][:4], "clip": axes["clip"][-3:]}
    if arm.curve in ("spider", "alternate") and condition.form != "each":
        axes["slope"] = figure.slopes
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


@dataclass(frozen=True)
class Unit:
    """What is run at one go and kept in one file."""

    figure: str
    condition: str
    arm: Arm
    trials: tuple[int, ...]
    epsilons: tuple[float, ...]
    picked: bool = False
    """Whether only the settings that were picked before are run."""

    @property
    def key(self) -> str:
        part = f"t{self.trials[0]}-{self.trials[-1]}" + (
            f"-e{self.epsilons[0]:g}" if len(self.epsilons) == 1 else ""
        )
        return f"{self.figure}.{self.condition}.{self.arm.name}.{part}{'.picked' if self.picked else ''}"  # noqa: E501


def units(
    name: str,
    condition: Condition,
    figures: dict[str, Figure] | None = None,
    epsilons: tuple[float, ...] = EPSILONS,
) -> Iterator[Unit]:
    """A figure's work under one condition, in the order in which it is best done."""
    figure = (figures or FIGURES)[name]
    if condition.noise == "none":
        at = (math.inf,)
    else:
        at = epsilons
    # one unit draws its batches at one rate
    if condition.batches == "text":
        together = [(e,) for e in at]
    else:
        together = [at]
    everyone = tuple(range(figure.trials))
    for arm in arms(figure, condition):
        if figure.tuned_on is None:
            if figure.dataset == "mnist" or arm.curve == "local-sgd":
                size = 5
            else:
                size = figure.trials
            for some, start in itertools.product(together, range(0, figure.trials, size)):
                yield Unit(name, condition.name, arm, everyone[start : start + size], some)
        else:
            for e in at:
                yield Unit(name, condition.name, arm, everyone[: figure.tuned_on], (e,))
            for some in together:
                yield Unit(name, condition.name, arm, everyone, some, picked=True)


def trainings(unit: Unit, figures: dict[str, Figure] | None = None) -> int:
    if unit.picked:
        settings = 1
    else:
        settings = len(
            grid((figures or FIGURES)[unit.figure], CONDITIONS[unit.condition], unit.arm)
        )
    return len(unit.trials) * len(unit.epsilons) * settings


def reduced(figure: Figure) -> Figure:
    """What two cores can do: few splits, few records and a thinned grid; it shows that the command
    works, and is no ground for a verdict.
    """
    low, high, count = figure.span
    thin = replace(
        figure,
        trials=4,
        span=(low, high, max(3, count // 3)),
        clips=figure.clips[1:3],
        phases=figure.phases[:1],
    )
    if figure.dataset == "wbcd":
        return thin
    few = replace(thin, trials=2, span=(-3, 0, 2), wider=3, every=25, records=100)
    if figure.dataset == "cifar10":
        return replace(few, records=24, clips=(1.0,), tuned_on=1)
    return few


def figures_by_name(name: str) -> list[str]:
    if name == "all":
        found = list(FIGURES)
    else:
        found = [f for f, figure in FIGURES.items() if name in (f, figure.dataset)]
    if not found:
        raise BadInput(
            f"figure {name!r} is unknown; choose all, wbcd, mnist, cifar10 or one of "
            f"{', '.join(FIGURES)}"
        )
    return found
