"""Answer frames for a deployed silo: a frame of bytes in, a frame of bytes out, and nothing else.

A reply is a release that has been charged and stored, or one code of `refusals.CODES`. Which of
them, and how long the frame is, is a function of the query, the policy and the ledger. No
exception's text, no shape and no count passes.

How long a reply takes does depend a little on records and noise: on a record on which the model
raises, on a slow draw, on numbers below 2^-1022, which are not flushed to zero and which processors
are slow with. With the policy's `answer_after` the daemon therefore sends every reply at the end of
a slot of that length (`listener.Server`). No other party is trusted to delay replies.

A query passes these checks in this order (`Door._answer`). The code of the first that fails is the
reply. Nothing is charged before the last one.

 1. Length, signature and spelling of the frame: `codec.decode_query`.
 2. Asker, model, statistic, sampling, clip, noise, steps and batch: `Policy.check`.
 3. The policy's table for this kind of total: `Trust.check`.
 4. The id, for which a stored answer is sent again: `QueryLedger.known`.
 5. The silo's features, and the range of the integers: `Exact.check`.
 6. The work of the price: `Limits.count_work`.
 7. The charges of this run and this hour: `Policy.check_rate`.
 8. Limits that hold under every policy: `gate.check`.
 9. Price, budget and holds: `QueryLedger.charge`.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.problem.problem import Problem
from silodp.core.protocol.codec import (
    MAX_HEADER,
    OVERHEAD,
    Answer,
    Refusal,
    Sealed,
    decode_query,
    encode_reply,
)
from silodp.core.protocol.frames import COMMON, KEYS
from silodp.core.protocol.quote import (
    HOLD,
    HoldReply,
    HoldRequest,
    ReleaseRequest,
    decode_hold,
    encode_hold_reply,
)
from silodp.core.protocol.quote import LIMIT as HOLD_LIMIT
from silodp.core.protocol.refusals import CODES
from silodp.core.statistics import MAX_EDGES
from silodp.silo.answer.exact import Exact
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate
from silodp.silo.ledger.durable import DurableLedger, QueryLedger
from silodp.silo.ledger.reserve import checkpoint, finish, take, taken, taken_since
from silodp.silo.service.limits import Limits
from silodp.silo.service.policy import HOUR, Policy
from silodp.silo.service.trust import ALONE, NoTotals, Trust

if TYPE_CHECKING:
    from silodp.core.features.feature_map import FeatureMap
    from silodp.silo.data.tables import KnownBy

FINISHED = 10_000
"""Most runs whose release is remembered in memory. The latest ones stay."""


def definition_hash(problem: Problem) -> str:
    """Return the name of a problem in policies and queries: the SHA-256 of its definition."""
    return hashlib.sha256(problem.definition().encode()).hexdigest()


@dataclass(frozen=True)
class FrameNote:
    """What an operator may read about one frame, as a function of query, policy and ledger.

    `code` is answered, repeated, held, released, or the code of the refusal.
    """

    code: str
    query_id: str = "-"
    statistic: str = "-"


class Door:
    """Answers frames for the records of one silo, one at a time, within its policy and ledger."""

    def __init__(
        self,
        policy: Policy,
        problem: Problem,
        records: Records,
        ledger: DurableLedger,
        *,
        held_out: float = 0.0,
        signing_key: Ed25519PrivateKey | None = None,
        trust: Trust | None = None,
        registry: Path | None = None,
        clock: Callable[[], float] = time.time,
        noted: Callable[[FrameNote], None] = lambda note: None,
        known_by: KnownBy | None = None,
        mapped: FeatureMap | None = None,
    ) -> None:
        """Open the door. Raise BadInput unless policy, ledger, records and machine fit together.

        The policy must approve this problem. The ledger must be that of these records and of the
        policy's budget. This machine must compute each record by itself (`Exact.verify`).

        `held_out` is the share of the records, by position (of persons by secret marks), that a
        Score is over, and nothing else. `trust` hides the silo's part of a total; without it,
        totals are refused. `noted` is called for each frame, before its reply is sent. `known_by`
        are the features, labels, exact digest and persons that the ledger recognises the records
        by, if they differ from the records' own: a file's content stays the same under another
        schema. The model sees what `mapped` makes of the records.
        """
        if policy.definition != definition_hash(problem):
            study = "a study"
            if policy.study:
                study = f"the study {policy.study}"
            raise BadInput(
                f"the policy of {policy.silo} approves {study} by its definition, "
                f"{policy.definition[:12]}.., but model, loss, prox, schema and torch "
                "version as they are here make another, "
                f"{definition_hash(problem)[:12]}..; restore what was changed, or approve "
                "the new one: "
                "`silodp federation propose` at the server, then `silodp silo approve` here"
            )
        if policy.budget != ledger.settings.budget:
            raise BadInput(
                f"the policy's budget is {policy.budget}, but the ledger was made with "
                f"{ledger.settings.budget}; they must agree"
            )
        self._n = records.counts[0]
        self._dim = problem.dim
        identity = known_by or records.known_by
        _, self._generation = ledger.recognise(*identity, registry=registry)
        places = partial(ledger.partition, generation=self._generation)
        marks = None
        if problem.person:
            persons = identity[3] or [""] * self._n
            marks = ledger.marks(persons, records.contents)
        self._exact = Exact(
            problem,
            records,
            partition=places,
            held_out_share=held_out,
            marks=marks,
            mapped=mapped,
        )
        self._exact.verify()
        self._policy = policy
        self._ledger = ledger
        self._key = signing_key
        self._clock = clock
        self._trust = trust or NoTotals()
        self._charges = Charges()
        self._noted = noted
        self._note = FrameNote("answered")
        self._lock = threading.Lock()
        self._paused = False
        self._purged = date.min
        self._longest = (
            OVERHEAD + 8 + MAX_HEADER + 16 * max(problem.dim, self._exact.features, MAX_EDGES)
        )
        self._longest += self._trust.room
        self.limit = max(self._longest, HOLD_LIMIT)
        """Bytes of the longest frame that is decoded: a query with two points of the model in
        float64, or a request for a hold.
        """
        self._limits = Limits(
            policy,
            ledger.settings.rule,
            taken_since(ledger, _stamp(clock() - HOUR)),
        )
        # If purging fails now, it is tried again at the next query, which is refused if it fails.
        with contextlib.suppress(Refused):
            self._purge(clock())
        with contextlib.suppress(Refused):  # a checkpoint can wait
            checkpoint(ledger, clock(), expired=True)
        self._finished: dict[tuple[str, str], int] = {}
        """The number under which a run was last released. A request for a hold that arrives late
        is refused, even if the ledger had nothing to release.
        """

    def slot(self) -> float:
        """Return the seconds that `answer_after` should be, measured on invented records."""
        # Only approving a study measures. A gate that serves does not load this module.
        from silodp.silo.service.pace import slot_for

        return slot_for(
            self._exact.problem,
            *self._exact.shapes,
            number=self._exact.number,
            statistics=self._policy.statistics,
            steps=self._policy.maximum_local_steps,
        )

    @property
    def void(self) -> int:
        """Return how many records count as zero, for the hospital alone. No reply contains this
        number.
        """
        return self._exact.void

    def pause(self) -> None:
        """Refuse every frame with "paused" from now on. An answer that is being computed is
        finished.
        """
        self._paused = True

    def resume(self) -> None:
        """Answer frames again."""
        self._paused = False

    def handle(self, frame: bytes) -> bytes:
        """Return a valid reply to a frame, whatever its bytes and whatever the records."""
        with self._lock:
            self._note = FrameNote("answered")
            try:
                reply = self._answer(frame)
            except Exception as error:
                if isinstance(error, Refused) and error.code in CODES:
                    code = error.code
                else:
                    code = "internal"
                self._note = replace(self._note, code=code)
                reply = encode_reply(Refusal(code, hashlib.sha256(frame).hexdigest()), self._key)
            # A log on a full disk must not stop an answer that was charged and stored.
            with contextlib.suppress(Exception):
                self._noted(self._note)
            return reply

    def _answer(self, frame: bytes) -> bytes:
        """Return the reply to a query. Raise Refused if a check fails.

        The steps are decode, policy, ledger, gate (check, charge durably, compute), store, send.
        Each runs only if all before it passed. ARCHITECTURE.md, section 5, has a table of the
        checks in this order.
        """
        if self._paused:
            raise Refused("paused")
        if frame[:4] == HOLD:
            return self._hold(frame)
        if frame[:4] == KEYS:
            return self._offer(frame)
        envelope, asker, digest = decode_query(frame, limit=self._longest)
        query = envelope.query
        now = self._clock()
        self._note = FrameNote("answered", envelope.query_id, type(query.statistic).__name__)
        self._purge(now)
        self._policy.check(envelope, asker, n=self._n, now=now)
        if query.mechanism.total:
            trust = self._trust
            round = envelope.shuffle_round
        else:
            trust = ALONE
            round = ""
        trust.check(envelope, self._n)
        # An id belongs to one asker and one query. Another pair may not use it.
        signed_query = hashlib.sha256(bytes.fromhex(asker) + bytes.fromhex(digest)).digest()
        with self._ledger.question(
            query_id=envelope.query_id,
            digest=signed_query,
            kind=query.mechanism.kind,
            asker=asker,
            run=envelope.run,
            round=round,
            generation=self._generation,
            most_local=self._trust.local_limit,
            now=now,
        ) as question:
            if question.answer is not None:
                self._note = replace(self._note, code="repeated")
                # The process that stored the answer may have died before it forgot the key.
                trust.forget(asker, envelope)
                return question.answer
            self._exact.check(query)
            self._limits.count_work(asker, [query.event()], now)
            trust.begin(asker, envelope, question.rounds)
            self._charges.read(question)
            # A query may be charged but not answered, if the process died in between.
            if not self._charges.known(envelope.query_id):
                self._policy.check_rate(asker, envelope.run, now=now, counts=self._charges)
            # The charge ends the transaction, so no record is read within it.
            release = Gate(self._exact, question, dim=self._dim, counts=[self._n]).answer(
                query, [0]
            )
        self._charges.read(question, _stamp(now))
        count, head = question.released
        names = self._policy.silo, envelope.query_id, digest
        if release.event.total:
            answer = Sealed(
                *names,
                trust.hide(asker, envelope, release.value.flatten().numpy()),
                cast(TotalEvent, release.event),
                count,
                head,
            )
        else:
            packing = None
            if envelope.version > COMMON:
                packing = self._exact.packing(query)
            answer = Answer(
                *names, release.value[0], cast(Event, release.event), count, head, packing
            )
        # If another process stored an answer first, its bytes are the answer.
        stored = question.store(encode_reply(answer, self._key))
        trust.forget(asker, envelope)
        return stored

    def _purge(self, now: float) -> None:
        """Delete answers that are older than the policy allows, once a day and at the start.

        It runs before a query is looked at.
        """
        today = datetime.fromtimestamp(now, UTC).date()
        if today != self._purged:
            with _closed():
                self._ledger.purge_before(
                    (today - timedelta(days=self._policy.keep_answers)).isoformat()
                )
            self._purged = today

    def _hold(self, frame: bytes) -> bytes:
        """Take or release a hold for a run. No record is touched, and nothing is charged."""
        request, asker, digest = decode_hold(frame)
        now = self._clock()
        if isinstance(request, HoldRequest):
            self._note = FrameNote("held", request.hold)
        else:
            self._note = FrameNote("released", request.hold)
        self._policy.check_asker(request, asker, now=now)
        names = request.silo, request.run, request.hold, digest
        if not isinstance(request, HoldRequest):
            with _closed():
                finish(self._ledger, asker=asker, run=request.run, number=request.number)
            self._finish(asker, request)
            return encode_hold_reply(HoldReply(*names), self._key)
        if request.number <= self._finished.get((asker, request.run), -1):
            raise Refused("lapsed")
        events = [event for _, event in request.events]
        self._limits.count_hold(
            asker,
            digest,
            events,
            len(frame),
            now,
            taken=lambda: taken(self._ledger, request.hold),
        )
        for event in events:
            self._policy.check_planned(event, n=self._n)
            if event.total:
                self._trust.check_planned(cast(TotalEvent, event))
        self._limits.count_work(asker, events, now)
        outcome = take(
            self._ledger,
            hold=request.hold,
            digest=digest,
            asker=asker,
            run=request.run,
            number=request.number,
            events=events,
            caps=self._policy,
            now=now,
            generation=self._generation,
        )
        self._note = replace(self._note, code=outcome.code or "held")
        needed = None
        if math.isfinite(outcome.needed):
            needed = outcome.needed
        left = None
        if asker in self._policy.sees_left:
            left = max(0.0, outcome.left)
        return encode_hold_reply(
            HoldReply(*names, outcome.code, outcome.seconds, needed, left), self._key
        )

    def _offer(self, frame: bytes) -> bytes:
        """Return the silo's key for a run. No record is touched, and nothing is charged."""
        # Only a server of masked totals sends such a frame.
        from silodp.core.protocol.offers import Offer, decode_key_request, encode_offer

        request, asker, digest = decode_key_request(frame)
        self._note = FrameNote("offered", request.run)
        self._policy.check_asker(request, asker, now=self._clock())
        return encode_offer(
            Offer(request.silo, digest, self._trust.offer(asker, request.run)), self._key
        )

    def _finish(self, asker: str, request: ReleaseRequest) -> None:
        who = asker, request.run
        self._finished[who] = max(request.number, self._finished.pop(who, -1))
        if len(self._finished) > FINISHED:
            del self._finished[next(iter(self._finished))]


class Charges:
    """The charges that the policy's rates count, from the ledger, so that a restart forgets none.

    Formal guarantee: they are the charges in the file, as of the last call of `read`, which is
    within the transaction of the charge.
    """

    def __init__(self) -> None:
        self._runs: dict[str, tuple[str, str]] = {}
        self._count: Counter[tuple[str, str]] = Counter()
        self._times: list[str] = []

    def known(self, query_id: str) -> bool:
        """Return whether the query has been charged.

        Then it may be computed again under that charge, whatever the rates.
        """
        return query_id in self._runs

    def read(self, question: QueryLedger, stamp: str = "") -> None:
        """Read the charges that are new in the ledger. Entries of another kind are not read.

        After a charge, `stamp` is the door's own time, which counts if there is no other new
        charge.
        """
        new = question.charges(after=len(self._times))
        for entry in new:
            self._runs[entry.query_id] = entry.asker, entry.run
            self._count[entry.asker, entry.run] += 1
            if stamp and len(new) == 1:
                self._times.append(stamp)
            else:
                self._times.append(entry.time)

    def in_run(self, asker: str, run: str) -> int:
        """Return how many charges this asker's run has. Another asker may use the same name."""
        return self._count[asker, run]

    def since(self, time: float) -> int:
        """Return how many charges have a later time stamp (seconds since 1970).

        Charges from the future count too, in case the clock was put back.
        """
        moment = _stamp(time)
        return sum(stamp > moment for stamp in self._times)


def _stamp(time: float) -> str:
    """Return a time in the ledger's own form, in which text sorts as time does."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")


@contextlib.contextmanager
def _closed() -> Iterator[None]:
    """Turn the ledger's sentence for people into Refused("ledger") for an asker."""
    try:
        yield
    except BadInput:
        raise Refused("ledger") from None
