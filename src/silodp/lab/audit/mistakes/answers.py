"""Mistakes in what a deployed gate answers, made for every row of `answers`, or for all of them: noise, coins, batches, records, price.

As in `mistakes`: each says what it does wrong, takes the place of one shipped part, and cannot be switched on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from silodp.core.events import Event, TotalEvent
from silodp.core.mechanisms import Gaussian, Shuffled, shuffle
from silodp.core.query import Query, Release
from silodp.core.sampling import DisjointBatches, Poisson, Sampling, WithoutReplacement
from silodp.core.statistics import LocalSteps
from silodp.lab.audit.answers import Row, answerable
from silodp.lab.audit.pipeline import SOUND, Pipeline
from silodp.silo.answer import exact as exact_module
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.silo.gate import Gate

Planted = Callable[[], Any]


def _where(row: Row | None, planted: Planted) -> type[Exact]:
    """The shipped answerer, with this planted while it answers the row (or any)."""

    class Mistaken(Exact):
        def answer(self, query: Query, silos: Sequence[int]) -> Tensor:
            if row is not None and not row.of(query):
                return super().answer(query, silos)
            with planted():
                return super().answer(query, silos)

    return Mistaken


@contextmanager
def half_noise() -> Iterator[None]:
    """Half the standard deviation that is paid for; of coins, a quarter of them, so that the mean looks right."""

    def scale(mechanism: Gaussian, gamma: float) -> float:
        return shipped_scale(mechanism, gamma) / 2

    def few(random_bytes: shuffle.RandomBytes, trials: int, p: float, size: int) -> np.ndarray:
        return shipped_coins(random_bytes, trials // 4, p, size) + round((trials - trials // 4) * p)

    shipped_scale, shipped_coins = exact_module.noise_scale, shuffle.binomial
    with mock.patch.object(exact_module, "noise_scale", scale), mock.patch.object(shuffle, "binomial", few):
        yield


@contextmanager
def likelier_coins() -> Iterator[None]:
    """Coins 1.1 times as likely as they are priced."""

    def coins(self: lattice.Keystream, n: int, probability: float) -> np.ndarray:
        return shipped(self, n, min(1.0, 1.1 * probability))

    shipped = lattice.Keystream.coins
    with mock.patch.object(lattice.Keystream, "coins", coins):
        yield


def _noise(change: Callable[[np.ndarray], np.ndarray]) -> Planted:
    """The lattice noise, changed after it was drawn."""

    @contextmanager
    def planted() -> Iterator[None]:
        shipped = lattice.rounded_gaussian
        with mock.patch.object(lattice, "rounded_gaussian", lambda scale, size: change(shipped(scale, size))):
            yield

    return planted


def _nothing_last(noise: np.ndarray) -> np.ndarray:
    noise[-1] = 0
    return noise


def _remembered() -> Planted:
    """The first noise of each size is kept, and given again."""
    kept: dict[int, np.ndarray] = {}
    return _noise(lambda noise: kept.setdefault(len(noise), noise).copy())


@contextmanager
def noise_in_the_first_step() -> Iterator[None]:
    """Local steps: noise in the first only (everything after it is post-processing, somebody thought)."""
    drawn: list[int] = []

    def once(scale: float, size: int) -> np.ndarray:
        drawn.append(size)
        return shipped(scale, size) if len(drawn) == 1 else np.zeros(size, np.int64)

    shipped = lattice.rounded_gaussian
    with mock.patch.object(lattice, "rounded_gaussian", once):
        yield


class LongDifferences(Exact):
    """Clips by one and a half times the clip that the noise is for."""

    def answer(self, query: Query, silos: Sequence[int]) -> Tensor:
        def longer(rows: Tensor, clip: float, gamma: float) -> Tensor:
            return shipped(rows, 1.5 * clip, gamma)

        shipped = exact_module.quantised
        with mock.patch.object(exact_module, "quantised", longer):
            return super().answer(query, silos)


class NobodyHeldOut(Exact):
    """Training answers are over all records, the held-out ones among them."""

    def answer(self, query: Query, silos: Sequence[int]) -> Tensor:
        held, self._held = self._held, np.zeros_like(self._held)
        try:
            return super().answer(query, silos)
        finally:
            self._held = held


class OneBatchForAll(Exact):
    """A sub-sampled batch is drawn once and kept: secret, and always the same."""

    def _batch(self, sampling: Sampling) -> np.ndarray:
        if not isinstance(sampling, Poisson | WithoutReplacement):
            return super()._batch(sampling)
        return self.__dict__.setdefault("kept", {}).setdefault(sampling, super()._batch(sampling))


class OneMore(Exact):
    """A batch without replacement with one record more than is paid for."""

    def _batch(self, sampling: Sampling) -> np.ndarray:
        if not isinstance(sampling, WithoutReplacement):
            return super()._batch(sampling)
        return lattice.Keystream().permutation(self._n)[: int(sampling.batch(self._n)) + 1]


class InPairs(Exact):
    """One coin for two neighbours."""

    def _batch(self, sampling: Sampling) -> np.ndarray:
        if not isinstance(sampling, Poisson):
            return super()._batch(sampling)
        return np.flatnonzero(np.repeat(lattice.Keystream().coins(-(-self._n // 2), sampling.rate), 2)[: self._n])


class FreshPartition(Exact):
    """Disjoint batches of a permutation that is drawn anew for each question."""

    def _batch(self, sampling: Sampling) -> np.ndarray:
        if not isinstance(sampling, DisjointBatches):
            return super()._batch(sampling)
        size = self._n // sampling.batches
        return lattice.Keystream().permutation(self._n)[sampling.index * size : (sampling.index + 1) * size]


class _Charging(Gate):
    """Charges another event than that of the query."""

    def answer(self, query: Query, silos: Sequence[int]) -> Release:
        ledger = self.ledger
        self.ledger = _Otherwise(ledger, self.otherwise)  # type: ignore[assignment]
        try:
            return super().answer(query, silos)
        finally:
            self.ledger = ledger

    def otherwise(self, event: Any) -> Any:
        raise NotImplementedError


class _Otherwise:
    def __init__(self, ledger: Any, otherwise: Callable[[Any], Any]) -> None:
        self._ledger, self._otherwise = ledger, otherwise

    def charge(self, event: Event | TotalEvent, silos: Sequence[int]) -> None:
        self._ledger.charge(self._otherwise(event), silos)


class OneStepLess(_Charging):
    """Local steps are charged for one less than there are."""

    def otherwise(self, event: Any) -> Any:
        return replace(event, count=max(1, event.count - 1))


class ForARarerCoin(_Charging):
    """Poisson batches are charged at half their rate."""

    def otherwise(self, event: Any) -> Any:
        return replace(event, sampling=Poisson(event.sampling.rate / 2)) if isinstance(event.sampling, Poisson) else event


def _gaussian(statistic: Callable[[Row], bool] = lambda row: True, planted: Planted = half_noise) -> type[Exact]:
    """Planted in the Gaussian answers of these rows."""

    class Mistaken(Exact):
        def answer(self, query: Query, silos: Sequence[int]) -> Tensor:
            if isinstance(query.mechanism, Shuffled) or not any(row.of(query) and statistic(row) for row in answerable()):
                return super().answer(query, silos)
            with planted():
                return super().answer(query, silos)

    return Mistaken


def of_answers() -> dict[str, Pipeline]:
    """A mutant with half its noise for every row, one with likelier coins for every row of Poisson batches, and the rest."""
    made = {f"half noise: {row}": replace(SOUND, exact=_where(row, half_noise)) for row in answerable()}
    made |= {
        f"coins 1.1 times as likely: {row}": replace(SOUND, exact=_where(row, likelier_coins))
        for row in answerable()
        if row.sampling is Poisson
    }
    return made | {
        "half noise of few coordinates": replace(
            SOUND, exact=_where(None, _noise(lambda noise: noise // 2 if len(noise) < 100 else noise))
        ),
        "noise of one sign": replace(SOUND, exact=_where(None, _noise(np.abs))),
        "one draw for all coordinates": replace(SOUND, exact=_where(None, _noise(lambda noise: np.full_like(noise, noise[0])))),
        "last coordinate without noise": replace(SOUND, exact=_where(None, _noise(_nothing_last))),
        "second half of the noise is the first": replace(
            SOUND, exact=_where(None, _noise(lambda noise: np.resize(noise[: -(-len(noise) // 2)], len(noise))))
        ),
        "noise in steps of 256": replace(SOUND, exact=_where(None, _noise(lambda noise: noise // 256 * 256))),
        "noise given again": replace(SOUND, exact=_where(None, _remembered())),
        "noise in the first local step only": replace(
            SOUND, exact=_gaussian(lambda row: issubclass(row.statistic, LocalSteps), noise_in_the_first_step)
        ),
        "noise for a shorter clip": replace(SOUND, exact=LongDifferences),
        "held-out records in training answers": replace(SOUND, exact=NobodyHeldOut),
        "one sub-sampled batch for all questions": replace(SOUND, exact=OneBatchForAll),
        "one record more without replacement": replace(SOUND, exact=OneMore),
        "one coin for two records": replace(SOUND, exact=InPairs),
        "partition drawn anew": replace(SOUND, exact=FreshPartition),
        "local steps charged for one less": replace(SOUND, gate=OneStepLess),
        "coins charged at half their rate": replace(SOUND, gate=ForARarerCoin),
    }
