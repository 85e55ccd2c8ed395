"""Mistakes in a shuffle, the paper's print among them: in a silo's numbers, the door, the shuffler
and the plan.
"""

from __future__ import annotations

import hashlib
import math
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
from silodp.core.protocol.box import Contribution
from silodp.core.protocol.codec import Answer, decode_query, encode_reply
from silodp.core.protocol.relay import Request
from silodp.core.query import Query
from silodp.server.plan import Plan
from silodp.server.shuffled import in_totals
from silodp.shuffler import pool as pool_module
from silodp.shuffler.pool import Pool
from silodp.shuffler.store import RoundStore
from silodp.silo.answer import exact as exact_module
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.silo.ledger.memory import MemoryLedger
from silodp.silo.service import sealing
from silodp.silo.service.door import Door
from silodp.wire.inprocess import ThroughShuffler, Total

OF_A_SHUFFLE = Mistakes()
plant = OF_A_SHUFFLE.plant
plant("anchors noised as printed", "ledger")(NoFilter)
plant("share of a sum of deviations", "ledger")(NoFilter)

# --- a silo's numbers ----------------------------------------------------------------------------


@contextmanager
def clips_coordinates(exact: Exact, words: tuple) -> Iterator[None]:
    """Each coordinate is kept within the clip, and the record's norm is not."""

    def each(shipped: Any, rows: Tensor, clip: float, gamma: float) -> Tensor:
        return (rows / gamma).clamp(-clip / gamma, clip / gamma).round().long()

    with mock.patch.object(exact, "_products", None), instead(exact_module, "quantised", each):
        yield


def leaves_its_share_out(exact: Exact, words: tuple) -> AbstractContextManager:
    """The other silos' noise is enough, somebody thought."""
    return instead(
        lattice, "rounded_gaussian", lambda shipped, scale, size: np.zeros(size, np.int64)
    )


def shares_its_share(exact: Exact, words: tuple) -> AbstractContextManager:
    """Divides by the root of the silos once more: the query has the share already."""
    return instead(
        lattice,
        "rounded_gaussian",
        lambda shipped, scale, size: shipped(scale / math.sqrt(words[0].mechanism.counted), size),
    )


for name, planted in {
    "coordinates clipped by themselves": clips_coordinates,
    "share left out": leaves_its_share_out,
    "share divided twice": shares_its_share,
    "the same share of noise in two rounds": lambda exact, words: keyed(bytes(32)),
}.items():
    plant(name, "exact")(during(Exact, "answer", planted))


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
        box = self._trust.hide("", envelope, again.flatten().numpy())
        return encode_reply(replace(reply, box=box), self._key)


@plant("numbers in the open", "door")
class OpenNumbers(Door):
    """The numbers go to the server as they are: it can add them up itself."""

    def _answer(self, frame: bytes) -> bytes:
        reply, query = opened(super()._answer(frame), frame)
        numbers = self._exact.answer(query, [0])[0].double()
        event = Event(query.mechanism.sampling, 1.0, 1)
        return encode_reply(
            Answer(
                reply.silo, reply.query_id, reply.digest, numbers, event, reply.count, reply.head
            ),
            self._key,
        )


@plant("rounds not added up", "ledger")
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
    return instead(pool_module, "_satisfied", lambda shipped, known: known)


def passes_separate(pool: Pool, words: tuple) -> AbstractContextManager:
    """Passes the numbers of the silos on one after the other, in an order of their own."""
    return mock.patch.object(pool_module, "add_numbers", np.concatenate)


plant("total of too few", "pool")(during(Pool, "total", passes_few))
plant("numbers passed on unsummed", "pool")(during(Pool, "total", passes_separate))


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


plant("total of too few", "channel")(through(lambda numbers: numbers.sum(1, keepdim=True)))
plant("numbers passed on unsummed", "channel")(through(lambda numbers: numbers))


# --- the plan ------------------------------------------------------------------------------------


def planned(change: Callable[[Plan, Any], Any]) -> Callable[..., Plan]:
    """The plan of totals with each mechanism changed."""

    def mistaken(*words: Any, **more: Any) -> Plan:
        plan = in_totals(*words, **more)
        return replace(plan, mechanisms={k: change(plan, m) for k, m in plan.mechanisms.items()})

    return mistaken


@plant("anchors noised as printed", "in_totals")
@planned
def anchors_as_printed(plan: Plan, mechanism: Any) -> Any:
    """The anchors' noise has max(1, sqrt(q/R)) = 1 where sqrt(R/q) is needed (the paper's SDP
    SPIDER): each spends what all may.
    """
    if mechanism.kind != "anchor":
        return mechanism
    factor = math.sqrt(plan.count("anchor", 0))
    return replace(mechanism, noise_multiplier=mechanism.noise_multiplier / factor)


@plant("share of a sum of deviations", "in_totals")
@planned
def adds_deviations(plan: Plan, mechanism: Any) -> Any:
    """Each silo's share is a part 1 / m of the noise, as if deviations added up and not
    variances.
    """
    factor = math.sqrt(mechanism.counted)
    return replace(mechanism, noise_multiplier=mechanism.noise_multiplier / factor)
