"""The channel to silos behind a shuffler.

The server collects a sealed box from each silo, brings all boxes to the shuffler, and gets one
signed total back. It can open no box.

A question is two records of the journal. The first has the silos whose boxes are here; the boxes
lie beside the journal. The second has the shuffler's reply. So a resumed run brings the shuffler
the same boxes, which it may have added already. The server asks for more boxes only where the
shuffler replies that these are too few.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from silodp.core.errors import BadInput, Refused
from silodp.core.mechanisms.totals import as_total
from silodp.core.protocol.box import box_length
from silodp.core.protocol.card import Card
from silodp.core.protocol.codec import Answer, Envelope, Sealed
from silodp.core.protocol.relay import (
    DECLINED,
    Declined,
    Passed,
    Request,
    decode_outcome,
    encode_request,
    outcome_length,
)
from silodp.core.query import Query
from silodp.core.weights import Weights
from silodp.server.asking import Carrier, Sending, believed
from silodp.server.federation import StopRun
from silodp.server.journal import Heard, Round
from silodp.server.question import FORGED, SILENT_CODE, Question
from silodp.server.remote import (
    Answers,
    QuestionReport,
    Remote,
    body_digest,
    combined_total,
    list_codes,
)

SITE = "shuffler"
"""Under this name the shuffler's courier is another site of the engine."""
LATER = frozenset({"busy", "stopping", "rate", "store", "internal"})
"""Refusals of the shuffler that may pass."""


@dataclass(frozen=True)
class Shuffler:
    """The shuffler's card (shuffler.json): the key that signs its totals."""

    sign: str

    @classmethod
    def of(cls, table: Mapping[str, Any], source: str = "the shuffler's card") -> Shuffler:
        """Return the card in a table. Raise BadInput where the key is not one."""
        key = table.get("sign")
        if not isinstance(key, str) or len(key) != 64 or set(key) - set("0123456789abcdef"):
            raise BadInput(
                f"{source} has the sign key {key!r:.80}; take the shuffler.json that "
                "`silodp federation shuffler init` wrote"
            )
        return cls(key)


class ShuffledRemote(Remote):
    """Ask for boxes and bring back totals: `value` (1, 1, d) is the sum over the silos that
    count.
    """

    def __init__(
        self, cards: Sequence[Card], carrier: Carrier, *, shuffler: Shuffler, **settings: Any
    ) -> None:
        super().__init__(cards, carrier, **settings)
        if SITE in {card.name for card in cards}:
            raise BadInput(
                f"a silo is called {SITE!r}, which is the shuffler's name at the engine; "
                "give it another"
            )
        self._shuffler = shuffler

    def ask(self, query: Query, silos: Sequence[int]) -> Answers:
        """Return the total that the shuffler has passed on. Raise StopRun where it has none, or
        where it is not the sum of the boxes that were sent.
        """
        numbers, frames = self._make_frames(query, silos)
        heard, outcome = self._from_journal(query)
        replayed = outcome is not None
        if outcome is None:
            heard, outcome = self._collect_total(query, numbers, frames, heard)
        question = self._current()
        dropped = question.dropped
        self._note_absent(frames, dropped)
        left_out = {
            name: outcome.dropped[box.box]
            for name, box in heard.items()
            if box.box in outcome.dropped
        }
        members = [name for name in numbers if name in heard and name not in left_out]
        if outcome.contributions != len(members):
            raise StopRun(
                f"the shuffler's total is over {outcome.contributions} silos, but the boxes that "
                f"it took were of {len(members)}"
            )
        records = query.mechanism.contributed(
            self._cards[numbers[name]].records for name in members
        )
        total = torch.from_numpy(outcome.totals).double()[None, None]
        report = QuestionReport(
            self._sequence,
            query.event(),
            tuple(members),
            dropped | left_out,
            replayed,
            query,
            (total[:, 0], records),
            maybe_charged=question.maybe_charged,
        )
        self._finish(report, heard)
        return Answers(total, tuple(numbers[name] for name in members))

    def _from_journal(self, query: Query) -> tuple[dict[str, Heard], Passed | None]:
        """Return the boxes and the total that the journal has of this question, and open it with
        the states that it had. A question that was asked twice for boxes has two records of them:
        the last one counts.
        """
        heard: dict[str, Heard] = {}
        while self._journal and (recorded := self._journal.read()):
            if SITE in recorded.asked:
                if not heard:
                    raise BadInput(
                        f"the journal has a total of question {self._sequence + 1} and no boxes; "
                        "restore the journal"
                    )
                return heard, self._recorded_total(query, len(heard), recorded)
            self._check_recorded(recorded)
            self._replay(query, recorded)
            heard = recorded.heard
        return heard, None

    def combined(
        self, query: Query, silos: Sequence[int], weights: Weights
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Return the mean (1, d) that is read out of the total."""
        return combined_total(self, query, silos, weights)

    # --- boxes -----------------------------------------------------------------------------------

    def _collect_total(
        self,
        query: Query,
        numbers: Mapping[str, int],
        frames: Mapping[str, bytes],
        recorded: dict[str, Heard],
    ) -> tuple[dict[str, Heard], Passed]:
        """Return the boxes' records and their total. Raise StopRun where there is none.

        The boxes that the journal has go first, as they are: the shuffler may have passed on their
        total already.
        """
        if recorded and all(self._reply_key(name) in self._replies for name in recorded):
            outcome = self._relay_again(query, frames, recorded)
            if isinstance(outcome, Passed):
                return recorded, outcome
        heard = self._ask_silos(query, numbers, frames)
        wanted = self._wanted(query)
        if len(heard) < wanted:
            dropped = self._current().dropped
            raise StopRun(
                f"{len(heard)} silos contributed to question {self._sequence + 1} where the price "
                f"counts on the noise of {wanted} ({list_codes(dropped)}); nothing is passed on, "
                "and what was charged stays charged",
                dropped,
            )
        self._write_record(heard)
        outcome = self._relay(query, heard)
        if isinstance(outcome, Declined):
            raise StopRun(
                f"the shuffler passes on no total for question {self._sequence + 1}: "
                f"{DECLINED[outcome.code]}"
            )
        return heard, outcome

    def _relay_again(
        self, query: Query, frames: Mapping[str, bytes], recorded: dict[str, Heard]
    ) -> Passed | Declined:
        """Bring the shuffler the boxes that the journal has. Until it has passed on their total,
        every silo counts as charged: a killed server may have asked for more boxes.
        """
        replayed = self._current()
        unsure = Question(frames)
        for name in frames:
            unsure.resumed(name)
        self._open_question(query, unsure)
        outcome = self._relay(query, recorded)
        if isinstance(outcome, Passed):
            self._open_question(query, replayed)
        return outcome

    def _wanted(self, query: Query) -> int:
        """Return the fewest silos whose boxes are worth bringing to the shuffler."""
        return as_total(query.mechanism).counted

    def _envelope(self, query: Query, silo: int) -> Envelope:
        own = Query(query.statistic, query.mechanism.of(silo))
        return self._addressed(own, silo, str(self._sequence))

    def _fits(self, reply: Answer | Sealed, query: Query) -> bool:
        """Return whether the reply has a box of the question's size."""
        return isinstance(reply, Sealed) and len(reply.box) == box_length(query.statistic.shape[-1])

    # --- the shuffler ----------------------------------------------------------------------------

    def _request(self, query: Query, heard: Mapping[str, Heard]) -> bytes:
        """Return the frame with the boxes of these silos."""
        envelope = self._envelope(query, 0)
        numbers = {card.name: number for number, card in enumerate(self._cards)}
        boxes = [self._stored_box(query, name, numbers[name]) for name in heard]
        boxes.sort()  # This order does not show which silo sent which box.
        request = Request(
            envelope.shuffle_round,
            query.statistic.shape[-1],
            tuple(boxes),
        )
        return encode_request(request, self._key)

    def _relay(self, query: Query, heard: Mapping[str, Heard]) -> Passed | Declined:
        """Return the shuffler's reply to these boxes, and journal it if it is a total. Send the
        same bytes again until the limit. Raise StopRun where no reply has come then.
        """
        frame = self._request(query, heard)
        begin = time.monotonic()
        last = SILENT_CODE
        sending = Sending(self._carrier, self._timeouts.retry)
        while (left := self._timeouts.limit - (time.monotonic() - begin)) > 0:
            replies = dict(sending.send({SITE: frame}, left))
            if sending.gone:
                last = f"engine {sending.gone}"
            if SITE in replies:
                got = self._read(replies[SITE], query, len(heard), frame)
                if isinstance(got, Passed):
                    self._write_total(frame, replies[SITE])
                    return got
                if isinstance(got, Declined) and got.code not in LATER:
                    return got
                if isinstance(got, Declined):
                    last = got.code
                else:
                    last = got
            sending.pause()
        raise StopRun(
            f"the shuffler gave no total for question {self._sequence + 1} ({last}); what "
            f"was charged stays charged: {self._again}, which brings it "
            "the same boxes"
        )

    def _write_total(self, frame: bytes, reply: bytes) -> None:
        """Write the shuffler's total into the journal."""
        if self._journal:
            digests = {SITE: body_digest(frame)}
            self._journal.write(Round(self._sequence, digests, {}, replies={SITE: reply}))

    def _read(self, raw: bytes, query: Query, boxes: int, frame: bytes) -> Passed | Declined | str:
        """Return a total of this round, or the shuffler's refusal of this request, or "forged" for
        anything else.
        """
        dimension = query.statistic.shape[-1]
        limit = outcome_length(dimension, boxes)
        try:
            got = decode_outcome(raw, limit=limit, shuffler_key=self._shuffler.sign)
        except Refused:
            return FORGED
        if isinstance(got, Declined):
            if believed(got.code, got.digest, frame):
                return got
            return FORGED
        round = self._envelope(query, 0).shuffle_round
        if (got.round, len(got.totals)) == (round, dimension):
            return got
        return FORGED

    def _recorded_total(self, query: Query, boxes: int, recorded: Round) -> Passed:
        """Return the total in the journal. The boxes are gone, but the shuffler has signed that it
        is the total of this round. Raise BadInput otherwise.
        """
        got = self._read(recorded.replies[SITE], query, boxes, b"")
        if not isinstance(got, Passed) or recorded.sequence != self._sequence:
            raise BadInput(
                f"the journal's total of question {self._sequence + 1} is not the "
                "shuffler's; restore the journal"
            )
        return got
