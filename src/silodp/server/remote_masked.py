"""The channel to silos that mask their numbers for each other.

The server collects a key from each silo, sends the table of the cohort to all, and adds up the
replies. It can read nothing but that sum, and only if the whole cohort has answered.

Every attempt at a question begins with a key round, which costs nothing. A silo that gives no key
is not in the table. If a silo drops out after the key round, the total is lost, and the charges of
the others stay. They are asked again without that silo: this is another attempt, with noise and a
price of its own. Each attempt is two records of the journal: the keys, then the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Mechanism
from silodp.core.mechanisms.totals import as_total
from silodp.core.protocol.card import Card
from silodp.core.protocol.codec import Answer, Envelope, Sealed
from silodp.core.protocol.masks import (
    Row,
    add_masked,
    is_signed,
    modulus_for,
    write_table,
)
from silodp.core.protocol.offers import KeyRequest, decode_offer, encode_key_request
from silodp.core.query import Query
from silodp.core.weights import Weights
from silodp.server.asking import Carrier, opened
from silodp.server.federation import StopRun
from silodp.server.journal import Heard, Round
from silodp.server.question import FORGED, RETIRED_CODE, Question
from silodp.server.remote import (
    Answers,
    QuestionReport,
    Remote,
    body_digest,
    combined_total,
    hashed_id,
    list_codes,
)

ATTEMPTS = 3
"""Attempts at one question before a run ends early. A gate's policy has a number of its own."""
_KEY_OF = "key of "


class MaskedRemote(Remote):
    """Ask a cohort for masked numbers and add them up: `value` (1, 1, d) is the sum over the silos
    that count, which are all of the cohort.
    """

    def __init__(self, cards: Sequence[Card], carrier: Carrier, **settings: Any) -> None:
        super().__init__(cards, carrier, **settings)
        self._spent = set[bytes]()
        """Keys that an answer has used: their gates have forgotten them."""

    def ask(self, query: Query, silos: Sequence[int]) -> Answers:
        """Return the total of the silos that are there, at least the quorum. Raise StopRun where
        the cohort breaks too often, or becomes too small.
        """
        query = Query(query.statistic, self._with_modulus(query))
        mechanism = query.mechanism
        wanted = {self._cards[silo].name: silo for silo in sorted(silos)}
        missing: dict[str, str] = {}
        self._attempt = 0
        tries = 0
        while True:
            present = {name: silo for name, silo in wanted.items() if name not in self.retired}
            rows, without_key = self._collect_keys(present, mechanism)
            missing |= dict.fromkeys(without_key, "absent")
            missing |= {name: RETIRED_CODE for name in wanted if name in self.retired}
            cohort = {name: silo for name, silo in wanted.items() if name in rows}
            self._table = write_table(rows.values())
            frames = self._make_frames(query, list(cohort.values()))[1]
            if self._journal:
                recorded = self._journal.read()
            else:
                recorded = None
            if recorded is None:
                heard, total = self._collect_total(query, cohort, frames, mechanism)
                tries += 1
            else:
                self._check_recorded(recorded)
                self._replay(query, recorded)
                heard = recorded.heard
                total = recorded.value
            dropped = self._current().dropped
            self._note_absent(frames, dropped)
            self._spent |= {rows[name].key for name in heard}
            missing = {name: code for name, code in missing.items() if name not in cohort} | dropped
            if total is not None:
                break
            self._lose_attempt()
            if tries == ATTEMPTS:
                raise StopRun(
                    f"the cohort of question {self._sequence + 1} has broken {tries} times "
                    f"({list_codes(dropped)}); what was charged stays charged",
                    dropped,
                )
        records = mechanism.contributed(self._cards[silo].records for silo in cohort.values())
        if int(np.abs(total).max()) > self._most(query, records, len(cohort)):
            # A silo that lies spoils the sum, as it may spoil any mean. The server can see this
            # only where the sum leaves its range.
            raise StopRun(
                f"the total of question {self._sequence + 1} is beyond what its cohort can "
                "add up to: a silo has not kept to the table, or has lied"
            )
        value = torch.from_numpy(total.astype("f8"))[None, None]
        report = QuestionReport(
            self._sequence,
            query.event(),
            tuple(cohort),
            missing,
            recorded is not None,
            query,
            (value[:, 0], records),
            tuple(self.lost),
            self._current().maybe_charged,
        )
        self._finish(report, heard)
        return Answers(value, tuple(cohort.values()))

    def combined(
        self, query: Query, silos: Sequence[int], weights: Weights
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Return the mean (1, d) that is read out of the total."""
        return combined_total(self, query, silos, weights)

    def _collect_total(
        self,
        query: Query,
        cohort: Mapping[str, int],
        frames: Mapping[str, bytes],
        mechanism: Mechanism,
    ) -> tuple[dict[str, Heard], np.ndarray | None]:
        """Return the answers' records and the total (d,), which is None unless all have answered.

        The run goes on where too few answer: a gate that was restarted has lost its key, and the
        next attempt asks for another.
        """
        heard = self._ask_silos(query, cohort, frames, stop=False)
        total = None
        if len(heard) == len(cohort):
            total = self._sum(query, cohort, mechanism)
        self._write_record(heard, total)
        return heard, total

    def _lose_attempt(self) -> None:
        """Keep the possible charges of the attempt, which gives no total, and go on to the next."""
        assert self.pending is not None
        self.lost.append(self.pending)
        self.question = None
        self._attempt += 1

    # --- the key round ---------------------------------------------------------------------------

    def _collect_keys(
        self, numbers: Mapping[str, int], mechanism: Mechanism
    ) -> tuple[dict[str, Row], dict[str, str]]:
        """Return the rows of the silos that gave a key, with the records that each contributes, and
        the codes of the others.
        """
        frames = {name: self._key_request(silo) for name, silo in numbers.items()}
        self._digests = {name: body_digest(frame) for name, frame in frames.items()}
        if self._journal:
            recorded = self._journal.read()
        else:
            recorded = None
        if recorded is None:
            rows, codes = self._ask_keys(numbers, frames)
        else:
            rows, codes = self._recorded_keys(recorded, numbers, frames)
        self._note_absent(frames, codes)
        complete: dict[str, Row] = {}
        for name, silo in numbers.items():
            if name in rows:
                batch = int(mechanism.sampling.batch(self._cards[silo].records))
                complete[name] = replace(rows[name], records=batch)
        return complete, codes

    def _key_digests(self) -> dict[str, str]:
        """Return the hashes of the key requests, under their names in the journal."""
        return {_KEY_OF + name: digest for name, digest in self._digests.items()}

    def _ask_keys(
        self, numbers: Mapping[str, int], frames: Mapping[str, bytes]
    ) -> tuple[dict[str, Row], dict[str, str]]:
        """Ask the silos for keys and journal them. Raise StopRun where fewer than the quorum give
        one. A key costs nothing, so this question is not the open one.
        """
        replies: dict[str, bytes] = {}

        def read(name: str, raw: bytes) -> Row | str:
            row = self._row(raw, numbers[name], frames[name])
            if not isinstance(row, str):
                replies[_KEY_OF + name] = raw
            return row

        question = Question(frames)
        quick = self._timeouts.quick
        rows = self._collect(question, frames, read, self._quorum, "gave a key for", quick)
        if self._journal:
            codes = question.codes
            self._journal.write(Round(self._sequence, self._key_digests(), codes, replies=replies))
        return rows, question.codes

    def _recorded_keys(
        self, recorded: Round, numbers: Mapping[str, int], frames: Mapping[str, bytes]
    ) -> tuple[dict[str, Row], dict[str, str]]:
        """Return the keys that the journal has. Raise BadInput where one is not the silo's."""
        self._digests = self._key_digests()
        self._check_recorded(recorded)
        rows: dict[str, Row] = {}
        for key, raw in recorded.replies.items():
            name = key.removeprefix(_KEY_OF)
            row = self._row(raw, numbers[name], frames[name])
            if isinstance(row, str):
                raise BadInput(
                    f"a key in the journal, of question {self._sequence + 1}, is not the "
                    "silo's; restore the journal"
                )
            rows[name] = row
        return rows, recorded.dropped

    def _key_request(self, silo: int) -> bytes:
        card = self._cards[silo]
        return encode_key_request(KeyRequest(card.name, self._run, card.definition), self._key)

    def _row(self, raw: bytes, silo: int, frame: bytes) -> Row | str:
        """Return the key that the silo has signed for this run; or the code of a refusal, or
        "forged". A key that an answer has used is an old offer, and counts as forged.
        """
        card = self._cards[silo]
        offer = opened(raw, card.key, frame, decode_offer)
        if isinstance(offer, str):
            return offer
        about_this = offer.silo == card.name and offer.digest == body_digest(frame)
        fresh = offer.row.identity.hex() == card.key and offer.row.key not in self._spent
        if not (about_this and fresh):
            return FORGED
        if not is_signed(offer.row, definition=card.definition, run=self._run):
            return FORGED
        return offer.row

    # --- the question ----------------------------------------------------------------------------

    def _with_modulus(self, query: Query) -> Mechanism:
        """Return the mechanism in plain numbers, with the fewest bits in which no total of all
        silos wraps.
        """
        mechanism = query.mechanism.of(0)
        records = mechanism.contributed(card.records for card in self._cards)
        largest = self._most(Query(query.statistic, mechanism), records, len(self._cards))
        return replace(mechanism, modulus=modulus_for(largest))  # type: ignore[type-var]

    def _most(self, query: Query, records: int, silos: int) -> float:
        """Return the largest size of a number of this total."""
        return as_total(query.mechanism).largest(query.statistic.shape[-1], records, silos)

    def _envelope(self, query: Query, silo: int) -> Envelope:
        own = Query(query.statistic, query.mechanism.of(silo))
        envelope = self._addressed(own, silo, str(self._sequence))
        return replace(envelope, attempt=self._attempt, cohort=self._table)

    def _query_id(self, silo: int) -> str:
        return hashed_id(f"{self._run}/{self._sequence}.{self._attempt}/{self._cards[silo].name}")

    def _fits(self, reply: Answer | Sealed, query: Query) -> bool:
        """Return whether the reply has masked numbers of the question's size."""
        size = query.statistic.shape[-1] * query.mechanism.modulus // 8
        return isinstance(reply, Sealed) and len(reply.box) == size

    def _sum(self, query: Query, cohort: Mapping[str, int], mechanism: Mechanism) -> np.ndarray:
        """Return the total (d,), in whole numbers."""
        boxes = (self._stored_box(query, name, silo) for name, silo in cohort.items())
        return add_masked(boxes, mechanism.modulus)
