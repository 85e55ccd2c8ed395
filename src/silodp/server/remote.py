"""The channel to silos on other machines: a signed query to each, a deadline, the same bytes again to whoever is silent, signed replies.

Neither the carrier nor a silo is trusted to be there, on time or well-behaved: what comes back is checked against what was asked, and
whatever fails is as if it had not come. A question's id follows from run, number and silo, so that a repeated or resumed question is
the same bytes, which a gate answers from its store.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.protocol.box import box_length
from silodp.core.protocol.card import Card
from silodp.core.protocol.codec import MAX_HEADER, OVERHEAD, Answer, Envelope, Refusal, Sealed, decode_reply, encode_query
from silodp.core.query import Query
from silodp.server.approval import MOVED, OLDER
from silodp.server.asking import Carrier, Sending, Timeouts, believed
from silodp.server.federation import Absent, StopRun
from silodp.server.journal import Journal, Round

MAY_PASS = frozenset({"busy", "stopping", "paused", "rate", "ledger", "internal"})
"""Refusals that may pass: the same bytes are sent again until the deadline."""
RETIRED = frozenset({"budget", "expired", "run-limit", "rule", "model", "silo", "asker", "statistic", "sampling", "version", "removed"})
"""Refusals that last, and the word of the server's own operator: the silo is asked nothing more in this run. Any other refusal is of one question, and the silo is asked the next."""
LARGEST = 1e30
"""A number beyond this is treated as not finite: sums of them would leave float32."""


@dataclass(frozen=True, eq=False)
class Answers:
    """What the silos that count have released, in the order of their numbers: `value` (1, M, d)."""

    value: Tensor
    silos: tuple[int, ...]


@dataclass(frozen=True)
class QuestionReport:
    """What became of one question, for progress and summary: who answered, and a code for each silo that did not."""

    sequence: int
    event: Event | TotalEvent
    answered: tuple[str, ...]
    dropped: dict[str, str]
    replayed: bool
    query: Query
    total: tuple[Tensor, int] | None = None
    """Where the server sees totals: (1, d), the sum over those who answered, and how many records are in it."""
    lost: tuple[tuple[Event | TotalEvent, tuple[str, ...]], ...] = ()
    """Attempts before, of which no total came, and the silos that may have been charged for each."""


class Remote:
    """Asks the silos of `cards`, numbered as they stand there; every question is journalled before its answer is used."""

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
        report: Callable[[QuestionReport, Mapping[str, Answer | Sealed]], None] = lambda report, answers: None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """`before` is called before each question that goes out, and not for those that the journal answers."""
        if len({card.name for card in cards}) != len(cards):
            raise BadInput(f"the silos are {', '.join(card.name for card in cards)}; each needs a name of its own")
        if not 1 <= quorum <= len(cards):
            raise BadInput(f"the quorum is {quorum}; it must be between 1 and {len(cards)}, the number of silos")
        self._cards, self._carrier, self._run, self._key = tuple(cards), carrier, run, key
        self._journal, self._quorum, self._timeouts, self._report = journal, quorum, timeouts or Timeouts(), report
        self._before = before
        self._sequence, self._silent = 0, set[str]()
        self.retired: dict[str, str] = {}
        """Silos that are asked nothing more, with the code of the refusal that ended it."""
        self.pending: tuple[Event | TotalEvent, tuple[str, ...]] | None = None
        """What was sent, and to whom, of a question that has come to no end: they may have charged it."""
        self.lost: list[tuple[Event | TotalEvent, tuple[str, ...]]] = []
        """The same of earlier attempts at that question."""

    @property
    def asked(self) -> int:
        """Questions so far, and so the number of the next."""
        return self._sequence

    def ask(self, query: Query, silos: Sequence[int]) -> Answers:
        """The releases of those of the silos that answer. Raises StopRun where fewer than the quorum can or do."""
        asked, frames = self._opening(query, silos)
        recorded = self._journal.read() if self._journal else None
        if recorded is None:
            answers, replies, dropped = self._live(query, asked, frames)
            self._record(frames, replies, dropped)
        else:
            answers, dropped = self._replayed(query, asked, frames, recorded), recorded.dropped
        self._settle(frames, dropped)
        members = tuple(name for name in asked if name in answers)
        self._closing(QuestionReport(self._sequence, query.event(), members, dropped, recorded is not None, query), answers)
        if not members:
            raise Absent(f"nobody answered question {self._sequence} ({_list(dropped)})")
        like = getattr(query.statistic, "w", None)
        found = [answer for name in members if isinstance(answer := answers[name], Answer)]
        values = [answer.value.to(like.dtype if like is not None else torch.float64) for answer in found]
        return Answers(torch.stack(values, 1), tuple(asked[name] for name in members))

    # --- one question -----------------------------------------------------------------------------------------------------------

    def _opening(self, query: Query, silos: Sequence[int]) -> tuple[dict[str, int], dict[str, bytes]]:
        """Whom the question is for, by name, and the frames for those of them that have not retired."""
        points = [value for value in vars(query.statistic).values() if isinstance(value, Tensor) and value.is_floating_point()]
        if not all(bool(torch.isfinite(point).all()) for point in points):
            raise StopRun("the iterates have diverged; use a smaller step")
        asked = {self._cards[i].name: i for i in sorted(silos)}
        return asked, {name: encode_query(self._envelope(query, i), self._key) for name, i in asked.items() if name not in self.retired}

    def _closing(self, report: QuestionReport, answers: Mapping[str, Answer | Sealed]) -> None:
        self._report(report, answers)
        self._sequence, self.pending, self.lost = self._sequence + 1, None, []

    def _record(self, frames: Mapping[str, bytes], replies: dict[str, bytes], dropped: dict[str, str]) -> None:
        if self._journal:
            self._journal.write(Round(self._sequence, _digests(frames), replies, dropped))

    def _check_recorded(self, recorded: Round, frames: Mapping[str, bytes]) -> None:
        if (recorded.sequence, recorded.asked) != (self._sequence, _digests(frames)):
            raise BadInput(f"question {self._sequence + 1} is not the one in the journal; the run can only go on with the same versions")

    def _settle(self, frames: Mapping[str, bytes], dropped: Mapping[str, str]) -> None:
        """Notes who has retired and who was silent."""
        self.retired |= {name: code for name, code in dropped.items() if code in RETIRED and name not in self.retired}
        self._silent = (self._silent - frames.keys()) | {name for name, code in dropped.items() if code == "silent"}

    def _envelope(self, query: Query, silo: int) -> Envelope:
        return self._addressed(Query(query.statistic, query.mechanism.of(silo)), silo)

    def _addressed(self, asked: Query, silo: int, round: str = "") -> Envelope:
        card = self._cards[silo]
        return Envelope(card.name, self._run, self._id(silo), card.definition, asked, round)

    def _id(self, silo: int) -> str:
        return self._named(f"{self._run}/{self._sequence}/{self._cards[silo].name}")

    @staticmethod
    def _named(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:40]

    def _live(
        self, query: Query, asked: Mapping[str, int], frames: Mapping[str, bytes]
    ) -> tuple[dict[str, Answer | Sealed], dict[str, bytes], dict[str, str]]:
        """Sends until all have answered or said no, or the time is over. Raises StopRun, with nothing journalled, if too few answer."""
        alone = len(asked) == 1 and self._quorum < len(self._cards)  # of silos asked one by one, any may be absent, unless all must answer
        need = 0 if alone else min(self._quorum, len(asked))
        if len(self._cards) - len(self.retired) < self._quorum:
            said = ", ".join(f"{name} ({code})" for name, code in self.retired.items()) or "(none)"
            raise StopRun(f"the silos {said} have retired, and fewer than the quorum of {self._quorum} are left{_why(self.retired)}")
        self._before()
        self.pending = query.event(), tuple(frames)
        answers, replies, dropped = self._collect(
            frames, lambda name, raw: self._opened(raw, query, asked[name], frames[name]), need, "answered"
        )
        return answers, replies, {name: "retired" for name in asked if name not in frames} | dropped

    def _collect(
        self, frames: Mapping[str, bytes], opened: Callable[[str, bytes], Any], need: int, did: str
    ) -> tuple[dict[str, Any], dict[str, bytes], dict[str, str]]:
        """What `opened` makes of the replies, the replies, and the codes of those who gave none; StopRun if fewer than `need` did what was asked."""
        answers: dict[str, Any] = {}
        replies: dict[str, bytes] = {}
        waiting, begin, sending = self._present(frames), time.monotonic(), Sending(self._carrier, self._timeouts.retry)
        dropped = {name: "silent" for name in frames if name not in waiting}
        while waiting:
            left = self._timeouts.deadline - (time.monotonic() - begin)
            if left <= 0 and (len(answers) >= need or left <= self._timeouts.deadline - self._timeouts.limit):
                break
            before = len(waiting)
            came = sending.send({name: frames[name] for name in waiting}, left)
            gone = [name for name in waiting if name in sending.removed and name not in came]
            dropped, waiting = dropped | dict.fromkeys(gone, "removed"), [name for name in waiting if name not in gone]
            for name in [name for name in waiting if name in came]:
                got = opened(name, came[name])
                if not isinstance(got, str):
                    answers[name], replies[name] = got, came[name]
                    waiting.remove(name)
                    dropped.pop(name, None)
                else:
                    dropped[name] = got
                    if got not in MAY_PASS and got != "forged":  # what the silo has not signed may be the carrier's, and tried again
                        waiting.remove(name)
            if waiting:
                sending.pause(anew=len(waiting) < before)
        dropped |= {name: dropped.get(name, "silent") for name in waiting}
        if sending.gone and len(answers) < max(need, 1):
            raise StopRun(f"the engine cannot be reached ({sending.gone}); start it again and resume the run")
        if len(answers) < need:
            number = self._sequence + 1
            raise StopRun(
                f"{len(answers)} of {len(frames)} silos {did} question {number}, and {need} must ({_list(dropped)}){_why(dropped)}"
            )
        return answers, replies, dropped

    def _present(self, frames: Mapping[str, bytes]) -> list[str]:
        """Whom to wait for: all, but of those that were silent when last asked only the ones that the carrier sees again."""
        if not self._silent & frames.keys():
            return list(frames)
        try:
            seen = set(self._carrier.names())
        except Exception:
            return list(frames)
        present = [name for name in frames if name not in self._silent or name in seen]
        return present if len(present) >= self._quorum else list(frames)

    def _opened(self, raw: bytes, query: Query, silo: int, frame: bytes) -> Answer | Sealed | str:
        """The answer in a reply; or the code of a refusal, "forged" for what the silo did not sign about this question, "value"."""
        card, most = self._cards[silo], 8 * query.statistic.shape[-1] + box_length(0)
        try:
            reply = decode_reply(raw, limit=OVERHEAD + 8 + MAX_HEADER + most, silo_key=card.key)
        except Refused:
            return "forged"
        if isinstance(reply, Refusal):
            return reply.code if believed(reply.code, reply.digest, frame) else "forged"
        if (reply.silo, reply.query_id, reply.digest) != (card.name, self._id(silo), _digest(frame)):
            return "forged"
        return reply if self._fits(reply, query) else "value"

    def _fits(self, reply: Answer | Sealed, query: Query) -> bool:
        if not isinstance(reply, Answer) or reply.value.shape != query.statistic.shape:
            return False
        low, high = reply.value.aminmax()  # of which both are NaN where one number is
        return bool(low >= -LARGEST) and bool(high <= LARGEST)

    def _replayed(self, query: Query, asked: Mapping[str, int], frames: Mapping[str, bytes], recorded: Round) -> dict[str, Answer | Sealed]:
        self._check_recorded(recorded, frames)
        answers: dict[str, Answer | Sealed] = {}
        for name, raw in recorded.replies.items():
            got = self._opened(raw, query, asked[name], frames[name])
            if isinstance(got, str):
                raise BadInput(f"the journal's reply of {name} to question {self._sequence + 1} is not the silo's; restore the journal")
            answers[name] = got
        return answers


def maybe_charged(answers: Iterable[str], dropped: Mapping[str, str]) -> set[str]:
    """Those who answered, and those of whom nobody knows whether they were asked, and charged."""
    return {*answers} | {name for name, code in dropped.items() if code in MAY_PASS or code in ("silent", "forged", "value", "removed")}


def _digest(frame: bytes) -> str:
    return hashlib.sha256(memoryview(frame)[OVERHEAD:]).hexdigest()


def _digests(frames: Mapping[str, bytes]) -> dict[str, str]:
    return {name: _digest(frame) for name, frame in frames.items()}


def _list(codes: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {code}" for name, code in codes.items())


def _why(codes: Mapping[str, str]) -> str:
    """What is to be done about refusals that somebody has to do something about."""
    return "".join(f". ({code}): {words}" for code, words in (("model", MOVED), ("version", OLDER)) if code in codes.values())
