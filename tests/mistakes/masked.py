"""Mistakes with masks: each takes the place of the gate's masker."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from mistakes import Mistakes, during, instead
from silodp.core.errors import Refused
from silodp.core.protocol.codec import Envelope
from silodp.core.protocol.masks import MODULI, offered
from silodp.silo.service import masking
from silodp.silo.service.masking import Masker, _Run

OF_MASKS = Mistakes()
plant = OF_MASKS.plant


def planted(name: str, method: str, part: str, mistaken: Callable[..., Any]) -> type[Masker]:
    """The shipped masker, in whose `method` this takes the place of what `masking` calls `part`."""
    return plant(name, "masker")(
        during(Masker, method, lambda masker, words: instead(masking, part, mistaken))
    )


# The pair's key does not depend on the question: the difference of two answers has no mask.
OneMask = planted(
    "mask reused between queries",
    "hide",
    "masked",
    lambda shipped, *words: shipped(*words[:4], "0" * 64, words[5]),
)
# A server puts keys of its own beside the pinned identities, and takes every mask off.
Unsigned = planted(
    "unsigned key accepted", "check", "is_signed", lambda shipped, row, **about: True
)


def believing(silos: Callable[[Masker, Envelope], int]) -> Callable[..., None]:
    """A check that finds as many shares in the table as this says."""

    def check(self: Masker, envelope: Envelope, records: int) -> None:
        asked = envelope.query.mechanism
        most = replace(asked, counted=min(asked.counted, 1))  # type: ignore[type-var]
        Masker.check(
            self, replace(envelope, query=replace(envelope.query, mechanism=most)), records
        )
        if asked.counted > silos(self, envelope):
            raise Refused("contributions")

    return check


@plant("noise of absent silos counted", "masker")
class AbsentNoise(Masker):
    """What the query says is what the price counts on, whoever is in the table."""

    check = believing(lambda masker, envelope: 2**60)


@plant("noise of colluding silos counted", "masker")
class TrustingAll(Masker):
    """The price counts on everybody in the table."""

    check = believing(lambda masker, envelope: len(masking.read_table(envelope.cohort)))


@plant("numbers without masks", "masker")
class Bare(Masker):
    """The server can add the numbers up itself."""

    def hide(self, asker: str, envelope: Envelope, numbers: np.ndarray) -> bytes:
        return numbers.astype(MODULI[envelope.query.mechanism.modulus]).tobytes()


@plant("cohort not checked", "masker")
class AnyCohort(Masker):
    def check(self, envelope: Envelope, records: int) -> None:
        pass


@plant("unpinned key accepted", "masker")
class Anybody(Masker):
    """Whoever is in the table counts as known: a server invents silos until one silo is alone among
    its own.
    """

    def check(self, envelope: Envelope, records: int) -> None:
        rows = masking.read_table(envelope.cohort)
        known = self.policy
        self.policy = replace(
            known,
            members=tuple(
                f"any-{i} {r.identity.hex()}" for i, r in enumerate(rows) if r.identity != self._own
            ),
        )
        super().check(envelope, records)
        self.policy = known


@plant("own records not checked", "masker")
class OwnRow(Masker):
    """The table may name more records of this silo than it has."""

    def check(self, envelope: Envelope, records: int) -> None:
        (mine,) = (row for row in masking.read_table(envelope.cohort) if row.identity == self._own)
        super().check(envelope, mine.records)


@plant("same numbers under two cohorts", "masker")
class OneDraw(Masker):
    """A second attempt at a round masks the numbers of the first for its smaller cohort: two totals
    differ by the silo that left, without noise.
    """

    def hide(self, asker: str, envelope: Envelope, numbers: np.ndarray) -> bytes:
        kept = vars(self).setdefault("kept", {}).setdefault((envelope.run, envelope.round), numbers)
        return super().hide(asker, envelope, kept)


@plant("wrap-around not checked", "masker")
class Wrapping(Masker):
    def check(self, envelope: Envelope, records: int) -> None:
        wide = replace(envelope.query.mechanism, modulus=64)  # type: ignore[type-var]
        super().check(replace(envelope, query=replace(envelope.query, mechanism=wide)), records)


@plant("keys that outlive a restart", "masker")
class OldKeys(Masker):
    """A run's key follows from the identity: after a restart an old question is answered, charged
    or not, with other noise under the same masks.
    """

    def offer(self, asker: str, run: str):
        seed = hashlib.sha256(self._identity.private_bytes_raw() + run.encode()).digest()
        key = X25519PrivateKey.from_private_bytes(seed)
        self._epoch = bytes(16)
        row = offered(self._identity, key, definition=self._definition, run=run, epoch=self._epoch)
        self._runs[asker, run] = _Run(key, row)
        return row

    def begin(self, asker: str, envelope: Envelope, charged: Container[str]) -> None:
        self.offer(asker, envelope.run)
        super().begin(asker, envelope, charged)


@plant("keys that outlive their answer", "masker")
class KeptKeys(Masker):
    """Whoever breaks into the process at the end of a run takes the masks off all that was sent in
    it.
    """

    def forget(self, asker: str, envelope: Envelope) -> None:
        pass


@plant("attempts without end", "masker")
class Tireless(Masker):
    """Whoever loses frames drains a budget."""

    def begin(self, asker: str, envelope: Envelope, charged: Container[str]) -> None:
        super().begin(asker, envelope, charged)
        self._runs[asker, envelope.run].asked.clear()
