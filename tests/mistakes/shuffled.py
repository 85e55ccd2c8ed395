"""Mistakes in a shuffle, the paper's print among them: in the randomizer, the door, the shuffler,
the analyzer and the plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from mistakes import Mistakes, during, instead, keyed
from mistakes.silo import NoFilter, opened
from silodp.core.events import Event, TotalEvent
from silodp.core.mechanisms import Shuffled, shuffle
from silodp.core.protocol.box import Contribution
from silodp.core.protocol.codec import Answer, decode_query, encode_reply
from silodp.core.protocol.relay import Request
from silodp.core.query import Query
from silodp.server.plan import Plan
from silodp.server.shuffled import calibrate_shuffled
from silodp.shuffler import pool as pool_module
from silodp.shuffler.pool import Pool
from silodp.shuffler.store import RoundStore
from silodp.silo.answer import exact as exact_module
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.integers import level_bits
from silodp.silo.ledger.memory import MemoryLedger
from silodp.silo.service import sealing
from silodp.silo.service.door import Door
from silodp.wire.inprocess import ThroughShuffler, Total

OF_A_SHUFFLE = Mistakes()
plant = OF_A_SHUFFLE.plant
plant("anchors noised as printed", "ledger")(NoFilter)

# --- the randomizer ------------------------------------------------------------------------------


def over_half_the_range(exact: Exact, words: tuple) -> AbstractContextManager:
    """g levels over [0, L] for coordinates shifted to [0, 2L] (the paper's print): a record moves
    by twice what is paid for.
    """
    return instead(
        Exact,
        "_sum",
        lambda shipped, *given, **more: 2 * shipped(*given, **more) + len(given[2]) * int(given[3]),
    )


@contextmanager
def clips_coordinates(exact: Exact, words: tuple) -> Iterator[None]:
    """Each coordinate is kept within 0 .. g, and the record's norm is not: d coordinates move by g
    each.
    """

    def each(shipped: Any, rows: Tensor, clip: float, gamma: float) -> Tensor:
        return (rows / gamma).clamp(-clip / gamma, clip / gamma).round().long()

    with mock.patch.object(exact, "_products", None), instead(exact_module, "quantised", each):
        yield


def rounds_to_nearest(exact: Exact, words: tuple) -> AbstractContextManager:
    """The nearest level, by one threshold for all: two totals may end further apart than their
    noise is for.
    """
    half = np.uint64(2 ** (level_bits(words[1].levels, words[2]) - 1))
    return instead(lattice.Keystream, "uint64", lambda shipped, stream, n: np.full(n, half))


def coins_for_a_silo(exact: Exact, words: tuple) -> AbstractContextManager:
    """b noise bits for a silo, where the price counts on b for each of its records."""
    bits = words[1].noise_bits

    def few(
        shipped: Any, random_bytes: shuffle.RandomBytes, trials: int, p: float, size: int
    ) -> np.ndarray:
        return shipped(random_bytes, bits, p, size) + round(
            (trials - bits) * p
        )  # so that the mean looks right

    return instead(shuffle, "binomial", few)


for name, planted in {
    "levels over half the range": over_half_the_range,
    "coordinates clipped after rounding": clips_coordinates,
    "rounding to nearest": rounds_to_nearest,
    "noise bits for a silo": coins_for_a_silo,
    "the same coins in two rounds": lambda exact, words: keyed(bytes(32)),
}.items():
    plant(name, "exact")(during(Exact, "_counts", planted))


# --- what leaves a silo --------------------------------------------------------------------------


@plant("box that demands nothing", "door")
class DemandsNothing(Door):
    """The box goes with any total: the silo's condition is left out."""

    def _answer(self, frame: bytes) -> bytes:
        def anything(shipped, contribution, *words):
            return shipped(replace(contribution, demanded=1), *words)

        with instead(sealing, "encrypt_box", anything):
            return super()._answer(frame)


@plant("retry with a fresh box", "door")
class FreshBox(Door):
    """A retry is computed anew, except that it was paid for already."""

    def _answer(self, frame: bytes) -> bytes:
        (reply, _), envelope = (
            opened(super()._answer(frame), frame),
            decode_query(frame, limit=2**62)[0],
        )
        again = self._exact.answer(envelope.query, [0])
        box = self._trust.hide("", envelope, again[0, 0].numpy())
        return encode_reply(replace(reply, box=box), self._key)


@plant("counts in the open", "door")
class OpenCounts(Door):
    """The counts go to the server as they are: it can add them up itself."""

    def _answer(self, frame: bytes) -> bytes:
        reply, query = opened(super()._answer(frame), frame)
        counts = self._exact.answer(query, [0])[0].double()
        event = Event(query.mechanism.sampling, 1.0, 1)
        return encode_reply(
            Answer(
                reply.silo, reply.query_id, reply.digest, counts, event, reply.count, reply.head
            ),
            self._key,
        )


@plant("shares of rounds not added up", "ledger")
class EachAlone(MemoryLedger):
    """Every round has the whole budget to itself."""

    def charge(self, event: Event | TotalEvent, silos: Sequence[int]) -> None:
        self._buckets = {}
        super().charge(event, silos)


# --- the shuffler --------------------------------------------------------------------------------


@plant("pseudonym that counts twice", "pool")
class CountsTwice(Pool):
    """Every box counts, also the second of a pseudonym."""

    def _opened(self, box: bytes, request: Request) -> tuple[str, Contribution]:
        pseudonym, contribution = super()._opened(box, request)
        return pseudonym + hashlib.sha256(box).hexdigest(), contribution


def passes_few(pool: Pool, words: tuple) -> AbstractContextManager:
    """Passes a total on whatever its silos demand."""
    return instead(
        pool_module,
        "_satisfied",
        lambda shipped, known: (known, sum(c.records for c in known.values())),
    )


def passes_separate(pool: Pool, words: tuple) -> AbstractContextManager:
    """Passes the counts of the silos on one after the other, in an order of their own: a shuffle of
    silos and not of bits.
    """
    return mock.patch.object(pool_module, "add_counts", np.concatenate)


plant("total of too few", "pool")(during(Pool, "total", passes_few))
plant("counts passed on unsummed", "pool")(during(Pool, "total", passes_separate))


@plant("round passed on again", "store")
class ForgetsRounds(RoundStore):
    """A round may be passed on again, with other boxes."""

    def reply(self, round: str) -> bytes | None:
        return None

    def keep(self, round: str, reply: bytes, now: float) -> bytes:
        return reply


def through(passed: Callable[[Tensor], Tensor]) -> type[ThroughShuffler]:
    """The same in simulation: a shuffler that passes this on, whatever was planned."""

    class Through(ThroughShuffler):
        def ask(self, query: Query, silos: Sequence[int]) -> Total:
            release = self._gate.answer(query, silos)
            return Total(passed(release.value), release.silos)

    return Through


plant("total of too few", "channel")(through(lambda counts: counts.sum(1, keepdim=True)))
plant("counts passed on unsummed", "channel")(through(lambda counts: counts))


# --- the analyzer and the plan -------------------------------------------------------------------


@plant("noise's mean subtracted once", "analysed")
def subtracts_noise_once(total: Tensor, mechanism: Shuffled, records: int) -> Tensor:
    """Subtracts p b for one contribution and not for all of them."""
    return (
        ((total - mechanism.p * mechanism.noise_bits) * (2 / mechanism.levels) - records)
        * mechanism.clip
        / records
    )


@plant("sum centred once", "analysed")
def centres_once(total: Tensor, mechanism: Shuffled, records: int) -> Tensor:
    """Subtracts L and not m L from the sum of m shifted records (the paper's print)."""
    return (
        ((total - mechanism.p * mechanism.noise_bits * records) * (2 / mechanism.levels) - 1)
        * mechanism.clip
        / records
    )


@plant("anchors noised as printed", "calibrate_shuffled")
def anchors_as_printed(*words, **more) -> Plan:
    """The anchors' noise has max(1, sqrt(q/R)) = 1 where sqrt(R/q) is needed (the paper's SDP
    SPIDER): each spends what all may.
    """
    plan = calibrate_shuffled(*words, **more)
    anchors, m = plan.count("anchor", 0), plan.mechanisms["anchor"]
    return replace(
        plan,
        mechanisms=plan.mechanisms
        | {"anchor": replace(m, noise_bits=(m.noise_bits // anchors).clamp(min=1))},
    )
