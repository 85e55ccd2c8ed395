"""The channel to silos that mask their counts for each other: a key from each, the table of the
cohort to all, and the sum of what comes back.

The server can read nothing but that sum, and it only if the whole cohort has answered. Every
attempt at a question begins with a key round, which costs nothing: whoever is not there is not in
the table. If somebody drops out after it, the total is lost and what the others were charged stays
charged; they are asked again without, as another attempt, which has noise and a price of its own. A
question is two records of the journal for each attempt: the keys, then the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Mechanism
from silodp.core.protocol.card import Card
from silodp.core.protocol.codec import Answer, Envelope, Sealed
from silodp.core.protocol.masks import Row, add_masked, is_signed, write_table
from silodp.core.protocol.offers import KeyRequest, decode_offer, encode_key_request
from silodp.core.query import Query
from silodp.core.weights import Weights
from silodp.server.asking import Carrier, opened
from silodp.server.federation import StopRun
from silodp.server.journal import Round
from silodp.server.remote import (
    Answers,
    QuestionReport,
    Remote,
    _digest,
    _list,
    combined_total,
    maybe_charged,
)

ATTEMPTS = 3
"""At one question, before a run ends early; a gate's policy has a number of its own."""
_KEY_OF = "key of "


class MaskedRemote(Remote):
    """Asks a cohort for masked counts and adds them up: `value` (1, 1, d) is the sum over the silos
    that count, which are all of the cohort.
    """

    def __init__(self, cards: Sequence[Card], carrier: Carrier, **about: Any) -> None:
        super().__init__(cards, carrier, **about)
        self._spent = set[bytes]()
        """Keys of which an answer was heard: their gates have forgotten them."""

    def ask(self, query: Query, silos: Sequence[int]) -> Answers:
        """The total of whoever is there, at least the quorum. Raises StopRun where the cohort
        breaks too often, or becomes too small.
        """
        mechanism, missing = query.mechanism.of(0), dict[str, str]()
        wanted = {self._cards[i].name: i for i in sorted(silos)}
        self._attempt, tries = 0, 0
        while True:
            rows, gone = self._keys(
                {name: i for name, i in wanted.items() if name not in self.retired}, mechanism
            )
            missing |= dict.fromkeys(gone, "absent") | {
                name: "retired" for name in wanted if name in self.retired
            }  # asked nothing
            asked = {name: i for name, i in wanted.items() if name in rows}
            self._table = write_table(rows.values())
            frames = self._opening(query, list(asked.values()))[1]
            records = mechanism.contributed(self._cards[i].records for i in asked.values())
            recorded = self._journal.read() if self._journal else None
            if recorded is None:
                heard, dropped = self._live(
                    query, asked, frames, stop=False
                )  # or a key that its gate has lost would be asked for for ever
                found = self._sum(query, asked, mechanism) if len(heard) == len(asked) else None
                self._record(dropped, heard, found)
                tries += 1
            else:
                self._check_recorded(recorded)
                heard, dropped, found = recorded.heard, recorded.dropped, recorded.value
                self._doubted = recorded.doubted
            self.pending = (
                query.event(),
                tuple(sorted(maybe_charged(heard, dropped, self._doubted))),
            )  # also of an attempt that is replayed
            self._settle(frames, dropped)
            self._spent |= {rows[name].key for name in heard}
            missing = {name: code for name, code in missing.items() if name not in asked} | dropped
            if found is not None:
                break
            self.lost.append(self.pending)
            self._attempt, self.pending = self._attempt + 1, None
            if tries == ATTEMPTS:
                raise StopRun(
                    (
                        f"the cohort of question {self._sequence + 1} has broken {tries} times "
                        f"({_list(dropped)}); what was charged stays charged"
                    ),
                    dropped,
                )
        if int(found.max()) > records * (mechanism.levels + mechanism.noise_bits):
            # a liar's answer spoils the sum, as it may spoil any mean; that it did can be seen only
            # where the sum leaves its range
            raise StopRun(
                f"the total of question {self._sequence + 1} is beyond what its cohort can "
                "add up to: a silo has not kept to the table, or has lied"
            )
        total = torch.from_numpy(found.astype("f8"))[None, None]
        told = QuestionReport(
            self._sequence,
            query.event(),
            tuple(asked),
            missing,
            recorded is not None,
            query,
            (total[:, 0], records),
            tuple(self.lost),
            maybe_charged(heard, missing, self._doubted),
        )
        self._closing(told, heard)
        return Answers(total, tuple(asked.values()))

    def combined(
        self, query: Query, silos: Sequence[int], weights: Weights
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        return combined_total(self, query, silos, weights)

    # --- the key round ---------------------------------------------------------------------------

    def _keys(
        self, asked: Mapping[str, int], mechanism: Mechanism
    ) -> tuple[dict[str, Row], dict[str, str]]:
        """The rows of those who are there, with the noise that each must add, and why the others
        are not.
        """
        frames = {name: self._key_request(i) for name, i in asked.items()}
        self._digests = {name: _digest(frame) for name, frame in frames.items()}
        named, given = (
            {_KEY_OF + name: digest for name, digest in self._digests.items()},
            dict[str, bytes](),
        )
        recorded = self._journal.read() if self._journal else None
        if recorded is None:

            def opened(name: str, raw: bytes) -> Row | str:
                if not isinstance(row := self._row(raw, asked[name], frames[name]), str):
                    given[_KEY_OF + name] = raw
                return row

            rows, gone = self._collect(
                frames, opened, self._quorum, "gave a key for", self._timeouts.quick
            )
            if self._journal:
                self._journal.write(Round(self._sequence, named, gone, replies=given))
        else:
            self._digests = named
            self._check_recorded(recorded)
            names, gone = (
                [name.removeprefix(_KEY_OF) for name in recorded.replies],
                recorded.dropped,
            )
            read = {
                name: self._row(recorded.replies[_KEY_OF + name], asked[name], frames[name])
                for name in names
            }
            rows = {name: row for name, row in read.items() if isinstance(row, Row)}
            if len(rows) < len(read):
                raise BadInput(
                    f"a key in the journal, of question {self._sequence + 1}, is not the "
                    "silo's; restore the journal"
                )
        self._settle(frames, gone)
        batch = {
            name: int(mechanism.sampling.batch(self._cards[asked[name]].records)) for name in rows
        }
        return {
            name: replace(rows[name], trials=batch[name] * mechanism.noise_bits)
            for name in asked
            if name in rows
        }, gone

    def _key_request(self, silo: int) -> bytes:
        card = self._cards[silo]
        return encode_key_request(KeyRequest(card.name, self._run, card.definition), self._key)

    def _row(self, raw: bytes, silo: int, frame: bytes) -> Row | str:
        """The key that the silo has signed for this run; or the code of a refusal, or "forged"."""
        card = self._cards[silo]
        if isinstance(offer := opened(raw, card.key, frame, decode_offer), str):
            return offer
        own = (
            offer.silo == card.name
            and offer.digest == _digest(frame)
            and offer.row.identity.hex() == card.key
        )
        own &= offer.row.key not in self._spent  # an answer has used it: this offer is an old one
        return (
            offer.row
            if own and is_signed(offer.row, definition=card.definition, run=self._run)
            else "forged"
        )

    # --- the question ----------------------------------------------------------------------------

    def _envelope(self, query: Query, silo: int) -> Envelope:
        made = self._addressed(
            Query(query.statistic, query.mechanism.of(silo)), silo, str(self._sequence)
        )
        return replace(made, attempt=self._attempt, cohort=self._table)

    def _id(self, silo: int) -> str:
        return self._named(f"{self._run}/{self._sequence}.{self._attempt}/{self._cards[silo].name}")

    def _fits(self, reply: Answer | Sealed, query: Query) -> bool:
        return (
            isinstance(reply, Sealed)
            and len(reply.box) == query.statistic.shape[-1] * query.mechanism.modulus // 8
        )

    def _sum(self, query: Query, asked: Mapping[str, int], mechanism: Mechanism) -> np.ndarray:
        """(d,), whole numbers."""
        return add_masked(
            (self._box(query, name, i) for name, i in asked.items()), mechanism.modulus
        )
