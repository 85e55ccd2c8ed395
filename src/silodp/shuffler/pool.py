"""Open boxes and add their counts, without input or output.

The separate counts exist in this file's functions only. The shuffler passes on counts and not
literal bits: a permutation of bits reveals no more than their sum, and takes d K (g + b) bits a
silo.

**Which boxes count.** A box counts if it opens for this round, is signed by a pseudonym on the
roster, claims at most `largest` records, and has the request's bits and coordinates. Each pseudonym
has one box; of several, the one with the smallest SHA-256. From these boxes, every contribution
that demands a total of more records than all remaining ones have is removed. This is repeated until
every demand is met. The result is the largest set in which each demand is met. It depends on the
boxes alone and not on their order. A member with a huge demand excludes only itself. This is safe:
a contribution leaves only within a total that meets its own demand, and a removed contribution is
in no total at all.

A total needs two contributions, whatever they demand: a total of one is that silo's own counts.

`records` is what members claim. Against members who lie, or who reveal their noise to the server,
only `largest` helps. c such members can invent at most c x largest of the records that a silo
demands. So a silo that fears c of them demands that many more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from silodp.core.errors import Refused
from silodp.core.protocol.box import Contribution, add_counts, open_box
from silodp.core.protocol.relay import Passed, Request


class NoTotal(Refused):
    """There is no total to pass on. `dropped` has the reason for each dropped box, by SHA-256."""

    def __init__(self, code: str, dropped: dict[str, str]) -> None:
        super().__init__(code)
        self.dropped = dropped


class Pool:
    """Open boxes with the shuffler's key, and add those of its members."""

    def __init__(
        self, private_key: X25519PrivateKey, roster: Collection[str], *, largest: int
    ) -> None:
        self._key = private_key
        self._roster = frozenset(roster)
        self._largest = largest

    def total(self, request: Request) -> Passed:
        """Return the total of the boxes that count.

        Raise NoTotal("too-few") or NoTotal("range") if there is none.
        """
        taken: dict[str, tuple[str, Contribution]] = {}
        dropped: dict[str, str] = {}
        boxes = sorted((hashlib.sha256(box).hexdigest(), box) for box in set(request.boxes))
        for digest, box in boxes:
            try:
                pseudonym, contribution = self._opened(box, request)
                if pseudonym in taken:
                    raise Refused("duplicate")
                taken[pseudonym] = digest, contribution
            except Refused as refusal:
                dropped[digest] = refusal.code
        left, records = _satisfied(dict(taken.values()))
        dropped |= {digest: "too-few" for digest, _ in taken.values() if digest not in left}
        if len(left) < 2:
            raise NoTotal("too-few", dropped)
        if records * request.bits >= 2**62:
            raise NoTotal("range", dropped)
        return Passed(
            request.round,
            len(left),
            records,
            add_counts([c.counts for c in left.values()]),
            dropped,
        )

    def _opened(self, box: bytes, request: Request) -> tuple[str, Contribution]:
        contribution, pseudonym = open_box(box, request.round, self._key)
        if pseudonym not in self._roster:
            raise Refused("stranger")
        if contribution.records > self._largest:
            raise Refused("records")
        if (contribution.bits, len(contribution.counts)) != (request.bits, request.dimension):
            raise Refused("differs")
        return pseudonym, contribution


def _satisfied(contributions: dict[str, Contribution]) -> tuple[dict[str, Contribution], int]:
    """Return the largest set of contributions whose demands are met, and its number of records."""
    while True:
        records = sum(c.records for c in contributions.values())
        left = {digest: c for digest, c in contributions.items() if c.demanded <= records}
        if len(left) == len(contributions):
            return left, records
        contributions = left
