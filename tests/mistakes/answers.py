"""Mistakes in what a deployed gate answers, made for every row of `answers`, or for all of them:
noise, coins, batches, records, price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from mistakes import Mistakes, Planted, during, instead
from silodp.audit.answers import answerable
from silodp.core.events import Event, TotalEvent
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, Poisson, Sampling, WithoutReplacement
from silodp.core.statistics import (
    GroupScore,
    Moments,
    RiskCells,
    ScaledGrad,
    Score,
    Statistic,
)
from silodp.silo.answer import exact as exact_module
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.products import Products
from silodp.silo.gate import Gate

OF_ANSWERS = Mistakes()
plant = OF_ANSWERS.plant


def where(asked: Callable[[Query], bool], planted: Planted) -> type[Exact]:
    """The shipped answerer, with this planted while it answers such a query."""
    return during(
        Exact, "answer", lambda exact, words: planted() if asked(words[0]) else nullcontext()
    )


# --- noise and coins: planted in the answers of a row, or in all ---------------------------------


def half_noise() -> AbstractContextManager:
    """Half the standard deviation that is paid for."""
    return instead(exact_module, "noise_scale", lambda shipped, *words: shipped(*words) / 2)


def likelier_coins() -> AbstractContextManager:
    """Coins 1.1 times as likely as they are priced."""
    return instead(
        lattice.Keystream,
        "coins",
        lambda shipped, stream, n, rate: shipped(stream, n, min(1.0, 1.1 * rate)),
    )


def noise_in_the_first_step() -> AbstractContextManager:
    """Local steps: noise in the first only (everything after it is post-processing, somebody
    thought).
    """
    drawn: list[int] = []

    def once(shipped: Any, scale: float, size: int) -> np.ndarray:
        drawn.append(size)
        return shipped(scale, size) if len(drawn) == 1 else np.zeros(size, np.int64)

    return instead(lattice, "rounded_gaussian", once)


@contextmanager
def longer_clip() -> Iterator[None]:
    """Clips by one and a half times the clip that the noise is for, record by record and in
    products.
    """
    alone = instead(
        exact_module,
        "quantised",
        lambda shipped, rows, clip, gamma: shipped(rows, 1.5 * clip, gamma),
    )
    with (
        alone,
        instead(
            Products, "sum", lambda shipped, *words: shipped(*words[:5], 1.5 * words[5], *words[6:])
        ),
    ):
        yield


def longer_factors() -> AbstractContextManager:
    """Products of factors that are half as long again as their noise is for."""
    return instead(
        exact_module,
        "multiplied",
        lambda shipped, factors, *more: shipped(1.5 * factors, 2.25 * more[0], *more[1:]),
    )


def _nothing_last(noise: np.ndarray) -> np.ndarray:
    noise[-1] = 0
    return noise


def _noise(change: Callable[[np.ndarray], np.ndarray]) -> Planted:
    """The lattice noise, changed after it was drawn."""
    return lambda: instead(
        lattice, "rounded_gaussian", lambda shipped, *words: change(shipped(*words))
    )


_first: dict[int, np.ndarray] = {}
NOISE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "half noise of few coordinates": lambda noise: noise // 2 if len(noise) < 100 else noise,
    "noise of one sign": np.abs,
    "one draw for all coordinates": lambda noise: np.full_like(noise, noise[0]),
    "last coordinate without noise": _nothing_last,
    "second half of the noise is the first": lambda noise: np.resize(
        noise[: -(-len(noise) // 2)], len(noise)
    ),
    "noise in steps of 256": lambda noise: noise // 256 * 256,
    "noise given again": lambda noise: _first.setdefault(len(noise), noise).copy(),
}
for row in answerable():
    plant(f"half noise: {row}", "exact")(where(row.of, half_noise))
for row in answerable():
    if row.sampling is Poisson:
        plant(f"coins 1.1 times as likely: {row}", "exact")(where(row.of, likelier_coins))
for name, change in NOISE.items():
    plant(name, "exact")(where(lambda query: True, _noise(change)))
plant("noise in the first local step only", "exact")(
    where(lambda query: query.statistic.releases > 1, noise_in_the_first_step)
)
plant("noise for a shorter clip", "exact")(where(lambda query: True, longer_clip))
plant("noise for shorter factors", "exact")(where(lambda query: True, longer_factors))


# --- gradients in scaled features, and evaluations ------------------------------------------------


def scaled_after_the_clip() -> AbstractContextManager:
    """The gradient of raw features is clipped, and only then brought to the units of scaled ones,
    which are half as wide.
    """
    return instead(exact_module, "quantised", lambda shipped, *words: 2 * shipped(*words))


def noise_without_sensitivity() -> AbstractContextManager:
    """The noise multiplier is taken for the standard deviation."""
    return instead(
        exact_module,
        "noise_scale",
        lambda shipped, multiplier, clip, gamma: float(multiplier) / gamma,
    )


def twice_the_cap() -> AbstractContextManager:
    """Errors are cut at twice the cap that the noise is for."""

    def longer(shipped: Any, rows: Tensor, numbers: int, *more: Any) -> Tensor:
        integers = shipped(rows, numbers, *more)
        integers[:, :numbers] *= 2
        return integers

    return instead(exact_module, "levelled", longer)


def asks(*kinds: type[Statistic]) -> Callable[[Query], bool]:
    """Whether a query asks for one of these statistics."""
    return lambda query: isinstance(query.statistic, kinds)


plant("scaled gradients clipped before they are scaled", "exact")(
    where(asks(ScaledGrad), scaled_after_the_clip)
)
plant("noise of scaled gradients without their sensitivity", "exact")(
    where(asks(ScaledGrad), noise_without_sensitivity)
)
plant("noise of evaluations without their sensitivity", "exact")(
    where(asks(Score, GroupScore), noise_without_sensitivity)
)
plant("errors of evaluations cut at twice their cap", "exact")(
    where(asks(Score, GroupScore), twice_the_cap)
)


@plant("training records in evaluations", "exact")
class EverybodyScored(Exact):
    """Evaluations are over all records, for the more the better."""

    def _part(self, statistic: Statistic) -> np.ndarray:
        if statistic.on_held_out:
            return np.ones_like(self._held)
        return super()._part(statistic)


# --- who is in an answer -------------------------------------------------------------------------


@plant("held-out records in training answers", "exact")
class NobodyHeldOut(Exact):
    """Training answers are over all records, the held-out ones among them."""

    def answer(self, query: Query, silos: Sequence[int]) -> Tensor:
        held, self._held = self._held, np.zeros_like(self._held)
        try:
            return super().answer(query, silos)
        finally:
            self._held = held


def drawing(name: str, drawn: Callable[[Exact, Any], np.ndarray], *kinds: type[Sampling]) -> None:
    """Plants an answerer that draws batches of these kinds otherwise."""

    class Drawing(Exact):
        def _batch(self, sampling: Sampling) -> np.ndarray:
            return (
                drawn(self, sampling) if isinstance(sampling, kinds) else super()._batch(sampling)
            )

    plant(name, "exact")(Drawing)


def kept(exact: Exact, sampling: Sampling) -> np.ndarray:
    """Drawn once: secret, and always the same."""
    return exact.__dict__.setdefault("kept", {}).setdefault(sampling, Exact._batch(exact, sampling))


def permuted(exact: Exact) -> np.ndarray:
    return lattice.Keystream().permutation(exact._n)


def in_pairs(exact: Exact, sampling: Poisson) -> np.ndarray:
    return np.flatnonzero(
        np.repeat(lattice.Keystream().coins(-(-exact._n // 2), sampling.rate), 2)[: exact._n]
    )


drawing("one sub-sampled batch for all questions", kept, Poisson, WithoutReplacement)
drawing(
    "one record more without replacement",
    lambda exact, by: permuted(exact)[: int(by.batch(exact._n)) + 1],
    WithoutReplacement,
)
drawing("one coin for two records", in_pairs, Poisson)
drawing(
    "partition drawn anew",
    lambda exact, by: permuted(exact)[by.index :: by.batches][: exact._n // by.batches],
    DisjointBatches,
)


# --- what is charged -----------------------------------------------------------------------------


def charging(otherwise: Callable[[Any], Any]) -> type[Gate]:
    """A gate that charges another event than that of the query."""

    def planted(gate: Gate, words: tuple) -> AbstractContextManager:
        return instead(
            gate.ledger, "charge", lambda shipped, event, silos: shipped(otherwise(event), silos)
        )

    return during(Gate, "answer", planted)


def free(*kinds: type[Statistic]) -> type[Gate]:
    """A gate that charges next to nothing for these questions."""

    def planted(gate: Gate, words: tuple) -> AbstractContextManager:
        if not isinstance(words[0].statistic, kinds):
            return nullcontext()
        return instead(gate.ledger, "charge", lambda shipped, event, at: shipped(loud(event), at))

    return during(Gate, "answer", planted)


# One question beside many is small, somebody thought.
plant("recalibration unpriced", "gate")(free(RiskCells))
plant("moments for the scaling of features unpriced", "gate")(free(Moments))
plant("evaluation unpriced", "gate")(free(Score, GroupScore))


def loud(event: Event | TotalEvent) -> Event | TotalEvent:
    """The same release under a million times the noise."""
    return replace(event, noise_multiplier=1e6 * event.noise_multiplier)


def rarer(sampling: Sampling) -> Sampling:
    return Poisson(sampling.rate / 2) if isinstance(sampling, Poisson) else sampling


plant("local steps charged for one less", "gate")(
    charging(lambda event: replace(event, count=max(1, event.count - 1)))
)
plant("coins charged at half their rate", "gate")(
    charging(lambda event: replace(event, sampling=rarer(event.sampling)))
)
