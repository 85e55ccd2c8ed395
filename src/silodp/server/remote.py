"""The channel to silos on other machines.

The server sends a signed query to each silo and waits until a deadline. It sends the same bytes
again to a silo that has not settled the question. The replies are signed too.

The server does not rely on the carrier or on a silo to be present, on time or well-behaved. It
checks each reply against the question, and ignores a reply that fails. A question's id follows from
run, number and silo. So a repeated or resumed question is the same bytes, and a gate answers it
from its store, without a second charge.

`question` has the states of a question at a silo, and defines which of them count as spent.
`Remote` has one open `Question` at a time.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.mechanisms import Gaussian
from silodp.core.protocol.box import box_length
from silodp.core.protocol.card import Card
from silodp.core.protocol.codec import (
    MAX_HEADER,
    OVERHEAD,
    Answer,
    Envelope,
    Refusal,
    Sealed,
    decode_reply,
    encode_query,
    numbers_at,
)
from silodp.core.query import Query
from silodp.core.weights import Weights
from silodp.host.frames import Frames
from silodp.server.adding import Mean
from silodp.server.asking import Carrier, Sending, Timeouts, believed, why
from silodp.server.federation import Absent, Channel, StopRun
from silodp.server.journal import Heard, Journal, Round
from silodp.server.question import FORGED, INVALID_CODE, REMOVED_CODE, SILENT_CODE, Question
from silodp.server.replies import Key, Replies

RETIRED = frozenset(
    {
        "budget",
        "expired",
        "run-limit",
        "rule",
        "model",
        "silo",
        "asker",
        "statistic",
        "sampling",
        "version",
        REMOVED_CODE,
    }
)
"""Codes after which a silo gets no more questions in this run. After any other refusal it gets the
next question.
"""
LARGEST = 1e30
"""A larger number is treated as not finite, because sums of such numbers would overflow float32."""

Charge = tuple[Event | TotalEvent, tuple[str, ...]]
"""A privacy event, and the silos that may have been charged for it."""


@dataclass(frozen=True, eq=False)
class Answers:
    """The releases of the silos that count, in the order of their numbers: `value` (1, M, d)."""

    value: Tensor
    silos: tuple[int, ...]


@dataclass(frozen=True)
class QuestionReport:
    """The outcome of one question, for progress and summary."""

    sequence: int
    event: Event | TotalEvent
    answered: tuple[str, ...]
    dropped: dict[str, str]
    """A code for each silo that did not answer."""
    replayed: bool
    query: Query
    total: tuple[Tensor, int] | None = None
    """Where the server sees totals: the sum (1, d) over the silos that answered, and the number of
    records in it.
    """
    lost: tuple[Charge, ...] = ()
    """Earlier attempts that gave no total."""
    maybe_charged: frozenset[str] = frozenset()
    """The silos whose ledger may hold a charge for it."""
    norm: float | None = None
    """Where the server sees answers: the norm of their mean."""
    shares: tuple[float, ...] = ()
    """Where the server sees answers: the share of each in the mean."""


class Remote:
    """The channel to the silos of `cards`, numbered in this order. Every question is written to the
    journal before its answer is used.
    """

    def __init__(
        self,
        cards: Sequence[Card],
        carrier: Carrier,
        *,
        run: str,
        key: Ed25519PrivateKey,
        journal: Journal | None = None,
        quorum: int = 1,
        timeouts: Timeouts | None = None,
        report: Callable[[QuestionReport, Mapping[str, Heard]], None] = lambda report, heard: None,
        before: Callable[[Sequence[Charge]], None] = lambda charges: None,
        again: str = "resume the run",
    ) -> None:
        """Prepare the channel. Raise BadInput for two silos of one name, or an impossible quorum.

        `before` gets the possible charges of each question before it goes out. It is not called for
        a question that the journal answers. `again` is the advice in messages: how to repeat the
        question.
        """
        if len({card.name for card in cards}) != len(cards):
            raise BadInput(
                f"the silos are {', '.join(card.name for card in cards)}; each needs a "
                "name of its own"
            )
        if not 1 <= quorum <= len(cards):
            raise BadInput(
                f"the quorum is {quorum}; it must be between 1 and {len(cards)}, the "
                "number of silos"
            )
        self._cards = tuple(cards)
        self._carrier = carrier
        self._run = run
        self._key = key
        self._journal = journal
        self._quorum = quorum
        self._timeouts = timeouts or Timeouts()
        self._report = report
        self._before = before
        self._again = again
        self._replies = journal.replies if journal else Replies()
        self._pace: dict[str, float] = {}
        """Seconds that silos take, by kind of question."""
        self._digests: dict[str, str] = {}
        """SHA-256 of the bodies that were made last, by silo."""
        self._sequence = 0
        self._silent = set[str]()
        """Silos that were silent when they were last asked."""
        self.retired: dict[str, str] = {}
        """Silos that get no more questions, with the code of the reason."""
        self.question: Question | None = None
        """The open question: it was sent, and is not settled."""
        self._event: Event | TotalEvent | None = None
        """The privacy event of that question."""
        self.lost: list[Charge] = []
        """The possible charges of earlier attempts at that question."""
        self._charges = Counter[str]()

    @property
    def silos(self) -> int:
        """Return the number of silos."""
        return len(self._cards)

    @property
    def asked(self) -> int:
        """Return the number of questions so far, which is the number of the next."""
        return self._sequence

    @property
    def pending(self) -> Charge | None:
        """Return the possible charges of the open question. None where no question is open."""
        if self.question is None or self._event is None:
            return None
        return self._event, tuple(sorted(self.question.maybe_charged))

    @property
    def charges(self) -> Counter[str]:
        """Return how many answers the ledger of each silo has charged, at most."""
        charges = Counter(self._charges)
        for _, names in self.lost:
            charges.update(names)
        if self.pending:
            charges.update(self.pending[1])
        return charges

    def ask(self, query: Query, silos: Sequence[int]) -> Answers:
        """Return the releases of the silos that answer, each by itself. Raise StopRun where fewer
        than the quorum can answer, or do.
        """
        value, members = self._ask(query, silos, None)
        return Answers(value, members)

    def combined(
        self, query: Query, silos: Sequence[int], weights: Weights
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Return the weighted mean (1, d) of the answers, which are added up as they come."""
        value, members = self._ask(query, silos, weights)
        return value[:, 0], members

    def _ask(
        self, query: Query, silos: Sequence[int], weights: Weights | None
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Ask the question, or replay it from the journal.

        Return (1, 1, d) with weights and (1, M, d) without, and the silos that it includes. Raise
        Absent if no silo answers, and BadInput if the journal has another question.
        """
        numbers, frames = self._make_frames(query, silos)
        if self._journal:
            recorded = self._journal.read()
        else:
            recorded = None
        if recorded is None:
            heard, mean = self._collect_mean(query, numbers, frames, weights)
            members = [number for name, number in numbers.items() if name in heard]
            value = self._value(query, members, weights, mean)
            self._write_record(heard, value)
        else:
            self._check_recorded(recorded)
            self._replay(query, recorded)
            heard = recorded.heard
            value = recorded.value
            members = [number for name, number in numbers.items() if name in heard]
        question = self._current()
        dropped = question.dropped
        self._note_absent(frames, dropped)
        shares: tuple[float, ...] = ()
        if weights and members:
            mechanism = cast(Gaussian, query.mechanism)
            shares = tuple(mechanism.shares(members, weights)[0].tolist())
        norm = None
        if value is not None:
            norm = float(np.linalg.norm(value.mean(0, dtype=np.float64)))
        report = QuestionReport(
            self._sequence,
            query.event(),
            tuple(self._cards[number].name for number in members),
            dropped,
            recorded is not None,
            query,
            maybe_charged=question.maybe_charged,
            norm=norm,
            shares=shares,
        )
        self._finish(report, heard)
        if value is None:
            codes = {name: self.retired.get(name, code) for name, code in dropped.items()}
            raise Absent(
                f"no silo answered question {self._sequence} ({list_codes(codes)}){why(codes)}",
                codes,
            )
        if weights:
            rows = 1
        else:
            rows = len(members)
        if value.shape != (rows, query.statistic.shape[-1]):
            raise BadInput(
                f"the journal's answer to question {self._sequence} does not fit the question; "
                "resume the run with the settings that began it"
            )
        return torch.from_numpy(np.array(value))[None], tuple(members)

    def _collect_mean(
        self,
        query: Query,
        numbers: Mapping[str, int],
        frames: Mapping[str, bytes],
        weights: Weights | None,
    ) -> tuple[dict[str, Heard], Mean | None]:
        """Return the answers' records, and their mean, to which each was added as it came."""
        if weights is None:
            return self._ask_silos(query, numbers, frames), None
        order = [number for name, number in numbers.items() if name in frames]
        expected: list[float] = []
        if order:
            mechanism = cast(Gaussian, query.mechanism)
            expected = mechanism.raw_shares(order, weights)[0].tolist()
        mean = Mean(
            order,
            expected,
            lambda silo: self._stored_answer(query, self._cards[silo].name, silo),
        )

        def add(silo: int, answer: Answer | Sealed) -> None:
            if isinstance(answer, Answer):
                mean.add(silo, answer.value[0].numpy())

        return self._ask_silos(query, numbers, frames, add), mean

    def _value(
        self, query: Query, members: Sequence[int], weights: Weights | None, mean: Mean | None
    ) -> np.ndarray | None:
        """Return the numbers for the journal in the query's own type: the mean (1, d), or the
        answers (M, d). None where no silo has answered.
        """
        if not members:
            return None
        if mean and weights:
            mechanism = cast(Gaussian, query.mechanism)
            value = mean.of(members, mechanism.raw_shares(members, weights)[0].tolist())[None]
        else:
            names = [self._cards[number].name for number in members]
            answers = zip(names, members, strict=True)
            value = np.stack([self._stored_answer(query, name, silo) for name, silo in answers])
        point = getattr(query.statistic, "w", None)
        if point is None:
            return value
        return value.astype(np.dtype(str(point.dtype).removeprefix("torch.")))

    def _stored_answer(self, query: Query, name: str, silo: int) -> np.ndarray:
        """Return an answer (d,) that came before and is on the disk."""
        reply = self._check_reply(self._replies.get(self._reply_key(name)), query, silo)
        assert isinstance(reply, Answer), "a reply is checked before it is stored"
        return reply.value[0].numpy()

    # --- one question ----------------------------------------------------------------------------

    def _make_frames(self, query: Query, silos: Sequence[int]) -> tuple[dict[str, int], Frames]:
        """Return the silos of the question with their numbers, and a frame for each of them that
        has not retired.

        Raise StopRun if the question contains a number that is not finite.
        """
        points = [
            value
            for value in vars(query.statistic).values()
            if isinstance(value, Tensor) and value.is_floating_point()
        ]
        if not all(bool(torch.isfinite(point).all()) for point in points):
            raise StopRun("the iterates have diverged; use a smaller step")
        numbers = {self._cards[silo].name: silo for silo in sorted(silos)}
        self._digests = {}

        def encoded() -> Iterator[tuple[str, bytes]]:
            for name, silo in numbers.items():
                if name not in self.retired:
                    frame = encode_query(self._envelope(query, silo), self._key)
                    self._digests[name] = body_digest(frame)
                    yield name, frame

        return numbers, Frames.sharing(encoded(), numbers_at, _longest(query))

    def _open_question(self, query: Query, question: Question) -> None:
        """Make this the open question: from now on it counts as spent where it may be charged."""
        self._event = query.event()
        self.question = question

    def _current(self) -> Question:
        """Return the open question."""
        assert self.question is not None, "a question is opened before its states are read"
        return self.question

    def _replay(self, query: Query, recorded: Round) -> None:
        """Open the question with the states that the journal has."""
        question = Question.replayed(recorded.heard, recorded.dropped, recorded.refused_late)
        self._open_question(query, question)

    def _finish(self, report: QuestionReport, heard: Mapping[str, Heard]) -> None:
        """Report the question, count its charges and go on to the next."""
        self._report(report, heard)
        self._charges.update(report.maybe_charged)
        for _, names in report.lost:
            self._charges.update(names)
        self._sequence += 1
        self.question = None
        self.lost = []
        if not self._journal:
            # Without a journal no later process can need the replies.
            self._replies.clear()

    def _write_record(self, heard: dict[str, Heard], value: np.ndarray | None = None) -> None:
        """Write the open question into the journal."""
        if self._journal:
            question = self._current()
            self._journal.write(
                Round(
                    self._sequence,
                    self._digests,
                    question.dropped,
                    heard,
                    {},
                    value,
                    question.refused_late,
                )
            )

    def _check_recorded(self, recorded: Round) -> None:
        """Raise BadInput unless the journal has this very question."""
        if (recorded.sequence, recorded.asked) != (self._sequence, self._digests):
            raise BadInput(
                f"question {self._sequence + 1} is not the one in the journal; resume the run with "
                "the versions that began it"
            )

    def _note_absent(self, frames: Mapping[str, bytes], dropped: Mapping[str, str]) -> None:
        """Note which silos have retired, and which were silent."""
        for name, code in dropped.items():
            if code in RETIRED:
                self.retired.setdefault(name, code)
        self._silent -= frames.keys()
        self._silent |= {name for name, code in dropped.items() if code == SILENT_CODE}

    def _envelope(self, query: Query, silo: int) -> Envelope:
        """Return the envelope of this question for a silo, with the noise of that silo."""
        return self._addressed(Query(query.statistic, query.mechanism.of(silo)), silo)

    def _addressed(self, query: Query, silo: int, round: str = "") -> Envelope:
        """Return the envelope of a query for a silo."""
        card = self._cards[silo]
        return Envelope(card.name, self._run, self._query_id(silo), card.definition, query, round)

    def _query_id(self, silo: int) -> str:
        """Return the id of the open question at a silo."""
        return hashed_id(f"{self._run}/{self._sequence}/{self._cards[silo].name}")

    def _reply_key(self, name: str) -> Key:
        """Return the key under which the silo's reply is stored."""
        return Key(self._sequence, name, self._digests[name])

    def _ask_silos(
        self,
        query: Query,
        numbers: Mapping[str, int],
        frames: Mapping[str, bytes],
        take: Callable[[int, Answer | Sealed], None] = lambda silo, answer: None,
        *,
        stop: bool = True,
    ) -> dict[str, Heard]:
        """Send the frames until every silo has settled the question, or the time is over.

        Return the record of each answer, in the order of `numbers`. The open question has the
        states. `take` gets each answer once, as it comes. A reply that came before the server was
        killed is not asked for again. With `stop`, raise StopRun if too few answer; nothing is
        journalled then.
        """
        self._check_quorum()
        # An algorithm may ask silos one by one. Then any of them may be absent, unless all of the
        # run's silos must answer.
        alone = len(numbers) == 1 and self._quorum < len(self._cards)
        if alone:
            need = 0
        else:
            need = min(self._quorum, len(numbers))
        if not all(self._reply_key(name) in self._replies for name in frames):
            self._before((*self.lost, (query.event(), tuple(frames))))
        question = Question(numbers)
        for name in numbers:
            if name not in frames:
                question.retired(name)
        self._open_question(query, question)

        def read(name: str, raw: bytes) -> Heard | str:
            answer = self._check_reply(raw, query, numbers[name], lambda: frames[name])
            if isinstance(answer, str):
                return answer
            sha256 = self._replies.keep(self._reply_key(name), raw)
            take(numbers[name], answer)
            if isinstance(answer, Sealed):
                box = hashlib.sha256(answer.box).hexdigest()
                return Heard(sha256, answer.count, answer.head, box=box)
            norm = float(np.linalg.norm(answer.value[0].numpy()))
            return Heard(sha256, answer.count, answer.head, norm)

        kind = query.mechanism.kind
        begin = time.monotonic()
        waits = self._timeouts.after(self._pace.get(kind))
        heard = self._collect(question, frames, read, need, "answered", waits, stop=stop)
        if not any(name in question.codes for name in frames):
            # Without a failure this is the time of an answer. The shortest time so far counts.
            took = time.monotonic() - begin
            self._pace[kind] = min(took, self._pace.get(kind, math.inf))
        return {name: heard[name] for name in numbers if name in heard}

    def _check_quorum(self) -> None:
        """Raise StopRun where too many silos have retired."""
        if len(self._cards) - len(self.retired) >= self._quorum:
            return
        listed = ", ".join(f"{name} ({code})" for name, code in self.retired.items()) or "(none)"
        raise StopRun(
            f"the silos {listed} have retired, and fewer than the quorum of {self._quorum} "
            f"are left{why(self.retired)}",
            self.retired,
        )

    def _collect(
        self,
        question: Question,
        frames: Mapping[str, bytes],
        read: Callable[[str, bytes], Any],
        need: int,
        verb: str,
        waits: Timeouts,
        *,
        stop: bool = True,
    ) -> dict[str, Any]:
        """Send the frames, again and again, and note in `question` what happens at each silo.

        Return what `read` makes of the replies. It gives a code for a reply that is no answer. With
        `stop`, raise StopRun if fewer than `need` answer.
        """
        answers = self._take_stored(question, frames, read)
        self._pass_over_absent(question)
        begin = time.monotonic()
        sending = Sending(self._carrier, waits.retry)
        shared = Frames.of(frames)
        while waiting := question.open:
            left = waits.deadline - (time.monotonic() - begin)
            beyond_limit = left <= waits.deadline - waits.limit
            if left <= 0 and (len(answers) >= need or beyond_limit):
                break
            for name in waiting:
                question.sent(name)
            unheard = set(waiting)
            for name, raw in sending.send(shared.only(waiting), left):
                if name not in unheard:
                    continue  # The reply is of an unknown silo, or the silo's second one.
                unheard.discard(name)
                came = time.monotonic()
                got = read(name, raw)
                # The time in which this server works does not count as a silo's silence.
                begin += time.monotonic() - came
                if isinstance(got, str):
                    question.failed(name, got)
                else:
                    question.answered(name)
                    answers[name] = got
            for name in waiting:
                if name in unheard and name in sending.removed:
                    question.failed(name, REMOVED_CODE)
                elif name in unheard:
                    question.unheard(name)
            if still := question.open:
                sending.pause(restart=len(still) < len(waiting))
        question.closed()
        dropped = {name: code for name, code in question.codes.items() if name in frames}
        if sending.gone and len(answers) < max(need, 1):
            raise StopRun(
                f"the engine cannot be reached ({sending.gone}); start it again and {self._again}"
            )
        if stop and len(answers) < need:
            raise StopRun(
                f"{len(answers)} of {len(frames)} silos {verb} question {self._sequence + 1}, and "
                f"{need} must ({list_codes(dropped)}){why(dropped)}",
                dropped,
            )
        return answers

    def _take_stored(
        self,
        question: Question,
        frames: Mapping[str, bytes],
        read: Callable[[str, bytes], Any],
    ) -> dict[str, Any]:
        """Return the answers that came before the server was killed, and note what it may have
        sent.
        """
        if self._journal and self._sequence <= self._journal.reached:
            for name in frames:
                question.resumed(name)
        answers: dict[str, Any] = {}
        for name in frames:
            key = self._reply_key(name)
            if key not in self._replies:
                continue
            got = read(name, self._replies.get(key))
            if not isinstance(got, str):
                question.answered(name)
                answers[name] = got
        return answers

    def _pass_over_absent(self, question: Question) -> None:
        """Skip the silos that were silent when last asked and that the carrier does not see.

        Skip none if fewer silos than the quorum would be left.
        """
        waiting = question.open
        if not self._silent.intersection(waiting):
            return
        try:
            connected = set(self._carrier.names())
        except Exception:
            return
        absent = [name for name in waiting if name in self._silent and name not in connected]
        if len(waiting) - len(absent) >= self._quorum:
            for name in absent:
                question.passed_over(name)

    def _check_reply(
        self, raw: bytes, query: Query, silo: int, frame: Callable[[], bytes] = bytes
    ) -> Answer | Sealed | str:
        """Return the answer in a reply, or a code: of a refusal, "forged" for a reply that the silo
        did not sign about this question, "value" for an answer that does not fit it.
        """
        card = self._cards[silo]
        try:
            reply = decode_reply(raw, limit=_longest(query), silo_key=card.key)
        except Refused:
            return FORGED
        if isinstance(reply, Refusal):
            if believed(reply.code, reply.digest, frame()):
                return reply.code
            return FORGED
        wanted = (card.name, self._query_id(silo), self._digests[card.name])
        if (reply.silo, reply.query_id, reply.digest) != wanted:
            return FORGED
        if self._fits(reply, query):
            return reply
        return INVALID_CODE

    def _stored_box(self, query: Query, name: str, silo: int) -> bytes:
        """Return the sealed or masked counts of a reply that is on the disk."""
        reply = self._check_reply(self._replies.get(self._reply_key(name)), query, silo)
        assert isinstance(reply, Sealed), "a reply is checked before it is stored"
        return reply.box

    def _fits(self, reply: Answer | Sealed, query: Query) -> bool:
        """Return whether the answer has the question's shape and finite numbers."""
        if not isinstance(reply, Answer) or reply.value.shape != query.statistic.shape:
            return False
        low, high = reply.value.aminmax()  # Both are NaN where one number is.
        return bool(low >= -LARGEST) and bool(high <= LARGEST)


def combined_total(
    channel: Channel, query: Query, silos: Sequence[int], weights: Weights
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the mean (1, d) that follows from the total of a channel, and the silos in it."""
    answers = channel.ask(query, silos)
    return query.mechanism.combine(answers.value, answers.silos, weights), answers.silos


def hashed_id(text: str) -> str:
    """Return the query id that follows from this text."""
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def body_digest(frame: bytes) -> str:
    """Return the SHA-256 of a frame without its signature."""
    return hashlib.sha256(memoryview(frame)[OVERHEAD:]).hexdigest()


def list_codes(codes: Mapping[str, str]) -> str:
    """Return the silos with their codes, sorted by name."""
    return ", ".join(f"{name} {code}" for name, code in sorted(codes.items()))


def _longest(query: Query) -> int:
    """Return the bytes of the longest reply that can answer the question."""
    return OVERHEAD + 8 + MAX_HEADER + 8 * query.statistic.shape[-1] + box_length(0)
