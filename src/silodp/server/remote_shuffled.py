"""The channel to silos behind a shuffler: a box from each silo, all boxes to the shuffler, one
signed total back.

The server can open no box. A question is two records of the journal: first whose boxes have come,
which lie beside it, then the shuffler's reply. So a killed run brings the shuffler the very boxes
that it may have added already; more are asked for only where it says that these are too few.
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
from silodp.server.remote import (
    Answers,
    QuestionReport,
    Remote,
    _digest,
    _list,
    combined_total,
    maybe_charged,
)

SITE = "shuffler"
"""Under this name the shuffler's courier is another site of the engine."""
LATER = frozenset({"busy", "stopping", "rate", "store", "internal"})
"""Refusals of the shuffler that may pass."""


@dataclass(frozen=True)
class Shuffler:
    """What the server knows of the shuffler (shuffler.json): the key that signs its totals."""

    sign: str

    @classmethod
    def of(cls, table: Mapping[str, Any], source: str = "the shuffler's card") -> Shuffler:
        key = table.get("sign")
        if not isinstance(key, str) or len(key) != 64 or set(key) - set("0123456789abcdef"):
            raise BadInput(
                f"{source} has the sign key {key!r:.80}; take the shuffler.json that "
                "`silodp federation shuffler init` wrote"
            )
        return cls(key)


class ShuffledRemote(Remote):
    """Asks for boxes and brings back totals: `value` (1, 1, d) is the sum over the silos that
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
        """The total that the shuffler has passed on. Raises StopRun where it has none, or what came
        is not the sum of what was sent.
        """
        asked, frames = self._opening(query, silos)
        heard: dict[str, Heard] = {}
        dropped: dict[str, str] = {}
        outcome: Passed | None = None
        while outcome is None and (recorded := self._journal.read() if self._journal else None):
            if SITE in recorded.asked:
                outcome = self._passed_before(query, len(heard), recorded)
                continue
            self._check_recorded(recorded)
            heard, dropped, self._doubted = recorded.heard, recorded.dropped, recorded.doubted
        replayed = outcome is not None
        if outcome is None:
            heard, dropped, outcome = self._totalled(query, asked, frames, heard, dropped)
        charged = maybe_charged(heard, dropped, self._doubted)
        self.pending = query.event(), tuple(sorted(charged))  # also of a total that is replayed
        self._settle(frames, dropped)
        left = {
            name: outcome.dropped[box.box]
            for name, box in heard.items()
            if box.box in outcome.dropped
        }
        members = [name for name in asked if name in heard and name not in left]
        records = self._records(query, members, asked)
        if (outcome.contributions, outcome.records) != (len(members), records):
            raise StopRun(
                f"the shuffler's total is over {outcome.records} records of "
                f"{outcome.contributions} silos, "
                f"but the boxes that it took were of {records} records of {len(members)}"
            )
        total = torch.from_numpy(outcome.totals).double()[None, None]
        report = QuestionReport(
            self._sequence,
            query.event(),
            tuple(members),
            dropped | left,
            replayed,
            query,
            (total[:, 0], records),
            charged=charged,
        )
        self._closing(report, heard)
        return Answers(total, tuple(asked[name] for name in members))

    def combined(
        self, query: Query, silos: Sequence[int], weights: Weights
    ) -> tuple[Tensor, tuple[int, ...]]:
        return combined_total(self, query, silos, weights)

    # --- boxes -----------------------------------------------------------------------------------

    def _totalled(
        self,
        query: Query,
        asked: Mapping[str, int],
        frames: Mapping[str, bytes],
        heard: dict[str, Heard],
        dropped: dict[str, str],
    ) -> tuple[dict[str, Heard], dict[str, str], Passed]:
        """What was heard, and the boxes' total. Boxes of before go first, as they are: their total
        may have been passed on already.
        """
        if heard and all(self._key_of(name) in self._replies for name in heard):
            self.pending = query.event(), tuple(frames)
            outcome = self._relayed(query, heard)
            if isinstance(outcome, Passed):
                return heard, dropped, outcome
        heard, dropped = self._live(query, asked, frames)
        if (records := self._records(query, list(heard), asked)) < as_total(
            query.mechanism
        ).contributions:
            raise StopRun(
                (
                    f"{records} records were contributed to question {self._sequence + 1} "
                    "where the noise counts on "
                    f"{as_total(query.mechanism).contributions} ({_list(dropped)}); nothing is "
                    "passed on, and what was charged stays charged"
                ),
                dropped,
            )
        self._record(dropped, heard)
        outcome = self._relayed(query, heard)
        if isinstance(outcome, Declined):
            raise StopRun(
                f"the shuffler passes on no total for question {self._sequence + 1}: "
                f"{DECLINED[outcome.code]}"
            )
        return heard, dropped, outcome

    def _envelope(self, query: Query, silo: int) -> Envelope:
        return self._addressed(
            Query(query.statistic, query.mechanism.of(silo)), silo, str(self._sequence)
        )

    def _fits(self, reply: Answer | Sealed, query: Query) -> bool:
        return isinstance(reply, Sealed) and len(reply.box) == box_length(query.statistic.shape[-1])

    def _records(self, query: Query, names: Sequence[str], asked: Mapping[str, int]) -> int:
        return query.mechanism.contributed(self._cards[asked[name]].records for name in names)

    # --- the shuffler ----------------------------------------------------------------------------

    def _request(self, query: Query, heard: Mapping[str, Heard]) -> bytes:
        envelope = self._envelope(query, 0)
        mechanism, silos = (
            as_total(envelope.query.mechanism),
            {card.name: i for i, card in enumerate(self._cards)},
        )
        boxes = tuple(
            sorted(self._box(query, name, silos[name]) for name in heard)
        )  # an order that says nothing of who sent which
        request = Request(
            envelope.shuffle_round,
            query.statistic.shape[-1],
            mechanism.levels + mechanism.noise_bits,
            boxes,
        )
        return encode_request(request, self._key)

    def _relayed(self, query: Query, heard: Mapping[str, Heard]) -> Passed | Declined:
        """What the shuffler says to these boxes, journalled if it is a total; the same bytes again
        until the limit.
        """
        frame, begin, last = self._request(query, heard), time.monotonic(), "silent"
        sending = Sending(self._carrier, self._timeouts.retry)
        while (left := self._timeouts.limit - (time.monotonic() - begin)) > 0:
            came = dict(sending.send({SITE: frame}, left))
            last = f"engine {sending.gone}" if sending.gone else last
            if SITE in came:
                got = self._read(came[SITE], query, len(heard), frame)
                if isinstance(got, Passed):
                    if self._journal:
                        self._journal.write(
                            Round(
                                self._sequence,
                                {SITE: _digest(frame)},
                                {},
                                replies={SITE: came[SITE]},
                            )
                        )
                    return got
                if isinstance(got, Declined) and got.code not in LATER:
                    return got
                last = got.code if isinstance(got, Declined) else got
            sending.pause()
        raise StopRun(
            f"the shuffler gave no total for question {self._sequence + 1} ({last}); what "
            f"was charged stays charged: {self._again}, which brings it "
            "the same boxes"
        )

    def _read(self, raw: bytes, query: Query, boxes: int, frame: bytes) -> Passed | Declined | str:
        """A total of this round, or the shuffler's no to this request; "forged" for whatever else
        came.
        """
        dimension = query.statistic.shape[-1]
        try:
            got = decode_outcome(
                raw, limit=outcome_length(dimension, boxes), shuffler_key=self._shuffler.sign
            )
        except Refused:
            return "forged"
        if isinstance(got, Declined):
            return got if believed(got.code, got.digest, frame) else "forged"
        round = self._envelope(query, 0).shuffle_round
        return got if (got.round, len(got.totals)) == (round, dimension) else "forged"

    def _passed_before(self, query: Query, boxes: int, recorded: Round) -> Passed:
        """The boxes are gone; that it is the total of this round is what the shuffler has
        signed.
        """
        got = self._read(recorded.replies[SITE], query, boxes, b"")
        if not isinstance(got, Passed) or recorded.sequence != self._sequence:
            raise BadInput(
                f"the journal's total of question {self._sequence + 1} is not the "
                "shuffler's; restore the journal"
            )
        return got
