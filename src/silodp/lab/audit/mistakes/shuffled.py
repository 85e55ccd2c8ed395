"""Mistakes in a shuffle, the paper's print among them, as subclasses and functions that take the place of one shipped part.

As in `mistakes`, each says in its first line what it does wrong; nothing here can be switched on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from silodp.core.events import Event, TotalEvent
from silodp.core.mechanisms import Shuffled, shuffle
from silodp.core.protocol.box import Contribution, encrypt_box
from silodp.core.protocol.codec import Answer, Envelope, Sealed, decode_query, decode_reply, encode_reply
from silodp.core.protocol.relay import Passed, Request
from silodp.core.query import Query, Release
from silodp.server.plan import Plan
from silodp.server.shuffled import calibrate_shuffled
from silodp.shuffler import pool as pool_module
from silodp.shuffler.pool import Pool
from silodp.shuffler.store import Store
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.silo.ledger.memory import MemoryLedger
from silodp.silo.service.door import Door
from silodp.wire.inprocess import ThroughShuffler, Total

_UNIT = 2.0**32

# --- the randomizer ---------------------------------------------------------------------------------------------------------------


class OverHalfTheRange(Exact):
    """g levels over [0, L] for coordinates shifted to [0, 2L] (the paper's print): a record moves by twice what is paid for."""

    def _counts(self, rows, mechanism: Shuffled, dim: int) -> np.ndarray:
        def unhalved(values: np.ndarray, clip: float, levels: int) -> np.ndarray:
            return 2 * shipped(values, clip, levels)

        shipped = shuffle.lattice
        with mock.patch.object(shuffle, "lattice", unhalved):
            return super()._counts(rows, mechanism, dim)


class ClipsCoordinates(Exact):
    """Each rounded coordinate is kept within 0 .. g, and the record's norm is not: d coordinates move by g each."""

    def _counts(self, rows, mechanism: Shuffled, dim: int) -> np.ndarray:
        def unclipped(values: np.ndarray, clip: float, levels: int) -> np.ndarray:
            return np.clip(np.rint((values / clip + 1) * (levels / 2 * _UNIT)), 0, levels * _UNIT).astype(np.int64)

        with mock.patch.object(shuffle, "lattice", unclipped):
            return super()._counts(rows, mechanism, dim)


class RoundsToNearest(Exact):
    """The nearest level, without a coin: biased, and two records may end further apart than they are."""

    def _counts(self, rows, mechanism: Shuffled, dim: int) -> np.ndarray:
        def nearest(values: np.ndarray, clip: float, parameters: shuffle.Parameters, random_bytes: shuffle.RandomBytes) -> np.ndarray:
            return np.rint(shuffle.lattice(values, clip, parameters.levels) / _UNIT).astype(np.int64)

        with mock.patch.object(shuffle, "rounded", nearest):
            return super()._counts(rows, mechanism, dim)


class CoinsForASilo(Exact):
    """b noise bits for a silo, where the price counts on b for each of its records."""

    def _counts(self, rows, mechanism: Shuffled, dim: int) -> np.ndarray:
        def few(random_bytes: shuffle.RandomBytes, trials: int, p: float, size: int) -> np.ndarray:
            missing = trials - mechanism.noise_bits
            return shipped(random_bytes, mechanism.noise_bits, p, size) + round(missing * p)  # so that the mean looks right

        shipped = shuffle.binomial
        with mock.patch.object(shuffle, "binomial", few):
            return super()._counts(rows, mechanism, dim)


class SameCoins(Exact):
    """Every round draws from the beginning of the same stream."""

    def _counts(self, rows, mechanism: Shuffled, dim: int) -> np.ndarray:
        class Constant(lattice.Keystream):
            def _rekey(self) -> None:
                super()._rekey()
                self._cipher = Cipher(algorithms.ChaCha20(bytes(32), bytes(16)), mode=None).encryptor()

        with mock.patch.object(lattice, "Keystream", Constant):
            return super()._counts(rows, mechanism, dim)


# --- what leaves a silo -----------------------------------------------------------------------------------------------------------


class DemandsNothing(Door):
    """The box goes with any total: the silo's condition is left out."""

    def _sealed(self, envelope: Envelope, release: Release) -> bytes:
        mechanism = envelope.query.mechanism
        assert self._shuffling is not None
        assert isinstance(mechanism, Shuffled)
        (shuffling, pseudonym), bits = self._shuffling, mechanism.levels + mechanism.noise_bits
        own = int(mechanism.sampling.batch(self._n))
        return encrypt_box(Contribution(envelope.shuffle_round, 1, own, bits, release.value[0, 0].numpy()), shuffling.shuffler, pseudonym)


class FreshBox(Door):
    """A retry is computed anew, except that it was paid for already."""

    def _answer(self, frame: bytes) -> bytes:
        reply, envelope = decode_reply(super()._answer(frame), limit=2**62), decode_query(frame, limit=2**62)[0]
        assert isinstance(reply, Sealed)
        again: Any = SimpleNamespace(value=self._exact.answer(envelope.query, [0]))
        return encode_reply(replace(reply, box=self._sealed(envelope, again)), self._key)


class OpenCounts(Door):
    """The counts go to the server as they are: it can add them up itself."""

    def _answer(self, frame: bytes) -> bytes:
        reply, query = decode_reply(super()._answer(frame), limit=2**62), decode_query(frame, limit=2**62)[0].query
        assert isinstance(reply, Sealed)
        counts = self._exact.answer(query, [0])[0].double()
        event = Event(query.mechanism.sampling, 1.0, 1)
        return encode_reply(Answer(reply.silo, reply.query_id, reply.digest, counts, event, reply.count, reply.head), self._key)


class EachAlone(MemoryLedger):
    """Every round has the whole budget to itself."""

    def charge(self, event: Event | TotalEvent, silos: Sequence[int]) -> None:
        self._buckets = {}
        super().charge(event, silos)


# --- the shuffler -----------------------------------------------------------------------------------------------------------------


class CountsTwice(Pool):
    """Every box counts, also the second of a pseudonym."""

    def _opened(self, box: bytes, request: Request) -> tuple[str, Contribution]:
        pseudonym, contribution = super()._opened(box, request)
        return pseudonym + hashlib.sha256(box).hexdigest(), contribution


class PassesFew(Pool):
    """Passes a total on whatever its silos demand."""

    def total(self, request: Request) -> Passed:
        with mock.patch.object(pool_module, "_content", lambda known: (known, sum(c.records for c in known.values()))):
            return super().total(request)


class PassesSeparate(Pool):
    """Passes the counts of the silos on one after the other, in an order of their own: a shuffle of silos and not of bits."""

    def total(self, request: Request) -> Passed:
        with mock.patch.object(pool_module, "add_counts", np.concatenate):
            return super().total(request)


class ForgetsRounds(Store):
    """A round may be passed on again, with other boxes."""

    def reply(self, round: str) -> bytes | None:
        return None

    def keep(self, round: str, reply: bytes, now: float) -> bytes:
        return reply


class ThroughFew(ThroughShuffler):
    """As PassesFew, in simulation."""

    def ask(self, query: Query, silos: Sequence[int]) -> Total:
        release = self._gate.answer(query, silos)
        return Total(release.value.sum(1, keepdim=True), release.silos)


class ThroughSeparate(ThroughShuffler):
    """As PassesSeparate, in simulation."""

    def ask(self, query: Query, silos: Sequence[int]) -> Total:
        release = self._gate.answer(query, silos)
        return Total(release.value, release.silos)


# --- the analyzer and the plan ----------------------------------------------------------------------------------------------------


def subtracts_noise_once(total: Tensor, mechanism: Shuffled, records: int) -> Tensor:
    """Subtracts p b for one contribution and not for all of them."""
    return ((total - mechanism.p * mechanism.noise_bits) * (2 / mechanism.levels) - records) * mechanism.clip / records


def centres_once(total: Tensor, mechanism: Shuffled, records: int) -> Tensor:
    """Subtracts L and not m L from the sum of m shifted records (the paper's print)."""
    return ((total - mechanism.p * mechanism.noise_bits * records) * (2 / mechanism.levels) - 1) * mechanism.clip / records


def anchors_as_printed(*words, **more) -> Plan:
    """The anchors' noise has max(1, sqrt(q/R)) = 1 where sqrt(R/q) is needed (the paper's SDP SPIDER): each spends what all may."""
    plan = calibrate_shuffled(*words, **more)
    anchors, m = plan.count("anchor", 0), plan.mechanisms["anchor"]
    return replace(plan, mechanisms=plan.mechanisms | {"anchor": replace(m, noise_bits=(m.noise_bits // anchors).clamp(min=1))})
