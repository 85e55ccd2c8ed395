"""The shuffler's role without I/O: boxes in, one total out. The separate numbers live in this
file's functions, and end there.

**Which boxes count.** Those that open for this round, are signed by a pseudonym on the roster, and
have the request's coordinates; one for each pseudonym (of several, the one with the smallest
SHA-256). From these, every contribution that demands a total of more silos than are left is taken
out, again and again until none does. What is left is the largest set in which each demand is met,
so it depends on the boxes alone and not on their order; one member with a huge demand keeps only
itself out. This is safe: a contribution leaves only within a total that meets its own demand, and
a member that was taken out is in no total at all.

A total needs two contributions, whatever they demand: a total of one is that silo's own numbers.

Each member has one share of the total's noise, the same for all. Members who tell the server
theirs, or add none, are as many shares fewer: a silo that fears c of them demands c silos more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from silodp.core.errors import Refused
from silodp.core.protocol.box import Contribution, add_numbers, open_box
from silodp.core.protocol.relay import Passed, Request


class NoTotal(Refused):
    """There is no total to pass on. `dropped` has the reason for each dropped box, by SHA-256."""

    def __init__(self, code: str, dropped: dict[str, str]) -> None:
        super().__init__(code)
        self.dropped = dropped


class Pool:
    """Open boxes with the shuffler's key, and add those of its members."""

    def __init__(self, private_key: X25519PrivateKey, roster: Collection[str]) -> None:
        self._key = private_key
        self._roster = frozenset(roster)

    def total(self, request: Request) -> Passed:
        """Return the total of the boxes that count; NoTotal("too-few") if there is none."""
        taken: dict[str, tuple[str, Contribution]] = {}
        dropped: dict[str, str] = {}
        for digest, box in sorted(
            (hashlib.sha256(box).hexdigest(), box) for box in set(request.boxes)
        ):
            try:
                pseudonym, contribution = self._opened(box, request)
                if pseudonym in taken:
                    raise Refused("duplicate")
                taken[pseudonym] = digest, contribution
            except Refused as refusal:
                dropped[digest] = refusal.code
        left = _satisfied(dict(taken.values()))
        dropped |= {digest: "too-few" for digest, _ in taken.values() if digest not in left}
        if len(left) < 2:
            raise NoTotal("too-few", dropped)
        total = add_numbers([c.numbers for c in left.values()])
        return Passed(request.round, len(left), total, dropped)

    def _opened(self, box: bytes, request: Request) -> tuple[str, Contribution]:
        contribution, pseudonym = open_box(box, request.round, self._key)
        if pseudonym not in self._roster:
            raise Refused("stranger")
        if len(contribution.numbers) != request.dimension:
            raise Refused("differs")
        return pseudonym, contribution


def _satisfied(contributions: dict[str, Contribution]) -> dict[str, Contribution]:
    """Return the largest set of contributions in which each one's demand is met."""
    while True:
        silos = len(contributions)
        left = {digest: c for digest, c in contributions.items() if c.demanded <= silos}
        if len(left) == silos:
            return left
        contributions = left
