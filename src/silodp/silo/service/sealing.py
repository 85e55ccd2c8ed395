"""A gate's part in shuffled totals: its numbers leave in a box that only the shuffler can open."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.core.errors import Refused
from silodp.core.events import TotalEvent
from silodp.core.mechanisms.totals import as_total
from silodp.core.protocol.box import Contribution, encrypt_box
from silodp.core.protocol.codec import Envelope
from silodp.silo.service.policy import Shuffling
from silodp.silo.service.trust import Trust


class Sealer(Trust):
    """Seals the numbers of one silo for the shuffler that its policy names."""

    def __init__(self, shuffling: Shuffling, pseudonym: Ed25519PrivateKey) -> None:
        self._shuffling = shuffling
        self._pseudonym = pseudonym
        self.local_limit = shuffling.maximum_local_epsilon

    def check(self, envelope: Envelope, records: int) -> None:
        """Refuse a total that counts on more noise of others than the officer allows."""
        mechanism = as_total(envelope.query.mechanism)
        if mechanism.masked:
            raise Refused("masks")
        self._shuffling.check(mechanism)

    def check_planned(self, event: TotalEvent) -> None:
        """Refuse to reserve budget for a total that counts on too much noise of others."""
        self._shuffling.check(event)

    def hide(self, asker: str, envelope: Envelope, numbers: np.ndarray) -> bytes:
        """Return the numbers in a box for the shuffler alone, with the silo's own condition."""
        mechanism = as_total(envelope.query.mechanism)
        demanded = mechanism.counted + self._shuffling.colluding
        contribution = Contribution(envelope.shuffle_round, demanded, numbers)
        return encrypt_box(contribution, self._shuffling.shuffler, self._pseudonym)
