"""The channel of evaluations, profiles and curves: whoever asks the same again repeats a question,
and pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from silodp.core.protocol.card import Card
from silodp.core.protocol.codec import Envelope, encode_query
from silodp.core.query import Query
from silodp.server.asking import Carrier
from silodp.server.remote import Remote, _digest

_OPEN = "0" * 40
"""In the place of the id while it is made."""


class RepeatedRemote(Remote):
    """Asks under ids that follow from the run, the silo's name and what it is asked: not from who
    else is asked, nor in which order.

    Formal guarantees: one silo is asked the same under the same id, which its ledger answers as it
    did, and something else under another."""

    def __init__(self, cards: Sequence[Card], carrier: Carrier, **about: Any) -> None:
        super().__init__(cards, carrier, **about)
        self._ids: dict[int, str] = {}

    def _addressed(self, asked: Query, silo: int, round: str = "") -> Envelope:
        self._ids[silo] = _OPEN
        made = super()._addressed(asked, silo, round)
        self._ids[silo] = self._named(_digest(encode_query(made, self._key)))
        return replace(made, query_id=self._ids[silo])

    def _id(self, silo: int) -> str:
        return self._ids[silo]
