"""From what people say (rounds, phase, sampling by name) to what an algorithm takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, Sampling, WithoutReplacement
from silodp.server.algorithms import Algorithm
from silodp.server.federation import Balanced, Everyone, Uniform


def prepared(algorithm: Algorithm, settings: dict, step) -> Callable[..., Iterator[Tensor]]:
    """The algorithm with everything set but its mechanisms: what is dry-run to calibrate, and then
    run.
    """
    return partial(algorithm.run, **settings, step=step)


def default_shares(
    algorithm: Algorithm, settings: dict, anchor: float | None = None
) -> dict[str, float] | None:
    """How the budget is split between anchors and differences: the share given, or one that suits
    the length of a phase.

    The default minimises the mean noise variance of the carried estimate over the rounds between
    two anchors if differences are clipped at a quarter of the anchor's clip on average (at twice
    the clip if the slope is inf): odds of anchor to refine of sqrt(2 / (q (q - 1))) / ratio.
    """
    if set(algorithm.kinds) != {"anchor", "refine"}:
        if anchor is not None and len(algorithm.kinds) > 1:
            raise BadInput(
                f"{algorithm.name} has no anchors and differences, but "
                f"{', '.join(algorithm.kinds)}; leave the anchors' share out"
            )
        if len(algorithm.kinds) > 1:
            return dict.fromkeys(algorithm.kinds, 1 / len(algorithm.kinds))
        return None
    if anchor is None:
        q = max(2, settings.get("phase") or settings.get("inner") or 2)
        if math.isinf(settings.get("slope", 1.0)):
            ratio = 2.0
        else:
            ratio = 0.25
        odds = math.sqrt(2 / (q * (q - 1))) / ratio
        anchor = odds / (1 + odds)
    if not 0 < anchor < 1:
        raise BadInput(
            f"the anchors' share of the budget is {anchor:g}; it must lie strictly between 0 and 1"
        )
    return {"anchor": anchor, "refine": 1 - anchor}


def sampling_by_name(text: str | None, algorithm: Algorithm, rounds: int) -> Sampling:
    """ "full", "disjoint", "poisson:RATE" or "without-replacement:RATE"; the algorithm's own habit
    if none is named.
    """
    name, colon, rate = (text or ("disjoint" if algorithm.disjoint else "full")).partition(":")
    if colon and name in ("full", "disjoint"):
        raise BadInput(f"sampling {text!r} is unknown; {name} takes no number")
    if name == "full":
        return FullBatch()
    if name == "disjoint":
        if len(algorithm.kinds) != 1 or "local_steps" in algorithm.settings:
            raise BadInput(
                f"{algorithm.name} needs each record more than once; disjoint batches suit "
                "prox-sgd and mb-sgd"
            )
        return DisjointBatches(rounds)
    if name in ("poisson", "without-replacement"):
        try:
            value = float(rate)
        except ValueError:
            value = math.nan
        if not 0 < value <= 1:
            raise BadInput(f"sampling {text!r} needs a rate between 0 and 1, such as {name}:0.1")
        if name == "poisson":
            return Poisson(value)
        return WithoutReplacement(value)
    raise BadInput(
        f"sampling {text!r} is unknown; use full, disjoint, poisson:RATE or "
        "without-replacement:RATE"
    )


def samplings_by_name(text: str | None, algorithm: Algorithm, rounds: int) -> dict[str, Sampling]:
    """The sampling of each kind of release: one for all, or KIND=SAMPLING for each, such as
    anchor=full,refine=poisson:0.1.
    """
    if "=" not in (text or ""):
        return dict.fromkeys(algorithm.kinds, sampling_by_name(text, algorithm, rounds))
    words = [part.strip().partition("=") for part in (text or "").split(",")]
    said = {name: value for name, _, value in words}
    if said.keys() != set(algorithm.kinds) or len(said) < len(words) or not all(said.values()):
        raise BadInput(
            f"sampling {text!r} must name each kind of release of {algorithm.name} once: "
            f"{', '.join(algorithm.kinds)}"
        )
    return {kind: sampling_by_name(said[kind], algorithm, rounds) for kind in algorithm.kinds}


def participation_by_name(text: str, silos: int, seed: int) -> Callable[[], Everyone]:
    """ "all", "uniform:M", "random:M" (between 1 and M, a new number each round), "random:L:M"
    (between L and M) or "balanced:M"; makes a fresh one at each call."""
    name, *numbers = text.split(":")
    if text == "all":
        return lambda: Everyone(silos)
    if (
        name not in ("uniform", "random", "balanced")
        or not 1 <= len(numbers) <= 1 + (name == "random")
        or not all(map(str.isdecimal, numbers))
    ):
        raise BadInput(
            f"participation {text!r} is unknown; use all, uniform:M, random:M, random:L:M "
            "or balanced:M"
        )
    answering = int(numbers[-1])
    least = int(numbers[0]) if len(numbers) > 1 else 1
    if name == "balanced":
        return lambda: Balanced(silos, answering, seed=seed)
    return lambda: Uniform(silos, answering, seed=seed, least=least if name == "random" else None)
