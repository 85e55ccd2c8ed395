"""The channel to silos on other machines: a signed query to each, a deadline, the same bytes again
to whoever is silent, signed replies.

Neither the carrier nor a silo is trusted to be there, on time or well-behaved: what comes back is
checked against what was asked, and whatever fails is as if it had not come. A question's id follows
from run, number and silo, so that a repeated or resumed question is the same bytes, which a gate
answers from its store.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from silodp.server.replies import Key, Replies

MAY_PASS = frozenset({"busy", "stopping", "paused", "rate", "ledger", "internal"})
"""Refusals that may pass: the same bytes are sent again until the deadline."""
DOUBTFUL = MAY_PASS | {"silent", "forged", "value", "removed", "purged", "id-reused", "round"}
"""After these a ledger may hold a charge for the question."""
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
        "removed",
    }
)
"""Refusals that last, and the word of the server's own operator: the silo is asked nothing more in
this run. Any other refusal is of one question, and the silo is asked the next.
"""
LARGEST = 1e30
"""A number beyond this is treated as not finite: sums of them would leave float32."""


@dataclass(frozen=True, eq=False)
class Answers:
    """What the silos that count have released, in the order of their numbers: `value` (1, M, d)."""

    value: Tensor
    silos: tuple[int, ...]


@dataclass(frozen=True)
class QuestionReport:
    """What became of one question, for progress and summary: who answered, and a code for each silo
    that did not.
    """

    sequence: int
    event: Event | TotalEvent
    answered: tuple[str, ...]
    dropped: dict[str, str]
    replayed: bool
    query: Query
    total: tuple[Tensor, int] | None = None
    """Where the server sees totals: (1, d), the sum over those who answered, and how many records
    are in it.
    """
    lost: tuple[tuple[Event | TotalEvent, tuple[str, ...]], ...] = ()
    """Attempts before, of which no total came, and the silos that may have been charged for each.
    """
    charged: frozenset[str] = frozenset()
    """The silos whose ledger may hold a charge for it."""
    norm: float | None = None
    shares: tuple[float, ...] = ()
    """Where the server sees answers: how long their mean is, and how much each counts in it."""


class Remote:
    """Asks the silos of `cards`, numbered as they stand there; every question is journalled before
    its answer is used.
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
        before: Callable[
            [Sequence[tuple[Event | TotalEvent, tuple[str, ...]]]], None
        ] = lambda charges: None,
        again: str = "resume the run",
    ) -> None:
        """`before` is told, before each question that goes out, what silos may be charged for it,
        and nothing of those that the journal answers; `again` says how the same is asked anew.
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
        self._cards, self._carrier, self._run, self._key = tuple(cards), carrier, run, key
        self._journal, self._quorum, self._timeouts, self._report = (
            journal,
            quorum,
            timeouts or Timeouts(),
            report,
        )
        self._replies, self._before, self._again = (
            journal.replies if journal else Replies(),
            before,
            again,
        )
        self._pace: dict[str, float] = {}
        """Seconds that silos take, by kind of question."""
        self._digests: dict[str, str] = {}
        """SHA-256 of the bodies that were last made, by silo."""
        self._sequence, self._silent = 0, set[str]()
        self.retired: dict[str, str] = {}
        """Silos that are asked nothing more, with the code of the refusal that ended it."""
        self.pending: tuple[Event | TotalEvent, tuple[str, ...]] | None = None
        """What was sent, and to whom, of a question that has come to no end: they may have charged
        it.
        """
        self.lost: list[tuple[Event | TotalEvent, tuple[str, ...]]] = []
        """The same of earlier attempts at that question."""
        self._doubted: Collection[str] = ()
        """Who refused the question for good, but may have charged it when it was first sent."""
        self._charges = Counter[str]()

    @property
    def silos(self) -> int:
        return len(self._cards)

    @property
    def asked(self) -> int:
        """Questions so far, and so the number of the next."""
        return self._sequence

    @property
    def charges(self) -> Counter[str]:
        """How many answers, at most, the ledger of each silo has charged: whatever is in doubt
        counts.
        """
        open_yet = (*self.lost, *([self.pending] if self.pending else []))
        return self._charges + Counter(name for _, names in open_yet for name in names)

    def ask(self, query: Query, silos: Sequence[int]) -> Answers:
        """The releases of those of the silos that answer, each by itself. Raises StopRun where
        fewer than the quorum can or do.
        """
        value, members = self._asked(query, silos, None)
        return Answers(value, members)

    def combined(
        self, query: Query, silos: Sequence[int], weights: Weights
    ) -> tuple[Tensor, tuple[int, ...]]:
        """(1, d): their weighted mean, added up as they come."""
        value, members = self._asked(query, silos, weights)
        return value[:, 0], members

    def _asked(
        self, query: Query, silos: Sequence[int], weights: Weights | None
    ) -> tuple[Tensor, tuple[int, ...]]:
        """(1, 1, d), or (1, M, d) where there are no weights, and the silos that it is of."""
        asked, frames = self._opening(query, silos)
        recorded = self._journal.read() if self._journal else None
        mechanism, value = cast(Gaussian, query.mechanism), None
        if recorded is None:
            heard, dropped, mean = self._added(query, asked, frames, weights)
            members = [i for name, i in asked.items() if name in heard]
            if members and mean:
                value = mean.of(
                    members, mechanism.raw_shares(members, weights)[0].tolist() if weights else []
                )[None]
            elif members:
                value = np.stack([self._kept(query, self._cards[i].name, i) for i in members])
            if value is not None and (like := getattr(query.statistic, "w", None)) is not None:
                value = value.astype(np.dtype(str(like.dtype).removeprefix("torch.")))
            self._record(dropped, heard, value)
        else:
            self._check_recorded(recorded)
            heard, dropped, value = recorded.heard, recorded.dropped, recorded.value
            self._doubted = recorded.doubted
            members = [i for name, i in asked.items() if name in heard]
        self._settle(frames, dropped)
        names = tuple(self._cards[i].name for i in members)
        shares = (
            tuple(mechanism.shares(members, weights)[0].tolist()) if weights and members else ()
        )
        norm = None if value is None else float(np.linalg.norm(value.mean(0, dtype=np.float64)))
        charged = maybe_charged(heard, dropped, self._doubted)
        told = QuestionReport(
            self._sequence,
            query.event(),
            names,
            dropped,
            recorded is not None,
            query,
            charged=charged,
            norm=norm,
            shares=shares,
        )
        self._closing(told, heard)
        if value is None:
            codes = {name: self.retired.get(name, code) for name, code in dropped.items()}
            raise Absent(
                f"nobody answered question {self._sequence} ({_list(codes)}){why(codes)}", codes
            )
        if value.shape != (1 if weights else len(members), query.statistic.shape[-1]):
            raise BadInput(
                f"what the journal has of question {self._sequence} is not what is asked "
                "for now; resume as the run began"
            )
        return torch.from_numpy(np.array(value))[None], tuple(members)

    def _added(
        self,
        query: Query,
        asked: Mapping[str, int],
        frames: Mapping[str, bytes],
        weights: Weights | None,
    ) -> tuple[dict[str, Heard], dict[str, str], Mean | None]:
        """What was heard, from whom nothing, and their mean, to which each answer was added as it
        came.
        """
        order = [i for name, i in asked.items() if name in frames]
        expected = (
            cast(Gaussian, query.mechanism).raw_shares(order, weights)[0].tolist()
            if weights and order
            else []
        )
        mean = (
            Mean(order, expected, lambda i: self._kept(query, self._cards[i].name, i))
            if weights
            else None
        )

        def take(silo: int, answer: Answer | Sealed) -> None:
            if mean and isinstance(answer, Answer):
                mean.add(silo, answer.value[0].numpy())

        return *self._live(query, asked, frames, take), mean

    def _kept(self, query: Query, name: str, silo: int) -> np.ndarray:
        """(d,): an answer that came before, and lies on the disk."""
        found = self._opened(self._replies.get(self._key_of(name)), query, silo)
        assert isinstance(found, Answer), "what was kept was opened before"
        return found.value[0].numpy()

    # --- one question ----------------------------------------------------------------------------

    def _opening(self, query: Query, silos: Sequence[int]) -> tuple[dict[str, int], Frames]:
        """Whom the question is for, by name, and the frames for those of them that have not
        retired.
        """
        points = [
            value
            for value in vars(query.statistic).values()
            if isinstance(value, Tensor) and value.is_floating_point()
        ]
        if not all(bool(torch.isfinite(point).all()) for point in points):
            raise StopRun("the iterates have diverged; use a smaller step")
        asked = {self._cards[i].name: i for i in sorted(silos)}
        self._digests = {}

        def made() -> Iterator[tuple[str, bytes]]:
            for name, i in asked.items():
                if name not in self.retired:
                    frame = encode_query(self._envelope(query, i), self._key)
                    self._digests[name] = _digest(frame)
                    yield name, frame

        return asked, Frames.sharing(made(), numbers_at, _longest(query))

    def _closing(self, report: QuestionReport, heard: Mapping[str, Heard]) -> None:
        self._report(report, heard)
        self._charges.update(
            name
            for names in (report.charged, *(names for _, names in report.lost))
            for name in names
        )
        self._sequence, self.pending, self.lost = self._sequence + 1, None, []
        if not self._journal:  # nobody comes back to them
            self._replies.clear()

    def _record(
        self,
        dropped: dict[str, str],
        heard: dict[str, Heard],
        value: np.ndarray | None = None,
        **whole: bytes,
    ) -> None:
        if self._journal:
            self._journal.write(
                Round(
                    self._sequence,
                    self._digests,
                    dropped,
                    heard,
                    whole,
                    value,
                    tuple(self._doubted),
                )
            )

    def _check_recorded(self, recorded: Round) -> None:
        if (recorded.sequence, recorded.asked) != (self._sequence, self._digests):
            raise BadInput(
                f"question {self._sequence + 1} is not the one in the journal; the run can "
                "only go on with the same versions"
            )

    def _settle(self, frames: Mapping[str, bytes], dropped: Mapping[str, str]) -> None:
        """Notes who has retired and who was silent."""
        self.retired |= {
            name: code
            for name, code in dropped.items()
            if code in RETIRED and name not in self.retired
        }
        self._silent = (self._silent - frames.keys()) | {
            name for name, code in dropped.items() if code == "silent"
        }

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

    def _key_of(self, name: str) -> Key:
        return Key(self._sequence, name, self._digests[name])

    def _live(
        self,
        query: Query,
        asked: Mapping[str, int],
        frames: Mapping[str, bytes],
        take: Callable[[int, Answer | Sealed], None] = lambda silo, answer: None,
        *,
        stop: bool = True,
    ) -> tuple[dict[str, Heard], dict[str, str]]:
        """Sends until all have answered or said no, or the time is over; `take` sees each answer
        once, as it comes. What came before the server was killed is not asked for again. If too few
        answer, and it is to `stop` then, raises StopRun with nothing journalled."""
        alone = len(asked) == 1 and self._quorum < len(
            self._cards
        )  # of silos asked one by one, any may be absent, unless all must answer
        need = 0 if alone else min(self._quorum, len(asked))
        if len(self._cards) - len(self.retired) < self._quorum:
            said = ", ".join(f"{name} ({code})" for name, code in self.retired.items()) or "(none)"
            left = f"fewer than the quorum of {self._quorum} are left{why(self.retired)}"
            raise StopRun(f"the silos {said} have retired, and {left}", self.retired)
        if not all(self._key_of(name) in self._replies for name in frames):
            self._before((*self.lost, (query.event(), tuple(frames))))
        self.pending = query.event(), tuple(frames)

        def opened(name: str, raw: bytes) -> Heard | str:
            answer = self._opened(raw, query, asked[name], lambda: frames[name])
            if isinstance(answer, str):
                return answer
            sha256 = self._replies.keep(self._key_of(name), raw)
            take(asked[name], answer)
            if isinstance(answer, Sealed):
                return Heard(
                    sha256, answer.count, answer.head, box=hashlib.sha256(answer.box).hexdigest()
                )
            return Heard(
                sha256, answer.count, answer.head, float(np.linalg.norm(answer.value[0].numpy()))
            )

        begin = time.monotonic()
        heard, dropped = self._collect(
            frames,
            opened,
            need,
            "answered",
            self._timeouts.after(self._pace.get(query.mechanism.kind)),
            stop,
        )
        if not dropped:  # what it takes when nothing goes wrong: the least that was seen
            self._pace[query.mechanism.kind] = min(
                time.monotonic() - begin, self._pace.get(query.mechanism.kind, math.inf)
            )
        dropped |= {name: "retired" for name in asked if name not in frames}
        return {name: heard[name] for name in asked if name in heard}, {
            name: dropped[name] for name in asked if name in dropped
        }

    def _collect(
        self,
        frames: Mapping[str, bytes],
        opened: Callable[[str, bytes], Any],
        need: int,
        did: str,
        waits: Timeouts,
        stop: bool = True,
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """What `opened` makes of the replies, and the codes of those who gave none; with `stop`
        StopRun if fewer than `need` did what was asked.
        """
        before = {
            name: opened(name, self._replies.get(key))
            for name in frames
            if (key := self._key_of(name)) in self._replies
        }
        answers: dict[str, Any] = {
            name: got for name, got in before.items() if not isinstance(got, str)
        }
        waiting = self._present([name for name in frames if name not in answers])
        begin, sending, frames = (
            time.monotonic(),
            Sending(self._carrier, waits.retry),
            Frames.of(frames),
        )
        dropped = {name: "silent" for name in frames if name not in waiting and name not in answers}
        sent_before = (
            set(frames) if self._journal and self._sequence <= self._journal.reached else set[str]()
        )
        while waiting:
            left = waits.deadline - (time.monotonic() - begin)
            if left <= 0 and (len(answers) >= need or left <= waits.deadline - waits.limit):
                break
            sent, asked = set(waiting), len(waiting)
            for name, raw in sending.send(frames.only(waiting), left):
                if name not in sent:
                    continue  # nobody's, or a second one
                sent.discard(name)
                came = time.monotonic()
                got = opened(name, raw)
                begin += time.monotonic() - came  # while this server works nobody is silent
                if not isinstance(got, str):
                    answers[name] = got
                    waiting.remove(name)
                    dropped.pop(name, None)
                else:
                    dropped[name] = got
                    if (
                        got not in MAY_PASS and got != "forged"
                    ):  # what the silo has not signed may be the carrier's, and tried again
                        waiting.remove(name)
            gone = sent & sending.removed  # of whom nothing came
            dropped, waiting = (
                dropped | {name: "removed" for name in waiting if name in gone},
                [n for n in waiting if n not in gone],
            )
            sent_before.update(
                waiting
            )  # what they were sent may be in their ledger, whatever they say from now on
            if waiting:
                sending.pause(anew=len(waiting) < asked)
        dropped |= {name: dropped.get(name, "silent") for name in waiting}
        self._doubted = [
            name for name, code in dropped.items() if name in sent_before and code not in DOUBTFUL
        ]
        if self.pending:  # which it stays where the run stops here
            self.pending = (
                self.pending[0],
                tuple(sorted(maybe_charged(answers, dropped, self._doubted))),
            )
        if sending.gone and len(answers) < max(need, 1):
            raise StopRun(
                f"the engine cannot be reached ({sending.gone}); start it again and {self._again}"
            )
        if stop and len(answers) < need:
            number = self._sequence + 1
            raise StopRun(
                (
                    f"{len(answers)} of {len(frames)} silos {did} question {number}, and "
                    f"{need} must ({_list(dropped)}){why(dropped)}"
                ),
                dropped,
            )
        return answers, dropped

    def _present(self, frames: Collection[str]) -> list[str]:
        """Whom to wait for: all, but of those that were silent when last asked only the ones that
        the carrier sees again.
        """
        if not self._silent.intersection(frames):
            return list(frames)
        try:
            seen = set(self._carrier.names())
        except Exception:
            return list(frames)
        present = [name for name in frames if name not in self._silent or name in seen]
        return present if len(present) >= self._quorum else list(frames)

    def _opened(
        self, raw: bytes, query: Query, silo: int, frame: Callable[[], bytes] = bytes
    ) -> Answer | Sealed | str:
        """The answer in a reply; or the code of a refusal, "forged" for what the silo did not sign
        about this question, "value".
        """
        card = self._cards[silo]
        try:
            reply = decode_reply(raw, limit=_longest(query), silo_key=card.key)
        except Refused:
            return "forged"
        if isinstance(reply, Refusal):
            return reply.code if believed(reply.code, reply.digest, frame()) else "forged"
        if (reply.silo, reply.query_id, reply.digest) != (
            card.name,
            self._id(silo),
            self._digests[card.name],
        ):
            return "forged"
        return reply if self._fits(reply, query) else "value"

    def _box(self, query: Query, name: str, silo: int) -> bytes:
        """The sealed or masked counts in a reply that was kept."""
        found = self._opened(self._replies.get(self._key_of(name)), query, silo)
        assert isinstance(found, Sealed), "what was kept was opened before"
        return found.box

    def _fits(self, reply: Answer | Sealed, query: Query) -> bool:
        if not isinstance(reply, Answer) or reply.value.shape != query.statistic.shape:
            return False
        low, high = reply.value.aminmax()  # of which both are NaN where one number is
        return bool(low >= -LARGEST) and bool(high <= LARGEST)


def combined_total(
    channel: Channel, query: Query, silos: Sequence[int], weights: Weights
) -> tuple[Tensor, tuple[int, ...]]:
    """(1, d): the mean that is read out of the total of a channel."""
    answers = channel.ask(query, silos)
    return query.mechanism.combine(answers.value, answers.silos, weights), answers.silos


def maybe_charged(
    answers: Iterable[str], dropped: Mapping[str, str], doubted: Iterable[str] = ()
) -> frozenset[str]:
    """Those who answered, those whose ledger says that it knows the question, and those of whom
    nobody knows whether they were asked, and charged.
    """
    return frozenset(
        (*answers, *doubted, *(name for name, code in dropped.items() if code in DOUBTFUL))
    )


def _longest(query: Query) -> int:
    """Bytes of the longest reply that can answer the question."""
    return OVERHEAD + 8 + MAX_HEADER + 8 * query.statistic.shape[-1] + box_length(0)


def _digest(frame: bytes) -> str:
    return hashlib.sha256(memoryview(frame)[OVERHEAD:]).hexdigest()


def _list(codes: Mapping[str, str]) -> str:
    """In the order of names, whoever was the first to fail."""
    return ", ".join(f"{name} {code}" for name, code in sorted(codes.items()))
