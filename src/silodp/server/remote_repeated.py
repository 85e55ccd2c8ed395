"""The channel of evaluations, profiles and curves. A question that is asked again is a repetition,
and costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from silodp.core.protocol.card import Card
from silodp.core.protocol.codec import Envelope, encode_query
from silodp.core.query import Query
from silodp.server.asking import Carrier
from silodp.server.remote import Remote, body_digest, hashed_id

_OPEN = "0" * 40
"""A placeholder for the id, while the id is computed."""


class RepeatedRemote(Remote):
    """Ask under ids that follow from the run, the silo's name and the question alone. The other
    silos, and their order, do not matter.

    Formal guarantees: the same question to one silo has the same id, and the ledger answers it as
    it did before. Another question has another id.
    """

    def __init__(self, cards: Sequence[Card], carrier: Carrier, **settings: Any) -> None:
        super().__init__(cards, carrier, **settings)
        self._ids: dict[int, str] = {}

    def _addressed(self, query: Query, silo: int, round: str = "") -> Envelope:
        """Return the envelope with an id that is the hash of the signed question's own body."""
        self._ids[silo] = _OPEN
        envelope = super()._addressed(query, silo, round)
        self._ids[silo] = hashed_id(body_digest(encode_query(envelope, self._key)))
        return replace(envelope, query_id=self._ids[silo])

    def _query_id(self, silo: int) -> str:
        return self._ids[silo]
