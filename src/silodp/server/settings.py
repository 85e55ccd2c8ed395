"""From what people say (rounds, phase, sampling by name) to what an algorithm takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, Sampling, WithoutReplacement
from silodp.server.algorithms import ALGORITHMS, Algorithm
from silodp.server.federation import Balanced, Everyone, Uniform


def find(name: str) -> Algorithm:
    if name not in ALGORITHMS:
        raise BadInput(f"algorithm {name!r} is unknown; choose one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def schedule(
    algorithm: Algorithm, *, rounds: int, phase: int, local_steps: int, inner: int, restarts: int, slope: float,
    momentum: float = 0.9, kappa: float = 0.7,
) -> dict[str, int | float]:  # fmt: skip
    """The settings that `algorithm` takes, out of all that a user may give; what cannot be run is refused."""
    for name, value in (("rounds", rounds), ("phase", phase), ("local steps", local_steps), ("inner steps", inner), ("restarts", restarts)):
        if value < 1:
            raise BadInput(f"{name} is {value}; it must be 1 or more")
    if not slope > 0:
        raise BadInput(f"slope is {slope:g}; it must be greater than 0 (inf to clip at 2 L alone)")
    if algorithm.name == "diff2" and math.isinf(slope):
        raise BadInput("slope is inf, but diff2 has no other bound on a difference; give a finite slope, or use spider")
    if not 0 <= momentum < 1:
        raise BadInput(f"momentum is {momentum:g}; it must be 0 or more, and less than 1")
    if not 0 < kappa <= 1:
        raise BadInput(f"kappa is {kappa:g}; it must be greater than 0, and at most 1 (which is mb-sgd)")
    if "phase" in algorithm.settings and phase > rounds:
        raise BadInput(f"phase is {phase} but there are only {rounds} rounds; choose a phase between 1 and {rounds}")
    per_epoch = inner * (restarts if "restarts" in algorithm.settings else 1)
    if "epochs" in algorithm.settings and rounds < per_epoch:
        raise BadInput(f"{rounds} rounds are less than one epoch of {per_epoch} inner steps; use fewer inner steps or more rounds")
    known = {
        "rounds": rounds, "phase": phase, "steps": local_steps, "inner": inner, "restarts": restarts, "slope": slope,
        "epochs": rounds // per_epoch, "momentum": momentum, "kappa": kappa,
    }  # fmt: skip
    return {name: known[name] for name in algorithm.settings}


def prepared(algorithm: Algorithm, settings: dict, step) -> Callable[..., Iterator[Tensor]]:
    """The algorithm with everything set but its mechanisms: what is dry-run to calibrate, and then run."""
    return partial(algorithm.run, **settings, step=step)


def default_shares(algorithm: Algorithm, settings: dict, anchor: float | None = None) -> dict[str, float] | None:
    """How the budget is split between anchors and differences: the share given, or one that suits the length of a phase.

    The default minimises the mean noise variance of the carried estimate over the rounds between two anchors if differences are clipped at a quarter
    of the anchor's clip on average (at twice the clip if the slope is inf): odds of anchor to refine of sqrt(2 / (q (q - 1))) / ratio.
    """
    if len(algorithm.kinds) == 1:
        return None
    if anchor is None:
        q = max(2, settings.get("phase") or settings.get("inner") or 2)
        ratio = 2.0 if math.isinf(settings["slope"]) else 0.25
        odds = math.sqrt(2 / (q * (q - 1))) / ratio
        anchor = odds / (1 + odds)
    if not 0 < anchor < 1:
        raise BadInput(f"the anchors' share of the budget is {anchor:g}; it must lie strictly between 0 and 1")
    return {"anchor": anchor, "refine": 1 - anchor}


def sampling_by_name(text: str | None, algorithm: Algorithm, rounds: int) -> Sampling:
    """ "full", "disjoint", "poisson:RATE" or "without-replacement:RATE"; the algorithm's own habit if none is named."""
    name, _, rate = (text or ("disjoint" if algorithm.disjoint else "full")).partition(":")
    if name == "full":
        return FullBatch()
    if name == "disjoint":
        if algorithm.kinds != ("minibatch",) or "steps" in algorithm.settings:
            raise BadInput(f"{algorithm.name} needs each record more than once; disjoint batches suit prox-sgd and mb-sgd")
        return DisjointBatches(rounds)
    if name in ("poisson", "without-replacement"):
        try:
            value = float(rate)
        except ValueError:
            value = math.nan
        if not 0 < value <= 1:
            raise BadInput(f"sampling {text!r} needs a rate between 0 and 1, such as {name}:0.1")
        return Poisson(value) if name == "poisson" else WithoutReplacement(value)
    raise BadInput(f"sampling {text!r} is unknown; use full, disjoint, poisson:RATE or without-replacement:RATE")


def participation_by_name(text: str, silos: int, seed: int) -> Callable[[], Everyone]:
    """ "all", "uniform:M", "random:M" (between 1 and M, a new number each round) or "balanced:M"; makes a fresh one at each call."""
    name, _, argument = text.partition(":")
    if name == "all":
        return lambda: Everyone(silos)
    if name not in ("uniform", "random", "balanced") or not argument.isdigit():
        raise BadInput(f"participation {text!r} is unknown; use all, uniform:M, random:M or balanced:M")
    answering = int(argument)
    if name == "balanced":
        return lambda: Balanced(silos, answering, seed=seed)
    return lambda: Uniform(silos, answering, seed=seed, least=1 if name == "random" else None)
