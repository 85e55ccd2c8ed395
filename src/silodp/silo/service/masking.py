"""A gate's part in masked totals: the officer's table [masks], the keys of runs, and what must hold
before anything is charged.

A key is made for one answer, of one run in one life of the process (an epoch). It is in memory
alone, and gone from there once that answer is stored: who breaks in later finds no key to anything
that was sent, and after a restart no old question can be answered that was not before.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from silodp.core.errors import BadInput, Refused
from silodp.core.events import TotalEvent
from silodp.core.protocol.codec import Envelope
from silodp.core.protocol.masks import (
    EPOCH,
    MODULI,
    ROW,
    Row,
    is_signed,
    masked,
    offered,
    read_table,
    secret_with,
)
from silodp.host.atomic import write
from silodp.host.tables import check_number, check_text, check_whole, of_table, table_text, toml
from silodp.silo.service.policy import own_table
from silodp.silo.service.trust import Trust

RUNS = 64
"""Runs of one asker that a gate remembers at once; of more the oldest are forgotten, with keys that
no answer has used, and ask for a key again.
"""
COMMENTS = {
    "members": (
        'The other silos that may be in a total with this one: "NAME KEY" each, by `silodp '
        "silo trust`, once its words were read over the telephone."
    ),
    "colluding": (
        "How many of them may tell the server their noise: epsilon holds against so many and "
        "the server together."
    ),
    "least": "Silos in a total, this one among them, at least.",
    "attempts": "How often one round may be asked, each time at its price, when others drop out.",
    "maximum_local_epsilon": (
        "What the server may learn with all other silos together, over all that is ever asked, "
        "by a filter: set it once; inf for no limit."
    ),
}


@dataclass(frozen=True)
class Masking:
    """With whom the silo adds up its numbers, and on what condition: the table [masks] of a policy
    file.
    """

    members: tuple[str, ...]
    colluding: int
    least: int
    attempts: int = 3
    maximum_local_epsilon: float = math.inf

    def __post_init__(self) -> None:
        if not isinstance(self.members, tuple):
            raise BadInput(
                f"policy: members is {self.members!r:.100}; it must be a list, which "
                "`silodp silo trust` fills"
            )
        for member in self.members:
            check_text(
                "policy",
                "members",
                member,
                r"[A-Za-z0-9._-]{1,64} [0-9a-f]{64}",
                "a name and a public key of 64 hexadecimal digits",
            )
        if len(self.identities) < len(self.members):
            raise BadInput("policy: members names one key twice; each silo has one of its own")
        check_whole("policy", "colluding", self.colluding, 0, 2**20)
        check_whole(
            "policy", "least", self.least, self.colluding + 2, 2**20
        )  # fewer would leave nobody to hide among
        check_whole("policy", "attempts", self.attempts, 1, 2**20)
        if self.maximum_local_epsilon != math.inf:  # which sets no limit
            check_number("policy", "maximum_local_epsilon", self.maximum_local_epsilon, above=0)

    @classmethod
    def load(cls, path: str | Path) -> Masking | None:
        """Return the table in a policy file, or None where it has none."""
        table = own_table(path, "masks", "members, colluding and least")
        if table is None:
            return None
        return of_table("policy", cls, table)

    @property
    def identities(self) -> frozenset[bytes]:
        return frozenset(bytes.fromhex(member.rpartition(" ")[2]) for member in self.members)


def table_of(masking: Masking) -> str:
    """Return the table [masks] of a policy file, each field with its comment."""
    return f"[masks]\n{table_text(asdict(masking), COMMENTS)}"


def pin(path: Path, members: Iterable[str]) -> Masking:
    """Add these members to the policy's table [masks]. The rest of the file stays as it is. The
    gate must be restarted.

    Raise BadInput for a member with another key than the one pinned under its name. The officer
    replaces such a key with an editor.
    """
    masking = Masking.load(path)
    if masking is None:
        raise BadInput(
            f"{path} has no table [masks]; `silodp silo init --least N` makes a policy with one"
        )
    before = {name: key for name, _, key in (member.partition(" ") for member in masking.members)}
    for member in members:
        name, _, key = member.partition(" ")
        if before.setdefault(name, key) != key:
            raise BadInput(
                f"{path} has another key of {name} pinned; if its officer confirms the "
                "new key, remove that line first"
            )
    made = replace(masking, members=tuple(f"{name} {key}" for name, key in before.items()))
    text = path.read_text("utf-8")
    line = re.compile(r"^members = \[[^\]]*\]", re.MULTILINE)
    if len(line.findall(text)) != 1:
        raise BadInput(
            f"{path} has no line with members = [...] of its own; write it so, and try again"
        )
    write(
        path,
        line.sub(lambda _: f"members = {toml(made.members)}", text),
        mode=path.stat().st_mode & 0o777,
    )
    return made


@dataclass
class _Run:
    key: X25519PrivateKey | None = None
    """None once an answer has used it."""
    row: Row | None = None
    asked: dict[str, set[str]] = field(default_factory=dict)
    """By round: the digests of its attempts that were charged."""
    latest: tuple[str, str] = ("", "")
    """Round and digest of the latest attempt, which may have been charged or refused."""


class Masker(Trust):
    """Masks the numbers of one silo. Which tables it accepts follows from the query and the policy;
    what it has answered before, from neither.
    """

    def __init__(self, masking: Masking, identity: Ed25519PrivateKey, definition: str) -> None:
        self.policy = masking
        self.local_limit = masking.maximum_local_epsilon
        self.room = ROW * (len(masking.members) + 1)
        self._identity = identity
        self._definition = definition
        self._own = identity.public_key().public_bytes_raw()
        self._epoch = secrets.token_bytes(EPOCH)
        self._runs: dict[tuple[str, str], _Run] = {}
        if self._own in masking.identities:
            raise BadInput("policy: members names this silo's own key; it must list the others")

    def offer(self, asker: str, run: str) -> Row:
        """Return the silo's key for the next answer in this run: the same until there is one, or
        the gate stops.
        """
        if (asker, run) not in self._runs:
            mine = [who for who in self._runs if who[0] == asker]
            if len(mine) >= RUNS:
                del self._runs[mine[0]]
            self._runs[asker, run] = _Run()
        kept = self._runs[asker, run]
        if kept.key is None or kept.row is None:
            kept.key = X25519PrivateKey.generate()
            kept.row = offered(
                self._identity, kept.key, definition=self._definition, run=run, epoch=self._epoch
            )
        return kept.row

    def forget(self, asker: str, envelope: Envelope) -> None:
        """Delete the key if it is in the table of this query, whose answer is stored. The next
        question needs, and its key round gets, another.
        """
        kept = self._runs.get((asker, envelope.run))
        keys = {row.key for row in read_table(envelope.cohort)}
        if kept and kept.row and kept.row.key in keys:
            kept.key = kept.row = None

    def check(self, envelope: Envelope, records: int) -> None:
        """Refuse a cohort on which the silo cannot count as the price does, and a total that could
        wrap around.
        """
        query = envelope.query
        asked = query.mechanism
        if not asked.masked:
            raise Refused("shuffle")
        own = int(asked.sampling.batch(records))
        rows = read_table(envelope.cohort)
        mine = [row for row in rows if row.identity == self._own]
        if not mine or len(rows) < self.policy.least or mine[0].records != own:
            raise Refused("cohort")
        if not {row.identity for row in rows} - {self._own} <= self.policy.identities:
            raise Refused("unpinned")
        if not all(is_signed(row, definition=self._definition, run=envelope.run) for row in rows):
            raise Refused("cohort")
        # Every silo adds the same share, so any `colluding` of them take so many shares away.
        if not 1 <= asked.counted <= len(rows) - self.policy.colluding:
            raise Refused("contributions")
        together = sum(row.records for row in rows)
        dim = query.statistic.shape[-1]
        largest = asked.largest(dim, together, len(rows))
        if asked.modulus not in MODULI or not largest < 2 ** (asked.modulus - 1):
            raise Refused("modulus")

    def check_planned(self, event: TotalEvent) -> None:
        """Refuse to reserve budget for a total that counts on more noise of others than any cohort
        has.

        The cohort itself is not known before its totals are asked: a hold reserves what they cost
        with the shares that it states.
        """
        if not 1 <= event.counted <= len(self.policy.members) + 1 - self.policy.colluding:
            raise Refused("contributions")

    def begin(self, asker: str, envelope: Envelope, charged: Container[str]) -> None:
        """Refuses, before any charge, a table with another key of this silo than that which is kept
        for this run, one in which a key has no secret with it, and one attempt too many at a round.
        Attempts count that were charged: one that rate or budget refused may be made again, with
        any cohort."""
        run = self._runs.get((asker, envelope.run), _Run())
        rows = read_table(envelope.cohort)
        if not (run.key and run.row) or not any(
            row.key == run.row.key for row in rows if row.identity == self._own
        ):
            raise Refused("epoch")
        for row in rows:
            if row.identity != self._own:
                secret_with(run.key, row)
        round, digest = run.latest
        if digest in charged:
            run.asked.setdefault(round, set()).add(digest)
        run.latest = envelope.round, envelope.shuffle_round
        if len(run.asked.get(envelope.round, set()) | {envelope.shuffle_round}) > (
            self.policy.attempts
        ):
            raise Refused("attempts")

    def hide(self, asker: str, envelope: Envelope, numbers: np.ndarray) -> bytes:
        """Return the numbers under the masks of this question's cohort."""
        asked = envelope.query.mechanism
        rows = read_table(envelope.cohort)
        own = self._runs[asker, envelope.run].key
        assert own is not None
        (mine,) = (row for row in rows if row.identity == self._own)
        return masked(numbers, own, mine, rows, envelope.shuffle_round, asked.modulus)
