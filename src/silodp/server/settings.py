"""Conversion of a user's words (rounds, phase, sampling by name) into the arguments of an
algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, Sampling, WithoutReplacement
from silodp.server.algorithms import Algorithm
from silodp.server.estimates.start import MEAN_SHARE
from silodp.server.federation import Balanced, Everyone, Uniform

SPREAD_SHARE = 0.15
"""Share of the budget (mu^2) for the question by which `scaled` standardises features."""


def prepared(algorithm: Algorithm, settings: dict, step) -> Callable[..., Iterator[Tensor]]:
    """Return the algorithm with all of its arguments except the mechanisms.

    The result is dry-run to calibrate the noise, and then it is run.
    """
    return partial(algorithm.run, **settings, step=step)


def default_shares(
    algorithm: Algorithm, settings: dict, anchor: float | None = None
) -> dict[str, float] | None:
    """Return how the budget is split between kinds of release, or None if there is only one kind.

    `anchor` is the share of anchors, against differences. Without `anchor` the share suits the
    length of a phase. It minimises the mean noise variance of the estimate h over the rounds
    between two anchors. This assumes that differences are clipped at a quarter of the anchor's clip
    on average, or at twice the clip if the slope is inf. The odds of anchor to refine are then
    sqrt(2 / (q (q - 1))) / ratio. Kinds other than anchor and refine get equal shares,
    but for a question about the spread of the features, which gets SPREAD_SHARE.

    Raise BadInput if `anchor` is not between 0 and 1, or if the algorithm has several kinds but no
    anchors.
    """
    if set(algorithm.kinds) != {"anchor", "refine"}:
        if anchor is not None and len(algorithm.kinds) > 1:
            raise BadInput(
                f"{algorithm.name} has no anchors and differences, but "
                f"{', '.join(algorithm.kinds)}; leave the anchors' share out"
            )
        if "spread" in algorithm.kinds:
            start = settings.get("mean_share", MEAN_SHARE)
            rest = 1 - start - SPREAD_SHARE
            return {"start": start, "spread": SPREAD_SHARE, "minibatch": rest}
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
    """Return the sampling of a text: "full", "disjoint", "poisson:RATE" or
    "without-replacement:RATE".

    Without a text, return the algorithm's default. Raise BadInput for an unknown sampling, a wrong
    rate, or disjoint batches of an algorithm that needs each record more than once.
    """
    if not text and algorithm.disjoint:
        text = "disjoint"
    elif not text:
        text = "full"
    name, colon, rate = text.partition(":")
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
    """Return the sampling of each kind of release.

    The text is one sampling for all kinds, or KIND=SAMPLING for each, such as
    anchor=full,refine=poisson:0.1. Raise BadInput if the text does not name each kind once.
    """
    if "=" not in (text or ""):
        return dict.fromkeys(algorithm.kinds, sampling_by_name(text, algorithm, rounds))
    words = [part.strip().partition("=") for part in (text or "").split(",")]
    by_kind = {name: value for name, _, value in words}
    complete = by_kind.keys() == set(algorithm.kinds) and all(by_kind.values())
    if not complete or len(by_kind) < len(words):
        raise BadInput(
            f"sampling {text!r} must name each kind of release of {algorithm.name} once: "
            f"{', '.join(algorithm.kinds)}"
        )
    return {kind: sampling_by_name(by_kind[kind], algorithm, rounds) for kind in algorithm.kinds}


def participation_by_name(text: str, silos: int, seed: int) -> Callable[[], Everyone]:
    """Return a function that creates the participation of a text, a fresh one at each call.

    The text is "all", "uniform:M", "random:M" (between 1 and M silos, a new number in each round),
    "random:L:M" (between L and M) or "balanced:M". Raise BadInput for any other text.
    """
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
    if name == "balanced":
        return lambda: Balanced(silos, answering, seed=seed)
    if name == "uniform":
        least = None
    elif len(numbers) > 1:
        least = int(numbers[0])
    else:
        least = 1
    return lambda: Uniform(silos, answering, seed=seed, least=least)
