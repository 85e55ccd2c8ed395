"""The door of a deployed silo: a frame of bytes comes in, a frame of bytes goes out, and this is
all that ever does.

What leaves is a release that has been charged and stored, or one code of `refusals.CODES`. Which of
them, and how long the frame is, is a function of the query, the policy and the ledger; no
exception's text, no shape and no count passes. How long it takes to make does depend a little on
records and noise (a record on which the model raises, a slow draw, numbers below 2^-1022, which are
not flushed to zero and which processors are slow with): with the policy's `answer_after` the daemon
sends every reply at the end of a slot of that length (`listener.Server`), so that nobody is trusted
to hold replies back.
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
from silodp.core.mechanisms import Shuffled
from silodp.core.mechanisms.totals import as_total
from silodp.core.privacy.work import price_work
from silodp.core.problem.problem import Problem
from silodp.core.protocol.box import Contribution, encrypt_box
from silodp.core.protocol.codec import (
    MAX_HEADER,
    OVERHEAD,
    Answer,
    Envelope,
    Refusal,
    Sealed,
    decode_query,
    encode_reply,
)
from silodp.core.protocol.frames import COMMON
from silodp.core.protocol.masks import ROW
from silodp.core.protocol.offers import KEYS, Offer, decode_key_request, encode_offer
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
from silodp.core.query import Release
from silodp.core.statistics import MAX_EDGES
from silodp.silo.answer.exact import Exact
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate
from silodp.silo.ledger.durable import DurableLedger, QueryLedger
from silodp.silo.ledger.reserve import checkpoint, finish, known, take, taken_since
from silodp.silo.service.limits import Limits
from silodp.silo.service.pace import slot_for
from silodp.silo.service.policy import HOUR, Policy, Shuffling

if TYPE_CHECKING:
    from silodp.core.features.feature_map import FeatureMap
    from silodp.silo.data.tables import Known
    from silodp.silo.service.masking import Masker

FINISHED = 10_000
"""Runs whose release is remembered in memory, newest first to stay."""


def definition_hash(problem: Problem) -> str:
    """The name of a problem in policies and queries: SHA-256 of its definition."""
    return hashlib.sha256(problem.definition().encode()).hexdigest()


@dataclass(frozen=True)
class FrameNote:
    """What an operator may read of one frame, a function of query, policy and ledger: answered,
    repeated, held, released, or the code of the refusal."""

    code: str
    query_id: str = "-"
    statistic: str = "-"


class Door:
    """Answers frames for the records of one silo, one at a time, within its policy and its
    ledger.
    """

    def __init__(
        self,
        policy: Policy,
        problem: Problem,
        records: Records,
        ledger: DurableLedger,
        *,
        held_out: float = 0.0,
        signing_key: Ed25519PrivateKey | None = None,
        shuffling: tuple[Shuffling, Ed25519PrivateKey] | None = None,
        masks: Masker | None = None,
        registry: Path | None = None,
        clock: Callable[[], float] = time.time,
        noted: Callable[[FrameNote], None] = lambda note: None,
        known_by: Known | None = None,
        mapped: FeatureMap | None = None,
    ) -> None:
        """Raises BadInput unless the policy approves this problem, the ledger is that of these
        records and of the policy's budget, and this machine computes each record by itself
        (`Exact.verify`).

        A share `held_out` of the records, by position (of persons by secret marks), is what a Score
        is over, and nothing else.
        `shuffling` is the policy's table of that name with the pseudonym's key; without it,
        shuffled queries are refused; masked ones are without `masks`. `noted` is told of each
        frame, before its reply is sent. `known_by` are the features and labels that the ledger
        recognises the records by, an exact digest of them all, and who the persons are, where those
        are not the records' own: what a file holds stays the same under another schema. The model
        sees what `mapped` makes of the records.
        """
        if policy.definition != definition_hash(problem):
            if policy.study:
                named = f"the study {policy.study}"
            else:
                named = "a study"
            raise BadInput(
                f"the policy of {policy.silo} approves {named} by its definition, "
                f"{policy.definition[:12]}.., but model, loss, prox, schema and torch "
                "version as they are here make another, "
                f"{definition_hash(problem)[:12]}..; restore what was changed, or approve "
                "what is wanted now: "
                "`silodp federation propose` at the server, then `silodp silo approve` here"
            )
        if policy.budget != ledger.settings.budget:
            raise BadInput(
                f"the policy's budget is {policy.budget}, but the ledger was made with "
                f"{ledger.settings.budget}; they must agree"
            )
        self._n = records.counts[0]
        self._dim = problem.dim
        known = known_by or records.known_by
        _, self._generation = ledger.recognise(*known, registry=registry)
        places = partial(ledger.partition, generation=self._generation)
        marks = None
        if problem.person:
            persons = known[3] or [""] * self._n
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
        self._shuffling = shuffling
        self._masks = masks
        self._charges = Charges()
        self._noted = noted
        self._note = FrameNote("answered")
        self._lock = threading.Lock()
        self._paused = False
        self._purged = date.min
        self._longest = (
            OVERHEAD + 8 + MAX_HEADER + 16 * max(problem.dim, self._exact.features, MAX_EDGES)
        )
        if masks:
            self._longest += ROW * (len(masks.policy.members) + 1)
        else:
            self._longest += 0
        self.limit = max(self._longest, HOLD_LIMIT)
        """Bytes of the longest frame that is looked at: a query with two points of the model in
        float64, or what a hold is asked for with.
        """
        self._limits = Limits(
            policy,
            partial(price_work, ledger.settings.rule),
            taken_since(ledger, _stamp(clock() - HOUR)),
        )
        with contextlib.suppress(
            Refused
        ):  # what cannot be purged now is when a question comes, or the question is refused
            self._purge(clock())
        with contextlib.suppress(Refused):  # a checkpoint can wait
            checkpoint(ledger, clock(), expired=True)
        self._finished: dict[tuple[str, str], int] = {}
        """The number under which a run was last released: a hold that comes late is not taken,
        though the ledger had nothing to release.
        """

    def slot(self) -> float:
        """Return the seconds that `answer_after` should be: measured on made-up records."""
        return slot_for(
            self._exact.problem,
            *self._exact.shapes,
            number=self._exact.number,
            statistics=self._policy.statistics,
            steps=self._policy.maximum_local_steps,
        )

    @property
    def void(self) -> int:
        """How many records count as zero. For the hospital alone: nothing that leaves has it."""
        return self._exact.void

    def pause(self) -> None:
        """From now on every frame is refused with "paused"; an answer that is being computed is
        finished.
        """
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def handle(self, frame: bytes) -> bytes:
        """The reply to a frame: always a valid reply frame, whatever the bytes and whatever the
        records.
        """
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
            with contextlib.suppress(
                Exception
            ):  # a full disk stops no answer that was charged and stored
                self._noted(self._note)
            return reply

    def _answer(self, frame: bytes) -> bytes:
        """Decode, policy, ledger, gate (check, charge durably, compute), store, send: each only if
        all before it agreed.
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
        round = ""
        if query.mechanism.total:
            self._check_total(envelope)
            round = envelope.shuffle_round
        who = hashlib.sha256(bytes.fromhex(asker) + bytes.fromhex(digest)).digest()
        with self._ledger.question(
            query_id=envelope.query_id,
            digest=who,
            kind=query.mechanism.kind,
            asker=asker,
            run=envelope.run,
            round=round,
            generation=self._generation,
            most_local=self._most_local(),
            now=now,
        ) as paid:
            if paid.answer is not None:
                self._note = replace(self._note, code="repeated")
                if (
                    query.mechanism.masked and self._masks
                ):  # stored, but who stored it may have died, or failed, before this
                    self._masks.forget(asker, envelope.run, envelope.cohort)
                return paid.answer
            self._exact.check(query)
            self._limits.count_work(asker, [query.event()], now)
            if query.mechanism.masked and self._masks:
                self._masks.begin(asker, envelope, paid.rounds)
            self._charges.read(paid)
            if not self._charges.known(
                envelope.query_id
            ):  # or else charged but not answered, as when the process died in between
                self._policy.check_rate(asker, envelope.run, now=now, counts=self._charges)
            # the charge ends the transaction: no record is read within it
            release = Gate(self._exact, paid, dim=self._dim, counts=[self._n]).answer(query, [0])
        self._charges.read(paid, _stamp(now))
        count, head = paid.released
        names = self._policy.silo, envelope.query_id, digest
        if release.event.total:
            answer = Sealed(
                *names,
                self._hidden(asker, envelope, release),
                cast(TotalEvent, release.event),
                count,
                head,
            )
        else:
            if envelope.version > COMMON:
                packing = self._exact.packing(query)
            else:
                packing = None
            answer = Answer(
                *names, release.value[0], cast(Event, release.event), count, head, packing
            )
        stored = paid.store(
            encode_reply(answer, self._key)
        )  # another process may have been first: then its bytes are the answer
        if query.mechanism.masked and self._masks:
            self._masks.forget(asker, envelope.run, envelope.cohort)
        return stored

    def _purge(self, now: float) -> None:
        """Once a day, before a question is looked at, and at the start: answers that are older than
        the policy keeps them.
        """
        today = datetime.fromtimestamp(now, UTC).date()
        if today != self._purged:
            with _closed():
                self._ledger.purge_before(
                    (today - timedelta(days=self._policy.keep_answers)).isoformat()
                )
            self._purged = today

    def _hold(self, frame: bytes) -> bytes:
        """Takes a hold for a run, or releases one; no record is touched, and nothing is charged."""
        request, asker, digest = decode_hold(frame)
        now = self._clock()
        wanted = isinstance(request, HoldRequest)
        self._note = FrameNote("held" if wanted else "released", request.hold)
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
            taken=lambda: known(self._ledger, request.hold),
        )
        for event in events:
            self._policy.check_planned(event, n=self._n)
            if event.total:
                self._check_planned_total(cast(TotalEvent, event))
        self._limits.count_work(asker, events, now)
        about = {
            "hold": request.hold,
            "digest": digest,
            "asker": asker,
            "run": request.run,
            "number": request.number,
        }
        found = take(
            self._ledger,
            **about,
            events=events,
            caps=self._policy,
            now=now,
            generation=self._generation,
        )
        self._note = replace(self._note, code=found.code or "held")
        if math.isfinite(found.needed):
            needed = found.needed
        else:
            needed = None
        if asker in self._policy.sees_left:
            left = max(0.0, found.left)
        else:
            left = None
        return encode_hold_reply(
            HoldReply(*names, found.code, found.seconds, needed, left), self._key
        )

    def _offer(self, frame: bytes) -> bytes:
        """Gives the silo's key for a run; no record is touched, and nothing is charged."""
        request, asker, digest = decode_key_request(frame)
        self._note = FrameNote("offered", request.run)
        self._policy.check_asker(request, asker, now=self._clock())
        return encode_offer(
            Offer(request.silo, digest, self._masker().offer(asker, request.run)), self._key
        )

    def _check_total(self, envelope: Envelope) -> None:
        """A total is refused that counts on more noise of others than the officer allows."""
        mechanism = as_total(envelope.query.mechanism)
        if mechanism.masked:
            self._masker().check(envelope, int(mechanism.sampling.batch(self._n)))
        else:
            self._check_shuffle(mechanism)

    def _masker(self) -> Masker:
        if self._masks is None:
            raise Refused("masks")
        return self._masks

    def _check_shuffle(self, asked: Shuffled | TotalEvent) -> None:
        if self._shuffling is None:
            raise Refused("shuffle")
        self._shuffling[0].check(asked)

    def _check_planned_total(self, event: TotalEvent) -> None:
        """Of masked totals the cohort is not known before they are asked: a hold of them is of what
        they cost with so many shares.
        """
        if self._masks is None:
            self._check_shuffle(event)

    def _most_local(self) -> float:
        if self._shuffling:
            shuffled = self._shuffling[0].maximum_local_epsilon
        else:
            shuffled = math.inf
        return min(shuffled, self._masks.policy.maximum_local_epsilon if self._masks else math.inf)

    def _hidden(self, asker: str, envelope: Envelope, release: Release) -> bytes:
        """The numbers under the masks of the query's cohort, or in a box for the shuffler."""
        if envelope.query.mechanism.masked and self._masks:
            return self._masks.masked(asker, envelope, release.value[0, 0].numpy())
        return self._sealed(envelope, release)

    def _finish(self, asker: str, request: ReleaseRequest) -> None:
        who = asker, request.run
        self._finished[who] = max(request.number, self._finished.pop(who, -1))
        if len(self._finished) > FINISHED:
            del self._finished[next(iter(self._finished))]

    def _sealed(self, envelope: Envelope, release: Release) -> bytes:
        """The numbers in a box for the shuffler alone, on the silo's condition."""
        mechanism = as_total(envelope.query.mechanism)
        assert self._shuffling is not None
        shuffling, pseudonym = self._shuffling
        contribution = Contribution(
            envelope.shuffle_round,
            mechanism.counted + shuffling.colluding,
            release.value.flatten().numpy(),
        )
        return encrypt_box(contribution, shuffling.shuffler, pseudonym)


class Charges:
    """What the policy's rates count by: the ledger's charges, so that a restart forgets none.

    Formal guarantee: counts what the file holds, as of the last call of `read`, which is within the
    transaction of the charge.
    """

    def __init__(self) -> None:
        self._runs: dict[str, tuple[str, str]] = {}
        self._count: Counter[tuple[str, str]] = Counter()
        self._times: list[str] = []

    def known(self, query_id: str) -> bool:
        """Return whether the query has been charged: then it may be computed again under that
        charge, whatever the rates.
        """
        return query_id in self._runs

    def read(self, paid: QueryLedger, stamp: str = "") -> None:
        """Take in the charges that are new in the ledger. Entries of another kind are not looked
        at.

        After a charge `stamp` is the door's own time, which counts where no other was made.
        """
        new = paid.charges(after=len(self._times))
        for entry in new:
            self._runs[entry.query_id] = entry.asker, entry.run
            self._count[entry.asker, entry.run] += 1
            self._times.append(stamp if stamp and len(new) == 1 else entry.time)

    def in_run(self, asker: str, run: str) -> int:
        """Charges of this asker's run, ever: another's may have its name."""
        return self._count[asker, run]

    def since(self, time: float) -> int:
        """Charges with a later time stamp (seconds since 1970), those from the future among them,
        should the clock have gone back.
        """
        moment = _stamp(time)
        return sum(stamp > moment for stamp in self._times)


def _stamp(time: float) -> str:
    """A time in the ledger's own form, in which text sorts as time does."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")


@contextlib.contextmanager
def _closed() -> Iterator[None]:
    """The ledger explains to people what is wrong with it; an asker learns that something is."""
    try:
        yield
    except BadInput:
        raise Refused("ledger") from None
