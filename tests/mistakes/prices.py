"""Mistakes in prices, in the places of persons, and in products of two layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from mistakes import Mistakes, Planted, during, instead
from silodp.core.events import Event, TotalEvent
from silodp.core.privacy import accounting as accounting_module
from silodp.core.privacy import sampled as sampled_module
from silodp.core.privacy import totals as totals_module
from silodp.core.sampling import Poisson, Sampling, WithoutReplacement
from silodp.silo.answer import exact as exact_module
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.products import Products
from silodp.silo.data import persons as persons_module
from silodp.silo.data.tables import Table, table_of
from silodp.silo.ledger.state import LedgerState

OF_PRICES = Mistakes()
plant = OF_PRICES.plant


# --- prices --------------------------------------------------------------------------------------


def divergence(otherwise: Callable[..., float]) -> Planted:
    """Renyi prices, changed."""
    return lambda: instead(sampled_module, "renyi", otherwise)


def as_poisson(shipped: Any, sampling: Sampling, *words: Any) -> float:
    """A batch without replacement costs what coins of its rate would."""
    without = isinstance(sampling, WithoutReplacement)
    return shipped(Poisson(sampling.rate) if without else sampling, *words)


def by_clip(shipped: Any, sampling: Sampling, multiplier: float, *words: Any) -> float:
    """The noise of coins is read as so many sensitivities, where it is so many halves of one."""
    return shipped(
        sampling, 2 * multiplier if isinstance(sampling, Poisson) else multiplier, *words
    )


def at_creation(shipped: Any, state: LedgerState, event: Event | TotalEvent) -> tuple[str, float]:
    """Prices by the number of records that the ledger was made for."""
    now, state.records = state.records, state.settings.records
    try:
        return shipped(state, event)
    finally:
        state.records = now


def cheaper_later(shipped: Any, state: LedgerState, event: Event | TotalEvent) -> tuple[str, float]:
    """From the third question on everything costs half: a price that follows from the history."""
    bucket, amount = shipped(state, event)
    return bucket, amount / 2 if len(state.queries) >= 2 else amount


def one_step(shipped: Any, state: LedgerState, event: Event | TotalEvent) -> tuple[str, float]:
    """Local steps cost what one step costs."""
    return shipped(state, replace(event, count=1))


def whatever_records(
    shipped: Any, state: LedgerState, event: Event | TotalEvent
) -> tuple[str, float]:
    """Batches of one name share a bucket, though an edit has dealt the records out again."""
    now, state.generation = state.generation, 0
    try:
        return shipped(state, event)
    finally:
        state.generation = now


def dearest(shipped: Any, buckets: Any) -> np.ndarray:
    """What full batches cost beside a partition is forgotten: the dearest bucket is the total."""
    worst = np.zeros(())
    for amount in buckets.values():
        worst = np.maximum(worst, amount)
    return worst


def of_many(shipped: Any, noise_multiplier: float, counted: int) -> float:
    """Totals count on four times the shares that there are."""
    return shipped(noise_multiplier, 4 * counted)


plant("sampling without replacement priced as coins", "pricing")(divergence(as_poisson))
plant("coins priced by the clip, not the sensitivity", "pricing")(divergence(by_clip))
for name, mistaken in (
    ("prices by the number of records at the ledger's creation", at_creation),
    ("later questions cost half", cheaper_later),
    ("local steps cost one step", one_step),
    ("batches of one name share a bucket over an edit", whatever_records),
):
    plant(name, "pricing")(lambda mistaken=mistaken: instead(LedgerState, "price", mistaken))
plant("the dearest bucket is the total", "pricing")(
    lambda: instead(accounting_module, "sum_with_partitions", dearest)
)


@plant("a committed schedule with noise by the clip", "pricing")
@contextmanager
def half_the_unit() -> Iterator[None]:
    """The library's unit is taken for ours, without the factor two."""

    def doubled(shipped: Any, sampling: Sampling, multiplier: float) -> Any:
        return shipped(sampling, 2 * multiplier)

    accounting_module.composed_epsilon.cache_clear()
    try:
        with instead(sampled_module, "pld_event", doubled):
            yield
    finally:
        accounting_module.composed_epsilon.cache_clear()


plant("totals that count on more shares", "pricing")(
    lambda: instead(accounting_module, "total_price", of_many)
)
plant("distance from Gaussian noise dropped", "pricing")(
    lambda: instead(totals_module, "log_distance", lambda shipped, *words: -math.inf)
)


# --- products of layers --------------------------------------------------------------------------


def answering(planted: Planted) -> type[Exact]:
    """The shipped answerer, with this planted while it answers."""
    return during(Exact, "answer", lambda exact, words: planted())


def drawn_alone(
    shipped: Any,
    products: Products,
    points: Any,
    x: Any,
    y: Any,
    drawn: np.ndarray,
    clip: float,
    gamma: float,
    threads: int = 1,
    known: Sequence[Any] = (),
) -> np.ndarray:
    """Chunks without a drawn record are left out, for nothing of them is added."""
    total = np.zeros(products._problem.dim, np.int64)
    for k, start in enumerate(range(0, len(x), products.chunk)):
        slot = slice(start, start + products.chunk)
        if drawn[slot].any():
            part = points, x[slot], y[slot], drawn[slot], clip, gamma, threads
            total += shipped(products, *part, known[k : k + 1])
    return total


def clip_for_each_layer(shipped: Any, products: Products, *words: Any) -> np.ndarray:
    """Every layer has the whole clip, so that a record of two may be longer by the root of two."""
    longer = math.sqrt(sum(bool(layer.names) for layer in products._layers.values()))
    return shipped(products, *words[:4], longer * words[4], *words[5:])


plant("chunks without a drawn record left out of products", "exact")(
    answering(lambda: instead(Products, "sum", drawn_alone))
)


@plant("chunks without a drawn record left out, record by record", "exact")
class DrawnSlots(Exact):
    """The same where the model is asked record by record."""

    def _sum(self, rows: Any, chosen: np.ndarray, *given: Any, **more: Any) -> np.ndarray:
        drawn = np.isin(np.arange(self._n), chosen)

        def needed(shipped: Any, n: int, width: int) -> list[slice]:
            return [slot for slot in shipped(n, width) if drawn[slot].any()]

        with instead(exact_module, "slots", needed):
            return super()._sum(rows, chosen, *given, **more)


plant("a clip for each of two layers", "exact")(
    answering(lambda: instead(Products, "sum", clip_for_each_layer))
)


# --- the places of persons -----------------------------------------------------------------------


@plant("persons dealt again after an edit", "exact")
class DealtAgain(Exact):
    """Who is held out follows from a permutation that is drawn for each list of records."""

    def _places(self, marks: Any) -> np.ndarray:
        return super()._places(None)


@plant("persons at the places of their first rows", "exact")
class FirstRows(Exact):
    """No secret: the first person of the file has the first place."""

    def _places(self, marks: Any) -> np.ndarray:
        return np.arange(self._n)


@plant("a person at two places", "exact")
class TwoPlaces(Exact):
    """One person stands in for another one."""

    def _places(self, marks: Any) -> np.ndarray:
        at = super()._places(marks)
        at[1] = at[0]
        return at


@plant("rows above the cap are a person of their own", "table")
def more_persons(*words: Any) -> Table:
    """No row of a file is lost: a person of many rows becomes several."""

    def numbered(shipped: Any, cells: np.ndarray, person: Any, void: Any) -> Any:
        seen: dict[str, int] = {}
        names = []
        for cell in cells:
            name = str(cell).strip().casefold()
            seen[name] = seen.get(name, 0) + 1
            names.append(f"{name}-{(seen[name] - 1) // person.rows}")
        return shipped(np.array(names, object), person, void)

    with instead(persons_module, "grouped", numbered):
        return table_of(*words)


@plant("spellings of one id are two persons", "table")
def two_spellings(*words: Any) -> Table:
    """Ids are compared letter by letter, blanks included."""

    def spelled(shipped: Any, cells: np.ndarray, person: Any, void: Any) -> Any:
        names = np.array([cell.encode().hex() for cell in cells], object)
        return shipped(names, person, void)

    with instead(persons_module, "grouped", spelled):
        return table_of(*words)
